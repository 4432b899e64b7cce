"""Reports of plans and measured steps: figures, text, and HTML pages."""

from outofcore.report.content import Page, page_content
from outofcore.report.data import KindCopies, MemoryOverTime, StepReport, memory_over_time, step_report
from outofcore.report.notebook import ReportPath, facts_html, table_html
from outofcore.report.page import write_report, write_sweep
from outofcore.report.text import columns, copies_text, step_text

__all__ = [
    "KindCopies",
    "MemoryOverTime",
    "Page",
    "ReportPath",
    "StepReport",
    "columns",
    "copies_text",
    "facts_html",
    "memory_over_time",
    "page_content",
    "step_report",
    "step_text",
    "table_html",
    "write_report",
    "write_sweep",
]
