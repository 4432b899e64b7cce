"""Tests of pages at homes: no page is overwritten unread, and homes are used to the last page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from effort import examples
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import costs_for, graphs, plans_for

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError, SpillError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import copies_in_before_room, lower, wire
from outofcore.lowering.slots import permanent_slots, slot_bytes
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning import place
from outofcore.program import CopyOut, Program, Run
from outofcore.runtime.slots import SlotPiece, Slots, allocate_slots, needed_bytes
from outofcore.validator.step import ExecutionOrder


class Fake:
    in_memory = True
    edges: Sequence[int] = ()

    files = None

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0

    def ensure(self, count: int) -> None:
        if count > self.capacity:
            raise SpillError("full")
        self.bytes = max(self.bytes, count)

    def grow(self, count: int) -> None:
        self.ensure(count)


class Stretched(Fake):
    """A home whose growths are not contiguous; it grows by more than requested."""

    def __init__(self, capacity: int, more: int) -> None:
        super().__init__(capacity)
        self.more, self.seams = more, list[int]()

    @property
    def edges(self) -> Sequence[int]:  # type: ignore[override]
        return [*self.seams, self.bytes]

    def ensure(self, count: int) -> None:
        before = self.bytes
        super().ensure(count)
        if self.bytes > before > 0:
            self.seams.append(before)

    def grow(self, count: int) -> None:
        if count > self.bytes:
            self.ensure(max(count, min(self.bytes + self.more, self.capacity)))


Task = tuple[StepGraph, Costs, Program]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    graph = draw(graphs(max_layers=3))
    costs = draw(costs_for(graph))
    plan = draw(plans_for(graph, len(costs.homes)))
    roomy = replace(costs, homes=tuple(replace(home, bytes=None) for home in costs.homes))
    try:
        lowered = place(lower(graph, costs, plan))
    except GraphError:  # fetched from another home than the one it was evicted to
        lowered = place(lower(graph, costs, Plan("keep", 0, ())))
    needed = needed_bytes(graph, roomy, lowered)
    costs = replace(costs, homes=tuple(replace(h, bytes=n) for h, n in zip(costs.homes, needed, strict=False)))
    for home in range(len(costs.homes)):  # the smallest capacity that waiting allows
        for eighths in range(8):
            homes = list(costs.homes)
            homes[home] = replace(homes[home], bytes=needed[home] * eighths // 8 // 4096 * 4096)
            tight = replace(costs, homes=tuple(homes))
            if copies_in_before_room(graph, tight, lowered) is not None:
                costs = tight
                break
    return graph, costs, lowered


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tasks())
def test_pages_are_reused_only_after_their_last_read(task: Task) -> None:
    graph, costs, lowered = task
    program = wire(graph, lowered, costs)
    slots = [Slots(Fake(home.bytes or 0)) for home in costs.homes]  # type: ignore[arg-type]
    home_of = permanent_slots(graph, program)
    for storage, home in home_of.items():
        slots[home].take(slot_bytes(graph.storages[storage].bytes))
    before = [home.allocated_bytes for home in slots]
    layout = allocate_slots(graph, costs, program, slots)
    assert [home.allocated_bytes for home in slots] == needed_bytes(graph, costs, program)

    order = ExecutionOrder(program)
    copies = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            continue
        storage = program.blocks[instruction.block].storage
        assert (index in layout.pieces) == ((storage, instruction.home) not in home_of.items())
        if index in layout.pieces:
            pieces = layout.pieces[index]
            assert storage is not None
            assert sum(piece.bytes for piece in pieces) == slot_bytes(graph.storages[storage].bytes)
            pages = {page for p in pieces for page in range(p.offset // 4096, (p.offset + p.bytes) // 4096)}
            copies.append((index, instruction, storage, pages))
    shared = False
    for (first, first_copy, storage, pages), (second, second_copy, other_storage, other_pages) in combinations(
        copies, 2
    ):
        if first_copy.home == second_copy.home and isinstance(second_copy, CopyOut) and pages & other_pages:
            shared = shared or storage != other_storage
            assert order.has_ended_before(first, second), (first, second)
    event("pages change hands" if shared else "each has its own")
    layout.free(slots)
    assert [home.allocated_bytes for home in slots] == before


def test_slots_in_a_freed_slot_share_no_page() -> None:
    size = 1 << 20
    graph = StepGraph(
        tuple(Storage(i, count * size, StorageKind.ACTIVATION) for i, count in enumerate((3, 1, 2))),
        (
            Op(0, "make the large one", (), (), (0,)),
            Op(1, "idle", (), (), ()),
            Op(2, "use it and make two others", (0,), (), (1, 2)),
            Op(3, "idle", (), (), ()),
            Op(4, "use both", (1, 2), (), ()),
        ),
    )
    costs = Costs(tuple(OpCost(1.0) for _ in graph.ops), (Home("host", 3 * size, 1.0, 1.0),))
    gaps = (Gap(0, 0, 2), Gap(1, 2, 4), Gap(2, 2, 4))
    decisions = tuple(Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end) for gap in gaps)
    program = wire(graph, place(lower(graph, costs, Plan("test", 0, decisions))), costs)
    layout = allocate_slots(graph, costs, program, [Slots(Fake(3 * size))])  # type: ignore[arg-type]
    copies = [index for index, i in enumerate(program.instructions) if isinstance(i, CopyOut)]
    large, *small = (layout.pieces[index] for index in copies)
    assert large == (SlotPiece(0, 3 * size),)
    assert sorted((p.offset, p.bytes) for pieces in small for p in pieces) == [(0, size), (size, 2 * size)]


PAGE = 4096


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.integers(0, 30)), min_size=1, max_size=40),
    st.integers(0, 20),
    st.integers(0, 30),
    st.integers(30, 120),
)
def test_slot_does_not_cross_an_edge(
    wants: list[tuple[int, bool, int]], more: int, expected: int, capacity: int
) -> None:
    home = Stretched(capacity * PAGE, more * PAGE)
    slots = Slots(home)  # type: ignore[arg-type]
    slots.grow_ahead(expected * PAGE)
    held_slots: list[list[tuple[int, int]]] = []
    for pages, in_a_row, freed_index in wants:
        try:
            if in_a_row:
                mine = [(slots.take(pages * PAGE), pages * PAGE)]
            else:
                mine = [(piece.offset, piece.bytes) for piece in slots.take_pieces(pages * PAGE)]
        except SpillError:
            used_bytes = sum(count for slot in held_slots for _, count in slot)
            assert in_a_row or used_bytes + pages * PAGE > capacity * PAGE
            event("full")
        else:
            held_slots.append(mine)
        if held_slots and freed_index < len(held_slots):
            for offset, count in held_slots.pop(freed_index):
                slots.free(offset, count)
        spans = sorted(span for slot in held_slots for span in slot)
        assert all(a + count <= b for (a, count), (b, _) in pairwise(spans))
        assert not any(offset < seam < offset + count for offset, count in spans for seam in home.seams)
        assert slots.allocated_bytes == sum(count for _, count in spans)
        assert slots.end <= home.bytes <= capacity * PAGE


def test_expected_bytes_are_reserved_at_once() -> None:
    home = Stretched(1 << 30, 0)
    slots = Slots(home)  # type: ignore[arg-type]
    slots.grow_ahead(100 * PAGE)
    for pages in (30, 50, 20):
        slots.take(pages * PAGE)
    assert home.seams == []
    plain = Slots(Fake(1 << 30))  # type: ignore[arg-type]
    plain.grow_ahead(100 * PAGE)
    assert plain.home.bytes == 0
