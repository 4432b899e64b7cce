"""Mutation testing: change the sources in one place and check which test fails.

    python tools/mutants.py                          # the tests that each mutant names; exit status 1 for a survivor
    python tools/mutants.py --only NAME,NAME
    python tools/mutants.py --tests suite            # then the whole suite, for survivors
    python tools/mutants.py --check                  # the named tests on the unchanged sources

Each mutant of ``mutant_list.py`` is applied to a copy of the working tree. It is killed if a test fails, if pytest dies
of a signal or of Ctrl-C, or if the time limit ends a hang. It is broken if pytest cannot collect the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parent))

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src", "outofcore")
# Seconds for each test or file that a mutant names, and for the whole suite.
NAMED_LIMIT_S, SUITE_LIMIT_S = 600.0, 4 * 3600.0

# pytest's exit statuses (pytest.ExitCode).
_PASSED, _FAILED, _INTERRUPTED, _NO_TESTS = 0, 1, 2, 5
_SUMMARY = "short test summary info"
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# With -v, pytest prints a test's id when it starts and its outcome when it ends.
_STARTED = re.compile(r"^(\S+::\S.*?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)? *$", re.MULTILINE)
_CTRL_C = re.compile(r"^!+ KeyboardInterrupt !+$", re.MULTILINE)


class Outcome(Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    BROKEN = "broken mutant"


@dataclass(frozen=True)
class Run:
    """One run of pytest; ``status`` is its exit status, minus a signal number, or None after the time limit."""

    status: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Result:
    """The result of one mutant; ``killed_by`` is the first failing test, or the other cause that ended the run."""

    mutant: Mutant
    outcome: Outcome
    killed_by: str
    seconds: float
    tail: str = ""


def judge(run: Run) -> tuple[Outcome, str]:
    """Return the outcome of a pytest run with -v, and the cause that killed the mutant or broke the run."""
    if run.status is None:
        return Outcome.KILLED, f"time limit after {run.seconds:.0f} s in {_unfinished_test(run.output)}"
    if run.status < 0:
        return Outcome.KILLED, f"{signal.Signals(-run.status).name} in {_unfinished_test(run.output)}"
    if run.status in (_PASSED, _NO_TESTS):
        return Outcome.SURVIVED, ""
    if run.status == _FAILED:
        match = _FAILURE.search(run.output.rpartition(_SUMMARY)[2])
        return Outcome.KILLED, match[1] if match else "a failure without a node id"
    # A collection error and Ctrl-C have the same exit status. A mutant may let a test's KeyboardInterrupt escape.
    if run.status == _INTERRUPTED and _CTRL_C.search(run.output):
        return Outcome.KILLED, f"KeyboardInterrupt in {_unfinished_test(run.output)}"
    return Outcome.BROKEN, f"pytest exits with {run.status}"


def _unfinished_test(output: str) -> str:
    started = list(_STARTED.finditer(output))
    return started[-1][1] if started and started[-1][2] is None else "no test"


class Copy:
    """A copy of the working tree in which mutants are applied one at a time; copies share a cache of native builds."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self._cache = cache
        self._process: subprocess.Popen[bytes] | None = None
        for name in _files_of(ROOT):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        # Some tests list files with git.
        for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "--no-verify", "-m", "Copy the working tree")):
            identity = ("-c", "user.name=mutants", "-c", "user.email=mutants@localhost", "-c", "commit.gpgsign=false")
            subprocess.run(["git", *identity, *command], cwd=folder, check=True)

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant, and restore the source at the end."""
        path = self.folder / PACKAGE / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: the text to replace occurs {source.count(mutant.old)} times in {path}")
        try:
            self._write(path, source.replace(mutant.old, mutant.new))
            yield
        finally:
            self._write(path, source)
            # Do not try failing examples of one mutant on the next.
            shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python checks a .pyc file only by source size and mtime in seconds; both may be equal.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, arguments: Sequence[str], limit: float) -> Run:
        """Run pytest on the copy, and kill processes that it leaves running."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "XDG_CACHE_HOME": str(self._cache)}
        command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
        command += ["-p", "no:randomly"]  # the same first failure each time
        started = time.monotonic()
        with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as log:
            process = self._process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(limit)
            finally:
                self.kill()
                process.wait()
                self._process = None
            log.seek(0)
            return Run(status, log.read(), time.monotonic() - started)

    def kill(self) -> None:
        """Kill pytest and its child processes, if it is running."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _files_of(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [name for name in dict.fromkeys(listed.split("\0")) if name and (root / name).is_file()]


def _copy_native_builds(target: Path) -> None:
    """Copy the user's native builds, so that builds of mutants stay out of the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    builds = (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "outofcore"
    (target / builds.name).mkdir(parents=True, mode=0o700)
    for build in builds.glob("*-*"):
        if build.is_dir():
            shutil.copytree(build, target / builds.name / build.name)


def run_mutant(copy: Copy, mutant: Mutant, tests: str, selection: Sequence[str], limits: tuple[float, float]) -> Result:
    """Apply a mutant and run tests until one fails.

    ``tests`` is "named" for the tests that the mutant names; "suite" adds the whole suite. ``limits`` are the seconds
    for each named test and for the suite.
    """
    # Run the names separately: within a run, tests/conftest.py reorders tests.
    phases = [(name, limits[0]) for name in mutant.tests] + ([("tests", limits[1])] if tests != "named" else [])
    seconds = 0.0
    outcome, killed_by, run = Outcome.SURVIVED, "", Run(_PASSED, "", 0.0)
    with copy.with_mutant(mutant):
        for name, limit in phases:
            run = copy.pytest(["-x", *selection, name], limit)
            seconds += run.seconds
            outcome, killed_by = judge(run)
            if outcome is not Outcome.SURVIVED:
                break
    tail = "" if run.status in (_PASSED, _FAILED) else run.output[-2000:]
    return Result(mutant, outcome, killed_by, round(seconds, 1), tail)


def run_mutants(
    mutants: Sequence[Mutant], tests: str, selection: Sequence[str], limits: tuple[float, float], jobs: int
) -> Iterator[Result]:
    """Test mutants on ``jobs`` copies; yield results in the order of the mutants."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        _copy_native_builds(Path(folder, "cache"))
        all_copies = [Copy(Path(folder, f"copy-{number}"), Path(folder, "cache")) for number in range(jobs)]
        copies: SimpleQueue[Copy] = SimpleQueue()
        for copy in all_copies:
            copies.put(copy)
        stopped = threading.Event()

        def test(mutant: Mutant) -> Result | None:
            if stopped.is_set():
                return None
            copy = copies.get()
            try:
                return run_mutant(copy, mutant, tests, selection, limits)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                yield from (result for result in pool.map(test, mutants) if result is not None)
            finally:
                stopped.set()
                for copy in all_copies:
                    copy.kill()


def check(mutants: Sequence[Mutant], selection: Sequence[str]) -> int:
    """Run the named tests of all mutants on the unchanged sources; return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        _copy_native_builds(Path(folder, "cache"))
        copy = Copy(Path(folder, "copy"), Path(folder, "cache"))
        # pytest runs a test twice if both the test and its file are named.
        names = dict.fromkeys(name for mutant in mutants for name in mutant.tests)
        names = [name for name in names if "::" not in name or name.split("::")[0] not in names]
        run = copy.pytest([*selection, *names], SUITE_LIMIT_S)
    print(run.output[-4000:])
    return 1 if run.status is None else abs(run.status)


def format_table(results: Iterable[Result]) -> str:
    """Return the results as a text table, broken mutants and survivors first."""
    rows = [("name", "file", "breaks", "killed by", "seconds")]
    order = (Outcome.BROKEN, Outcome.SURVIVED, Outcome.KILLED)
    for result in sorted(results, key=lambda result: order.index(result.outcome)):
        mutant = result.mutant
        killed_by = result.killed_by if result.outcome is Outcome.KILLED else result.outcome.value.upper()
        rows.append((mutant.name, mutant.file, mutant.breaks, killed_by, f"{result.seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def write_results(path: Path, results: Iterable[Result]) -> None:
    entries = [
        {
            **{key: value for key, value in asdict(result.mutant).items() if key not in {"old", "new"}},
            "outcome": result.outcome.value,
            "killed_by": result.killed_by,
            "seconds": result.seconds,
            "tail": result.tail,
        }
        for result in results
    ]
    counts = {"mutants": len(entries), "killed": sum(entry["outcome"] == Outcome.KILLED.value for entry in entries)}
    path.write_text(json.dumps({"counts": counts, "mutants": entries}, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change the sources in one place, and check which test fails.")
    parser.add_argument("--only", default="", metavar="NAME,...", help="mutants to test (default: all)")
    parser.add_argument("--tests", choices=("named", "suite"), default="named", help="tests to run (default: named)")
    parser.add_argument("--exhaustive", action="store_true", help="also run exhaustive tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested concurrently (default: 1)")
    parser.add_argument(
        "--limit", type=float, default=NAMED_LIMIT_S, help="seconds for each named test or file (default: 600)"
    )
    parser.add_argument(
        "--suite-limit", type=float, default=SUITE_LIMIT_S, help="seconds for the whole suite (default: 14400)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--check", action="store_true", help="run the named tests without any mutant")
    options = parser.parse_args(arguments)
    chosen_names = [name for name in options.only.split(",") if name]
    unknown = set(chosen_names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"unknown mutant {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in MUTANTS if not chosen_names or mutant.name in chosen_names]
    selection = ("--exhaustive",) if options.exhaustive else ()
    if options.check:
        return check(mutants, selection)
    results: list[Result] = []
    limits = (options.limit, options.suite_limit)
    for result in run_mutants(mutants, options.tests, selection, limits, options.jobs):
        results.append(result)
        print(f"{result.mutant.name}: {result.outcome.value} {result.killed_by} ({result.seconds:.0f} s)", flush=True)
        if options.out:
            write_results(options.out, results)
    print("\n" + format_table(results))
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    print("\n" + ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items()))
    return 0 if counts[Outcome.KILLED] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
