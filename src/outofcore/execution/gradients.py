"""How a gradient gets into ``.grad``, and who has it from there."""

from __future__ import annotations

import sys

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


def references_to(gradient: torch.Tensor) -> int:
    """How many references there are to a tensor from Python: more than before, if others have it.

    What is only about to be let go of, such as the variable of a loop that has ended, counts as well.
    """
    return sys.getrefcount(gradient)
