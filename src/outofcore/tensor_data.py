"""Replace the data of the user's tensors, by ``tensor.data`` or by swapping two tensors."""

from __future__ import annotations

import gc

import torch


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def view_like(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the storage of ``base`` with the layout of ``tensor``."""
    view = torch.empty(0, dtype=tensor.dtype, device=base.device)
    return view.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def rebase_tensor(tensor: torch.Tensor, base: torch.Tensor) -> None:
    """Move a tensor to the storage of ``base``; its layout stays the same."""
    set_data(tensor, view_like(tensor, base))


def swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """Swap the contents of two tensor objects; raise ``RuntimeError`` if other objects refer to the contents."""
    try:
        torch.utils.swap_tensors(first, second)
    except RuntimeError:
        gc.collect()  # a cycle of an earlier capture may have weak references to it
        torch.utils.swap_tensors(first, second)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU, with strides (not sparse)."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
