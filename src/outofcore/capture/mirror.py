"""Fakes of parameters, buffers, gradients and arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import (
    FakeTensor,
    FakeTensorMode,
    keystr,
    storage_key,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from outofcore.capture.captured import CPU, Value
from outofcore.capture.device_traits import have_same_type
from outofcore.capture.provenance import join, prefix
from outofcore.capture.tables import Tables
from outofcore.errors import CaptureError, InputError
from outofcore.graph import StorageKind

if TYPE_CHECKING:
    from outofcore.capture.sharding import Sharding, TracedShard
    from outofcore.capture.shards import Shard

# Argument leaves that a signature compares by value.
PLAIN_LEAVES = (int, float, complex, bool, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.memory_format)


@dataclass
class MirroredState:
    """A parameter, buffer or gradient of the user, with the fake tensor that replaces it during capture."""

    key: str
    name: str
    kind: StorageKind
    real: torch.Tensor
    fake: torch.Tensor
    alias: torch.Tensor  # on the original storage, even if ``fake`` is rebound
    value: int
    requires_grad: bool
    own_shard: tuple[torch.Tensor, int] | None = None  # of a sharded tensor: this process's tensor and its value
    traced: TracedShard | None = None  # of a sharded parameter

    @property
    def persistent(self) -> tuple[torch.Tensor, int]:
        """The tensor that persists in this process, and the index of its value."""
        return self.own_shard or (self.real, self.value)


@dataclass
class MirroredInput:
    leaf: int  # index among the flattened arguments
    name: str
    real: torch.Tensor
    fake: torch.Tensor
    value: int


def is_plain_leaf(leaf: Any) -> bool:
    return isinstance(leaf, PLAIN_LEAVES) or (type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", 1) == 0)


class Mirror:
    """The fake tensors of one capture, for parameters, buffers, gradients and arguments."""

    def __init__(
        self,
        mode: FakeTensorMode,
        tables: Tables,
        gradients: Mapping[int, Value | None],
        sharding: Sharding | None,
    ) -> None:
        self._mode = mode
        self.sharding = sharding
        self._rows: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}  # by the storage of a real meta tensor
        self._tables = tables
        self._assumed_gradients = gradients
        self.states: list[MirroredState] = []  # of models, then of optimizers
        self.gradients: dict[int, MirroredState] = {}  # from before the step, by index in ``states``
        self.inputs: list[MirroredInput] = []
        self.fakes: dict[int, torch.Tensor] = {}  # by the id of the real tensor
        self.names: dict[int, str] = {}  # of states, by the id of their fakes
        self.by_real: dict[int, MirroredState] = {}  # states, by the id of the user's tensors

    def add_states(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Create a fake tensor for each parameter and buffer of the models and optimizers."""
        entries: dict[int, tuple[str, str, StorageKind, torch.Tensor]] = {}
        for entry in states_of(models, optimizers):
            entries.setdefault(id(entry[3]), entry)
        for _, name, _, real in entries.values():
            _check_kind(name, real)
            shard = None if self.sharding is None else self.sharding.shard_of(real)
            if self.sharding is not None and shard is not None:
                self.fakes[id(real)], self._rows[id(real)] = self.sharding.fake(shard)
                continue
            fake = self.fakes[id(real)] = self._make_fake(name, real)
            if id(real) in self._assumed_gradients:
                gradient = self._assumed_gradients[id(real)]
                fake.grad = None if gradient is None else self._empty_like(gradient)
        # A fake storage grows while tensors that share it are mirrored, so its size is final only here.
        for key, name, kind, real in entries.values():
            self._add_state(key, name, kind, real)

    def _make_fake(self, name: str, real: torch.Tensor) -> torch.Tensor:
        """Create a fake of ``real`` on the step's device, with a fake gradient if ``real`` has a gradient."""
        device = self._tables.device
        if real.is_meta:
            return self._fake_of_meta(real)
        fake = self._mode.from_tensor(real, static_shapes=True)
        if have_same_type(real.device, device):
            return fake
        if real.untyped_storage().nbytes() > real.numel() * real.element_size():
            raise CaptureError(
                f"{name} is a view of a larger tensor on {real.device}, and the step runs on {device}: its "
                f"copy there would not share that tensor's memory; move the model first: model.to({str(device)!r})"
            )
        moved = self._empty_like(real)
        if isinstance(real, nn.Parameter):
            moved = self._as_parameter(moved, real)
        if real.grad is not None:
            moved.grad = self._empty_like(real.grad)
        return moved

    def _fake_of_meta(self, real: torch.Tensor) -> torch.Tensor:
        """Return a fake of a meta tensor. Fakes share memory if their meta tensors do."""
        with torch.no_grad():
            # A fake marks its storage as unreadable, so the user's storage must not be used.
            storage = self._storages.setdefault(
                storage_key(real), torch.empty(real.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            ).untyped_storage()
            bare = torch.empty(0, dtype=real.dtype, device="meta")
            bare.set_(storage, real.storage_offset(), real.shape, real.stride())
        fake: torch.Tensor = FakeTensor(self._mode, bare, self._tables.device)
        if isinstance(real, nn.Parameter):
            fake = self._as_parameter(fake, real)
        else:
            fake.requires_grad_(real.requires_grad)
        if real.is_leaf and real.grad is not None:
            fake.grad = self._empty_like(real.grad)
        return fake

    def _as_parameter(self, fake: torch.Tensor, real: nn.Parameter) -> nn.Parameter:
        with self._mode, torch.no_grad():
            return nn.Parameter(fake, requires_grad=real.requires_grad)

    def _empty_like(self, model: torch.Tensor | Value) -> torch.Tensor:
        stride = model.stride if isinstance(model, Value) else model.stride()
        with self._mode, torch.no_grad():
            return torch.empty_strided(model.shape, stride, dtype=model.dtype, device=self._tables.device)

    def _add_state(self, key: str, name: str, kind: StorageKind, real: torch.Tensor) -> None:
        """Register a parameter or buffer with its fake and gradient, and copy its hooks to the fake."""
        fake = self.fakes[id(real)]
        shard = None if self.sharding is None else self.sharding.shard_of(real)
        if self.sharding is not None and shard is not None:
            self._add_shard(key, name, kind, real, self.sharding, shard)
            return
        state = self._mirror_state(key, name, kind, real, fake)
        self.states.append(state)
        self.names[id(fake)], self.by_real[id(real)] = name, state
        if self.sharding is not None and kind is StorageKind.PARAMETER:
            listened = bool(getattr(real, "_post_accumulate_grad_hooks", None))
            self.sharding.add_gradient_hook(fake, None, reduce_at_once=listened)
        _copy_hooks(real, fake)
        assumed = id(real) in self._assumed_gradients
        grad = fake.grad if assumed else real.grad
        if real.is_leaf and grad is not None and fake.grad is not None:
            if not assumed:
                _check_kind(f"{name}.grad", grad)
                self.fakes[id(grad)] = fake.grad
            gradient = self._mirror_state(f"{key}.grad", f"{name}.grad", StorageKind.GRADIENT, grad, fake.grad)
            self.gradients[len(self.states) - 1] = gradient

    def _add_shard(
        self, key: str, name: str, kind: StorageKind, real: torch.Tensor, sharding: Sharding, shard: Shard
    ) -> None:
        """Register a sharded parameter and its gradient, if any, and record the ops that gather both."""
        fake = self.fakes[id(real)]
        traced = sharding.begin(shard, self._rows[id(real)])
        state = self._mirror_state(key, name, kind, real, fake)
        state.own_shard, state.traced = (shard.own_range, traced.own_value), traced
        self.states.append(state)
        self.names[id(fake)], self.by_real[id(real)] = name, state
        sharding.add_gradient_hook(fake, shard, reduce_at_once=True)
        _copy_hooks(real, fake)
        before = shard.own_range.grad
        if id(shard.own_range) in self._assumed_gradients:
            has_gradient = self._assumed_gradients[id(shard.own_range)] is not None
        else:
            has_gradient = before is not None
        if not has_gradient:
            return
        value = sharding.begin_gradient(shard, fake)
        if fake.grad is not None:
            face = torch.empty(0) if real.grad is None else real.grad
            self.fakes[id(face)] = fake.grad
            gradient = self._mirror_state(f"{key}.grad", f"{name}.grad", StorageKind.GRADIENT, face, fake.grad)
            gradient.own_shard = torch.empty(0) if before is None else before, value
            self.gradients[len(self.states) - 1] = gradient

    def _mirror_state(
        self, key: str, name: str, kind: StorageKind, real: torch.Tensor, fake: torch.Tensor
    ) -> MirroredState:
        """Return the record of a tensor and its fake. Register the fake's storage if it is new."""
        if self._tables.find_storage(fake) is None:
            self._tables.add(fake, kind, name)
        with torch.no_grad():
            alias = fake.detach()
        return MirroredState(key, name, kind, real, fake, alias, self._tables.value_of(fake), real.requires_grad)

    def add_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the tensors in the arguments by fakes; raise ``CaptureError`` for unsupported objects."""
        # A parameter or buffer gets its existing fake. Other tensors get separate storages, even if they share memory.
        leaves, spec = tree_flatten((args, kwargs))
        names = leaf_names(args, kwargs)
        return tree_unflatten([self._mirror_argument(i, names[i], leaf) for i, leaf in enumerate(leaves)], spec)

    def _mirror_argument(self, index: int, name: str, leaf: Any) -> Any:
        """Return the fake of a tensor argument; return a plain constant unchanged."""
        if not isinstance(leaf, torch.Tensor):
            if not is_plain_leaf(leaf):
                raise CaptureError(
                    f"argument {name} holds a {type(leaf).__name__}: it cannot be compared by value, so a change would "
                    "go unnoticed; pass tensors and plain numbers, text or enums, in lists, tuples, dicts or "
                    "registered pytree classes"
                )
            return leaf
        if id(leaf) in self.by_real:
            return self.fakes[id(leaf)]
        _check_kind(f"argument {name}", leaf)
        if leaf.grad_fn is not None:
            raise CaptureError(
                f"argument {name} has been computed with gradients outside of the step: backward would have to "
                "leave the step; detach() it, or compute it inside the step"
            )
        fake = self._empty_like(leaf).requires_grad_(leaf.requires_grad)
        self._tables.add(fake, StorageKind.INPUT, f"input {name}")
        self.inputs.append(MirroredInput(index, name, leaf, fake, self._tables.value_of(fake)))
        return fake

    def real_tensors(self) -> list[torch.Tensor]:
        return [m.real for m in (*self.states, *self.gradients.values())]

    def inputs_sharing_memory(self) -> dict[int, MirroredInput]:
        """Map storage numbers to the inputs that share memory with another input, parameter or buffer."""
        owners = Counter(storage_key(t) for t in (*self.real_tensors(), *(entry.real for entry in self.inputs)))
        return {
            self._tables.storage_of(entry.fake): entry
            for entry in self.inputs
            if owners[storage_key(entry.real)] > 1 and entry.real.numel() > 0
        }


def states_of(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, str, StorageKind, torch.Tensor]]:
    """Yield (key, name, kind, tensor) of all parameters and buffers, with repetitions; names are for messages."""
    starts = [prefix(index, len(models)) for index in range(len(models))]
    for start, model in zip(starts, models, strict=True):
        for path, parameter in model.named_parameters():
            yield join(start or "model", path), join(start, path), StorageKind.PARAMETER, parameter
    for start, model in zip(starts, models, strict=True):
        for path, buffer in model.named_buffers():
            yield join(start or "model", path), join(start, path), StorageKind.BUFFER, buffer
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                key = f"optimizer{index}.group{number}.{place}"
                yield key, key, StorageKind.PARAMETER, parameter


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name each flattened argument by its position or keyword, followed by the path inside, as in ``0['x']``."""
    try:
        paths = [path for path, _ in tree_flatten_with_path((args, kwargs))[0]]
    except ValueError:  # a class registered without names of its children
        return [str(index) for index in range(len(tree_flatten((args, kwargs))[0]))]
    return [f"{getattr(path[1], 'idx', getattr(path[1], 'key', ''))}{keystr(path[2:])}" for path in paths]


def check_argument(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ``CaptureError`` or ``InputError`` for an argument that a step on ``device`` cannot read."""
    _check_kind(f"argument {name}", tensor)
    if tensor.is_meta:
        raise InputError(
            f"argument {name} is on the device meta, where tensors have no contents: make it on {device}; only "
            "outofcore.estimate takes such tensors"
        )
    if not have_same_type(tensor.device, CPU) and tensor.device != device:
        raise InputError(
            f"argument {name} is on {tensor.device} and the step runs on {device}; move it there first: "
            f".to({str(device)!r})"
        )
    if tensor.numel() and not tensor.data_ptr():
        raise InputError(
            f"the memory of argument {name} has been released: its storage was resized to 0 bytes; pass a tensor "
            "that has its contents"
        )


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor subclass, and a sparse, quantised, conjugate or negated tensor."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise CaptureError(
            f"{name} is a {type(tensor).__name__}: tensor subclasses may hold more than the bytes of one storage; "
            "use plain tensors and parameters"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CaptureError(
            f"{name} is a sparse, quantised, conjugate or negated tensor: its bytes alone do not define its values; "
            "convert it first, with to_dense(), dequantize(), resolve_conj() or resolve_neg()"
        )


def _copy_hooks(real: torch.Tensor, fake: torch.Tensor) -> None:
    # Hooks are registered on the real tensor, but autograd runs on the fake.
    for hook in (getattr(real, "_backward_hooks", None) or {}).values():
        fake.register_hook(hook)
    for hook in (getattr(real, "_post_accumulate_grad_hooks", None) or {}).values():
        # The hook looks the tensor up among the user's, so it must get the user's object.
        fake.register_post_accumulate_grad_hook(lambda _, hook=hook: hook(real))
