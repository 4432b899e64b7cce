"""Tests of the rows that are measured on GPUs, without a GPU: jobs, weights, predictions."""

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
from outofcore.estimation.costing import count_operations

GIB = 1 << 30
DECODER = {"kind": "decoder", "width": 64, "layers": 2, "heads": 4, "groups": 2, "head": 16, "inner": 96, "vocab": 128}
ROW = gpu_rows.Row(5, "a decoder", DECODER, 0.5, 96, "", "")


def test_row_is_predicted_without_a_gpu() -> None:
    prediction = gpu_rows.predict(ROW)
    assert prediction["smallest_bytes"] <= prediction["in_core_bytes"]
    assert prediction["cap"] == prediction["in_core_bytes"] // 2
    assert "hold" in prediction["refused"]  # half of this tiny step is less than a GPU's libraries take
    prediction = gpu_rows.predict(replace(ROW, cap=GIB))
    assert prediction["seconds"] == pytest.approx(prediction["in_core_s"], rel=0.2)
    assert prediction["per_s"] == pytest.approx(96 / prediction["seconds"], rel=0.1)


def test_attention_is_captured_as_a_gpu_op_with_its_operations() -> None:
    with torch.device("meta"):
        job = gpu_rows.make(DECODER, 96, for_capture=True)
    models, batch = [job.model.to("meta")], tuple(tensor.to("meta") for tensor in job.batch)
    captured = capture_step(job.step, models, [job.optimizer], batch, {}, torch.device("cpu"))
    operations = {
        op.name.partition(".default")[0]: count_operations(captured, op, call)[1]
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
        if "attention" in op.name
    }
    # Two products of 96 by 96 by 16 for each of 4 heads, halved by the causal mask; five in the backward pass.
    forward = 2 * 2 * 4 * 96 * 96 * 16 / 2
    name = "aten._scaled_dot_product_flash_attention"
    assert operations == {name: forward, f"{name}_backward": forward * 2.5}


def test_predictions_have_the_cap_and_batch_of_every_row() -> None:
    predictions = json.loads(gpu_rows.PREDICTIONS.read_text(encoding="utf-8"))
    assert predictions.pop("device").startswith("NVIDIA H200")
    assert {key: prediction["job"] for key, prediction in predictions.items()} == {
        row.key: row.job for row in gpu_rows.ROWS
    }
    for row in gpu_rows.ROWS:
        prediction = predictions[row.key]
        assert prediction["cap"] == pytest.approx(
            row.cap if row.cap > 1 else row.cap * prediction["in_core_bytes"], abs=1
        )
        assert prediction["size"] == (row.size or 2595)
        assert prediction["smallest_bytes"] < prediction["cap"] < prediction["in_core_bytes"]


def test_visit_measures_every_model_and_row() -> None:
    names = {measurement.name for part in gpu_visit.PARTS for measurement in part.measurements}
    fakes = {name.removeprefix("fakes: ") for name in names if name.startswith("fakes: ")}
    assert fakes == gpu_pieces._models(small=True).keys()
    row_names = {name for name in names if name.startswith("row ")}
    assert {int(name.split()[1].rstrip(":")) for name in row_names} == {row.number for row in gpu_rows.ROWS}


def test_batch_size_follows_from_two_small_batches() -> None:
    row = replace(ROW, times=7.5, cap=11 * GIB)
    assert gpu_rows._extrapolate_batch(row, lambda size: GIB + size * (GIB // 16)) == int((10 - 2) * 16 * 7.5)


@pytest.mark.parametrize("row", gpu_rows.ROWS[:3], ids=lambda row: row.key)
def test_rehearsed_row_has_the_same_finite_loss_with_checkpointing(row: gpu_rows.Row) -> None:
    small = replace(gpu_rows.shrink(row), size=2 if row.number == 3 else 8)
    plain, checkpointed = (
        gpu_rows.make(small.model, small.size, checkpointed=checkpointed) for checkpointed in (False, True)
    )
    loss = plain.step(*plain.batch).item()
    assert math.isfinite(loss)
    assert loss == checkpointed.step(*plain.batch).item()


def test_weights_repeat_one_random_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "_BLOCK", 100)
    model = torch.nn.Sequential(torch.nn.Linear(15, 17), torch.nn.LayerNorm(17))
    gpu_rows.fill_weights(model)
    flat = model[0].weight.detach().view(-1)
    assert torch.equal(flat[100:200], flat[:100])
    assert torch.equal(flat[200:], flat[:55])
    assert flat[:100].unique().numel() > 90
    assert bool((model[1].weight == 1).all())
