"""Tests of compiled steps with inputs of many sizes, of which later ones run in an eager loop."""

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
    """A model with its optimizer and step functions, always seeded equally."""

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

    def state_tensors(self) -> list[Tensor]:
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        for parameter in self.model.parameters():
            tensors += [] if parameter.grad is None else [parameter.grad]
            tensors += [t for t in self.optimizer.state[parameter].values() if isinstance(t, Tensor)]
        return tensors


def are_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return bool(ours.equal(theirs))
    return len(ours) == len(theirs) and all(map(are_equal, ours, theirs))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = options.capture_step

    def count_and_capture(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(options, "capture_step", count_and_capture)
    return calls


def test_later_sizes_run_in_an_eager_loop(captures: list[int]) -> None:
    ours, theirs = Side(), Side()
    expected = theirs.run(theirs.train), theirs.state_tensors()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="2304KiB") as step:
        assert are_equal(ours.run(step), expected[0])
        assert are_equal(ours.state_tensors(), expected[1])
        # The first capture and those of the steady-state step, if any.
        assert len(captures) <= 3
        assert step.stats.eager_calls == 5
        assert "shape (96, 256) -> (128, 256)" in step.stats.eager_reason
        assert step.stats.bytes_out > 0
        loop = step._session.eager_calls
        assert loop is not None
        assert loop.stats.peak_bytes <= 2304 << 10
        # User changes between calls take effect.
        for side in (ours, theirs):
            with torch.no_grad():
                side.model[0].weight.mul_(0.5)  # type: ignore[operator,union-attr]
                side.model[4].weight[3:5] = 0.25  # type: ignore[index,union-attr]
        assert are_equal(ours.run(step), theirs.run(theirs.train))
        assert are_equal(ours.state_tensors(), theirs.state_tensors())
    assert are_equal(ours.state_tensors(), theirs.state_tensors())
    assert {native.load_paging().follow_where(p.untyped_storage()._cdata) for p in ours.model.parameters()} == {0}
    with outofcore.budget("2MiB", ours.model):  # the step has released the model
        assert are_equal(ours.run(ours.train), theirs.run(theirs.train))


def test_dynamic_step_runs_all_calls_in_an_eager_loop(captures: list[int]) -> None:
    ours, theirs = Side(), Side()
    settings: dict[str, Any] = {"budget": "1MiB", "home": "host", "check": "off", "dynamic": True}
    with outofcore.compile(ours.train, ours.model, ours.optimizer, **settings) as step:
        assert are_equal(ours.run(step), theirs.run(theirs.train))
        assert step.stats.bytes_out > 0
        assert are_equal(ours.state_tensors(), theirs.state_tensors())
        assert step.stats.eager_calls == len(LENGTHS)
        for query in (lambda: step.planned, lambda: step.timeline, step.report):
            with pytest.raises(outofcore.StateError, match="ran as an eager loop, which has no plan"):
                query()
    assert not captures


def test_static_step_plans_each_size(captures: list[int]) -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB", dynamic=False) as step:
        assert are_equal(ours.run(step, LENGTHS[:4]), theirs.run(theirs.train, LENGTHS[:4]))
        assert step.stats.eager_calls == 0
        assert step._session.signature_count >= 3
    assert captures


def test_changes_other_than_sizes_are_captured() -> None:
    ours = Side()

    def evaluate(x: Tensor, scale: float = 1.0) -> Tensor:
        with torch.no_grad():
            return ours.model(x) * scale

    with outofcore.compile(evaluate, ours.model, budget="8MiB") as step:
        step(ours.batch(0, 96))
        step(ours.batch(0, 96), 2.0)
        ours.model.eval()
        step(ours.batch(0, 96))
        assert step.stats.eager_calls == 0
        step(ours.batch(0, 32))
        assert step.stats.eager_calls == 1


def test_language_and_image_models_with_many_sizes_are_exact() -> None:
    work = zoo.workload("gpt", params="1M", batch=4, context=64, dropout=0.1)
    sizes = [(16, 32), (16, 32), (32, 32), (24, 40), (8, 24), (32, 32)]

    def make_image_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> StepFunction:
        def step(x: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def build_image_model() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 64, 3), nn.BatchNorm2d(64)]
        return nn.Sequential(*layers, nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def build_text_model() -> nn.Module:
        torch.manual_seed(1)
        return work.build()

    def batches(kind: str) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(3)
        for rows, size in sizes:
            if kind == "pictures":
                yield torch.randn(rows, 3, size, size, generator=draw), torch.randint(0, 10, (rows,), generator=draw)
            else:
                ids = torch.randint(0, 256, (4, size + 1), generator=draw)
                yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    for kind, build, budget in (("pictures", build_image_model, "32MiB"), ("text", build_text_model, "16MiB")):
        results = []
        for compiled in (False, True):
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            step = make_image_step(model, optimizer) if kind == "pictures" else work.make_step(model, optimizer)
            if compiled:
                step = outofcore.compile(step, model, optimizer, budget=budget)
            torch.manual_seed(4)
            losses = [step(*batch) for batch in batches(kind)]
            results.append([*losses, *model.state_dict().values(), torch.get_rng_state()])
            if isinstance(step, outofcore.Step):
                assert step.stats.eager_calls >= 3
                step.close()
        assert are_equal(*results), kind


def test_results_of_calls_belong_to_the_user() -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        results, expected = ours.run(step), theirs.run(theirs.train)
        arrays = [out.numpy() for _, out in results]
        addresses = [out.data_ptr() for _, out in results]
        weight = ours.model[0].weight.detach().numpy()  # type: ignore[operator,union-attr]
        assert all(out.grad_fn is None and not out.requires_grad for pair in results for out in pair)
        ours.run(step)
        theirs.run(theirs.train)
        assert are_equal(results, expected)
        assert addresses == [out.data_ptr() for _, out in results]
        assert all((array == out.detach().numpy()).all() for array, (_, out) in zip(arrays, expected, strict=True))
        # An array that shares a parameter's memory shows its updates.
        assert (weight == theirs.model[0].weight.detach().numpy()).all()  # type: ignore[operator,union-attr]
    assert are_equal(results, expected)


def test_save_load_and_report_work_after_eager_calls(tmp_path: Path) -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        ours.run(step)
        theirs.run(theirs.train)
        step.save(tmp_path / "checkpoint", extra={"epoch": 1})
        state = step.state_dict()["models"][0]
        assert are_equal(list(state.values()), list(theirs.model.state_dict().values()))
        expected = theirs.run(theirs.train)
        assert are_equal(ours.run(step), expected)
        assert step.load(tmp_path / "checkpoint") == {"epoch": 1}
        assert are_equal(ours.run(step), expected)
        assert are_equal(ours.state_tensors(), theirs.state_tensors())
        step.load_state_dict(step.state_dict())
        assert are_equal(ours.run(step), theirs.run(theirs.train))
        page = step.report(tmp_path / "report.html", budgets=0).read_text(encoding="utf-8")
        assert "eager calls" in page
        step.trace(tmp_path / "trace.json")
        step.synchronize()
        assert "eager calls" in repr(step)
        assert "eager call" in repr(step.stats)
        assert step.planned.program.arena_bytes <= step.budget
    # As in another process: a fresh model, whose optimizer state is created by the load.
    fresh = Side()
    with outofcore.compile(fresh.train, fresh.model, fresh.optimizer, budget="2304KiB", dynamic=True) as step:
        step.load(tmp_path / "checkpoint")
        assert are_equal(fresh.run(step), expected)
    with pytest.raises(outofcore.StateError, match="closed"):
        step(fresh.batch(0, 8))


def test_steps_with_a_shared_home_are_planned() -> None:
    ours, theirs = Side(), Side()
    gather = outofcore.compile(ours.gather, ours.model, budget="8MiB")
    update = outofcore.compile(ours.update, ours.model, ours.optimizer, budget="8MiB", home=gather.home)
    pairs = ((gather, theirs.gather), (update, theirs.update), (gather, theirs.gather), (update, theirs.update))
    for number, (ours_step, theirs_step) in enumerate(pairs):
        assert are_equal(
            ours.run(ours_step, LENGTHS[number : number + 1]), theirs.run(theirs_step, LENGTHS[number:][:1])
        )
    assert are_equal(ours.state_tensors(), theirs.state_tensors())
    assert gather.stats.eager_calls == update.stats.eager_calls == 0
    update.close()
    gather.close()


def test_later_step_at_the_same_home_takes_and_returns_the_model() -> None:
    ours, theirs = Side(), Side()
    train = outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB")
    for side, step in ((ours, train), (theirs, theirs.train)):
        side.run(step, LENGTHS[:3])
    gather = outofcore.compile(ours.gather, ours.model, budget="8MiB", home=train.home)
    for _ in range(2):
        assert are_equal(ours.run(gather, LENGTHS[:1]), theirs.run(theirs.gather, LENGTHS[:1]))
        loop = train._session.eager_calls
        assert loop is not None
        assert loop.stats.bytes_in_use == 0
        assert are_equal(ours.run(train, LENGTHS[:3]), theirs.run(theirs.train, LENGTHS[:3]))
        assert are_equal(ours.state_tensors(), theirs.state_tensors())
    train.close()
    assert are_equal(ours.run(gather, LENGTHS[:1]), theirs.run(theirs.gather, LENGTHS[:1]))
    gather.close()
    assert are_equal(ours.state_tensors(), theirs.state_tensors())


def test_steps_of_separate_models_can_alternate() -> None:
    """One step runs in an eager loop from the start, one from the second size on, and one never."""
    modes: list[bool | None] = [True, None, False]
    pairs = [(Side(), Side()) for _ in modes]
    steps = [
        outofcore.compile(side.train, side.model, side.optimizer, budget="8MiB", dynamic=dynamic)
        for (side, _), dynamic in zip(pairs, modes, strict=True)
    ]
    for rows in LENGTHS[1:5]:
        for step, (ours, theirs) in zip(steps, pairs, strict=True):
            assert are_equal(ours.run(step, (rows,)), theirs.run(theirs.train, (rows,)))
    for step, (ours, theirs) in zip(steps, pairs, strict=True):
        step.close()
        assert are_equal(ours.state_tensors(), theirs.state_tensors())


def test_steps_with_separate_homes_can_share_a_model() -> None:
    ours, theirs = Side(), Side()
    steps = [
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB", home="host", dynamic=dynamic)
        for dynamic in (True, None, True)
    ]
    for rows in (48, 48, 40):
        for step in steps:
            assert are_equal(ours.run(step, (rows,)), theirs.run(theirs.train, (rows,)))
        assert are_equal(ours.state_tensors(), theirs.state_tensors())
    for step in steps:
        step.close()
    assert are_equal(ours.state_tensors(), theirs.state_tensors())


def test_training_continues_after_oversized_inputs() -> None:
    ours, theirs = Side(), Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        assert are_equal(ours.run(step, (48, 40)), theirs.run(theirs.train, (48, 40)))
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
        assert are_equal(ours.state_tensors(), theirs.state_tensors())


def test_ctrl_c_waits_for_the_end_of_an_eager_call() -> None:
    ours, theirs = Side(), Side()
    interrupts: list[int] = []

    def train(x: Tensor) -> Tensor:
        if len(x) == 80 and not interrupts:
            interrupts.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return ours.train(x)[0]

    theirs.run(theirs.train, (48, 40))
    with outofcore.compile(train, ours.model, ours.optimizer, budget="8MiB") as step:
        with pytest.raises(KeyboardInterrupt) as caught:
            ours.run(step, (48, 40))
        assert any("has been made" in note for note in caught.value.__notes__)
        assert are_equal(ours.state_tensors(), theirs.state_tensors())


def test_dynamic_step_runs_in_threads_and_can_be_collected() -> None:
    ours, theirs = Side(), Side()
    steps = [outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB")]
    results: list[Any] = []
    for rows in LENGTHS[1:4]:
        thread = threading.Thread(target=lambda rows=rows: results.append(ours.run(steps[0], (rows,))))
        thread.start()
        thread.join()
    assert are_equal(results, [theirs.run(theirs.train, (rows,)) for rows in LENGTHS[1:4]])
    assert steps[0].stats.eager_calls == 2
    loop = outofcore.budget("8MiB")
    with loop, pytest.raises(outofcore.StateError, match=r"outofcore\.budget"):
        steps[0](ours.batch(0, 8))
    steps.clear()
    gc.collect()
    assert are_equal(ours.state_tensors(), theirs.state_tensors())


def test_size_change_moves_no_bytes_within_a_large_budget() -> None:
    ours = Side()
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="64MiB") as step:
        ours.run(step)
        loop = step._session.eager_calls
        assert loop is not None
        before = loop.stats
        ours.run(step, (96, 33, 20, 70))
        after = loop.stats
    assert (after.fetches, after.evictions) == (before.fetches, before.evictions)


def test_sizes_are_planned_without_native_code(monkeypatch: pytest.MonkeyPatch, captures: list[int]) -> None:
    def raise_missing(*_: object) -> Any:
        raise outofcore.StateError("native code is missing: no compiler")

    ours, theirs = Side(), Side()
    monkeypatch.setattr("outofcore.follow.devices.load_paging", raise_missing)
    monkeypatch.setattr("outofcore.api.load_paging", raise_missing)
    with pytest.raises(outofcore.StateError, match="no compiler"):
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="4MiB", dynamic=True)
    with outofcore.compile(ours.train, ours.model, ours.optimizer, budget="8MiB") as step:
        assert are_equal(ours.run(step, (48, 48, 40)), theirs.run(theirs.train, (48, 48, 40)))
        assert step.stats.eager_calls == 0
        assert step.stats.eager_reason == ""
    assert captures


def test_invalid_dynamic_options_are_refused() -> None:
    ours = Side()
    with pytest.raises(outofcore.InputError, match="own kernels and the policy"):
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="4MiB", policy="window", dynamic=True)
    with outofcore.open_home("host") as home, pytest.raises(outofcore.InputError, match="a home that the step opens"):
        outofcore.compile(ours.train, ours.model, ours.optimizer, budget="4MiB", home=home, dynamic=True)
