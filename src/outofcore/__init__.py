"""Train PyTorch models that do not fit in memory, within a byte budget, bit for bit the same."""

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
        Elastic,
        ElasticStats,
        Estimate,
        Loop,
        LoopStats,
        OpenHome,
        Step,
        StepStats,
        aligned,
        budget,
        build,
        compile,
        elastic,
        estimate,
        load,
        materialize,
        open_home,
        run,
        save,
        smallest_budget,
        stop,
    )

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
    # Planning, validation and placing run where torch is not installed: it is imported when it is needed.
    if name in __all__ or name == "onnx":
        try:
            if name == "onnx":
                return import_module("outofcore.onnx")
            from outofcore import api  # noqa: PLC0415 - see above
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"outofcore.{name} needs PyTorch, which is not installed; install it with: pip install torch. "
                "Graphs from files can be planned and validated without it."
            ) from error
        return getattr(api, name)
    raise AttributeError(f"module 'outofcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "onnx"})


def _version() -> str:
    # That of the tag that was built, which what is installed knows; reading it takes a while.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("outofcore")
    except PackageNotFoundError:  # the files are here, and were not installed
        return "0+unknown"
