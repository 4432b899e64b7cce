"""Progress of capture, measurement and planning: a bar or the user's callback."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

# Called with a stage, the number of parts done, and the number of parts.
ProgressCallback = Callable[[str, int, int], None]


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress.

    >>> ignore_progress("plan", 1, 4)
    """


@contextmanager
def show_progress(tell: ProgressCallback | None = None, *, show: bool | None = None) -> Generator[ProgressCallback]:
    """Show progress while the context is active; yield the callback that reports it.

    Args:
        tell: user callback ``(stage, done, total)``; replaces the progress bar.
        show: whether to draw a bar on standard error. None: only on a terminal or in a notebook.

    >>> with show_progress(lambda stage, done, total: print(f"{stage}: {done} of {total}")) as tell:
    ...     tell("plan", 1, 4)
    plan: 1 of 4
    """
    if tell is not None:
        yield tell
    elif show is None and (display := _notebook_display()) is not None:
        shown = _NotebookProgress(display)
        try:
            yield shown
        finally:
            shown.close()
    elif sys.stderr.isatty() if show is None else show:
        with _make_bar() as bar:
            yield _TerminalProgress(bar)
    else:
        yield ignore_progress


def _make_bar() -> Progress:
    """Return a progress bar on standard error that disappears at its end."""
    return Progress(
        TextColumn("outofcore: {task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        _RemainingTime(),
        console=Console(stderr=True),
        transient=True,  # remove finished bars
        refresh_per_second=4,  # drawing slows down the ops that are being measured
    )


class _RemainingTime(TimeRemainingColumn):
    """Remaining time of a stage with more than one part."""

    def render(self, task: Task) -> Text:
        return Text("left ").append_text(super().render(task)) if task.fields["count"] else Text("")


class _TerminalProgress:
    """A progress callback that draws one bar per stage."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._stage = ""
        self._task = bar.add_task("", total=1, visible=False, count="")

    def __call__(self, stage: str, done: int, total: int) -> None:
        # A stage with one part gets an animated bar without a count.
        count = f"{done}/{total}" if total > 1 else ""
        if stage != self._stage:
            self._stage = stage
            self._bar.reset(self._task, total=total, description=stage, visible=True, count=count)
        self._bar.update(self._task, completed=done, total=total if total > 1 or done else None, count=count)


# Minimum interval: notebooks record every update and redraw it in a browser.
_PAUSE_S = 0.25


def _notebook_display() -> Callable[..., Any] | None:
    """Return the display function of a notebook; None outside of a notebook."""
    # A running notebook has imported IPython already; importing it here would be slow.
    ipython: Any = sys.modules.get("IPython")
    shell: Any = None if ipython is None else getattr(ipython, "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:  # IPython on a terminal has no kernel
        return None
    try:
        from IPython.display import display  # noqa: PLC0415 # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        return None
    return display  # pyright: ignore[reportUnknownVariableType]


class _NotebookProgress:
    """A progress callback that draws one line below the notebook cell; ``close`` removes it."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._stage = ""
        self._began = self._drawn = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began = stage, now
        elif now - self._drawn < _PAUSE_S:
            return
        self._drawn = now
        elapsed = now - self._began
        remaining = f", {elapsed / done * (total - done):.0f} s left" if 0 < done < total else ""
        count = f" {done}/{total}" if total > 1 else ""
        self._draw(f"outofcore: {stage}{count}, {elapsed:.0f} s{remaining}", done, total if total > 1 or done else None)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)

    def _draw(self, text: str, done: int, total: int | None) -> None:
        """Draw or update the bar and its text; the bar shows no share if ``total`` is None."""
        share = "" if total is None else f' value="{done}" max="{max(total, 1)}"'
        bundle = {"text/plain": text, "text/html": f"<progress{share}></progress> {html.escape(text)}"}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
