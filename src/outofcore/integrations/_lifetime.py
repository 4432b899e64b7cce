"""Loops that a trainer starts and stops, one after another, within the same budget."""

from __future__ import annotations

import contextlib
import os
import weakref

from torch import nn

from outofcore.api import CheckName, Loop, LoopStats, budget
from outofcore.errors import OutOfCoreError, StateError


class LoopLifetime:
    """Starts a loop within a budget when a trainer starts, and stops it at the end; see ``outofcore.budget``."""

    def __init__(
        self,
        budget: int | str,
        *,
        home: str | os.PathLike[str] | None = None,
        host_budget: int | str | None = None,
        check: CheckName = "sampled",
        log: bool = False,
    ) -> None:
        self._limit, self._home, self._host_budget = budget, home, host_budget
        self._check: CheckName = check
        self._logs = log
        self._make_loop(None)  # raises InputError for invalid arguments
        self._last_loop: Loop | None = None

    @property
    def run(self) -> Loop | None:
        """The last loop; None before the first."""
        return self._last_loop

    @property
    def stats(self) -> LoopStats:
        """Statistics of the last loop so far."""
        return LoopStats() if self._last_loop is None else self._last_loop.stats

    def _start_loop(self, model: nn.Module | None) -> None:
        self._stop_loop()
        self._last_loop = self._make_loop(model).start()
        # Stops the loop of a failed trainer when it is garbage collected.
        weakref.finalize(self, _stop, self._last_loop).atexit = False

    def _stop_loop(self, error: BaseException | None = None) -> None:
        """Stop the loop, if there is one; ``error`` is the exception that ended the training, if any."""
        if self._last_loop is None:
            return
        try:
            self._last_loop.__exit__(
                None if error is None else type(error), error, None if error is None else error.__traceback__
            )
        except OutOfCoreError as explanation:
            if error is None:
                raise
            error.add_note(f"outofcore: {explanation}")

    def _make_loop(self, model: nn.Module | None) -> Loop:
        return budget(self._limit, model, home=self._home, host_budget=self._host_budget, check=self._check)


def _stop(loop: Loop) -> None:
    with contextlib.suppress(StateError):  # another thread has started the loop
        loop.stop()
