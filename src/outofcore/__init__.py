"""Train PyTorch models that do not fit in memory, within a byte budget, with bit-identical results.

``budget`` runs an existing training loop unchanged, yours or a trainer's:

    with outofcore.budget("6GiB", model):
        trainer.train()

``compile`` plans a training step, written as one function of tensors, before it runs:

    step = outofcore.compile(train_step, model, optimizer, budget="6GiB")
    loss = step(x, y)

Start with ``budget``. Use ``compile`` where speed matters and the step can be written as such a function. ``estimate``
and ``smallest_budget`` predict memory and time without training. ``outofcore run --budget 6GiB script.py`` runs a
script that you cannot edit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outofcore.errors import (
    ArenaError,
    BudgetError,
    CaptureError,
    CommunicationError,
    DeviceError,
    GraphError,
    InputError,
    OutOfCoreError,
    SpillError,
    StateError,
    TransferError,
    UnitError,
    ValidationError,
    VersionError,
)

if TYPE_CHECKING:
    __version__: str
    from outofcore import onnx as onnx
    from outofcore.api import (
        Estimate,
        Loop,
        LoopStats,
        Measurement,
        OpenHome,
        Step,
        StepStats,
        aligned,
        budget,
        build,
        compile,
        estimate,
        load,
        materialize,
        open_home,
        run,
        save,
        smallest_budget,
        stop,
    )
    from outofcore.logical_workers.entry import Elastic, elastic
    from outofcore.logical_workers.stats import ElasticStats

# Modules of the names that are not in ``api``: these modules import ``api``.
_OTHER_MODULES = {
    "Elastic": "outofcore.logical_workers.training",
    "ElasticStats": "outofcore.logical_workers.stats",
    "elastic": "outofcore.logical_workers.entry",
}

__all__ = [
    "ArenaError",
    "BudgetError",
    "CaptureError",
    "CommunicationError",
    "DeviceError",
    "Elastic",
    "ElasticStats",
    "Estimate",
    "GraphError",
    "InputError",
    "Loop",
    "LoopStats",
    "Measurement",
    "OpenHome",
    "OutOfCoreError",
    "SpillError",
    "StateError",
    "Step",
    "StepStats",
    "TransferError",
    "UnitError",
    "ValidationError",
    "VersionError",
    "aligned",
    "budget",
    "build",
    "compile",
    "elastic",
    "estimate",
    "load",
    "materialize",
    "open_home",
    "run",
    "save",
    "smallest_budget",
    "stop",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    # Planning, validation and placement work without PyTorch, so names that need it are imported on first use.
    if name in __all__ or name == "onnx":
        try:
            if name == "onnx":
                return import_module("outofcore.onnx")
            value = getattr(import_module(_OTHER_MODULES.get(name, "outofcore.api")), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"outofcore.{name} needs PyTorch, which is not installed; install it with: pip install torch. "
                "Graphs from files can be planned and validated without it."
            ) from error
        return value
    raise AttributeError(f"module 'outofcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "onnx"])


def _version() -> str:
    """Return the version of the installed package, or "0+unknown" if it is not installed."""
    # The metadata of the installed package has the version of the built tag; reading it is slow.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("outofcore")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"
