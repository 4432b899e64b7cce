"""What the benchmarks share: worker processes that take turns, and the facts that belong to a result."""

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


# The smallest model that trains: its process shows what the interpreter and its libraries take.
TINY = {"batch": 1, "layers": 1, "width": 64, "heads": 1, "context": 32}
# What our process takes beyond its budget, at most.
_SLACK_SHARE, _SLACK_BYTES = 1.02, 64 * MIB


class WorkerError(Exception):
    """A worker could not do what it was told; the message is its own."""


@dataclass(frozen=True)
class Spec:
    """What a worker trains, and how."""

    model: str
    options: Mapping[str, Any]
    mode: str = "eager"  # or another that ``_worker.py`` knows
    budget: int | None = None
    home: str = "disk"
    policy: str = "auto"
    segments: int = 2
    share: float = 1.0
    kernels: str = "eager"


@dataclass
class Worker:
    """A process that runs training steps on demand and otherwise sleeps; a context manager.

    Args:
        name: for the results.
        spec: what it trains.
        preload: a shared library to load before all others.
        limit: seconds that an answer may take before the process is killed; None: any time.
        script: that it runs.

    Raises:
        WorkerError: it could not be set up.
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
        """Run one step and keep what it tells."""
        self.steps.append(self.ask("step"))
        return self.steps[-1]

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            WorkerError: the worker failed.
        """
        if self._process.stdin is None:
            raise WorkerError(f"{self.name}: not started")
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(f"{self.name}: ended early") from error
        return self._answer()

    def close(self) -> None:
        """Let the process end, and wait for that."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()

    def median(self, key: str, skip: int) -> float:
        """The median over all steps but the first ``skip``."""
        return statistics.median(step[key] for step in self.steps[skip:])

    def columns(self) -> dict[str, list[Any]]:
        """What all steps told, by name."""
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
            here = f"{RESULTS.parents[1]}{os.sep}"  # of no use to who reads the result
            raise WorkerError(f"{self.name}: {content['error'].replace(here, '')}")
        return content


def survey(spec: Spec) -> dict[str, Any]:
    """What the workload needs, from a process of its own: ``in_core_budget`` and ``smallest_budget``, in bytes."""
    asked = Spec(spec.model, spec.options, "survey", home=spec.home, kernels=spec.kernels)
    with Worker("survey", asked) as worker:
        return worker.facts


def peak_of(spec: Spec, steps: int) -> int:
    """Bytes of the peak of a process after some steps."""
    with Worker("alone", spec) as worker:
        for _ in range(steps):
            worker.step()
        return worker.ask("report")["peak_rss"]


def budget_below(peak: int) -> int:
    """The budget with which our process stays below so many bytes above the process of a tiny model."""
    return int((peak - _SLACK_BYTES) / _SLACK_SHARE)


def take_turns(workers: Sequence[Worker], rounds: int) -> None:
    """Let each worker run one step, in turn, so often; the one that begins changes from round to round.

    What slows the machine down for a while then slows all of them down alike.
    """
    for number in range(rounds):
        first = number % len(workers)
        for worker in (*workers[first:], *workers[:first]):
            worker.step()
        told = ", ".join(f"{worker.name} {worker.steps[-1]['seconds']:.3f} s" for worker in workers)
        print(f"round {number + 1}/{rounds}: {told}", file=sys.stderr, flush=True)


def round_by_round(seconds: Sequence[float], others: Sequence[float]) -> float:
    """One process's step time over another's: the median of their ratios in the rounds in which they took turns.

    A round in which the machine was slow was slow for both, which a ratio of two medians does not know.
    """
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def console() -> Console:
    """Standard output; wide enough for our tables where it is not a terminal and has no width of its own."""
    return Console(width=None if sys.stdout.isatty() else 120)


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of the zoo from ``name=value`` texts; values are JSON where they can be."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def find_tcmalloc() -> Path | None:
    """The tcmalloc of the system (Debian: libtcmalloc-minimal4), if it is installed."""
    for folder in map(Path, _LIBRARY_FOLDERS):
        found = sorted([*folder.glob(_TCMALLOC), *folder.glob(f"*/{_TCMALLOC}")])
        if found:
            return found[0]
    return None


def circumstances(date: str | None) -> dict[str, Any]:
    """When, by which command and on what machine something was measured; a folder of that machine is not named."""
    given = ["FOLDER" if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return {
        "date": date or datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given]),
        "machine": asdict(this_machine()),
    }


def write_result(name: str, content: Mapping[str, Any], date: str | None, folder: Path = RESULTS) -> Path:
    """Write a result beside the facts about the machine, as ``benchmarks/results/NAME.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**circumstances(date), **content}, indent=1) + "\n", encoding="utf-8")
    return path


def write_model(name: str, model: str, content: Mapping[str, Any], date: str | None) -> Path:
    """Write what was found for one model; what the file holds of others stays, with its date and machine."""
    path = RESULTS / f"{name}.json"
    models: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("models", {}) if path.exists() else {}
    models[model] = {**circumstances(date), **content}
    return write_result(name, {"models": dict(sorted(models.items()))}, date)
