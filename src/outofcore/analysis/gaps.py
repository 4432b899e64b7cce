"""Gaps between uses, and the bytes that things take where the arena places them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from outofcore.costs import Costs
from outofcore.graph import Op, StepGraph, StorageKind
from outofcore.plan import Gap
from outofcore.units import PAGE_BYTES, round_up

# Smaller storages stay resident: a copy's latency would cost more than their bytes are worth, and
# direct I/O moves whole pages.
LARGE_BYTES = 64 * 1024
SMALL_ALIGNMENT = 64


def placed_bytes(count: int) -> int:
    """Bytes that a block of ``count`` bytes takes in the arena: whole pages from 64 KiB on, else cache lines."""
    return round_up(count, PAGE_BYTES if is_large(count) else SMALL_ALIGNMENT)


def is_large(count: int) -> bool:
    """Whether a storage of ``count`` bytes may leave the device at all; the same of its bytes as placed."""
    return count > LARGE_BYTES - SMALL_ALIGNMENT


def gaps_of(graph: StepGraph, storage: int) -> tuple[Gap, ...]:
    """The gaps of one storage in order of their starts; the cyclic one last. Constants have none."""
    kind = graph.storages[storage].kind
    uses = graph.uses[storage]
    if not uses or kind is StorageKind.CONSTANT:
        return ()
    found = [Gap(storage, a, b) for a, b in pairwise(uses)]
    if kind is StorageKind.INPUT:
        found.insert(0, Gap(storage, -1, uses[0]))
    if storage in graph.persistent:
        found.append(Gap(storage, uses[-1], len(graph.ops) + uses[0]))
    return tuple(found)


def touched_bytes(graph: StepGraph, op: Op) -> int:
    """Arena bytes of the large storages, constants left out, that must be resident while ``op`` runs."""
    storages = graph.storages
    return sum(
        placed_bytes(storages[s].bytes)
        for s in op.touched
        if is_large(storages[s].bytes) and storages[s].kind is not StorageKind.CONSTANT
    )


def workspace_blocks(costs: Costs) -> Sequence[int]:
    """Arena bytes of each op's workspace."""
    return [placed_bytes(cost.workspace_bytes) for cost in costs.ops]


def large_needs(graph: StepGraph, costs: Costs) -> list[int]:
    """Arena bytes in the region of large blocks that each op needs by itself."""
    return [
        touched_bytes(graph, op) + (placed_bytes(cost.workspace_bytes) if is_large(cost.workspace_bytes) else 0)
        for op, cost in zip(graph.ops, costs.ops, strict=True)
    ]


def constant_bytes(graph: StepGraph) -> int:
    """Arena bytes of the large constants, which never leave."""
    return sum(placed_bytes(s.bytes) for s in graph.storages if s.kind is StorageKind.CONSTANT and is_large(s.bytes))


def live_bytes(graph: StepGraph) -> int:
    """The most bytes of storages that are live at once if nothing leaves: no arena that holds everything is smaller.

    Workspaces are not counted.
    """
    change = [0] * (len(graph.ops) + 1)
    always = 0
    for storage in graph.storages:
        uses = graph.uses[storage.id]
        if not uses:
            continue
        if storage.id in graph.persistent or storage.kind is StorageKind.CONSTANT:
            always += storage.bytes
        else:
            change[uses[0]] += storage.bytes
            change[uses[-1] + 1] -= storage.bytes
    return always + max(accumulate(change))
