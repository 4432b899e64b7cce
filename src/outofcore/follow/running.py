"""The loops of this process, and the patches by which PyTorch reports to them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from outofcore._torch_internals import (
    OWN_OPTIMIZER_HOOKS,
    current_autograd_node,
    storage_address,
    without_dispatch_key,
)
from outofcore.capture.engine_calls import wrap_engine_calls
from outofcore.follow.addresses import AddressWatch
from outofcore.follow.native import DISPATCH_KEY, call, loaded_libraries, loaded_library
from outofcore.follow.sources import Sources
from outofcore.follow.user_tensors import list_alive, untracked_optimizers

if TYPE_CHECKING:
    from outofcore.follow.loop import Loop

# Loops that were started, even if they were stopped since, keyed by id().
started_loops: weakref.WeakValueDictionary[int, Loop] = weakref.WeakValueDictionary()


def running_loops() -> list[Loop]:
    return [loop for loop in list_alive(started_loops) if loop.is_running()]


def stop_loops() -> bool:
    """End all running and paused loops of ``outofcore.budget``, in any thread; return whether there was any."""
    running = [loop for loop in list_alive(started_loops) if loop.is_open()]
    for loop in running:
        loop.end()
    return bool(running)


def _running_models() -> Iterator[tuple[str, nn.Module]]:
    for loop in running_loops():
        yield from loop.named_models()


sources = Sources(_running_models)


@contextlib.contextmanager
def _report_backward_passes() -> Iterator[None]:
    """Report complete backward passes to the running loops while this context is open."""

    def run_engine(engine: Any, outputs: Any, gradients: Any, keep_graph: Any, *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine and return its result; report the pass if it is complete and not nested."""
        outermost, complete = current_autograd_node() is None, False
        try:
            result = engine(outputs, gradients, keep_graph, *args, **kwargs)
            complete = not keep_graph
            return result
        finally:
            if outermost:
                _after_backward(complete)

    with wrap_engine_calls(run_engine):
        yield


def _after_backward(complete: bool) -> None:
    """Detach this thread from ended loops; report a ``complete`` backward pass to the running loops."""
    for library in loaded_libraries():
        library.follow_leave_thread()  # a loop may have ended in the backward pass
    for loop in running_loops() if complete else ():
        loop.after_backward()


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    loops = running_loops()
    for loop in loops:
        loop.before_optimizer_step(optimizer)
    # The next loop must not read gradients that this thread may set to None.
    if not loops and not any(library.follow_is_opener() for library in loaded_libraries()):
        untracked_optimizers[id(optimizer)] = optimizer


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for loop in () if torch.compiler.is_compiling() else running_loops():
        loop.after_optimizer_step(optimizer)


class _OptimizerHooks:
    """A context in which the optimizer steps of all threads are reported to running loops."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(_before_optimizer_step),
                register_optimizer_step_post_hook(_after_optimizer_step),
            ]
            OWN_OPTIMIZER_HOOKS.update(handle.id for handle in self._handles)

    def __exit__(self, *_: object) -> None:
        # PyTorch fails if a hook is removed during a step in another thread.
        if len(sys._current_frames()) > 1:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _fix_address(storage: torch.UntypedStorage, until_next_op: bool) -> None:
    """Keep a storage at its address for good, unless the loop's own thread needs it only until the next op."""
    library = loaded_library(storage.device)
    if library is not None and not (until_next_op and library.follow_is_opener()):
        call(library, "follow_fix", storage_address(storage))


@contextlib.contextmanager
def _hold_storage(storage: torch.UntypedStorage) -> Iterator[None]:
    """Prevent a loop from evicting a storage while this context is open."""
    library = loaded_library(storage.device)
    is_held = library is not None and call(library, "follow_hold", storage_address(storage)) == 1
    try:
        yield
    finally:
        if library is not None and is_held:
            library.follow_unhold()


class SharedContext:
    """A context that may be entered repeatedly, in any thread: the first entry opens it, the last exit closes it."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._make = make
        self._open_count = 0
        self._undo = contextlib.ExitStack()
        self._lock = threading.RLock()  # reentrant: garbage collection under the lock may end a loop
        # Never collected: at exit, the generators of an open context would run without their modules.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def __enter__(self) -> None:
        with self._lock:
            if self._open_count == 0:
                self._undo.enter_context(self._make())
            self._open_count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open_count -= 1
            if self._open_count == 0:
                self._undo.close()


_addresses = AddressWatch(_fix_address, _hold_storage)
_optimizer_hooks = _OptimizerHooks()


@contextlib.contextmanager
def _patch_pytorch() -> Iterator[None]:
    with _addresses.watching(), without_dispatch_key(DISPATCH_KEY), _report_backward_passes(), _optimizer_hooks:
        yield


# Open while any loop is open.
patches = SharedContext(_patch_pytorch)
