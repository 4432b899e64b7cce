"""Loops that are followed by a plan, or by nonsense in place of one: the numbers are those of eager in any case."""

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
from at_once import MOVES, PlannedAtOnce, reader_with_fixed_costs
from effort import some_of
from loops import LENGTH, adamw, loss_of, sentences
from loops import Language as Model
from random_loops import loop as random_loop
from torch import Tensor, nn

import outofcore
from outofcore.background import Answer, BackgroundPlanner
from outofcore.follow import loop_planner as module
from outofcore.follow.native import load_paging
from outofcore.follow.records import Schedule, StepRecord

pytestmark = pytest.mark.usefixtures("one_thread")

Seen = tuple[list[float], list[Tensor]]


@pytest.fixture(autouse=True)
def _planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", PlannedAtOnce)
    monkeypatch.setattr(module, "read_record", reader_with_fixed_costs())


def train(
    steps: int,
    budget: int | None = None,
    *,
    vary: bool = False,
    between: Callable[[int, nn.Module], object] = lambda i, m: None,
    **options: Any,
) -> tuple[Seen, list[outofcore.LoopStats]]:
    """What a loop read and left, and the stats after each step."""
    torch.manual_seed(0)
    model = Model()
    seen, stats = [], []

    def run(told: Callable[[], None]) -> None:
        optimizer = adamw(model)
        for i, (ids, wanted) in enumerate(sentences(steps, vary=vary)):
            optimizer.zero_grad()
            loss = loss_of(model, ids, wanted)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            between(i, model)
            told()

    if budget is None:
        run(lambda: None)
    else:
        with outofcore.budget(budget, model, **{"cache": False, "policy": MOVES, **options}) as followed:
            run(lambda: stats.append(followed.stats))
    return (seen, [t.clone() for t in model.state_dict().values()]), stats


def assert_same(ours: Seen, theirs: Seen) -> None:
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
    """The long batch comes twice, so that it is planned; the others fit in the budget."""

    def run(budget: int | None) -> tuple[list[float], list[outofcore.LoopStats]]:
        torch.manual_seed(0)
        model, seen, stats = Model(), [], []
        with (
            outofcore.budget(budget, model, cache=False, policy=MOVES)
            if budget
            else contextlib.nullcontext() as followed
        ):
            optimizer = adamw(model)
            for length in [LENGTH, LENGTH, LENGTH, *[LENGTH // 4] * 6, LENGTH]:
                ids = torch.arange(4 * (length + 1)).view(4, -1) % 1000
                optimizer.zero_grad()
                loss = loss_of(model, ids[:, :-1], ids[:, 1:])
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
                if followed is not None:
                    stats.append(followed.stats)
        return seen, stats

    ours, stats = run(int(0.55 * peak()))
    assert ours == run(None)[0]
    moved = [b.evictions - a.evictions for a, b in pairwise(stats)]
    planned = [b.planned_ops - a.planned_ops for a, b in pairwise(stats)]
    assert stats[-1].plans == 1
    assert planned[-1] > 0.9 * planned[3] > 0
    assert moved[-1] > 0
    # The first short one still begins as the long ones did.
    assert planned[4:8] == [0] * 4
    assert moved[4:8] == [0] * 4


@pytest.mark.parametrize("share", some_of([0.7, 0.5, 0.3], [0.7, 0.3]))
def test_steps_are_followed_by_a_plan(share: float) -> None:
    theirs, _ = train(9)
    ours, stats = train(9, int(share * peak()))
    assert_same(ours, theirs)
    # Seen twice, planned then: that the first step makes the state of the optimizer as well is no matter.
    assert [s.plans for s in stats] == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    last, before = stats[-1], stats[-2]
    assert last.planned_ops - before.planned_ops > 300
    assert last.departures == 0
    assert last.peak_bytes <= int(share * peak())
    # By then nearly everything is where the plan has it.
    moved = last.fetches - before.fetches
    assert moved > 0
    assert last.unplanned_evictions - before.unplanned_evictions <= 0.1 * moved
    assert last.fetches_ahead - before.fetches_ahead >= 0.9 * moved


def test_no_plan_is_made_unless_asked_for() -> None:
    theirs, _ = train(6)
    ours, stats = train(6, int(0.5 * peak()), policy=None)
    assert_same(ours, theirs)
    assert stats[-1].plans == stats[-1].planned_ops == 0


def test_lengths_follow_the_plan_of_the_next_larger_one() -> None:
    theirs, _ = train(24, vary=True)
    ours, stats = train(24, int(0.5 * peak()), vary=True)
    assert_same(ours, theirs)
    last = stats[-1]
    assert 1 <= last.plans <= 4
    assert last.departures == 0
    assert last.planned_ops - stats[-5].planned_ops > 4 * 300


def test_the_place_is_found_again_after_something_else() -> None:
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
    each = [b.planned_ops - a.planned_ops for a, b in pairwise(stats)]
    assert each[4] > 0.9 * each[3]
    assert each[-1] == each[3] > 0


def test_the_next_process_has_the_plan_at_once(tmp_path: Path) -> None:
    budget = int(0.5 * peak())
    theirs, _ = train(6)
    first = train(6, budget, cache=tmp_path)[1]
    ours, second = train(6, budget, cache=tmp_path)
    assert_same(ours, theirs)
    # Planned at once where the same sizes were planned before: one step sooner than by the planner.
    assert [s.plans for s in first] == [0, 0, 1, 1, 1, 1]
    assert [s.plans for s in second] == [0, 1, 1, 1, 1, 1]
    (kept,) = tmp_path.glob("loop-*.json")
    assert train(6, budget + (1 << 20), cache=tmp_path)[1][1].plans == 0
    for damage in (
        "{",
        kept.read_text().replace("followed/1", "followed/9"),
        kept.read_text().replace("[0,", "[99999,"),
    ):
        kept.write_text(damage)
        ours, stats = train(6, budget, cache=tmp_path)
        assert_same(ours, theirs)
        assert [s.plans for s in stats] == [0, 0, 1, 1, 1, 1]


def test_a_plan_of_a_busy_machine_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = int(0.5 * peak())

    def plans(*, is_busy: bool) -> list[int]:
        monkeypatch.setattr(module, "was_busy", lambda *_, **__: is_busy)
        return [s.plans for s in train(6, budget, cache=tmp_path)[1]]

    assert plans(is_busy=True) == [0, 0, 1, 1, 1, 1]
    assert plans(is_busy=True) == [0, 1, 1, 1, 1, 1]
    assert plans(is_busy=False) == [0, 1, 2, 2, 2, 2]
    assert plans(is_busy=False) == [0, 1, 1, 1, 1, 1]


def test_a_long_step_is_planned_thoroughly_once_all_have_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = int(0.5 * peak())
    theirs, _ = train(8)
    monkeypatch.setattr(module, "_LONG_STEP_SECONDS", 0.0)
    assert [s.plans for s in train(8, budget)[1]] == [0, 0, 1, 1, 1, 1, 1, 1]  # not before 32 steps have had plans
    monkeypatch.setattr(module, "_SETTLED_STEPS", 1)
    ours, stats = train(8, budget, cache=tmp_path)
    assert_same(ours, theirs)
    assert [s.plans for s in stats] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [s.plans for s in train(8, budget, cache=tmp_path)[1]] == [0, 1, 1, 1, 1, 1, 1, 1]
    (kept,) = tmp_path.glob("loop-*.json")
    kept.write_text(kept.read_text().replace('"is_quick":false', '"is_quick":true'))
    assert [s.plans for s in train(8, budget, cache=tmp_path)[1]] == [0, 1, 1, 1, 2, 2, 2, 2]


def make_copies_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_record", reader_with_fixed_costs(2e7))


def test_a_trial_of_recomputation_gets_its_plan_whatever_planning_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Expensive(PlannedAtOnce):
        def poll(self) -> tuple[Any, Answer] | None:
            done = super().poll()
            return None if done is None else (done[0], replace(done[1], processor_seconds=1e6))

    monkeypatch.setattr(module, "BackgroundPlanner", Expensive)
    budget = int(0.4 * peak())
    assert train(8, budget)[1][-1].plans == 1
    make_copies_slow(monkeypatch)
    stats = train(8, budget, policy="auto")[1]
    assert stats[-1].reruns > 0
    assert stats[-1].plans == 2


@pytest.mark.exhaustive
def test_what_is_cheap_is_made_again_where_copies_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
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
                    (draw.randrange(record.ops), draw.randrange(storages)) for _ in range(draw.randrange(3 * storages))
                )
            )

        offsets = sorted((*pair, 4096 * draw.randrange(4096)) for pair in pairs())
        return Schedule(pairs(), pairs(), pairs(), tuple(offsets), tuple((op, 4096 * s) for op, s in pairs()))

    return schedule


@pytest.mark.parametrize("seed", some_of(range(4), [1, 2]))
def test_no_plan_can_make_the_numbers_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "schedule_of", nonsense(seed))
    theirs, _ = train(8, vary=seed % 2 == 1)
    budget = int((0.3, 0.5, 0.8)[seed % 3] * peak())
    ours, stats = train(8, budget, vary=seed % 2 == 1, home=("disk", "host")[seed % 2])
    assert_same(ours, theirs)
    assert stats[-1].plans > 0
    assert stats[-1].peak_bytes <= budget


@pytest.mark.parametrize("seed", some_of(range(100, 104), [101, 102]))
def test_random_loops_with_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(module, "schedule_of", nonsense(seed))
    theirs_seen, theirs = random_loop(seed, 300, lambda _: None)
    with outofcore.budget(("2MiB", "2500KiB", "5MiB")[seed % 3], cache=False) as run:
        seen, ours = random_loop(
            seed, 300, lambda draw: load_paging().follow_stress(run._space, int(draw.random() > 0.97))
        )
    assert seen == theirs_seen
    assert all(left.equal(right) for left, right in zip(ours, theirs, strict=True))


def test_a_plan_is_made_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", BackgroundPlanner)

    def wait(i: int, model: nn.Module) -> None:
        assert run._planner is not None
        if i > 1:
            run._planner.background.wait()

    torch.manual_seed(0)
    model = Model()
    run = outofcore.budget(int(0.5 * peak()), model, cache=False).start()
    optimizer = adamw(model)
    for i, (ids, wanted) in enumerate(sentences(6)):
        loss_of(model, ids, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(i, model)
    run.stop()
    assert run.stats.plans == 1
    assert run.stats.planned_ops > 0


def test_a_loop_that_is_started_again_begins_anew() -> None:
    torch.manual_seed(0)
    model = Model()
    run = outofcore.budget(int(0.5 * peak()), model, cache=False, policy=MOVES)
    for _ in range(2):
        with run:
            optimizer = adamw(model)
            for ids, wanted in sentences(5):
                loss_of(model, ids, wanted).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (run.stats.steps, run.stats.plans) == (5, 1)
        assert 600 < run.stats.planned_ops < 700


def test_a_planner_that_dies_leaves_the_loop_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", BackgroundPlanner)
    monkeypatch.setattr("outofcore.child_processes._PROGRAM", "raise SystemExit(3)")
    theirs, _ = train(6)

    ours, stats = train(6, int(0.5 * peak()))
    assert_same(ours, theirs)
    assert stats[-1].plans == 0


def _pick(generator: random.Random, sources: list[Tensor]) -> Tensor:
    """A batch whose samples are picked, and changed now and then, at random."""
    batch = torch.empty(4, LENGTH, 64)
    for i in range(4):
        sample = generator.choice(sources)
        for _ in range(generator.randrange(3)):
            sample = sample * 1.5
        batch[i] = sample
    return batch


class Deep(nn.Module):
    """Of its layers, a random one is left out in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(10))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            if i != left_out:
                x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("dropped", [False, True])
def test_steps_that_differ_a_little_are_followed_by_one_plan(dropped: bool) -> None:
    def run(budget: int | None) -> tuple[Seen, list[outofcore.LoopStats]]:
        torch.manual_seed(0)
        generator = random.Random(0)
        model, sources = Deep(), [torch.randn(LENGTH, 64) for _ in range(3)]
        optimizer = adamw(model)
        seen, stats = [], []
        options: Any = {"cache": False, "policy": MOVES}
        with outofcore.budget(budget, model, **options) if budget else contextlib.nullcontext() as followed:
            for _ in range(14):
                optimizer.zero_grad()
                picked = _pick(generator, sources)
                loss = model(picked, generator.randrange(10) if dropped else -1)
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
                if followed is not None:
                    stats.append(followed.stats)
        return (seen, [t.clone() for t in model.state_dict().values()]), stats

    most = run(1 << 30)[1][-1].peak_bytes
    theirs, _ = run(None)
    ours, stats = run(int(0.5 * most))
    assert_same(ours, theirs)
    # One plan for them all, which most ops of all later steps go by.
    assert stats[-1].plans <= (3 if dropped else 2)
    assert min(b.planned_ops - a.planned_ops for a, b in pairwise(stats[-6:])) > 140


# Loops that step no optimizer: each is a step of one, by hand.


def by_hand(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    loss = loss_of_batch()
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.01)
            p.grad = None
    return [loss.item()]


def by_hand_at_once(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    loss = loss_of_batch()
    loss.backward()
    with torch.no_grad():
        trained = [p for p in model.parameters() if p.grad is not None]
        torch._foreach_add_(trained, [p.grad for p in trained], alpha=-0.01)
    model.zero_grad()
    return [loss.item()]


def by_gradients(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    loss = loss_of_batch()
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p -= 0.01 * gradient  # noqa: PLW2901
    return [loss.item()]


def accumulated(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
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


def in_turn(model: nn.Module, loss_of_batch: Callable[[], Tensor]) -> list[float]:
    """Two passes in a step, of which the first keeps its graph, and each has an update, as in a GAN."""
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


def loop_by_hand(step: Callable[..., list[float]], budget: int | None) -> tuple[Seen, list[outofcore.LoopStats]]:
    torch.manual_seed(0)
    model = Model()
    seen: list[float] = []
    stats: list[outofcore.LoopStats] = []
    batches = sentences(40)

    def loop(told: Callable[[], None]) -> None:
        for _ in range(8):
            seen.extend(step(model, lambda: loss_of(model, *next(batches))))
            told()

    if budget is None:
        loop(lambda: None)
    else:
        with outofcore.budget(budget, model, cache=False, policy=MOVES) as run:
            loop(lambda: stats.append(run.stats))
    return (seen, [t.clone() for t in model.state_dict().values()]), stats


@pytest.mark.parametrize("step", [by_hand, by_hand_at_once, by_gradients, accumulated, in_turn])
def test_loop_that_updates_by_hand_is_planned(step: Callable[..., list[float]]) -> None:
    theirs, _ = loop_by_hand(step, None)
    ours, stats = loop_by_hand(step, int(0.5 * peak()))
    assert_same(ours, theirs)
    assert stats[-1].plans >= 1
    assert stats[-1].planned_ops - stats[-2].planned_ops > 150
    assert stats[-1].departures == stats[-3].departures
    assert stats[-1].steps == 8 * (2 if step in (accumulated, in_turn) else 1)


def test_gradients_that_are_accumulated_end_no_step_of_an_optimizer() -> None:
    model = Model()
    optimizer = adamw(model)
    with outofcore.budget(int(0.5 * peak()), model, cache=False, policy=MOVES) as run:
        for i, (ids, wanted) in enumerate(sentences(16)):
            loss_of(model, ids, wanted).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert run.stats.steps == 4
    assert run.stats.planned_ops > 0
    assert run._made[-1].ops > 3 * run._made[0].ops or len(run._made) == 1  # a plan is one of all four passes
