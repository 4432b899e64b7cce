"""Values of captured tensors that depend on no data (constant propagation).

Positions of tokens, masks of ones and learning rates follow from shapes and constants, and eager steps may branch on
them. If the step reads such a value, the operators that produce it run then. A value that depends on an argument, a
parameter or a random number is unknown, and reading it is refused. Floating-point values are known on the CPU only,
because another device may round differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import OpOverload, below_autograd, result_leaves, storage_key, without_modes
from outofcore.analysis.chunks import is_dense
from outofcore.capture import operators
from outofcore.capture.device_traits import traits_of
from outofcore.capture.provenance import user_line
from outofcore.capture.refusals import refusal
from outofcore.capture.tables import leaves_in, map_leaves

# Larger tensors are unlikely to be bookkeeping, and slow to compute.
MAX_ELEMENTS = 1 << 20
# Operators that use only the shapes of their arguments.
_BY_SHAPE = frozenset(
    (
        *("aten::ones_like", "aten::zeros_like", "aten::full_like", "aten::empty_like"),
        *("aten::new_ones", "aten::new_zeros", "aten::new_full", "aten::new_empty", "aten::new_empty_strided"),
    )
)
# Operators with results that are undefined until they are completely written.
_EMPTY = ("aten::empty", "aten::new_empty")
_CHANGES_MEMORY = ("aten::resize", "aten::set_")


@dataclass(frozen=True, slots=True)
class _ShapeOnly:
    """Placeholder for a tensor of unknown value, in the arguments of an operator that uses only shapes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _KnownTensor:
    """A tensor with a known value, kept alive so that its id is not reused."""

    tensor: torch.Tensor
    key: int  # of its storage
    layout: tuple[Any, ...]
    place: int  # key in ``KnownValues._values``


@dataclass(frozen=True, slots=True)
class _PendingOp:
    """A recorded operator on tensors of known value that has not been run yet."""

    func: OpOverload
    args: tuple[Any, ...]  # with a ``_KnownRef`` for each known tensor
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]  # keys in ``KnownValues._values``
    reads: frozenset[int]  # keys of storages
    writes: frozenset[int]  # keys of storages, including created ones


@dataclass(frozen=True, slots=True)
class _KnownRef:
    """Placeholder for a known tensor in the arguments of an operator."""

    number: int


@dataclass(frozen=True, slots=True)
class _LentArray:
    """A NumPy array that the step got for a known tensor, with a copy of its contents."""

    key: int
    array: Any
    before: Any
    source: str


class KnownValues:
    """The values of fake tensors that follow from shapes and constants, computed when they are first read."""

    def __init__(self) -> None:
        self._tensors: dict[int, _KnownTensor] = {}  # by the id of the tensor
        self._empty: set[int] = set()  # keys of storages with undefined contents
        self._pending: list[_PendingOp] = []
        self._values: dict[int, torch.Tensor] = {}
        self._places = 0
        self._lent: list[_LentArray] = []

    def __contains__(self, tensor: object) -> bool:
        entry = self._find(tensor)
        return entry is not None and entry.key not in self._empty

    def record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[Any],
        written: Sequence[torch.Tensor] = (),
        overwritten: Sequence[torch.Tensor] = (),
    ) -> None:
        """Record an operator if its results follow from known values; else mark ``written`` tensors as unknown.

        ``overwritten`` tensors are not read. Raises ``CaptureError`` for writes to an array that ``lend`` returned.
        """
        keys = frozenset(map(storage_key, written))
        for lent in self._lent:
            if lent.key in keys:
                raise _changed_array_error(lent.source)
        created = [item for item in results if isinstance(item, torch.Tensor) and self._is_eligible(item)]
        tensors, name, traits = leaves_in((args, kwargs)), func._schema.name, operators.traits(func)
        follows = all(map(self._find, tensors)) or (name in _BY_SHAPE and not written)
        unclear = traits.random or traits.reshapes or name.startswith(_CHANGES_MEMORY) or not _is_builtin(func)
        if unclear or not follows or not (created or written):
            self.forget(written)
            return
        placeholders = {id(tensor): self._placeholder_of(tensor) for tensor in tensors}
        old_args, old_kwargs = map_leaves((args, kwargs), lambda tensor: placeholders[id(tensor)])
        places = [self._add(item) if any(item is result for result in created) else None for item in results]
        new = frozenset(storage_key(item) for item in created)
        self._pending.append(
            _PendingOp(func, old_args, old_kwargs, tuple(places), frozenset(map(storage_key, tensors)), keys | new)
        )
        replaced = set(map(id, overwritten))
        read = {storage_key(tensor) for tensor in tensors if id(tensor) not in replaced}
        if name.startswith(_EMPTY) or read & self._empty:
            self._empty |= new | keys
        else:
            self._empty -= {storage_key(tensor) for tensor in overwritten if _covers_storage(tensor)}

    def record_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if self._is_eligible(tensor):
            with without_modes(), below_autograd():
                self._values[self._add(tensor)] = value.clone()

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors, and all that share memory with them, as unknown."""
        keys = set(map(storage_key, tensors))
        if self._tensors and keys:
            self._tensors = {number: entry for number, entry in self._tensors.items() if entry.key not in keys}
            self._empty -= keys

    def value(self, tensor: object) -> torch.Tensor | None:
        """Return the value of a tensor, which must not be written; None if it is unknown."""
        entry = self._find(tensor)
        if entry is None or entry.key in self._empty:
            return None
        self._run_pending(entry.key)
        return self._values[entry.place]

    def lend(self, tensor: torch.Tensor, array: Any) -> Any:
        """Return a copy of an array with a tensor's value, and record it so that ``check`` finds writes to it."""
        copy = array.copy()
        self._lent.append(_LentArray(storage_key(tensor), copy, array.copy(), user_line()))
        return copy

    def check(self) -> None:
        """Raise ``CaptureError`` if the step has written to an array from ``lend``."""
        for lent in self._lent:
            if lent.array.tobytes() != lent.before.tobytes():
                raise _changed_array_error(lent.source)

    def results(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on known values and return its results; None if a value is unknown or the op is random."""
        values = [(tensor, self.value(tensor)) for tensor in leaves_in((args, kwargs))]
        if operators.traits(func).random or not _is_builtin(func) or any(value is None for _, value in values):
            return None
        by_id = {id(tensor): value for tensor, value in values}
        return _run(func, *map_leaves((args, kwargs), lambda tensor: by_id[id(tensor)]))

    @staticmethod
    def _is_eligible(tensor: torch.Tensor) -> bool:
        """Return whether a tensor's value may be computed: it is small and dense, and the CPU gives the same bits."""
        rounds = tensor.is_floating_point() or tensor.is_complex()
        exact = not rounds or traits_of(tensor.device).computes_in_capture
        return exact and tensor.layout is torch.strided and tensor.numel() <= MAX_ELEMENTS

    def _find(self, tensor: object) -> _KnownTensor | None:
        """Return the entry of a tensor. Return None without one, or if the tensor's memory or layout has changed."""
        entry = self._tensors.get(id(tensor))
        if entry is None or not isinstance(tensor, torch.Tensor):
            return None
        # ``tensor.data = ...`` may have given it other memory.
        return entry if (storage_key(tensor), _layout(tensor)) == (entry.key, entry.layout) else None

    def _add(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's value; register the tensor if it is new."""
        entry = self._find(tensor)
        if entry is None:
            entry = _KnownTensor(tensor, storage_key(tensor), _layout(tensor), self._places)
            self._tensors[id(tensor)] = entry
            self._places += 1
        return entry.place

    def _placeholder_of(self, tensor: torch.Tensor) -> _KnownRef | _ShapeOnly:
        entry = self._find(tensor)
        if entry is None:
            return _ShapeOnly(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return _KnownRef(entry.place)

    def _run_pending(self, key: int) -> None:
        """Run the pending operators that determine the contents of the storage ``key``, in recorded order."""
        needed, overwritten, chosen, remaining = {key}, set[int](), list[_PendingOp](), list[_PendingOp]()
        for pending in reversed(self._pending):
            if not (pending.writes & needed or pending.reads & overwritten):
                remaining.append(pending)
                continue
            chosen.append(pending)
            needed |= pending.reads | pending.writes
            overwritten |= pending.writes
        self._pending = remaining[::-1]
        for pending in reversed(chosen):
            args, kwargs = map_leaves((pending.args, pending.kwargs), lambda p: self._values[p.number], _KnownRef)
            leaves = result_leaves(_run(pending.func, args, kwargs))
            for place, leaf in zip(pending.results, leaves, strict=False):
                if place is not None:
                    self._values[place] = leaf


def _is_builtin(func: OpOverload) -> bool:
    # Other operators may have side effects or be random.
    return func.namespace in ("aten", "prims")


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _covers_storage(tensor: torch.Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return size == tensor.untyped_storage().nbytes() and is_dense(tuple(tensor.shape), tensor.stride())


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU, outside of all PyTorch modes; ``_ShapeOnly`` arguments become meta tensors."""
    cpu = torch.device("cpu")
    kwargs = {name: item for name, item in kwargs.items() if name != "pin_memory"}
    if func._schema.name in _BY_SHAPE:
        kwargs["device"] = cpu
    with without_modes(), below_autograd():
        args, kwargs = map_leaves(
            (args, kwargs), lambda s: torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta"), _ShapeOnly
        )
        args, kwargs = map_leaves((args, kwargs), lambda _: cpu, torch.device)
        return func(*args, **kwargs)


def _changed_array_error(source: str) -> Exception:
    return refusal(
        "the step writes to a tensor after .numpy(), or to the array that it returned",
        "they share memory, and the captured operators would not see the change",
        "call tensor.clone().numpy()",
        source,
    )
