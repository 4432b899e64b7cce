"""``outofcore.budget`` for ``transformers.Trainer``, and all that derive from it, such as those of TRL."""

from __future__ import annotations

import os
from typing import Any

from outofcore.api import CheckName, Loop, LoopStats
from outofcore.integrations._lifetime import Lifetime

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "outofcore.integrations.transformers needs transformers, which is not installed; install it with: "
        "pip install transformers accelerate"
    ) from error

__all__ = ["OutOfCoreCallback"]


class OutOfCoreCallback(TrainerCallback):
    """Trains within a budget, with the very same numbers: ``Trainer(..., callbacks=[OutOfCoreCallback("6GiB")])``.

    The loop is followed from the beginning of the training to its end, with evaluations in between. A trainer does not
    tell its callbacks when training fails: then the loop goes on until it trains again, or the trainer is gone, or
    ``stop`` is called. In ``with outofcore.budget("6GiB", trainer.model): trainer.train()`` it ends there, and with a
    ``BudgetError`` in place of ``torch.OutOfMemoryError``.

    Args:
        budget: bytes for all tensors and workspaces, as a number or as text such as "6GiB".
        home: as for ``outofcore.budget``.
        host_budget: as for ``outofcore.budget``.
        check: as for ``outofcore.budget``.

    Attributes:
        run: the loop of the last training; None before the first.

    Raises:
        InputError: an argument cannot be used.

    >>> from outofcore.integrations.transformers import OutOfCoreCallback
    >>> callback = OutOfCoreCallback("6GiB")
    >>> callback.stats.steps  # none yet
    0
    """

    def __init__(
        self,
        budget: int | str,
        *,
        home: str | os.PathLike[str] | None = None,
        host_budget: int | str | None = None,
        check: CheckName = "sampled",
    ) -> None:
        self._lifetime = Lifetime(budget, home=home, host_budget=host_budget, check=check)

    @property
    def run(self) -> Loop | None:
        """The loop of the last training; None before the first."""
        return self._lifetime.run

    @property
    def stats(self) -> LoopStats:
        """What has happened in the last training so far."""
        return self._lifetime.stats

    def stop(self) -> None:
        """Stop following, after a training that failed. May be called at any time, and again."""
        self._lifetime.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to follow."""
        self._lifetime.begin(kwargs.get("model"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop following."""
        self._lifetime.end()
