"""Draw step time against memory as an SVG: one panel per workload, one curve per tool.

Deterministic; follows the reader's light or dark scheme. Colours are Okabe and Ito's (Color Universal Design, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from outofcore.units import GIB, MIB, format_bytes, format_seconds

_WIDTH, _PANEL_HEIGHT, _MARGIN, _GAP = 960, 330, 24, 30
_HEAD, _LEGEND_ROW, _BELOW_LEGEND = 70, 24, 16
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 68, 44
# (light, dark) for each curve, in order.
_COLOURS = (
    ("#333333", "#dddddd"),
    ("#8a8a8a", "#9a9a9a"),
    ("#c47a00", "#f0b040"),
    ("#00805c", "#30c090"),
    ("#b0508a", "#e090c0"),
    ("#0064b4", "#56b4f9"),
)
_SHAPES = ("circle", "ring", "square", "triangle", "diamond", "circle")
_HINT = "Each point is a process. Further left: less memory. Further down: faster."
_LOG_FROM = 5.0  # the axis is logarithmic from this ratio of largest to smallest step time


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    name: str


@dataclass(frozen=True)
class Curve:
    """The points of one tool; a ``strong`` curve is thick and drawn on top."""

    label: str
    points: tuple[Point, ...]
    strong: bool = False


@dataclass(frozen=True)
class Panel:
    """One workload. All panels list the same curves in the same order; a curve may be empty."""

    title: str
    subtitle: str
    curves: tuple[Curve, ...]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the SVG text, with two panels per row; colours repeat after six curves."""
    columns = min(2, max(1, len(panels)))
    width = (_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) / columns
    labels = (
        [(i, c.label) for i, c in enumerate(panels[0].curves) if any(p.curves[i].points for p in panels)]
        if panels
        else []
    )
    head = _HEAD + _LEGEND_ROW * math.ceil(len(labels) / 3) + _BELOW_LEGEND
    height = head + math.ceil(len(panels) / columns) * _PANEL_HEIGHT + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(_describe_panels(panels))}</desc>',
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="10"/>',
        f'<text class="head" x="{_MARGIN}" y="34">{escape(title)}</text>',
        f'<text class="dim" x="{_MARGIN}" y="56">{_HINT}</text>',
    ]
    for place, (index, label) in enumerate(labels):
        x = _MARGIN + (place % 3) * (_WIDTH - 2 * _MARGIN) / 3
        y = _HEAD + 14 + (place // 3) * _LEGEND_ROW
        strong = panels[0].curves[index].strong
        parts += [
            f'<path class="line c{index % 6}{" strong" if strong else ""}" d="M{_number(x)} {y}h28"/>',
            _marker(index, x + 14, y, ""),
            f'<text class="{"bold" if strong else "label"}" x="{_number(x + 36)}" y="{y + 4}">{escape(label)}</text>',
        ]
    for place, panel in enumerate(panels):
        x = _MARGIN + (place % columns) * (width + _GAP)
        y = head + (place // columns) * _PANEL_HEIGHT
        parts += _panel(panel, x, y, width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float, top: float, width: float) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    parts = [
        f'<text class="title" x="{_number(left)}" y="{_number(top + 16)}">{escape(panel.title)}</text>',
        f'<text class="dim" x="{_number(left)}" y="{_number(top + 33)}">{escape(panel.subtitle)}</text>',
    ]
    if not points:
        return parts
    x0, x1 = left + _LEFT, left + width - _RIGHT
    y0, y1 = top + _PANEL_HEIGHT - _BOTTOM, top + _TOP
    highest, lowest = max(p.y for p in points), min(p.y for p in points)
    unit, unit_name = (GIB, "GiB") if max(p.x for p in points) >= GIB / 2 else (MIB, "MiB")
    furthest = max(1.0, *(p.x for p in points)) * 1.05
    logarithmic = highest > _LOG_FROM * lowest
    if logarithmic:
        low, high = lowest / 1.25, highest * 1.15
        y_ticks = [
            base * 10**power for power in range(-6, 6) for base in (1, 2, 5) if low <= base * 10.0**power <= high
        ]
    else:
        low, high = 0.0, highest * 1.1
        y_ticks = _ticks(high)

    def at_x(value: float) -> float:
        return x0 + (x1 - x0) * max(value, 0) / furthest

    def at_y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if logarithmic else value / high
        return y0 - (y0 - y1) * share

    for tick in y_ticks:
        y = at_y(tick)
        parts += [
            f'<line class="grid" x1="{_number(x0)}" y1="{_number(y)}" x2="{_number(x1)}" y2="{_number(y)}"/>',
            f'<text class="tick" x="{_number(x0 - 6)}" y="{_number(y + 4)}" text-anchor="end">{tick:g} s</text>',
        ]
    for tick in _ticks(furthest / unit):
        x = at_x(tick * unit)
        parts += [
            f'<line class="grid" x1="{_number(x)}" y1="{_number(y0)}" x2="{_number(x)}" y2="{_number(y1)}"/>',
            f'<text class="tick" x="{_number(x)}" y="{_number(y0 + 17)}" text-anchor="middle">{tick:g}</text>',
        ]
    scale = " (logarithmic)" if logarithmic else ""
    parts += [
        f'<line class="axis" x1="{_number(x0)}" y1="{_number(y0)}" x2="{_number(x1)}" y2="{_number(y0)}"/>',
        f'<text class="tick" x="{_number((x0 + x1) / 2)}" y="{_number(y0 + 34)}" text-anchor="middle">'
        f"peak memory, {unit_name}</text>",
        f'<text class="tick" x="{_number(left)}" y="{_number(y1 - 10)}">step time{scale}</text>',
    ]
    for index, curve in sorted(enumerate(panel.curves), key=lambda item: item[1].strong):
        parts += _curve(index, curve, at_x, at_y)
    return parts


def _curve(index: int, curve: Curve, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> list[str]:
    parts: list[str] = []
    if len(curve.points) > 1:
        path = " ".join(f"{_number(at_x(p.x))},{_number(at_y(p.y))}" for p in curve.points)
        parts.append(f'<polyline class="line c{index % 6}{" strong" if curve.strong else ""}" points="{path}"/>')
    for point in curve.points:
        words = f"{point.name}: {format_seconds(point.y)} a step, peak {format_bytes(max(0, int(point.x)))}"
        parts.append(_marker(index, at_x(point.x), at_y(point.y), words))
    return parts


def _marker(index: int, x: float, y: float, words: str) -> str:
    title = f"<title>{escape(words)}</title>" if words else ""
    colour = f"c{index % 6}"
    shape = _SHAPES[index % len(_SHAPES)]
    match shape:
        case "circle" | "ring":
            return f'<circle class="{shape} {colour}" cx="{_number(x)}" cy="{_number(y)}" r="4.5">{title}</circle>'
        case "square":
            corners = ((-4, -4), (4, -4), (4, 4), (-4, 4))
        case "triangle":
            corners = ((0, -5.5), (5, 4), (-5, 4))
        case _:
            corners = ((0, -6), (6, 0), (0, 6), (-6, 0))
    outline = " ".join(f"{_number(x + dx)},{_number(y + dy)}" for dx, dy in corners)
    return f'<polygon class="point {colour}" points="{outline}">{title}</polygon>'


def _ticks(end: float) -> list[float]:
    """Return about five round values from zero to ``end``."""
    rough = end / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [round(i * step, 9) for i in range(int(end / step) + 1)]


def _describe_panels(panels: Sequence[Panel]) -> str:
    sentences: list[str] = []
    for panel in panels:
        runs = [
            f"{point.name} {format_seconds(point.y)} at {format_bytes(max(0, int(point.x)))}"
            for curve in panel.curves
            for point in curve.points
        ]
        sentences.append(f"{panel.title}: {'; '.join(runs)}.")
    return " ".join(sentences)


def _style() -> str:
    def scheme(index_of_scheme: int, paper: str, ink: str, dim: str, grid: str) -> str:
        rules = [
            f".paper{{fill:{paper}}}",
            f"text{{fill:{ink}}}",
            f".dim,.tick{{fill:{dim}}}",
            f".grid{{stroke:{grid}}}",
            f".axis{{stroke:{dim}}}",
        ]
        for index, colours in enumerate(_COLOURS):
            colour = colours[index_of_scheme]
            rules += [
                f".line.c{index},.ring.c{index}{{stroke:{colour}}}",
                f".circle.c{index},.point.c{index}{{fill:{colour}}}",
            ]
        rules.append(f".ring{{fill:{paper}}}")
        return "".join(rules)

    common = (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
        ".head{font-size:20px;font-weight:600}.title{font-size:16px;font-weight:600}.bold{font-weight:700}"
        ".dim,.tick{font-size:12px}.line{fill:none;stroke-width:1.5}.strong{stroke-width:3}.ring{stroke-width:2}"
        ".grid{stroke-width:.6}"
    )
    light = scheme(0, "#ffffff", "#1f2328", "#59636e", "#d1d9e0")
    dark = scheme(1, "#151b23", "#f0f6fc", "#9198a1", "#3d444d")
    return f"{common}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
