"""Phrases and names that are hard to read: their counts may only fall (tools/plain_english.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import plain_english as tool


def kinds_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> list[str]:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")
    return sorted(finding.kind for finding in tool.inspected(path))


def test_no_count_exceeds_its_limit() -> None:
    limits = json.loads(tool.LIMITS.read_text(encoding="utf-8"))
    assert tool.exceeded(tool.counts(), limits) == []


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ('"""Return what leaves."""', ["relative clause as a noun"]),
        ('"""Return `what` leaves."""', []),
        ('"""What is evicted in an eager loop?"""', []),
        ("x = 1  # nobody tells it", ["a program that tells", "negated noun"]),
        ('raise ValueError("the bytes shall be read anew")', ["duty", "particle"]),
        ("found = 1", ["value named by a pronoun or participle"]),
        ("def settled() -> None: ...", ["function named by a participle"]),
        ("@property\ndef settled(self): ...", []),
        ("def test_what_leaves(): ...", ["test name with a relative clause"]),
        (f"def test_{'a' * 66}(): ...", ["test name too long"]),
        (f'"""{"Word " * 26}."""', ["sentence of more than 25 words"]),
    ],
)
def test_python_is_inspected(source: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds_in(tmp_path, monkeypatch, "module.py", source + "\n") == kinds


def test_native_code_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '// what leaves\nint found = 1;  // so many\nfail("those that are left");\n'
    assert kinds_in(tmp_path, monkeypatch, "file.h", source) == [
        "particle",
        "relative clause as a noun",
        "relative clause as a noun",
    ]


def test_blocks_of_code_in_pages_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "```\nwhat leaves\n```\n\n    so many\n\nso many\n"
    assert kinds_in(tmp_path, monkeypatch, "page.md", source) == ["particle"]


def test_limits_only_fall() -> None:
    limits = {"src": {"duty": 3}}
    assert tool.exceeded({"src": {"duty": 3}}, limits) == []
    assert tool.exceeded({"src": {"duty": 4}}, limits) == ["src: duty: 4, limit 3"]
    assert tool.exceeded({"docs": {"particle": 1}}, limits) == ["docs: particle: 1, limit 0"]
