"""Align tensors as PyTorch's allocator does, since its kernels may round differently at other addresses."""

from __future__ import annotations

import torch

from outofcore._torch_internals import is_aligned, storage_address
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.follow.native import flavor_of, loaded_library
from outofcore.runtime.native import Flavor


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the alignment of PyTorch's own memory: the same tensor, or a copy.

    CPU kernels may round differently if memory begins at another alignment, as on the pages of a file. A loop under
    ``budget`` and a compiled step compute with memory of their own. So a model that maps its weights from a file has
    the same bits in both and in plain PyTorch if it computes with ``aligned(weight)``. The tensor is not copied in a
    loop's memory, while a step is captured, or on another device.

    >>> import torch
    >>> import outofcore
    >>> weight = torch.ones(4)
    >>> outofcore.aligned(weight) is weight, outofcore.aligned(weight[1:]).tolist()
    (True, [1.0, 1.0, 1.0])
    """
    if flavor_of(tensor.device) is not Flavor.CPU or is_aligned(tensor, SMALL_ALIGNMENT):
        return tensor
    library = None if tensor.storage_offset() else loaded_library(tensor.device)
    if library is not None and library.follow_where(storage_address(tensor.untyped_storage())) != 0:
        return tensor  # in a loop, ops see it at the beginning of a page
    return tensor.clone()
