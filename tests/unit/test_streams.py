"""The order of work on streams of a GPU, with streams that only keep count: nobody comes too early."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_checks import build_check, run_check


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_check("streams", tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize(("how", "found"), [("as-it-is", "ok"), ("no-waits", "too early"), ("no-fences", "too early")])
def test_work_on_memory_comes_after_what_was_done_to_it_before(check: Path, how: str, found: str) -> None:
    assert run_check(check, how) == found


def test_who_uses_what_was_copied_waits_for_that_copy_alone(check: Path) -> None:
    assert run_check(check, "covered") == "op:X next:XY memory:A freed:12"


def test_each_wait_is_for_the_first_event_behind_the_marked_work(check: Path) -> None:
    assert run_check(check, "first-event") == "ok"
