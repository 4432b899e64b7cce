"""Loops that a trainer begins and ends, one after another, all within the same budget."""

from __future__ import annotations

import contextlib
import os
import weakref

from torch import nn

from outofcore.api import CheckName, Loop, LoopStats, budget
from outofcore.errors import OutOfCoreError, StateError


class Lifetime:
    """Opens a loop when a trainer begins and closes it when it ends; arguments are those of ``outofcore.budget``."""

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
        self._loop(None)  # refuses now what cannot be used
        self._last: Loop | None = None

    @property
    def run(self) -> Loop | None:
        """The last loop; None before the first."""
        return self._last

    @property
    def stats(self) -> LoopStats:
        """What has happened in the last loop so far."""
        return LoopStats() if self._last is None else self._last.stats

    def _begin(self, model: nn.Module | None) -> None:
        """Start a loop; end one first that was never ended because its training failed."""
        self._end()
        self._last = self._loop(model).start()
        # A trainer that failed and is gone leaves no loop behind.
        weakref.finalize(self, _stop, self._last).atexit = False

    def _end(self, error: BaseException | None = None) -> None:
        """Stop the loop, if one runs, and note its explanation on the error that made it fail."""
        if self._last is None:
            return
        try:
            self._last.__exit__(
                None if error is None else type(error), error, None if error is None else error.__traceback__
            )
        except OutOfCoreError as told:
            if error is None:
                raise
            error.add_note(f"outofcore: {told}")

    def _loop(self, model: nn.Module | None) -> Loop:
        return budget(self._limit, model, home=self._home, host_budget=self._host_budget, check=self._check)


def _stop(loop: Loop) -> None:
    with contextlib.suppress(StateError):  # of another thread
        loop.stop()
