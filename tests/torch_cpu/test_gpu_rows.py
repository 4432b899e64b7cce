"""The rows of a visit to a GPU, as far as they can be tried without one: their jobs, their weights, the predictions."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import gpu_pieces
import gpu_rows
import gpu_visit

from outofcore.capture import capture_step
from outofcore.estimation.costing import operations_of

GIB = 1 << 30
DECODER = {"kind": "decoder", "width": 64, "layers": 2, "heads": 4, "groups": 2, "head": 16, "inner": 96, "vocab": 128}
ROW = gpu_rows.Row(5, "a decoder", DECODER, 0.5, 96, "", "")


def test_a_row_is_predicted_without_memory_and_without_a_gpu() -> None:
    found = gpu_rows.predict(ROW)
    assert found["smallest_bytes"] <= found["in_core_bytes"]
    assert found["cap"] == found["in_core_bytes"] // 2
    assert "hold" in found["refused"]  # half of next to nothing is less than what a GPU's libraries take
    found = gpu_rows.predict(replace(ROW, cap=GIB))
    assert found["seconds"] == pytest.approx(found["in_core_s"], rel=0.2)
    assert found["per_s"] == pytest.approx(96 / found["seconds"], rel=0.1)


def test_attention_is_captured_as_a_gpu_runs_it_and_its_work_is_counted() -> None:
    with torch.device("meta"):
        job = gpu_rows.make(DECODER, 96, foretold=True)
    models, batch = [job.model.to("meta")], tuple(part.to("meta") for part in job.batch)
    captured = capture_step(job.step, models, [job.optimizer], batch, {}, torch.device("cpu"))
    found = {
        op.name.partition(".default")[0]: operations_of(captured, op, call)[1]
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
        if "attention" in op.name
    }
    # Two products of 96 by 96 by 16 for each of 4 heads, of which a causal one needs half; five on the way back.
    forward = 2 * 2 * 4 * 96 * 96 * 16 / 2
    name = "aten._scaled_dot_product_flash_attention"
    assert found == {name: forward, f"{name}_backward": forward * 2.5}


def test_the_visit_finds_caps_and_batches_of_all_rows_in_the_predictions() -> None:
    told = json.loads(gpu_rows.PREDICTIONS.read_text(encoding="utf-8"))
    assert told.pop("device").startswith("NVIDIA H200")
    assert {key: found["job"] for key, found in told.items()} == {row.key: row.job for row in gpu_rows.ROWS}
    for row in gpu_rows.ROWS:
        found = told[row.key]
        assert found["cap"] == pytest.approx(row.cap if row.cap > 1 else row.cap * found["in_core_bytes"], abs=1)
        assert found["size"] == (row.size or 2595)
        assert found["smallest_bytes"] < found["cap"] < found["in_core_bytes"]


def test_every_model_and_row_of_the_visit_exists() -> None:
    names = {one.name for part in gpu_visit.PARTS for one in part.measurements}
    fakes = {name.removeprefix("fakes: ") for name in names if name.startswith("fakes: ")}
    assert fakes == gpu_pieces._models(small=True).keys()
    named = {name for name in names if name.startswith("row ")}
    assert {int(name.split()[1].rstrip(":")) for name in named} == {row.number for row in gpu_rows.ROWS}


def test_a_batch_follows_from_what_two_small_ones_take() -> None:
    row = replace(ROW, times=7.5, cap=11 * GIB)
    assert gpu_rows._fitting(row, lambda size: GIB + size * (GIB // 16)) == int((10 - 2) * 16 * 7.5)


@pytest.mark.parametrize("row", gpu_rows.ROWS[:3], ids=lambda row: row.key)
def test_a_rehearsed_row_has_a_finite_loss_that_checkpointing_keeps(row: gpu_rows.Row) -> None:
    small = replace(gpu_rows.shrink(row), size=2 if row.number == 3 else 8)
    plain, again = (gpu_rows.make(small.model, small.size, again=again) for again in (False, True))
    loss = plain.step(*plain.batch).item()
    assert math.isfinite(loss)
    assert loss == again.step(*plain.batch).item()


def test_weights_are_a_block_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "_BLOCK", 100)
    model = torch.nn.Sequential(torch.nn.Linear(15, 17), torch.nn.LayerNorm(17))
    gpu_rows.fill_weights(model)
    flat = model[0].weight.detach().view(-1)
    assert torch.equal(flat[100:200], flat[:100])
    assert torch.equal(flat[200:], flat[:55])
    assert flat[:100].unique().numel() > 90
    assert bool((model[1].weight == 1).all())
