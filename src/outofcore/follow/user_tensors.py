"""The tensors of the user's models and optimizers, and their names."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import storage_address
from outofcore.follow.space import Space
from outofcore.graph import StorageKind

_T = TypeVar("_T")
_UNINITIALIZED = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)

# Keyed by id().
Optimizers = weakref.WeakValueDictionary[int, Optimizer]
# Optimizers that have stepped in threads outside of any loop.
untracked_optimizers: Optimizers = weakref.WeakValueDictionary()


def list_alive(references: weakref.WeakValueDictionary[int, _T]) -> list[_T]:
    """List the objects that still exist, as a snapshot: other threads may add objects meanwhile."""
    return [target for reference in references.valuerefs() if (target := reference()) is not None]


def _find_trained_elsewhere() -> set[int]:
    """Return the ids of parameters that another thread trains."""
    # PyTorch crashes if one thread reads the gradient of a parameter while another one sets it to None.
    return {id(parameter) for optimizer in list_alive(untracked_optimizers) for parameter in parameters_of(optimizer)}


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a model's initialised parameters and buffers, and the gradients that no other thread changes."""
    ids_trained_elsewhere = _find_trained_elsewhere()
    for parameter in model.parameters():
        if not isinstance(parameter, _UNINITIALIZED):
            yield from inner_tensors_of(parameter)
            if id(parameter) not in ids_trained_elsewhere and parameter.grad is not None:
                yield from inner_tensors_of(parameter.grad)
    for buffer in model.buffers():
        if not isinstance(buffer, _UNINITIALIZED):
            yield from inner_tensors_of(buffer)


def state_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield from inner_tensors_of(value)


def inner_tensors_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner tensors of a wrapper subclass, such as a quantised tensor, or else the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from inner_tensors_of(getattr(tensor, name))


def names_of_storages(
    space: Space, models: Iterable[tuple[str, nn.Module]], optimizers: Iterable[Optimizer]
) -> dict[int, tuple[str, StorageKind]]:
    """Map the native number of each storage of models and optimizers to its name and kind."""
    names_and_kinds: dict[int, tuple[str, StorageKind]] = {}
    elsewhere = _find_trained_elsewhere()
    parameter_names: dict[int, str] = {}  # by id() of the parameter

    def record_name(tensor: object, name: str, kind: StorageKind) -> None:
        """Record the name and kind of a tensor's storages, and of its gradient if it is a parameter."""
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, _UNINITIALIZED):
            return
        for part in inner_tensors_of(tensor):
            if space.device.can_move(part):
                number = space.library.follow_number(space, storage_address(part.untyped_storage()))
                if number >= 0:
                    names_and_kinds.setdefault(number, (name, kind))
        if kind is StorageKind.PARAMETER and id(tensor) not in elsewhere:
            record_name(tensor.grad, f"gradient of {name}", StorageKind.GRADIENT)

    for prefix, model in models:
        for name, parameter in model.named_parameters():
            parameter_names[id(parameter)] = prefix + name
            record_name(parameter, prefix + name, StorageKind.PARAMETER)
        for name, buffer in model.named_buffers():
            record_name(buffer, prefix + name, StorageKind.BUFFER)
    for optimizer in optimizers:
        for index, parameter in enumerate(parameters_of(optimizer)):
            name = parameter_names.get(id(parameter), f"parameter {index}")
            record_name(parameter, name, StorageKind.PARAMETER)
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, dict) else ():
                record_name(value, f"{key} of {name}", StorageKind.OPTIMIZER_STATE)
    return names_and_kinds
