"""Lines over a common axis, as one HTML file that needs no other."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outofcore.report.picture import write_page

# Okabe and Ito: colours that stay apart for the colour-blind.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666", "#F0E442", "#000000")


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]
    bold: bool = False


def write_chart(
    path: Path, lines: Sequence[Line], *, title: str, x: str, y: str, floor: tuple[str, float] | None = None
) -> None:
    """Draw lines, the x axis logarithmic.

    Args:
        path: the HTML file; its folder is created.
        lines: what to draw; those without points are left out.
        title: the heading, as plain text.
        x: what the x axis shows, with its unit.
        y: likewise.
        floor: name and height of a dashed line below which nothing can lie.

    Raises:
        OSError: the file cannot be written.
    """
    data: list[dict[str, object]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": html.escape(line.name),
            "x": [point[0] for point in line.points],
            "y": [point[1] for point in line.points],
            "line": {"width": 4 if line.bold else 2, "color": _COLOURS[number % len(_COLOURS)]},
        }
        for number, line in enumerate(lines)
        if line.points
    ]
    shapes: list[dict[str, object]] = []
    if floor is not None:
        dashed = {"color": "#444444", "dash": "dash"}
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": floor[1], "y1": floor[1]}
        shapes.append({**ends, "type": "line", "line": dashed})
        # A shape has no entry in the legend: a line without points stands in for it.
        data.append({"x": [None], "y": [None], "mode": "lines", "line": dashed, "name": html.escape(floor[0])})
    layout: dict[str, object] = {
        "title": {"text": html.escape(title)},
        "xaxis": {"title": {"text": x}, "type": "log"},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero"},
        "shapes": shapes,
        "hovermode": "x unified",
    }
    write_page(path, {"data": data, "layout": layout}, title=title, height=640)
