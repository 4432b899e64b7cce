"""Reports as plain text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.report.data import StepReport
from outofcore.units import format_bytes, format_seconds


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def copies_text(report: StepReport) -> str:
    if not report.moved:
        return "  nothing moves: all tensors stay on the device"
    rows = [("per step", "tensors", "evictions", "evicted", "fetches", "fetched")]
    rows += [
        (
            moved.kind.value.replace("_", " "),
            str(moved.storages),
            str(moved.copies_out),
            format_bytes(moved.bytes_out),
            str(moved.copies_in),
            format_bytes(moved.bytes_in),
        )
        for moved in report.moved
    ]
    rows.append(
        (
            "total",
            str(sum(moved.storages for moved in report.moved)),
            str(sum(moved.copies_out for moved in report.moved)),
            format_bytes(report.bytes_out),
            str(sum(moved.copies_in for moved in report.moved)),
            format_bytes(report.bytes_in),
        )
    )
    return columns(rows)


def step_text(report: StepReport) -> str:
    waiting = report.seconds - report.compute_seconds
    recomputed_text = f"; ops recomputed: {report.recomputed}" if report.recomputed else ""
    return (
        f"  memory  {format_bytes(report.arena_bytes)} of {format_bytes(report.budget)} reserved, "
        f"peak {format_bytes(report.peak_bytes)} (policy {report.policy})\n"
        f"  time    {format_seconds(report.seconds)}: ops {format_seconds(report.compute_seconds)}, "
        f"waiting and overhead {format_seconds(max(waiting, 0.0))}{recomputed_text}"
    )
