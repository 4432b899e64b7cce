"""The allocator requests of one op, learnt from a log of one run.

The sizes and lifetimes of an op's requests are the same in every run, so an address can be planned for each
(profile-guided memory allocation: Sekiyama et al., arXiv 1804.10001, section 3). Only the op's scratch memory is placed
here, in one block; the planner of the whole step places its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from outofcore.analysis.gaps import SMALL_ALIGNMENT, is_large
from outofcore.errors import GraphError
from outofcore.planning.placement.packing import pack
from outofcore.planning.placement.parameters import PlacementParams
from outofcore.planning.placement.rectangles import Rectangle
from outofcore.units import PAGE_BYTES, round_up


class EventKind(Enum):
    """A thread's call of the allocator."""

    ALLOCATE = "allocate"  # received ``bytes`` bytes at ``pointer``
    FREE = "free"  # freed the bytes at ``pointer``


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One call of the allocator; ``bytes`` is 0 for FREE."""

    kind: EventKind
    bytes: int
    pointer: int


@dataclass(frozen=True, slots=True)
class ResultStorage:
    """A request for the storage of the op's result ``key``."""

    key: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """A request for scratch memory ``offset`` bytes into the op's workspace block."""

    offset: int


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A request that outlives the op without being a result, such as a library's cache: it has no address."""


Placement = ResultStorage | Scratch | Unplanned


@dataclass(frozen=True, slots=True)
class Request:
    bytes: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Requests:
    """An op's requests, in order, and the size of the workspace block for its scratch memory."""

    requests: tuple[Request, ...]
    workspace_bytes: int


def workspace_layout(
    events: Sequence[AllocatorEvent], result_pointers: Mapping[int, int], alignment: int = SMALL_ALIGNMENT
) -> Requests:
    """Classify the memory requests of one op as results, scratch or unplanned; place the scratch by ``pack``.

    ``events`` are the allocator calls of the op's thread while the op ran. ``result_pointers`` has the key of each
    result by the address of its storage. ``alignment`` is for requests below 64 KiB; larger ones begin on pages.
    """
    sizes: list[int] = []
    placements: list[Placement] = []
    scratch: list[Rectangle] = []
    live: dict[int, tuple[int, int]] = {}  # by pointer: index of the request, event of its birth
    for time, event in enumerate(events):
        if event.kind is EventKind.ALLOCATE:
            if event.pointer in live:
                raise GraphError(
                    f"event {time} of an allocation log hands out address {event.pointer:#x}, which is in use: "
                    "record all calls of one thread, from the start of the op to its end"
                )
            live[event.pointer] = (len(sizes), time)
            sizes.append(event.bytes)
            placements.append(Unplanned())
        elif event.pointer in live:
            index, born = live.pop(event.pointer)
            step = PAGE_BYTES if is_large(sizes[index]) else alignment
            scratch.append(Rectangle(index, born, time, sizes[index], step))
    for pointer, (index, _) in live.items():
        if pointer in result_pointers:
            placements[index] = ResultStorage(result_pointers[pointer])

    packing = pack(scratch, params=PlacementParams(effort=0))
    end = 0
    for rectangle, offset in zip(scratch, packing.offsets, strict=True):
        placements[int(rectangle.id)] = Scratch(offset)
        end = max(end, round_up(offset + rectangle.size, rectangle.alignment))
    return Requests(tuple(map(Request, sizes, placements)), end)
