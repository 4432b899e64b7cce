"""Tensors at addresses where PyTorch would put them: its kernels round otherwise elsewhere."""

from __future__ import annotations

import torch

from outofcore._torch_internals import is_aligned, storage_address
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.follow.native import flavor_of, loaded_paging
from outofcore.runtime.native import Flavor


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory begins where PyTorch's own would: the same one, or a copy.

    Kernels of the CPU may round otherwise where memory begins elsewhere, as on the pages of a file. A loop under
    ``budget`` and a compiled step compute with memory of their own, so a model that maps its weights from a file has
    the same bits in both and in plain PyTorch if it computes with ``aligned(weight)``. There is no copy where the
    library moves the tensor, where the step is captured, or on another device.

    >>> import torch
    >>> import outofcore
    >>> weight = torch.ones(4)
    >>> outofcore.aligned(weight) is weight, outofcore.aligned(weight[1:]).tolist()
    (True, [1.0, 1.0, 1.0])
    """
    if flavor_of(tensor.device) is not Flavor.CPU or is_aligned(tensor, SMALL_ALIGNMENT):
        return tensor
    library = None if tensor.storage_offset() else loaded_paging(tensor.device)
    if library is not None and library.follow_where(storage_address(tensor.untyped_storage())) != 0:
        return tensor  # a loop moves it, and ops see it at the beginning of a page
    return tensor.clone()
