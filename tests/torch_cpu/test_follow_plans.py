"""Tests of planned eager loops: valid and random plans give the numbers of plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import some_of
from foreground_planning import WITHOUT_RECOMPUTATION, ForegroundPlanner, reader_with_fixed_costs
from loops import LENGTH, adamw, loss_of, sentences
from loops import Language as Model
from random_loops import loop as random_loop
from torch import Tensor, nn

import outofcore
from outofcore.background import BackgroundPlanner, PlanResult
from outofcore.follow import loop_planner as module
from outofcore.follow.native import load_paging
from outofcore.follow.records import Schedule, StepRecord

pytestmark = pytest.mark.usefixtures("one_thread")

Results = tuple[list[float], list[Tensor]]


@pytest.fixture(autouse=True)
def _plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", ForegroundPlanner)
    monkeypatch.setattr(module, "read_record", reader_with_fixed_costs())


def train(
    steps: int,
    budget: int | None = None,
    *,
    vary: bool = False,
    between: Callable[[int, nn.Module], object] = lambda i, m: None,
    **options: Any,
) -> tuple[Results, list[outofcore.LoopStats]]:
    """Train; return losses, final tensors, and the stats after each step."""
    torch.manual_seed(0)
    model = Model()
    losses, stats = [], []

    def run(after_step: Callable[[], None]) -> None:
        optimizer = adamw(model)
        for i, (ids, targets) in enumerate(sentences(steps, vary=vary)):
            optimizer.zero_grad()
            loss = loss_of(model, ids, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            between(i, model)
            after_step()

    if budget is None:
        run(lambda: None)
    else:
        with outofcore.budget(budget, model, **{"cache": False, "policy": WITHOUT_RECOMPUTATION, **options}) as loop:
            run(lambda: stats.append(loop.stats))
    return (losses, [t.clone() for t in model.state_dict().values()]), stats


def assert_same(ours: Results, theirs: Results) -> None:
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@functools.cache
def peak() -> int:
    return train(2, 1 << 30)[1][-1].peak_bytes


def test_loop_makes_no_plan_when_the_step_fits() -> None:
    theirs, _ = train(6)
    ours, stats = train(6, int(1.5 * peak()))
    assert_same(ours, theirs)
    assert stats[-1].plans == stats[-1].evictions == 0


def test_short_batches_do_not_follow_the_plan_of_a_long_one() -> None:
    """The long batch comes twice and is then planned; the others fit in the budget."""

    def run(budget: int | None) -> tuple[list[float], list[outofcore.LoopStats]]:
        torch.manual_seed(0)
        model, losses, stats = Model(), [], []
        with (
            outofcore.budget(budget, model, cache=False, policy=WITHOUT_RECOMPUTATION)
            if budget
            else contextlib.nullcontext() as loop
        ):
            optimizer = adamw(model)
            for length in [LENGTH, LENGTH, LENGTH, *[LENGTH // 4] * 6, LENGTH]:
                ids = torch.arange(4 * (length + 1)).view(4, -1) % 1000
                optimizer.zero_grad()
                loss = loss_of(model, ids[:, :-1], ids[:, 1:])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if loop is not None:
                    stats.append(loop.stats)
        return losses, stats

    ours, stats = run(int(0.55 * peak()))
    assert ours == run(None)[0]
    moved = [b.evictions - a.evictions for a, b in pairwise(stats)]
    planned = [b.planned_ops - a.planned_ops for a, b in pairwise(stats)]
    assert stats[-1].plans == 1
    assert planned[-1] > 0.9 * planned[3] > 0
    assert moved[-1] > 0
    # The first short step still begins like the long ones.
    assert planned[4:8] == [0] * 4
    assert moved[4:8] == [0] * 4


@pytest.mark.parametrize("share", some_of([0.7, 0.5, 0.3], [0.7, 0.3]))
def test_repeated_steps_run_by_a_plan(share: float) -> None:
    theirs, _ = train(9)
    ours, stats = train(9, int(share * peak()))
    assert_same(ours, theirs)
    # A step is planned after it was seen twice, although the first one also creates optimizer state.
    assert [s.plans for s in stats] == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    last, before = stats[-1], stats[-2]
    assert last.planned_ops - before.planned_ops > 300
    assert last.departures == 0
    assert last.peak_bytes <= int(share * peak())
    # Nearly all tensors are now where the plan expects them.
    moved = last.fetches - before.fetches
    assert moved > 0
    assert last.unplanned_evictions - before.unplanned_evictions <= 0.1 * moved
    assert last.fetches_ahead - before.fetches_ahead >= 0.9 * moved


def test_no_plan_is_made_without_a_policy() -> None:
    theirs, _ = train(6)
    ours, stats = train(6, int(0.5 * peak()), policy=None)
    assert_same(ours, theirs)
    assert stats[-1].plans == stats[-1].planned_ops == 0


def test_lengths_share_the_plan_of_the_next_larger_one() -> None:
    theirs, _ = train(24, vary=True)
    ours, stats = train(24, int(0.5 * peak()), vary=True)
    assert_same(ours, theirs)
    last = stats[-1]
    assert 1 <= last.plans <= 4
    assert last.departures == 0
    assert last.planned_ops - stats[-5].planned_ops > 4 * 300


def test_plan_resumes_after_an_evaluation() -> None:
    ids = torch.randint(0, 1024, (4, LENGTH))

    def evaluate(i: int, model: nn.Module) -> None:
        if i in (5, 9):
            model.eval()
            with torch.no_grad():
                model(ids)
            model.train()

    theirs, _ = train(14, between=evaluate)
    ours, stats = train(14, int(0.4 * peak()), between=evaluate)
    assert_same(ours, theirs)
    planned = [b.planned_ops - a.planned_ops for a, b in pairwise(stats)]
    assert planned[4] > 0.9 * planned[3]
    assert planned[-1] == planned[3] > 0


def test_stored_plan_is_used_one_step_sooner_unless_damaged(tmp_path: Path) -> None:
    budget = int(0.5 * peak())
    theirs, _ = train(6)
    first = train(6, budget, cache=tmp_path)[1]
    ours, second = train(6, budget, cache=tmp_path)
    assert_same(ours, theirs)
    # A stored plan of the same sizes applies one step sooner than a new one.
    assert [s.plans for s in first] == [0, 0, 1, 1, 1, 1]
    assert [s.plans for s in second] == [0, 1, 1, 1, 1, 1]
    (plan_file,) = tmp_path.glob("loop-*.json")
    assert train(6, budget + (1 << 20), cache=tmp_path)[1][1].plans == 0
    for damage in (
        "{",
        plan_file.read_text().replace("followed/1", "followed/9"),
        plan_file.read_text().replace("[0,", "[99999,"),
    ):
        plan_file.write_text(damage)
        ours, stats = train(6, budget, cache=tmp_path)
        assert_same(ours, theirs)
        assert [s.plans for s in stats] == [0, 0, 1, 1, 1, 1]


def test_plan_from_a_busy_machine_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = int(0.5 * peak())

    def plans(*, is_busy: bool) -> list[int]:
        monkeypatch.setattr(module, "was_busy", lambda *_, **__: is_busy)
        return [s.plans for s in train(6, budget, cache=tmp_path)[1]]

    assert plans(is_busy=True) == [0, 0, 1, 1, 1, 1]
    assert plans(is_busy=True) == [0, 1, 1, 1, 1, 1]
    assert plans(is_busy=False) == [0, 1, 2, 2, 2, 2]
    assert plans(is_busy=False) == [0, 1, 1, 1, 1, 1]


def test_long_step_is_planned_thoroughly_after_all_have_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = int(0.5 * peak())
    theirs, _ = train(8)
    monkeypatch.setattr(module, "_LONG_STEP_SECONDS", 0.0)
    assert [s.plans for s in train(8, budget)[1]] == [0, 0, 1, 1, 1, 1, 1, 1]  # not until 32 steps have had plans
    monkeypatch.setattr(module, "_SETTLED_STEPS", 1)
    ours, stats = train(8, budget, cache=tmp_path)
    assert_same(ours, theirs)
    assert [s.plans for s in stats] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [s.plans for s in train(8, budget, cache=tmp_path)[1]] == [0, 1, 1, 1, 1, 1, 1, 1]
    (plan_file,) = tmp_path.glob("loop-*.json")
    plan_file.write_text(plan_file.read_text().replace('"is_quick":false', '"is_quick":true'))
    assert [s.plans for s in train(8, budget, cache=tmp_path)[1]] == [0, 1, 1, 1, 2, 2, 2, 2]


def make_copies_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_record", reader_with_fixed_costs(2e7))


def test_recomputation_trial_is_planned_after_expensive_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Expensive(ForegroundPlanner):
        def poll(self) -> tuple[Any, PlanResult] | None:
            answer = super().poll()
            return None if answer is None else (answer[0], replace(answer[1], processor_seconds=1e6))

    monkeypatch.setattr(module, "BackgroundPlanner", Expensive)
    budget = int(0.4 * peak())
    assert train(8, budget)[1][-1].plans == 1
    make_copies_slow(monkeypatch)
    stats = train(8, budget, policy="auto")[1]
    assert stats[-1].reruns > 0
    assert stats[-1].plans == 2


@pytest.mark.exhaustive
def test_cheap_ops_are_recomputed_when_copies_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    make_copies_slow(monkeypatch)
    theirs, _ = train(14)
    budget = int(0.4 * peak())
    moved, without = train(14, budget)
    ours, stats = train(14, budget, policy="auto")
    assert_same(ours, theirs)
    assert_same(moved, theirs)
    assert without[-1].reruns == without[-1].recipes == 0
    last, before = stats[-1], stats[-2]
    assert last.plans >= 2
    assert last.reruns > before.reruns > 0
    assert last.peak_bytes <= budget
    copied = [s[-1].written_bytes - s[-2].written_bytes for s in (stats, without)]
    assert copied[0] < copied[1]


def nonsense(seed: int) -> Callable[[StepRecord, object, object], Schedule]:
    draw = random.Random(seed)

    def schedule(record: StepRecord, plan: object, program: object) -> Schedule:
        storages = len(record.graph.storages)

        def pairs() -> tuple[tuple[int, int], ...]:
            return tuple(
                sorted(
                    (draw.randrange(record.op_count), draw.randrange(storages))
                    for _ in range(draw.randrange(3 * storages))
                )
            )

        offsets = sorted((*pair, 4096 * draw.randrange(4096)) for pair in pairs())
        return Schedule(pairs(), pairs(), pairs(), tuple(offsets), tuple((op, 4096 * s) for op, s in pairs()))

    return schedule


@pytest.mark.parametrize("seed", some_of(range(4), [1, 2]))
def test_nonsensical_plan_does_not_change_the_numbers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "schedule_of", nonsense(seed))
    theirs, _ = train(8, vary=seed % 2 == 1)
    budget = int((0.3, 0.5, 0.8)[seed % 3] * peak())
    ours, stats = train(8, budget, vary=seed % 2 == 1, home=("disk", "host")[seed % 2])
    assert_same(ours, theirs)
    assert stats[-1].plans > 0
    assert stats[-1].peak_bytes <= budget


@pytest.mark.parametrize("seed", some_of(range(100, 104), [101, 102]))
def test_random_loop_with_plans_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(module, "schedule_of", nonsense(seed))
    expected_values, theirs = random_loop(seed, 300, lambda _: None)
    with outofcore.budget(("2MiB", "2500KiB", "5MiB")[seed % 3], cache=False) as run:
        values, ours = random_loop(
            seed, 300, lambda draw: load_paging().follow_stress(run._space, int(draw.random() > 0.97))
        )
    assert values == expected_values
    assert all(our_tensor.equal(plain_tensor) for our_tensor, plain_tensor in zip(ours, theirs, strict=True))


def test_plan_is_made_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", BackgroundPlanner)

    def wait(i: int, model: nn.Module) -> None:
        assert run._planner is not None
        if i > 1:
            run._planner.background.wait()

    torch.manual_seed(0)
    model = Model()
    run = outofcore.budget(int(0.5 * peak()), model, cache=False).start()
    optimizer = adamw(model)
    for i, (ids, targets) in enumerate(sentences(6)):
        loss_of(model, ids, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(i, model)
    run.stop()
    assert run.stats.plans == 1
    assert run.stats.planned_ops > 0


def test_restarted_loop_resets_its_stats_and_plans() -> None:
    torch.manual_seed(0)
    model = Model()
    run = outofcore.budget(int(0.5 * peak()), model, cache=False, policy=WITHOUT_RECOMPUTATION)
    for _ in range(2):
        with run:
            optimizer = adamw(model)
            for ids, targets in sentences(5):
                loss_of(model, ids, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (run.stats.steps, run.stats.plans) == (5, 1)
        assert 600 < run.stats.planned_ops < 700


def test_dead_planner_leaves_the_loop_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", BackgroundPlanner)
    monkeypatch.setattr("outofcore.child_processes._PROGRAM", "raise SystemExit(3)")
    theirs, _ = train(6)

    ours, stats = train(6, int(0.5 * peak()))
    assert_same(ours, theirs)
    assert stats[-1].plans == 0


def _pick(generator: random.Random, sources: list[Tensor]) -> Tensor:
    batch = torch.empty(4, LENGTH, 64)
    for i in range(4):
        sample = generator.choice(sources)
        for _ in range(generator.randrange(3)):
            sample = sample * 1.5
        batch[i] = sample
    return batch


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(10))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            if i != skipped:
                x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("dropped", [False, True])
def test_slightly_different_steps_share_one_plan(dropped: bool) -> None:
    def run(budget: int | None) -> tuple[Results, list[outofcore.LoopStats]]:
        torch.manual_seed(0)
        generator = random.Random(0)
        model, sources = Deep(), [torch.randn(LENGTH, 64) for _ in range(3)]
        optimizer = adamw(model)
        losses, stats = [], []
        options: Any = {"cache": False, "policy": WITHOUT_RECOMPUTATION}
        with outofcore.budget(budget, model, **options) if budget else contextlib.nullcontext() as loop:
            for _ in range(14):
                optimizer.zero_grad()
                picked = _pick(generator, sources)
                loss = model(picked, generator.randrange(10) if dropped else -1)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if loop is not None:
                    stats.append(loop.stats)
        return (losses, [t.clone() for t in model.state_dict().values()]), stats

    peak_bytes = run(1 << 30)[1][-1].peak_bytes
    theirs, _ = run(None)
    ours, stats = run(int(0.5 * peak_bytes))
    assert_same(ours, theirs)
    # One plan serves all steps, and covers most ops of later ones.
    assert stats[-1].plans <= (3 if dropped else 2)
    assert min(b.planned_ops - a.planned_ops for a, b in pairwise(stats[-6:])) > 140


# Loops that update parameters by hand, without an optimizer.


def update_by_hand(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    loss = loss_of_batch()
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.01)
            p.grad = None
    return [loss.item()]


def update_with_foreach(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    loss = loss_of_batch()
    loss.backward()
    with torch.no_grad():
        trained = [p for p in model.parameters() if p.grad is not None]
        torch._foreach_add_(trained, [p.grad for p in trained], alpha=-0.01)
    model.zero_grad()
    return [loss.item()]


def update_with_autograd_grad(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    loss = loss_of_batch()
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p -= 0.01 * gradient  # noqa: PLW2901
    return [loss.item()]


def accumulate_gradients(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    losses = []
    for _ in range(2):
        loss = loss_of_batch()
        (loss / 2).backward()
        losses.append(loss.item())
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.01)
            p.grad = None
    return losses


def update_in_turn(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    """Run two passes with one update each, as in a GAN; the first pass keeps its graph."""
    halves: list[list[nn.Parameter]] = [list(model.parameters())[:10], list(model.parameters())[10:]]
    losses = []
    loss = loss_of_batch()
    torch.autograd.grad(loss, halves[0][:2], retain_graph=True)
    loss.backward()
    losses.append(loss.item())
    for p in halves[0]:
        p.data.add_(p.grad, alpha=-0.01)  # type: ignore[arg-type]
    model.zero_grad()
    loss = loss_of_batch() * 0.5
    loss.backward()
    losses.append(loss.item())
    for p in halves[1]:
        p.data.add_(p.grad, alpha=-0.01)  # type: ignore[arg-type]
    model.zero_grad()
    return losses


def train_by_hand(step: Callable[..., list[float]], budget: int | None) -> tuple[Results, list[outofcore.LoopStats]]:
    torch.manual_seed(0)
    model = Model()
    losses: list[float] = []
    stats: list[outofcore.LoopStats] = []
    batches = sentences(40)

    def loop(after_step: Callable[[], None]) -> None:
        for _ in range(8):
            losses.extend(step(model, lambda: loss_of(model, *next(batches))))
            after_step()

    if budget is None:
        loop(lambda: None)
    else:
        with outofcore.budget(budget, model, cache=False, policy=WITHOUT_RECOMPUTATION) as run:
            loop(lambda: stats.append(run.stats))
    return (losses, [t.clone() for t in model.state_dict().values()]), stats


@pytest.mark.parametrize(
    "step", [update_by_hand, update_with_foreach, update_with_autograd_grad, accumulate_gradients, update_in_turn]
)
def test_loop_with_updates_by_hand_is_planned(step: Callable[..., list[float]]) -> None:
    theirs, _ = train_by_hand(step, None)
    ours, stats = train_by_hand(step, int(0.5 * peak()))
    assert_same(ours, theirs)
    assert stats[-1].plans >= 1
    assert stats[-1].planned_ops - stats[-2].planned_ops > 150
    assert stats[-1].departures == stats[-3].departures
    assert stats[-1].steps == 8 * (2 if step in (accumulate_gradients, update_in_turn) else 1)


def test_accumulated_backward_passes_do_not_end_a_step() -> None:
    model = Model()
    optimizer = adamw(model)
    with outofcore.budget(int(0.5 * peak()), model, cache=False, policy=WITHOUT_RECOMPUTATION) as run:
        for i, (ids, targets) in enumerate(sentences(16)):
            loss_of(model, ids, targets).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert run.stats.steps == 4
    assert run.stats.planned_ops > 0
    assert (
        run._recent_plans[-1].ops > 3 * run._recent_plans[0].ops or len(run._recent_plans) == 1
    )  # the plan covers all four passes
