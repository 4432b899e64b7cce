"""``outofcore.budget`` for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outofcore.integrations._lifetime import LoopLifetime
from outofcore.integrations._meter import Meter, add_prefix

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    try:  # the package has two names
        from lightning.pytorch.callbacks import Callback
    except ModuleNotFoundError as error:
        if error.name != "lightning":
            raise
        try:
            from pytorch_lightning.callbacks import Callback
        except ModuleNotFoundError as other:
            if other.name != "pytorch_lightning":
                raise
            raise ImportError(
                "outofcore.integrations.lightning needs Lightning, which is not installed; install it with: "
                "pip install lightning"
            ) from error

__all__ = ["OutOfCore"]


class OutOfCore(LoopLifetime, Callback):
    """Runs a trainer within a budget: ``Trainer(..., callbacks=[OutOfCore("6GiB")])``.

    ``fit``, ``validate``, ``test`` and ``predict`` run within the budget from setup to end. If an op does not fit, a
    note on the ``torch.OutOfMemoryError`` has its source line and the budget that it needs.

    Args:
        budget: bytes for all tensors and workspaces, as a number or as text such as "6GiB".
        home: as for ``outofcore.budget``.
        host_budget: as for ``outofcore.budget``.
        check: as for ``outofcore.budget``.
        log: send ``outofcore/step_seconds``, ``wait_seconds``, ``bytes_out``, ``bytes_in`` (means over the steps since
            the last log) and ``peak_bytes`` to the trainer's loggers, every ``log_every_n_steps`` steps of ``fit``.

    Raises:
        InputError: an argument is invalid.

    >>> from outofcore.integrations.lightning import OutOfCore
    >>> callback = OutOfCore("6GiB")
    >>> callback.stats.steps  # none yet
    0
    """

    _meter: Meter | None = None
    _step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._start_loop(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        if self._logs:
            self._meter = Meter()
            self._meter.reset(self.stats)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loop's statistics once every ``log_every_n_steps`` steps."""
        interval, steps = trainer.log_every_n_steps, trainer.global_step - self._step
        if self._meter is None or not interval or steps < interval:
            return
        self._step = trainer.global_step
        values = add_prefix(self._meter.read_loop(self.stats, steps), "outofcore/")
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stop_loop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop_loop(exception)
