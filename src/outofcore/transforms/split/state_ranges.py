"""Ranges of parameters and optimizer state: whole pages at home that are fetched one by one.

For parameters that take most of the budget, and for optimizer state. The ranges are storages of kind ``STATE_RANGE``,
fetched in each step like inputs and written back if they change. Limits: elementwise optimizers of ``torch.optim``, in
float32 and float64, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

from outofcore.analysis import LARGE_BYTES
from outofcore.capture.captured import Captured, StateBinding, Value
from outofcore.capture.device_traits import traits_of
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.tables import covers
from outofcore.graph import StorageKind
from outofcore.lowering.slots import slot_bytes
from outofcore.transforms.split.cells import WORTH_FRACTION
from outofcore.transforms.split.tensors import named_refs
from outofcore.transforms.split.ways import Cut, OpSplit
from outofcore.units import PAGE_BYTES


def find_ranged_storages(
    captured: Captured, max_bytes: int, parts: int | None, home_bytes: int | None
) -> frozenset[int]:
    """Return the optimizer state and parameters to fetch in ranges from a home of ``home_bytes``."""
    graph = captured.graph
    bound: dict[int, list[StateBinding]] = {}
    for binding in captured.states:
        bound.setdefault(captured.values[binding.value].storage, []).append(binding)
    free_bytes = inf if home_bytes is None else home_bytes
    free_bytes -= sum(slot_bytes(s.bytes) for s in graph.storages if s.arrives or s.id in graph.outputs)
    ranged: set[int] = set()
    for storage, bindings in sorted(bound.items(), key=lambda item: (-graph.storages[item[0]].bytes, item[0])):
        uses, count = graph.uses[storage], graph.storages[storage].bytes
        if (
            len(bindings) > 1
            or slot_bytes(count) > free_bytes
            or not uses
            or storage in graph.outputs
            or count < 2 * LARGE_BYTES
            or not _is_flat(captured.values[bindings[0].value], captured.unrounded_bytes(storage))
            or any(graph.ops[op].communicates for op in uses)
        ):
            continue
        is_updated_once = len(uses) == 1 and can_update_by_ranges(captured, uses[0], home_bytes)
        is_too_large = parts is not None or count + count // WORTH_FRACTION > max_bytes
        kind = bindings[0].kind
        if (kind is StorageKind.OPTIMIZER_STATE and is_updated_once) or (
            kind is StorageKind.PARAMETER and is_too_large
        ):
            ranged.add(storage)
            free_bytes -= slot_bytes(count)
    return frozenset(ranged)


def can_update_by_ranges(captured: Captured, op: int, home_bytes: int | None) -> bool:
    """Return whether an op is an optimizer update that can run range by range; False if ``home_bytes`` is 0."""
    call = captured.calls[op]
    return (
        isinstance(call.func, OptimizerUpdate)
        and call.func.can_update_ranges()
        and traits_of(captured.device).updates_ranges
        and home_bytes != 0
        and call.args[1][0] is not None
    )


def splits_of_update(captured: Captured, op: int) -> list[OpSplit]:
    """Return the split of an optimizer update into ranges of elements; [] if it must stay whole."""
    named = [(name, captured.values[index]) for name, index in named_refs(captured.calls[op])]
    whole = named[0][1]
    cut = Cut((0, len(whole.shape)))
    if any(value.shape not in (whole.shape, ()) or value.dtype != whole.dtype for _, value in named if value.shape):
        return []
    size = whole.dtype.itemsize
    return [
        OpSplit(
            "elements",
            prod(whole.shape),
            {name: cut for name, value in named if value.shape},
            {},
            grain=PAGE_BYTES // size,
            strict=True,
            is_update=True,
            # Smaller ranges have no slot at home.
            min_length=2 * LARGE_BYTES // size,
        )
    ]


def page_aligned_ends(ends: Sequence[int], size: int) -> list[int]:
    """Return ``ends`` without inner ends that are too close together or not page-aligned."""
    page_aligned = [0]
    for end in ends[1:-1]:
        is_far = min(end - page_aligned[-1], ends[-1] - end) * size >= LARGE_BYTES
        if is_far and not end * size % PAGE_BYTES:
            page_aligned.append(end)
    return [*page_aligned, ends[-1]]


def _is_flat(value: Value, count: int) -> bool:
    """Return whether a value is contiguous and covers all ``count`` bytes of its storage."""
    dense = tuple(prod(value.shape[dim + 1 :]) for dim in range(len(value.shape)))
    return covers(value, count) and all(
        n == 1 or a == b for n, a, b in zip(value.shape, value.stride, dense, strict=True)
    )
