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
from outofcore.follow.remaking import Made
from outofcore.follow.space import Space


class Recompute(enum.IntEnum):
    """What autograd gets a recipe of in place of a saved tensor."""

    OFF = 0  # nothing
    CHOSEN = 1  # the storages that were chosen
    EVERYTHING = 2  # whatever can be made again, whether that pays or not
    NOTING = 3  # nothing, but it is written down what could be made again


class Recipes:
    """Says of a followed loop which tensors autograd need not keep."""

    def __init__(self, space: Space) -> None:
        self._space = space
        _listen(space.library)

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
        self._space.call("follow_recompute_set", ids, len(chosen))
        self._switch(Recompute.CHOSEN)

    def note(self) -> None:
        """Write down from now on what could be made again; see ``noted``."""
        self._switch(Recompute.NOTING)

    def noted(self) -> tuple[Made, ...]:
        """What was made since ``note`` was called, and what else autograd saved, in the order of their ids."""
        numbers = self._space.numbers("follow_notes")
        found: list[Made] = []
        at = 0
        while at < len(numbers):
            storage, size, nanoseconds, saved, inputs = numbers[at : at + 5]
            at += 5 + inputs
            seconds = None if nanoseconds < 0 else nanoseconds / 1e9
            found.append(Made(storage, size, seconds, tuple(numbers[at - inputs : at]), bool(saved)))
        return tuple(found)

    def _switch(self, mode: Recompute) -> None:
        self._space.call("follow_recompute", int(mode))


class _Packed:
    """What autograd holds in place of a tensor: a reference to a recipe of the native code."""

    __slots__ = ("_address", "_library")

    def __init__(self, address: int, library: ctypes.CDLL) -> None:
        self._address, self._library = address, library

    def __del__(self) -> None:
        self._library.follow_drop(self._address)

    def unpacked(self) -> torch.Tensor:
        made = self._library.follow_unpack(self._address)
        if made is None:
            raise RuntimeError(self._library.follow_failure().decode(errors="replace"))
        return tensor_at(made)


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.unpacked()


def _replace_saved(result: torch.Tensor, library: ctypes.CDLL) -> None:
    """Replace the saved tensors of an op's autograd node by recipes where they can be recomputed."""
    for saved in saved_tensors_of(result.grad_fn):
        # An object that somebody may know again is not replaced by another one.
        tensor = saved.tensor
        if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad) or vars(tensor):
            continue
        address = library.follow_pack(tensor_impl(tensor))
        if address is None:
            continue
        packed = _Packed(address, library)
        # What was changed since it was saved stays as it is: PyTorch refuses it when it is needed.
        if saved.is_unchanged():
            saved.replace(functools.partial(_instead, packed), _unpack)


def _instead(packed: _Packed, _: torch.Tensor) -> _Packed:
    return packed


@functools.cache
def _listen(library: ctypes.CDLL) -> object:
    """Have the native code offer results of ops. Returns what it calls, which must stay alive."""

    def offered(address: int) -> int:
        with DisableTorchFunction():
            _replace_saved(tensor_at(address), library)
        return 0

    callback = native_callback(offered, ctypes.c_void_p, failed=0)
    library.follow_offer_to(callback)
    return callback
