"""Compare an op's results with its captured ones, because *meta* and *fake* kernels can be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outofcore.capture.captured import CPU, Captured, Value
from outofcore.capture.device_traits import have_same_type
from outofcore.graph import Op
from outofcore.units import format_bytes


@dataclass(frozen=True)
class Difference:
    """A result of an op that differs from its captured value."""

    leaf: int
    aspect: str  # "kind", "device", "dtype", "shape", "stride" or "bytes"
    real: str
    captured: str
    is_harmless: bool = False  # the step is right nevertheless, because it copies the result to its place


def find_differences(captured: Captured, op: Op, results: Sequence[object]) -> list[Difference]:
    """Compare metadata of an op's results (e.g. shapes) with the capture; return at most one difference each."""
    unseen = captured.graph.unused
    all_differences: list[Difference] = []
    for leaf, index in enumerate(captured.calls[op.id].results):
        if index is None or captured.values[index].storage in unseen:
            continue  # no op reads it
        value = captured.values[index]
        result = results[leaf] if leaf < len(results) else None
        if result is None and 0 in value.shape:
            continue
        all_differences += [
            difference
            for difference in (next(_compare(captured, leaf, value, result), None),)
            if difference is not None
        ]
    return all_differences


def _compare(captured: Captured, leaf: int, value: Value, result: object) -> Iterator[Difference]:
    """Yield the differences between a result's metadata (such as shape and dtype) and the captured metadata."""
    expected = _describe(value.dtype, value.shape)
    if not isinstance(result, torch.Tensor):
        yield Difference(leaf, "kind", "undefined" if result is None else f"a {type(result).__name__}", expected)
        return
    device = CPU if value.foreign else captured.device
    real = _describe(result.dtype, tuple(result.shape))
    if not have_same_type(result.device, device):
        yield Difference(leaf, "device", f"{real} on {result.device}", f"{expected} on {device}")
    if result.dtype != value.dtype:
        yield Difference(leaf, "dtype", real, expected)
    if tuple(result.shape) != value.shape:
        yield Difference(leaf, "shape", real, expected)
    if result.numel() and result.stride() != value.stride:
        yield Difference(leaf, "stride", f"strides {result.stride()}", f"strides {value.stride}", is_harmless=True)
    count, planned = result.untyped_storage().nbytes(), captured.unrounded_bytes(value.storage)
    if result.storage_offset() == value.offset == 0 and count > planned:
        yield Difference(leaf, "bytes", format_bytes(count), format_bytes(planned), is_harmless=True)


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {tuple(shape)}"
