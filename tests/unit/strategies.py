"""Random small training steps, costs and budgets, for property tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from naive_program import naive_program

from outofcore.analysis import gaps_of
from outofcore.analysis.recipes import History, can_recompute
from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning import in_core_budget, smallest_budget
from outofcore.program import Program

LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
Task = tuple[StepGraph, Costs, int]

# Around 64 KiB, from which size on requests are planned; around a page; odd sizes; and zero.
_SIZES = st.one_of(
    st.sampled_from([1, 8, 4095, 4096, 4097, 65535, 65536, 65537, 100_000, 262_144]),
    st.integers(min_value=0, max_value=300_000),
)


@dataclass
class _Draft:
    draw: st.DrawFn
    storages: list[Storage] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    watched: bool = False

    def storage(self, kind: StorageKind, name: str, size: int | None = None) -> int:
        count = self.draw(_SIZES) if size is None else size
        self.storages.append(Storage(len(self.storages), count, kind, name, self.watched))
        return len(self.storages) - 1

    def like(self, storage: int, kind: StorageKind, name: str) -> int:
        return self.storage(kind, name, self.storages[storage].bytes)

    def op(
        self,
        name: str,
        reads: list[int],
        mutates: tuple[int, ...] = (),
        creates: tuple[int, ...] = (),
        **options: bool | str | tuple[int, ...],
    ) -> None:
        # As in a capture, storages written in place are also read, unless their former contents do not matter.
        unique_reads = tuple(dict.fromkeys(reads))
        self.ops.append(Op(len(self.ops), name, unique_reads, mutates, creates, **options))  # type: ignore[arg-type]

    def chance(self) -> bool:
        return self.draw(st.booleans())


@dataclass
class _Layer:
    param: int
    state: int | None
    kept_grad: int | None  # a persistent gradient, accumulated in place
    frozen: bool = False  # without gradient and update
    saved: list[int] = field(default_factory=list)  # saved for the backward pass
    grad: int = -1


@st.composite
def graphs(draw: st.DrawFn, max_layers: int = 4) -> StepGraph:
    """Draw valid graphs that resemble training steps: forward, loss, backward, update.

    With shared and frozen parameters, activations reused in backward, in-place ops, storages that are overwritten as a
    whole, buffers, random and non-rerunnable ops, ops without storages, gradients that are created, accumulated or
    visible, constants, unused storages, mutated inputs, ranges of persistent state, and several kinds of outputs.
    """
    draft = _Draft(draw, watched=draw(st.booleans()))
    layers = _layers(draft, draw(st.integers(1, max_layers)))
    inputs = [draft.storage(StorageKind.INPUT, f"input{i}") for i in range(draw(st.integers(1, 2)))]
    constants = [draft.storage(StorageKind.CONSTANT, "constant")] if draft.chance() else []
    if draft.chance():
        draft.storage(StorageKind.PARAMETER, "unused")
    if draft.chance():
        draft.op("guard", [], rerunnable=draft.chance())
    if draft.chance():  # the step begins by clearing gradients
        for layer in layers:
            if layer.kept_grad is not None:
                draft.op("zero_", [], (layer.kept_grad,), rerunnable=draft.chance())

    activations = _forward(draft, layers, inputs, constants)
    loss = draft.storage(StorageKind.OUTPUT, "loss", 4)
    draft.op("loss", [activations[-1], inputs[-1]], creates=(loss,), source="train.py:7")
    _backward(draft, layers, activations[-1])
    _update(draft, layers)

    visible = [loss]
    if draft.chance():
        visible.append(draw(st.sampled_from(activations + inputs + constants + [layer.param for layer in layers])))
    if draft.chance():  # the step clears gradients at its start, if at all
        visible += [layer.grad for layer in layers if layer.kept_grad is None and not layer.frozen]
    graph = StepGraph(tuple(draft.storages), tuple(draft.ops), tuple(dict.fromkeys(visible)))
    graph.check()
    return graph


def _layers(draft: _Draft, count: int) -> list[_Layer]:
    layers: list[_Layer] = []
    accumulate, has_state, some_frozen = draft.chance(), draft.chance(), draft.chance()
    in_ranges = draft.chance()  # some are fetched in every step
    for index in range(count):
        param = draft.storage(
            StorageKind.STATE_RANGE if in_ranges and draft.chance() else StorageKind.PARAMETER, f"layer{index}.weight"
        )
        if some_frozen and draft.chance():
            layers.append(_Layer(param, None, None, frozen=True))
            continue
        moments = StorageKind.STATE_RANGE if in_ranges else StorageKind.OPTIMIZER_STATE
        state = draft.like(param, moments, f"layer{index}.moment") if has_state else None
        grad = draft.like(param, StorageKind.GRADIENT, f"layer{index}.weight.grad") if accumulate else None
        layers.append(_Layer(param, state, grad))
    if count > 1 and draft.chance():
        layers[-1].param = layers[0].param  # tied weights
    return layers


def _forward(draft: _Draft, layers: list[_Layer], inputs: list[int], constants: list[int]) -> list[int]:
    flow = [inputs[0]]
    if draft.chance():
        draft.op("normalize_", [inputs[0]], mutates=(inputs[0],), rerunnable=False)
    # The storage that is overwritten as a whole: a buffer, which is visible between steps, or scratch memory.
    memory = draft.storage(StorageKind.BUFFER, "memory") if draft.chance() else None
    for index, layer in enumerate(layers):
        module = f"layer{index}"
        reads = [flow[-1], layer.param, *(constants if draft.chance() else [])]
        if len(flow) > 1 and draft.chance():
            reads.append(draft.draw(st.sampled_from(flow[:-1])))  # a skip connection
        out = draft.storage(StorageKind.ACTIVATION, f"{module}.out")
        draft.op("linear", reads, creates=(out,), module=module, module_class="Linear", family="linear")
        layer.saved = [flow[-1], layer.param]
        extra = draft.draw(st.sampled_from(["none", "dropout", "inplace", "norm", "copy", "overwritten"]))
        if extra == "dropout":
            mask = draft.like(out, StorageKind.ACTIVATION, f"{module}.mask")
            dropped = draft.like(out, StorageKind.ACTIVATION, f"{module}.dropped")
            draft.op("dropout", [out], creates=(dropped, mask), random=True, module=module)
            layer.saved.append(mask)
            out = dropped
        elif extra == "inplace":
            draft.op("relu_", [out], mutates=(out,), rerunnable=draft.chance(), module=module)
        elif extra == "copy" and memory is not None:
            draft.op("copy_", [out], mutates=(memory,), rerunnable=draft.chance(), module=module)
            out, copied = draft.like(memory, StorageKind.ACTIVATION, f"{module}.shifted"), out
            draft.op("add", [memory, copied], creates=(out,), module=module)
        elif extra == "overwritten":
            scratch = draft.like(out, StorageKind.ACTIVATION, f"{module}.scratch")
            draft.op("neg", [out], creates=(scratch,), module=module)
            draft.op("sum", [scratch], mutates=(), module=module)
            draft.op("exp_out", [out], mutates=(scratch,), rerunnable=draft.chance(), module=module)
            layer.saved.append(scratch)
        elif extra == "norm":
            running = draft.storage(StorageKind.BUFFER, f"{module}.running_mean")
            normed = draft.like(out, StorageKind.ACTIVATION, f"{module}.normed")
            discards = (running,) if draft.chance() else ()
            draft.op("batch_norm", [out, running], (running,), (normed,), discards=discards, module=module)
            layer.saved.append(out)
            out = normed
        if draft.chance():
            layer.saved.append(out)
        flow.append(out)
    return flow


def _backward(draft: _Draft, layers: list[_Layer], last: int) -> None:
    flow = draft.like(last, StorageKind.ACTIVATION, "d_last")
    draft.op("loss_backward", [last], creates=(flow,))
    for index, layer in reversed(list(enumerate(layers))):
        module = f"layer{index}"
        saved = [s for s in layer.saved if s == layer.param or draft.chance()]
        below = draft.storage(StorageKind.ACTIVATION, f"{module}.d_in")
        if layer.kept_grad is not None:
            reads = [flow, *saved, layer.kept_grad]
            draft.op("linear_backward_", reads, (layer.kept_grad,), (below,), rerunnable=False, module=module)
            layer.grad = layer.kept_grad
        elif layer.frozen:
            draft.op("linear_backward", [flow, *saved], creates=(below,), module=module)
        else:
            layer.grad = draft.like(layer.param, StorageKind.GRADIENT, f"{module}.grad")
            draft.op("linear_backward", [flow, *saved], creates=(below, layer.grad), module=module)
        flow = below


def _update(draft: _Draft, layers: list[_Layer]) -> None:
    fused = draft.chance()
    reads: list[int] = []
    mutates: list[int] = []
    for layer in [layer for layer in layers if not layer.frozen]:
        state = [] if layer.state is None else [layer.state]
        if fused:
            reads += [layer.param, *state, layer.grad]
            mutates += [layer.param, *state]
        else:
            draft.op("update", [layer.param, *state, layer.grad], (layer.param, *state), rerunnable=False)
    if fused:
        draft.op("fused_update", reads, tuple(dict.fromkeys(mutates)), rerunnable=False)
    for layer in layers:
        if layer.kept_grad is not None:
            # Its former contents do not matter: it is written, not read.
            draft.op("zero_", [], (layer.kept_grad,), rerunnable=False)


@st.composite
def graphs_with_collectives(draw: st.DrawFn) -> StepGraph:
    """Draw graphs in which some ops are collectives, which never run again."""
    graph = draw(graphs(max_layers=3))
    picked = draw(st.sets(st.integers(0, len(graph.ops) - 1), min_size=1))
    ops = tuple(
        replace(op, communicates=True, rerunnable=False, random=False, discards=()) if op.id in picked else op
        for op in graph.ops
    )
    return StepGraph(graph.storages, ops, graph.outputs)


@st.composite
def costs_for(draw: st.DrawFn, graph: StepGraph) -> Costs:
    seconds = st.integers(0, 2000).map(lambda micros: micros / 1e6)
    workspace = st.sampled_from([0, 0, 0, 1, 4096, 70_000])
    ops = tuple(OpCost(draw(seconds), draw(workspace)) for _ in graph.ops)
    rate = st.sampled_from([1e8, 1e9, 1e10])
    latency = st.sampled_from([0.0, 1e-5])
    names = ["host", "disk"][: draw(st.integers(1, 2))]
    costs = Costs(ops, tuple(Home(name, None, draw(rate), draw(rate), draw(latency)) for name in names))
    costs.check(graph)
    return costs


def budgets_for(graph: StepGraph, costs: Costs) -> st.SearchStrategy[int]:
    size = [s.bytes for s in graph.storages]
    max_need = max(
        sum(size[s] for s in op.touched) + cost.workspace_bytes for op, cost in zip(graph.ops, costs.ops, strict=True)
    )
    total = sum(size) + max(cost.workspace_bytes for cost in costs.ops) + 4096 * len(size)
    return st.one_of(
        st.integers(max(max_need // 2, 1), total + 1),
        st.integers(max_need, min(2 * max_need, total) + 1),
        st.just(total),
    )


@st.composite
def plans_for(draw: st.DrawFn, graph: StepGraph, homes: int = 1) -> Plan:
    """Draw a plan that keeps, offloads or, where possible, recomputes each gap, at random times.

    Recomputations often share their time, so that one sequence serves several storages. Offloads go to any home.
    """
    history, n = History.of(graph), len(graph.ops)
    common_time = draw(st.integers(0, n))
    decisions: list[Decision] = []
    for storage in graph.storages:
        for gap in gaps_of(graph, storage.id):
            choice = draw(st.sampled_from(Residency))
            first = gap.start + 1
            if gap.start >= 0 and gap.end < n and choice is Residency.RECOMPUTE:
                fetch = draw(st.sampled_from([gap.end, min(max(common_time, first), gap.end), first]))
                if can_recompute(history, storage.id, fetch):
                    decisions.append(Decision(gap, choice, first, fetch))
            elif choice is Residency.OFFLOAD:
                release = draw(st.integers(first, min(gap.end, n)))
                fetch = draw(st.integers(max(release, n if gap.end >= n else 0), gap.end))
                home = draw(st.integers(0, homes - 1)) if gap.start >= 0 else 0
                decisions.append(Decision(gap, choice, 0 if gap.start < 0 else release, fetch, home))
    return Plan("random", 0, tuple(draw(st.permutations(decisions))))


@st.composite
def naive_programs(draw: st.DrawFn) -> tuple[StepGraph, Costs, Program]:
    graph = draw(graphs(max_layers=3))
    costs = draw(costs_for(graph))
    ids = st.frozensets(st.integers(0, len(graph.storages) - 1))
    program = naive_program(
        graph,
        costs,
        resident=draw(ids),
        partial=draw(ids),
        recompute=draw(ids),
        snapshots=draw(ids),
        halves=draw(st.integers(1, 2)),
    )
    return graph, costs, program


@st.composite
def deep_graphs(draw: st.DrawFn, max_layers: int = 12) -> StepGraph:
    """Draw deep chains of activations, which are most of the memory, so that budgets leave room to plan.

    With ops in place, activations that are overwritten as a whole, skip connections, joins, dropout, ops that may run
    once only, outputs among the activations, and visible gradients.
    """
    draft = _Draft(draw)
    gradients: list[int] = []
    weight = draft.storage(StorageKind.PARAMETER, "weight", 70_000)
    flow = [draft.storage(StorageKind.INPUT, "input", draw(st.sampled_from([100, 200_000])))]
    saved: list[tuple[int, ...]] = []
    for index in range(draw(st.integers(4, max_layers))):
        out = draft.storage(StorageKind.ACTIVATION, f"out{index}", draw(st.sampled_from([65_536, 131_072, 300_000])))
        reads = [flow[-1]] + ([weight] if draft.chance() else [])
        if len(flow) > 2 and draw(st.integers(0, 3)) == 0:
            reads.append(draw(st.sampled_from(flow[1:-1])))
        draft.op("layer", reads, creates=(out,), rerunnable=draw(st.integers(0, 5)) > 0)
        extra = draw(st.sampled_from(["none", "none", "inplace", "overwritten", "dropout"]))
        if extra == "inplace":
            draft.op("relu_", [out], mutates=(out,))
        elif extra == "overwritten":
            draft.op("sum", [out])
            draft.op("idle", [])
            draft.op("fill", [flow[-1]], mutates=(out,), rerunnable=draft.chance())
        elif extra == "dropout":
            dropped = draft.like(out, StorageKind.ACTIVATION, f"dropped{index}")
            draft.op("dropout", [out], creates=(dropped,), random=True)
            saved.append((out,))
            out = dropped
        flow.append(out)
        saved.append((flow[-2], out) if draft.chance() else (out,))
    below = draft.storage(StorageKind.ACTIVATION, "d_last", 65_536)
    draft.op("loss", [flow[-1]], creates=(below,))
    for inputs in reversed(saved):
        above, below = below, draft.storage(StorageKind.ACTIVATION, "d_in", 65_536)
        draft.op("backward", [above, *inputs], creates=(below,))
        if draw(st.integers(0, 3)) == 0:
            gradients.append(
                draft.storage(StorageKind.GRADIENT, f"grad{len(gradients)}", draw(st.sampled_from([100, 131_072])))
            )
            draft.op("backward_weight", [above], creates=(gradients[-1],))
    draft.op("update", [weight, below], mutates=(weight,), rerunnable=False)
    visible = [below, draw(st.sampled_from(flow[1:]))] if draft.chance() else [below]
    graph = StepGraph(tuple(draft.storages), tuple(draft.ops), tuple(dict.fromkeys((*visible, *gradients))))
    graph.check()
    return graph


@st.composite
def tasks(draw: st.DrawFn, kinds: st.SearchStrategy[StepGraph] | None = None) -> Task:
    graph = draw(graphs() if kinds is None else kinds)
    costs = draw(costs_for(graph))
    smallest, in_core = smallest_budget(graph, costs), in_core_budget(graph, costs)
    budget = draw(
        st.one_of(
            st.just(smallest),
            st.integers(smallest, max(smallest, in_core - 1)),
            st.integers(smallest, max(smallest, in_core - 1)),
            st.just(max(smallest, in_core)),
        )
    )
    return graph, costs, budget
