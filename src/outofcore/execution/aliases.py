"""The user's tensors on persistent state: which tensors share bytes, where those may be, and how tensors are changed.

``Place`` and ``TRANSITIONS`` decide where a state may be and how it moves; ``state_moves`` moves it, and
``tensor_data`` writes the tensors.

A *state* is one storage that persists. A *window* is one of the user's tensors on it; tied parameters are several. A
*face* is a tensor over a slot at a home, by which the slot is recognised and given back. Gradients and optimizer state
are looked up where the user's own objects have them.
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
from outofcore.runtime.file_ranges import FIRST_RANGE, ReadFile, writes_are_seen
from outofcore.runtime.homes import HomeStore
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.runtime.slots import Slots
from outofcore.tensor_data import is_in_host_memory, move_onto, set_data

_POINTER = torch.Tensor.data_ptr
_STRIDE = torch.Tensor.stride
_SIZE = torch.Tensor.size
_DTYPE = attrgetter("dtype")


class Place(Enum):
    OWN = "own"  # in memory of the tensor's own, as plain PyTorch has it
    HOME = "home"  # in its slot
    ARENA = "arena"  # in a block that wraps around the step, or where a step has left a gradient
    UNBORN = "unborn"  # nowhere: optimizer state before its first update, a gradient that was cleared


# How bytes get from one place to another: all that there is. Between two steps of one program nothing moves.
TRANSITIONS: Mapping[tuple[Place, Place], str] = {
    (Place.OWN, Place.OWN): "the user's device gives its memory to the arena, or gets it back",
    (Place.OWN, Place.HOME): "written to a slot; or born in one, which is claimed as it is",
    (Place.OWN, Place.ARENA): "copied into the block of a program that keeps it on the device",
    (Place.OWN, Place.UNBORN): "a gradient in memory of its own was cleared or taken away",
    (Place.HOME, Place.OWN): "read back as the step is closed; or left to whoever needs it next, where it is",
    (Place.HOME, Place.HOME): "moved to another home, or within one whose free pages are moved together",
    (Place.HOME, Place.ARENA): "read into the block of a program that keeps it on the device",
    (Place.HOME, Place.UNBORN): "a gradient at home was cleared or taken away; its slot waits for the next one",
    (Place.ARENA, Place.OWN): "taken out where small, or no home has room; or the user has put other memory there",
    (Place.ARENA, Place.HOME): "saved, as another program or nothing takes the arena",
    (Place.ARENA, Place.ARENA): "moved to where the next program has its block",
    (Place.ARENA, Place.UNBORN): "a gradient that stayed was cleared or taken away",
    (Place.UNBORN, Place.OWN): "a small gradient arrived in memory of its own",
    (Place.UNBORN, Place.HOME): "a gradient arrived in its slot; or one of zeros waits for a first update",
    (Place.UNBORN, Place.ARENA): "a gradient stayed; or a block of zeros waits for a first update",
}


@dataclass(slots=True)
class Window:
    """One of the user's tensors on a state.

    Attributes:
        value: the layout that the step expects.
        address: of its data, when it was last set or checked.
        stands_in: whether it replaces a cleared gradient that the user no longer has.
        users: the user's tensor if its memory must stay in place because others see it, such as a file. ``tensor`` then
            stands in for it, and is copied before and after each step (``read``, ``write``).
        seen: the fingerprint of what was copied last.
    """

    key: str
    tensor: torch.Tensor
    value: Value
    address: int = 0
    stands_in: bool = False
    users: torch.Tensor | None = None
    seen: int | None = None

    @property
    def known_as(self) -> torch.Tensor:
        """The tensor that the user has."""
        return self.tensor if self.users is None else self.users

    def read(self) -> None:
        """Copy shared memory to the stand-in if it has changed; raises ``StateError`` for another shape or dtype."""
        if self.users is None:
            return
        self.check_alike()
        seen = _fingerprint_of(self.users)
        if seen is None or seen != self.seen:
            self._copy(self.tensor, self.users)
            self.seen = seen

    def write(self) -> None:
        """Copy the step's result to the shared memory."""
        if self.users is not None:
            self._copy(self.users, self.tensor)
            self.seen = _fingerprint_of(self.users)

    @staticmethod
    def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
        if to.data_ptr() != source.data_ptr():
            to.data.copy_(source.data)

    def stay(self) -> None:
        """Keep the user's tensor in place from now on, and make a stand-in for it."""
        self.users, self.seen = self.tensor, None
        self.tensor = self.users.detach()

    def point_at(self, view: torch.Tensor) -> None:
        set_data(self.tensor, view)
        self.address = view.data_ptr()

    def moved(self) -> bool:
        """Return whether the user has given it other data, or another layout such as transposed."""
        tensor, value = self.tensor, self.value
        return (
            tensor.data_ptr() != self.address
            or tensor.shape != value.shape
            or tensor.stride() != value.stride
            or tensor.dtype != value.dtype
        )

    def give_up(self) -> torch.Tensor | None:
        """Forget the tensor; returns it if anybody else refers to it."""
        reference = weakref.ref(self.tensor)
        self.tensor, self.users = torch.empty(0, dtype=self.value.dtype), None
        return reference()

    def lies_as(self, value: Value) -> bool:
        """Return whether its layout is that of a value."""
        return self.value.layout() == value.layout()

    def renew(self, value: Value) -> bool:
        """Record the layout of a gradient that a step has left; return whether it is unchanged."""
        known = self.lies_as(value)
        self.value, self.stands_in = value, False
        return known

    def check_alike(self) -> None:
        """Raise ``StateError`` for data whose shape or dtype differs from the capture."""
        new, value = self.known_as, self.value
        if tuple(new.shape) != value.shape or new.dtype != value.dtype:
            raise StateError(
                f"{self.key} was given data of shape {tuple(new.shape)} and {new.dtype} in place of {value.shape} and "
                f"{value.dtype} after the step was compiled; compile the step again"
            )


def _fingerprint_of(tensor: torch.Tensor) -> int | None:
    """Return the fingerprint of a tensor; None unless it is contiguous in memory of the CPU."""
    if not is_in_host_memory(tensor) or not tensor.numel():
        return None
    flat = tensor.detach().as_strided((_extent(tensor),), (1,))
    return checksum(internals.memory_of(flat.view(torch.uint8)))


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(slots=True)
class State:
    """One storage that persists across steps, with the user's tensors on it."""

    key: str
    bytes: int
    place: Place
    windows: list[Window] = field(default_factory=list[Window])
    # The offset of its slot at its home. In the arena: of a copy there, whose fingerprint is ``mark``.
    slot: int | None = None
    mark: int | None = None
    home: int = 0  # which of the homes, nearest first, has its slot
    origin: torch.device = CPU  # where the user had it
    # At home and in the arena, the bytes that were shown last. Held, so that nothing that the user puts in their place
    # can have the same address.
    shown: torch.Tensor | None = None
    address: int = 0  # of these bytes
    references: int = 0  # to a gradient that a step has left, when it did (see ``references_to``)

    def show(self, base: torch.Tensor, place: Place) -> None:
        """Point the user's tensors at these bytes."""
        self.look_at(None if place is Place.OWN else base)
        for window in self.windows:
            window.point_at(tensor_on(base, window.value))
        self.become(place)

    def become(self, place: Place) -> None:
        """Record where the bytes are now; only this method changes ``place``, and refuses invalid transitions."""
        if place is not self.place and (self.place, place) not in TRANSITIONS:
            raise StateError(f"{self.key} went from {self.place.value} to {place.value}: please report it")
        self.place = place

    def lay(self, key: str, value: Value) -> None:
        """Give a gradient the layout that a step expects: another step may have left it transposed, say."""
        for window in self.windows:
            if window.key != key or window.lies_as(value):
                continue
            data = window.tensor.data.clone()
            window.value = value
            if self.shown is not None and not window.stands_in:
                window.point_at(tensor_on(self.shown, value).copy_(data))

    def look_at(self, base: torch.Tensor | None) -> None:
        """Record the bytes that are shown at home or in the arena."""
        self.shown = base
        self.address = 0 if base is None else base.data_ptr()

    def stays(self) -> bool:
        """Return whether its bytes are in memory that others see; what is shown is a copy for the step."""
        return bool(self.windows) and all(window.users is not None for window in self.windows)

    def is_idle(self) -> bool:
        """Return whether nobody refers to its bytes: all the gradients on it were cleared."""
        return bool(self.windows) and all(window.stands_in for window in self.windows)

    def lose(self) -> None:
        """Record that the bytes are gone."""
        self.become(Place.UNBORN)
        self.look_at(None)

    def bytes_now(self) -> torch.Tensor:
        """Return the current bytes as uint8, on the storage of the user's tensors where their layout is as expected."""
        if self.lies_together():
            return internals.storage_bytes(self.windows[0].tensor)[: self.bytes]
        gathered = torch.zeros(self.bytes, dtype=torch.uint8, device=self.windows[0].tensor.device)
        for window in self.windows:
            tensor_on(gathered, window.value).copy_(window.tensor.data)
        return gathered

    def fingerprint(self) -> int:
        """Return the fingerprint of the shown bytes, which are on the CPU."""
        return checksum(internals.memory_of(self.bytes_now() if self.shown is None else self.shown))

    def offset_in(self, address: int) -> int:
        """Return the offset of the bytes from an arena's address."""
        window = self.windows[0]
        return window.address - window.value.offset * window.value.dtype.itemsize - address

    def lies_together(self) -> bool:
        """Return whether the user's tensors share one storage as the step expects."""
        first = self.windows[0].tensor
        return first.untyped_storage().nbytes() >= self.bytes and all(
            internals.storage_key(window.tensor) == internals.storage_key(first)
            and window.tensor.storage_offset() == window.value.offset
            and window.tensor.stride() == window.value.stride
            for window in self.windows
        )

    def is_elsewhere(self) -> bool:
        """Return whether the user has replaced the shown memory for all tensors on it."""
        if self.shown is None:
            return False
        own = internals.storage_key(self.shown)
        return all(w.moved() and internals.storage_key(w.tensor) != own for w in self.windows)

    def let_go(self) -> list[Window]:
        """Release and return the windows that the user has moved elsewhere."""
        moved = [window for window in self.windows if window.moved()]
        self.windows = [window for window in self.windows if not window.moved()]
        return moved

    def tie(self, window: Window) -> None:
        """Add a tensor on these bytes."""
        tensor = window.tensor
        value = replace(
            window.value,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )
        self.windows.append(Window(window.key, tensor, value, tensor.data_ptr()))

    def moved_away(self) -> bool:
        """Return whether the storage itself was moved, with all tensors on it."""
        return self.shown is not None and self.shown.data_ptr() != self.address

    def check_in_place(self) -> None:
        """Raise ``StateError`` if the storage was moved with all tensors on it, as into shared memory."""
        if self.moved_away():
            raise StateError(
                f"{self.key} has been moved to memory that processes share, by share_memory() or by being sent to "
                "another process, and a step cannot work there; give other processes a copy (copy.deepcopy(model)), "
                "close this step and compile it again"
            )


def take_over(states: Iterable[State]) -> list[str]:
    """Take over the user's replacements of what was shown, and return their keys.

    Raises ``StateError`` if one has another shape or dtype than before; then none has been taken over.
    """
    found = [(state, window) for state in states for window in state.windows if window.moved()]
    for _, window in found:
        window.check_alike()
    written = {internals.storage_key(state.shown) for state, _ in found if state.shown is not None}
    # What looks at bytes that are written here, its own in another order or another tensor's, is put aside first.
    aside = {
        id(window): window.tensor.data.clone()
        for state, window in found
        if state.shown is not None and internals.storage_key(window.tensor) in written
    }
    for state, window in found:
        if state.shown is not None:
            new = aside.get(id(window), window.tensor.data)
            window.point_at(tensor_on(state.shown, window.value).copy_(new))
        window.address = window.tensor.data_ptr()
    return [window.key for _, window in found]


def shared_otherwise(states: Iterable[State]) -> bool:
    """Return whether tensors have been tied or untied since they were captured.

    The user's replacement of a tensor may be another tensor's data (``a.data = b.data``), or its own where it was
    shared.
    """
    owners: dict[int, State] = {}
    for state in states:
        if state.place is Place.UNBORN or not state.bytes:
            continue
        keys = {internals.storage_key(window.tensor) for window in state.windows}
        apart = len(state.windows) > 1 and not state.lies_together()
        if apart or any(owners.setdefault(key, state) is not state for key in keys):
            return True
    return False


def lie_otherwise(states: Iterable[State]) -> bool:
    """Return whether a replacement of the user's has another memory layout, such as transposed.

    Raises ``StateError`` if it has another shape or dtype than before.
    """
    moved = [window for state in states for window in state.windows if window.moved()]
    for window in moved:
        window.check_alike()
    return any(window.tensor.stride() != window.value.stride for window in moved)


def fits(captured: Captured) -> bool:
    """Return whether the user's tensors share memory and have layouts as they did when a step was captured.

    Layouts decide which kernels run, and in which order these add up.
    """
    storages: dict[int, int] = {}
    owners: dict[int, int] = {}
    by_key = {binding.key: binding.tensor for binding in captured.states}
    for binding in captured.states:
        value, tensor = captured.values[binding.value], binding.tensor
        if isinstance(binding.owner, StateOwner):
            tensor = binding.owner.optimizer.state.get(binding.owner.parameter, _NOTHING).get(binding.owner.name)
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


def let_go(states: Iterable[State]) -> list[State]:
    """Release the user's replacements of what was shown; return the states that nobody refers to any more.

    A tensor that was tied to another one here stays tied to it.
    """
    here = [state for state in states if state.place in (Place.HOME, Place.ARENA)]
    moved = [window for state in here for window in state.let_go()]
    if not moved:
        return []
    shown = {internals.storage_key(s.shown): s for s in here if s.shown is not None and not s.moved_away()}
    for window in moved:
        state = shown.get(internals.storage_key(window.tensor))
        if state is not None:
            state.tie(window)
    return [state for state in here if not state.windows]


def unmoved(states: Iterable[State]) -> bool:
    """Return whether no window has moved (see ``Window.moved``).

    It checks all tensors before every step, so it uses passes that Python makes at the speed of C.
    """
    windows = [window for state in states for window in state.windows]
    tensors, values = [window.tensor for window in windows], [window.value for window in windows]
    return (
        list(map(_POINTER, tensors)) == [window.address for window in windows]
        and list(map(_SIZE, tensors)) == [value.shape for value in values]
        and list(map(_STRIDE, tensors)) == [value.stride for value in values]
        and list(map(_DTYPE, tensors)) == [value.dtype for value in values]
    )


def displaced(states: Iterable[State]) -> list[str]:
    """Return the keys of tensors whose memory is not what was last shown, at home or in the arena."""
    here = (Place.HOME, Place.ARENA)
    windows = [window for state in states if state.place in here for window in state.windows]
    now, shown = list(map(_POINTER, [window.tensor for window in windows])), [window.address for window in windows]
    if now == shown:
        return []
    return [window.key for window, one, other in zip(windows, now, shown, strict=True) if one != other]


# Slots and what shows them


@dataclass
class Face:
    """A slot that a storage shows from its first byte on.

    ``home`` counts from the nearest. If ``owned``, a step gives the slot back when it no longer needs it; else it is
    given back once nothing refers to the face.
    """

    home: int
    offset: int
    bytes: int
    owned: bool
    reference: StorageWeakRef


class Faces:
    """Makes the faces of slots, and recognises them; ``slots`` are of the homes, nearest first.

    A parameter that is created at home, and all that a step leaves there for others, have slots that live as long as
    their faces. A step that takes such a tensor over claims its slot.
    """

    def __init__(self, slots: Sequence[Slots]) -> None:
        self.slots = tuple(slots)
        # By the key of the storage. The weak reference keeps the key from being given to another storage.
        self._faces: dict[int, Face] = {}
        self._keys: dict[tuple[int, int], int] = {}  # of the last face of each slot
        # The same as ``drop_cache``, for what lies in the home of a loop.
        self.drop_elsewhere: Callable[[torch.Tensor], object] | None = None

    def show(self, home: int, offset: int, count: int, *, owned: bool = True) -> torch.Tensor:
        """Make a new face of a slot (see ``HomeStore.face``) and forget an older one."""
        tensor = self.slots[home].home.face(offset, count)
        if count:
            self.drop(home, offset)
            reference = StorageWeakRef(tensor.untyped_storage())
            self._faces[internals.storage_key(tensor)] = Face(home, offset, count, owned, reference)
            self._keys[home, offset] = internals.storage_key(tensor)
        return tensor

    def drop(self, home: int, offset: int) -> None:
        """Forget the face of a slot that is to be reused."""
        key = self._keys.pop((home, offset), None)
        if key is not None:
            del self._faces[key]

    def find(self, tensor: torch.Tensor) -> Face | None:
        """Return the slot that a tensor's storage shows, or None."""
        found = self._faces.get(internals.storage_key(tensor))
        return None if found is None or found.reference.expired() else found

    def store_of(self, face: Face) -> HomeStore:
        return self.slots[face.home].home

    def drop_cache(self, tensor: torch.Tensor) -> None:
        """Give back physical memory in which a tensor's slot is cached."""
        face = self.find(tensor)
        if face is not None:
            self.store_of(face).drop_cache(tensor)
        elif self.drop_elsewhere is not None:
            self.drop_elsewhere(tensor)

    def restore(self, tensor: torch.Tensor) -> None:
        """Discard writes to a tensor that is read in place from a file."""
        face = self.find(tensor)
        files = None if face is None else self.slots[face.home].home.files
        if face is not None and files is not None:
            files.restore(face.offset)

    def birth(self, count: int) -> torch.Tensor:
        """Make a face of ``count`` bytes with unknown contents at the last home, for a tensor that is created there."""
        self.sweep()
        last = len(self.slots) - 1
        return self.show(last, self.slots[last].take(count), count, owned=False)

    def adopt(self, file: ReadFile, begin: int, count: int) -> torch.Tensor:
        """Make a face of a file's bytes at the last home, without a copy; raises ``StateError`` if it cannot."""
        self.sweep()
        last = len(self.slots) - 1
        files = self.slots[last].home.files
        if files is None:
            raise StateError("this home takes no files; please report it")
        return self.show(last, files.adopt(file, begin, count), count, owned=False)

    def adopt_mapped(self, tensor: torch.Tensor, files: MappedFiles) -> torch.Tensor | None:
        """Make a face of a tensor's whole storage if that is mapped from a file and unwritten; else return None.

        Safetensors and ``torch.load(mmap=True)`` map checkpoints so: the bytes are on a disk already. ``files`` must be
        newer than the tensor's memory. The pages are mapped again at the last home.
        """
        storage = tensor.untyped_storage()
        if not is_in_host_memory(tensor) or not is_large(storage.nbytes()) or not self.takes_files:
            return None
        found = files.unwritten(storage.data_ptr(), storage.nbytes())
        return None if found is None else self.adopt(*found, storage.nbytes())

    @property
    def takes_files(self) -> bool:
        """Whether the last home reads files in place, and detects writes to tensors that show them."""
        return self.slots[-1].home.files is not None and writes_are_seen()

    def slot_of(self, tensor: torch.Tensor, *, to_write: bool = False) -> tuple[HomeStore, int] | None:
        """Return the home and slot that hold the bytes of a tensor's storage; None if only the tensor has them.

        With ``to_write`` the slot is never in somebody else's file: the bytes move first, which may raise
        ``SpillError``.
        """
        face = self.find(tensor)
        if face is None:
            return None
        slots = self.slots[face.home]
        if to_write:
            slots.own(face.offset)
        moved = face.offset >= FIRST_RANGE and not slots.is_in_file(face.offset)  # not at a page's beginning
        return None if slots.was_written(face.offset) or (moved and to_write) else (slots.home, face.offset)

    def part(self, tensor: torch.Tensor | None) -> None:
        """Move a tensor that the user has put aside to a place of its own, because its slot is to be reused."""
        if tensor is None:
            return
        count = tensor.untyped_storage().nbytes()
        base = self.birth(count) if is_large(count) else torch.empty(count, dtype=torch.uint8)
        base.copy_(internals.storage_bytes(tensor))
        self.drop_cache(base)
        move_onto(tensor, base)

    def disown(self, home: int, offset: int, count: int) -> None:
        """Let a slot live as long as its face."""
        key = self._keys.get((home, offset))
        if key is None:
            self.slots[home].give(offset, count)
        else:
            self._faces[key].owned = False

    def sweep(self) -> None:
        """Forget faces that are gone, and release the slots that no step owns."""
        for key, face in [(k, f) for k, f in self._faces.items() if f.reference.expired()]:
            del self._faces[key]
            if self._keys.get((face.home, face.offset)) == key:
                del self._keys[face.home, face.offset]
            if not face.owned:
                self.slots[face.home].give(face.offset, face.bytes)


# Gradients and optimizer state, as the user has them


def assign_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set ``parameter.grad``, wherever the two are now: PyTorch requires one device only at this moment."""
    if parameter.grad is gradient:
        return
    data = gradient.data
    if data.device == parameter.device:
        parameter.grad = gradient
        return
    set_data(gradient, torch.empty((), dtype=data.dtype, device=parameter.device).expand(data.shape))
    parameter.grad = gradient
    set_data(gradient, data)


def references_to(gradient: torch.Tensor) -> int:
    """Return the number of Python references to a tensor: more than before, if others hold it.

    References about to go, such as the variable of a loop that has ended, count as well.
    """
    return sys.getrefcount(gradient)


_NOTHING: dict[str, Any] = {}


class Owned:
    """Checks all optimizer state of a capture at once, parameter by parameter, before every step."""

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
        self._seen: list[torch.Tensor | None] | None = None

    def _live(self) -> list[torch.Tensor | None]:
        live: list[torch.Tensor | None] = []
        for optimizer, parameter, names in self._parameters:
            live += map(optimizer.state.get(parameter, _NOTHING).get, names)
        return live

    def is_other(self, *, begun: bool) -> bool:
        """Return whether an optimizer lacks state that a step has, or has some with another memory layout.

        ``begun``: the step has made all of it. It tells ``replaced`` what it found, once.
        """
        live = self._seen = self._live()
        there = [one for one in live if one is not None]
        if len(there) == len(live):
            return list(map(_STRIDE, there)) != self._strides
        both = zip(live, self._strides, strict=True)
        return begun or any(one is not None and one.stride() != stride for one, stride in both)

    def replaced(
        self, shown_as: Callable[[StateBinding], torch.Tensor]
    ) -> list[tuple[StateBinding, StateOwner, torch.Tensor | None]]:
        """Return state for which an optimizer has another tensor than ``shown_as`` gives, and that tensor or None."""
        live, self._seen = self._seen or self._live(), None
        shown = list(map(shown_as, self._bindings))
        if all(map(is_, live, shown)):
            return []
        triples = zip(self._pairs, live, shown, strict=True)
        return [(binding, owner, one) for (binding, owner), one, other in triples if one is not other]
