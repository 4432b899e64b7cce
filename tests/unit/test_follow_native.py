"""Tests of the native recording of eager loops, each against a slow reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_checks import build_check, run_check


@pytest.mark.parametrize("part", ["alignment", "extents", "history", "ranking", "record", "requests"])
def test_native_code_matches_slow_reference(part: str, tmp_path: Path) -> None:
    assert run_check(build_check(part, tmp_path)) == "ok"
