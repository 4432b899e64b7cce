"""Gaps between uses of storages, and the arena bytes of storages and ops."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

from outofcore.costs import Costs
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Gap
from outofcore.units import PAGE_BYTES, round_up

# Smaller storages stay resident: the latency of copies outweighs their bytes, and direct I/O moves whole pages.
LARGE_BYTES = 64 * 1024
SMALL_ALIGNMENT = 64


def placed_bytes(count: int) -> int:
    """Return the arena bytes of a block: whole pages from 64 KiB on, else whole cache lines."""
    return round_up(count, PAGE_BYTES if is_large(count) else SMALL_ALIGNMENT)


def is_large(count: int) -> bool:
    """Return whether a storage of ``count`` bytes is large enough to be evicted."""
    return count > LARGE_BYTES - SMALL_ALIGNMENT


def gaps_of(graph: StepGraph, storage: int) -> tuple[Gap, ...]:
    """Return the gaps between the uses of a storage in order; () for a constant.

    A gap before an op that overwrites a whole large storage is left out, except across the end of the step.
    """
    uses = graph.uses[storage]
    if not uses or graph.storages[storage].kind is StorageKind.CONSTANT:
        return ()
    renewed = full_overwrites_of(graph, storage)
    gaps = [Gap(storage, a, b) for a, b in pairwise(uses) if b not in renewed]
    if graph.storages[storage].arrives and uses[0] not in renewed:
        gaps.insert(0, Gap(storage, -1, uses[0]))
    if storage in graph.persistent:
        gaps.append(Gap(storage, uses[-1], len(graph.ops) + uses[0]))
    return tuple(gaps)


def final_gap(graph: StepGraph, storage: int) -> Gap | None:
    """Return the gap from a storage's last use to the step's end; None unless it is an output or changed input."""
    uses = graph.uses[storage]
    if not uses or storage not in graph.seen_after:
        return None
    return Gap(storage, uses[-1], len(graph.ops))


def full_overwrites_of(graph: StepGraph, storage: int) -> tuple[int, ...]:
    """Return the ops that overwrite a large storage as a whole and may write to a new block, in order."""
    if storage not in graph.overwritten or not is_large(graph.storages[storage].bytes):
        return ()
    uses = graph.uses[storage]
    # Right after another use, no op in between could use the bytes of the old block.
    return tuple(b for a, b in pairwise((-2, *uses)) if (b, storage) in graph.overwrites and b > a + 1)


def is_fetched(graph: StepGraph, gap: Gap) -> bool:
    """Return whether the use at the end of a gap reads the storage, so that it must be fetched."""
    use = gap.end % len(graph.ops)
    return (use, gap.storage) not in graph.overwrites or not is_large(graph.storages[gap.storage].bytes)


def touched_bytes(graph: StepGraph, op: Op) -> int:
    """Return the bytes that an op's large storages occupy in the arena, without constants."""
    storages = graph.storages
    return sum(
        placed_bytes(storages[s].bytes)
        for s in op.touched
        if is_large(storages[s].bytes) and storages[s].kind is not StorageKind.CONSTANT
    )


def large_needs(graph: StepGraph, costs: Costs) -> list[int]:
    """Return the arena bytes for large blocks and scratch memory that each op needs while it runs."""
    return [
        touched_bytes(graph, op) + (placed_bytes(cost.workspace_bytes) if is_large(cost.workspace_bytes) else 0)
        for op, cost in zip(graph.ops, costs.ops, strict=True)
    ]


def constant_bytes(graph: StepGraph) -> int:
    return sum(placed_bytes(s.bytes) for s in graph.storages if s.kind is StorageKind.CONSTANT and is_large(s.bytes))


def live_bytes(graph: StepGraph) -> int:
    """Return the most bytes that are live at once; without evictions, the step needs at least as many."""
    return max(_live_bytes_by_op(graph, graph.storages))


def peak_activation_op(graph: StepGraph) -> int:
    """Return the first op with the most live activation bytes, usually the start of the backward pass."""
    live = _live_bytes_by_op(graph, [s for s in graph.storages if s.kind is StorageKind.ACTIVATION])
    return live.index(max(live))


def _live_bytes_by_op(graph: StepGraph, storages: Iterable[Storage]) -> list[int]:
    """Return how many bytes of ``storages`` are live during each op."""
    n = len(graph.ops)
    change = [0] * (n + 1)
    for storage in storages:
        uses = graph.uses[storage.id]
        if not uses:
            continue
        lasts = storage.id in graph.persistent or storage.kind is StorageKind.CONSTANT
        first, last = (0, n - 1) if lasts else (uses[0], uses[-1])
        change[first] += storage.bytes
        change[last + 1] -= storage.bytes
        renewed = full_overwrites_of(graph, storage.id)
        for before, use in pairwise(uses):
            if use in renewed:
                change[before + 1] -= storage.bytes
                change[use] += storage.bytes
    return list(accumulate(change))
