"""Tests of checkpoints at segment borders: decisions, cost, and growth of memory."""

from dataclasses import replace

import pytest

from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.lowering import lower
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning import in_core_budget, place, plan_step, smallest_budget
from outofcore.planning.baselines.sqrt_checkpoint import segment_counts, sqrt_checkpoint
from outofcore.simulator import recompute_seconds
from outofcore.validator import validate

K64 = 64 * 1024


def chain(layers: int) -> StepGraph:
    """Return a chain of layers, forward (ops 0 to layers - 1) and backward.

    Storages 0 to layers - 1 are the activations, the first of them made from a parameter.
    """
    storages = [Storage(i, K64, StorageKind.ACTIVATION, f"a{i}") for i in range(layers)]
    storages.append(Storage(layers, 64, StorageKind.PARAMETER, "w"))
    ops = [Op(0, "forward0", (layers,), (), (0,))]
    ops += [Op(i, f"forward{i}", (i - 1,), (), (i,)) for i in range(1, layers)]
    gradient = -1
    for i in reversed(range(layers)):
        storages.append(Storage(len(storages), K64, StorageKind.ACTIVATION, f"d{i}"))
        reads = (i,) if gradient < 0 else (i, gradient)
        gradient = storages[-1].id
        ops.append(Op(len(ops), f"backward{i}", reads, (), (gradient,)))
    ops.append(Op(len(ops), "update", (layers, gradient), (layers,), (), rerunnable=False))
    return StepGraph(tuple(storages), tuple(ops))


def costs(graph: StepGraph) -> Costs:
    return Costs(tuple(OpCost(1.0) for _ in graph.ops))


def recompute(storage: int, start: int, end: int, fetch: int) -> Decision:
    return Decision(Gap(storage, start, end), Residency.RECOMPUTE, start + 1, fetch)


def test_each_segment_is_recomputed_as_a_whole() -> None:
    # Nine of ten activations are saved (the last is used at once): cut in three, a2 and a5 are at the borders.
    plan = sqrt_checkpoint(chain(10), 0, segments=3)
    assert plan.decisions == (
        recompute(0, 1, 19, 18),
        recompute(1, 2, 18, 18),
        recompute(3, 4, 16, 15),
        recompute(4, 5, 15, 15),
    )


def test_memory_grows_with_the_root_of_the_depth() -> None:
    arena_units: dict[int, int] = {}
    for layers in (64, 256):
        graph = chain(layers)
        program = place(lower(graph, costs(graph), sqrt_checkpoint(graph, 0)))
        validate(graph, program, program.arena_bytes)
        arena_units[layers] = program.arena_bytes // K64
        # One more forward pass, without its last segment.
        assert recompute_seconds(costs(graph), program) < layers
        assert arena_units[layers] < in_core_budget(graph, costs(graph)) // K64
    assert arena_units[64] <= 3 * 8
    assert arena_units[256] <= 3 * 16


def test_results_of_unrepeatable_ops_are_kept() -> None:
    graph = chain(10)
    once_only = replace(graph, ops=(*graph.ops[:3], replace(graph.ops[3], rerunnable=False), *graph.ops[4:]))
    plan = sqrt_checkpoint(once_only, 0, segments=3)
    # a4 is made from a3, which stays.
    assert [d.gap.storage for d in plan.decisions] == [0, 1, 4]


def test_unsaved_activations_are_no_borders() -> None:
    # Between a_i and a_(i+1) is a temporary value: a border there would recompute it.
    layers = 12
    graph = chain(layers)
    storages = list(graph.storages)
    ops: list[Op] = []
    for op in graph.ops:
        if 0 < op.id < layers:
            storages.append(Storage(len(storages), K64, StorageKind.ACTIVATION, f"between{op.id}"))
            ops.append(Op(len(ops), f"half{op.id}", op.reads, (), (storages[-1].id,)))
            ops.append(replace(op, id=len(ops), reads=(storages[-1].id,)))
        else:
            ops.append(replace(op, id=len(ops)))
    graph = StepGraph(tuple(storages), tuple(ops))
    for count in (2, 3, 4):
        plan = sqrt_checkpoint(graph, 0, segments=count)
        program = lower(graph, costs(graph), plan)
        assert plan.decisions
        # Every op of the forward pass runs at most twice.
        assert recompute_seconds(costs(graph), program) <= 2 * layers - 1


def test_sqrt_checkpoint_is_a_policy_without_homes() -> None:
    graph = chain(25)
    in_core = in_core_budget(graph, costs(graph))
    planned = plan_step(graph, costs(graph), in_core // 2, "sqrt-checkpoint")
    assert planned.plan.policy == "sqrt-checkpoint"
    assert planned.program.arena_bytes <= in_core // 2
    assert planned.timeline.step_seconds == pytest.approx(51 + recompute_seconds(costs(graph), planned.program))
    assert smallest_budget(graph, costs(graph)) < in_core // 2
    assert segment_counts(graph)[0] == 4


def test_step_without_saved_activations_is_unchanged() -> None:
    graph = StepGraph((Storage(0, K64, StorageKind.PARAMETER, "w"),), (Op(0, "update", (0,), (0,), ()),))
    assert sqrt_checkpoint(graph, 0).decisions == ()
    assert sqrt_checkpoint(StepGraph((), ()), 0).decisions == ()
