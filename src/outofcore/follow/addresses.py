"""Who takes the address of a tensor, by which it is then used without PyTorch: such a storage keeps it.

Python code gets at an address by a few methods only, which are wrapped while a loop is followed. Compiled extensions
that keep pointers from one op to the next cannot be seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outofcore._torch_internals import TENSOR_MODULE

# By class, what hands out an address, or something that has it: methods, and a property.
_METHODS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, ("numpy", "data_ptr", "__array__", "__dlpack__", "__cuda_array_interface__")),
    (torch.UntypedStorage, ("data_ptr",)),
)


# Modules that compare addresses, or are done with one before the next op: savers above all, which ask for that of every
# parameter.
_AT_ONCE = frozenset(
    {
        TENSOR_MODULE,
        "torch.serialization",
        "safetensors.torch",
        "transformers.modeling_utils",
        "transformers.pytorch_utils",
        "accelerate.utils.modeling",
        "accelerate.utils.other",
    }
)


# This library's own, between the steps of a compiled step.
_OURS = "outofcore."


@contextlib.contextmanager
def addresses_seen(fix: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """While in this context, ``fix`` is called with a storage before its address is handed out.

    Args:
        fix: is told of storages in memory of the CPU or of a GPU.
    """
    with _wrapped(fix):
        yield


def _wrapped(fix: Callable[[torch.UntypedStorage], object]) -> contextlib.ExitStack:
    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            asks = sys._getframe(1).f_globals.get("__name__") or ""
            if asks in _AT_ONCE or asks.startswith(_OURS):
                pass
            elif isinstance(self, torch.UntypedStorage):
                fix(self)
            elif self.layout is torch.strided and self.device.type in {"cpu", "cuda"}:
                fix(self.untyped_storage())
            return method(self, *args, **kwargs)

        told.__name__ = method.__name__
        told.__doc__ = method.__doc__
        return told

    undo = contextlib.ExitStack()
    for kind, names in _METHODS:
        for name in names:
            own = vars(kind).get(name)
            plain: Any = getattr(kind, name)
            getter: Any = getattr(plain, "fget", None)  # of a property
            setattr(kind, name, wrapped(plain) if getter is None else property(wrapped(getter)))
            if own is None:  # what the class inherits, it inherits again
                undo.callback(delattr, kind, name)
            else:
                undo.callback(setattr, kind, name, own)
    return undo
