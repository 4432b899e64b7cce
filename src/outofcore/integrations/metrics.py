"""Step times, copies, waits and peaks of your own loop, for TensorBoard, Weights & Biases and others."""

from __future__ import annotations

from typing import Any

from outofcore.api import Loop, Step
from outofcore.errors import InputError
from outofcore.integrations._meter import Meter, add_prefix

__all__ = ["StepMetrics"]

# Methods of loggers: of TensorBoard's writer, of Lightning and MLflow, and of a run of Weights & Biases.
_METHODS = ("add_scalar", "log_metrics", "log")


class StepMetrics:
    """Logs the time and copies of each step of a loop, or each call of a compiled step.

    Values are ``step_seconds``; ``wait_seconds``, the part spent waiting for copies (in a compiled step, also for
    memory); ``bytes_out`` and ``bytes_in``, evicted and fetched; and ``peak_bytes``, the peak of the arena. With
    ``every`` above 1 all but the peak are means over the steps since the last log. For a loop, the time runs from one
    call of ``step`` to the next, including data loading; for a compiled step, it is the time within its calls.

    Args:
        source: a loop of ``outofcore.budget`` or a step of ``outofcore.compile``.
        writer: an object with ``add_scalar(name, value, step)``, such as TensorBoard's ``SummaryWriter``, with
            ``log_metrics(values, step=...)``, such as Lightning's loggers, or with ``log(values)``, such as a run of
            Weights & Biases; None: only return the values.
        every: steps from one log to the next.
        prefix: of the names.

    Raises:
        InputError: an argument is invalid.

    >>> import torch
    >>> import outofcore
    >>> from outofcore.integrations.metrics import StepMetrics
    >>> model = torch.nn.Linear(256, 256)
    >>> with outofcore.budget("1MiB", model) as run:
    ...     metrics = StepMetrics(run)
    ...     model(torch.ones(64, 256)).sum().backward()
    ...     values = metrics.step()
    >>> len(values), 0 < values["outofcore/peak_bytes"] <= 1 << 20
    (5, True)
    """

    def __init__(
        self, source: Loop | Step[..., Any], writer: Any = None, *, every: int = 1, prefix: str = "outofcore/"
    ):
        if not isinstance(source, Loop | Step):
            raise InputError(
                f"the source must be a loop of outofcore.budget or a step of outofcore.compile, not "
                f"{type(source).__name__}"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every must be a number of steps above zero, not {every!r}")
        self._method = next((name for name in _METHODS if callable(getattr(writer, name, None))), "")
        if writer is not None and not self._method:
            raise InputError(
                f"the writer needs one of the methods {', '.join(_METHODS)}: give a SummaryWriter, a run of wandb, or "
                f"an object like them, not {type(writer).__name__}"
            )
        self._source, self._every, self._prefix = source, every, prefix
        self._writer: Any = writer
        self._meter = Meter()
        self._steps_done = 0
        if isinstance(source, Loop):
            self._meter.reset(source.stats)

    def step(self, number: int | None = None) -> dict[str, float]:
        """Record the end of a step; call it once after each.

        Args:
            number: the step number to log. By default steps are counted from 1, and a run of wandb counts its own.

        Returns:
            The values by name if this step is logged, else an empty dict.

        Raises:
            StateError: the compiled step has not been called yet.
        """
        self._steps_done += 1
        if isinstance(self._source, Step):
            self._meter.add(self._source.stats)
        if self._steps_done % self._every:
            return {}
        values = (
            self._meter.read_calls()
            if isinstance(self._source, Step)
            else self._meter.read_loop(self._source.stats, self._every)
        )
        prefixed_values = add_prefix(values, self._prefix)
        self._write(prefixed_values, number)
        return prefixed_values

    def _write(self, values: dict[str, float], number: int | None) -> None:
        step = self._steps_done if number is None else number
        if self._method == "add_scalar":
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        elif self._method == "log_metrics":
            self._writer.log_metrics(values, step=step)
        elif self._method == "log":
            # A run of wandb ignores values for a step before its current one.
            self._writer.log(values, **({} if number is None else {"step": number}))
