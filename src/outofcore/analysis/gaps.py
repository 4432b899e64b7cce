"""Gaps between uses, and the bytes of storages when placed in the arena."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

from outofcore.costs import Costs
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Gap
from outofcore.units import PAGE_BYTES, round_up

# Smaller storages stay resident: a copy's latency would cost more than their bytes are worth, and
# direct I/O moves whole pages.
LARGE_BYTES = 64 * 1024
SMALL_ALIGNMENT = 64


def placed_bytes(count: int) -> int:
    """Return the bytes that a block takes in the arena: whole pages from 64 KiB on, else cache lines."""
    return round_up(count, PAGE_BYTES if is_large(count) else SMALL_ALIGNMENT)


def is_large(count: int) -> bool:
    """Return whether a storage of ``count`` bytes may be evicted at all; the same for its placed bytes."""
    return count > LARGE_BYTES - SMALL_ALIGNMENT


def gaps_of(graph: StepGraph, storage: int) -> tuple[Gap, ...]:
    """Return the gaps of one storage (its use intervals) by start, the cyclic one last. Constants have none.

    There is no gap between a use and an op that overwrites a large storage as a whole: nothing is held there. A gap
    over the end of the step exists even then, since the user sees the contents there.
    """
    uses = graph.uses[storage]
    if not uses or graph.storages[storage].kind is StorageKind.CONSTANT:
        return ()
    renewed = renewals_of(graph, storage)
    gaps = [Gap(storage, a, b) for a, b in pairwise(uses) if b not in renewed]
    if graph.storages[storage].arrives and uses[0] not in renewed:
        gaps.insert(0, Gap(storage, -1, uses[0]))
    if storage in graph.persistent:
        gaps.append(Gap(storage, uses[-1], len(graph.ops) + uses[0]))
    return tuple(gaps)


def final_gap(graph: StepGraph, storage: int) -> Gap | None:
    """Return the gap from the last use of an output, or of an input that the step changes, to the end of the step.

    Over it the bytes go to the first home, or, if it is a gradient that the step leaves, may stay on the device.
    """
    uses = graph.uses[storage]
    if not uses or storage not in graph.seen_after:
        return None
    return Gap(storage, uses[-1], len(graph.ops))


def renewals_of(graph: StepGraph, storage: int) -> tuple[int, ...]:
    """Return the ops that overwrite a large storage as a whole, in order, and so may find it in another place.

    One that comes right after another use is not among them: no op in between could use the bytes. A storage below 64
    KiB has none: it stays where it is.
    """
    if storage not in graph.overwritten or not is_large(graph.storages[storage].bytes):
        return ()
    uses = graph.uses[storage]
    return tuple(b for a, b in pairwise((-2, *uses)) if (b, storage) in graph.overwrites and b > a + 1)


def is_fetched(graph: StepGraph, gap: Gap) -> bool:
    """Return whether the use at the end of a gap needs the bytes, so that they must be fetched."""
    use = gap.end % len(graph.ops)
    return (use, gap.storage) not in graph.overwrites or not is_large(graph.storages[gap.storage].bytes)


def touched_bytes(graph: StepGraph, op: Op) -> int:
    """Return the arena bytes of the large storages, without constants, that must be resident while ``op`` runs."""
    storages = graph.storages
    return sum(
        placed_bytes(storages[s].bytes)
        for s in op.touched
        if is_large(storages[s].bytes) and storages[s].kind is not StorageKind.CONSTANT
    )


def large_needs(graph: StepGraph, costs: Costs) -> list[int]:
    """Return the arena bytes in the region of large blocks that each op needs by itself."""
    return [
        touched_bytes(graph, op) + (placed_bytes(cost.workspace_bytes) if is_large(cost.workspace_bytes) else 0)
        for op, cost in zip(graph.ops, costs.ops, strict=True)
    ]


def constant_bytes(graph: StepGraph) -> int:
    """Return the arena bytes of the large constants, which are always resident."""
    return sum(placed_bytes(s.bytes) for s in graph.storages if s.kind is StorageKind.CONSTANT and is_large(s.bytes))


def live_bytes(graph: StepGraph) -> int:
    """Return the most bytes of storages that are live at once if nothing is evicted, without workspaces.

    No arena that holds everything is smaller.
    """
    return max(_live(graph, graph.storages))


def fullest_op(graph: StepGraph) -> int:
    """Return the first op at which the most bytes of activations are live, usually where the backward pass begins."""
    live = _live(graph, [s for s in graph.storages if s.kind is StorageKind.ACTIVATION])
    return live.index(max(live))


def _live(graph: StepGraph, storages: Iterable[Storage]) -> list[int]:
    """Return the bytes of these storages that are live at each op and after the last, if nothing is evicted."""
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
        renewed = renewals_of(graph, storage.id)
        for before, use in pairwise(uses):
            if use in renewed:
                change[before + 1] -= storage.bytes
                change[use] += storage.bytes
    return list(accumulate(change))
