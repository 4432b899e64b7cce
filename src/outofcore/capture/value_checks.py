"""Checks in PyTorch's Python code that read a value only to raise an error.

The capture assumes that such a check passes, and records an op that repeats it in each call. The error does not name
the failing value. Only devices where an op has run when its call returns support this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outofcore.capture.provenance import innermost_code_in


@dataclass(frozen=True)
class ValueCheck:
    """The function of an op that raises ``ValueError`` if a truth value differs from ``passes``."""

    passes: bool  # the truth value that passes
    text: str

    def __call__(self, value: torch.Tensor) -> None:
        if bool(value) != self.passes:
            raise ValueError(self.text)


_DISTRIBUTIONS, _BASE, _CHECKING = "/torch/distributions/", "/distribution.py", ("__init__", "_validate_sample")
_LOSSES = {"gaussian_nll_loss": ValueCheck(passes=False, text="var has negative entry/entries")}
_DISTRIBUTION_CHECK = ValueCheck(
    passes=True,
    text="a parameter or a sample of a distribution does not satisfy its constraint; plain PyTorch names the value",
)


def running_check(function: str) -> ValueCheck | None:
    """Return the check in PyTorch's code that is reading a value now; None if another code reads it."""
    if function in _LOSSES:
        return _LOSSES[function]
    code = innermost_code_in(_DISTRIBUTIONS)
    is_check = code is not None and code.co_filename.endswith(_BASE) and code.co_name in _CHECKING
    return _DISTRIBUTION_CHECK if is_check else None
