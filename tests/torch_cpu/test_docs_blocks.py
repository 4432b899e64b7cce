"""The Python blocks of the README and of the docs run as they stand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_tool() -> object:
    spec = importlib.util.spec_from_file_location("readme_blocks", ROOT / "tools" / "readme_blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
WITH_BLOCKS = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def test_there_are_blocks_to_run() -> None:
    assert len(WITH_BLOCKS) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in page.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = TOOL.run_blocks(page)  # type: ignore[attr-defined]
    assert ran > 0 or page not in WITH_BLOCKS
