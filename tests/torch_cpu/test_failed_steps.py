"""Tests of steps that raise midway: the model is as before the step, or as plain PyTorch leaves it."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from torch import nn

import outofcore
from outofcore.capture.optimizers import BoundUpdate
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.errors import BudgetError
from outofcore.execution.interrupts import DeferredSignals
from outofcore.session import CallOutcome
from outofcore.transforms.passes import rewrite_for_lowest_memory

WIDTH, WORDS = 160, 400
LIMIT = [float("inf")]


@torch.library.custom_op("outofcore_tests::limited", mutates_args=())
def check_limit(x: torch.Tensor) -> torch.Tensor:
    if float(x.abs().max()) > LIMIT[0]:
        raise ValueError("a value is beyond the limit")
    return x.clone()


check_limit.register_fake(torch.empty_like)


class Limiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return check_limit(gradient)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def make_case(kind: str) -> tuple[Callable[..., torch.Tensor], nn.Module, list[torch.optim.Optimizer]]:
    """Return a step of a batch and indices that raises for an index out of range, its model and optimizers."""
    torch.manual_seed(0)
    table = nn.Embedding(WORDS, WIDTH)
    model = nn.ModuleList([linear(), linear(), linear(), table])
    first = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], lr=1e-2)
    second = torch.optim.SGD([*model[2].parameters(), *table.parameters()], lr=1e-2, momentum=0.9)

    def two_losses(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        first.zero_grad()
        second.zero_grad()
        F.mse_loss(model[1](torch.tanh(model[0](x))), x).backward()
        first.step()
        loss = F.mse_loss(model[2](table(words) + model[0](x).detach()), x)
        loss.backward()
        second.step()
        return loss.detach()

    def accumulating(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        F.mse_loss(model[1](torch.tanh(model[0](x))), x).backward()
        loss = F.mse_loss(model[2](table(words)), x)
        loss.backward()
        return loss.detach()

    def in_backward(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        first.zero_grad()
        second.zero_grad()
        inner = Limiting.apply(torch.tanh(model[0](x)))
        loss = F.mse_loss(model[2](model[1](inner) + table(words)), x)
        loss.backward()
        first.step()
        second.step()
        return loss.detach()

    step = {"two losses": two_losses, "accumulating": accumulating, "in backward": in_backward}[kind]
    return step, model, [first, second]


def make_inputs(number: int, *, wrong: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(0, WORDS, (32,), generator=generator)
    return torch.randn(32, WIDTH, generator=generator), words + WORDS if wrong else words


def all_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"{name}.grad"] = parameter.grad.clone()
        for number, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}.{number}.{key}"] = value.clone()
    return tensors


@functools.cache
def smallest(kind: str) -> int:
    step, model, optimizers = make_case(kind)
    with outofcore.compile(step, model, optimizers, budget="64KiB", cache=False) as compiled:
        with pytest.raises(BudgetError) as caught:
            compiled(*make_inputs(0))
        return int(caught.value.smallest_budget or 0)


@pytest.fixture(autouse=True)
def _reset_limit() -> Any:
    yield
    LIMIT[0] = float("inf")


@pytest.mark.parametrize("factor", [1.0, *some_of([1.5, 50.0], lambda f: f == 50)])
@pytest.mark.parametrize("kind", ["two losses", "accumulating"])
@pytest.mark.parametrize("early", [True, False])
def test_late_error_leaves_the_state_of_plain_pytorch(kind: str, factor: float, early: bool) -> None:
    """The index error comes after updates, or after gradients were accumulated; training then continues."""
    plain, plain_model, plain_optimizers = make_case(kind)
    step, model, optimizers = make_case(kind)
    budget = int(smallest(kind) * factor)
    notes = []
    with outofcore.compile(step, model, optimizers, budget=budget, cache=False, policy="offload-all") as compiled:
        for number in range(5):
            wrong = number == (1 if early else 3)
            if not wrong:
                assert torch.equal(compiled(*make_inputs(number)), plain(*make_inputs(number)))
                continue
            for run in (plain, compiled):
                with pytest.raises(IndexError, match="out of range") as caught:
                    run(*make_inputs(number, wrong=True))
            notes = caught.value.__notes__
            ours, theirs = all_state(model, optimizers), all_state(plain_model, plain_optimizers)
            if kind == "two losses":  # the step may or may not have freed its own gradients
                ours, theirs = ({k: v for k, v in state.items() if not k.endswith(".grad")} for state in (ours, theirs))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
            assert not compiled._session.torn
        ours, theirs = all_state(model, optimizers), all_state(plain_model, plain_optimizers)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(CallOutcome.STOPPED.value in note for note in notes)


@pytest.mark.parametrize("factor", [1.0, *some_of([1.5, 50.0], lambda f: f == 50)])
def test_updates_do_not_move_before_a_raising_op(factor: float) -> None:
    """The first layers' gradient raises when the last layers could already be updated."""
    plain, plain_model, plain_optimizers = make_case("in backward")
    step, model, optimizers = make_case("in backward")
    budget = int(smallest("in backward") * factor)
    with outofcore.compile(step, model, optimizers, budget=budget, cache=False) as compiled:
        for number in range(2):
            assert torch.equal(compiled(*make_inputs(number)), plain(*make_inputs(number)))
        before = all_state(model, optimizers)
        LIMIT[0] = 0.0
        with pytest.raises(ValueError, match="beyond the limit") as caught:
            compiled(*make_inputs(2))
        notes = " ".join(caught.value.__notes__)
        assert (
            CallOutcome.UNDONE.value in notes or CallOutcome.STOPPED.value in notes
        )  # STOPPED if gradients were evicted
        after = all_state(model, optimizers)
        assert all(torch.equal(after[name], before[name]) for name in before if not name.endswith(".grad"))
        LIMIT[0] = float("inf")
        for number in range(2, 4):
            assert torch.equal(compiled(*make_inputs(number)), plain(*make_inputs(number)))
        ours, theirs = all_state(model, optimizers), all_state(plain_model, plain_optimizers)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_embedding_does_not_stop_updates_from_moving_up() -> None:
    """Only the first op on an index can raise for it."""
    step, model, optimizers = make_case("two losses")
    with outofcore.compile(step, model, optimizers, budget="1GiB", cache=False) as compiled:
        compiled(*make_inputs(0))
        captured = rewrite_for_lowest_memory(compiled.captured)
    names = [op.name for op in captured.graph.ops]
    raising = [names[op] for op in sorted(ops_that_may_raise(captured))]
    assert raising == ["aten.embedding.default"]
    updates = [index for index, name in enumerate(names) if name.startswith("optimizer.")]
    assert updates != list(range(updates[0], updates[0] + len(updates)))


@pytest.mark.parametrize("times", [2, 5])
def test_repeated_ctrl_c_waits_for_updates_in_progress(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_model, plain_optimizers = make_case("in backward")
    step, model, optimizers = make_case("in backward")
    noted, calls = threading.Semaphore(0), []
    note, update = DeferredSignals._defer_or_handle, BoundUpdate.__call__

    def note_and_signal(self: DeferredSignals, *args: Any) -> None:
        noted.release()
        note(self, *args)

    def interrupting(self: BoundUpdate, *args: Any) -> None:
        update(self, *args)
        calls.append(1)
        if len(calls) == 1:
            for _ in range(times):  # one by one: simultaneous signals would merge
                os.kill(os.getpid(), signal.SIGINT)
                assert noted.acquire(timeout=60)

    with outofcore.compile(step, model, optimizers, budget=smallest("in backward"), cache=False) as compiled:
        assert torch.equal(compiled(*make_inputs(0)), plain(*make_inputs(0)))
        with monkeypatch.context() as patch:
            patch.setattr(DeferredSignals, "_defer_or_handle", note_and_signal)
            patch.setattr(BoundUpdate, "__call__", interrupting)
            with pytest.raises(KeyboardInterrupt) as caught:
                compiled(*make_inputs(1))
        plain(*make_inputs(1))
        assert any(CallOutcome.COMPLETED.value in note for note in caught.value.__notes__)
        assert torch.equal(compiled(*make_inputs(2)), plain(*make_inputs(2)))
        ours, theirs = all_state(model, optimizers), all_state(plain_model, plain_optimizers)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
