"""Detect code that takes the address of a tensor to use it without PyTorch; such a storage must stay in place.

NumPy arrays are always detected: ``Tensor.numpy`` marks the storage (``has_array`` in blocks.h). Not detected are other
addresses taken while no loop has memory, pointers in compiled extensions, and ``Tensor.__dlpack_c_exchange_api__``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from outofcore._torch_internals import DLPACK_EXPORTERS, FILE_WRITER, TENSOR_MODULE
from outofcore.follow.native import flavor_of, has_loop_tensors, make_trampoline

# By class: the methods, and a property, that expose an address. Omitted are methods that share the storage itself
# (``set_``, ``_weak_ref``), copy it (``copy.copy`` of a storage, ``UntypedStorage.from_buffer``), move it to memory
# that loops leave alone (``share_memory_``), or take an address from one of these (``ctypes``, ``frombuffer``).
_METHODS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        torch.Tensor,
        ("numpy", "data_ptr", "const_data_ptr", "__array__", "__dlpack__", "__cuda_array_interface__"),
    ),
    (torch.UntypedStorage, ("data_ptr",)),
)


# Modules that only compare addresses, such as savers, which take that of every parameter.
_COMPARING_MODULES = frozenset(
    {
        TENSOR_MODULE,
        "torch.serialization",
        "transformers.modeling_utils",
        "transformers.pytorch_utils",
        "accelerate.utils.modeling",
        "accelerate.utils.other",
    }
)


# Modules that read the memory, and have finished before the next op of their thread.
_SAVING_MODULES = frozenset({"safetensors.torch"})

# By class: methods that read memory without an op, and have finished when they return.
_READERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, ("tolist",)),
    (torch.UntypedStorage, ("_write_file", "_byteswap", "tolist")),
    (FILE_WRITER, ("write_record",)),
)

_STORAGE_MODULE = torch.TypedStorage.__module__
# This library takes addresses only between calls of a compiled step.
_OWN_PACKAGE = "outofcore."


class AddressWatch:
    """Detects code that takes a storage's address or reads its memory, and keeps that storage in place."""

    def __init__(
        self,
        # The flag: the address is used only until the next op of the thread that asks for it.
        fix: Callable[[torch.UntypedStorage, bool], object],
        hold: Callable[[torch.UntypedStorage], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._fix = fix
        self._hold = hold
        self._open = False
        self._undo: contextlib.ExitStack | None = None
        self._wrapped: list[tuple[Any, str, object]] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Detect code that takes the address of a tensor's memory while this context is open."""
        with self._lock:
            self._open = True
            if self._undo is None:
                self._undo = self._wrap()
        try:
            yield
        finally:
            with self._lock:
                self._open = False
            self._unwrap_if_unused()

    def _unwrap_if_unused(self) -> None:
        """Remove the method wrappers unless a loop or other code still needs them."""
        with self._lock:
            # Watching continues as long as a tensor is in memory of a loop, open or not.
            if self._open or self._undo is None or has_loop_tensors():
                return
            # If other code has wrapped a method since, leave the wrappers in place for now.
            if all(vars(kind).get(name) is wrapper for kind, name, wrapper in self._wrapped):
                self._undo.close()
                self._undo = None

    def _report(self, value: object, until_next_op: bool = False) -> None:
        """Call ``fix`` for the storage of a tensor or storage, if a loop can move it."""
        if not self._open:
            self._unwrap_if_unused()
        storage = _storage_of(value)
        if storage is not None:
            self._fix(storage, until_next_op)

    def _wrap(self) -> contextlib.ExitStack:
        """Wrap the methods that expose or read a tensor's memory; return a stack that restores them when closed."""

        def wrap_exporter(method: Callable[..., Any]) -> Callable[..., Any]:
            """Wrap ``method`` to report a storage before other code can use its address."""

            def report_and_call(self_: Any, *args: Any, **kwargs: Any) -> Any:
                caller = _calling_module(sys._getframe(1))
                if caller not in _COMPARING_MODULES and not caller.startswith(_OWN_PACKAGE):
                    self._report(self_, caller in _SAVING_MODULES)
                return method(self_, *args, **kwargs)

            return _copy_name(report_and_call, method)

        def wrap_reader(method: Callable[..., Any]) -> Callable[..., Any]:
            """Wrap ``method`` to keep the storages of its arguments in memory during each call."""

            def call_with_storages_held(self_: Any, *args: Any, **kwargs: Any) -> Any:
                with contextlib.ExitStack() as contexts:
                    for value in (self_, *args):
                        with contextlib.suppress(RuntimeError):  # a tensor without memory, such as in vmap
                            storage = _storage_of(value)
                            if storage is not None:
                                contexts.enter_context(self._hold(storage))
                    return method(self_, *args, **kwargs)

            return _copy_name(call_with_storages_held, method)

        def wrap_slicing(method: Callable[..., Any]) -> Callable[..., Any]:
            def report_and_call(self_: Any, index: Any) -> Any:
                if isinstance(index, slice):  # a new storage on the same memory
                    self._report(self_)
                return method(self_, index)

            return _copy_name(report_and_call, method)

        undo = contextlib.ExitStack()
        self._wrapped = []
        for kind, names in _METHODS:
            for name in names:
                if hasattr(kind, name):  # older releases lack some
                    self._replace(undo, kind, name, wrap_exporter)
        self._replace(undo, torch.UntypedStorage, "__getitem__", wrap_slicing)
        for kind, names in _READERS:
            for name in names:
                self._replace(undo, kind, name, wrap_reader)
        for number, function in enumerate(DLPACK_EXPORTERS):
            _redirect(undo, function, functools.partial(make_trampoline, number, self._report_all))
        return undo

    def _report_all(self, arguments: tuple[object, ...]) -> int:
        for argument in arguments:
            self._report(argument)
        return 0

    def _replace(
        self,
        undo: contextlib.ExitStack,
        owner: Any,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """Wrap a method or property of the class ``owner`` until ``undo`` is closed."""
        plain: Any = getattr(owner, name)
        getter: Any = getattr(plain, "fget", None)  # of a property
        wrapper = wrap(plain) if getter is None else property(wrap(getter))
        replace_attribute(undo, owner, name, wrapper)
        self._wrapped.append((owner, name, wrapper))


def replace_attribute(undo: contextlib.ExitStack, owner: Any, name: str, value: object) -> None:
    """Set an attribute of the class ``owner`` until ``undo`` is closed."""
    previous = vars(owner).get(name)
    setattr(owner, name, value)
    if previous is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, previous)


def _storage_of(value: object) -> torch.UntypedStorage | None:
    """Return the storage of a tensor or storage; None for other values and for tensors that loops cannot move."""
    if isinstance(value, torch.UntypedStorage):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and flavor_of(value.device) is not None:
        return value.untyped_storage()
    return None


def _calling_module(frame: FrameType | None) -> str:
    """Return the module name of the nearest frame outside ``torch.storage``."""
    name = ""
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name != _STORAGE_MODULE:
            break
        frame = frame.f_back
    return name


def _copy_name(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = original.__name__
    function.__doc__ = original.__doc__
    return function


# CPython's ``PyMethodDef``.
class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


# The flags METH_VARARGS | METH_KEYWORDS.
_VARARGS_AND_KEYWORDS = 3


def _redirect(undo: contextlib.ExitStack, function: Any, make_replacement: Callable[[int], int]) -> None:
    """Replace the C function behind a Python built-in until ``undo`` is closed, where supported."""
    if sys.implementation.name != "cpython" or type(function) is not type(len):
        return
    definition_address = ctypes.c_void_p.from_address(id(function) + object.__basicsize__).value
    definition = _MethodDef.from_address(definition_address or 0) if definition_address else None
    if definition is None or definition.flags != _VARARGS_AND_KEYWORDS or definition.name != function.__name__.encode():
        return
    plain = definition.function
    definition.function = make_replacement(plain)
    undo.callback(setattr, definition, "function", plain)
