"""Tests of the order of work on GPU streams, with streams that only count."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_checks import build_check, run_check


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_check("streams", tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize(
    ("mode", "outcome"), [("as-it-is", "ok"), ("no-waits", "too early"), ("no-fences", "too early")]
)
def test_memory_is_reused_only_after_its_earlier_work(check: Path, mode: str, outcome: str) -> None:
    assert run_check(check, mode) == outcome


def test_op_waits_only_for_the_copies_of_its_inputs(check: Path) -> None:
    assert run_check(check, "covered") == "op:X next:XY memory:A freed:12"


def test_wait_is_for_the_first_event_after_the_marked_work(check: Path) -> None:
    assert run_check(check, "first-event") == "ok"
