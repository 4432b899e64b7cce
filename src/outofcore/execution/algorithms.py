"""Other ways to run a convolution than the one that PyTorch takes by itself under the flags of now.

PyTorch names no algorithm of cuDNN or oneDNN that one could ask for. What it lets one say is which library is used, and
whether cuDNN may take algorithms that are not deterministic; each gives another algorithm with a workspace of its own.
Left out is ``torch.backends.cudnn.benchmark``: what it finds for a shape is kept by the process for ever, whatever the
flag says later, and need not be what it finds in the next process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore.capture.captured import Captured
from outofcore.graph import Op, StepGraph


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Flags under which a convolution is run.

    Attributes:
        name: for families and logs.
        flags: of which module of ``torch.backends``, which one, and what it is set to.
    """

    name: str
    flags: tuple[tuple[Any, str, bool], ...]


class Chosen:
    """An op that runs by one algorithm whenever it is called, when it runs again as well.

    Args:
        func: the op.
        algorithm: for it alone; the flags are set back when the call returns.
    """

    def __init__(self, func: Callable[..., Any], algorithm: Algorithm) -> None:
        self.func = func
        self.algorithm = algorithm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [(module, flag, getattr(module, flag)) for module, flag, _ in self.algorithm.flags]
        try:
            for module, flag, value in self.algorithm.flags:
                setattr(module, flag, value)
            return self.func(*args, **kwargs)
        finally:
            for module, flag, value in before:
                setattr(module, flag, value)


def alternatives(device: torch.device) -> tuple[Algorithm, ...]:
    """The algorithms that differ from PyTorch's own choice on a device, under the flags of now."""
    if device.type == "cpu":
        found = [Algorithm("without oneDNN", ((torch.backends.mkldnn, "enabled", False),))]
    else:
        cudnn = torch.backends.cudnn
        found = [
            Algorithm("deterministic", ((cudnn, "deterministic", True),)),
            Algorithm("without cuDNN", ((cudnn, "enabled", False),)),
        ]
        # Where all of PyTorch is to be deterministic, so is cuDNN, and what PyTorch has of its own may not be.
        if torch.are_deterministic_algorithms_enabled():
            return ()
    return tuple(a for a in found if any(getattr(module, flag) is not value for module, flag, value in a.flags))


def is_convolution(op: Op) -> bool:
    """Whether an op has algorithms to choose from."""
    return op.name.startswith(("aten.convolution.", "aten.convolution_backward."))


def run_by(captured: Captured, chosen: dict[int, Algorithm]) -> Captured:
    """The same step, some of its ops run by algorithms that PyTorch would not take by itself.

    Args:
        captured: the step.
        chosen: by op.
    """
    ops, calls = list(captured.graph.ops), list(captured.calls)
    for index, algorithm in chosen.items():
        ops[index] = replace(ops[index], family=f"{ops[index].family} {algorithm.name}")
        calls[index] = replace(calls[index], func=Chosen(calls[index].func, algorithm))
    graph = StepGraph(captured.graph.storages, tuple(ops), captured.graph.outputs)
    return replace(captured, graph=graph, calls=tuple(calls))
