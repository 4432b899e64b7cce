"""Load a checkpoint into models, optimizers and random generators, a buffer at a time."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import view_storage_bytes
from outofcore.analysis import is_large
from outofcore.capture.shards import Shard, Shards
from outofcore.checkpoint.contents import (
    CPU_GENERATOR,
    OmittedParameter,
    SavedModel,
    SavedOptimizer,
    collect_contents,
    generator_tensors,
    model_parameter_ids,
    parameters_of,
    restore_generators,
    restore_plain_generators,
)
from outofcore.checkpoint.matching import check_fits
from outofcore.checkpoint.saving import INDEX, generator_name, read_index
from outofcore.checkpoint.tensor_files import (
    Entry,
    InFile,
    TensorFile,
    allocate_buffer,
    load_entry,
    load_entry_range,
    read_header,
)
from outofcore.errors import InputError, TransferError
from outofcore.execution.aliases import HomeTensors
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

Targets = dict[str, torch.Tensor]


class Checkpoint:
    """A saved checkpoint that can be loaded; the constructor raises ``InputError`` if it is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = read_index(folder)
        self._files: dict[str, TensorFile] = {}
        for stem, name in self._index.names.items():
            file = read_header(folder / name)
            if file.bytes != self._index.files[name].bytes:
                raise InputError(
                    f"{file.path} is not the file that was saved: it has {file.bytes} bytes, and "
                    f"{self._index.files[name].bytes} were saved; use another copy of the checkpoint"
                )
            self._files[stem] = file
        self._shards: Shards | None = None
        self._ranges: dict[int, Shard] = {}  # by the id of a tensor that is filled with a range of a sharded tensor
        # By the numbers of the optimizer and the parameter: the state's name, and its entry.
        self._state: dict[tuple[int, int], dict[str, Entry]] = {}
        for key, entry in self._files["training"].entries.items():
            match key.split(".", 4):
                case ["optimizer", number, "state", place, name]:
                    self._state.setdefault((int(number), int(place)), {})[name] = entry
                case _:
                    pass

    @property
    def extra(self) -> Any:
        return self._index.extra

    def load(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        home_tensors: HomeTensors | None,
        shards: Shards | None = None,
    ) -> None:
        """Load the saved state into models and optimizers; frozen parameters that were not saved stay unchanged.

        Existing tensors are overwritten in place; missing optimizer state and gradients are allocated at home.

        Raises:
            InputError: the checkpoint does not fit the models and optimizers, which are unchanged.
            TransferError: a file cannot be read or is damaged; some tensors have already been overwritten.
            SpillError: the home is full.
        """
        self._shards = shards
        saved_optimizers = self._index.optimizers
        fillings = self.targets_by_file(models)
        self._check_counts(len(optimizers), len(saved_optimizers), "optimizers")
        training_targets: Targets = {}
        for number, model in enumerate(models):
            for name, tensor in collect_contents(model).non_persistent.items():
                if (key := f"buffer.{number}.{name}") in self._files["training"].entries:
                    training_targets[key] = tensor
        for number, (optimizer, saved) in enumerate(zip(optimizers, saved_optimizers, strict=True)):
            self._check_group_sizes(number, optimizer, saved)
            training_targets |= self._optimizer_targets(number, optimizer, model_parameter_ids(models))
        fillings.append(("training", training_targets))
        for stem, targets in fillings:
            self._check_targets(stem, targets)
        # All checks have passed: tensors are changed from here on.
        allocated = self._allocate_missing(models, optimizers, home_tensors)
        training_targets |= allocated
        generators = {name: state.clone() for name, state in generator_tensors()}
        for name, state in generators.items():
            saved_as = generator_name(shards.rank) if name == CPU_GENERATOR and shards and shards.rank else name
            if saved_as in self._files["training"].entries:
                training_targets[saved_as] = state
        buffer = allocate_buffer()
        for stem, targets in fillings:
            self._fill(stem, targets, home_tensors, buffer)
        for number, (optimizer, saved) in enumerate(zip(optimizers, saved_optimizers, strict=True)):
            _restore_settings(optimizer, saved)
            self._restore_state(number, optimizer, saved, allocated)
        for number, model in enumerate(models):
            for name, parameter in collect_contents(model).tensors.items():
                if parameter.is_leaf:
                    shard = self._shard_of(parameter)
                    (parameter if shard is None else shard.own_range).grad = training_targets.get(
                        f"gradient.{number}.{name}"
                    )
        if shards is not None:
            shards.show_gradients()
        restore_generators(generators)
        restore_plain_generators(self._index.generators, self.folder / INDEX)
        _log.info("loaded %s from %s", format_bytes(sum(file.bytes for file in self._files.values())), self.folder)

    def targets_by_file(self, models: Sequence[nn.Module]) -> list[tuple[str, Targets]]:
        """Return each model's data file and the tensors to load from it; raises ``InputError`` if models differ."""
        saved = self._index.models
        self._check_counts(len(models), len(saved), "models")
        return [
            (saved_model.stem, self._model_targets(number, saved_model, collect_contents(model).tensors))
            for number, (model, saved_model) in enumerate(zip(models, saved, strict=True))
        ]

    def _shard_of(self, parameter: torch.Tensor) -> Shard | None:
        return None if self._shards is None else self._shards.shard_of(parameter)

    def _target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to fill for a parameter: the parameter, or this process's range of it."""
        shard = self._shard_of(parameter)
        return parameter if shard is None else self._record_range(shard, shard.own_range)

    def _record_range(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor as this process's range of a sharded tensor, and return the tensor."""
        self._ranges[id(tensor)] = shard
        return tensor

    def _accepts_entry(self, parameter: torch.Tensor, tensor: Any, entry: Entry) -> bool:
        """Return whether ``tensor``, optimizer state of ``parameter``, can be overwritten with a saved entry."""
        shard = self._shard_of(parameter)
        if not isinstance(tensor, torch.Tensor):
            return False
        if shard is None or not entry.shape:
            return _is_like(tensor, entry)
        if entry.shape == shard.shape and tuple(tensor.shape) == (shard.count,) and tensor.dtype == entry.dtype:
            self._record_range(shard, tensor)
            return True
        return False

    def _allocate(self, parameter: torch.Tensor, entry: Entry, home_tensors: HomeTensors | None) -> torch.Tensor:
        """Allocate a tensor to load a saved entry into; for a sharded parameter, only this process's part."""
        shard = self._shard_of(parameter)
        if shard is None or entry.shape != shard.shape:
            return _allocate_tensor(parameter, entry, home_tensors)
        count = shard.chunks.chunk_elements * entry.dtype.itemsize
        base = torch.zeros(count, dtype=torch.uint8)
        if home_tensors is not None and is_large(count):
            base = view_storage_bytes(home_tensors.allocate(count))
        local = torch.empty(0, dtype=entry.dtype).set_(base.untyped_storage(), 0, (shard.count,), (1,))
        return self._record_range(shard, local)

    def _check_counts(self, passed: int, saved: int, kind: str) -> None:
        if passed != saved:
            raise InputError(
                f"the checkpoint in {self.folder} has {saved} {kind}, and {passed} were passed to this call; "
                "pass the models and optimizers that were saved, in the same order"
            )

    def _model_targets(self, number: int, model: SavedModel, tensors: Targets) -> Targets:
        """Map saved names to a model's tensors; raises ``InputError`` if the saved model has different names."""
        saved_names = self._files[model.stem].entries.keys() | model.omitted.keys()
        targets: Targets = {}
        for name, tensor in tensors.items():
            saved = name if name in saved_names else model.aliases.get(name)
            if saved is None:
                raise InputError(
                    f"the checkpoint in {self.folder} has no {name}, which model {number} has; pass the model that was "
                    "saved"
                )
            if saved in targets:
                raise InputError(
                    f"{name} and {saved} were one tensor when {self.folder} was saved, and are two tensors now; "
                    "tie them before loading"
                )
            targets[saved] = tensor
            if saved in model.omitted:
                self._check_omitted(f"{name} of model {number}", tensor, model.omitted[saved])
        unknown = saved_names - targets.keys()
        if unknown:
            raise InputError(
                f"the checkpoint in {self.folder} has {min(unknown)}, which model {number} does not have; "
                "pass the model that was saved"
            )
        return {name: self._target(tensor) for name, tensor in targets.items() if name not in model.omitted}

    def _check_omitted(self, description: str, parameter: torch.Tensor, saved: OmittedParameter) -> None:
        """Raise ``InputError`` if a parameter that the checkpoint omits has changed, is not frozen or has no data."""
        current = OmittedParameter.of(parameter)
        if current != saved:
            raise InputError(
                f"{description} is {current}, and was {saved} when {self.folder} was saved without frozen parameters; "
                "pass the model that it was saved from, with the same frozen weights"
            )
        if parameter.requires_grad:
            raise InputError(
                f"{description} requires gradients, and {self.folder} was saved without it because it was frozen; "
                "freeze it with requires_grad_(False), or load a checkpoint that was saved with frozen=True"
            )
        if parameter.is_meta and self._shard_of(parameter) is None:
            raise InputError(
                f"{description} is on the device meta, and {self.folder} was saved without it because it was frozen; "
                "load the frozen parameters first (outofcore.materialize(model, home=..., weights=...)), or load a "
                "checkpoint that was saved with frozen=True"
            )

    def _check_group_sizes(self, number: int, optimizer: Optimizer, saved: SavedOptimizer) -> None:
        group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [group.parameters for group in saved.groups]
        if group_sizes != saved_sizes:
            raise InputError(
                f"optimizer {number} has groups of {group_sizes} parameters, and in the checkpoint in {self.folder} it "
                f"has groups of {saved_sizes}; pass the optimizer that was saved"
            )

    def _optimizer_targets(self, number: int, optimizer: Optimizer, model_ids: set[int]) -> Targets:
        """Map saved names to an optimizer's tensors to overwrite: settings, state, and parameters that no model has."""
        entries = self._files["training"].entries
        targets: Targets = {}
        for index_in_optimizer, parameter in enumerate(parameters_of(optimizer)):
            state: dict[str, Any] = {
                f"state.{index_in_optimizer}.{n}": v for n, v in optimizer.state.get(parameter, {}).items()
            }
            if id(parameter) not in model_ids:
                key = f"optimizer.{number}.parameter.{index_in_optimizer}"
                if key not in entries:
                    raise InputError(
                        f"parameter {index_in_optimizer} of optimizer {number} is in no model, and the checkpoint in "
                        f"{self.folder} does not have its values: pass the models that were saved"
                    )
                targets[key] = self._target(parameter)
            for name, tensor in state.items():
                entry = entries.get(f"optimizer.{number}.{name}")
                if entry is not None and self._accepts_entry(parameter, tensor, entry):
                    targets[f"optimizer.{number}.{name}"] = tensor
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                key = f"optimizer.{number}.setting.{index}.{name}"
                if isinstance(value, torch.Tensor) and key in entries:
                    targets[key] = value
        return targets

    def _check_targets(self, stem: str, targets: Targets) -> None:
        """Raise ``InputError`` unless each tensor is on the CPU and fits the shape and dtype of its saved entry."""
        for name, tensor in targets.items():
            entry = self._files[stem].entries[name]
            shard = self._ranges.get(id(tensor))
            shape = tuple(tensor.shape) if shard is None else shard.shape
            check_fits(name, tensor, shape, entry, self.folder)
            if tensor.device.type != "cpu":
                raise InputError(
                    f"{name} is on {tensor.device}; a checkpoint is loaded into models on the CPU: "
                    'move the model there with .to("cpu")'
                )

    def _allocate_missing(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], home_tensors: HomeTensors | None
    ) -> Targets:
        """Return tensors for saved gradients and missing optimizer state, by saved name; reuse existing gradients."""
        entries = self._files["training"].entries
        allocated: Targets = {}
        for number, optimizer in enumerate(optimizers):
            for place, parameter in enumerate(parameters_of(optimizer)):
                present = optimizer.state.get(parameter, {})
                for name, entry in self._state.get((number, place), {}).items():
                    existing = present.get(name)
                    if not self._accepts_entry(parameter, existing, entry):
                        allocated[entry.name] = self._allocate(parameter, entry, home_tensors)
        for number, model in enumerate(models):
            for name, parameter in collect_contents(model).tensors.items():
                key = f"gradient.{number}.{name}"
                if key in entries:
                    shard = self._shard_of(parameter)
                    gradient = (parameter if shard is None else shard.own_range).grad if parameter.is_leaf else None
                    if gradient is not None and shard is not None:
                        self._record_range(shard, gradient)
                    allocated[key] = (
                        gradient if gradient is not None else self._allocate(parameter, entries[key], home_tensors)
                    )
        return allocated

    def _fill(self, stem: str, targets: Targets, home_tensors: HomeTensors | None, buffer: memoryview) -> None:
        """Load a data file into its target tensors; raises ``TransferError`` if the file's checksum is wrong."""
        file = self._files[stem]
        saved_crc32 = self._index.files[self._index.names[stem]].crc32
        entries = sorted(file.entries.values(), key=lambda entry: (entry.begin, entry.end))
        start = entries[0].begin if entries else file.bytes
        with InFile(file.path) as source:
            crc32 = _checksum(source, 0, start, buffer, 0)
            for entry in entries:
                target = targets.get(entry.name)
                shard = None if target is None else self._ranges.get(id(target))
                if target is None:
                    crc32 = _checksum(source, entry.begin, entry.end, buffer, crc32)
                elif shard is not None and shard.is_row_major:
                    crc32 = load_entry_range(target, shard.start, entry, source, home_tensors, buffer, crc32)
                elif shard is not None and self._shards is not None:
                    whole = torch.empty(shard.shape, dtype=target.dtype)
                    crc32 = load_entry(whole, entry, source, None, buffer, crc32)
                    target.copy_(self._shards.range_of(shard, whole))
                else:
                    crc32 = load_entry(target, entry, source, home_tensors, buffer, crc32)
        if crc32 != saved_crc32:
            raise TransferError(
                f"{file.path} is not as it was saved: its checksum is {crc32:08x}, and {saved_crc32:08x} was saved; "
                "use another copy of the checkpoint"
            )

    def _restore_state(self, number: int, optimizer: Optimizer, saved: SavedOptimizer, allocated: Targets) -> None:
        """Add ``allocated`` tensors and saved non-tensor values to optimizer state; delete state that was not saved."""
        plain = saved.state
        for place, parameter in enumerate(parameters_of(optimizer)):
            if str(place) not in plain:
                optimizer.state.pop(parameter, None)
                continue
            names = self._state.get((number, place), {})
            state = optimizer.state[parameter]
            for name in state.keys() - names.keys():
                del state[name]
            for name, entry in names.items():
                if entry.name in allocated:
                    state[name] = allocated[entry.name]
            state.update(plain[str(place)])


def _is_like(tensor: torch.Tensor, entry: Entry) -> bool:
    return tuple(tensor.shape) == entry.shape and tensor.dtype == entry.dtype


def _allocate_tensor(parameter: torch.Tensor, entry: Entry, home_tensors: HomeTensors | None) -> torch.Tensor:
    """Allocate a tensor with the shape and dtype of a saved entry, in ``home_tensors`` if it is large."""
    shape = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    if tuple(parameter.shape) == entry.shape:
        shape = torch.empty_like(parameter, dtype=entry.dtype, device="meta")
    count = shape.untyped_storage().nbytes()
    if home_tensors is None or not is_large(count):
        return torch.empty_strided(shape.shape, shape.stride(), dtype=entry.dtype)
    base = view_storage_bytes(home_tensors.allocate(count)).untyped_storage()
    return torch.empty(0, dtype=entry.dtype).set_(base, 0, shape.shape, shape.stride())


def _checksum(source: InFile, begin: int, end: int, buffer: memoryview, crc32: int) -> int:
    for start in range(begin, end, len(buffer)):
        piece = buffer[: min(len(buffer), end - start)]
        source.read(start, piece)
        crc32 = zlib.crc32(piece, crc32)
    return crc32


def _restore_settings(optimizer: Optimizer, saved: SavedOptimizer) -> None:
    for group, saved_group in zip(optimizer.param_groups, saved.groups, strict=True):
        for name, value in saved_group.settings.items():
            # JSON has no tuples.
            group[name] = tuple(value) if isinstance(value, list) and isinstance(group.get(name), tuple) else value
