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
        limit: int | str,
        *,
        home: str | os.PathLike[str] | None = None,
        host_budget: int | str | None = None,
        check: CheckName = "sampled",
    ) -> None:
        self._limit, self._home, self._host_budget = limit, home, host_budget
        self._check: CheckName = check
        self._loop(None)  # refuses now what cannot be used
        self.run: Loop | None = None

    @property
    def stats(self) -> LoopStats:
        """The statistics of the running loop, or of the last one."""
        return LoopStats() if self.run is None else self.run.stats

    def begin(self, model: nn.Module | None) -> None:
        """Start a loop; end one first that was never ended because its training failed."""
        self.end()
        self.run = self._loop(model).start()
        # A trainer that failed and is gone leaves no loop behind.
        weakref.finalize(self, _stop, self.run).atexit = False

    def end(self, error: BaseException | None = None) -> None:
        """Stop the loop, if one runs, and note its explanation on the error that made it fail."""
        if self.run is None:
            return
        try:
            self.run.__exit__(
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
