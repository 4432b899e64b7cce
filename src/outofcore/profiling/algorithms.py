"""Which algorithm a convolution is run by: the fastest whose workspace fits. Off unless it is asked for.

PyTorch names no algorithm of cuDNN or oneDNN that one could ask for. What it lets one say is which library is used, and
whether cuDNN may take algorithms that are not deterministic; each gives another algorithm with a workspace of its own.
Left out is ``torch.backends.cudnn.benchmark``: what it finds for a shape is kept by the process for ever, whatever the
flag says later, and need not be what it finds in the next process.

The rule is SuperNeurons' (Wang et al., PPoPP 2018, section 3.5), with one difference: there the room is what happens to
be free when the op runs; here it is what the budget leaves beside the op's own tensors, since a plan makes that free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore.analysis import placed_bytes
from outofcore.capture.captured import Captured
from outofcore.costs import OpCost
from outofcore.execution.backend import Backend
from outofcore.graph import Op, StepGraph
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import OpProfile, profile_some
from outofcore.units import format_bytes, format_seconds

_log = logging.getLogger("outofcore.profiling")

# Another algorithm is taken if it saves this share of the time at least: measurements differ by some percent.
_GAIN = 0.1


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


def choose(own: OpCost, others: Sequence[OpCost], room: int) -> int | None:
    """The place of the algorithm to take among ``others``; None: the op's own, which is taken where in doubt.

    Args:
        own: what the op costs by the algorithm that it takes by itself.
        others: what it costs by others.
        room: bytes that its workspace may take. Where none fits, the least is taken.
    """
    fitting = [i for i, other in enumerate(others) if other.workspace_bytes <= room]
    if own.workspace_bytes <= room:
        fitting = [i for i in fitting if others[i].seconds < own.seconds * (1 - _GAIN)]
        return min(fitting, key=lambda i: (others[i].seconds, i), default=None)
    if fitting:
        return min(fitting, key=lambda i: (others[i].seconds, i))
    least = min(range(len(others)), key=lambda i: (others[i].workspace_bytes, i), default=None)
    return least if least is not None and others[least].workspace_bytes < own.workspace_bytes else None


def choose_algorithms(
    captured: Captured,
    profiles: Sequence[OpProfile],
    room: int,
    fixed: dict[str, Algorithm | None],
    cache: Cache | None,
    backend: Backend,
) -> tuple[Captured, tuple[OpProfile, ...]]:
    """A step whose convolutions run by the fastest algorithms with workspaces that fit, and its profiles.

    Args:
        captured: the step.
        profiles: of its ops as PyTorch runs them by itself.
        room: bytes for an op with all that it touches.
        fixed: by family what was chosen before, None being PyTorch's own choice; it stays, and what is chosen now is
            added, so that results do not change from one plan to the next.
        cache: where measurements are kept.
        backend: where the step runs.
    """
    storages = captured.graph.storages
    members: dict[str, list[int]] = {}
    for op in captured.graph.ops:
        if is_convolution(op) and op.family:
            members.setdefault(op.family, []).append(op.id)
    candidates = alternatives(backend.device)
    firsts = [ops[0] for ops in members.values()]
    tried = [
        profile_some(
            run_by(captured, dict.fromkeys(firsts, algorithm)), firsts, cache=cache, backend=backend, leave_out=True
        )
        for algorithm in candidates
    ]
    found, chosen = list(profiles), dict[int, Algorithm]()
    for family, ops in members.items():
        first = ops[0]
        if family not in fixed:
            own = profiles[first].cost
            # An op of whose memory nothing is known has no requests.
            able = [i for i, profile in enumerate(tried) if first in profile and profile[first].requests.requests]
            others = [tried[i][first].cost for i in able]
            beside = sum(placed_bytes(storages[s].bytes) for s in captured.graph.ops[first].touched)
            which = choose(own, others, room - beside)
            fixed[family] = None if which is None else candidates[able[which]]
            if which is not None:
                _log.info(
                    "%s (%s) runs %s: %s and %s of workspace, in place of %s and %s",
                    captured.graph.ops[first].name,
                    captured.graph.ops[first].source,
                    candidates[able[which]].name,
                    format_seconds(others[which].seconds),
                    format_bytes(others[which].workspace_bytes),
                    format_seconds(own.seconds),
                    format_bytes(own.workspace_bytes),
                )
        algorithm = fixed[family]
        place = next((i for i, candidate in enumerate(candidates) if candidate == algorithm), None)
        if algorithm is not None and place is not None and first in tried[place]:
            for op in ops:
                chosen[op], found[op] = algorithm, tried[place][first]
    return run_by(captured, chosen), tuple(found)
