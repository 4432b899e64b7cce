"""Tests of ops and optimizers with growing memory needs; benchmarks/surges.py is the longer version."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import surging
import torch
import torch.nn.functional as F
from effort import some_of
from surging import Matrixwise
from torch import nn

import outofcore
from outofcore.errors import BudgetError, SpillError
from outofcore.execution import cpu
from outofcore.profiling.scratch import ScratchContents
from outofcore.session import CallOutcome
from outofcore.units import KIB, MIB

# Bytes of each scratch allocation of the operator below, and their number.
SCRATCH, PIECES = [128 * KIB], [1]
ROWS, COLUMNS = 256, 256


@torch.library.custom_op("outofcore_tests::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    """Double ``x``, with ``PIECES`` allocations of ``SCRATCH`` bytes."""
    scratch = [torch.full((SCRATCH[0] // 4,), 2.0) for _ in range(PIECES[0])]
    return x * scratch[-1][: x.shape[-1]]


@greedy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("outofcore_tests::greedy_backward", mutates_args=())
def greedy_backward(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


@greedy_backward.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


greedy.register_autograd(lambda context, gradient: greedy_backward(gradient))


@pytest.fixture(autouse=True)
def _small_scratch() -> Iterator[None]:
    SCRATCH[0], PIECES[0] = 128 * KIB, 1
    yield
    SCRATCH[0], PIECES[0] = 128 * KIB, 1


def greedy_case(count: int = 6) -> surging.StepCase:
    torch.manual_seed(0)
    sides = [nn.Sequential(*(nn.Linear(ROWS, COLUMNS, bias=False) for _ in range(count // 2))) for _ in range(2)]
    model = nn.ModuleList(sides)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(sides[1](greedy(sides[0](x))), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def inputs(number: int) -> torch.Tensor:
    return torch.randn(64, ROWS, generator=torch.Generator().manual_seed(number))


def run(step: Any, needs: list[int], pieces: int = 1) -> list[float]:
    losses = []
    for number, need in enumerate(needs):
        SCRATCH[0], PIECES[0] = need, pieces
        losses.append(step(inputs(number)).item())
    return losses


def used_bytes(session: Any) -> int:
    return session.steps.arena.resident_bytes() + session.steps.arena.counters().live_bytes


@pytest.mark.parametrize("name", some_of(surging.names(), lambda n: n in {"whitening", "warmup", "surges", "secant"}))
@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_run_with_surges_is_exact(name: str, factor: float) -> None:
    budget = int(surging.smallest_budget(name) * factor)
    outcome = surging.compare(name, budget, 6)
    assert outcome.exact
    assert outcome.peak <= budget
    assert outcome.beyond == (0, 0)


@pytest.mark.parametrize("pieces", [1, 4])
def test_surge_evicts_storages_unused_by_the_op(
    pieces: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan keeps all storages resident, and a request takes most of the budget."""
    needs = [128 * KIB, 128 * KIB, 3 * MIB // pieces, 128 * KIB, 3 * MIB // pieces]
    expected, model, optimizer = greedy_case()
    losses = run(expected, needs, pieces)
    states = surging.contents(model, optimizer)
    step, model, optimizer = greedy_case()
    with outofcore.compile(step, model, optimizer, budget="8MiB", cache=False) as compiled:
        session = compiled._session
        results = run(compiled, needs[:2], pieces)
        assert compiled.planned.plan.policy == "keep-all"
        # The budget is the plan's own need, without spare memory.
        lender = session.steps.arena.lender
        lender._budget = session.steps.runner.program.arena_bytes
        session.steps.arena.set_reserve(0)
        sizes: list[int] = []
        serve = lender._lend

        def watch(count: int, scope: int) -> int | None:
            address = serve(count, scope)
            sizes.append(used_bytes(session) + count)
            return address

        monkeypatch.setattr(lender, "_lend", watch)
        for number in (2,):
            SCRATCH[0], PIECES[0] = needs[number], pieces
            results.append(compiled(inputs(number)).item())
        assert lender.evicted_bytes >= 256 * KIB
        assert len(sizes) >= pieces
        assert max(sizes) <= lender._budget
        assert session.steps.arena.counters().beyond == 0
        assert session.steps.arena.counters().lent_live_bytes == 0
        for number in (3, 4):
            SCRATCH[0], PIECES[0] = needs[number], pieces
            results.append(compiled(inputs(number)).item())
        assert results == losses
        assert session.signature_count == 1
        assert all(map(torch.equal, surging.contents(model, optimizer), states))


def exponential_case() -> surging.StepCase:
    """Return a step with a matrix exponential: its scratch memory depends on the norm of its argument."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(ROWS, COLUMNS) / ROWS for _ in range(9)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = x[0, 0]
        for number, weight in enumerate(model):
            scaled = torch.matrix_exp(weight * scale) if number == 4 else weight
            x = torch.tanh(x @ scaled)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def test_surge_of_a_replayed_op_is_handled_before_the_next_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code calls the ops from the third step on, and stops after the op that was lent memory."""
    monkeypatch.setattr(cpu, "is_worth_replaying", lambda *_: True)

    def fill_with_small_numbers(contents: ScratchContents, target: torch.Tensor, dtype: torch.dtype) -> None:
        target.zero_()
        if dtype.is_floating_point:
            target[: target.numel() // dtype.itemsize * dtype.itemsize].view(dtype).fill_(1e-6)

    monkeypatch.setattr(ScratchContents, "fill_bytes", fill_with_small_numbers)
    scales = [1e-3] * 4 + [100.0, 1e-3]
    plain, plain_model, plain_optimizer = exponential_case()
    step, model, optimizer = exponential_case()
    with outofcore.compile(step, model, optimizer, budget="16MiB", cache=False) as compiled:
        session = compiled._session
        for number, scale in enumerate(scales):
            x = inputs(number)
            x[0, 0] = scale
            if number == 4:
                lender = session.steps.arena.lender
                lender._budget = session.steps.runner.program.arena_bytes
                session.steps.arena.set_reserve(0)
                op = next(op.id for op in compiled.captured.graph.ops if "matrix_exp" in op.name)
                bound = session.steps.runner._placed.bound
                scope = next(scope for scope, run in enumerate(bound.runs) if run.op == op)
                assert session.engine._replayed[bound].recorded[scope]
            assert torch.equal(compiled(x), plain(x))
            if number == 4:
                assert session.steps.arena.counters().lent
                assert session.steps.arena.counters().beyond == 0
        actual, expected = surging.contents(model, optimizer), surging.contents(plain_model, plain_optimizer)
        assert all(map(torch.equal, actual, expected))


def test_unservable_surge_runs_as_an_eager_loop(caplog: pytest.LogCaptureFixture) -> None:
    """The failed call is undone and runs again as an eager loop, which the budget may also refuse."""
    caplog.set_level(logging.INFO, "outofcore")
    needs = [128 * KIB] * 2 + [3 * MIB] + [128 * KIB] * 2
    losses = run(greedy_case()[0], needs)
    step, model, optimizer = greedy_case()
    budget = outofcore.smallest_budget(step, model, optimizer, inputs=(inputs(0),), cache=False)
    step, model, optimizer = greedy_case()
    with outofcore.compile(step, model, optimizer, budget=budget + 3 * MIB - 64 * KIB, cache=False) as compiled:
        assert run(compiled, needs) == losses
    step, model, optimizer = greedy_case()
    with outofcore.compile(step, model, optimizer, budget=int(budget * 1.1), cache=False) as compiled:
        results = run(compiled, needs[:2])
        SCRATCH[0] = 64 * MIB
        before = surging.contents(model, optimizer)
        for _ in range(2):
            with pytest.raises(BudgetError):
                compiled(inputs(2))
            assert compiled._session.eager_reason
            assert not compiled._session.torn
        assert all(map(torch.equal, surging.contents(model, optimizer), before))
        assert sum("runs as an eager loop from now on" in r.getMessage() for r in caplog.records) == 1
        SCRATCH[0] = 128 * KIB
        results += [compiled(inputs(number)).item() for number in range(2, 5)]
        assert results == losses


def test_undone_step_releases_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that refers to frames of the step would keep the old program and its arena alive."""
    step, model, optimizer = greedy_case()
    budget = outofcore.smallest_budget(step, model, optimizer, inputs=(inputs(0),), cache=False)
    with outofcore.compile(step, model, optimizer, budget=3 * budget, policy="offload-all", cache=False) as compiled:
        session = compiled._session
        run(compiled, [128 * KIB] * 3)
        session.steps.arena.lender._budget = session.steps.runner.program.arena_bytes
        session.steps.arena.set_reserve(0)
        gc.collect()
        gc.disable()
        try:
            before = weakref.ref(session.steps.runner._placed.bound)
            run(compiled, [2 * budget])
            assert session.steps.active.runs == 1, "the step was not undone and planned again"
            assert before() is None
        finally:
            gc.enable()


def test_surge_with_a_full_home_is_refused_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, optimizer = greedy_case()
    with outofcore.compile(
        step, model, optimizer, budget="6MiB", policy="offload-all", home="host", cache=False
    ) as compiled:
        run(compiled, [128 * KIB] * 2)
        before = surging.contents(model, optimizer)
        slots = compiled._session.keeper.slots[0]

        def full(count: int) -> Any:
            raise SpillError("the home is full")

        monkeypatch.setattr(slots, "take_pieces", full)
        compiled._session.steps.arena.lender._budget = compiled._session.steps.runner.program.arena_bytes
        compiled._session.steps.arena.set_reserve(0)
        monkeypatch.setattr(
            "outofcore.plan_updates.plan", lambda *_, **__: (_ for _ in ()).throw(SpillError("no room at home"))
        )
        with pytest.raises((SpillError, BudgetError), match=r"home") as caught:
            run(compiled, [5 * MIB])
        assert any(
            CallOutcome.UNDONE.value in note or CallOutcome.UNCHANGED.value in note for note in caught.value.__notes__
        )
        assert all(map(torch.equal, surging.contents(model, optimizer), before))
        monkeypatch.undo()
        run(compiled, [128 * KIB])


def test_surge_is_remembered_for_other_shapes_and_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outofcore")

    def requests(compiled: Any) -> int:
        return compiled._session.steps.off_plan

    def compile_step() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(ROWS, COLUMNS)
        scale = nn.Parameter(torch.ones(ROWS, COLUMNS))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (F.linear(x, greedy(model.weight) * scale) + model.bias).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        model.register_parameter("scale", scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return outofcore.compile(step, model, optimizer, budget="64MiB", cache=tmp_path, dynamic=False)

    with compile_step() as compiled:
        compiled(torch.ones(8, ROWS))
        compiled(torch.ones(16, ROWS))
        SCRATCH[0] = MIB
        compiled(torch.ones(8, ROWS))
        request_count = requests(compiled)
        assert request_count
        for rows in (16, 24, 8):
            compiled(torch.ones(rows, ROWS))
        assert requests(compiled) == request_count
        assert compiled._session.signature_count == 3
    with compile_step() as compiled:
        SCRATCH[0] = MIB
        compiled(torch.ones(8, ROWS))
        assert requests(compiled) == 0


ARMED = [False]


class Raising(Matrixwise):
    """Raises for the second matrix while ``ARMED``."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["seen"] = state.get("seen", 0) + 1
        if ARMED[0] and parameter.shape[0] == 2 * ROWS:
            raise ValueError("the user's own")
        return gradient


def raising_case() -> surging.StepCase:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(ROWS, COLUMNS), nn.Linear(COLUMNS, 2 * ROWS), nn.Linear(2 * ROWS, ROWS))
    optimizer = Raising(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def test_optimizer_exception_leaves_the_state_of_plain_pytorch() -> None:
    runs = []
    for is_plain in (True, False):
        step, model, optimizer = raising_case()
        compiled: Any = step
        if not is_plain:
            compiled = outofcore.compile(step, model, optimizer, budget="16MiB", cache=False)
        results: list[Any] = []
        for number in range(5):
            ARMED[0] = number == 2
            try:
                results.append(compiled(inputs(number)).item())
            except ValueError as error:
                results.append(str(error))
                if not is_plain:
                    assert CallOutcome.UPDATE_STOPPED.value in error.__notes__
            results += surging.contents(model, optimizer)
        runs.append(results)
        if not is_plain:
            compiled.close()
    assert len(runs[0]) == len(runs[1])
    for plain, ours in zip(*runs, strict=True):
        assert torch.equal(plain, ours) if isinstance(plain, torch.Tensor) else plain == ours


def test_late_optimizer_state_is_visible_and_planned() -> None:
    plain, plain_model, plain_optimizer = surging.make("warmup")
    step, model, optimizer = surging.make("warmup")
    with outofcore.compile(step, model, optimizer, budget="16MiB", cache=False) as compiled:
        for number, x in enumerate(surging.batches(8)):
            assert torch.equal(compiled(x), plain(x))
            for parameter, plain_parameter in zip(model.parameters(), plain_model.parameters(), strict=True):
                assert optimizer.state[parameter].keys() == plain_optimizer.state[plain_parameter].keys(), number
                assert list(optimizer.state[parameter]) == list(plain_optimizer.state[plain_parameter])
            assert all(
                map(torch.equal, surging.contents(model, optimizer), surging.contents(plain_model, plain_optimizer))
            )
        # The plan includes it from the fifth call on.
        names = [binding.key for binding in compiled.captured.states]
        assert any(name.endswith("moment") for name in names)
        assert compiled._session.steps.arena.counters().live_bytes == 0
