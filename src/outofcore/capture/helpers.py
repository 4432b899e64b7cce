"""Run pickled work in fresh Python processes with this process's PyTorch settings."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore._torch_internals import OpOverload


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, OpOverload):
            return _operator, (obj._schema.name, obj._overloadname)
        return NotImplemented


def _operator(name: str, overload: str) -> OpOverload:
    namespace, _, name = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def pack_work(work: Any, threads: int | None = None) -> bytes:
    """Pickle work and PyTorch's settings; raise PicklingError, AttributeError or TypeError if it cannot be."""
    target = BytesIO()
    _Pickler(target).dump((work, threads or torch.get_num_threads(), _settings()))
    return target.getvalue()


def receive_work() -> Any:
    """Read this process's work from stdin, and apply the PyTorch settings that ``pack_work`` has added."""
    work, threads, settings = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    _apply_settings(settings)
    return work


def _settings() -> Mapping[str, Any]:
    """Return PyTorch's global settings that affect which kernels run."""
    backends = torch.backends
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "onednn": backends.mkldnn.enabled,
        "cudnn": (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
        "precisions": [internals.precision_of(backend, op) for backend, op in _precision_settings()],
    }


def _apply_settings(settings: Mapping[str, Any]) -> None:
    backends = torch.backends
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    backends.mkldnn.set_flags(settings["onednn"])
    backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark = settings["cudnn"]
    for (backend, op), precision in zip(_precision_settings(), settings["precisions"], strict=True):
        if precision is not None and internals.precision_of(backend, op) != precision:
            with contextlib.suppress(RuntimeError):
                getattr(backend, op).fp32_precision = precision


def _precision_settings() -> list[tuple[Any, str]]:
    """Return the (backend, operation) pairs, such as (``cudnn``, "conv"), with a float32 precision to transfer."""
    backends = torch.backends
    return [
        *((backends.mkldnn, op) for op in ("matmul", "conv", "rnn")),
        (backends.cuda, "matmul"),
        *((backends.cudnn, op) for op in ("conv", "rnn")),
    ]
