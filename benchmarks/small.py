"""Compare policies with the optimal plan on the steps under ``instances/small``, which have at most 30 ops.

The optimum covers the class of schedules defined in ``benchmarks/optimum``; a ratio below 1 is a plan outside it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from optimum import optimum
from rich.console import Console
from rich.table import Table

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile, read_graph, write_graph
from outofcore.planning import fit_plan, in_core_budget, lower_bound_seconds, plan_step, smallest_budget

INSTANCES = Path(__file__).with_name("instances") / "small"
OPTIMA = INSTANCES / "optimum.json"
RESULTS = Path(__file__).with_name("results") / "small.json"
MIB = 1 << 20
# Budgets, as shares of the way from the smallest to the in-core budget.
_SHARES = (0.25, 0.6)
_EFFORT = 100_000
# Approximate seconds to copy bytes over the seconds to compute them.
_LINKS = {"fast": 0.7, "slow": 6.0, "none": None}


class StepBuilder:
    """A builder of a synthetic step. Sizes are in MiB, times in milliseconds."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.costs: list[OpCost] = []

    def storage(self, kind: StorageKind, size: float, name: str) -> int:
        self.storages.append(Storage(len(self.storages), int(size * MIB), kind, name))
        return len(self.storages) - 1

    def activation(self, size: float, name: str) -> int:
        return self.storage(StorageKind.ACTIVATION, size, name)

    def op(
        self,
        name: str,
        reads: Sequence[int],
        creates: Sequence[int] = (),
        mutates: Sequence[int] = (),
        *,
        millis: float = 1.0,
        workspace: float = 0.0,
        rerunnable: bool = True,
    ) -> None:
        unique_reads = tuple(dict.fromkeys(reads))
        self.ops.append(Op(len(self.ops), name, unique_reads, tuple(mutates), tuple(creates), rerunnable=rerunnable))
        seconds = round(millis * self.generator.uniform(0.8, 1.2), 2) / 1000
        self.costs.append(OpCost(seconds, int(workspace * MIB)))

    def finish(self, link: str, outputs: Sequence[int]) -> tuple[StepGraph, Costs]:
        graph = StepGraph(tuple(self.storages), tuple(self.ops), tuple(outputs))
        graph.check()
        factor = _LINKS[link]
        homes: tuple[Home, ...] = ()
        if factor is not None:
            created_bytes = sum(self.storages[s].bytes for op in self.ops for s in op.creates)
            rate = round(created_bytes / sum(cost.seconds for cost in self.costs) / factor, -3)
            homes = (Home("host", None, rate, rate, 1e-5),)
        return graph, Costs(tuple(self.costs), homes)


def chain(seed: int, link: str, layers: int = 9, norms: bool = False) -> tuple[StepGraph, Costs]:
    """Build a chain of layers; ``norms`` inserts cheap ops that work in place."""
    draft = StepBuilder(seed)
    flow = [draft.storage(StorageKind.INPUT, draft.generator.choice([2, 4]), "x")]
    for layer in range(layers):
        out = draft.activation(draft.generator.choice([2, 3, 4, 6]), f"a{layer}")
        draft.op(f"layer{layer}", [flow[-1]], [out], millis=draft.generator.choice([1, 2, 4]))
        if norms and layer % 2:
            draft.op(f"relu_{layer}", [out], mutates=[out], millis=0.3)
        flow.append(out)
    loss = draft.storage(StorageKind.OUTPUT, 1e-5, "loss")
    draft.op("loss", [flow[-1]], [loss], millis=0.1)
    slope = draft.activation(3, "d")
    draft.op("loss_backward", [flow[-1]], [slope], millis=0.3)
    for layer in reversed(range(layers)):
        below = draft.activation(draft.storages[flow[layer]].bytes / MIB, f"d{layer}")
        draft.op(f"back{layer}", [slope, flow[layer], flow[layer + 1]], [below], millis=draft.generator.choice([2, 4]))
        slope = below
    return draft.finish(link, [loss])


def unet(seed: int, link: str) -> tuple[StepGraph, Costs]:
    """Build a U-Net with skips between the levels of both halves."""
    draft = StepBuilder(seed)
    levels = 4
    flow = draft.storage(StorageKind.INPUT, 8, "x")
    saved: list[tuple[int, tuple[int, ...], int]] = []
    skips: list[int] = []
    for level in range(levels):
        out = draft.activation(8 / 2**level, f"down{level}")
        draft.op(f"down{level}", [flow], [out], millis=3)
        saved.append((out, (flow,), len(saved)))
        skips.append(out)
        flow = out
    for level in reversed(range(levels - 1)):
        out = draft.activation(8 / 2**level, f"up{level}")
        draft.op(f"up{level}", [flow, skips[level]], [out], millis=4)
        saved.append((out, (flow, skips[level]), len(saved)))
        flow = out
    loss = draft.storage(StorageKind.OUTPUT, 1e-5, "loss")
    draft.op("loss", [flow], [loss], millis=0.1)
    slope = draft.activation(8, "d")
    draft.op("loss_backward", [flow], [slope], millis=0.5)
    waiting: dict[int, list[int]] = {}
    for out, reads, _ in reversed(saved):
        below = draft.activation(draft.storages[reads[0]].bytes / MIB, f"d_{draft.storages[out].name}")
        extra = [draft.activation(draft.storages[r].bytes / MIB, f"s_{draft.storages[out].name}") for r in reads[1:]]
        draft.op(
            f"back_{draft.storages[out].name}", [slope, out, *reads, *waiting.get(out, [])], [below, *extra], millis=5
        )
        for read, gradient in zip(reads[1:], extra, strict=True):
            waiting.setdefault(read, []).append(gradient)
        slope = below
    return draft.finish(link, [loss])


def residual(seed: int, link: str, blocks: int = 4) -> tuple[StepGraph, Costs]:
    """Build blocks of a heavy op, a cheap op, and an in-place addition of the skip."""
    draft = StepBuilder(seed)
    flow = draft.storage(StorageKind.INPUT, 4, "x")
    saved: list[tuple[int, int, int]] = []
    for block in range(blocks):
        inner = draft.activation(4, f"conv{block}")
        draft.op(f"conv{block}", [flow], [inner], millis=4, workspace=draft.generator.choice([0, 2]))
        out = draft.activation(4, f"norm{block}")
        draft.op(f"norm{block}", [inner], [out], millis=0.5)
        draft.op(f"add_{block}", [out, flow], mutates=[out], millis=0.4)
        saved.append((flow, inner, out))
        flow = out
    loss = draft.storage(StorageKind.OUTPUT, 1e-5, "loss")
    draft.op("loss", [flow], [loss], millis=0.1)
    slope = draft.activation(4, "d")
    draft.op("loss_backward", [flow], [slope], millis=0.3)
    for block, (before, inner, _) in reversed(list(enumerate(saved))):
        middle, below = draft.activation(4, f"dn{block}"), draft.activation(4, f"dc{block}")
        draft.op(f"norm_back{block}", [slope, inner], [middle], millis=0.8)
        draft.op(f"conv_back{block}", [middle, before], [below], millis=8, workspace=draft.generator.choice([0, 2]))
        draft.op(f"add_back_{block}", [below, slope], mutates=[below], millis=0.3)
        slope = below
    return draft.finish(link, [loss])


def transformer(seed: int, link: str) -> tuple[StepGraph, Costs]:
    """Build one block: attention and feed-forward, with cheap norms."""
    draft = StepBuilder(seed)
    x = draft.storage(StorageKind.INPUT, 2, "x")
    sizes = {
        "norm1": 2,
        "qkv": 6,
        "mixed": 2,
        "out": 2,
        "sum1": 2,
        "norm2": 2,
        "up": 8,
        "gelu": 8,
        "down": 2,
        "sum2": 2,
    }
    storage_of = {name: draft.activation(size, name) for name, size in sizes.items()}
    storage_of["x"] = x
    forward = [
        ("norm1", ["x"], 0.3),
        ("qkv", ["norm1"], 3),
        ("mixed", ["qkv"], 2),
        ("out", ["mixed"], 1),
        ("sum1", ["x", "out"], 0.2),
        ("norm2", ["sum1"], 0.3),
        ("up", ["norm2"], 4),
        ("gelu", ["up"], 0.8),
        ("down", ["gelu"], 4),
        ("sum2", ["sum1", "down"], 0.2),
    ]
    for name, reads, millis in forward:
        draft.op(name, [storage_of[r] for r in reads], [storage_of[name]], millis=millis)
    loss = draft.storage(StorageKind.OUTPUT, 1e-5, "loss")
    draft.op("loss", [storage_of["sum2"]], [loss], millis=0.1)
    slopes = {"sum2": draft.activation(2, "d_sum2")}
    draft.op("loss_backward", [storage_of["sum2"]], [slopes["sum2"]], millis=0.2)
    needs = {
        "down": "gelu",
        "gelu": "up",
        "up": "norm2",
        "norm2": "sum1",
        "out": "mixed",
        "mixed": "qkv",
        "qkv": "norm1",
    }
    order = [("sum2", "down"), ("down", "gelu"), ("gelu", "up"), ("up", "norm2"), ("norm2", "sum1")]
    order += [("sum1", "out"), ("out", "mixed"), ("mixed", "qkv"), ("qkv", "norm1"), ("norm1", "x")]
    millis = {name: 2 * cost for name, _, cost in forward}
    slope = slopes["sum2"]
    for name, below in order:
        if name in ("sum2", "sum1"):
            continue
        gradient = draft.activation(sizes.get(below, 2), f"d_{below}")
        saved = [storage_of[needs[name]]] if name in needs else [x]
        draft.op(f"{name}_back", [slope, *saved], [gradient], millis=millis[name])
        if name == "norm2":
            draft.op("sum1_back_", [gradient, slopes["sum2"]], mutates=[gradient], millis=0.2)
        slope = gradient
    return draft.finish(link, [loss])


def training_step(seed: int, link: str, layers: int = 3, moments: bool = True) -> tuple[StepGraph, Costs]:
    """Build layers with parameters and optimizer state that are updated once their gradients exist."""
    draft = StepBuilder(seed)
    weights = [draft.storage(StorageKind.PARAMETER, draft.generator.choice([2, 4]), f"w{i}") for i in range(layers)]
    sizes = [draft.storages[w].bytes / MIB for w in weights]
    states = [draft.storage(StorageKind.OPTIMIZER_STATE, size, f"m{i}") for i, size in enumerate(sizes) if moments]
    flow = [draft.storage(StorageKind.INPUT, 2, "x")]
    for layer in range(layers):
        flow.append(draft.activation(draft.generator.choice([2, 4]), f"a{layer}"))
        draft.op(f"layer{layer}", [flow[-2], weights[layer]], [flow[-1]], millis=2)
    loss = draft.storage(StorageKind.OUTPUT, 1e-5, "loss")
    draft.op("loss", [flow[-1]], [loss], millis=0.1)
    slope = draft.activation(2, "d")
    draft.op("loss_backward", [flow[-1]], [slope], millis=0.3)
    for layer in reversed(range(layers)):
        below = draft.activation(draft.storages[flow[layer]].bytes / MIB, f"d{layer}")
        gradient = draft.activation(sizes[layer], f"g{layer}")
        draft.op(f"back{layer}", [slope, flow[layer], weights[layer]], [below, gradient], millis=4)
        state = [states[layer]] if moments else []
        updated_storages = [weights[layer], *state]
        draft.op(
            f"update{layer}", [*updated_storages, gradient], mutates=updated_storages, millis=0.6, rerunnable=False
        )
        slope = below
    return draft.finish(link, [loss])


def random_graph(seed: int, link: str, count: int = 24) -> tuple[StepGraph, Costs]:
    """Build a random graph of ops that read results of earlier ops."""
    draft = StepBuilder(seed)
    results = [draft.storage(StorageKind.INPUT, 2, "x")]
    for index in range(count):
        recent = results[-3:] if draft.generator.random() < 0.6 else results
        reads = draft.generator.sample(recent, min(len(recent), draft.generator.choice([1, 2])))
        out = draft.activation(draft.generator.choice([1, 2, 3, 5]), f"a{index}")
        draft.op(f"op{index}", reads, [out], millis=draft.generator.choice([0.5, 1, 2, 5]))
        results.append(out)
    loss = draft.storage(StorageKind.OUTPUT, 1e-5, "loss")
    draft.op("loss", results[-2:], [loss], millis=0.1)
    return draft.finish(link, [loss])


Make = Callable[[], tuple[StepGraph, Costs]]
MAKERS: dict[str, Make] = {
    "chain-fast": lambda: chain(1, "fast"),
    "chain-slow": lambda: chain(2, "slow"),
    "chain-none": lambda: chain(3, "none"),
    "chain-inplace-slow": lambda: chain(4, "slow", 8, norms=True),
    "chain-inplace-none": lambda: chain(5, "none", 8, norms=True),
    "unet-fast": lambda: unet(6, "fast"),
    "unet-slow": lambda: unet(7, "slow"),
    "unet-none": lambda: unet(8, "none"),
    "residual-fast": lambda: residual(9, "fast"),
    "residual-slow": lambda: residual(10, "slow"),
    "residual-none": lambda: residual(11, "none"),
    "transformer-fast": lambda: transformer(12, "fast"),
    "transformer-slow": lambda: transformer(13, "slow"),
    "transformer-none": lambda: transformer(14, "none"),
    "updated-fast": lambda: training_step(15, "fast"),
    "updated-slow": lambda: training_step(16, "slow"),
    "updated-plain-slow": lambda: training_step(17, "slow", 4, moments=False),
    "scattered-fast": lambda: random_graph(18, "fast"),
    "scattered-slow": lambda: random_graph(19, "slow"),
    "scattered-none": lambda: random_graph(20, "none"),
}


def write_instances(console: Console) -> None:
    """Write the instances and their optima."""
    INSTANCES.mkdir(parents=True, exist_ok=True)
    entries_of: dict[str, list[dict[str, object]]] = {}
    for name, make in MAKERS.items():
        graph, costs = make()
        write_graph(INSTANCES / f"{name}.json", GraphFile.of(graph, costs))
        smallest, in_core = smallest_budget(graph, costs), in_core_budget(graph, costs)
        for share in _SHARES:
            budget = int(smallest + share * (in_core - smallest))
            begin = time.process_time()
            best = optimum(graph, costs, budget, effort=_EFFORT)
            if best is None or (best.proved and best.seconds is None):
                console.print(f"{name} at {budget}: skipped, no plan exists")
                continue
            placed = [fit_plan(graph, costs, budget, plan) for plan in best.plans]
            reached = [p.timeline.step_seconds for p in placed if p is not None]
            entry = {
                "budget": budget,
                "lower_seconds": best.lower_seconds,
                "proved": best.proved,
                "placed_seconds": min(reached, default=None),
                "looked_at": best.looked_at,
            }
            entries_of.setdefault(name, []).append(entry)
            console.print(f"{name}: {len(graph.ops)} ops, {entry}, {time.process_time() - begin:.1f} s")
    OPTIMA.write_text(json.dumps(entries_of, indent=2) + "\n")


def compare_policies(policies: Sequence[str]) -> list[dict[str, object]]:
    """Return each policy's step time over the optimum for each instance."""
    rows: list[dict[str, object]] = []
    for name, entries in json.loads(OPTIMA.read_text()).items():
        file = read_graph(INSTANCES / f"{name}.json")
        for entry in entries:
            budget = entry["budget"]
            row: dict[str, object] = {"instance": name, "budget": budget, "optimum_seconds": entry["lower_seconds"]}
            row["bound"] = (lower_bound_seconds(file.graph, file.costs, budget) or 0.0) / entry["lower_seconds"]
            for policy in policies:
                try:
                    planned = plan_step(file.graph, file.costs, budget, policy)
                    row[policy] = planned.timeline.step_seconds / entry["lower_seconds"]
                except BudgetError:
                    row[policy] = None
            rows.append(row)
    return rows


def main(
    again: Annotated[bool, typer.Option("--write", help="Regenerate the instances and their optima.")] = False,
    policies: Annotated[
        str, typer.Option(help="Planning policies, separated by commas.")
    ] = "auto,pooch,tflms,superneurons",
) -> None:
    """Compare policies with the optimum, print a table and write the results."""
    console = Console()
    if again:
        write_instances(console)
    names = policies.split(",")
    rows = compare_policies(names)
    table = Table("instance", "budget", "optimum", "linear bound", *names)
    for row in rows:
        ratios = [row["bound"], *(row[name] for name in names)]
        cells = ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        table.add_row(
            row["instance"], f"{row['budget'] / MIB:.1f} MiB", f"{row['optimum_seconds'] * 1e3:.2f} ms", *cells
        )
    summary: dict[str, dict[str, object]] = {}
    for name in names:
        # A plan outside the search's class can beat the optimum; it must not offset worse plans in the mean.
        ratios = [max(row[name], 1.0) for row in rows if row[name] is not None]
        summary[name] = {"mean": mean(ratios), "worst": max(ratios), "without_plan": len(rows) - len(ratios)}
    for statistic in ("mean", "worst"):
        table.add_row(statistic, "", "", "", *(f"{summary[name][statistic]:.3f}" for name in names))
    table.add_row("without plan", "", "", "", *(str(summary[name]["without_plan"]) for name in names))
    console.print(table)
    RESULTS.write_text(json.dumps({"summary": summary, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
