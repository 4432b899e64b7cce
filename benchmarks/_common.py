"""Worker processes that take turns, and the machine facts stored with each result."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from outofcore.report.machine import this_machine
from outofcore.units import MIB

RESULTS = Path(__file__).with_name("results")
_SCRIPT = Path(__file__).with_name("_worker.py")
_TCMALLOC = "libtcmalloc_minimal.so.4"
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib")


# Smallest model that trains: its process measures the memory of the interpreter and its libraries.
TINY = {"batch": 1, "layers": 1, "width": 64, "heads": 1, "context": 32}
# Most that an outofcore process may use beyond its budget.
_SLACK_SHARE, _SLACK_BYTES = 1.02, 64 * MIB


class WorkerError(Exception):
    """A worker process failed; the message is the worker's."""


@dataclass(frozen=True)
class Spec:
    """The workload and settings of one worker."""

    model: str
    options: Mapping[str, Any]
    mode: str = "eager"  # or another mode of ``_worker.py``
    budget: int | None = None
    home: str = "disk"
    policy: str = "auto"
    segments: int = 2
    share: float = 1.0
    kernels: str = "eager"


@dataclass
class Worker:
    """A process that runs training steps on demand; a context manager.

    ``preload`` is a library for ``LD_PRELOAD``, ``limit`` the seconds to wait for an answer before killing the process.
    """

    name: str
    spec: Spec
    preload: Path | None = None
    limit: float | None = None
    script: Path = _SCRIPT
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        env = dict(os.environ)
        if self.preload is not None:
            env["LD_PRELOAD"] = str(self.preload)
        self._process = subprocess.Popen(
            [sys.executable, str(self.script), json.dumps(asdict(self.spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self) -> dict[str, Any]:
        self.steps.append(self.ask("step"))
        return self.steps[-1]

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return its answer; raise WorkerError if the worker fails."""
        if self._process.stdin is None:
            raise WorkerError(f"{self.name}: not started")
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(f"{self.name}: ended early") from error
        return self._answer()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()

    def median(self, key: str, skip: int) -> float:
        """Return the median of a measurement, without the first ``skip`` steps."""
        return statistics.median(step[key] for step in self.steps[skip:])

    def columns(self) -> dict[str, list[Any]]:
        """Return the measurements of all steps as lists by name."""
        return {key: [step[key] for step in self.steps] for key in self.steps[0]}

    def _answer(self) -> dict[str, Any]:
        late = threading.Event()
        timer = threading.Timer(self.limit or 0, lambda: (late.set(), self._process.kill()))
        if self.limit is not None:
            timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout is not None else ""
        finally:
            timer.cancel()
        if late.is_set():
            raise WorkerError(f"{self.name}: no answer within {self.limit:g} s")
        if not line:
            raise WorkerError(f"{self.name}: ended with exit status {self._process.wait()}")
        content = json.loads(line)
        if "error" in content:
            here = f"{RESULTS.parents[1]}{os.sep}"  # a path of this machine
            raise WorkerError(f"{self.name}: {content['error'].replace(here, '')}")
        return content


def survey(spec: Spec) -> dict[str, Any]:
    """Return ``in_core_budget`` and ``smallest_budget`` in bytes, measured in a new process."""
    survey_spec = Spec(spec.model, spec.options, "survey", home=spec.home, kernels=spec.kernels)
    with Worker("survey", survey_spec) as worker:
        return worker.facts


def peak_of(spec: Spec, steps: int) -> int:
    """Return the peak RSS in bytes of a process after ``steps`` steps."""
    with Worker("alone", spec) as worker:
        for _ in range(steps):
            worker.step()
        return worker.ask("report")["peak_rss"]


def budget_below(peak: int) -> int:
    """Return the budget that keeps an outofcore process below ``peak`` bytes above a tiny model's process."""
    return int((peak - _SLACK_BYTES) / _SLACK_SHARE)


def take_turns(workers: Sequence[Worker], rounds: int) -> None:
    """Run ``rounds`` steps in each worker, in rotating turns, so that slowdowns affect all workers alike."""
    for number in range(rounds):
        first = number % len(workers)
        for worker in (*workers[first:], *workers[:first]):
            worker.step()
        progress = ", ".join(f"{worker.name} {worker.steps[-1]['seconds']:.3f} s" for worker in workers)
        print(f"round {number + 1}/{rounds}: {progress}", file=sys.stderr, flush=True)


def round_by_round(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of two processes' step-time ratios by round; slow rounds cancel out."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def console() -> Console:
    """Return a console on standard output, 120 columns wide when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value`` strings into options; values are JSON if they parse, else strings."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def find_tcmalloc() -> Path | None:
    for folder in map(Path, _LIBRARY_FOLDERS):
        matches = sorted([*folder.glob(_TCMALLOC), *folder.glob(f"*/{_TCMALLOC}")])
        if matches:
            return matches[0]
    return None


def circumstances(date: str | None) -> dict[str, Any]:
    """Return the date, command and machine of a measurement, with absolute paths replaced by FOLDER."""
    args = ["FOLDER" if Path(arg).is_absolute() else arg for arg in sys.argv[1:]]
    return {
        "date": date or datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *args]),
        "machine": asdict(this_machine()),
    }


def write_result(name: str, content: Mapping[str, Any], date: str | None, folder: Path = RESULTS) -> Path:
    """Write a result with the machine's facts to ``benchmarks/results/NAME.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**circumstances(date), **content}, indent=1) + "\n", encoding="utf-8")
    return path


def write_model(name: str, model: str, content: Mapping[str, Any], date: str | None) -> Path:
    """Write the result of one model; results of other models in the file keep their date and machine."""
    path = RESULTS / f"{name}.json"
    models: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("models", {}) if path.exists() else {}
    models[model] = {**circumstances(date), **content}
    return write_result(name, {"models": dict(sorted(models.items()))}, date)
