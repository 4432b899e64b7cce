"""Reports of plans and measured steps: figures, text, and HTML pages."""

from outofcore.report.content import Page, page_content
from outofcore.report.data import MemoryOverTime, Moved, StepReport, memory_over_time, step_report
from outofcore.report.notebook import ReportPath, facts_html, table_html
from outofcore.report.page import write_report, write_sweep
from outofcore.report.text import columns, moved_text, step_text

__all__ = [
    "MemoryOverTime",
    "Moved",
    "Page",
    "ReportPath",
    "StepReport",
    "columns",
    "facts_html",
    "memory_over_time",
    "moved_text",
    "page_content",
    "step_report",
    "step_text",
    "table_html",
    "write_report",
    "write_sweep",
]
