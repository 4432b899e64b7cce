"""Compare what an op returns with what it was captured to return.

A step is captured on tensors without contents, with PyTorch's *meta* or *fake* kernels. Where they are wrong, later ops
would find other tensors than they expect. So each op is compared when it is measured, before a step relies on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outofcore.capture.captured import CPU, Captured, Value
from outofcore.capture.device_traits import are_alike
from outofcore.graph import Op
from outofcore.units import format_bytes


@dataclass(frozen=True)
class Difference:
    """One result that is not what was captured.

    ``what`` is "kind", "device", "dtype", "shape", "stride" or "bytes". ``survived`` tells whether a step is right
    nevertheless, because results are copied to where the plan has them.
    """

    leaf: int
    what: str
    real: str
    captured: str
    survived: bool = False


def differences(captured: Captured, op: Op, leaves: Sequence[object]) -> list[Difference]:
    """Return how the flattened results of an op differ from the capture; for each only the gravest difference."""
    unseen = captured.graph.unseen
    found: list[Difference] = []
    for leaf, index in enumerate(captured.calls[op.id].results):
        if index is None or captured.values[index].storage in unseen:
            continue  # nobody looks at it
        value = captured.values[index]
        given = leaves[leaf] if leaf < len(leaves) else None
        if given is None and 0 in value.shape:
            continue
        found += [one for one in (next(_compared(captured, leaf, value, given), None),) if one is not None]
    return found


def _compared(captured: Captured, leaf: int, value: Value, given: object) -> Iterator[Difference]:
    wanted = _kind(value.dtype, value.shape)
    if not isinstance(given, torch.Tensor):
        yield Difference(leaf, "kind", "undefined" if given is None else f"a {type(given).__name__}", wanted)
        return
    device = CPU if value.foreign else captured.device
    real = _kind(given.dtype, tuple(given.shape))
    if not are_alike(given.device, device):
        yield Difference(leaf, "device", f"{real} on {given.device}", f"{wanted} on {device}")
    if given.dtype != value.dtype:
        yield Difference(leaf, "dtype", real, wanted)
    if tuple(given.shape) != value.shape:
        yield Difference(leaf, "shape", real, wanted)
    if given.numel() and given.stride() != value.stride:
        yield Difference(leaf, "stride", f"strides {given.stride()}", f"strides {value.stride}", survived=True)
    count, planned = given.untyped_storage().nbytes(), captured.own_bytes(value.storage)
    if given.storage_offset() == value.offset == 0 and count > planned:
        yield Difference(leaf, "bytes", format_bytes(count), format_bytes(planned), survived=True)


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {tuple(shape)}"
