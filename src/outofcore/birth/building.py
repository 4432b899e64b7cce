"""Builds models whose constructors initialise them, each parameter moving home as soon as it is made."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from outofcore._torch_internals import storage_key
from outofcore.birth.nursery import Nursery, can_move, is_alone, move_home
from outofcore.errors import InputError
from outofcore.execution.aliases import Faces
from outofcore.execution.memory import trim_heap
from outofcore.execution.opened import OpenHome

Built = TypeVar("Built")


def build(make: Callable[[], Built], *, home: OpenHome) -> Built:
    """Make a model as ``make()`` does, with the same numbers, without its being whole in memory.

    A parameter or buffer of 64 KiB or more moves to the home when a module gets it, mostly before it is
    initialised; what initialises it writes there. Memory holds no more than the largest tensor, what the
    constructor itself makes besides, and some MiB. A tensor that shares memory with another one
    (not by being the same object) stays in memory until ``make`` has ended.

    Args:
        make: makes modules, for example a class, or a lambda that calls one; what it returns is returned.
        home: where the parameters are to live; then give it to ``compile`` as well.

    Raises:
        SpillError: the home has no room for the model.
        InputError: a parameter is on the meta device (see ``materialize``).
        StateError: the home is closed.
    """
    home.check_open()
    with Nursery(home.faces) as nursery:
        with _moving_home(home.faces):
            built = make()
        nursery.rest()
    # What constructors have used and freed would otherwise stay with the process beside its budget.
    trim_heap()
    return built


@contextlib.contextmanager
def _moving_home(faces: Faces) -> Iterator[None]:
    """Move what modules get in this thread home: what nothing else refers to at once, the rest at the end."""
    thread = threading.get_ident()
    # Not the tensors themselves: some are replaced, and their room is for others.
    met: dict[tuple[int, str], weakref.ref[nn.Module]] = {}

    def registered(module: nn.Module, name: str, tensor: Any) -> None:
        if threading.get_ident() != thread or not isinstance(tensor, torch.Tensor):
            return
        if tensor.is_meta:
            raise InputError(
                f"{name} of a {type(module).__name__} is on the meta device, which has no bytes; build the model "
                "without torch.device('meta'), or give the model made there to outofcore.materialize()"
            )
        met[id(module), name] = weakref.ref(module)
        if can_move(tensor) and faces.find(tensor) is None and is_alone(tensor):
            move_home([tensor], faces)

    hooks = [
        register_module_parameter_registration_hook(registered),
        register_module_buffer_registration_hook(registered),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[torch.Tensor]] = {}
    late: dict[int, torch.Tensor] = {}
    for (_, name), reference in met.items():
        module = reference()
        if module is not None:
            tensor = module._parameters.get(name, module._buffers.get(name))
            if tensor is not None:
                late[id(tensor)] = tensor
    for tensor in late.values():
        if can_move(tensor) and faces.find(tensor) is None:
            groups.setdefault(storage_key(tensor), []).append(tensor)
    for tensors in groups.values():
        move_home(tensors, faces)
