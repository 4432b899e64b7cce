"""Replace tensors that autograd saves by recipes to recompute them: the Python part of ``recipes.h``.

PyTorch's saved-tensor hooks replace a saved tensor by its recipe after the op, unless it has hooks already.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Iterable

import torch

from outofcore._torch_internals import DisableTorchFunction, saved_tensors_of, tensor_at, tensor_impl
from outofcore.compiling import native_callback
from outofcore.follow.remaking import ComputedStorage
from outofcore.follow.space import Space


class RecomputeMode(enum.IntEnum):
    """The choice of saved tensors that recipes replace; mirrors the native code's modes."""

    OFF = 0
    CHOSEN = 1  # the chosen storages
    ALL = 2  # every storage that can be recomputed, even if that does not pay off
    NOTING = 3  # no storage; it is recorded how storages are computed


class Recipes:
    """Controls which saved tensors of a loop are recomputed."""

    def __init__(self, space: Space) -> None:
        self._space = space
        _register_callback(space.library)

    def switch_off(self) -> None:
        """Stop recomputation of newly saved tensors. Recipes that autograd already has remain valid."""
        self._switch(RecomputeMode.OFF)

    def recompute_all(self) -> None:
        """Recompute every tensor that can be recomputed: a test of exactness that saves no memory."""
        self._switch(RecomputeMode.ALL)

    def choose(self, storages: Iterable[int]) -> None:
        """Recompute these storages (ids in the loop's history), and storages with the same roles in later steps."""
        chosen = list(storages)
        ids = (ctypes.c_int64 * len(chosen))(*chosen)
        self._space.call("follow_recompute_set", ids, len(chosen))
        self._switch(RecomputeMode.CHOSEN)

    def start_noting(self) -> None:
        """Record from now on how storages are computed, for ``read_notes``, without recomputing them."""
        self._switch(RecomputeMode.NOTING)

    def read_notes(self) -> tuple[ComputedStorage, ...]:
        """Return the storages noted since ``start_noting``, with the time and inputs of their computation."""
        numbers = self._space.read_numbers("follow_notes")
        notes: list[ComputedStorage] = []
        position = 0
        while position < len(numbers):
            storage, size, nanoseconds, saved, inputs = numbers[position : position + 5]
            position += 5 + inputs
            seconds = None if nanoseconds < 0 else nanoseconds / 1e9
            notes.append(
                ComputedStorage(storage, size, seconds, tuple(numbers[position - inputs : position]), bool(saved))
            )
        return tuple(notes)

    def _switch(self, mode: RecomputeMode) -> None:
        self._space.call("follow_recompute", int(mode))


class _PackedTensor:
    """A reference to a native recipe, which autograd holds in place of a tensor."""

    __slots__ = ("_address", "_library")

    def __init__(self, address: int, library: ctypes.CDLL) -> None:
        self._address, self._library = address, library

    def __del__(self) -> None:
        self._library.follow_drop(self._address)

    def unpack(self) -> torch.Tensor:
        tensor = self._library.follow_unpack(self._address)
        if tensor is None:
            raise RuntimeError(self._library.follow_failure().decode(errors="replace"))
        return tensor_at(tensor)


def _unpack(packed: _PackedTensor) -> torch.Tensor:
    return packed.unpack()


def _replace_saved(result: torch.Tensor, library: ctypes.CDLL) -> None:
    """Replace tensors that autograd saved for ``result`` by recipes that recompute them, where possible."""
    for saved in saved_tensors_of(result.grad_fn):
        # Unpacking makes a new tensor object, so keep a tensor if its identity may matter.
        tensor = saved.tensor
        if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad) or vars(tensor):
            continue
        address = library.follow_pack(tensor_impl(tensor))
        if address is None:
            continue
        packed = _PackedTensor(address, library)
        # Keep a tensor that was changed since it was saved: PyTorch raises an error for it in the backward pass.
        if saved.is_unchanged():
            saved.replace(functools.partial(_return_packed, packed), _unpack)


def _return_packed(packed: _PackedTensor, _: torch.Tensor) -> _PackedTensor:
    return packed


@functools.cache
def _register_callback(library: ctypes.CDLL) -> object:
    """Make the native code call ``_replace_saved`` for results of ops; return the callback."""

    def offer(address: int) -> int:
        with DisableTorchFunction():
            _replace_saved(tensor_at(address), library)
        return 0

    callback = native_callback(offer, ctypes.c_void_p, failed=0)
    library.follow_offer_to(callback)
    return callback
