"""Checks in PyTorch's own Python code that read a value only to raise an error.

The capture assumes that such a check passes, and records an op that makes the check in each call.

Limits: the error names the check, but not the value that failed it. Only where an op has run when its call returns,
as on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outofcore.capture.provenance import reader_within


@dataclass(frozen=True)
class Check:
    """Raises an error with ``text`` unless a one-element tensor's truth value equals ``passes``."""

    passes: bool
    text: str

    def __call__(self, value: torch.Tensor) -> None:
        if bool(value) != self.passes:
            raise ValueError(self.text)


_DISTRIBUTIONS, _BASE, _CHECKING = "/torch/distributions/", "/distribution.py", ("__init__", "_validate_sample")
_LOSSES = {"gaussian_nll_loss": Check(passes=False, text="var has negative entry/entries")}
_OF_DISTRIBUTIONS = Check(
    passes=True,
    text="a parameter or a sample of a distribution does not satisfy its constraint; plain PyTorch names the value",
)


def check_here(function: str) -> Check | None:
    """Return the check that is reading a value, by the Python stack; None if something else reads it.

    ``function`` is the PyTorch function that the user's code has called.
    """
    if function in _LOSSES:
        return _LOSSES[function]
    code = reader_within(_DISTRIBUTIONS)
    is_check = code is not None and code.co_filename.endswith(_BASE) and code.co_name in _CHECKING
    return _OF_DISTRIBUTIONS if is_check else None
