"""One storage that persists across steps, and the user's tensors on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter

import torch

from outofcore import _torch_internals as internals
from outofcore.capture.captured import CPU, Value
from outofcore.errors import StateError
from outofcore.execution.binding import tensor_on

_POINTER = torch.Tensor.data_ptr
_STRIDE = torch.Tensor.stride
_SIZE = torch.Tensor.size
_DTYPE = attrgetter("dtype")


class Place(Enum):
    """Where the bytes of a state are between steps."""

    OWN = "own"  # in memory of the tensor's own, as plain PyTorch has it
    HOME = "home"  # in its slot
    ARENA = "arena"  # in a block that wraps around the step
    UNBORN = "unborn"  # nowhere: optimizer state before its first update, a gradient that was cleared


@dataclass(slots=True)
class Window:
    """One of the user's tensors on a state.

    Attributes:
        key: what it is called.
        tensor: the user's.
        value: what the step takes it to be.
        address: of its data, as it was last set or met.
        stands_in: whether the user knows it no more: it holds the place of a gradient that was cleared.
    """

    key: str
    tensor: torch.Tensor
    value: Value
    address: int = 0
    stands_in: bool = False

    def moved(self) -> bool:
        """Whether the user has put other data in its place, or looks at the same otherwise, such as transposed."""
        tensor, value = self.tensor, self.value
        return (
            tensor.data_ptr() != self.address
            or tensor.shape != value.shape
            or tensor.stride() != value.stride
            or tensor.dtype != value.dtype
        )

    def give_up(self) -> torch.Tensor | None:
        """Know the tensor no more; returns it if anybody else does."""
        reference = weakref.ref(self.tensor)
        self.tensor = torch.empty(0, dtype=self.value.dtype)
        return reference()

    def lies_as(self, value: Value) -> bool:
        """Whether it lies in its storage as a value does."""
        return self.value.layout() == value.layout()

    def renew(self, value: Value) -> bool:
        """Take note that a step has left a gradient, and how it lies; whether it lay so before."""
        known = self.lies_as(value)
        self.value, self.stands_in = value, False
        return known

    def check_alike(self) -> None:
        """Refuse data that the step was not captured with.

        Raises:
            StateError: it has another shape or dtype.
        """
        new, value = self.tensor, self.value
        if tuple(new.shape) != value.shape or new.dtype != value.dtype:
            raise StateError(
                f"{self.key} was given data of shape {tuple(new.shape)} and {new.dtype} in place of {value.shape} and "
                f"{value.dtype} after the step was compiled; compile the step again"
            )


@dataclass(slots=True)
class State:
    """One storage that persists across steps, with the tensors that the user knows it by."""

    key: str
    bytes: int
    place: Place
    windows: list[Window] = field(default_factory=list[Window])
    slot: int | None = None  # its offset at its home
    home: int = 0  # which of the homes, nearest first, has its slot
    origin: torch.device = CPU  # where the user had it
    # At home and in the arena, the bytes that were shown last. Held, so that nothing that the user puts in their place
    # can have the same address.
    shown: torch.Tensor | None = None
    address: int = 0  # of these bytes
    references: int = 0  # to a gradient that a step has left, when it did (see ``references_to``)

    def show(self, base: torch.Tensor, place: Place) -> None:
        """Make the user's tensors look at these bytes."""
        self.look_at(None if place is Place.OWN else base)
        for window in self.windows:
            view = tensor_on(base, window.value)
            window.tensor.data = view
            window.address = view.data_ptr()
        self.place = place

    def lay(self, key: str, value: Value) -> None:
        """Have a gradient lie as a step expects it: another may have left it otherwise, such as transposed."""
        for window in self.windows:
            if window.key != key or window.lies_as(value):
                continue
            data = window.tensor.data.clone()
            window.value = value
            if self.shown is not None and not window.stands_in:
                window.tensor.data = tensor_on(self.shown, value).copy_(data)
                window.address = window.tensor.data_ptr()

    def look_at(self, base: torch.Tensor | None) -> None:
        """Take note of the bytes that are shown at home or in the arena."""
        self.shown = base
        self.address = 0 if base is None else base.data_ptr()

    def is_idle(self) -> bool:
        """Whether nobody knows its bytes any more: all the gradients on it were cleared."""
        return bool(self.windows) and all(window.stands_in for window in self.windows)

    def lose(self) -> None:
        """Take note that the bytes are nowhere."""
        self.place = Place.UNBORN
        self.look_at(None)

    def bytes_now(self) -> torch.Tensor:
        """The bytes as they are, as uint8: on the storage of the user's tensors where they lie as expected."""
        if self.lies_together():
            return internals.storage_bytes(self.windows[0].tensor)[: self.bytes]
        gathered = torch.zeros(self.bytes, dtype=torch.uint8, device=self.windows[0].tensor.device)
        for window in self.windows:
            tensor_on(gathered, window.value).copy_(window.tensor.data)
        return gathered

    def offset_in(self, address: int) -> int:
        """How far the bytes lie behind an address, that of an arena which has them."""
        window = self.windows[0]
        return window.address - window.value.offset * window.value.dtype.itemsize - address

    def lies_together(self) -> bool:
        """Whether the user's tensors lie in one storage as the step expects them to."""
        first = self.windows[0].tensor
        return first.untyped_storage().nbytes() >= self.bytes and all(
            internals.storage_key(window.tensor) == internals.storage_key(first)
            and window.tensor.storage_offset() == window.value.offset
            and window.tensor.stride() == window.value.stride
            for window in self.windows
        )

    def take_over(self) -> list[str]:
        """Take over what the user put in place of what was shown; returns the keys of that.

        Raises:
            StateError: it has another shape or dtype, or the storage itself has been moved.
        """
        moved = [window for window in self.windows if window.moved()]
        for window in moved:
            window.check_alike()
        if self.shown is not None:
            own = internals.storage_key(self.shown)
            # What looks at these very bytes in another order is put aside before they change.
            news = [
                data.clone() if internals.storage_key(data) == own else data
                for data in (window.tensor.data for window in moved)
            ]
            for window, new in zip(moved, news, strict=True):
                window.tensor.data = tensor_on(self.shown, window.value).copy_(new)
        for window in moved:
            window.address = window.tensor.data_ptr()
        return [window.key for window in moved]

    def let_go(self) -> list[Window]:
        """Leave to the user what is not where it was shown; returns that."""
        moved = [window for window in self.windows if window.moved()]
        self.windows = [window for window in self.windows if not window.moved()]
        return moved

    def tie(self, window: Window) -> None:
        """Take note of one more tensor on these bytes, wherever on them it is."""
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
        """Whether the storage itself is elsewhere than it was shown, with all that looks at it."""
        return self.shown is not None and self.shown.data_ptr() != self.address

    def check_in_place(self) -> None:
        """Refuse a storage that was moved with all that looks at it, as into memory that processes share.

        Raises:
            StateError: it was.
        """
        if self.moved_away():
            raise StateError(
                f"{self.key} has been moved to memory that processes share, by share_memory() or by being sent to "
                "another process, and a step cannot work there; give other processes a copy (copy.deepcopy(model)), "
                "close this step and compile it again"
            )


def shared_otherwise(states: Iterable[State]) -> bool:
    """Whether tensors have been tied, or are tied no more, since they were captured.

    What the user has put in place of a tensor may be another tensor's data (``a.data = b.data``), or its own where it
    was shared.
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


def let_go(states: Iterable[State]) -> list[State]:
    """Leave to the user what was put in place of what was shown; returns the states that nobody knows any more.

    What was tied to another tensor here goes where that goes.
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
    """Whether no window has moved (see ``Window.moved``), and so no storage that one looks at.

    Asked of all at once, in passes that Python makes at the speed of C: it is asked of every tensor before every step.
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
    """The keys of what has other memory than that in which it was last shown, at home or in the arena."""
    here = (Place.HOME, Place.ARENA)
    windows = [window for state in states if state.place in here for window in state.windows]
    now, shown = list(map(_POINTER, [window.tensor for window in windows])), [window.address for window in windows]
    if now == shown:
        return []
    return [window.key for window, one, other in zip(windows, now, shown, strict=True) if one != other]


__all__ = ["Place", "State", "Window", "displaced", "let_go", "shared_otherwise", "unmoved"]
