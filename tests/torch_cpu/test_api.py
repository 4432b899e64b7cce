"""Tests of the errors of ``compile`` and of the public interface of steps."""

from __future__ import annotations

import doctest
import inspect
import logging
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.errors import BudgetError, CaptureError, InputError, SpillError, UnitError


def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


X = torch.ones(64, 256)


@pytest.mark.parametrize("budget", ["a lot", "-1GiB", -5, 0, "0", "12 parsecs", 1.5, True])
def test_invalid_budget_is_refused(budget: Any) -> None:
    model, optimizer, step = make()
    with pytest.raises(UnitError):
        outofcore.compile(step, model, optimizer, budget=budget)


def test_too_small_budget_names_op_and_smallest_budget() -> None:
    model, optimizer, step = make()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(X,))
    compiled = outofcore.compile(step, model, optimizer, budget=smallest - 1)
    with pytest.raises(BudgetError) as caught:
        compiled(X)
    message = str(caught.value)
    assert caught.value.smallest_budget == smallest
    assert str(smallest) in message
    assert re.search(r"optimizer\.AdamW in [02] \(Linear\)", message)
    assert re.search(r"512 KiB  [02]\.weight \((512, 256|256, 512)\) float32 \(parameter\)", message)
    assert "test_api.py:" in message
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr(), True) == (before[name][0], torch.equal(parameter, before[name][1]))
    assert not optimizer.state
    compiled.close()
    assert torch.isfinite(outofcore.compile(step, model, optimizer, budget=smallest)(X))


def test_refused_capture_leaves_the_model_unchanged() -> None:
    model, optimizer, _ = make()
    before = [p.clone() for p in model.parameters()]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        if loss > 1:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CaptureError) as caught:
        outofcore.compile(step, model, optimizer, budget="1GiB")(X)
    assert "test_api.py:" in caught.value.location
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_step_with_optimizer_but_without_backward_is_refused() -> None:
    model, optimizer, _ = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x)

    with pytest.raises(CaptureError, match="backward"):
        outofcore.compile(step, model, optimizer, budget="1GiB")(X)


def test_arguments_of_wrong_type_are_refused() -> None:
    model, optimizer, step = make()
    with pytest.raises(InputError, match="model must be"):
        outofcore.compile(step, "resnet50", budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer must be"):
        outofcore.compile(step, model, [optimizer, 3], budget="1GiB")  # type: ignore[list-item]
    with pytest.raises(InputError, match="function"):
        outofcore.compile(3, model, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="policy"):
        outofcore.compile(step, model, optimizer, budget="1GiB", policy="best")


def test_model_on_meta_device_is_refused() -> None:
    _, _, step = make()
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(InputError, match=r"weight is on the device meta .*outofcore\.materialize"):
        outofcore.compile(step, model, budget="1GiB")


def test_cuda_is_refused_without_a_cuda_device() -> None:
    model, optimizer, step = make()
    with pytest.raises(InputError, match="sees no CUDA device"):
        outofcore.compile(step, model, optimizer, budget="1GiB", device="cuda")


def test_unusable_spill_directory_is_refused(tmp_path: Path) -> None:
    model, optimizer, step = make()
    with pytest.raises(SpillError, match="does not exist"):
        outofcore.compile(step, model, optimizer, budget="1GiB", home=tmp_path / "missing")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SpillError, match="not a directory"):
        outofcore.compile(step, model, optimizer, budget="1GiB", home=file)


def test_spill_directory_without_free_space_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer, step = make()
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(X,))
    before = [p.data_ptr() for p in model.parameters()]
    compiled = outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path)
    monkeypatch.setattr("outofcore.runtime.spill.free_bytes", lambda directory: 1 << 16)
    with pytest.raises(SpillError, match="free there"):
        compiled(X)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_argument_of_unsupported_type_is_refused() -> None:
    model, optimizer, step = make()
    with pytest.raises(CaptureError):
        outofcore.compile(step, model, optimizer, budget="1GiB")(object())


def test_error_raised_by_the_step_propagates() -> None:
    model, optimizer, _ = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        outofcore.compile(step, model, optimizer, budget="1GiB")(X)


def test_in_core_step_copies_no_bytes_and_causes_few_page_faults() -> None:
    model, optimizer, step = make()
    with outofcore.compile(step, model, optimizer, budget="1GiB") as compiled:
        for _ in range(3):
            compiled(X)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            compiled(X)
            assert (compiled.stats.bytes_out, compiled.stats.bytes_in, compiled.stats.off_plan) == (0, 0, 0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10 * 300


def test_public_names() -> None:
    assert outofcore.__all__ == [
        *("ArenaError", "BudgetError", "CaptureError", "CommunicationError", "DeviceError", "Elastic"),
        *("ElasticStats", "Estimate", "GraphError", "InputError"),
        *(
            "Loop",
            "LoopStats",
            "Measurement",
            "OpenHome",
            "OutOfCoreError",
            "SpillError",
            "StateError",
            "Step",
            "StepStats",
        ),
        *("TransferError", "UnitError", "ValidationError", "VersionError", "aligned", "budget", "build", "compile"),
        *("elastic", "estimate", "load", "materialize", "open_home", "run", "save", "smallest_budget", "stop"),
    ]
    for name in outofcore.__all__:
        assert getattr(outofcore, name).__doc__


def test_docstring_example_of_compile_runs() -> None:
    tests = doctest.DocTestFinder().find(outofcore.compile, "compile", globs={})
    assert sum(len(test.examples) for test in tests) > 5
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


def test_step_has_metadata_repr_warning_and_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)

    def train(x: torch.Tensor) -> torch.Tensor:
        """Trains."""
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with outofcore.compile(train, model, budget="16MiB", dynamic=False) as step:
        assert step.__name__ == "train"
        assert step.__wrapped__ is train
        assert list(inspect.signature(step).parameters) == ["x"]
        assert repr(step) == "<outofcore step 'train' within 16.0 MiB: 0 plans by auto>"
        for rows in (1, 2, 3):
            step(torch.ones(rows, 8))
        assert not [r for r in caplog.records if "signatures" in r.getMessage()]
        for rows in (4, 5, 6):
            step(torch.ones(rows, 8))
        (warned,) = (r for r in caplog.records if "signatures" in r.getMessage())
        assert re.search(r"4 input signatures .* in \d+\.\d s in total .* pad inputs", warned.getMessage())
        assert warned.levelno == logging.WARNING
        assert re.fullmatch(
            r"<outofcore step 'train' within 16.0 MiB: 6 plans by auto, last step [\d.]+ \w+>", repr(step)
        )
        assert re.fullmatch(r"<step of .* predicted: ops .* off-plan requests>", repr(step.stats))
        monkeypatch.chdir(tmp_path)
        assert step.report(budgets=0).resolve() == tmp_path / "outofcore-report.html"
        assert (tmp_path / "outofcore-report.html").stat().st_size > 1000
    assert repr(step).endswith("closed>")
