"""Step times, bytes moved, waits and peaks for TensorBoard, Weights & Biases and others, from your own loop."""

from __future__ import annotations

from typing import Any

from outofcore.api import Loop, Step
from outofcore.errors import InputError
from outofcore.integrations._meter import Meter, prefixed

__all__ = ["StepMetrics"]

# How loggers are written to, by the method that they have: TensorBoard's writer, those of Lightning and MLflow, and a
# run of Weights & Biases.
_METHODS = ("add_scalar", "log_metrics", "log")


class StepMetrics:
    """Logs what each step of a loop, or each call of a compiled step, took and moved.

    Values are ``step_seconds``; ``wait_seconds``, of these, what it waited for copies (of a compiled step: for copies
    and for room); ``bytes_out`` and ``bytes_in``, moved from the arena to the homes and back; and ``peak_bytes``, what
    was in use of the arena at the most. With ``every`` above 1 they are means over the steps since the last time, but
    for the peak. Of a loop the time is that from one call of this to the next, so that loading data counts; of a
    compiled step it is that within its calls.

    Args:
        source: of ``outofcore.budget`` or ``outofcore.compile``.
        writer: what is written to: anything with ``add_scalar(name, value, step)``, as a ``SummaryWriter`` of
            TensorBoard, with ``log_metrics(values, step=...)``, as loggers of Lightning, or with ``log(values)``, as a
            run of Weights & Biases; None: nothing, and the values are used as they are returned.
        every: steps from one log to the next.
        prefix: of the names.

    Raises:
        InputError: an argument cannot be used.

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
            raise InputError(f"every must be a number of steps above zero, and is {every!r}")
        self._method = next((name for name in _METHODS if callable(getattr(writer, name, None))), "")
        if writer is not None and not self._method:
            raise InputError(
                f"the writer has none of the methods {', '.join(_METHODS)}: give a SummaryWriter, a run of wandb, or "
                f"an object like them, not {type(writer).__name__}"
            )
        self._source, self._every, self._prefix = source, every, prefix
        self._writer: Any = writer
        self._meter = Meter()
        self._done = 0
        if isinstance(source, Loop):
            self._meter.begin(source.stats)

    def step(self, number: int | None = None) -> dict[str, float]:
        """Say that a step is done; to be called once after each.

        Args:
            number: of the step, as it is to be logged. By default steps are counted from 1, and a run of wandb counts
                its own.

        Returns:
            The values, by name, if this step is one that is logged; else nothing.

        Raises:
            StateError: the compiled step was not called yet.
        """
        self._done += 1
        if isinstance(self._source, Step):
            self._meter.add(self._source.stats)
        if self._done % self._every:
            return {}
        values = (
            self._meter.of_calls()
            if isinstance(self._source, Step)
            else self._meter.of_loop(self._source.stats, self._every)
        )
        named = prefixed(values, self._prefix)
        self._write(named, number)
        return named

    def _write(self, values: dict[str, float], number: int | None) -> None:
        at = self._done if number is None else number
        if self._method == "add_scalar":
            for name, value in values.items():
                self._writer.add_scalar(name, value, at)
        elif self._method == "log_metrics":
            self._writer.log_metrics(values, step=at)
        elif self._method == "log":
            # A run of wandb ignores what is of a step before its own.
            self._writer.log(values, **({} if number is None else {"step": number}))
