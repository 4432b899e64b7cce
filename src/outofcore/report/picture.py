"""The memory of a step over time, as one HTML file that needs no other."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from outofcore.graph import StepGraph, StorageKind
from outofcore.program import Program, Queue, Timeline
from outofcore.report.data import WORKSPACE, memory_over_time, queue_spans
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

_Figure = dict[str, object]


def write_picture(
    path: Path, graph: StepGraph, program: Program, budget: int, timelines: Sequence[tuple[str, Timeline]], title: str
) -> None:
    """Draw the bytes held over a step by kind of storage, the budget as a line, and when each queue was at work.

    The file holds everything that it shows, the plotting library (about 5 MB) included.

    Args:
        path: the HTML file; its folder is created.
        graph: what the program was lowered from.
        program: what the timelines are of.
        budget: bytes.
        timelines: each with its name, such as "predicted"; a panel each, from the top, on one scale.
        title: the heading, as plain text.

    Raises:
        OSError: the file cannot be written.
    """
    figure = {"data": list[_Figure](), "layout": dict[str, object]()}
    data, layout = figure["data"], figure["layout"]
    if not isinstance(data, list) or not isinstance(layout, dict):
        raise TypeError
