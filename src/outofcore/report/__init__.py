"""What a plan says and what a step did, for people: numbers, text, and pages with pictures."""

from outofcore.report.content import page_content
from outofcore.report.data import MemoryOverTime, Moved, StepReport, memory_over_time, step_report
from outofcore.report.page import write_report, write_sweep
from outofcore.report.text import columns, moved_text, step_text

__all__ = [
    "MemoryOverTime",
    "Moved",
    "StepReport",
    "columns",
    "memory_over_time",
    "moved_text",
    "page_content",
    "step_report",
    "step_text",
    "write_report",
    "write_sweep",
]
