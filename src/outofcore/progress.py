"""Progress of capturing, measuring and planning: a bar on a terminal, or the user's callback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Called with a stage, how much of it is done, and of how much.
Tell = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """A callback that does nothing.

    >>> silent("plan", 1, 4)
    """


@contextmanager
def following(tell: Tell | None = None, *, show: bool | None = None) -> Generator[Tell]:
    """A progress callback, while the context lasts.

    Args:
        tell: user callback ``(stage, done, total)``. If given, no progress bar is shown.
        show: a bar on standard error, with the time that has passed and that is left. By default only where standard
            error is a terminal.

    >>> with following(lambda stage, done, total: print(f"{stage}: {done} of {total}")) as tell:
    ...     tell("plan", 1, 4)
    plan: 1 of 4
    """
    if tell is not None:
        yield tell
    elif sys.stderr.isatty() if show is None else show:
        with _bar() as bar:
            yield _Shown(bar)
    else:
        yield silent


def _bar() -> Progress:
    return Progress(
        TextColumn("outofcore: {task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,  # remove finished bars
        refresh_per_second=4,  # drawing takes time from what is measured
    )


class _Shown:
    """A line for each stage."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._stage = ""
        self._task = bar.add_task("", total=1, visible=False)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            self._bar.reset(self._task, total=total, description=stage, visible=True)
        # A stage of one part has nothing to count: its bar only moves.
        self._bar.update(self._task, completed=done, total=total if total > 1 or done else None)
