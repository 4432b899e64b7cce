"""How followed loops are recorded, compared and expected, natively: as slow and obvious references have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_checks import build_check, run_check


@pytest.mark.parametrize("part", ["alignment", "extents", "history", "ranking", "record", "requests"])
def test_it_finds_what_an_obvious_way_finds(part: str, tmp_path: Path) -> None:
    assert run_check(build_check(part, tmp_path)) == "ok"
