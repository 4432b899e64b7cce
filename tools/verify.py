"""Run other projects' programs unedited, within a budget and by plain Python, and compare them bit for bit.

    python tools/verify.py FOLDER                  # every program whose source is in FOLDER
    python tools/verify.py FOLDER --only nanoGPT,trl --rounds 2

Output except times, exit status and saved files must be equal; for a test suite, the outcome of each test. Prints a
line per program, and writes ``verified.json`` and ``verified.md``. Exits with status 1 if a program differs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from outofcore.report.machine import this_machine
from outofcore.units import format_bytes, parse_bytes

sys.path.insert(0, str(Path(__file__).parent))

from verify_programs import PROGRAMS, Program

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# Masks for differences between runs of the same program: times, and temporary folders.
_MASKS = (
    (re.compile(r" *\d+(\.\d+)?(?= ?(ms|s|sec|seconds)\b)"), " T"),
    (re.compile(r"(?<=ms/batch )\s*\d+(\.\d+)?"), "T"),
    (re.compile(r"(?<=\b(Time|Data)\s)\s*\d+\.\d+ \(\s*\d+\.\d+\)"), "T"),
    (re.compile(r"(?<=\bmfu )-?\d+(\.\d+)?%"), "T"),
    (re.compile(r"(?<=_runtime': ')[\d.]+|(?<=_per_second': ')[\d.]+"), "T"),
    (re.compile(r"/tmp/\S+"), "FOLDER"),
)
_SIZE = r"[\d.]+ [KMGT]?i?B"
_SUMMARY = re.compile(
    rf"^outofcore: .*peak (?P<peak>{_SIZE}) of .*evicted (?P<out>{_SIZE}), fetched (?P<back>{_SIZE})", re.MULTILINE
)


@dataclass(frozen=True)
class Side:
    """One run of a program.

    Attributes:
        status: exit status; None if the run exceeded its time limit.
        output: masked standard output.
        files: digests of saved files.
        peak, out, back: peak, evicted and fetched bytes in the summary of ``outofcore run``.
    """

    seconds: float
    status: int | None
    output: tuple[str, ...] = ()
    outcomes: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    peak: int = 0
    out: int = 0
    back: int = 0
    error: str = ""


def mask(line: str) -> str:
    """Mask times and temporary folders in a line of output.

    >>> mask("iter 5: loss 3.4441, time 17119.93ms, mfu 0.01%")
    'iter 5: loss 3.4441, time Tms, mfu T'
    """
    for pattern, replacement in _MASKS:
        line = pattern.sub(replacement, line)
    return line.rstrip()


def outcomes_of(report: str) -> dict[str, str]:
    """Return the outcome of each test by name, from a JUnit XML report of pytest."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = "+".join(kinds) or "passed"
    return outcomes


def summary_of(error: str) -> tuple[int, int, int]:
    """Return peak, evicted and fetched bytes of the ``outofcore run`` summary; zeros without one."""
    match = _SUMMARY.search(error)
    texts = match.group("peak", "out", "back") if match else ("0 B", "0 B", "0 B")
    peak, out, back = (0 if text == "0 B" else parse_bytes(text) for text in texts)
    return peak, out, back


def difference(plain: Side, other: Side) -> str:
    """Describe the first difference between two runs; empty if they are equal."""
    if other.status is None:
        return f"no end after {other.seconds:.0f} s"
    for number, (line, text) in enumerate(itertools.zip_longest(plain.output, other.output), start=1):
        if line != text:
            return f"line {number}: {line!r} became {text!r}"
    for kind, plain_items, other_items in (
        ("test", plain.outcomes, other.outcomes),
        ("file", plain.files, other.files),
    ):
        for name in sorted({*plain_items, *other_items}):
            if plain_items.get(name) != other_items.get(name):
                return f"{kind} {name}: {plain_items.get(name, 'missing')} became {other_items.get(name, 'missing')}"
    if plain.status != other.status:
        return f"exit status {plain.status} became {other.status}"
    return ""


def failure(program: Program, plain: Side) -> str:
    """Describe why a run by plain Python is not a valid reference; empty if it is."""
    if plain.status is None:
        return f"plain Python did not end in {plain.seconds:.0f} s"
    if program.lines is not None:
        complete = len(plain.output) == program.lines
        return "" if complete else f"plain Python ended after {len(plain.output)} of {program.lines} lines"
    if plain.status not in ((0, 1) if program.is_suite else (0,)):
        return f"plain Python failed with exit status {plain.status}"
    return ""


def missing_requirement(program: Program, folder: Path) -> str:
    """Return the action that a program needs before it can run; empty if it can run."""
    if program.repository and not (folder / program.source / program.folder).is_dir():
        return f"clone github.com/{program.repository} to FOLDER/{program.source}"
    lacking = [name for name in program.packages if importlib.util.find_spec(name) is None]
    return f"install {', '.join(lacking)}" if lacking else ""


def prepare_copy(program: Program, folder: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    if not program.repository:
        place.mkdir()
        return
    shutil.copytree(folder / program.source / program.folder, place, ignore=shutil.ignore_patterns(".git"))
    for target, candidates in program.data.items():
        existing = [folder / candidate for candidate in candidates if (folder / candidate).is_file()]
        if existing and not (place / target).exists():
            shutil.copyfile(existing[0], place / target)
    for command in program.prepare:
        subprocess.run(
            [sys.executable, *command], cwd=place, check=True, capture_output=True, env=_environment(program)
        )


def _environment(program: Program) -> dict[str, str]:
    paths = [*program.search, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **variables, **program.environment}


def run(program: Program, place: Path, budget: str | None, limit: float) -> Side:
    report = place.with_suffix(".xml")
    report.unlink(missing_ok=True)
    tests = [f"--junitxml={report}", "-p", "no:randomly", "-p", "no:cacheprovider"] if program.is_suite else []
    launcher = [] if budget is None else ["-m", "outofcore", "run", "--budget", budget]
    # A background job of a shell ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, *launcher, *program.command, *tests],
            cwd=place, env=_environment(program), stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        deadline = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))  # kills loader workers, too
        deadline.start()
        lines: list[str] = []
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(mask(line))
                if len(lines) == program.lines:
                    process.send_signal(signal.SIGINT)
            status = process.wait()
        finally:
            expired = not deadline.is_alive()
            deadline.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - start
        errors.seek(0)
        error = errors.read()
    peak, out, back = summary_of(error)
    return Side(
        seconds,
        None if expired else status,
        () if program.is_suite else tuple(lines[: program.lines]),
        outcomes_of(report.read_text(encoding="utf-8")) if report.exists() else {},
        {
            str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
            for pattern in program.files
            for path in sorted(place.glob(pattern))
        },
        peak,
        out,
        back,
        error[-2000:],
    )


@dataclass(frozen=True)
class Verification:
    """A row of the table. Times are medians; ``ratio`` is the median over rounds of budgeted over plain time."""

    command: str
    commit: str
    budget: int
    in_core_peak: int
    peak: int
    evicted: int
    fetched: int
    plain_seconds: float
    seconds: float
    ratio: float
    rounds: int
    compared: str
    difference: str
    load: float


def verify(program: Program, folder: Path, rounds: int, limit: float) -> Verification:
    """Run a program in all settings, in turns."""
    commit, load = _commit(folder / program.source) if program.repository else "", os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="outofcore-verify-") as scratch:
        place = Path(scratch) / program.name.replace("/", "-").replace(" ", "-")
        sides: list[Side] = []
        large_budget = f"{this_machine().memory_bytes * 3 // 4}B"
        for budget in (*(None, program.budget) * rounds, large_budget):
            prepare_copy(program, folder, place)
            sides.append(run(program, place, budget, limit))
            if sides[-1].status is None:
                break
    plain, budgeted, in_core = sides[: 2 * rounds : 2], sides[1 : 2 * rounds : 2], sides[2 * rounds :]
    mismatch = failure(program, plain[0]) or next(filter(None, (difference(plain[0], side) for side in sides[1:])), "")
    if mismatch:
        print("\n".join(side.error for side in sides), file=sys.stderr)
    return Verification(
        command=" ".join(Path(part).name if Path(part).is_absolute() else part for part in program.command),
        commit=commit,
        budget=parse_bytes(program.budget),
        in_core_peak=in_core[0].peak if in_core else 0,
        peak=max((side.peak for side in budgeted), default=0),
        evicted=budgeted[-1].out if budgeted else 0,
        fetched=budgeted[-1].back if budgeted else 0,
        plain_seconds=statistics.median(side.seconds for side in plain),
        seconds=statistics.median([side.seconds for side in budgeted] or [0]),
        ratio=statistics.median([b.seconds / a.seconds for a, b in zip(plain, budgeted, strict=False)] or [0]),
        rounds=rounds,
        compared=describe_compared(plain[0]),
        difference=mismatch,
        load=load,
    )


def describe_compared(side: Side) -> str:
    """Describe the compared items: ``12 lines, 2 files``, or ``40 tests: 38 passed, 2 skipped``."""
    if side.outcomes:
        counts = [
            (sum(outcome == kind for outcome in side.outcomes.values()), kind)
            for kind in dict.fromkeys(side.outcomes.values())
        ]
        return f"{len(side.outcomes)} tests: " + ", ".join(f"{count} {kind}" for count, kind in counts)
    files = f", {len(side.files)} file{'s' * (len(side.files) > 1)}" if side.files else ""
    return f"{len(side.output)} lines{files}"


def _commit(checkout: Path) -> str:
    process = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
    )
    return process.stdout.strip()


def line_of(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"{name:<24} {format_bytes(row['in_core_peak']):>9} in core, {format_bytes(row['peak']):>9} of "
        f"{format_bytes(row['budget']):>9}, {row['plain_seconds']:6.1f} s plain, {row['ratio']:5.2f} times that; "
        f"{row['compared']}: {row['difference'] or 'same'}"
    )


def format_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "| program | command | in core → within (budget) | evicted, fetched | time over plain | compared | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        commit = f" at {row['commit']}" if row["commit"] else ""
        lines.append(
            f"| {name}{commit} | `{row['command']}` | {format_bytes(row['in_core_peak'])} → "
            f"{format_bytes(row['peak'])} ({format_bytes(row['budget'])}) "
            f"| {format_bytes(row['evicted'])}, {format_bytes(row['fetched'])} "
            f"| {row['ratio']:.2f} | {row['compared']} | {row['difference'] or 'same'} |"
        )
    return "\n".join(lines) + "\n"


def write_results(rows: Mapping[str, Verification], folder: Path) -> None:
    """Write the results; rows of programs that did not run keep their date and machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "verified.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    circumstances = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": asdict(this_machine()),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "trl", "lightning", "monai", "torchvision", "pytest")
            if importlib.util.find_spec(name)
        },
    }
    results |= {name: asdict(row) | circumstances for name, row in rows.items()}
    results = {program.name: results[program.name] for program in PROGRAMS if program.name in results}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "verified.md").write_text(
        "# Programs of other people, within a budget\n\n"
        "Made by `make verify`; see [the page](../../docs/verified.md).\n\n" + format_table(results),
        encoding="utf-8",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("foreign"),
        help="folder with the cloned repositories (default: foreign)",
    )
    parser.add_argument(
        "--only", default="", help="programs to run: parts of names, separated by commas (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="number of runs in each setting (default: 1)")
    parser.add_argument("--limit", type=float, default=1200, help="time limit of one run in seconds (default: 1200)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    name_parts = [part for part in options.only.split(",") if part]
    rows: dict[str, Verification] = {}
    for program in PROGRAMS:
        if name_parts and not any(part in program.name for part in name_parts):
            continue
        if reason := missing_requirement(program, options.folder):
            print(f"{program.name:<24} skipped: {reason}", flush=True)
            continue
        rows[program.name] = verify(program, options.folder.resolve(), options.rounds, options.limit)
        print(line_of(program.name, asdict(rows[program.name])), flush=True)
        write_results(rows, options.results)
    return int(any(row.difference for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
