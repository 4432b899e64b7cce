"""Tests of the GPU visit without a GPU: its order, its deadlines and its files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import gpu_pieces
import gpu_visit
from gpu_visit import Measurement, Part

WORKER = """
import json, os, sys, time
def tell(**result): print("@@" + json.dumps(result), flush=True)
for name in [name for name in sys.argv[1:] if name != "--small"]:
    print(f"log of {name} in {os.getpid()}", flush=True)
    if name == "hangs":
        tell(measurement=name, rows=3)
        time.sleep(600)
    if name == "dies": os._exit(7)
    if name == "fails":
        tell(measurement=name, passed=False, error="WrongBitsError", detail="other bits")
        sys.exit(1)
    if name == "blocked" and "CUDA_LAUNCH_BLOCKING" not in os.environ:
        tell(measurement=name, passed=False, error="WrongBitsError", detail="other bits")
        sys.exit(1)
    if name == "over":
        tell(measurement=name, passed=False, error="OverBudgetError", detail="too much")
        sys.exit(1)
    if name == "many":
        for number in range(100): tell(measurement="many", passed=number % 10 != 0, seconds=0.0, say="x" * 500)
        sys.exit(0)
    job = {"job": "a job", "mode": name.partition(": ")[2], "seconds_a_step": 2.0 if "ours" in name else 1.0}
    tell(measurement=name, passed=True, say=f"I am {name}", pid=os.getpid(), **(job if ": " in name else {}))
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "gpu_pieces.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(gpu_visit, "ROOT", folder)
    monkeypatch.setattr(gpu_visit, "_DUMP_S", 0.5)
    monkeypatch.setattr(gpu_visit, "probe", lambda *_: {"torch": "2.13", "gpu": "a GPU"})
    return folder


def measurements(*names: str, limit: float = 20, alone: bool = False) -> tuple[Measurement, ...]:
    return tuple(Measurement(name, limit, alone) for name in names)


def visit(monkeypatch: pytest.MonkeyPatch, out: Path, parts: list[Part], *arguments: str) -> tuple[int, list[Any]]:
    monkeypatch.setattr(gpu_visit, "PARTS", tuple(parts))
    numbers = ",".join(str(part.number) for part in parts if part.number != gpu_visit.SUSPECTS)
    status = gpu_visit.main(["--out", str(out), "--parts", numbers, *arguments])
    return status, [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_measurement_of_the_visit_exists() -> None:
    for part in gpu_visit.PARTS:
        for measurement in part.measurements:
            gpu_pieces.find_measurement(measurement.name)


def test_parts_fit_the_calls_of_a_visit() -> None:
    seconds = {part.number: part.seconds for part in gpu_visit.PARTS}
    assert list(seconds) == list(range(1, 13))
    assert sum(seconds[number] for number in range(1, 9)) <= 540
    assert sum(seconds[number] for number in range(9, 12)) <= 240


def test_rows_measure_ours_before_plain_before_rivals() -> None:
    names = [measurement.name for part in gpu_visit.PARTS for measurement in part.measurements]
    for number in (1, 3, 4):
        modes = [name.partition(": ")[2] for name in names if name.startswith(f"row {number}: ")]
        assert modes == ["ours", "plain", "checkpoint"][: len(modes)]


def test_parts_are_chosen_by_number_and_range() -> None:
    assert [part.number for part in gpu_visit.choose_parts("1-8")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [part.number for part in gpu_visit.choose_parts("9-11,3")] == [3, 9, 10, 11]
    for wrong in ("13", "0-3", "x", ""):
        with pytest.raises(SystemExit, match="part"):
            gpu_visit.choose_parts(wrong)


def test_visit_without_a_gpu_prints_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_visit, "probe", lambda *_: {"torch": "2.13", "gpu": None})
    assert gpu_visit.main(["--parts", "3,5", "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().out
    assert "PyTorch 2.13 sees no CUDA device; nothing has been run" in output
    assert [line.split()[0] for line in output.splitlines() if line[:2].strip().isdigit()] == ["3", "5"]
    assert not (tmp_path / "out").exists()


def test_failing_measurements_do_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    part = Part(1, "all", 60, (*measurements("one", "fails", "two", "dies", "three"), Measurement("hangs", 1.5)))
    next_part = Part(2, "more", 60, measurements("four"))
    begin = time.monotonic()
    status, results = visit(monkeypatch, tmp_path / "out", [part, next_part])
    assert status == 1
    assert time.monotonic() - begin < 30
    ended = [(result["measurement"], result["passed"]) for result in results if "passed" in result]
    assert ended == [
        *(("one", True), ("fails", False), ("two", True), ("dies", False), ("three", True), ("hangs", False)),
        ("four", True),
    ]
    assert [result["error"] for result in results if not result.get("passed", True)][1] == "died, exit status 7"
    assert "stopped after" in next(
        result["error"] for result in results if result.get("measurement") == "hangs" and "error" in result
    )
    assert any(result.get("rows") == 3 for result in results)  # the results before the kill
    log = (tmp_path / "out" / "parts-1-2.log").read_text(encoding="utf-8")
    assert "Fatal Python error: Aborted" in log  # the traceback of the hang
    summary = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    assert "!! 1 fails: WrongBitsError: other bits" in summary
    assert "!! 1 dies" in summary
    assert summary.count("!! 1 hangs") == 2  # once after its part, once at the end


def test_measurements_share_a_process_unless_isolated(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    part = Part(1, "all", 60, (*measurements("one", "two"), *measurements("three", "four", alone=True)))
    _, results = visit(monkeypatch, tmp_path / "out", [part])
    one, two, three, four = (result["pid"] for result in results if "pid" in result)
    assert one == two
    assert len({one, three, four}) == 3


def test_only_wheels_of_missing_packages_are_unpacked(tmp_path: Path) -> None:
    for name, package in (("a", "json"), ("b", "nobody_has_this")):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{package}/__init__.py", "")
            wheel.writestr(f"{package}-1.dist-info/METADATA", "")
    assert gpu_visit.unpack_missing(tmp_path, tmp_path / "site") == ["b.whl"]
    assert (tmp_path / "site" / "nobody_has_this" / "__init__.py").exists()


def test_processes_share_a_writable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert gpu_visit.environment(tmp_path)["XDG_CACHE_HOME"] == str(gpu_visit.ROOT / "build" / "gpu-visit-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert gpu_visit.environment(tmp_path)["XDG_CACHE_HOME"] == "/somewhere"


def test_part_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_visit, "_LEAST_S", 1)
    late = Part(2, "late", 2, (*measurements("hangs", limit=60), *measurements("one")))
    parts = [Part(1, "early", 0.1, ()), late, Part(3, "last", 20, measurements("two"))]
    _, results = visit(monkeypatch, tmp_path / "out", parts)
    ended = {result["measurement"]: result for result in results if "passed" in result}
    assert ended["hangs"]["error"].startswith("stopped after")
    assert ended["one"]["skipped"] == "no time left"
    assert ended["two"]["passed"]


def test_visit_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_visit, "_LEAST_S", 1)
    parts = [Part(number, "a part", 60, measurements("one", "hangs")) for number in (1, 2, 3)]
    begin = time.monotonic()
    status, results = visit(monkeypatch, tmp_path / "out", parts, "--seconds", "3")
    assert status == 1
    assert time.monotonic() - begin < 15
    skipped = [result for result in results if "skipped" in result]
    assert {result["part"] for result in skipped} == {2, 3}


def test_results_are_on_disk_when_the_visit_is_killed(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import sys, pathlib, gpu_visit as v; from gpu_visit import Measurement, Part\n"
        "v.ROOT = pathlib.Path(sys.argv[1]); v.probe = lambda *_: {'gpu': 'a GPU'}\n"
        "v.PARTS = (Part(1, 'p', 60, (Measurement('one', 20), Measurement('hangs', 60))),)\n"
        "v.main(['--out', sys.argv[2], '--parts', '1'])\n"
    )
    tools = Path(__file__).parents[2] / "tools"
    process = subprocess.Popen([sys.executable, "-c", code, str(root), str(out)], cwd=tools)
    try:
        for _ in range(600):
            if (out / "results.jsonl").exists() and "rows" in (out / "results.jsonl").read_text(encoding="utf-8"):
                break
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.get("measurement") for line in lines] == [None, "one", "hangs"]
    log = (out / "parts-1-2.log").read_text(encoding="utf-8")
    assert log.startswith("log of one")
    worker = Path("/proc") / log.splitlines()[0].split()[-1] / "cmdline"
    for _ in range(600):  # the worker ends with the visit
        if not worker.exists() or not worker.read_bytes():
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the visit runs on")


def parts_with_bits(*names: str) -> list[Part]:
    return [
        Part(3, "bits", 60, measurements(*names), bits=True),
        Part(5, "row", 60, measurements("two")),
        Part(gpu_visit.SUSPECTS, "fakes", 60, measurements("three")),
    ]


def test_wrong_bits_are_retried_and_diagnosed_first(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    status, results = visit(monkeypatch, tmp_path / "out", parts_with_bits("one", "blocked"))
    assert status == 1
    ended = [(result["measurement"], result["passed"]) for result in results if "passed" in result]
    assert ended == [("one", True), ("blocked", False), ("blocked", True), ("three", True), ("two", True)]
    summary = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    assert "ok 3 blocked, CUDA_LAUNCH_BLOCKING=1" in summary


def test_exceeded_budget_does_not_delay_the_next_part(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    status, results = visit(monkeypatch, tmp_path / "out", parts_with_bits("over", "one"))
    assert status == 1
    assert [result["measurement"] for result in results if "passed" in result] == ["over", "one", "two"]
    assert "!! 3 over: OverBudgetError: too much" in (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")


def test_part_summary_fits_a_page_with_failures_first(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    visit(monkeypatch, tmp_path / "out", [Part(1, "much", 60, measurements("many"))])
    output = capsys.readouterr().out
    first = output[output.index("== part 1") : output.index("== all parts")].splitlines()
    assert len(first) == gpu_visit.SUMMARY_LINES
    assert all(line.startswith("!! 1 many") for line in first[1:11])
    assert first[-1] == "   ... and 62 lines more in results.jsonl"
    assert max(map(len, first)) <= 200
    assert len(output[output.index("== all parts") :]) < 12_000  # the limit of a command's output


def test_times_are_relative_to_plain_pytorch(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    visit(monkeypatch, tmp_path / "out", [Part(5, "row", 60, measurements("row 3: ours", "row 3: plain", alone=True))])
    assert "a job: of plain PyTorch's step: ours 2.00x" in (tmp_path / "out" / "summary.txt").read_text(
        encoding="utf-8"
    )
    ours = {"passed": True, "job": "j", "mode": "ours", "seconds_a_step": 1.0, "cap": 5, "losses": [1.0, 2.0]}
    plain = {**ours, "mode": "plain", "peak_reserved": 10, "losses": [1.0, 3.0]}
    assert gpu_visit.compare([ours, plain])[0].startswith("!! j: of plain")
    assert "in 0.50 of its memory" in gpu_visit.compare([ours, plain])[0]
    assert gpu_visit.compare([ours]) == []


def test_output_of_a_visit_is_bounded(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    parts = [Part(number, "a part", 60, measurements("one")) for number in range(1, 12)]
    visit(monkeypatch, tmp_path / "out", parts)
    assert len(list((tmp_path / "out").iterdir())) <= 8
    assert 8 * gpu_visit.FILE_BYTES <= 64 << 20
    monkeypatch.setattr(gpu_visit, "FILE_BYTES", 300_000)
    (tmp_path / "small").mkdir()
    small = gpu_visit.Visit(tmp_path / "small", {}, 0)
    for number in range(1000):
        small.record(number=number, text="x" * 10_000)
    small.record(text="x" * 1_000_000, short=1)
    written = (tmp_path / "small" / "results.jsonl").read_text(encoding="utf-8")
    assert len(written) <= 300_000
    assert len(written.splitlines()) > 20


@pytest.mark.parametrize("count", [10, 60, 77, 1000])
def test_log_keeps_its_beginning_and_end(tmp_path: Path, count: int) -> None:
    log = gpu_visit.Log(tmp_path / "log", max_bytes=1000)
    lines = [f"line {number}\n" for number in range(count)]
    written = 0
    for line in lines:
        log.write(line.encode())
        written += len(line)
        assert min(written, 850) <= (tmp_path / "log").stat().st_size <= 1000  # the log is not buffered
    log.close()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert len(text) <= 1000
    whole = "".join(lines)
    if len(whole) <= 900:
        assert text == whole
    else:
        assert text.startswith("line 0\n")
        assert text.endswith(f"line {count - 1}\n")
        assert "bytes left out" in text
        begin, _, end = text.partition("\n[...")
        assert whole.startswith(begin)
        assert whole.endswith(end.partition("...]\n")[2])


def test_log_keeps_the_end_of_an_overlong_line(tmp_path: Path) -> None:
    log = gpu_visit.Log(tmp_path / "log", max_bytes=1000)
    log.write(b"first\n")
    log.write(b"x" * 5000 + b"end\n")
    log.close()
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(b"first\n")
    assert text.endswith(b"xend\n")
    assert len(text) <= 1000


def test_slow_first_import_does_not_end_the_visit(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(gpu_visit, "ROOT", root)
    monkeypatch.setattr(gpu_visit, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(gpu_visit, "_IMPORT_S", 0.5)
    status, results = visit(monkeypatch, tmp_path / "out", [Part(1, "p", 60, measurements("one"))])
    assert status == 0
    assert "was not done in 0 s" in results[0]["probe"]["slow"]
    assert "first import of torch" in capsys.readouterr().out
    monkeypatch.setattr(gpu_visit, "_PROBE", 'print(\'{"torch": "2.13", "gpu": "a GPU", "import_s": 61.5}\')')
    monkeypatch.setattr(gpu_visit, "_IMPORT_S", 60)
    _, results = visit(monkeypatch, tmp_path / "two", [Part(1, "p", 60, measurements("one"))])
    assert results[0]["probe"]["import_s"] == 61.5
