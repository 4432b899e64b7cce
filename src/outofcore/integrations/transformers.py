"""``outofcore.budget`` for ``transformers.Trainer`` and trainers derived from it, such as TRL's."""

from __future__ import annotations

import sys
from typing import Any

from outofcore.integrations._lifetime import LoopLifetime
from outofcore.integrations._meter import Meter, add_prefix

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "outofcore.integrations.transformers needs transformers, which is not installed; install it with: "
        "pip install transformers accelerate"
    ) from error

__all__ = ["OutOfCoreCallback"]


class OutOfCoreCallback(LoopLifetime, TrainerCallback):
    """Trains bit for bit the same in a budget: ``Trainer(..., callbacks=[OutOfCoreCallback("6GiB")])``.

    The loop runs from the beginning of the training to its end, including evaluations. A trainer does not inform its
    callbacks when training fails. The loop then runs until the next training, until the trainer is garbage collected,
    or until ``stop`` is called. With ``with outofcore.budget("6GiB", trainer.model): trainer.train()`` it ends at once,
    with a ``BudgetError`` instead of ``torch.OutOfMemoryError``.

    Args:
        budget: bytes for all tensors and workspaces, as a number or as text such as "6GiB".
        home: as for ``outofcore.budget``.
        host_budget: as for ``outofcore.budget``.
        check: as for ``outofcore.budget``.
        log: add ``outofcore/step_seconds``, ``wait_seconds``, ``bytes_out``, ``bytes_in`` (means over the steps since
            the last log) and ``peak_bytes`` to the logs of the training, for all its loggers.

    Raises:
        InputError: an argument is invalid.

    >>> from outofcore.integrations.transformers import OutOfCoreCallback
    >>> callback = OutOfCoreCallback("6GiB")
    >>> callback.stats.steps  # none yet
    0
    """

    _log_values: _LogValues | None = None

    def stop(self) -> None:
        """Stop the loop after a training that failed. May be called at any time, repeatedly."""
        self._stop_loop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start_loop(kwargs.get("model"))
        if self._logs:
            self._log_values = self._log_values or _LogValues(self)
            self._log_values.begin(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop_loop()
        if self._log_values is not None:
            self._log_values.end()


class _LogValues(TrainerCallback):
    """Adds statistics of the loop to a trainer's logs, before other callbacks report these."""

    def __init__(self, owner: OutOfCoreCallback) -> None:
        self._owner = owner
        self._meter = Meter()
        self._step = 0
        self._handler: CallbackHandler | None = None

    def begin(self, step: int) -> None:
        """Begin to measure after ``step``, and move this callback to the front of the trainer's callbacks."""
        self.end()
        self._step = step
        self._meter.reset(self._owner.stats)
        # Callbacks get no reference to their handler, so search the stack for it.
        frame = sys._getframe(1)
        while frame is not None and self._handler is None:
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                # A new list, since the handler is iterating over the old one.
                handler.callbacks = [self, *handler.callbacks]
                self._handler = handler
            frame = frame.f_back

    def end(self) -> None:
        if self._handler is not None:
            self._handler.callbacks = [callback for callback in self._handler.callbacks if callback is not self]
        self._handler = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the statistics since the last log to the logs of a training; leave logs of evaluations unchanged."""
        if not logs or "loss" not in logs or state.global_step <= self._step:  # logs of an evaluation or of the end
            return
        steps, self._step = state.global_step - self._step, state.global_step
        values = add_prefix(self._meter.read_loop(self._owner.stats, steps), "outofcore/")
        logs.update(values)
        if state.log_history:  # its last entry is a copy of these logs
            state.log_history[-1].update(values)
