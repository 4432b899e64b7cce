"""Give the user's tensors other bytes: no other module assigns ``tensor.data`` or swaps two tensors.

An eager loop does neither: it swaps the pointer of the storage (``runtime/csrc/follow/blocks.h::show``).
"""

from __future__ import annotations

import gc

import torch


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Point a tensor at the bytes of ``data``, with its layout."""
    tensor.data = data


def view_like(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor that lies on the storage of ``base`` as ``tensor`` lies on its own."""
    view = torch.empty(0, dtype=tensor.dtype, device=base.device)
    return view.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def move_onto(tensor: torch.Tensor, base: torch.Tensor) -> None:
    """Point a tensor at the storage of ``base``, where it lies as on its own."""
    set_data(tensor, view_like(tensor, base))


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tensors, which stay the same objects; raises ``RuntimeError`` if others refer to their contents."""
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        gc.collect()  # an earlier capture may refer to it, weakly, in a cycle
        torch.utils.swap_tensors(one, other)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has ordinary bytes that the CPU can address."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
