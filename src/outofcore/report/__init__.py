"""What a plan says and what a step did, for people: numbers, text, and a picture."""

from outofcore.report.chart import Line, write_chart
from outofcore.report.data import MemoryOverTime, Moved, StepReport, memory_over_time, queue_spans, step_report
from outofcore.report.picture import write_picture
from outofcore.report.text import columns, moved_text, step_text

__all__ = [
    "Line",
    "MemoryOverTime",
    "Moved",
    "StepReport",
    "columns",
    "memory_over_time",
    "moved_text",
    "queue_spans",
    "step_report",
    "step_text",
    "write_chart",
    "write_picture",
]
