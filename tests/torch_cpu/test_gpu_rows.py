"""The comparison of a visit to a GPU, as far as it can be tried without one: what is predicted, and how it is told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import gpu_rows

from outofcore.capture import capture_step
from outofcore.estimation.costing import given_memory, operations_of

GIB = 1 << 30
DECODER = {"kind": "decoder", "width": 64, "layers": 2, "heads": 4, "groups": 2, "head": 16, "inner": 96, "vocab": 128}
ROW = gpu_rows.Row(5, "a decoder", DECODER, 0.5, "", "", (96,))


def test_a_row_is_predicted_without_memory_and_without_a_gpu() -> None:
    found = gpu_rows.predict(ROW, 96)
    assert found["smallest_bytes"] <= found["in_core_bytes"]
    assert found["cap"] == found["in_core_bytes"] // 2
    assert "hold" in found["refused"]  # half of next to nothing is less than what a GPU's libraries take
    found = gpu_rows.predict(replace(ROW, cap=GIB), 96)
    assert found["seconds"] == pytest.approx(found["in_core_s"], rel=0.2)
    assert found["per_s"] == pytest.approx(96 / found["seconds"], rel=0.1)


def test_attention_is_captured_as_a_gpu_runs_it_and_its_work_is_counted() -> None:
    with torch.device("meta"):
        job = gpu_rows.make(DECODER, 96, foretold=True)
    models, batch = [job.model.to("meta")], tuple(part.to("meta") for part in job.batch)
    with given_memory(models, (batch, {})) as (given, _):
        captured = capture_step(job.step, models, [job.optimizer], given, {})
    found = {
        op.name.partition(".default")[0]: operations_of(captured, op, call)[1]
        for op, call in zip(captured.graph.ops, captured.calls, strict=True)
        if "attention" in op.name
    }
    # Two products of 96 by 96 by 16 for each of 4 heads, of which a causal one needs half; five on the way back.
    forward = 2 * 2 * 4 * 96 * 96 * 16 / 2
    name = "aten._scaled_dot_product_flash_attention"
    assert found == {name: forward, f"{name}_backward": forward * 2.5}


def test_what_is_kept_are_predictions_of_rows_of_the_comparison() -> None:
    told = json.loads(gpu_rows.PREDICTIONS.read_text(encoding="utf-8"))
    device = told.pop("device")
    assert device.startswith("NVIDIA H200")
    assert len(told) >= 5
    jobs = {f"{row.number}/{size}": row.job for row in gpu_rows.ROWS for size in row.sizes}
    for key, found in told.items():
        assert found["job"] == jobs[key]
        assert {"per_s", "refused", "error"} & found.keys()


def test_a_batch_follows_from_what_two_small_ones_take() -> None:
    row = replace(ROW, model={"kind": "resnet", "times": 7.5}, cap=11 * GIB)
    assert gpu_rows._fitting(row, lambda size: GIB + size * (GIB // 16)) == int((10 - 2) * 16 * 7.5)


def test_what_was_predicted_is_told_beside_what_was_measured() -> None:
    ours = {"seconds": 0.5, "per_s": 192.0, "peak_reserved": GIB, "predicted_s": 0.4}
    answers = {"outofcore": ours, "plain, no cap": {"seconds": 0.4}}
    foretold = {"seconds": 0.3, "per_s": 320.0, "in_core_s": 0.25}
    line = gpu_rows._line(ROW, 96, answers, foretold)
    assert "1.25x of in core" in line
    assert "beforehand 320/s, measured 192, as shares of in core 1.20x, measured 1.25x" in line
    assert "beforehand" not in gpu_rows._line(ROW, 96, answers, None)
    failed = {"outofcore": {"error": "out of memory"}}
    assert gpu_rows._line(ROW, 96, failed, foretold).startswith("! row 5")
    assert "beforehand 320/s, measured nothing" in gpu_rows._line(ROW, 96, failed, foretold)
    assert "beforehand: no plan" in gpu_rows._line(ROW, 96, answers, {"refused": "no plan"})
