"""The report as one HTML page that needs nothing else: what it shows, its style and the code that draws it."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path

from outofcore.errors import InputError

_ASSETS = "assets"


def page_text(content: dict[str, object]) -> str:
    """The page, as HTML.

    Args:
        content: of ``content.page_content``.
    """
    assets = files("outofcore.report") / _ASSETS
    parts = {
        "TITLE": html.escape(str(content["title"])),
        "STYLE": (assets / "page.css").read_text(encoding="utf-8"),
        # No text of the user's may end the script early, or be anything but text.
        "CONTENT": json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"),
        "CODE": "\n".join((assets / name).read_text(encoding="utf-8") for name in ("common.js", "time.js", "page.js")),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    # In one pass, so that nothing that is put in is taken for a place to put something in.
    pieces = page.split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def write_report(path: Path, content: dict[str, object]) -> None:
    """Write the page.

    Args:
        path: the HTML file; its folder is created.
        content: of ``content.page_content``.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page_text(content), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the report {path}: {error}; choose a path that can be written") from error
