"""Tests that recomputed steps have the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outofcore
from outofcore import planning
from outofcore.analysis import gaps_of
from outofcore.analysis.recipes import History, can_recompute
from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning import Planned
from outofcore.program import Run
from outofcore.validator import validate

STEPS = 3
Planner = Callable[[StepGraph], Plan]


class ConvNet(nn.Module):
    """Convolutions, batch norm in training, in-place ReLU and dropout, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.first = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.second = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.relu(self.first(self.stem(images))), 0.2)
        y = self.second(self.inner(x))
        y += x
        y = F.max_pool2d(self.relu(y), 2)
        return self.head(F.dropout(y.mean((2, 3)), 0.3))


class Attention(nn.Module):
    """One block of a transformer, with dropout in the attention and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embedding(tokens), 0.1)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1)
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)
        return (x @ self.embedding.weight.T).flatten(0, 1)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 24, 24), torch.randint(5, (4,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(32, (4, 33))
    return ids[:, :-1].contiguous(), ids[:, 1:].flatten()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "convnet": (ConvNet, images),
    "attention": (Attention, tokens),
}


def recompute_decisions(graph: StepGraph) -> Iterator[Decision]:
    """Yield decisions to recompute each gap that allows it, right before its end."""
    history = History.of(graph)
    for storage in graph.storages:
        for gap in gaps_of(graph, storage.id):
            inside = 0 <= gap.start < gap.end - 1 < len(graph.ops) - 1
            if inside and can_recompute(history, storage.id, gap.end):
                yield Decision(gap, Residency.RECOMPUTE, gap.start + 1, gap.end)


def recompute_separately(graph: StepGraph) -> Plan:
    """Recompute each storage whenever it is needed, and keep no intermediates."""
    return Plan("each alone", 0, tuple(recompute_decisions(graph)))


def recompute_together(graph: StepGraph) -> Plan:
    """Recompute all that the backward pass needs when its first use comes."""
    loss = next(op.id for op in graph.ops if op.name.startswith("aten.nll_loss_forward"))
    over = [d for d in recompute_decisions(graph) if d.gap.start < loss < d.gap.end]
    first = min(d.gap.end for d in over)
    return Plan("together", 0, tuple(Decision(d.gap, d.residency, d.release_by, first) for d in over))


def recompute_and_offload(graph: StepGraph) -> Plan:
    """Recompute every third gap that allows it, and offload every second of the other gaps."""
    recomputed = {d.gap: d for d in list(recompute_decisions(graph))[::3]}
    decisions = list(recomputed.values())
    gaps = [gap for storage in graph.storages for gap in gaps_of(graph, storage.id) if gap not in recomputed]
    for gap in gaps[::2]:
        if gap.start >= 0 and graph.storages[gap.storage].bytes >= 65536:
            release = min(gap.start + 1, len(graph.ops))
            decisions.append(Decision(gap, Residency.OFFLOAD, release, gap.end))
    return Plan("mixed", 0, tuple(decisions))


def train(name: str, plan: Planner | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], int]:
    """Return the losses and the final state of the training, and the number of recomputed ops."""
    torch.manual_seed(7)
    build, draw = MODELS[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = train_step
    if plan is not None:

        def plan_once(graph: StepGraph, costs: Costs, budget: int, *_: Any, **__: Any) -> Iterator[Planned]:
            result = planning.fit_plan(graph, costs, budget, plan(graph))
            assert result is not None
            validate(graph, result.program, budget, costs)
            yield result

        monkeypatch.setattr(planning, "plans_of_step", plan_once)
        monkeypatch.setattr(planning, "plan_in_core", lambda *_: None)
        step = outofcore.compile(train_step, model, optimizer, budget="1GiB")
    results: list[torch.Tensor] = []
    for _ in range(STEPS):
        results.append(step(*draw()).detach().clone())
    results.append(torch.get_rng_state())
    results += [tensor.clone() for tensor in model.state_dict().values()]
    for entries in optimizer.state_dict()["state"].values():
        results += [torch.as_tensor(item).clone() for item in entries.values()]
    recomputed_ops = 0
    if plan is not None:
        recomputed_ops = sum(isinstance(i, Run) and i.again for i in step.planned.program.instructions)
        assert step.stats.off_plan == 0
        step.close()
    return results, recomputed_ops


@pytest.mark.parametrize("plan", [recompute_separately, recompute_together, recompute_and_offload])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_step_has_the_bits_of_plain_pytorch(
    name: str, plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, _ = train(name, None, monkeypatch)
    ours, recomputed_ops = train(name, plan, monkeypatch)
    assert recomputed_ops > 0
    for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(actual, expected), f"result {index} differs"


def test_recomputation_discards_batch_statistics_and_repeats_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[StepGraph] = []

    def record_graph(graph: StepGraph) -> Plan:
        graphs.append(graph)
        return recompute_together(graph)

    train("convnet", record_graph, monkeypatch)
    graph = graphs[0]
    kinds = {op.name: {graph.storages[s].kind for s in op.discards} for op in graph.ops if op.discards}
    assert kinds and all(storage_kinds == {StorageKind.BUFFER} for storage_kinds in kinds.values())
    norms = [op for op in graph.ops if op.discards]
    assert len(norms) == 2 and all(len(op.discards) == 2 for op in norms)
    plan = recompute_together(graph)
    recomputed = {d.gap.storage for d in plan.decisions}
    assert {s for op in norms for s in op.creates} & recomputed
    assert {s for op in graph.ops if op.random for s in op.mutates + op.creates} & recomputed
