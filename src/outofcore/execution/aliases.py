"""The user's tensors on persistent state: which ones share bytes, and where the bytes are.

A *state* is one storage that persists across steps. A *state alias* is one of the user's tensors on it; tied parameters
are several. A *home tensor* is a tensor over a slot of a home, and identifies the slot. ``state_moves`` moves bytes,
and ``tensor_data`` changes the tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large
from outofcore.capture.captured import CPU, Captured, StateBinding, Value
from outofcore.capture.optimizers import StateOwner
from outofcore.errors import StateError
from outofcore.execution.binding import tensor_on
from outofcore.graph import StorageKind
from outofcore.runtime.checksums import checksum
from outofcore.runtime.file_ranges import FIRST_RANGE, ReadFile, can_detect_writes
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.runtime.slots import Slots
from outofcore.tensor_data import is_in_host_memory, rebase_tensor, set_data

_POINTER = torch.Tensor.data_ptr
_STRIDE = torch.Tensor.stride
_SIZE = torch.Tensor.size
_DTYPE = attrgetter("dtype")


class StatePlace(Enum):
    """Where the bytes of a state, which is a persistent storage, are between two steps."""

    OWN = "own"  # in ordinary memory of the tensor
    HOME = "home"  # in a slot of a home
    ARENA = "arena"  # in a block that persists between steps, or in the block of a gradient
    ABSENT = "absent"  # without bytes: optimizer state before its first update, or a cleared gradient


# All moves of bytes. Between two steps of one program no bytes move.
TRANSITIONS: Mapping[tuple[StatePlace, StatePlace], str] = {
    (StatePlace.OWN, StatePlace.OWN): "moved off the device to make room for the arena, or back to it",
    (StatePlace.OWN, StatePlace.HOME): "written to a slot; or created in a slot, which the step adopts",
    (StatePlace.OWN, StatePlace.ARENA): "copied into its block in the arena",
    (StatePlace.OWN, StatePlace.ABSENT): "a gradient in ordinary memory was cleared or removed",
    (StatePlace.HOME, StatePlace.OWN): "read back when the step is closed; or released in place for the next owner",
    (StatePlace.HOME, StatePlace.HOME): "moved to another home, or within one to defragment it",
    (StatePlace.HOME, StatePlace.ARENA): "read into its block in the arena",
    (StatePlace.HOME, StatePlace.ABSENT): "a gradient at home was cleared or removed; its slot is kept",
    (StatePlace.ARENA, StatePlace.OWN): "moved out because it is small or no home has room; or replaced by the user",
    (StatePlace.ARENA, StatePlace.HOME): "saved when another program gets the arena, or the arena is closed",
    (StatePlace.ARENA, StatePlace.ARENA): "moved to its block in the next program",
    (StatePlace.ARENA, StatePlace.ABSENT): "a gradient in the arena was cleared or removed",
    (StatePlace.ABSENT, StatePlace.OWN): "a step produced a small gradient",
    (StatePlace.ABSENT, StatePlace.HOME): "produced in its slot by a step; or the slot was zeroed for a first update",
    (StatePlace.ABSENT, StatePlace.ARENA): "produced in its block by a step; or zeroed there for a first update",
}


@dataclass(slots=True)
class StateAlias:
    """One of the user's tensors in a storage that persists across steps."""

    key: str
    tensor: torch.Tensor  # the user's tensor, or the step's copy of ``shared_tensor``
    value: Value  # the layout that the step expects
    address: int = 0  # of the data, when it was last set or checked
    is_placeholder: bool = False  # replaces a cleared gradient that the user no longer has
    shared_tensor: torch.Tensor | None = None  # the user's tensor, if its memory is shared and must stay in place
    fingerprint: int | None = None  # fingerprint of the last copied contents of the shared memory

    @property
    def user_tensor(self) -> torch.Tensor:
        return self.tensor if self.shared_tensor is None else self.shared_tensor

    def read_shared(self) -> None:
        """Refresh the step's private copy of a tensor in shared memory, if the tensor may have changed."""
        if self.shared_tensor is None:
            return
        self.check_shape_and_dtype()
        fingerprint = _fingerprint_of(self.shared_tensor)
        if fingerprint is None or fingerprint != self.fingerprint:
            self._copy(self.tensor, self.shared_tensor)
            self.fingerprint = fingerprint

    def write_shared(self) -> None:
        if self.shared_tensor is not None:
            self._copy(self.shared_tensor, self.tensor)
            self.fingerprint = _fingerprint_of(self.shared_tensor)

    @staticmethod
    def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
        if to.data_ptr() != source.data_ptr():
            to.data.copy_(source.data)

    def keep_in_place(self) -> None:
        """Leave the user's tensor in its shared memory from now on, and create another tensor for the step."""
        self.shared_tensor, self.fingerprint = self.tensor, None
        self.tensor = self.shared_tensor.detach()

    def point_at(self, view: torch.Tensor) -> None:
        set_data(self.tensor, view)
        self.address = view.data_ptr()

    def has_moved(self) -> bool:
        """Return whether the tensor has another address, shape, stride or dtype than expected."""
        tensor, value = self.tensor, self.value
        return (
            tensor.data_ptr() != self.address
            or tensor.shape != value.shape
            or tensor.stride() != value.stride
            or tensor.dtype != value.dtype
        )

    def release_tensor(self) -> torch.Tensor | None:
        """Drop the references to the tensor; return it if other references keep it alive, else None."""
        reference = weakref.ref(self.tensor)
        self.tensor, self.shared_tensor = torch.empty(0, dtype=self.value.dtype), None
        return reference()

    def has_layout(self, value: Value) -> bool:
        return self.value.layout() == value.layout()

    def update_layout(self, value: Value) -> bool:
        """Record the layout of a gradient that a step has produced; return whether it is unchanged."""
        is_unchanged = self.has_layout(value)
        self.value, self.is_placeholder = value, False
        return is_unchanged

    def check_shape_and_dtype(self) -> None:
        """Raise ``StateError`` if the user's tensor has another shape or dtype than the step expects."""
        new, value = self.user_tensor, self.value
        if tuple(new.shape) != value.shape or new.dtype != value.dtype:
            raise StateError(
                f"{self.key} was given data of shape {tuple(new.shape)} and {new.dtype} in place of {value.shape} and "
                f"{value.dtype} after the step was compiled; compile the step again"
            )


def _fingerprint_of(tensor: torch.Tensor) -> int | None:
    """Return a checksum of a tensor's memory; None if it is not in host memory or has no elements."""
    if not is_in_host_memory(tensor) or not tensor.numel():
        return None
    flat = tensor.detach().as_strided((_extent(tensor),), (1,))
    return checksum(internals.memory_of(flat.view(torch.uint8)))


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(slots=True)
class PersistentState:
    """A storage that persists across steps, such as that of a parameter, and the user's tensors in it."""

    key: str
    bytes: int
    place: StatePlace
    aliases: list[StateAlias] = field(default_factory=list[StateAlias])
    # Offset of its slot at its home. In the arena: of a copy at home with the fingerprint ``home_fingerprint``.
    slot: int | None = None
    home_fingerprint: int | None = None
    home: int = 0  # index of the home of its slot, nearest first
    origin: torch.device = CPU  # the user's device
    # The bytes last shown at home or in the arena. The reference prevents a replacement from reusing their address.
    shown: torch.Tensor | None = None
    address: int = 0  # of these bytes
    reference_count: int = 0  # to a gradient when a step produced it (see ``count_references``)

    def show(self, base: torch.Tensor, place: StatePlace) -> None:
        """Point all the user's tensors at the bytes of ``base``, which are in ``place``."""
        self.set_shown(None if place is StatePlace.OWN else base)
        for alias in self.aliases:
            alias.point_at(tensor_on(base, alias.value))
        self.become(place)

    def become(self, place: StatePlace) -> None:
        """Change the state's place; raise ``StateError`` if ``TRANSITIONS`` does not list the change."""
        if place is not self.place and (self.place, place) not in TRANSITIONS:
            raise StateError(
                f"{self.key} changed from place '{self.place.value}' to '{place.value}', which must not happen; "
                "please report it"
            )
        self.place = place

    def apply_layout(self, key: str, value: Value) -> None:
        """Adopt the layout of ``value`` (such as its strides) for the gradient ``key``."""
        for alias in self.aliases:
            if alias.key != key or alias.has_layout(value):
                continue
            data = alias.tensor.data.clone()
            alias.value = value
            if self.shown is not None and not alias.is_placeholder:
                alias.point_at(tensor_on(self.shown, value).copy_(data))

    def set_shown(self, base: torch.Tensor | None) -> None:
        self.shown = base
        self.address = 0 if base is None else base.data_ptr()

    def is_shared(self) -> bool:
        """Return whether all the user's tensors are in shared memory, so that the step works on a copy."""
        return bool(self.aliases) and all(alias.shared_tensor is not None for alias in self.aliases)

    def is_unused(self) -> bool:
        """Return whether the state's bytes are unused, because all gradients in it were cleared."""
        return bool(self.aliases) and all(alias.is_placeholder for alias in self.aliases)

    def mark_absent(self) -> None:
        self.become(StatePlace.ABSENT)
        self.set_shown(None)

    def current_bytes(self) -> torch.Tensor:
        """Return the state's bytes as a uint8 tensor, which may be a view of the state's memory."""
        if self.has_expected_layout():
            return internals.view_storage_bytes(self.aliases[0].tensor)[: self.bytes]
        gathered = torch.zeros(self.bytes, dtype=torch.uint8, device=self.aliases[0].tensor.device)
        for alias in self.aliases:
            tensor_on(gathered, alias.value).copy_(alias.tensor.data)
        return gathered

    def fingerprint(self) -> int:
        return checksum(internals.memory_of(self.current_bytes() if self.shown is None else self.shown))

    def offset_in(self, address: int) -> int:
        """Return the offset of the state's bytes from ``address``, such as the address of the arena."""
        alias = self.aliases[0]
        return alias.address - alias.value.offset * alias.value.dtype.itemsize - address

    def has_expected_layout(self) -> bool:
        """Return whether the user's tensors share one storage at the expected offsets and strides."""
        first = self.aliases[0].tensor
        return first.untyped_storage().nbytes() >= self.bytes and all(
            internals.storage_key(alias.tensor) == internals.storage_key(first)
            and alias.tensor.storage_offset() == alias.value.offset
            and alias.tensor.stride() == alias.value.stride
            for alias in self.aliases
        )

    def is_replaced(self) -> bool:
        """Return whether the user has moved all the tensors out of the state's memory."""
        if self.shown is None:
            return False
        shown_key = internals.storage_key(self.shown)
        return all(w.has_moved() and internals.storage_key(w.tensor) != shown_key for w in self.aliases)

    def release_moved_aliases(self) -> list[StateAlias]:
        """Remove the aliases with tensors that the user has moved or reshaped, and return them."""
        moved = [alias for alias in self.aliases if alias.has_moved()]
        self.aliases = [alias for alias in self.aliases if not alias.has_moved()]
        return moved

    def add_alias(self, alias: StateAlias) -> None:
        """Add the tensor of ``alias`` to this state, with its current layout as the expected one."""
        tensor = alias.tensor
        value = replace(
            alias.value,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )
        self.aliases.append(StateAlias(alias.key, tensor, value, tensor.data_ptr()))

    def has_storage_moved(self) -> bool:
        return self.shown is not None and self.shown.data_ptr() != self.address

    def check_not_moved(self) -> None:
        """Raise ``StateError`` if the user has moved the state's storage, for example by ``share_memory()``."""
        if self.has_storage_moved():
            raise StateError(
                f"{self.key} has been moved to memory that processes share, by share_memory() or by being sent to "
                "another process, and a step cannot work there; give other processes a copy (copy.deepcopy(model)), "
                "close this step and compile it again"
            )


def adopt_replacements(states: Iterable[PersistentState]) -> list[str]:
    """Take over data that the user assigned to tensors (``p.data = other``); return the tensors' keys.

    A new shape or dtype raises ``StateError`` before any copy.
    """
    replacements = [(state, alias) for state in states for alias in state.aliases if alias.has_moved()]
    for _, alias in replacements:  # before any tensor is copied
        alias.check_shape_and_dtype()
    shown_keys = {internals.storage_key(state.shown) for state, _ in replacements if state.shown is not None}
    # Replacements may view bytes that are overwritten here, in another order or of another tensor: copy them first.
    copies = {
        id(alias): alias.tensor.data.clone()
        for state, alias in replacements
        if state.shown is not None and internals.storage_key(alias.tensor) in shown_keys
    }
    for state, alias in replacements:
        if state.shown is not None:
            new = copies.get(id(alias), alias.tensor.data)
            alias.point_at(tensor_on(state.shown, alias.value).copy_(new))
        alias.address = alias.tensor.data_ptr()
    return [alias.key for _, alias in replacements]


def has_sharing_changed(states: Iterable[PersistentState]) -> bool:
    """Return whether the user has tied or untied tensors since the capture, for example by ``a.data = b.data``."""
    owners: dict[int, PersistentState] = {}
    for state in states:
        if state.place is StatePlace.ABSENT or not state.bytes:
            continue
        keys = {internals.storage_key(alias.tensor) for alias in state.aliases}
        is_untied = len(state.aliases) > 1 and not state.has_expected_layout()
        if is_untied or any(owners.setdefault(key, state) is not state for key in keys):
            return True
    return False


def has_layout_changed(states: Iterable[PersistentState]) -> bool:
    """Return whether a moved tensor has new strides; raise ``StateError`` if it has a new shape or dtype."""
    moved = [alias for state in states for alias in state.aliases if alias.has_moved()]
    for alias in moved:
        alias.check_shape_and_dtype()
    return any(alias.tensor.stride() != alias.value.stride for alias in moved)


def matches_capture(captured: Captured) -> bool:
    """Return whether the user's tensors still have the dtypes, shapes, strides and sharing of the capture."""
    # Strides decide which kernels run, and in which order these add up.
    storages: dict[int, int] = {}
    owners: dict[int, int] = {}
    by_key = {binding.key: binding.tensor for binding in captured.states}
    for binding in captured.states:
        value, tensor = captured.values[binding.value], binding.tensor
        if isinstance(binding.owner, StateOwner):
            tensor = binding.owner.optimizer.state.get(binding.owner.parameter, _NO_STATE).get(binding.owner.name)
        elif binding.kind is StorageKind.GRADIENT:
            tensor = getattr(by_key[binding.key.removesuffix(".grad")], "grad", None)
        if not isinstance(tensor, torch.Tensor):
            continue
        if (tensor.dtype, tuple(tensor.shape), tensor.stride()) != (value.dtype, value.shape, value.stride):
            return False
        if tensor.numel() and not tensor.is_meta:
            key = internals.storage_key(tensor)
            if owners.setdefault(key, value.storage) != value.storage or storages.setdefault(value.storage, key) != key:
                return False
    return True


def release_replacements(states: Iterable[PersistentState]) -> list[PersistentState]:
    """Drop tensors with user-assigned memory from their states; return the states left without tensors."""
    shown_states = [state for state in states if state.place in (StatePlace.HOME, StatePlace.ARENA)]
    moved = [alias for state in shown_states for alias in state.release_moved_aliases()]
    if not moved:
        return []
    shown = {
        internals.storage_key(s.shown): s for s in shown_states if s.shown is not None and not s.has_storage_moved()
    }
    for alias in moved:  # a tensor that now views the memory of another state joins it
        state = shown.get(internals.storage_key(alias.tensor))
        if state is not None:
            state.add_alias(alias)
    return [state for state in shown_states if not state.aliases]


def is_unmoved(states: Iterable[PersistentState]) -> bool:
    """Return whether all tensors have their expected addresses, shapes, strides and dtypes."""
    # This runs before every step, so it uses loops in C.
    aliases = [alias for state in states for alias in state.aliases]
    tensors, values = [alias.tensor for alias in aliases], [alias.value for alias in aliases]
    return (
        list(map(_POINTER, tensors)) == [alias.address for alias in aliases]
        and list(map(_SIZE, tensors)) == [value.shape for value in values]
        and list(map(_STRIDE, tensors)) == [value.stride for value in values]
        and list(map(_DTYPE, tensors)) == [value.dtype for value in values]
    )


def displaced_keys(states: Iterable[PersistentState]) -> list[str]:
    """Return the keys of tensors that have left their expected address in a home or the arena."""
    places = (StatePlace.HOME, StatePlace.ARENA)
    aliases = [alias for state in states if state.place in places for alias in state.aliases]
    addresses, shown = (
        list(map(_POINTER, [alias.tensor for alias in aliases])),
        [alias.address for alias in aliases],
    )
    if addresses == shown:
        return []
    return [alias.key for alias, current, last in zip(aliases, addresses, shown, strict=True) if current != last]


# Slots and their home tensors


@dataclass
class TensorSlot:
    """A slot of a home, and a reference to the storage of the tensor over it."""

    home: int
    offset: int
    bytes: int
    owned: bool  # a step releases the slot; otherwise it is released with the last tensor
    reference: StorageWeakRef


class HomeTensors:
    """Creates tensors over slots (places for bytes in a home), and finds the slot of a tensor."""

    def __init__(self, slots: Sequence[Slots]) -> None:
        self.slots = tuple(slots)
        # By the key of the storage. The weak reference keeps the key from being given to another storage.
        self._slots_by_key: dict[int, TensorSlot] = {}
        self._keys: dict[tuple[int, int], int] = {}  # of the last home tensor of each slot
        # ``drop_cache`` for tensors in the home of an eager loop.
        self.drop_loop_cache: Callable[[torch.Tensor], object] | None = None

    def create(self, home: int, offset: int, count: int, *, owned: bool = True) -> torch.Tensor:
        """Return a new tensor over a slot, and track it in place of an earlier tensor over the same slot."""
        tensor = self.slots[home].home.tensor_of(offset, count)
        if count:
            self.forget(home, offset)
            reference = StorageWeakRef(tensor.untyped_storage())
            self._slots_by_key[internals.storage_key(tensor)] = TensorSlot(home, offset, count, owned, reference)
            self._keys[home, offset] = internals.storage_key(tensor)
        return tensor

    def forget(self, home: int, offset: int) -> None:
        """Forget the tensor over a slot, without freeing the slot."""
        key = self._keys.pop((home, offset), None)
        if key is not None:
            del self._slots_by_key[key]

    def find(self, tensor: torch.Tensor) -> TensorSlot | None:
        slot = self._slots_by_key.get(internals.storage_key(tensor))
        return None if slot is None or slot.reference.expired() else slot

    def store_of(self, slot: TensorSlot) -> HomeStore:
        return self.slots[slot.home].home

    def drop_cache(self, tensor: torch.Tensor) -> None:
        """Release the memory that caches a tensor's slot on a disk."""
        slot = self.find(tensor)
        if slot is not None:
            self.store_of(slot).drop_cache(tensor)
        elif self.drop_loop_cache is not None:
            self.drop_loop_cache(tensor)

    def restore(self, tensor: torch.Tensor) -> None:
        """Discard the user's changes to a tensor over a file that the home only reads."""
        slot = self.find(tensor)
        files = None if slot is None else self.slots[slot.home].home.files
        if slot is not None and files is not None:
            files.restore(slot.offset)

    def allocate(self, count: int) -> torch.Tensor:
        """Take a slot of ``count`` uninitialized bytes at the last home, and return a tensor over it."""
        self.release_expired()
        last = len(self.slots) - 1
        return self.create(last, self.slots[last].take(count), count, owned=False)

    def adopt(self, file: ReadFile, first_byte: int, count: int) -> torch.Tensor:
        """Use a range of a file as a slot of the last home; return a tensor over it."""
        self.release_expired()
        last = len(self.slots) - 1
        files = self.slots[last].home.files
        if files is None:
            raise StateError("this home cannot read files in place; please report it")
        return self.create(last, files.adopt(file, first_byte, count), count, owned=False)

    def adopt_mapped(self, tensor: torch.Tensor, files: MappedFiles) -> torch.Tensor | None:
        """Return a tensor over the file range behind a memory-mapped tensor; None if the file cannot be used."""
        # Safetensors and ``torch.load(mmap=True)`` map checkpoints. ``files`` must be newer than the tensor's memory.
        storage = tensor.untyped_storage()
        if not is_in_host_memory(tensor) or not is_large(storage.nbytes()) or not self.takes_files:
            return None
        file_range = files.find_unwritten(storage.data_ptr(), storage.nbytes())
        return None if file_range is None else self.adopt(*file_range, storage.nbytes())

    @property
    def takes_files(self) -> bool:
        """Whether the last home can use files in place as slots."""
        return self.slots[-1].home.files is not None and can_detect_writes()

    def find_accessible_slot(self, tensor: torch.Tensor, *, to_write: bool = False) -> tuple[HomeStore, int] | None:
        """Return the home and offset at which a tensor's bytes can be accessed directly; None if they cannot be."""
        slot = self.find(tensor)
        if slot is None:
            return None
        slots = self.slots[slot.home]
        if to_write:  # a home does not write files that it does not own; may raise ``SpillError``
            slots.move_to_home(slot.offset)
        moved = slot.offset >= FIRST_RANGE and not slots.is_in_file(slot.offset)  # may not be page-aligned
        return None if slots.was_written(slot.offset) or (moved and to_write) else (slots.home, slot.offset)

    def move_to_own_memory(self, tensor: torch.Tensor | None) -> None:
        """Move a tensor to new memory, so that its old slot can be reused; ignore None."""
        if tensor is None:
            return
        count = tensor.untyped_storage().nbytes()
        base = self.allocate(count) if is_large(count) else torch.empty(count, dtype=torch.uint8)
        base.copy_(internals.view_storage_bytes(tensor))
        self.drop_cache(base)
        rebase_tensor(tensor, base)

    def disown(self, home: int, offset: int, count: int) -> None:
        """Let a slot be freed when its last tensor is deleted."""
        key = self._keys.get((home, offset))
        if key is None:
            self.slots[home].free(offset, count)
        else:
            self._slots_by_key[key].owned = False

    def release_expired(self) -> None:
        """Free the slots of tensors that have been deleted, except slots that a step owns."""
        for key, slot in [(k, s) for k, s in self._slots_by_key.items() if s.reference.expired()]:
            del self._slots_by_key[key]
            if self._keys.get((slot.home, slot.offset)) == key:
                del self._keys[slot.home, slot.offset]
            if not slot.owned:
                self.slots[slot.home].free(slot.offset, slot.bytes)


# Gradients and optimizer state, as the user has them


def assign_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set ``parameter.grad``, even to a gradient on another device."""
    if parameter.grad is gradient:
        return
    data = gradient.data
    if data.device == parameter.device:
        parameter.grad = gradient
        return
    set_data(gradient, torch.empty((), dtype=data.dtype, device=parameter.device).expand(data.shape))
    parameter.grad = gradient
    set_data(gradient, data)


def count_references(gradient: torch.Tensor) -> int:
    """Return the number of Python references to a tensor, including stale ones such as an old loop variable."""
    return sys.getrefcount(gradient)


_NO_STATE: dict[str, Any] = {}


class OptimizerStates:
    """Finds the optimizer state that the user has changed since the capture."""

    def __init__(self, captured: Captured) -> None:
        together: dict[tuple[int, int], list[tuple[StateBinding, StateOwner]]] = {}
        for binding in captured.states:
            owner = binding.owner
            if isinstance(owner, StateOwner):
                together.setdefault((id(owner.optimizer), id(owner.parameter)), []).append((binding, owner))
        self._parameters: list[tuple[Optimizer, torch.Tensor, tuple[str, ...]]] = [
            (pairs[0][1].optimizer, pairs[0][1].parameter, tuple([owner.name for _, owner in pairs]))
            for pairs in together.values()
        ]
        self._pairs = [pair for pairs in together.values() for pair in pairs]
        self._bindings = [binding for binding, _ in self._pairs]
        self._strides = [captured.values[binding.value].stride for binding in self._bindings]
        self._last_tensors: list[torch.Tensor | None] | None = None

    def _current_tensors(self) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = []
        for optimizer, parameter, names in self._parameters:
            tensors += map(optimizer.state.get(parameter, _NO_STATE).get, names)
        return tensors

    def has_changed(self, *, begun: bool) -> bool:
        """Return whether optimizer state has other strides than at the capture, or (if ``begun``) is missing."""
        tensors = self._last_tensors = self._current_tensors()
        existing = [tensor for tensor in tensors if tensor is not None]
        if len(existing) == len(tensors):
            return list(map(_STRIDE, existing)) != self._strides
        pairs = zip(tensors, self._strides, strict=True)
        return begun or any(tensor is not None and tensor.stride() != stride for tensor, stride in pairs)

    def find_replaced(
        self, expected_tensor: Callable[[StateBinding], torch.Tensor]
    ) -> list[tuple[StateBinding, StateOwner, torch.Tensor | None]]:
        """List optimizer tensors that were replaced or removed, as (binding, owner, current tensor or None)."""
        tensors, self._last_tensors = self._last_tensors or self._current_tensors(), None
        expected = list(map(expected_tensor, self._bindings))
        if all(map(is_, tensors, expected)):
            return []
        triples = zip(self._pairs, tensors, expected, strict=True)
        return [(binding, owner, current) for (binding, owner), current, last in triples if current is not last]
