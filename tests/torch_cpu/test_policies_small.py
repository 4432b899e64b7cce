"""Tests that a small model trained with any policy has the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import outofcore
from outofcore.costs import Costs
from outofcore.errors import InputError
from outofcore.graph import StepGraph
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning import in_core_budget, smallest_budget
from outofcore.policies import TFLMS, Held, PolicyLike, PoocH, Window, movable_gaps
from outofcore.validator import validate

Step = Callable[[torch.Tensor], torch.Tensor]


def make_training() -> tuple[Step, nn.Module, torch.optim.Optimizer]:
    """Make a step with activations of 512 KiB, parameters of 64 KiB and a buffer that it overwrites."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(10)))
    model.register_buffer("seen", torch.zeros(1024, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y = model(x)
        loss = (y - model.seen).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.seen.copy_(x)
        return loss

    return step, model, optimizer


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1024, 128) for _ in range(3)]


def longest_first(graph: StepGraph, costs: Costs, room: int) -> Plan:
    gaps = sorted(movable_gaps(graph), key=lambda gap: gap.start - gap.end)
    decisions = [Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end) for gap in gaps]
    usage = Held.of(graph, costs)
    while decisions and usage.peak(decisions[:-1]) <= room:
        decisions.pop()
    return Plan("longest-first", room, tuple(decisions))


@pytest.mark.parametrize(
    "policy",
    [
        Window(),
        "window:reach=0.7,persist=false",
        TFLMS(mode=1),
        PoocH(effort=20_000),
        "sqrt-checkpoint:segments=3",
        longest_first,
    ],
    ids=lambda policy: getattr(policy, "__name__", str(policy)),
)
def test_policy_gives_the_bits_of_plain_pytorch(policy: PolicyLike) -> None:
    plain, model, _ = make_training()
    theirs = [plain(x).detach().clone() for x in batches()]
    step, twin, optimizer = make_training()
    graph, costs = measure_step()
    smallest, in_core = smallest_budget(graph, costs), in_core_budget(graph, costs)
    budget = (smallest + 2 * in_core) // 3
    with outofcore.compile(step, twin, optimizer, budget=budget, home="host", policy=policy) as train:
        ours = [train(x).detach().clone() for x in batches()]
        planned = train.planned
        validate(train.captured.graph, planned.program, budget, train.costs)
        assert planned.plan.decisions and planned.plan.policy == train.policy.name
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True))


def measure_step() -> tuple[StepGraph, Costs]:
    step, model, optimizer = make_training()
    with outofcore.compile(step, model, optimizer, budget="256MiB", home="host") as train:
        train(batches()[0])
        return train.captured.graph, train.costs


def test_invalid_policy_is_refused() -> None:
    step, model, optimizer = make_training()
    for policy, message in (("windw", "did you mean 'window'"), (Window, "give an instance"), (3, "must be a name")):
        with pytest.raises(InputError, match=message):
            outofcore.compile(step, model, optimizer, budget="8MiB", policy=policy)  # type: ignore[arg-type]
