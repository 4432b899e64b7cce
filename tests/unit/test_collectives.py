"""Tests of the queue of collectives: overlap with ops, waits, and a fixed order."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import oracle
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS, with_instruction
from strategies import LIMITS, costs_for, graphs_with_collectives, plans_for

from outofcore.analysis.hoisting import hoisted_order
from outofcore.analysis.recipes import History, can_recompute
from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import ValidationError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile, read_graph, write_graph
from outofcore.lowering import lower, wire
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planfile import PlanFile, read_plan, write_plan
from outofcore.planning import lower_bound_seconds, place, plan_step, smallest_budget
from outofcore.program import CopyIn, Program, Queue, Run, Wait, lane_of, queue_of
from outofcore.report import Page, page_content
from outofcore.report.waits import Reason, time_spent
from outofcore.simulator import simulate
from outofcore.validator import validate

W, X, A, G, H, LOSS = range(6)


def step() -> StepGraph:
    storages = (
        Storage(W, 4096, StorageKind.PARAMETER, "weight"),
        Storage(X, 4096, StorageKind.INPUT, "input"),
        Storage(A, 4096, StorageKind.ACTIVATION, "activation"),
        Storage(G, 4096, StorageKind.ACTIVATION, "gradient"),
        Storage(H, 4096, StorageKind.ACTIVATION, "other gradient"),
        Storage(LOSS, 4096, StorageKind.OUTPUT, "loss"),
    )
    ops = (
        Op(0, "forward", (W, X), (), (A, LOSS)),
        Op(1, "backward", (A,), (), (G,)),
        Op(2, "dist.all_reduce", (G,), (G,), (), rerunnable=False, communicates=True),
        Op(3, "backward", (A,), (), (H,)),
        Op(4, "dist.all_reduce", (H,), (H,), (), rerunnable=False, communicates=True),
        Op(5, "update", (W, G), (W,), ()),
    )
    return StepGraph(storages, ops, (LOSS,))


def planned_step(graph: StepGraph) -> tuple[Costs, Program]:
    seconds = [1.0, 1.0, 1.0, 2.0, 3.0, 1.0]
    costs = Costs(tuple(OpCost(s) for s in seconds), (Home("disk", None, 1e12, 1e12),))
    program = wire(graph, place(lower(graph, costs, Plan("test", 0, ()))))
    validate(graph, program, program.arena_bytes, costs)
    return costs, program


def runs(program: Program) -> dict[int, tuple[int, Run]]:
    return {i.op: (index, i) for index, i in enumerate(program.instructions) if isinstance(i, Run)}


def test_collective_overlaps_ops_and_its_readers_wait() -> None:
    graph = step()
    costs, program = planned_step(graph)
    run_of = runs(program)
    assert [queue_of(run_of[op][1]) for op in (1, 2, 3, 4)] == [
        Queue.COMPUTE,
        Queue.COMMUNICATE,
        Queue.COMPUTE,
        Queue.COMMUNICATE,
    ]
    timeline = simulate(graph, costs, program)
    starts = {op: timeline.starts[index] for op, (index, _) in run_of.items()}
    assert starts[2] == starts[3] == starts[1] + 1
    assert starts[4] == starts[3] + 2
    # The update reads the first gradient only. It waits for both, since a collective may fail until then.
    assert starts[5] == starts[4] + 3
    assert Wait(Queue.COMMUNICATE, 2) in run_of[5][1].waits


def test_contention_of_copies_does_not_slow_collectives() -> None:
    graph = step()
    costs, program = planned_step(graph)
    shared = replace(costs, homes=(Home("disk", None, 1e3, 1e3, contention=0.5, compute_slowdown=0.5),))
    run_of, timeline = runs(program), simulate(graph, shared, program)
    for op in (2, 4):
        index = run_of[op][0]
        assert timeline.ends[index] - timeline.starts[index] == pytest.approx(costs.ops[op].seconds)


def test_waits_for_collectives_are_reported() -> None:
    graph = step()
    costs, program = planned_step(graph)
    spent, waits = time_spent(graph, program, simulate(graph, costs, program))
    assert spent.for_others == pytest.approx(3.0)
    assert spent.ops == pytest.approx(5.0)
    assert [(w.reason, w.text) for w in waits if w.seconds > 1] == [(Reason.OTHERS, "waits for dist.all_reduce")]


def test_lower_bound_overlaps_collectives_with_ops() -> None:
    graph = step()
    costs, program = planned_step(graph)
    bound = lower_bound_seconds(graph, costs, 1 << 30)
    assert bound is not None
    assert bound == pytest.approx(5.0)  # seconds of ops; collectives take 4 concurrently
    assert bound <= simulate(graph, costs, program).step_seconds
    slow = replace(costs, ops=tuple(OpCost(9.0) if op.communicates else OpCost(1.0) for op in graph.ops))
    assert lower_bound_seconds(graph, slow, 1 << 30) == pytest.approx(18.0)


def test_page_has_a_row_for_collectives_only_if_there_are_any() -> None:
    graph = step()
    costs, program = planned_step(graph)
    shown = [("predicted", simulate(graph, costs, program))]
    content = page_content(graph, Plan("test", 0, ()), program, shown, Page("test", 1 << 20))
    assert content["lanes"] == ["ops", "collectives", "copies in", "copies out"]
    alone = StepGraph(graph.storages, tuple(replace(op, communicates=False) for op in graph.ops), graph.outputs)
    costs, program = planned_step(alone)
    shown = [("predicted", simulate(alone, costs, program))]
    content = page_content(alone, Plan("test", 0, ()), program, shown, Page("test", 1 << 20))
    assert content["lanes"] == ["ops", "copies in", "copies out"]


def test_validator_refuses_misplaced_or_repeated_collectives() -> None:
    graph = step()
    costs, program = planned_step(graph)
    for op, text in ((2, "is on the queue of ops"), (3, "is on the queue of collectives")):
        index, run = runs(program)[op]
        moved = with_instruction(program, index, replace(run, communicates=not run.communicates))
        with pytest.raises(ValidationError, match=text):
            validate(graph, moved, program.arena_bytes, costs)
    gathered = gathering()
    costs = Costs((OpCost(1.0),) * 4, (Home("disk", None, 1e12, 1e12),))
    recomputation = Decision(Gap(A, 1, 2), Residency.RECOMPUTE, 2, 2)
    program = wire(gathered, place(lower(gathered, costs, Plan("test", 0, (recomputation,)))))
    once = tuple(replace(op, rerunnable=False) for op in gathered.ops)
    with pytest.raises(ValidationError, match="runs again, but the op is not rerunnable"):
        validate(StepGraph(gathered.storages, once, gathered.outputs), program, program.arena_bytes, costs)


def gathering() -> StepGraph:
    """Return a step that gathers a parameter, uses it twice, and updates the persistent copy."""
    storages = step().storages
    ops = (
        Op(0, "dist.all_gather_into_tensor", (W,), (), (A,), communicates=True),
        Op(1, "forward", (A, X), (), (LOSS,)),
        Op(2, "backward", (A, X), (), (G,)),
        Op(3, "update", (W, G), (W,), (), rerunnable=False),
    )
    return StepGraph(storages, ops, (LOSS,))


def test_gathered_parameter_can_be_gathered_again() -> None:
    graph = gathering()
    graph.check()
    costs = Costs((OpCost(1.0),) * 4, (Home("disk", None, 1e12, 1e12),))
    recomputation = Decision(Gap(A, 1, 2), Residency.RECOMPUTE, 2, 2)
    program = wire(graph, place(lower(graph, costs, Plan("test", 0, (recomputation,)))))
    validate(graph, program, program.arena_bytes, costs)
    collectives = [
        (i.op, i.again) for i in program.instructions if queue_of(i) is Queue.COMMUNICATE and isinstance(i, Run)
    ]
    assert collectives == [(0, False), (0, True)]
    assert can_recompute(History.of(graph), A, 2)
    # After the update, gathering gives another result.
    late = (*graph.ops[:2], replace(graph.ops[3], id=2, reads=(W,)), replace(graph.ops[2], id=3))
    assert not can_recompute(History.of(StepGraph(graph.storages, late, graph.outputs)), A, 3)


def test_update_does_not_move_above_a_collective() -> None:
    graph = step()
    assert hoisted_order(graph, [5]) == (0, 1, 2, 3, 4, 5)
    alone = StepGraph(graph.storages, tuple(replace(op, communicates=False) for op in graph.ops), graph.outputs)
    assert hoisted_order(alone, [5]) == (0, 1, 2, 5, 3, 4)


def test_files_keep_the_collective_flag(tmp_path: Path) -> None:
    graph = step()
    costs, program = planned_step(graph)
    file = GraphFile.of(graph, costs)
    write_graph(tmp_path / "graph.json", file)
    assert read_graph(tmp_path / "graph.json").graph == graph
    plan = PlanFile(1 << 20, Plan("test", 1 << 20, ()), program, 1.0)
    write_plan(tmp_path / "plan.json", plan, file.keys)
    assert read_plan(tmp_path / "plan.json", file.keys).program == program


@settings(LIMITS, max_examples=examples(60))
@given(st.data())
def test_any_plan_is_valid_and_keeps_the_order_of_collectives(data: st.DataObject) -> None:
    graph = data.draw(graphs_with_collectives())
    costs = data.draw(costs_for(graph))
    plan = data.draw(plans_for(graph, max(len(costs.homes), 1)))
    program = wire(graph, place(lower(graph, costs, plan)))
    validate(graph, program, program.arena_bytes, costs)
    collectives = [i.op for i in program.instructions if queue_of(i) is Queue.COMMUNICATE and isinstance(i, Run)]
    assert collectives == [op.id for op in graph.ops if op.communicates]
    timeline = simulate(graph, costs, program)
    ends: dict[object, float] = {}
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        lane = lane_of(instruction)
        assert start >= ends.get(lane, 0.0)
        ends[lane] = end


@settings(LIMITS, max_examples=examples(40))
@given(st.data(), st.randoms(use_true_random=False))
def test_missing_wait_is_detected(data: st.DataObject, random: Random) -> None:
    graph = data.draw(graphs_with_collectives())
    costs = data.draw(costs_for(graph))
    plan = data.draw(plans_for(graph, max(len(costs.homes), 1)))
    program = wire(graph, place(lower(graph, costs, plan)))
    assert oracle.faults_on_schedule(graph, program, random) == []
    for name in ("drop_wait", "weaken_wait"):
        for description, broken in islice(MUTATIONS[name](graph, program, random), 2):
            with pytest.raises(ValidationError):
                validate(graph, broken, program.arena_bytes, costs)
                pytest.fail(f"{description}: accepted")


def test_empty_block_still_needs_waits_of_its_readers() -> None:
    """The block has no bytes, so only its id shows that it is the same block."""
    storages = (
        Storage(0, 0, StorageKind.PARAMETER, "weight"),
        Storage(1, 1, StorageKind.INPUT, "input"),
        Storage(2, 1, StorageKind.ACTIVATION, "activation"),
        Storage(3, 1, StorageKind.OUTPUT, "loss"),
    )
    ops = (
        Op(0, "normalize_", (1,), (1,), (), rerunnable=False, communicates=True),
        Op(1, "linear", (1, 0), (), (2,)),
        Op(2, "linear", (2, 0), (), (3,)),
    )
    graph = StepGraph(storages, ops, (3,))
    costs = Costs((OpCost(0.0),) * 3, (Home("host", None, 1e8, 1e8),))
    eviction = Decision(Gap(0, 1, 2), Residency.OFFLOAD, 2, 2)
    program = wire(graph, place(lower(graph, costs, Plan("test", 0, (eviction,)))))
    validate(graph, program, program.arena_bytes, costs)
    fetch_index = next(
        i
        for i, instruction in enumerate(program.instructions)
        if isinstance(instruction, CopyIn) and instruction.block == 0
    )
    assert program.blocks[0].wraps and program.blocks[0].bytes == 0
    assert Wait(Queue.COMPUTE, 1) in program.instructions[fetch_index].waits
    mutants = [*MUTATIONS["drop_wait"](graph, program, None)]
    assert any(
        description.startswith(f"instruction {fetch_index} does not wait for Wait(queue=<Queue.COMPUTE")
        for description, _ in mutants
    )
    for description, broken in mutants:
        with pytest.raises(ValidationError, match="must wait"):
            validate(graph, broken, program.arena_bytes, costs)
            pytest.fail(f"{description}: accepted")


@settings(LIMITS, max_examples=examples(15))
@given(st.data())
def test_policies_plan_steps_with_collectives(data: st.DataObject) -> None:
    graph = data.draw(graphs_with_collectives())
    costs = data.draw(costs_for(graph))
    planned = plan_step(graph, costs, smallest_budget(graph, costs), "auto")
    validate(graph, planned.program, smallest_budget(graph, costs), costs)
