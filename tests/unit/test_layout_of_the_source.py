"""Rules about the source that no linter knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "outofcore"
MODULES = sorted(SOURCE.rglob("*.py"))
PRIVATE = re.compile(
    r"(^|[^\w.\"'`])torch\._(?!_)\w|torch\.fx\.experimental|from torch[\w.]* import _\w|from torch\._|import torch\._"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_private_names_of_torch_stay_in_one_file(path: Path) -> None:
    if path.name == "_torch_internals.py":
        return
    found = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
    assert not found
