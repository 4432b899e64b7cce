"""Tests of the comparison with published training results: jobs, figures, recommendations."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import gpu_rivals
from gpu_rivals import RIVALS, recommend_work

from outofcore import presets
from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind

GIB = 1 << 30
TINY = {"kind": "decoder", "width": 64, "layers": 2, "heads": 4, "groups": 2, "head": 16, "inner": 96, "vocab": 128}
RIVAL = gpu_rivals.Rival(
    "tiny", "a decoder", TINY, 2, "tokens", "rtx4090", "nobody", "nowhere", cap=0.25, sequence=64, rate=1e6
)
FIGURES: dict[str, Any] = {
    "seconds": 2.0,
    "in_core_s": 1.0,
    "products_s": 0.8,
    "published_s": 1.5,
    "published_rate": 100.0,
    "room": 10 * GIB,
    "largest_op": "aten.mm.default",
    "largest_op_bytes": GIB,
    "link_s": 1.9,
    "again_s": 0.0,
    "waits_for_copies_s": 0.9,
    "waits_for_room_s": 0.0,
    "moved": {"activation": [GIB, GIB], "optimizer_state": [30 * GIB, 30 * GIB]},
}


def test_row_is_planned_without_memory() -> None:
    row = gpu_rivals.predict(RIVAL)
    assert row["seconds"] >= row["in_core_s"] > row["products_s"] > 0
    assert row["largest_op_bytes"] <= row["smallest_bytes"] <= row["room"] < row["cap"]
    assert row["published_s"] == pytest.approx(128e-6)
    assert row["per_s"] == pytest.approx(128 / row["seconds"])


def test_too_small_cap_recommends_splitting_the_largest_op() -> None:
    row = gpu_rivals.predict(replace(RIVAL, cap=0.126))
    assert "seconds" not in row
    assert "run it in parts" in recommend_work(row)


@pytest.mark.parametrize("lora", [False, True])
def test_only_adapters_are_trained_with_lora(lora: bool) -> None:
    with torch.device("meta"):
        job = gpu_rivals.make_job(replace(RIVAL, lora=lora))
    names = {name for name, p in job.model.named_parameters() if p.requires_grad}
    assert names == {
        n for n, _ in job.model.named_parameters() if not lora or n.endswith((".up.weight", ".down.weight"))
    }
    # Seven linear layers in each of two blocks, with two matrices each.
    assert not lora or len(names) == 28


def test_operation_count_covers_products_and_causal_attention() -> None:
    block = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3
    weights, attention = 2 * block + 64 * 128, 7 * 2 * 64 * 64
    assert gpu_rivals.count_operations(RIVAL) == 128 * (6 * weights + attention)
    assert gpu_rivals.count_operations(replace(RIVAL, lora=True)) == 128 * (4 * weights + attention)
    assert gpu_rivals.count_operations(RIVALS[0]) is None
    assert gpu_rivals.rate_of(replace(RIVAL, flops=128.0 * (6 * weights + attention))) == 128


def test_largest_op_counts_its_tensors_and_workspace() -> None:
    storages = tuple(Storage(i, size, StorageKind.ACTIVATION, f"s{i}") for i, size in enumerate((100, 200, 50)))
    ops = Op(0, "small", (), (), (0, 1)), Op(1, "large", (0,), (), (2,))
    costs = Costs((OpCost(1.0), OpCost(1.0, workspace_bytes=400)))
    assert gpu_rivals.find_largest_op(StepGraph(storages, ops), costs) == ("large", 550)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "Behind, at 0.75 of its speed. Bound by the link: it needs 1.90 s, mostly for optimizer states (30 GiB"),
        ({"seconds": 1.4}, "First by these figures, at 1.07 of its speed. Bound by the link"),
        ({"seconds": 1.01}, "Ops are the limit and the copies hide"),
        ({"seconds": 1.4, "published_rate": None}, "at 1.07 of its share of the speed in core"),
        ({"published_s": None}, "No rate to beat is at hand. Bound by the link"),
        ({"largest_op_bytes": 6 * GIB}, "mm needs 6.0 GiB at once, of 10.0"),
        (
            {"link_s": 0.1, "waits_for_copies_s": 0.0, "again_s": 0.9},
            "Ops that run again take 45% of the step: the link",
        ),
        ({"link_s": 0.6, "waits_for_copies_s": 0.0, "again_s": 0.9}, "hold what they make in fewer bytes"),
        (
            {"link_s": 0.1, "waits_for_copies_s": 0.0, "again_s": 0.9, "host": GIB},
            "the link idles for 95%, so let the search offload more, and run the batch in micro-batches",
        ),
        ({"link_s": 1.4, "waits_for_copies_s": 0.0, "again_s": 0.9}, "the link is busy for 70% of it, mostly for opt"),
        ({"frozen": True, "bytes_out": GIB, "moved": {"parameter": [GIB, GIB]}}, "weights are copied out (1 GiB)"),
        ({"link_s": 0.1, "waits_for_copies_s": 0.0, "waits_for_room_s": 0.9}, "Copies wait for room, 45% of the step"),
        ({"published_s": 0.9}, "Bound by ops: in core they take 1.11 of its step, 20% of it bound by memory"),
        ({"published_s": 0.5}, "products alone more than all of it"),
        ({"published_s": 0.5, "at_their_pace_s": 0.51}, "would still add 2%: moving is not the limit"),
        ({"published_s": 0.5, "at_their_pace_s": 1.0}, "would still add 100%, mostly for optimizer states"),
        ({"published_s": 0.5, "at_their_pace_s": 1.0, "again_s": 0.8}, "most of it ops that run again"),
    ],
)
def test_recommendation_follows_from_the_figures(changes: dict[str, Any], advice: str) -> None:
    assert advice in recommend_work({**FIGURES, **changes})


def test_refusal_names_the_oversized_op_or_the_search() -> None:
    refusal = {"refused": "nothing fits", "room": 10 * GIB, "largest_op": "aten.mm.default", "largest_op_bytes": GIB}
    assert "search harder" in recommend_work({**refusal, "smallest_bytes": 9 * GIB})
    assert "mm needs 1.0 GiB at once: run it in parts" in recommend_work({**refusal, "smallest_bytes": 11 * GIB})


def test_table_has_every_row_and_names_a_failure() -> None:
    results = json.loads(gpu_rivals.RESULTS.read_text(encoding="utf-8"))
    assert list(results) == [rival.key for rival in RIVALS]
    page = gpu_rivals.render_table(results)
    assert page == gpu_rivals.TABLE.read_text(encoding="utf-8")
    results[RIVALS[0].key] = {"error": "not planned in 900 s"}
    assert "No plan (not planned in 900 s)." in gpu_rivals.render_table(results)


def test_device_of_every_row_exists() -> None:
    assert {presets.device(rival.device).key for rival in RIVALS} == {
        "h100-80gb-pcie5",
        "laptop-rtx4090-16gb",
        "rtx4090-24gb",
        "rtx5090-32gb",
    }
