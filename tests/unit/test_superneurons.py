"""Tests of the offloads and recomputations of SuperNeurons, in each mode."""

import pytest

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning import in_core_budget, plan_step
from outofcore.planning.baselines.superneurons import superneurons
from outofcore.simulator import recompute_seconds
from outofcore.validator import validate

K64 = 64 * 1024
LAYERS = 4
ROOMY = 1 << 40


def network(layers: int = LAYERS, width: int = 1) -> StepGraph:
    """Return layers of conv, norm and relu; the results of conv and relu are saved for the backward pass.

    Layer i has the storages 3 * i (conv), 3 * i + 1 (norm) and 3 * i + 2 (relu, ``width`` times as large), made by the
    ops of the same numbers. Then comes the loss, and the backward pass uses relu and conv of each layer.
    """
    kinds, sizes = ("conv", "norm", "relu"), (K64, K64, K64 * width)
    storages = [Storage(i, sizes[i % 3], StorageKind.ACTIVATION, f"{kinds[i % 3]}{i // 3}") for i in range(3 * layers)]
    storages.append(Storage(3 * layers, 64, StorageKind.PARAMETER, "w"))
    ops = [Op(0, "conv", (3 * layers,), (), (0,))]
    ops += [Op(i, kinds[i % 3], (i - 1,), (), (i,)) for i in range(1, 3 * layers)]
    ops.append(Op(len(ops), "loss", (), (), ()))
    for i in reversed(range(3 * layers)):
        if i % 3 != 1:
            ops.append(Op(len(ops), f"{kinds[i % 3]}_backward", (i,), (), ()))
    return StepGraph(tuple(storages), tuple(ops))


def costs(graph: StepGraph, home: bool = True) -> Costs:
    seconds = [10.0 if op.name == "conv" else 1.0 for op in graph.ops]
    homes = (Home("host", None, 1e6, 1e6),) if home else ()
    return Costs(tuple(OpCost(s) for s in seconds), homes)


def conv(layer: int, release: int, fetch: int) -> Decision:
    end = 14 + 2 * (LAYERS - 1 - layer)
    return Decision(Gap(3 * layer, 3 * layer + 1, end), Residency.OFFLOAD, release, fetch)


def relu(layer: int, fetch: int) -> Decision:
    start = 3 * layer + 3 if layer < LAYERS - 1 else 3 * layer + 2
    return Decision(Gap(3 * layer + 2, start, 13 + 2 * (LAYERS - 1 - layer)), Residency.RECOMPUTE, start + 1, fetch)


def test_only_segments_are_dropped_if_all_checkpoints_fit() -> None:
    graph = network()
    assert superneurons(graph, costs(graph), ROOMY).decisions == (relu(0, 19), relu(1, 17), relu(2, 15), relu(3, 13))
    assert superneurons(graph, costs(graph), ROOMY, recompute=False).decisions == ()


def test_least_recently_used_checkpoint_is_evicted_first() -> None:
    graph = network()
    # Recomputation needs the conv of its layer: that of layer 0 is due at op 19, and is prefetched for no earlier op.
    tight = superneurons(graph, costs(graph), 5 * K64)
    assert [d for d in tight.decisions if d.residency is Residency.OFFLOAD] == [conv(0, 3, 19)]
    tighter = superneurons(graph, costs(graph), 4 * K64)
    offloads = [d for d in tighter.decisions if d.residency is Residency.OFFLOAD]
    # Released when the next conv runs; fetched when the previous conv of the backward pass is due.
    assert offloads == [conv(0, 3, 17), conv(1, 6, 17)]
    with pytest.raises(BudgetError):
        superneurons(graph, costs(graph), K64)


def test_checkpoints_stay_without_homes() -> None:
    graph = network()
    plan = superneurons(graph, costs(graph, home=False), 6 * K64)
    assert {d.residency for d in plan.decisions} == {Residency.RECOMPUTE}
    with pytest.raises(BudgetError):
        superneurons(graph, costs(graph, home=False), 4 * K64)


def test_oversized_segment_is_recomputed_piece_by_piece() -> None:
    # The whole segment is larger than the storages of any op.
    large, small = 8 * K64, K64
    names = ("conv", "scale", "relu", "tanh", "cos", "sin")
    sizes = (small, small, large, large, large, large)
    storages = tuple(
        Storage(i, s, StorageKind.ACTIVATION, n) for i, (n, s) in enumerate(zip(names, sizes, strict=True))
    )
    chain = [Op(0, "conv", (), (), (0,)), *(Op(i, names[i], (i - 1,), (), (i,)) for i in range(1, 6))]
    ops = [*chain, Op(6, "loss", (), (), ()), *(Op(7 + i, "look", (5 - i,), (), ()) for i in range(6))]
    graph = StepGraph(storages, tuple(ops))
    seconds = [10.0, *(1.0 * sum(sizes[s] for s in op.touched) / K64 for op in ops[1:])]
    plan = superneurons(graph, Costs(tuple(map(OpCost, seconds))), ROOMY)
    assert [(d.gap.storage, d.fetch_at == d.gap.end) for d in plan.decisions] == [(i, True) for i in range(1, 6)]


def test_joins_and_forks_are_checkpoints_and_dropout_is_not() -> None:
    def storage(index: int, name: str) -> Storage:
        return Storage(index, K64, StorageKind.ACTIVATION, name)

    names = ("fork", "left", "mask", "dropped", "join", "tail")
    forward = (
        Op(0, "fork", (), (), (0,)),
        Op(1, "left", (0,), (), (1,)),
        Op(2, "mask", (), (), (2,), random=True),
        Op(3, "dropped", (1, 2), (), (3,)),
        Op(4, "join", (3, 0), (), (4,)),
        Op(5, "tail", (4,), (), (5,)),
        Op(6, "loss", (), (), ()),
    )
    ops = (*forward, *(Op(7 + i, "look", (5 - i,), (), ()) for i in range(6)))
    graph = StepGraph(tuple(storage(i, name) for i, name in enumerate(names)), ops)
    plan = superneurons(graph, Costs(tuple(OpCost(1.0) for _ in ops)), ROOMY)
    assert sorted(d.gap.storage for d in plan.decisions) == [1, 2, 3, 5]


def test_superneurons_is_a_policy() -> None:
    graph = network(12, width=2)
    for step_costs in (costs(graph), costs(graph, home=False)):
        budget = in_core_budget(graph, step_costs) * 2 // 3
        planned = plan_step(graph, step_costs, budget, "superneurons")
        validate(graph, planned.program, budget, step_costs)
        assert planned.plan.policy == "superneurons"
        # Convs run once.
        assert recompute_seconds(step_costs, planned.program) <= 2 * 12


def test_segments_stay_if_recomputation_is_off() -> None:
    graph = network(12)
    step_costs = costs(graph)
    budget = in_core_budget(graph, step_costs) * 3 // 4
    planned = plan_step(graph, step_costs, budget, "superneurons:recompute=false")
    validate(graph, planned.program, budget, step_costs)
    assert {d.residency for d in planned.plan.decisions} == {Residency.OFFLOAD}
    # Only results of convolutions are evicted, the least recently used first.
    offloaded = [d.gap.storage for d in planned.plan.decisions]
    assert offloaded == [3 * layer for layer in range(len(offloaded))]


def test_overwritten_checkpoint_is_restored_with_its_last_contents() -> None:
    graph = network(12)
    # Each conv's result is overwritten as a whole before the norm reads it.
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(Op(len(ops), op.name, op.reads, op.mutates, op.creates))
        if op.name == "conv":
            ops.append(Op(len(ops), "idle", (), (), ()))
            ops.append(Op(len(ops), "fill", (), op.creates, ()))
    graph = StepGraph(graph.storages, tuple(ops))
    step_costs = costs(graph)
    budget = in_core_budget(graph, step_costs) * 2 // 5
    planned = plan_step(graph, step_costs, budget, "superneurons")
    validate(graph, planned.program, budget, step_costs)
    assert {d.residency for d in planned.plan.decisions} == {Residency.OFFLOAD, Residency.RECOMPUTE}
