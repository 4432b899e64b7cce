"""Tensors that autograd need not keep, since they can be made again: its part that is Python.

``lineage.h`` and ``recipes.h`` know how the bytes of a storage came about. When an op has run of which an operand or a
result is to be made again, its autograd node is looked at once, and each saved tensor that has a recipe gives way to
it, by the hooks that PyTorch has for that. All other saved tensors stay as they are; those that somebody else has given
hooks do, too.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Iterable

import torch

from outofcore._torch_internals import DisableTorchFunction, saved_tensors_of, tensor_at, tensor_impl
from outofcore.compiling import native_callback
from outofcore.follow.native import call, load_paging
from outofcore.follow.remaking import Made


class Recompute(enum.IntEnum):
    """What autograd gets a recipe of in place of a saved tensor."""

    OFF = 0  # nothing
    CHOSEN = 1  # the storages that were chosen
    EVERYTHING = 2  # whatever can be made again, whether that pays or not
    NOTING = 3  # nothing, but it is written down what could be made again


class Recipes:
    """Says of a followed loop which tensors autograd need not keep.

    Args:
        space: the loop's, as ``follow_new`` gave it.
    """

    def __init__(self, space: int) -> None:
        self._space = space
        _listen()

    def off(self) -> None:
        """From now on autograd keeps what it saves. Recipes that it has already stay good."""
        self._switch(Recompute.OFF)

    def everything(self) -> None:
        """Whatever can be made again is: to try that it is exact, not to save anything."""
        self._switch(Recompute.EVERYTHING)

    def choose(self, storages: Iterable[int]) -> None:
        """Make these again, and from the next step on what plays their part.

        Args:
            storages: ids of storages in the loop's history.
        """
        chosen = list(storages)
        ids = (ctypes.c_int64 * len(chosen))(*chosen)
        call(load_paging(), "follow_recompute_set", self._space, ids, len(chosen))
        self._switch(Recompute.CHOSEN)

    def note(self) -> None:
        """Write down from now on what could be made again; see ``noted``."""
        self._switch(Recompute.NOTING)

    def noted(self) -> tuple[Made, ...]:
        """What was made since ``note`` was called, and what else autograd saved, in the order of their ids."""
        library = load_paging()
        count = call(library, "follow_notes", self._space, None, 0)
        numbers = (ctypes.c_int64 * count)()
        count = min(count, call(library, "follow_notes", self._space, numbers, count))
        found: list[Made] = []
        at = 0
        while at + 5 <= count and at + 5 + numbers[at + 4] <= count:
            storage, size, nanoseconds, saved, inputs = numbers[at : at + 5]
            at += 5 + inputs
            seconds = None if nanoseconds < 0 else nanoseconds / 1e9
            found.append(Made(storage, size, seconds, tuple(numbers[at - inputs : at]), bool(saved)))
        return tuple(found)

    def _switch(self, mode: Recompute) -> None:
        call(load_paging(), "follow_recompute", self._space, int(mode))


class _Packed:
    """What autograd holds in place of a tensor: a reference to a recipe of the native code."""

    __slots__ = ("_address", "_drop")

    def __init__(self, address: int) -> None:
        self._address = address
        self._drop = load_paging().follow_drop

    def __del__(self) -> None:
        self._drop(self._address)

    def unpacked(self) -> torch.Tensor:
        library = load_paging()
        made = library.follow_unpack(self._address)
        if made is None:
            raise RuntimeError(library.follow_failure().decode(errors="replace"))
        return tensor_at(made)


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.unpacked()


def _offered(address: int) -> int:
    """Replace the saved tensors of an op's autograd node by recipes where they can be recomputed. Always returns 0."""
    with DisableTorchFunction():
        _replace_saved(tensor_at(address))
    return 0


def _replace_saved(result: torch.Tensor) -> None:
    library = load_paging()
    for saved in saved_tensors_of(result.grad_fn):
        # An object that somebody may know again is not replaced by another one.
        tensor = saved.tensor
        if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad) or vars(tensor):
            continue
        address = library.follow_pack(tensor_impl(tensor))
        if address is None:
            continue
        packed = _Packed(address)
        # What was changed since it was saved stays as it is: PyTorch refuses it when it is needed.
        if saved.is_unchanged():
            saved.replace(functools.partial(_instead, packed), _unpack)


def _instead(packed: _Packed, _: torch.Tensor) -> _Packed:
    return packed


_OFFERED = native_callback(_offered, ctypes.c_void_p, failed=0)


@functools.cache
def _listen() -> None:
    load_paging().follow_offer_to(_OFFERED)
