"""Convolutions run by chosen algorithms: the same ones whenever an op runs, and only if that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.costs import OpCost
from outofcore.errors import InputError
from outofcore.execution.native import load_native
from outofcore.planning import smallest_budget
from outofcore.profiling import algorithms
from outofcore.profiling.algorithms import Algorithm, Chosen, alternatives, choose, is_convolution, run_by
from outofcore.program import Run
from outofcore.step import Step

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    load_native().library is None or not torch.backends.mkldnn.is_available(), reason="there is nothing to choose from"
)


def world() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step, (torch.randn(4, 3, 32, 32), torch.randint(0, 16, (4,)))


def eager(steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model, _, step, batch = world()
    return [step(*batch).detach() for _ in range(steps)], [p.detach() for p in model.parameters()]


def first_other(own: OpCost, others: Sequence[OpCost], room: int) -> int | None:
    return 0 if others else None


def chosen(step: Step) -> list[bool]:
    """Of each convolution of the step, whether it is run by another algorithm than PyTorch's own choice."""
    captured = step.captured
    return [
        isinstance(call.func, Chosen)
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
        if is_convolution(op)
    ]


@pytest.mark.parametrize("policy", ["keep-all", "sqrt-checkpoint"])
def test_what_is_chosen_stays(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "choose", first_other)
    torch.backends.mkldnn.enabled = False
    try:
        losses, parameters = eager(3)
    finally:
        torch.backends.mkldnn.enabled = True
    model, optimizer, plain, batch = world()
    budget = 64 << 20
    if policy == "sqrt-checkpoint":
        with outofcore.compile(plain, model, optimizer, budget=budget, home="host", algorithms="fastest") as step:
            step(*batch)
            budget = smallest_budget(step.captured.graph, step.costs) + (1 << 20)
        model, optimizer, plain, batch = world()
    with outofcore.compile(
        plain, model, optimizer, budget=budget, home="host", policy=policy, cache=False, algorithms="fastest"
    ) as step:
        found = [step(*batch).detach() for _ in range(3)]
        assert len(chosen(step)) >= 10
        assert all(chosen(step))
        again = [i for i in step.planned.program.instructions if isinstance(i, Run) and i.again]
        if policy == "sqrt-checkpoint":
            assert any(is_convolution(step.captured.graph.ops[run.op]) for run in again)
        assert torch.backends.mkldnn.enabled
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))


def test_nothing_is_chosen_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "choose", first_other)
    losses, _ = eager(2)
    model, optimizer, plain, batch = world()
    with outofcore.compile(plain, model, optimizer, budget=64 << 20, home="host", cache=False) as step:
        assert all(torch.equal(step(*batch).detach(), loss) for loss in losses)
        assert not any(chosen(step))
    with pytest.raises(InputError, match="there are no algorithms 'best'"):
        outofcore.compile(plain, model, optimizer, budget=64 << 20, algorithms="best")


def test_what_was_chosen_before_is_not_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, plain, batch = world()
    with outofcore.compile(
        plain, model, optimizer, budget=64 << 20, home="host", cache=False, algorithms="fastest"
    ) as step:
        step(*batch)
        before = chosen(step)
        monkeypatch.setattr(algorithms, "choose", lambda *_: pytest.fail("it was chosen before"))
        step._forget_plans()
        step(*batch)
        assert chosen(step) == before


def test_an_algorithm_that_an_op_does_not_have_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        @property
        def enabled(self) -> bool:
            return True

        @enabled.setter
        def enabled(self, value: bool) -> None:
            if not value:
                raise RuntimeError("there is no such kernel")

    monkeypatch.setattr(algorithms, "choose", first_other)
    monkeypatch.setattr(algorithms, "alternatives", lambda _: (Algorithm("absent", ((Absent(), "enabled", False),)),))
    model, optimizer, plain, batch = world()
    with outofcore.compile(
        plain, model, optimizer, budget=64 << 20, home="host", cache=False, algorithms="fastest"
    ) as step:
        step(*batch)
        assert not any(chosen(step))


def test_alternatives_are_those_that_the_flags_leave() -> None:
    assert [a.name for a in alternatives(CPU)] == ["without oneDNN"]
    torch.backends.mkldnn.enabled = False
    try:
        assert alternatives(CPU) == ()
    finally:
        torch.backends.mkldnn.enabled = True
    assert [a.name for a in alternatives(torch.device("cuda"))] == ["deterministic", "without cuDNN"]


def test_flags_are_set_back_whatever_happens() -> None:
    def fails() -> None:
        assert not torch.backends.mkldnn.enabled
        raise ValueError("on purpose")

    (algorithm,) = alternatives(CPU)
    with pytest.raises(ValueError, match="on purpose"):
        Chosen(fails, algorithm)()
    assert torch.backends.mkldnn.enabled


def test_another_algorithm_is_another_family() -> None:
    model, optimizer, plain, batch = world()
    with outofcore.compile(plain, model, optimizer, budget=64 << 20, home="host", cache=False) as step:
        step(*batch)
        captured = step.captured
    index = next(op.id for op in captured.graph.ops if is_convolution(op))
    (algorithm,) = alternatives(CPU)
    other = run_by(captured, {index: algorithm})
    assert other.graph.ops[index].family != captured.graph.ops[index].family
    assert [op.family for op in other.graph.ops if op.id != index] == [
        op.family for op in captured.graph.ops if op.id != index
    ]


OWN = OpCost(1.0, 100)


@pytest.mark.parametrize(
    ("others", "room", "wanted"),
    [
        ([], 1000, None),
        ([OpCost(0.5, 50), OpCost(0.4, 900)], 1000, 1),
        # The faster of the two has too much workspace.
        ([OpCost(0.5, 50), OpCost(0.4, 900)], 800, 0),
        # Not worth other bits: measurements differ by so much.
        ([OpCost(0.95, 50)], 1000, None),
        # Its own does not fit, and so a slower one is taken; of two that fit the faster.
        ([OpCost(3.0, 50), OpCost(2.0, 60)], 80, 1),
        # None fits: the least.
        ([OpCost(3.0, 50), OpCost(2.0, 60)], 40, 0),
        ([OpCost(0.5, 150)], 40, None),
        # Alike: the first.
        ([OpCost(0.5, 50), OpCost(0.5, 50)], 1000, 0),
    ],
)
def test_the_fastest_that_fits(others: list[OpCost], room: int, wanted: int | None) -> None:
    assert choose(OWN, others, room) == wanted
