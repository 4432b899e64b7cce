"""Tests of the record of plans and bits: a sample matches it, and differences are reported by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import record
from record_pairs import GROUPS
from record_run import facts, record_group

MODEL = "gpt"
SAMPLE = ("compile, 12MiB, home disk", "compile, 5MiB, home host", "budget, 12MiB")


@pytest.fixture(scope="module")
def recorded_sample() -> dict[str, Any]:
    content = record.read_record(MODEL)
    return {**content, "pairs": {name: content["pairs"][name] for name in SAMPLE}}


def record_sample(*pairs: str, budget: str | None = None) -> dict[str, Any]:
    """Record pairs of the sample, optionally within another budget under the same names."""
    group = GROUPS[MODEL]
    chosen = [pair for pair in group.pairs if pair.name in pairs]
    changed = chosen if budget is None else [replace(pair, budget=budget) for pair in chosen]
    results = record_group(replace(group, pairs=tuple(changed)))
    entries = [results[pair.name] for pair in changed]
    return {"recorded_with": facts(), "pairs": dict(zip((pair.name for pair in chosen), entries, strict=True))}


@pytest.mark.usefixtures("one_thread")
def test_sample_equals_the_record(recorded_sample: dict[str, Any]) -> None:
    assert record.differences(MODEL, recorded_sample, record_sample(*SAMPLE)) == []


@pytest.mark.usefixtures("one_thread")
def test_record_reports_a_changed_plan_by_field(recorded_sample: dict[str, Any]) -> None:
    name = SAMPLE[0]
    now = record_sample(name, budget="13MiB")
    differences = record.differences(MODEL, {**recorded_sample, "pairs": {name: recorded_sample["pairs"][name]}}, now)
    fields = {difference.field for difference in differences}
    assert {"plan.arena_bytes", "plan.step_seconds", "plan.decisions_digest", "plan.addresses_digest"} <= fields
    assert not fields & {"variant", "smallest_budget", "bits.equal_to", "bits.losses_digest", "bits.state_digest"}
    arena = next(difference for difference in differences if difference.field == "plan.arena_bytes")
    before, after = (content["pairs"][name]["plan"]["arena_bytes"] for content in (recorded_sample, now))
    assert str(arena) == f"gpt: {name}: plan.arena_bytes: {before} → {after}"


def test_record_compares_bits_only_on_the_same_machine(recorded_sample: dict[str, Any]) -> None:
    name = SAMPLE[0]
    entry = recorded_sample["pairs"][name]
    bits = {"equal_to": "nothing", "losses": [], "losses_digest": "", "state_digest": ""}
    now = {**recorded_sample, "pairs": {name: {**entry, "bits": bits}}}
    before = {**recorded_sample, "pairs": {name: entry}}
    assert {d.field for d in record.differences(MODEL, before, now)} == {f"bits.{field}" for field in bits}
    elsewhere = {**now, "recorded_with": {**now["recorded_with"], "cpu_capability": "another"}}
    assert [d.field for d in record.differences(MODEL, before, elsewhere)] == ["bits.equal_to"]


def test_record_reports_added_and_removed_pairs(recorded_sample: dict[str, Any]) -> None:
    before = {**recorded_sample, "pairs": {"old": {}}}
    differences = record.differences(MODEL, before, {**recorded_sample, "pairs": {"new": {}}})
    assert [str(d) for d in differences] == ["gpt: old: pair: recorded → absent", "gpt: new: pair: absent → recorded"]


def test_record_has_a_file_for_each_model() -> None:
    assert {path.stem for path in record.FOLDER.glob("*.json")} == set(GROUPS)
    for model, group in GROUPS.items():
        assert list(record.read_record(model)["pairs"]) == [pair.name for pair in group.pairs]
