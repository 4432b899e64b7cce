"""The visit to a GPU, where there is none: what it says, and that no piece stops another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import gpu_visit


def test_without_a_gpu_it_says_what_it_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_visit, "probe", lambda _: {"torch": "2.13", "gpu": None})
    assert gpu_visit.main(["--only", "d,A", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert "PyTorch 2.13 sees no CUDA device; nothing has been run" in said
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["A", "D"]
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="no piece X"):
        gpu_visit.main(["--only", "X"])


PIECES = """
import json, sys, time
piece = sys.argv[1]
print("@@" + json.dumps({"piece": piece, "say": f"I am {piece}"}), flush=True)
print("to the log")
if piece == "A": sys.exit(1)
if piece == "B": time.sleep(60)
if piece == "C":
    import os; os.abort()
"""


def test_a_piece_that_fails_hangs_or_dies_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "tools").mkdir(parents=True)
    (root / "tools" / "gpu_pieces.py").write_text(PIECES, encoding="utf-8")
    monkeypatch.setattr(gpu_visit, "ROOT", root)
    monkeypatch.setattr(gpu_visit, "PIECES", tuple(gpu_visit.Piece(key, f"does {key}", 6) for key in "ABCD"))
    monkeypatch.setattr(gpu_visit, "probe", lambda _: {"torch": "2.13", "gpu": "a GPU"})
    assert gpu_visit.main(["--out", str(tmp_path / "out")]) == 1
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    ended = {line["piece"]: line["status"] for line in lines if "status" in line}
    assert ended == {"A": "failed", "B": "stopped at its limit", "C": "failed", "D": "passed"}
    assert [line["piece"] for line in lines if "say" in line] == ["A", "B", "C", "D"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) <= 8
    assert (tmp_path / "out" / "A-C.log").read_text(encoding="utf-8").count("to the log") == 3
    assert "ok D passed" in capsys.readouterr().out


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    log = gpu_visit.Log(tmp_path / "log", most=1000)
    for number in range(1000):
        log.write(f"line {number}\n".encode())
    log.close()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert len(text) < 1100
    assert text.startswith("line 0\n")
    assert text.endswith("line 999\n")
    assert "bytes left out" in text


def test_a_summary_fits_on_a_page_with_failures_first() -> None:
    lines = [f"ok {number}" for number in range(60)] + ["!! D failed"]
    found = gpu_visit.summary(lines).splitlines()
    assert len(found) == gpu_visit.SUMMARY_LINES
    assert found[0] == "!! D failed"
