"""How a gradient gets into ``.grad``."""

from __future__ import annotations

import torch


def assign_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set ``parameter.grad``, wherever the two are now: PyTorch wants them on one device only at this moment."""
    if parameter.grad is gradient:
        return
    data = gradient.data
    if data.device == parameter.device:
        parameter.grad = gradient
        return
    gradient.data = torch.empty((), dtype=data.dtype, device=parameter.device).expand(data.shape)
    parameter.grad = gradient
    gradient.data = data
