"""Compiled steps whose inputs come in many sizes: captured for the first, followed from the second on."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outofcore
from outofcore import options, zoo
from outofcore.follow import native

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (48, 48, 64, 40, 64, 56, 48)
StepFunction = Callable[..., Any]


class Side:
    """A model with its optimizer, always the same one."""

    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(0)
        blocks = [[nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)] for _ in range(3)]
        self.model = nn.Sequential(*(module for block in blocks for module in block))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False)
        self.width = width

    def train(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(x)
        loss = F.mse_loss(out, x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, out

    def gather(self, x: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), x) / 2
        loss.backward()
        return loss

    def update(self, x: Tensor) -> Tensor:
        loss = self.gather(x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def batch(self, number: int, rows: int) -> Tensor:
        return torch.randn(rows, self.width, generator=torch.Generator().manual_seed(number))

    def run(self, step: StepFunction, lengths: Sequence[int] = LENGTHS) -> list[Any]:
        torch.manual_seed(5)
        return [step(self.batch(number, 2 * rows)) for number, rows in enumerate(lengths)]

    def everything(self) -> list[Tensor]:
        found = [*self.model.state_dict().values(), torch.get_rng_state()]
        for parameter in self.model.parameters():
            found += [] if parameter.grad is None else [parameter.grad]
            found += [t for t in self.optimizer.state[parameter].values() if isinstance(t, Tensor)]
        return found


def alike(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return bool(ours.equal(theirs))
    return len(ours) == len(theirs) and all(map(alike, ours, theirs))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often steps are captured."""
    found: list[int] = []
    original = options.capture_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(options, "capture_step", counted)
    return found


def test_from_the_second_size_on_calls_are_followed(captures: list[int]) -> None:
    ours, theirs = Side(), Side()
    wanted = theirs.run(theirs.train), theirs.everything()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="2304KiB") as step:
        assert alike(ours.run(step), wanted[0])
        assert alike(ours.everything(), wanted[1])
        # The first capture; that of the step as it is from its second call on, if any; and no other.
        assert len(captures) <= 3
        assert step.stats.followed_calls == 5
        assert "shape (96, 256) -> (128, 256)" in step.stats.why_followed
        assert step.stats.bytes_out > 0
        loop = step._session.followed
        assert loop is not None
        assert loop.stats.peak_bytes <= 2304 << 10
        # What the user does between calls counts.
        for side in (ours, theirs):
            with torch.no_grad():
                side.model[0].weight.mul_(0.5)  # type: ignore[operator,union-attr]
                side.model[4].weight[3:5] = 0.25  # type: ignore[index,union-attr]
        assert alike(ours.run(step), theirs.run(theirs.train))
        assert alike(ours.everything(), theirs.everything())
    assert alike(ours.everything(), theirs.everything())
    assert {native.load_paging().follow_where(p.untyped_storage()._cdata) for p in ours.model.parameters()} == {0}
    with outofcore.budget("2MiB", ours.model):  # nothing of the step is left
        assert alike(ours.run(ours.train), theirs.run(theirs.train))


def test_nothing_is_captured_where_that_was_asked_for(captures: list[int]) -> None:
    ours, theirs = Side(), Side()
    how: dict[str, Any] = {"budget": "1MiB", "home": "host", "check": "off", "dynamic": True}
    with outofcore.compile(ours.train, ours.model, ours.optimizer, **how) as step:
        assert alike(ours.run(step), theirs.run(theirs.train))
        assert step.stats.bytes_out > 0
        assert alike(ours.everything(), theirs.everything())
        assert step.stats.followed_calls == len(LENGTHS)
        for ask in (lambda: step.planned, lambda: step.timeline, step.report):
            with pytest.raises(outofcore.StateError, match="ran as an eager loop, which has no plan"):
                ask()
    assert not captures


def test_each_size_is_planned_where_that_was_asked_for(captures: list[int]) -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB", dynamic=False) as step:
        assert alike(ours.run(step, LENGTHS[:4]), theirs.run(theirs.train, LENGTHS[:4]))
        assert step.stats.followed_calls == 0
        assert step._session.kinds >= 3
    assert captures


def test_other_changes_are_captured() -> None:
    ours = Side()

    def evaluate(x: Tensor, scale: float = 1.0) -> Tensor:
        with torch.no_grad():
            return ours.model(x) * scale

    with outofcore.compile(evaluate, ours.model, budget="8MiB") as step:
        step(ours.batch(0, 96))
        step(ours.batch(0, 96), 2.0)
        ours.model.eval()
        step(ours.batch(0, 96))
        assert step.stats.followed_calls == 0
        step(ours.batch(0, 32))
        assert step.stats.followed_calls == 1


def test_a_language_model_and_one_for_pictures_of_many_sizes() -> None:
    work = zoo.workload("gpt", params="1M", batch=4, context=64, dropout=0.1)
    sizes = [(16, 32), (16, 32), (32, 32), (24, 40), (8, 24), (32, 32)]

    def pictures(model: nn.Module, optimizer: torch.optim.Optimizer) -> StepFunction:
        def step(x: Tensor, wanted: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def convolutions() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 64, 3), nn.BatchNorm2d(64)]
        return nn.Sequential(*layers, nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def text() -> nn.Module:
        torch.manual_seed(1)
        return work.build()

    def batches(which: str) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(3)
        for rows, size in sizes:
            if which == "pictures":
                yield torch.randn(rows, 3, size, size, generator=draw), torch.randint(0, 10, (rows,), generator=draw)
            else:
                ids = torch.randint(0, 256, (4, size + 1), generator=draw)
                yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    for which, build, budget in (("pictures", convolutions, "32MiB"), ("text", text, "16MiB")):
        results = []
        for compiled in (False, True):
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            step = pictures(model, optimizer) if which == "pictures" else work.make_step(model, optimizer)
            if compiled:
                step = outofcore.compile(step, model, optimizer, budget=budget)
            torch.manual_seed(4)
            losses = [step(*batch) for batch in batches(which)]
            results.append([*losses, *model.state_dict().values(), torch.get_rng_state()])
            if isinstance(step, outofcore.Step):
                assert step.stats.followed_calls >= 3
                step.close()
        assert alike(*results), which


def test_what_a_call_returns_is_the_users() -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        kept, wanted = ours.run(step), theirs.run(theirs.train)
        arrays = [out.numpy() for _, out in kept]
        addresses = [out.data_ptr() for _, out in kept]
        weight = ours.model[0].weight.detach().numpy()  # type: ignore[operator,union-attr]
        assert all(out.grad_fn is None and not out.requires_grad for pair in kept for out in pair)
        ours.run(step)
        theirs.run(theirs.train)
        assert alike(kept, wanted)
        assert addresses == [out.data_ptr() for _, out in kept]
        assert all((array == out.detach().numpy()).all() for array, (_, out) in zip(arrays, wanted, strict=True))
        # An array over a parameter shows it, whatever comes.
        assert (weight == theirs.model[0].weight.detach().numpy()).all()  # type: ignore[operator,union-attr]
    assert alike(kept, wanted)


def test_saving_loading_and_reports_go_on(tmp_path: Path) -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        ours.run(step)
        theirs.run(theirs.train)
        step.save(tmp_path / "checkpoint", extra={"epoch": 1})
        state = step.state_dict()["models"][0]
        assert alike(list(state.values()), list(theirs.model.state_dict().values()))
        wanted = theirs.run(theirs.train)
        assert alike(ours.run(step), wanted)
        assert step.load(tmp_path / "checkpoint") == {"epoch": 1}
        assert alike(ours.run(step), wanted)
        assert alike(ours.everything(), theirs.everything())
        step.load_state_dict(step.state_dict())
        assert alike(ours.run(step), theirs.run(theirs.train))
        page = step.report(tmp_path / "report.html", budgets=0).read_text(encoding="utf-8")
        assert "calls followed since" in page
        step.trace(tmp_path / "trace.json")
        step.synchronize()
        assert "calls followed" in repr(step)
        assert "followed" in repr(step.stats)
        assert step.planned.program.arena_bytes <= step.budget
    # Another process would do the same: a fresh model, and optimizer state that is born while it is loaded.
    fresh = Side()
    with outofcore.compile(fresh.train, fresh.model, fresh.optimizer, budget="2304KiB", dynamic=True) as step:
        step.load(tmp_path / "checkpoint")
        assert alike(fresh.run(step), wanted)
    with pytest.raises(outofcore.StateError, match="closed"):
        step(fresh.batch(0, 8))


def test_steps_that_share_a_home_are_planned_as_before() -> None:
    ours, theirs = Side(), Side()
    gather = outofcore.compile(ours.gather, ours.model, budget="8MiB")
    update = outofcore.compile(ours.update, ours.model, ours.optimizer, budget="8MiB", home=gather.home)
    pairs = ((gather, theirs.gather), (update, theirs.update), (gather, theirs.gather), (update, theirs.update))
    for number, (ours_step, theirs_step) in enumerate(pairs):
        assert alike(ours.run(ours_step, LENGTHS[number : number + 1]), theirs.run(theirs_step, LENGTHS[number:][:1]))
    assert alike(ours.everything(), theirs.everything())
    assert gather.stats.followed_calls == update.stats.followed_calls == 0
    update.close()
    gather.close()


def test_a_step_that_joins_later_gets_the_model_and_gives_it_back() -> None:
    ours, theirs = Side(), Side()
    train = outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB")
    for side, step in ((ours, train), (theirs, theirs.train)):
        side.run(step, LENGTHS[:3])
    gather = outofcore.compile(ours.gather, ours.model, budget="8MiB", home=train.home)
    for _ in range(2):
        assert alike(ours.run(gather, LENGTHS[:1]), theirs.run(theirs.gather, LENGTHS[:1]))
        loop = train._session.followed
        assert loop is not None
        assert loop.stats.bytes_in_use == 0
        assert alike(ours.run(train, LENGTHS[:3]), theirs.run(theirs.train, LENGTHS[:3]))
        assert alike(ours.everything(), theirs.everything())
    train.close()
    assert alike(ours.run(gather, LENGTHS[:1]), theirs.run(theirs.gather, LENGTHS[:1]))
    gather.close()
    assert alike(ours.everything(), theirs.everything())


def test_steps_over_models_of_their_own_take_turns() -> None:
    """One is followed from the start, one later, one never; none is closed before the end."""
    ways: list[bool | None] = [True, None, False]
    pairs = [(Side(), Side()) for _ in ways]
    steps = [
        outofcore.compile(side.train, side.model, side.optimizer, budget="8MiB", dynamic=way)
        for (side, _), way in zip(pairs, ways, strict=True)
    ]
    for rows in LENGTHS[1:5]:
        for step, (ours, theirs) in zip(steps, pairs, strict=True):
            assert alike(ours.run(step, (rows,)), theirs.run(theirs.train, (rows,)))
    for step, (ours, theirs) in zip(steps, pairs, strict=True):
        step.close()
        assert alike(ours.everything(), theirs.everything())


def test_two_steps_over_one_model_that_know_nothing_of_each_other() -> None:
    ours, theirs = Side(), Side()
    steps = [
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB", home="host", dynamic=way)
        for way in (True, None, True)
    ]
    for rows in (48, 48, 40):
        for step in steps:
            assert alike(ours.run(step, (rows,)), theirs.run(theirs.train, (rows,)))
        assert alike(ours.everything(), theirs.everything())
    for step in steps:
        step.close()
    assert alike(ours.everything(), theirs.everything())


def test_an_op_that_does_not_fit_leaves_all_right() -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        assert alike(ours.run(step, (48, 40)), theirs.run(theirs.train, (48, 40)))
        with pytest.raises(outofcore.BudgetError, match="is too small") as caught:
            ours.run(step, (9000,))
        assert caught.value.smallest_budget is not None
        assert caught.value.smallest_budget > 8 << 20
        assert any("as it would in plain PyTorch" in note for note in caught.value.__notes__)
        with pytest.raises(RuntimeError, match=r"shape|size"):
            step(torch.randn(8, 3))
        for side, run in ((ours, step), (theirs, theirs.train)):
            side.optimizer.zero_grad()
            for module in side.model:
                if isinstance(module, nn.BatchNorm1d):
                    module.reset_running_stats()
            side.run(run, (40,))
        assert alike(ours.everything(), theirs.everything())


def test_an_interrupt_waits_for_the_end_of_a_followed_call() -> None:
    ours, theirs = Side(), Side()
    once: list[int] = []

    def train(x: Tensor) -> Tensor:
        if len(x) == 80 and not once:
            once.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return ours.train(x)[0]

    theirs.run(theirs.train, (48, 40))
    with outofcore.compile(train, ours.model, ours.optimizer, budget="8MiB") as step:
        with pytest.raises(KeyboardInterrupt) as caught:
            ours.run(step, (48, 40))
        assert any("has been made" in note for note in caught.value.__notes__)
        assert alike(ours.everything(), theirs.everything())


def test_a_followed_step_in_other_threads_and_as_garbage() -> None:
    ours, theirs = Side(), Side()
    steps = [outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB")]
    seen: list[Any] = []
    for rows in LENGTHS[1:4]:
        thread = threading.Thread(target=lambda rows=rows: seen.append(ours.run(steps[0], (rows,))))
        thread.start()
        thread.join()
    assert alike(seen, [theirs.run(theirs.train, (rows,)) for rows in LENGTHS[1:4]])
    assert steps[0].stats.followed_calls == 2
    within = outofcore.budget("8MiB")
    with within, pytest.raises(outofcore.StateError, match=r"outofcore\.budget"):
        steps[0](ours.batch(0, 8))
    steps.clear()
    gc.collect()
    assert alike(ours.everything(), theirs.everything())


def test_a_switch_between_sizes_moves_nothing_where_all_fits() -> None:
    ours = Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="64MiB") as step:
        ours.run(step)
        loop = step._session.followed
        assert loop is not None
        before = loop.stats
        ours.run(step, (96, 33, 20, 70))
        after = loop.stats
    assert (after.fetches, after.evictions) == (before.fetches, before.evictions)


def test_where_nothing_can_be_followed(monkeypatch: pytest.MonkeyPatch, captures: list[int]) -> None:
    def none(*_: object) -> Any:
        raise outofcore.StateError("native code is missing: no compiler")

    ours, theirs = Side(), Side()
    monkeypatch.setattr("outofcore.follow.devices.load_paging", none)
    monkeypatch.setattr("outofcore.api.load_paging", none)
    with pytest.raises(outofcore.StateError, match="no compiler"):
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="4MiB", dynamic=True)
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        assert alike(ours.run(step, (48, 48, 40)), theirs.run(theirs.train, (48, 48, 40)))
        assert step.stats.followed_calls == 0
        assert step.stats.why_followed == ""
    assert captures


def test_what_cannot_be_asked_for() -> None:
    ours = Side()
    with pytest.raises(outofcore.InputError, match="neither planned nor measured"):
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="4MiB", policy="window", dynamic=True)
    with outofcore.open_home("host") as home, pytest.raises(outofcore.InputError, match="a home that the step opens"):
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="4MiB", home=home, dynamic=True)
