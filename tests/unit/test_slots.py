"""Pages at homes: no copy overwrites what another still has to read, and a home is filled to its last page."""

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
    """A home that holds so much and nothing more."""

    in_memory = True
    edges: Sequence[int] = ()

    files = None

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0

    def ensure(self, count: int) -> None:
        if count > self.most:
            raise SpillError("full")
        self.bytes = max(self.bytes, count)

    def grow(self, count: int) -> None:
        self.ensure(count)


class Stretched(Fake):
    """A home of which all that is added at once lies apart; it grows by more than it is asked for."""

    def __init__(self, most: int, more: int) -> None:
        super().__init__(most)
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
            self.ensure(max(count, min(self.bytes + self.more, self.most)))


Task = tuple[StepGraph, Costs, Program]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """A step, and a program that its homes can just hold."""
    graph = draw(graphs(max_layers=3))
    costs = draw(costs_for(graph))
    plan = draw(plans_for(graph, len(costs.homes)))
    roomy = replace(costs, homes=tuple(replace(home, bytes=None) for home in costs.homes))
    try:
        lowered = place(lower(graph, costs, plan))
    except GraphError:  # at another home than the one it left for
        lowered = place(lower(graph, costs, Plan("keep", 0, ())))
    needed = needed_bytes(graph, roomy, lowered)
    costs = replace(costs, homes=tuple(replace(h, bytes=n) for h, n in zip(costs.homes, needed, strict=False)))
    for home in range(len(costs.homes)):  # as little as waiting allows
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
def test_pages_change_hands_only_when_nobody_needs_them(task: Task) -> None:
    graph, costs, lowered = task
    program = wire(graph, lowered, costs)
    slots = [Slots(Fake(home.bytes or 0)) for home in costs.homes]  # type: ignore[arg-type]
    settled = permanent_slots(graph, program)
    for storage, home in settled.items():
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
        assert (index in layout.pieces) == ((storage, instruction.home) not in settled.items())
        if index in layout.pieces:
            pieces = layout.pieces[index]
            assert storage is not None
            assert sum(piece.bytes for piece in pieces) == slot_bytes(graph.storages[storage].bytes)
            pages = {page for p in pieces for page in range(p.offset // 4096, (p.offset + p.bytes) // 4096)}
            copies.append((index, instruction, storage, pages))
    shared = False
    for (first, one, storage, pages), (second, other, another, its) in combinations(copies, 2):
        if one.home == other.home and isinstance(other, CopyOut) and pages & its:
            shared = shared or storage != another
            assert order.has_ended_before(first, second), (first, second)
    event("pages change hands" if shared else "each has its own")
    layout.free(slots)
    assert [home.allocated_bytes for home in slots] == before


def test_slots_that_divide_the_room_of_another_share_no_page() -> None:
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
    large, *others = (layout.pieces[index] for index in copies)
    assert large == (SlotPiece(0, 3 * size),)
    assert sorted((p.offset, p.bytes) for pieces in others for p in pieces) == [(0, size), (size, 2 * size)]


PAGE = 4096


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.integers(0, 30)), min_size=1, max_size=40),
    st.integers(0, 20),
    st.integers(0, 30),
    st.integers(30, 120),
)
def test_no_slot_lies_across_an_edge(wants: list[tuple[int, bool, int]], more: int, expected: int, most: int) -> None:
    home = Stretched(most * PAGE, more * PAGE)
    slots = Slots(home)  # type: ignore[arg-type]
    slots.grow_ahead(expected * PAGE)
    held: list[list[tuple[int, int]]] = []
    for pages, in_a_row, gone in wants:
        try:
            if in_a_row:
                mine = [(slots.take(pages * PAGE), pages * PAGE)]
            else:
                mine = [(piece.offset, piece.bytes) for piece in slots.take_pieces(pages * PAGE)]
        except SpillError:
            taken = sum(count for one in held for _, count in one)
            assert in_a_row or taken + pages * PAGE > most * PAGE
            event("full")
        else:
            held.append(mine)
        if held and gone < len(held):
            for offset, count in held.pop(gone):
                slots.free(offset, count)
        spans = sorted(span for one in held for span in one)
        assert all(a + count <= b for (a, count), (b, _) in pairwise(spans))
        assert not any(offset < seam < offset + count for offset, count in spans for seam in home.seams)
        assert slots.allocated_bytes == sum(count for _, count in spans)
        assert slots.end <= home.bytes <= most * PAGE


def test_what_is_expected_is_made_room_for_at_once() -> None:
    home = Stretched(1 << 30, 0)
    slots = Slots(home)  # type: ignore[arg-type]
    slots.grow_ahead(100 * PAGE)
    for pages in (30, 50, 20):
        slots.take(pages * PAGE)
    assert home.seams == []
    plain = Slots(Fake(1 << 30))  # type: ignore[arg-type]
    plain.grow_ahead(100 * PAGE)
    assert plain.home.bytes == 0
