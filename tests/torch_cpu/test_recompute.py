"""Recomputed steps give the very bits of plain PyTorch: in-place chains, batch norm, dropout, attention."""

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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)
        return (x @ self.embedding.weight.T).flatten(0, 1)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 24, 24), torch.randint(5, (4,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(32, (4, 33))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].flatten()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "convnet": (ConvNet, images),
    "attention": (Attention, tokens),
}


def recomputable(graph: StepGraph) -> Iterator[Decision]:
    """Every gap that can be recomputed, right before its end."""
    history = History.of(graph)
    for storage in graph.storages:
        for gap in gaps_of(graph, storage.id):
            inside = 0 <= gap.start < gap.end - 1 < len(graph.ops) - 1
            if inside and can_recompute(history, storage.id, gap.end):
                yield Decision(gap, Residency.RECOMPUTE, gap.start + 1, gap.end)


def each_alone(graph: StepGraph) -> Plan:
    """Whatever can be recomputed is, each time it is needed, and nothing else is kept of its chain."""
    return Plan("each alone", 0, tuple(recomputable(graph)))


def all_together(graph: StepGraph) -> Plan:
    """What the backward pass needs of the forward pass is recomputed at once, when the first of it is needed."""
    loss = next(op.id for op in graph.ops if op.name.startswith("aten.nll_loss_forward"))
    over = [d for d in recomputable(graph) if d.gap.start < loss < d.gap.end]
    first = min(d.gap.end for d in over)
    return Plan("together", 0, tuple(Decision(d.gap, d.residency, d.release_by, first) for d in over))


def mixed(graph: StepGraph) -> Plan:
    """Every third gap is recomputed, every third goes to its home, inputs and parameters as well."""
    again = {d.gap: d for d in list(recomputable(graph))[::3]}
    decisions = list(again.values())
    gaps = [gap for storage in graph.storages for gap in gaps_of(graph, storage.id) if gap not in again]
    for gap in gaps[::2]:
        if gap.start >= 0 and graph.storages[gap.storage].bytes >= 65536:
            release = min(gap.start + 1, len(graph.ops))
            decisions.append(Decision(gap, Residency.OFFLOAD, release, gap.end))
    return Plan("mixed", 0, tuple(decisions))


def train(name: str, plan: Planner | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], int]:
    """Losses, then all that the model and the optimizer hold and the generator's state; and how many ops ran again."""
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

        def planned(graph: StepGraph, costs: Costs, budget: int, *_: Any, **__: Any) -> Iterator[Planned]:
            found = planning.fit_once(graph, costs, budget, plan(graph))
            assert found is not None
            validate(graph, found.program, budget, costs)
            yield found

        monkeypatch.setattr(planning, "plans_of_step", planned)
        monkeypatch.setattr(planning, "plan_in_core", lambda *_: None)
        step = outofcore.compile(train_step, model, optimizer, budget="1GiB")
    results: list[torch.Tensor] = []
    for _ in range(STEPS):
        results.append(step(*draw()).detach().clone())
    results.append(torch.get_rng_state())
    results += [tensor.clone() for tensor in model.state_dict().values()]
    for entries in optimizer.state_dict()["state"].values():
        results += [torch.as_tensor(item).clone() for item in entries.values()]
    again = 0
    if plan is not None:
        again = sum(isinstance(i, Run) and i.again for i in step.planned.program.instructions)
        assert step.stats.off_plan == 0
        step.close()
    return results, again


@pytest.mark.parametrize("plan", [each_alone, all_together, mixed])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _ = train(name, None, monkeypatch)
    ours, again = train(name, plan, monkeypatch)
    assert again > 0
    for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(left, right), f"result {place} differs"


def test_batch_norm_discards_its_statistics_and_dropout_draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[StepGraph] = []

    def seen(graph: StepGraph) -> Plan:
        graphs.append(graph)
        return all_together(graph)

    train("convnet", seen, monkeypatch)
    graph = graphs[0]
    kinds = {op.name: {graph.storages[s].kind for s in op.discards} for op in graph.ops if op.discards}
    assert kinds and all(found == {StorageKind.BUFFER} for found in kinds.values())
    norms = [op for op in graph.ops if op.discards]
    assert len(norms) == 2 and all(len(op.discards) == 2 for op in norms)
    plan = all_together(graph)
    recomputed = {d.gap.storage for d in plan.decisions}
    assert {s for op in norms for s in op.creates} & recomputed
    assert {s for op in graph.ops if op.random for s in op.mutates + op.creates} & recomputed
