"""How devices differ for captures, transforms and measurements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outofcore.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Sizes in bytes that decide which parameters an optimizer op updates together."""

    alone: int  # parameters of at least this size are updated by an op of their own
    chunk: int  # smaller parameters are updated together, up to this size
    joined: int  # consecutive updates are merged into one op up to this size; beyond it, op overhead is negligible
    # If memory is short, updates are delayed and grouped up to this size. Gradients and state then take about four
    # times as much (benchmarks/updates.py).
    delayed: int


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device that a step may rely on."""

    computes_in_capture: bool  # kernels can run during a capture, with the results that they have in the step
    is_synchronous: bool  # an op has run when its call returns, so it can raise an error about a value
    watches_state: bool  # the library detects the user's writes to parameters and state between two steps
    updates_ranges: bool  # parameters and optimizer state can be updated range by range
    # By default optimizers update all parameters in one call. That is faster, but needs scratch memory for all of them.
    updates_all_at_once: bool
    has_kernel_measurements: bool  # measurements show where PyTorch's kernels are faster than Inductor's
    survives_bad_indices: bool  # an index out of range raises an error; elsewhere it ends the process
    supports_eager_loops: bool  # ``outofcore.budget`` supports the device
    update_bytes: UpdateBytes


_HOST = DeviceTraits(
    computes_in_capture=True,
    is_synchronous=True,
    watches_state=True,
    updates_ranges=True,
    updates_all_at_once=False,
    has_kernel_measurements=True,
    survives_bad_indices=True,
    supports_eager_loops=True,
    update_bytes=UpdateBytes(alone=256 * KIB, chunk=MIB, joined=4 * MIB, delayed=16 * MIB),
)
# A GPU is faster, but issuing an op takes as long as on the CPU. So its ops update more bytes each.
_GPU = DeviceTraits(
    computes_in_capture=False,
    is_synchronous=False,
    watches_state=False,
    updates_ranges=False,
    updates_all_at_once=True,
    has_kernel_measurements=False,
    survives_bad_indices=False,
    supports_eager_loops=False,
    update_bytes=UpdateBytes(alone=MIB, chunk=4 * MIB, joined=64 * MIB, delayed=64 * MIB),
)


def traits_of(device: torch.device) -> DeviceTraits:
    return _HOST if device.type == "cpu" else _GPU


def have_same_type(first: torch.device, second: torch.device) -> bool:
    return first.type == second.type


def default_generator(device: torch.device) -> torch.Generator:
    if traits_of(device) is _HOST:
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def synchronize_device(device: torch.device) -> None:
    if not traits_of(device).is_synchronous:
        torch.cuda.synchronize(device)
