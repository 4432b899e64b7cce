"""Hand-made steps that several tests share."""

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait
from outofcore.report.data import Help, Insight, Point

MIB = 1 << 20


def network(layers: int = 6, rerunnable: bool = True) -> StepGraph:
    """Return a chain of activations of 1 MiB, used again in reverse order."""
    storages = [Storage(i, MIB, StorageKind.ACTIVATION, f"x{i}") for i in range(layers)]
    ops = [Op(0, "layer", (), (), (0,))]
    ops += [Op(i, "layer", (i - 1,), (), (i,), rerunnable=rerunnable) for i in range(1, layers)]
    ops.append(Op(layers, "loss", (), (), ()))
    ops += [Op(layers + 1 + i, "back", (layers - 1 - i,), (), ()) for i in range(layers)]
    return StepGraph(tuple(storages), tuple(ops))


def network_costs(graph: StepGraph, seconds: float = 1.0, copy: float | None = 1.0) -> Costs:
    """Return costs with these seconds per op and per copy; ``copy`` None: no home."""
    homes = () if copy is None else (Home("host", None, MIB / copy, MIB / copy),)
    return Costs(tuple(OpCost(seconds) for _ in graph.ops), homes)


K64 = 64 * 1024
A, G, LOSS, W, X = range(5)


def step() -> StepGraph:
    """Return the step x, w -> a -> loss; a, x -> g; w -= g."""
    storages = (
        Storage(A, 4 * K64, StorageKind.ACTIVATION, "a"),
        Storage(G, 2 * K64, StorageKind.GRADIENT, "w.grad"),
        Storage(LOSS, 4, StorageKind.OUTPUT, "loss"),
        Storage(W, 2 * K64, StorageKind.PARAMETER, "w"),
        Storage(X, 4 * K64, StorageKind.INPUT, "x"),
    )
    ops = (
        Op(0, "forward", (X, W), (), (A,)),
        Op(1, "loss", (A,), (), (LOSS,)),
        Op(2, "backward", (A, X), (), (G,)),
        Op(3, "update", (W, G), (W,), (), rerunnable=False),
    )
    return StepGraph(storages, ops, (LOSS,))


# The forward pass makes an activation that is evicted and fetched for the backward pass.
GRAPH = StepGraph(
    (
        Storage(0, MIB, StorageKind.PARAMETER, "conv1.weight"),
        Storage(1, 2 * MIB, StorageKind.ACTIVATION, "conv1 convolution"),
        Storage(2, 3 * MIB, StorageKind.ACTIVATION, "conv2 </script><b>"),
        Storage(3, 4, StorageKind.OUTPUT),
    ),
    (
        Op(0, "aten.convolution.default", (0,), (), (1,), module="conv1", source="net.py:3"),
        Op(1, "aten.relu.default", (1,), (), (2,), module="conv2"),
        Op(2, "loss", (2,), (), (3,)),
        Op(3, "aten.convolution_backward.default", (1,), (0,), (), module="conv1"),
    ),
    outputs=(3,),
)
PROGRAM = Program(
    (
        Run(0, (0, 1)),  # 0 to 2
        Run(1, (1, 2)),  # 2 to 4
        CopyOut(1, 1, (Wait(Queue.COMPUTE, 2),)),  # 4 to 7
        Run(2, (2, 3)),  # 4 to 5
        CopyIn(4, 1, (Wait(Queue.COPY_OUT, 1), Wait(Queue.COMPUTE, 3))),  # 7 to 9
        Run(3, (4, 0), waits=(Wait(Queue.COPY_IN, 1),)),  # 9 to 12: waits for 4
        CopyOut(3, 1, (Wait(Queue.COMPUTE, 3),)),  # 7 to 13: the last
    ),
    (
        Block(0, 0, MIB, 0, 0, True, 0),
        Block(1, 1, 2 * MIB, 0, 3, offset=MIB),
        Block(2, 2, 3 * MIB, 1, 4, offset=3 * MIB),
        Block(3, 3, 64, 3, 7, offset=6 * MIB),
        Block(4, 1, 2 * MIB, 4, 6, offset=MIB),
    ),
    arena_bytes=6 * MIB + 64,
    results=(3,),
)
TIMELINE = Timeline((0.0, 2.0, 4.0, 4.0, 7.0, 9.0, 7.0), (2.0, 4.0, 7.0, 5.0, 9.0, 12.0, 13.0), 13.0)
PLAN = Plan("by hand", 7 * MIB, (Decision(Gap(1, 1, 3), Residency.OFFLOAD, 2, 3),))
INSIGHT = Insight(
    4 * MIB,
    8 * MIB,
    9.0,
    (Point(4 * MIB, 20.0, "auto"), Point(7 * MIB, 13.0, "auto"), Point(8 * MIB, 9.0, "keep-all")),
    (Help("a link twice as fast", 3.0), Help("1 MiB more budget", 2.0)),
    "The link is the limit.",
)
