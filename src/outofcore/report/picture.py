"""The memory of a step over time, as one HTML file that needs no other."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

from outofcore.graph import StepGraph, StorageKind
from outofcore.program import Program, Queue, Timeline
from outofcore.report.data import WORKSPACE, MemoryOverTime, memory_over_time, queue_spans
from outofcore.units import MIB, format_bytes, format_seconds

# Colours that stay apart for the colour-blind (Okabe and Ito), from what persists to what passes.
_COLOURS = {
    StorageKind.CONSTANT.value: "#999999",
    StorageKind.BUFFER.value: "#666666",
    StorageKind.PARAMETER.value: "#0072B2",
    StorageKind.OPTIMIZER_STATE.value: "#56B4E9",
    StorageKind.GRADIENT.value: "#CC79A7",
    StorageKind.ACTIVATION.value: "#E69F00",
    StorageKind.INPUT.value: "#F0E442",
    StorageKind.OUTPUT.value: "#000000",
    WORKSPACE: "#009E73",
}
_QUEUES = {Queue.COPY_IN: "#56B4E9", Queue.COPY_OUT: "#D55E00", Queue.COMPUTE: "#444444"}
_BUDGET = "#D00000"
_MEMORY_SHARE = 0.72  # of a panel; below it lie the queues
_BETWEEN = 0.09  # of the page, between panels
_FINEST = 4000  # pauses shorter than this part of a step cannot be seen

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body style="margin:0;font-family:sans-serif">
<div id="picture" style="width:100%;height:{height}px"></div>
<script>{library}</script>
<script>
const figure = {figure};
Plotly.newPlot("picture", figure.data, figure.layout, {{responsive: true, displaylogo: false}});
</script>
</body>
</html>
"""

_Object = dict[str, object]


@dataclass(frozen=True)
class _Panel:
    """One timeline on the page: memory above, the queues below, on one axis of time."""

    number: int  # from 0 at the top
    name: str
    program: Program
    timeline: Timeline
    memory: MemoryOverTime
    bottom: float  # of the page, from 0 to 1
    top: float

    @property
    def _upper(self) -> str:
        """Plotly's number of the axes of the memory; the first has none."""
        return "" if self.number == 0 else str(2 * self.number + 1)

    @property
    def _lower(self) -> str:
        return str(2 * self.number + 2)

    def traces(self) -> list[_Object]:
        times, upper, lower = self.memory.times, self._upper, self._lower
        found: list[_Object] = [
            {
                "type": "scatter",
                "x": [round(time, 6) for time in times],
                "y": [round(held / MIB, 3) for held in self.memory.held[kind]],
                "xaxis": f"x{upper}",
                "yaxis": f"y{upper}",
                "stackgroup": f"panel {self.number}",
                "name": kind.replace("_", " "),
                "legendgroup": kind,
                "showlegend": self.number == 0,
                "line": {"shape": "hv", "width": 0.5, "color": colour},
                "fillcolor": colour,
                "hovertemplate": "%{y:,.1f} MiB",
            }
            for kind, colour in _COLOURS.items()
            if kind in self.memory.held
        ]
        spans = queue_spans(self.program, self.timeline, closest=self.timeline.step_seconds / _FINEST)
        for queue, colour in _QUEUES.items():
            # A line with a break after each span.
            xs = [x for start, end in spans[queue] for x in (round(start, 6), round(end, 6), None)]
            found.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": xs,
                    "y": [queue.value] * len(xs),
                    "xaxis": f"x{lower}",
                    "yaxis": f"y{lower}",
                    "line": {"width": 14, "color": colour},
                    "name": queue.value,
                    "showlegend": False,
                    "hoverinfo": "x+name",
                }
            )
        return found

    def axes(self, longest: float, highest: float) -> _Object:
        middle = self.top - (self.top - self.bottom) * _MEMORY_SHARE
        upper, lower = self._upper, self._lower
        # One scale for all panels, so that they can be compared by eye.
        times: _Object = {"range": [0, longest * 1.01], "zeroline": False}
        follows: _Object = {**times, "matches": "x"}  # zooming into one zooms into all
        return {
            f"xaxis{upper}": {**(follows if upper else times), "anchor": f"y{upper}", "showticklabels": False},
            f"yaxis{upper}": {
                "domain": [middle + 0.01, self.top],
                "anchor": f"x{upper}",
                "range": [0, highest],
                "title": {"text": "MiB on the device"},
            },
            f"xaxis{lower}": {**follows, "anchor": f"y{lower}", "title": {"text": "seconds"}},
            f"yaxis{lower}": {
                "domain": [self.bottom, middle - 0.01],
                "anchor": f"x{lower}",
                "type": "category",
                "categoryorder": "array",
                "categoryarray": [queue.value for queue in _QUEUES],
                "range": [-0.6, len(_QUEUES) - 0.4],
                "fixedrange": True,
            },
        }

    def heading(self) -> _Object:
        text = (
            f"{self.name}: {format_seconds(self.timeline.step_seconds)} a step, "
            f"{format_bytes(self.memory.peak_bytes)} held at most"
        )
        place = {"xref": "paper", "yref": "paper", "x": 0, "y": self.top, "xanchor": "left", "yanchor": "bottom"}
        return {**place, "text": html.escape(text), "showarrow": False, "font": {"size": 15}}

    def line(self, budget: float) -> _Object:
        ends = {"x0": 0, "x1": 1, "xref": f"x{self._upper} domain", "y0": budget, "y1": budget}
        return {**ends, "type": "line", "yref": f"y{self._upper}", "line": {"color": _BUDGET, "dash": "dash"}}


def write_picture(
    path: Path,
    graph: StepGraph,
    program: Program,
    timelines: Sequence[tuple[str, Timeline]],
    *,
    budget: int,
    title: str,
) -> None:
    """Draw the bytes held over a step by kind of storage, the budget as a line, and when each queue was at work.

    The file holds everything that it shows, the plotting library (about 5 MB) included.

    Args:
        path: the HTML file; its folder is created.
        graph: what the program was lowered from.
        program: what the timelines are of.
        timelines: each with its name, such as "predicted"; a panel each, from the top, on one scale. At least one.
        budget: bytes.
        title: the heading, as plain text.

    Raises:
        OSError: the file cannot be written.
    """
    height = (1 - _BETWEEN * (len(timelines) - 1)) / len(timelines)
    panels: list[_Panel] = []
    for number, (name, timeline) in enumerate(timelines):
        top = 1 - number * (height + _BETWEEN)
        memory = memory_over_time(graph, program, timeline)
        panels.append(_Panel(number, name, program, timeline, memory, max(top - height, 0.0), top))
    longest = max(panel.timeline.step_seconds for panel in panels)
    highest = 1.06 * max(budget, *(panel.memory.peak_bytes for panel in panels)) / MIB
    # A shape has no entry in the legend: a line without points stands in for it.
    dashed: _Object = {"color": _BUDGET, "dash": "dash"}
    named: _Object = {
        "x": [None],
        "y": [None],
        "mode": "lines",
        "line": dashed,
        "name": f"budget {format_bytes(budget)}",
    }
    layout: _Object = {
        "title": {"text": html.escape(title)},
        "hovermode": "x",
        "legend": {"traceorder": "reversed"},
        "margin": {"t": 100, "r": 20},
        "annotations": [panel.heading() for panel in panels],
        "shapes": [panel.line(budget / MIB) for panel in panels],
    }
    for panel in panels:
        layout.update(panel.axes(longest, highest))
    figure: _Object = {"data": [*(trace for panel in panels for trace in panel.traces()), named], "layout": layout}
    write_page(path, figure, title=title, height=140 + 400 * len(panels))


def write_page(path: Path, figure: Mapping[str, object], *, title: str, height: int) -> None:
    """Write a figure of plotly's as a page that holds everything it shows, the plotting library included.

    Args:
        path: the HTML file; its folder is created.
        figure: its ``data`` and ``layout``.
        title: of the page, as plain text.
        height: in pixels.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        _PAGE.format(
            title=html.escape(title),
            height=height,
            library=get_plotlyjs(),
            # No text of ours may end the script early.
            figure=json.dumps(figure).replace("</", "<\\/"),
        ),
        encoding="utf-8",
    )
