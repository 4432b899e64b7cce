"""How devices differ, as far as captures, their transforms and measurements must know.

``traits_of`` describes a device; what runs steps on it is ``execution.backend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outofcore.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """How many bytes of parameters one op of an optimizer updates.

    Attributes:
        alone: a parameter of so many is updated by itself; the overhead of an op would outweigh the work on less.
        chunk: smaller parameters are updated together up to so many: no burden to the plan.
        joined: consecutive updates become one op of at most so many. More have no overhead to speak of.
        delayed: where memory is short, updates wait for others up to so many. With gradients and state that is about
            four times as much (`benchmarks/updates.py` compares others).
    """

    alone: int
    chunk: int
    joined: int
    delayed: int


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What a step may rely on where it runs.

    Attributes:
        computes_in_capture: kernels run while a step is captured, and compute what they will compute in the step.
        is_done_when_called: an op has run when its call returns, so it may raise an error by a tensor's value.
        watches_state: the library notices what the user writes to parameters and state between two steps.
        updates_ranges: parameters and optimizer state may come range by range.
        updates_all_at_once: optimizers go over all parameters at once unless told otherwise, with scratch memory for
            as many, and gain by it.
        knows_faster_kernels: it was measured which of PyTorch's kernels are faster than Inductor's, and which slower.
        survives_bad_indices: an index out of range raises an error; elsewhere it ends the process.
        runs_loops: ``outofcore.budget`` can be advised.
    """

    computes_in_capture: bool
    is_done_when_called: bool
    watches_state: bool
    updates_ranges: bool
    updates_all_at_once: bool
    knows_faster_kernels: bool
    survives_bad_indices: bool
    runs_loops: bool
    update_bytes: UpdateBytes


_HOST = DeviceTraits(
    computes_in_capture=True,
    is_done_when_called=True,
    watches_state=True,
    updates_ranges=True,
    updates_all_at_once=False,
    knows_faster_kernels=True,
    survives_bad_indices=True,
    runs_loops=True,
    update_bytes=UpdateBytes(alone=256 * KIB, chunk=MIB, joined=4 * MIB, delayed=16 * MIB),
)
# A GPU does the same work sooner, while the host takes as long to issue an op: so its ops update more at once.
_GPU = DeviceTraits(
    computes_in_capture=False,
    is_done_when_called=False,
    watches_state=False,
    updates_ranges=False,
    updates_all_at_once=True,
    knows_faster_kernels=False,
    survives_bad_indices=False,
    runs_loops=False,
    update_bytes=UpdateBytes(alone=MIB, chunk=4 * MIB, joined=64 * MIB, delayed=64 * MIB),
)


def traits_of(device: torch.device) -> DeviceTraits:
    return _HOST if device.type == "cpu" else _GPU


def are_alike(one: torch.device, other: torch.device) -> bool:
    """Return whether devices are of one type, whichever of that type they are."""
    return one.type == other.type


def default_generator(device: torch.device) -> torch.Generator:
    """Return PyTorch's own random generator of a device."""
    if traits_of(device) is _HOST:
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def wait_for(device: torch.device) -> None:
    """Return when all that was issued to a device is done."""
    if not traits_of(device).is_done_when_called:
        torch.cuda.synchronize(device)
