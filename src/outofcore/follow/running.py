"""The loops of this process, and what PyTorch reports to them: optimizer steps, backward passes, addresses, modules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from outofcore._torch_internals import storage_address, without_python_dispatch
from outofcore.follow.addresses import AddressWatch
from outofcore.follow.native import DISPATCH_KEY, call, loaded_paging, loaded_pagings
from outofcore.follow.patches import OptimizerHooks, Overlapping, backward_passes_seen
from outofcore.follow.sources import Sources
from outofcore.follow.user_tensors import alive

if TYPE_CHECKING:
    from outofcore.follow.loop import Loop

# Loops that were started, and perhaps stopped since, by their identities.
started: weakref.WeakValueDictionary[int, Loop] = weakref.WeakValueDictionary()


def running_loops() -> list[Loop]:
    return [loop for loop in alive(started) if loop.is_running()]


def stop_loops() -> bool:
    """End all loops of ``outofcore.budget`` that run or are paused, in any thread; return whether there was any."""
    running = [loop for loop in alive(started) if loop.is_open()]
    for loop in running:
        loop.end()
    return bool(running)


def _running_models() -> Iterator[tuple[str, nn.Module]]:
    for loop in running_loops():
        yield from loop.named_models()


sources = Sources(_running_models)


def _after_backward(complete: bool) -> None:
    for library in loaded_pagings():
        library.follow_leave_thread()  # a loop that has ended in backward
    for loop in running_loops() if complete else ():
        loop.after_backward()


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for loop in () if torch.compiler.is_compiling() else running_loops():
        loop.before_optimizer_step(optimizer)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for loop in () if torch.compiler.is_compiling() else running_loops():
        loop.after_optimizer_step(optimizer)


def _fix(storage: torch.UntypedStorage, in_others: bool) -> None:
    library = loaded_paging(storage.device)
    if library is not None and not (in_others and library.follow_is_opener()):
        call(library, "follow_fix", storage_address(storage))


@contextlib.contextmanager
def _storage_held(storage: torch.UntypedStorage) -> Iterator[None]:
    library = loaded_paging(storage.device)
    held = library is not None and call(library, "follow_hold", storage_address(storage)) == 1
    try:
        yield
    finally:
        if library is not None and held:
            library.follow_unhold()


_addresses = AddressWatch(_fix, _storage_held)
_optimizer_hooks = OptimizerHooks(_before_optimizer_step, _after_optimizer_step)


@contextlib.contextmanager
def _seen() -> Iterator[None]:
    with (
        _addresses.watching(),
        without_python_dispatch(DISPATCH_KEY),
        backward_passes_seen(_after_backward),
        _optimizer_hooks,
    ):
        yield


# Open while any loop is: PyTorch reports to the loops.
patches = Overlapping(_seen)
