"""What an op asked of the allocator in a step, where its plan foresaw something else."""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.execution.binding import BoundRun
from outofcore.planning.placement.requests import Event, EventKind, Requests, Result, workspace_layout


def requests_seen(run: BoundRun, planned: Requests, events: Sequence[Event], alignment: int) -> Requests:
    """The requests of an op as they were in one visit to its scope.

    Args:
        run: the op as bound; its results lie where the plan has them, unless their requests came out of turn.
        planned: what the op was thought to ask for.
        events: what its thread did with the allocator while it ran.
        alignment: as in ``workspace_layout``.
    """
    live: dict[int, int] = {}  # bytes by pointer, in order of the requests
    for event in events:
        if event.kind is EventKind.ALLOCATE:
            live[event.pointer] = event.bytes
        else:
            live.pop(event.pointer, None)
    addresses = {leaf: address for leaf, address, _ in run.results}
    pointers: dict[int, int] = {}
    missing: list[tuple[int, int]] = []
    for request in planned.requests:
        if isinstance(request.placement, Result) and request.placement.key in addresses:
            address = addresses[request.placement.key]
            if live.get(address) == request.bytes:
                pointers[address] = request.placement.key
                del live[address]
            else:
                missing.append((request.placement.key, request.bytes))
    # One that was served elsewhere is known by its size.
    for leaf, count in missing:
        found = next((pointer for pointer, size in live.items() if size == count), None)
        if found is not None:
            pointers[found] = leaf
            del live[found]
    return workspace_layout(events, pointers, alignment)
