"""Tests of measured loops, of loops that may exceed their budget, and of budgets as a share of memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outofcore
from outofcore.execution.cuda.driver import ALLOCATOR
from outofcore.follow import gpu
from outofcore.runtime import available
from outofcore.units import KIB, MIB, PAGE_BYTES

Loop = Callable[[], list[float]]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = F.dropout(torch.softmax(query @ key.transpose(-1, -2), -1), 0.1)
        return x + self.out(scores @ value)


def make_dense() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])


def make_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))


def make_attention() -> nn.Module:
    return nn.Sequential(*[Attending() for _ in range(3)])


JOBS = {
    "dense": (make_dense, (256, 256), {}),
    "foreach": (make_dense, (256, 256), {"foreach": True}),
    "convolving": (make_convolutions, (4, 4, 64, 64), {}),
    "attending": (make_attention, (2, 384, 64), {}),
}


def train(job: str, budget: str | int | None, *, steps: int = 3, **options: bool) -> tuple[list[float], outofcore.Loop]:
    make, shape, settings = JOBS[job]
    torch.manual_seed(0)
    model, x = make(), torch.rand(shape)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    losses: list[float] = []
    with outofcore.budget(budget, model, home="host", cache=False, **options) as run:
        for _ in range(steps):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, run


@pytest.mark.parametrize("job", JOBS)
def test_measured_smallest_budget_is_the_smallest(job: str) -> None:
    losses, run = train(job, "256MiB", measure=True)
    measured = run.measurement()
    assert run.stats.evictions == run.stats.exceedances == 0
    assert 0 < measured.smallest_budget < measured.in_core_bytes

    repeated_losses, run = train(job, measured.smallest_budget)
    assert repeated_losses == losses
    assert run.stats.evictions > 0
    with pytest.raises(outofcore.BudgetError, match="is too small"):
        train(job, measured.smallest_budget - PAGE_BYTES)


def test_measured_need_counts_ops_without_allocations() -> None:
    def loop(budget: str | int, **options: bool) -> tuple[float, outofcore.Loop]:
        with outofcore.budget(budget, home="host", cache=False, **options) as run:
            tensors = [torch.full((256, 1024), float(number)) for number in range(4)]  # 1 MiB each
            torch.addcmul(*tensors[:3], out=tensors[3])
            return tensors[3].sum().item(), run

    expected, run = loop("64MiB", measure=True)
    measured = run.measurement()
    assert measured.op.startswith("aten::addcmul.out at ")
    assert measured.smallest_budget >= 4 * MIB
    assert loop(measured.smallest_budget)[0] == expected == 2 * 256 * 1024
    with pytest.raises(outofcore.BudgetError, match=r"too small: aten::addcmul\.out at "):
        loop(measured.smallest_budget - PAGE_BYTES)


def test_tensors_stay_resident_within_the_measured_peak() -> None:
    losses, run = train("dense", "600KiB", measure=True)
    assert run.stats.exceedances > 0
    repeated_losses, run = train("dense", run.measurement().in_core_bytes)
    assert repeated_losses == losses
    assert run.stats.evictions == 0


def test_measurement_names_the_op_with_its_module_and_line() -> None:
    _, run = train("attending", "256MiB", measure=True)
    assert re.fullmatch(r"aten::\S+ in [012] \(Attending\) at .*test_follow_measure.py:\d+", run.measurement().op) or (
        re.fullmatch(r"aten::\S+ in the backward pass of [012] \(Attending\) at .*\.py:\d+", run.measurement().op)
    )


def test_measurement_predicts_times_of_repeated_steps(capsys: pytest.CaptureFixture[str]) -> None:
    _, run = train("dense", "256MiB", steps=5, measure=True)
    predicted = run.measurement().predicted
    fitting = [prediction for prediction in predicted if prediction.budget >= run.measurement().smallest_budget]
    assert fitting and all(
        prediction.fits and prediction.slowdown is not None and prediction.slowdown > 0.5 for prediction in fitting
    )
    output = capsys.readouterr().err
    assert output.startswith("outofcore: measured 5 steps\n")
    assert f"({run.measurement().smallest_budget} bytes), which {run.measurement().op} needs" in output


def test_measurement_of_an_unmeasured_loop_is_refused() -> None:
    _, run = train("dense", "256MiB")
    with pytest.raises(outofcore.StateError, match="measure=True"):
        run.measurement()


def test_measurement_without_large_tensors_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with outofcore.budget("1MiB", measure=True) as run:
        torch.ones(3).sum()
    assert run.measurement().smallest_budget == 0
    assert "no op used a tensor of 64 KiB or more" in capsys.readouterr().err


def test_growing_loop_ends_within_its_budget() -> None:
    with outofcore.budget("1MiB", home="host", grow=True) as run:
        tensors = [torch.full((256, 256), float(number)) for number in range(16)]  # 256 KiB each
        torch.cat(tensors)
        assert run.stats.exceedances > 0
    assert run.stats.bytes_in_use <= MIB
    assert [int(tensor[0, 0]) for tensor in tensors] == list(range(16))


@pytest.mark.parametrize("job", JOBS)
def test_growing_loop_has_the_bits_of_one_with_room(job: str) -> None:
    losses, run = train(job, "256MiB")
    assert run.stats.exceedances == 0
    repeated_losses, run = train(job, "600KiB", grow=True)
    assert repeated_losses == losses
    assert run.stats.exceedances > 0
    assert run.stats.peak_bytes > 600 * KIB


def test_growing_loop_shrinks_after_the_op_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with outofcore.budget("1MiB", home="host", grow=True) as run, caplog.at_level(logging.WARNING, "outofcore"):
        large = torch.ones(2 * MIB // 4).add(1)  # 2 MiB, twice
        assert run.stats.peak_bytes > MIB >= run.stats.bytes_in_use
        small = [torch.full((128, 256), float(i)) for i in range(20)]
        assert run.stats.bytes_in_use <= MIB
        assert large.sum().item() == 2 * large.numel()
        assert [int(tensor[0, 0]) for tensor in small] == list(range(20))
    messages = [record.message for record in caplog.records if "was exceeded" in record.message]
    assert len(messages) == 1
    assert "aten::" in messages[0]


def test_long_batch_among_short_ones_runs_within_their_budget() -> None:
    def losses(budget: str | int | None, **options: bool) -> tuple[list[float], outofcore.Loop | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 64), *[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        values: list[float] = []

        def loop() -> None:
            for number in range(100):
                tokens = torch.arange(2048 if number == 60 else 512).remainder(64)[None]
                loss = model(tokens).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.item())

        if budget is None:
            loop()
            return values, None
        with outofcore.budget(budget, model, home="host", cache=False, **options) as run:
            loop()
        return values, run

    plain, _ = losses(None)
    # In core, a short batch takes 8 x 2 results of 128 KiB, and the long one four times as much.
    within, run = losses("2304KiB")
    assert within == plain
    assert run is not None and run.stats.exceedances == 0 and run.stats.evictions > 0
    assert run.stats.peak_bytes <= 2304 * KIB < run.stats.peak_total_bytes


def test_budget_is_a_share_of_available_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(available, "available_memory_bytes", lambda: 100 * MIB)
    with caplog.at_level(logging.WARNING, "outofcore"):
        assert train("dense", "30%")[1].stats.budget_bytes == 30 * MIB
        assert train("dense", None)[1].stats.budget_bytes == 70 * MIB
    assert [record.message for record in caplog.records] == [
        "outofcore: budget 30.0 MiB, of the 100 MiB of memory that are available",
        "outofcore: budget 70.0 MiB, of the 100 MiB of memory that are available",
    ]
    for wrong in ("0%", "101%", "-3%", "%"):
        with pytest.raises(outofcore.UnitError):
            train("dense", wrong)


def test_compiled_step_takes_a_share_as_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "available_memory_bytes", lambda: 40 * MIB)
    model, x = make_dense(), torch.rand(256, 256)

    def step(x: Tensor) -> Tensor:
        loss = model(x).mean()
        loss.backward()
        model.zero_grad()
        return loss

    with outofcore.compile(step, model, budget="50%", home="host", cache=False) as compiled:
        compiled(x)
        assert compiled.budget == 20 * MIB


@pytest.mark.parametrize("other_bytes", [0, 86 * MIB])
def test_smallest_budget_of_a_gpu_leaves_room_for_the_need(other_bytes: int) -> None:
    for room in (1, 5 * MIB, 640 * MIB + 1, 70 << 30):
        budget = gpu.budget_for(room, other_bytes)
        assert gpu.divide_budget(budget, other_bytes).room >= room
        assert gpu.divide_budget(budget - ALLOCATOR.segment, other_bytes).room < room


def test_budget_must_be_named_when_available_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "available_memory_bytes", lambda: None)
    with pytest.raises(outofcore.InputError, match="name a budget in bytes"):
        outofcore.budget()
    assert available.default_budget(10 << 30, on_host=False) == (10 << 30) - (512 << 20)
