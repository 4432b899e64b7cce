"""Tests of steps with two homes: exact instructions, capacities, and properties of random plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import oracle
import pytest
from effort import examples
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS, with_instruction
from strategies import costs_for, graphs, plans_for

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import GraphError, ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import copies_in_before_room, lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planfile import PlanFile, read_plan, write_plan
from outofcore.planning import place
from outofcore.program import CopyIn, CopyOut, Lodging, Program, Queue, Run, Wait
from outofcore.simulator import simulate
from outofcore.units import PAGE_BYTES, round_up
from outofcore.validator import validate

SIZE = 1 << 20
HOST = Home("host", SIZE, bytes_per_s_out=SIZE, bytes_per_s_in=SIZE)
DISK = Home("disk", None, bytes_per_s_out=SIZE / 4, bytes_per_s_in=SIZE / 4)
A, B, W = 0, 1, 2


def step() -> StepGraph:
    ops = (
        Op(0, "make a", (), (), (A,)),
        Op(1, "make b", (), (), (B,)),
        Op(2, "idle", (), (), ()),
        Op(3, "update", (W,), (W,), ()),
        Op(4, "use a", (A,), (), ()),
        Op(5, "use b", (B,), (), ()),
    )
    activations = tuple(Storage(i, SIZE, StorageKind.ACTIVATION, "ab"[i]) for i in range(2))
    return StepGraph((*activations, Storage(W, SIZE, StorageKind.PARAMETER, "w")), ops)


def costs(host: Home = HOST) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in step().ops), (host, DISK))


def offload(storage: int, start: int, end: int, release: int, fetch: int, home: int) -> Decision:
    return Decision(Gap(storage, start, end), Residency.OFFLOAD, release, fetch, home)


def program_of(*decisions: Decision, host: Home = HOST) -> Program:
    step_costs = costs(host)
    program = wire(step(), place(lower(step(), step_costs, Plan("test", 0, decisions))), step_costs)
    validate(step(), program, program.arena_bytes, step_costs)
    return program


TO_BOTH = (offload(A, 0, 4, 1, 4, 0), offload(B, 1, 5, 2, 5, 1))


def test_each_home_has_its_own_link() -> None:
    program = program_of(*TO_BOTH)
    wrapping = next(b.id for b in program.blocks if b.wraps)
    a, b, a_back, b_back = (block.id for block in program.blocks if not block.wraps)
    assert program.instructions == (
        Run(0, (a,)),
        CopyOut(a, 1, (Wait(Queue.COMPUTE, 1),), home=0),
        Run(1, (b,), waits=program.instructions[2].waits),
        CopyOut(b, 1, (Wait(Queue.COMPUTE, 2),), home=1),
        Run(2, ()),
        Run(3, (wrapping,)),
        CopyIn(a_back, 1, program.instructions[6].waits, home=0),
        Run(4, (a_back,), waits=(Wait(Queue.COPY_IN, 1, 0),)),
        CopyIn(b_back, 1, program.instructions[8].waits, home=1),
        Run(5, (b_back,), waits=(Wait(Queue.COPY_IN, 1, 1),)),
    )
    timeline = simulate(step(), costs(), program)
    out = {i.home: timeline.ends[at] - timeline.starts[at] for at, i in _copies(program, CopyOut)}
    assert out == {0: 1.0, 1: 4.0}


def _copies(program: Program, kind: type[CopyIn] | type[CopyOut]) -> list[tuple[int, CopyIn | CopyOut]]:
    return [(at, i) for at, i in enumerate(program.instructions) if isinstance(i, kind)]


def test_copy_at_one_home_is_stale_at_the_other() -> None:
    """Each home has only the versions written there, so both need a copy out."""
    graph = StepGraph(
        (Storage(0, SIZE, StorageKind.ACTIVATION),),
        (Op(0, "make", (), (), (0,)), *(Op(i, "use", (0,) if i % 2 == 0 else (), (), ()) for i in range(1, 7))),
    )
    step_costs = Costs(tuple(OpCost(1.0) for _ in graph.ops), (HOST, DISK))
    for homes, copies in (((0, 1, 0), 2), ((0, 0, 0), 1), ((1, 0, 0), 2)):
        decisions = [offload(0, 2 * i, 2 * i + 2, 2 * i + 1, 2 * i + 2, home) for i, home in enumerate(homes)]
        program = wire(graph, place(lower(graph, step_costs, Plan("test", 0, tuple(decisions)))), step_costs)
        validate(graph, program, program.arena_bytes, step_costs)
        assert len(_copies(program, CopyOut)) == copies
        assert tuple(i.home for _, i in _copies(program, CopyIn)) == homes


def test_parameter_is_stored_at_the_home_of_its_cyclic_gap() -> None:
    program = program_of(offload(W, 3, 9, 4, 9, 1))
    assert program.lodgings == (Lodging(W, 1),)
    assert program.results == (W,)
    assert [(i.home, i.version) for _, i in _copies(program, CopyIn)] == [(1, 0)]
    assert [(i.home, i.version) for _, i in _copies(program, CopyOut)] == [(1, 1)]
    with pytest.raises(ValidationError, match="holds undefined bytes"):
        validate(step(), replace(program, lodgings=()), program.arena_bytes, costs())
    for lodging, message in (
        (Lodging(A, 1), "is not persistent"),
        (Lodging(W, 2), "does not exist"),
        (Lodging(W, 0), "is kept at home 1 and at home 0 between steps"),
    ):
        broken = replace(program, lodgings=(*program.lodgings, lodging) if lodging.home == 0 else (lodging,))
        with pytest.raises(ValidationError, match=message):
            validate(step(), broken, program.arena_bytes, costs())


def test_copy_out_waits_for_room_at_a_full_home() -> None:
    """Host memory holds one storage: the second is copied there only after the first was fetched."""
    graph = StepGraph(
        (Storage(A, SIZE, StorageKind.ACTIVATION), Storage(B, SIZE, StorageKind.ACTIVATION)),
        (
            Op(0, "make a", (), (), (A,)),
            Op(1, "idle", (), (), ()),
            Op(2, "use a, make b", (A,), (), (B,)),
            Op(3, "idle", (), (), ()),
            Op(4, "use b", (B,), (), ()),
        ),
    )
    step_costs = Costs(tuple(OpCost(1.0) for _ in graph.ops), (HOST, DISK))
    plan = Plan("test", 0, (offload(A, 0, 2, 1, 2, 0), offload(B, 2, 4, 3, 4, 0)))
    lowered = place(lower(graph, step_costs, plan))
    assert copies_in_before_room(graph, step_costs, lowered) == {5: 1}
    program = wire(graph, lowered, step_costs)
    validate(graph, program, program.arena_bytes, step_costs)
    # Wired as if the home were unlimited, the copy waits only for the op, which implies the copy in.
    second = _copies(program, CopyOut)[1][0]
    loose = with_instruction(program, second, replace(program.instructions[second], waits=()))
    with pytest.raises(ValidationError, match="may start"):
        validate(graph, loose, program.arena_bytes, step_costs)


def test_validator_counts_a_slot_until_its_read_is_awaited() -> None:
    """The first storage is fetched early, and no op before the second copy out waits for that."""
    graph = StepGraph(
        (Storage(A, SIZE, StorageKind.ACTIVATION), Storage(B, SIZE, StorageKind.ACTIVATION)),
        (
            Op(0, "make a", (), (), (A,)),
            Op(1, "idle", (), (), ()),
            Op(2, "make b", (), (), (B,)),
            Op(3, "idle", (), (), ()),
            Op(4, "use a and b", (A, B), (), ()),
        ),
    )
    step_costs = Costs(tuple(OpCost(1.0) for _ in graph.ops), (HOST,))
    plan = Plan("test", 0, (offload(A, 0, 4, 1, 1, 0), offload(B, 2, 4, 3, 4, 0)))
    lowered = place(lower(graph, step_costs, plan))
    program = wire(graph, lowered, step_costs)
    validate(graph, program, program.arena_bytes, step_costs)
    second = _copies(program, CopyOut)[1][0]
    assert Wait(Queue.COPY_IN, 1, 0) in program.instructions[second].waits
    roomy = wire(graph, lowered)
    assert roomy.instructions[second].waits == (Wait(Queue.COMPUTE, 3),)
    with pytest.raises(ValidationError, match="has to hold"):
        validate(graph, roomy, roomy.arena_bytes, step_costs)


def test_plan_over_the_capacity_of_a_home_is_refused() -> None:
    decisions = (offload(A, 0, 4, 1, 4, 0), offload(B, 1, 5, 2, 5, 0))
    lowered = place(lower(step(), costs(), Plan("test", 0, decisions)))
    assert copies_in_before_room(step(), costs(), lowered) is None
    with pytest.raises(GraphError, match="more bytes at a home than its capacity"):
        wire(step(), lowered, costs())
    loose = wire(step(), lowered)
    with pytest.raises(ValidationError, match=f"home 0 \\(host\\) of {SIZE} bytes has to hold {2 * SIZE}"):
        validate(step(), loose, loose.arena_bytes, costs())
    validate(step(), loose, loose.arena_bytes, costs(replace(HOST, bytes=2 * SIZE)))


def test_persistent_state_at_home_uses_its_capacity() -> None:
    decisions = (offload(W, 3, 9, 4, 9, 0), offload(A, 0, 4, 1, 4, 0))
    lowered = place(lower(step(), costs(), Plan("test", 0, decisions)))
    assert copies_in_before_room(step(), costs(), lowered) is None
    with pytest.raises(ValidationError, match="has to hold"):
        validate(step(), wire(step(), lowered), lowered.arena_bytes, costs())
    tiny = costs(replace(HOST, bytes=SIZE - 1))
    alone = wire(step(), place(lower(step(), costs(), Plan("test", 0, decisions[:1]))))
    assert copies_in_before_room(step(), tiny, alone) is None
    with pytest.raises(ValidationError, match="from step to step"):
        validate(step(), alone, alone.arena_bytes, tiny)


@pytest.mark.parametrize(
    ("decision", "message"),
    [(offload(A, 0, 4, 1, 4, 2), "there is no home 2"), (offload(A, 0, 4, 1, 4, -1), "there is no home -1")],
)
def test_unknown_home_is_refused(decision: Decision, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        lower(step(), costs(), Plan("test", 0, (decision,)))


def test_plan_file_keeps_the_homes(tmp_path: Path) -> None:
    program = program_of(*TO_BOTH, offload(W, 3, 9, 4, 9, 1))
    written = PlanFile(1, Plan("test", 0, TO_BOTH), program, 1.0)
    write_plan(tmp_path / "plan.json", written, ["a", "b", "w"])
    assert read_plan(tmp_path / "plan.json", ["a", "b", "w"]) == written


def test_plan_file_without_homes_means_the_first_home(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for home in (0, 1):
        written = PlanFile(1, Plan("test", 0, ()), program_of(offload(A, 0, 4, 1, 4, home)), 1.0)
        write_plan(path, written, ["a", "b", "w"])
        assert ('"home":' in path.read_text()) == bool(home)  # the first home is omitted
        assert read_plan(path, ["a", "b", "w"]) == written


Task = tuple[StepGraph, Costs, Plan]
LIMITS = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    graph = draw(graphs(max_layers=3))
    step_costs = draw(costs_for(graph))
    plan = draw(plans_for(graph, len(step_costs.homes)))
    all_bytes = sum(s.bytes for s in graph.storages)
    sizes = st.one_of(st.none(), st.integers(0, all_bytes))
    return graph, replace(step_costs, homes=tuple(replace(home, bytes=draw(sizes)) for home in step_costs.homes)), plan


def lowered_or_none(task: Task) -> Program | None:
    graph, step_costs, plan = task
    try:
        return place(lower(graph, step_costs, plan))
    except GraphError as error:  # fetched from another home than the one it was evicted to
        assert "before anything was copied out" in str(error)
        return None


@LIMITS
@given(tasks(), st.randoms(use_true_random=False))
def test_programs_are_valid_if_the_homes_have_room(task: Task, random: Random) -> None:
    graph, step_costs, _ = task
    lowered = lowered_or_none(task)
    assume(lowered is not None)
    assert lowered is not None
    if copies_in_before_room(graph, step_costs, lowered) is None:
        event("too much")
        # Slots are whole pages, so ``room_at_homes`` may refuse programs that the validator accepts.
        paged = replace(graph, storages=tuple(replace(s, bytes=round_up(s.bytes, PAGE_BYTES)) for s in graph.storages))
        lowered = place(lower(paged, step_costs, task[2]))
        with pytest.raises(ValidationError, match=r"has to hold|from step to step"):
            validate(paged, wire(paged, lowered), lowered.arena_bytes, step_costs)
        return
    program = wire(graph, lowered, step_costs)
    validate(graph, program, program.arena_bytes, step_costs)
    assert simulate(graph, step_costs, program).step_seconds >= step_costs.compute_seconds * (1 - 1e-9)
    assert oracle.faults_on_schedule(graph, program, random) == []


@pytest.mark.parametrize("name", MUTATIONS)
@settings(LIMITS, max_examples=examples(20))
@given(task=tasks(), random=st.randoms(use_true_random=False))
def test_broken_programs_are_refused(name: str, task: Task, random: Random) -> None:
    graph, step_costs, _ = task
    lowered = lowered_or_none(task)
    assume(lowered is not None)
    assert lowered is not None
    roomy = replace(step_costs, homes=tuple(replace(home, bytes=None) for home in step_costs.homes))
    program = wire(graph, lowered, roomy)
    for description, broken in islice(MUTATIONS[name](graph, program, random), 2):
        with pytest.raises(ValidationError):
            validate(graph, broken, program.arena_bytes, roomy)
            pytest.fail(f"{description}: accepted")
