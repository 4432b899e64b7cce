"""Where PyTorch's own Python code reads a value only to raise an error, or not.

A captured step goes on as if it did not, with an op that looks at the value in each call and raises.

Limits: what is raised in a call names the check and not the value that failed it; on the CPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outofcore.capture.provenance import reader_within


@dataclass(frozen=True)
class Check:
    """Raises unless a tensor with one element is as it has to be.

    Attributes:
        passes: the truth value with which nothing is raised.
        text: of the error.
    """

    passes: bool
    text: str

    def __call__(self, value: torch.Tensor) -> None:
        """Raise unless it is so.

        Raises:
            ValueError: it is not.
        """
        if bool(value) != self.passes:
            raise ValueError(self.text)


_DISTRIBUTIONS, _BASE, _CHECKING = "/torch/distributions/", "/distribution.py", ("__init__", "_validate_sample")
_LOSSES = {"gaussian_nll_loss": Check(passes=False, text="var has negative entry/entries")}
_OF_DISTRIBUTIONS = Check(
    passes=True,
    text="a parameter or a sample of a distribution does not satisfy its constraint; plain PyTorch names the value",
)


def check_here(function: str) -> Check | None:
    """The check that a value is read for where the step is now, if it is read for one.

    Args:
        function: the PyTorch function that the user's code is in.
    """
    if function in _LOSSES:
        return _LOSSES[function]
    code = reader_within(_DISTRIBUTIONS)
    is_check = code is not None and code.co_filename.endswith(_BASE) and code.co_name in _CHECKING
    return _OF_DISTRIBUTIONS if is_check else None


__all__ = ["Check", "check_here"]
