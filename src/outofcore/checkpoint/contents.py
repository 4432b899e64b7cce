"""The contents of a checkpoint: named tensors, plain data and the states of random generators."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import storage_key
from outofcore.errors import InputError, StateError

CPU_GENERATOR, _CUDA = "generator.cpu", "generator.cuda."
_PLAIN_TYPES = (type(None), bool, int, float, str)


_Count = Annotated[int, Meta(ge=0, le=2**62)]


class SavedFile(Struct):
    bytes: _Count
    crc32: _Count


class OmittedParameter(Struct):
    """The shape and dtype of a frozen parameter that was not saved."""

    shape: list[_Count]
    dtype: str

    @staticmethod
    def of(tensor: torch.Tensor) -> OmittedParameter:
        return OmittedParameter(list(tensor.shape), str(tensor.dtype))

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)}"


class SavedModel(Struct):
    stem: str  # of the data file with its tensors
    aliases: dict[str, str]  # further names of tensors: the first name of each
    omitted: dict[str, OmittedParameter] = {}  # frozen parameters that were not saved, by name


class SavedGroup(Struct):
    """A parameter group of an optimizer: the number of parameters, and all settings that are not tensors."""

    parameters: _Count
    settings: dict[str, Any]


class SavedOptimizer(Struct):
    groups: list[SavedGroup]
    state: dict[str, dict[str, Any]]  # by the parameter's number, without tensors


class _PythonState(Struct):
    version: int
    state: list[int]
    gauss: float | None


class _NumpyState(Struct):
    kind: str
    key: list[Annotated[int, Meta(ge=0, lt=2**32)]]
    position: _Count
    has_gauss: _Count
    gauss: float


class SavedGenerators(Struct):
    python: _PythonState
    numpy: _NumpyState


class Index(Struct):
    """The JSON index of a checkpoint: the names of the tensor files, and all data that are not tensors."""

    format: str
    models: list[SavedModel]
    optimizers: list[SavedOptimizer]
    generators: SavedGenerators
    names: dict[str, str]  # data files by stem, such as "training"
    files: dict[str, SavedFile]
    extra: Any = None  # the user's data

    def __post_init__(self) -> None:
        if not {"training", *(model.stem for model in self.models)} <= self.names.keys():
            raise ValueError("names no data file for a model or for the training state")
        if not self.files.keys() >= set(self.names.values()):
            raise ValueError("names a data file that has no size and no checksum")


@dataclass(frozen=True)
class ModelContents:
    """The tensors of a model by name; a tensor with several names appears once, under its first name."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # in its state dict
    non_persistent: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # non-persistent buffers
    aliases: dict[str, str] = field(default_factory=dict[str, str])  # further names: the first name of each


def collect_contents(model: nn.Module) -> ModelContents:
    """Collect a model's parameters and buffers; raises ``StateError`` if a module defines ``get_extra_state``."""
    contents = ModelContents()
    first_names: dict[Any, str] = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise StateError(
                f"the module {path or 'itself'} has extra state (get_extra_state), which a checkpoint cannot store; "
                "save that state in another file, or pass it as the argument extra if JSON can hold it"
            )
    for name, tensor, persistent in _named_tensors(model):
        window = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key: Any = window if tensor.numel() and not tensor.is_meta else id(tensor)
        if key in first_names:
            contents.aliases[name] = first_names[key]
        else:
            first_names[key] = name
            (contents.tensors if persistent else contents.non_persistent)[name] = tensor
    return contents


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name of each parameter and buffer, the tensor, and whether a state dict includes it."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                yield f"{path}.{name}" if path else name, buffer, persistent


def unchanged_parameter_ids(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], written: Collection[torch.Tensor]
) -> set[int]:
    """Return the ``id()`` of each parameter that training does not change; ``written`` tensors count as changed."""
    frozen: dict[int, int] = {}
    stateful = {id(parameter) for optimizer in optimizers for parameter, state in optimizer.state.items() if state}
    changing = {storage_key(tensor) for tensor in (*written, *(b for model in models for b in model.buffers()))}
    parameters = [p for model in models for p in model.parameters()]
    for parameter in chain(parameters, *map(parameters_of, optimizers)):
        has_gradient = parameter.requires_grad or (parameter.is_leaf and parameter.grad is not None)
        if has_gradient or id(parameter) in stateful:
            changing.add(storage_key(parameter))
        else:
            frozen[id(parameter)] = storage_key(parameter)
    return {key for key, storage in frozen.items() if storage not in changing}


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def model_parameter_ids(models: Sequence[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}


def plain_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each parameter group's size and non-tensor settings; raises ``StateError`` if they cannot be saved."""
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {n: v for n, v in group.items() if n != "params" and not isinstance(v, torch.Tensor)}
        for name, value in settings.items():
            check_plain(value, f"the setting {name!r} of group {index} of {type(optimizer).__name__}")
        groups.append({"parameters": len(group["params"]), "settings": settings})
    return groups


def plain_state(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return an optimizer's non-tensor state by parameter index; raises ``StateError`` if it cannot be saved."""
    parameters = parameters_of(optimizer)
    parameter_ids = {id(parameter) for parameter in parameters}
    for key in optimizer.state:
        if id(key) not in parameter_ids:
            raise StateError(
                f"{type(optimizer).__name__} keeps state for a tensor that is not one of its parameters, which a "
                "checkpoint cannot store; save that state in another file, or pass it as the argument extra"
            )
    plain_by_number: dict[str, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        entries = optimizer.state.get(parameter, {})
        plain = {n: v for n, v in entries.items() if not isinstance(v, torch.Tensor)}
        for name, value in plain.items():
            check_plain(value, f"the state {name!r} of parameter {number} of {type(optimizer).__name__}")
        if parameter in optimizer.state:
            plain_by_number[str(number)] = plain
    return plain_by_number


def check_plain(value: Any, description: str) -> None:
    """Raise ``StateError`` if JSON cannot store a value; ``description`` names the value in the message."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise StateError(
                    f"{description} has the key {key!r}, and a checkpoint can only store string keys: use str(key)"
                )
            check_plain(item, description)
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(item, description)
    elif type(value) not in _PLAIN_TYPES:
        raise StateError(
            f"{description} is a {type(value).__name__}, which a checkpoint cannot hold; convert it to numbers, text, "
            "True, False or None, or to lists or dicts of these"
        )


def generator_tensors() -> list[tuple[str, torch.Tensor]]:
    """Return the names and states of PyTorch's random generators for the CPU and, if in use, CUDA devices."""
    states = [(CPU_GENERATOR, torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += [(f"{_CUDA}{index}", state) for index, state in enumerate(torch.cuda.get_rng_state_all())]
    return states


def restore_generators(tensors: dict[str, torch.Tensor]) -> None:
    """Set PyTorch's random generators to the states in ``tensors``; ignore states of absent CUDA devices."""
    if CPU_GENERATOR in tensors:
        torch.set_rng_state(tensors[CPU_GENERATOR])
    for name, state in tensors.items():
        if name.startswith(_CUDA) and int(name.removeprefix(_CUDA)) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name.removeprefix(_CUDA)))


def plain_generators() -> dict[str, Any]:
    """Return the states of ``random`` and ``numpy.random`` as data for JSON."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "state": list(numbers), "gauss": gauss},
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": [int(number) for number in legacy["state"]["key"]],
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
    }


def restore_plain_generators(saved: SavedGenerators, file: Path) -> None:
    """Restore the states of ``random`` and ``numpy.random``; raises ``InputError`` if Python or NumPy refuses one."""
    python, numpy = saved.python, saved.numpy
    key = np.array(numpy.key, dtype=np.uint32)
    try:
        random.setstate((python.version, tuple(python.state), python.gauss))
        np.random.set_state((numpy.kind, key, numpy.position, numpy.has_gauss, numpy.gauss))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{file}: the states of the random generators cannot be restored ({error}); use the versions of Python and "
            "NumPy that saved them"
        ) from error
