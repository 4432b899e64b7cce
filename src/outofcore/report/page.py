"""Self-contained HTML pages, made of their content, their style and the scripts that draw it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from outofcore.errors import InputError


def page_text(content: Mapping[str, object]) -> str:
    return _page("page.html", ("common.js", "curves.js", "time.js", "page.js"), content)


def _page(template: str, scripts: Sequence[str], content: Mapping[str, object]) -> str:
    """Fill a template with the title, styles, scripts, and the content as JSON."""
    assets = files("outofcore.report") / "assets"
    parts = {
        "TITLE": html.escape(str(content["title"])),
        "STYLE": (assets / "page.css").read_text(encoding="utf-8"),
        # The user's text must not end the script element early.
        "CONTENT": json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"),
        "CODE": "\n".join((assets / name).read_text(encoding="utf-8") for name in scripts),
    }
    page = (assets / template).read_text(encoding="utf-8")
    # In one pass, so that placeholders in inserted text are not replaced.
    pieces = page.split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def write_report(path: Path, content: Mapping[str, object]) -> None:
    _write(path, page_text(content))


def write_sweep(path: Path, lines: Mapping[str, Sequence[tuple[int, float]]], *, title: str, floor: float) -> None:
    """Write an HTML chart of step time over budget: a line for each policy, and the compute time as a floor."""
    drawn = [{"name": name, "points": [[*point, name] for point in points]} for name, points in lines.items() if points]
    content = {"title": title, "lines": drawn, "floor": floor}
    _write(path, _page("sweep.html", ("common.js", "curves.js", "sweep.js"), content))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the report {path}: {error}; choose a path that can be written") from error
