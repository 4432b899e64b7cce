"""Results in a notebook: short self-contained tables, and a report's page in a frame."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path, PosixPath

# A notebook stores its output, so it shows longer pages by their path only.
_MAX_PAGE_BYTES = 8 << 20
_TABLE = "border-collapse: collapse; margin: 4px 0; color: inherit; background: none"
_ROW = "background: none"
_CELL = "padding: 2px 12px 2px 0; border: 0; background: none"
_NAME = f"{_CELL}; text-align: left; font-weight: normal; opacity: 0.75"
_NUMBER = f"{_CELL}; text-align: right"
_TEXT = f"{_CELL}; text-align: left"
_CAPTION = "caption-side: top; text-align: left; color: inherit; padding: 0 0 4px; font-weight: bold"
_FRAME = "width: 100%; height: 720px; border: 0"


def facts_html(title: str, facts: Sequence[tuple[str, str]]) -> str:
    """Return an HTML table of names and values; it has no caption if the title is empty."""
    rows = "".join(
        f'<tr style="{_ROW}"><th scope="row" style="{_NAME}">{html.escape(name)}</th>'
        f'<td style="{_TEXT}">{html.escape(text)}</td></tr>'
        for name, text in facts
    )
    return _table(title, f"<tbody>{rows}</tbody>")


def table_html(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table. Its first row is the heading; the last column is text, and all others are numbers."""
    head, *body = rows
    headings = "".join(
        f'<th scope="col" style="{_style(i, head)}">{html.escape(cell)}</th>' for i, cell in enumerate(head)
    )
    lines = "".join(
        f'<tr style="{_ROW}">'
        + "".join(f'<td style="{_style(i, row)}">{html.escape(cell)}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in body
    )
    return _table(title, f'<thead><tr style="{_ROW}">{headings}</tr></thead><tbody>{lines}</tbody>')


def _style(column: int, row: Sequence[str]) -> str:
    return _TEXT if column == len(row) - 1 else _NUMBER


def _table(title: str, body: str) -> str:
    caption = f'<caption style="{_CAPTION}">{html.escape(title)}</caption>' if title else ""
    return f'<table style="{_TABLE}">{caption}{body}</table>'


def frame_html(page: str, title: str) -> str:
    return (
        f'<iframe title="{html.escape(title)}" sandbox="allow-scripts" style="{_FRAME}" srcdoc="{html.escape(page)}">'
        "</iframe>"
    )


class ReportPath(PosixPath):
    """The path of a report; a notebook shows the page itself."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the report as an HTML frame; None if it is too large or cannot be read."""
        try:
            if not self.is_file() or self.stat().st_size > _MAX_PAGE_BYTES:
                return None  # the notebook shows the path
            page = Path(self).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return frame_html(page, f"report {self.name}")
