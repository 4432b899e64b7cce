"""Visit a machine with a GPU: run everything that needs one, in the order of its worth, within a given time.

    python3 tools/gpu_visit.py --out FOLDER --seconds 540               # parts 1 to 8
    python3 tools/gpu_visit.py --out FOLDER --parts 9-11 --seconds 240  # the rest
    python3 tools/gpu_visit.py --out FOLDER --parts 12 --seconds 240    # compiled kernels

It needs Python, PyTorch's CUDA build and g++, and for missing packages the folder ``.gpu-wheels`` (``make gpu-wheels``
makes it where there is a network). ``PARTS`` below has the parts, their measurements and all deadlines.

Measurements run in processes of ``gpu_pieces.py``, several in a row in one process unless they need a fresh one. A
measurement that exceeds its deadline, fails or dies ends its process; the next one starts in a new process. A part may
take the time that the parts before it left over. After a failure in a part that compares bits, its failed measurements
run again with ``CUDA_LAUNCH_BLOCKING=1``, and the part that looks for the cause comes before all others.

FOLDER receives at most 8 files, of at most 8 MiB each: ``results.jsonl``, one line for each result, written as soon as
the result exists; ``summary.txt``, at most 40 lines for each part; and a log for every two parts.

Exit status: 0, everything passed; 1, something did not; 2, there is no GPU: then it prints what it would do.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".gpu-wheels"
MARK = "@@"  # begins a line of standard output that is a result
FILE_BYTES = 8 << 20
SUMMARY_LINES = 40
_LINE_CHARACTERS = 200  # of a line of the summary
_RESULT_CHARACTERS = 64 << 10
_DUMP_S = 2  # for a process that is aborted to print where it was
_LEAST_S = 5  # nothing useful runs in less
_IMPORT_S = 120


@dataclass(frozen=True)
class Measurement:
    """One thing that is measured.

    Attributes:
        name: its name in ``gpu_pieces.py``.
        limit: in seconds; that of the first measurement of a process includes starting it.
        alone: whether it needs a process of its own.
    """

    name: str
    limit: float
    alone: bool = False


@dataclass(frozen=True)
class Part:
    """Measurements that answer one question.

    Attributes:
        number: by which a part is chosen.
        what: its question, in a few words.
        seconds: what it may take; what is left is for the parts after it.
        measurements: in their order.
        bits: whether it compares bits: if it fails, ``SUSPECTS`` comes next.
    """

    number: int
    what: str
    seconds: float
    measurements: tuple[Measurement, ...]
    bits: bool = False


def _each(limit: float, names: str, *, alone: bool = False) -> tuple[Measurement, ...]:
    return tuple(Measurement(name, limit, alone) for name in names.split("; "))


_LINKS = (
    "tape; arena; cap; copies; issue costs; disk; pin: shared; pin: cudaHostAlloc; pin: private huge; pin: shared huge"
)
_STEPS = (
    "bits: dense, offload-all; bits: gpt, offload-all; bits: gpt, auto; bits: convolutional, offload-all; "
    "bits: dense, offload-all, disk"
)
_LOOPS = (
    "loop: tall at 0.5; loop: tall at 0.5, planned; loop: language at 0.5; loop: language at 0.5, planned; "
    "loop: tall at 0.4; loop: language at 0.4"
)
_HOST = (
    "host: gpt, in core; host: gpt, offloaded; host: gpt, followed; host: gpt, plain; host: resnet50, in core; "
    "host: resnet50, offloaded; host: resnet50, followed; host: resnet50, plain; host: gpt, graphs; "
    "host: resnet50, graphs"
)
_FAKES = (
    "fakes: gpt, autocast; fakes: attention, flash; fakes: attention, cudnn; fakes: attention, efficient; "
    "fakes: resnet, autocast; fakes: channels last, autocast; fakes: gpt, fused; fakes: attention, flash, dropout; "
    "fakes: resnet; fakes: channels last; fakes: attention, math; fakes: convolution 1d, group norm; "
    "fakes: convolution 3d; fakes: unet3d, autocast; fakes: unet3d; fakes: vgg16; fakes: densenet121; fakes: lstm; "
    "fakes: lstm, dropout; fakes: gru, two ways; fakes: attention, efficient, dropout"
)
_KERNELS = (
    "kernels: gpt, plain; kernels: gpt, inductor; kernels: gpt, own; kernels: gpt, inductor graphs; "
    "kernels: gpt, inductor offloaded; kernels: resnet, plain; kernels: resnet, inductor; kernels: resnet, own; "
    "kernels: resnet, inductor graphs"
)
_OTHERS_KERNELS = "kernels: gpt, torch.compile; kernels: resnet, torch.compile"
# Ours comes before plain PyTorch, and both before rivals.
PARTS = (
    Part(1, "the machine and the native code", 80, _each(75, "native code") + _each(25, "machine; host memory")),
    Part(2, "streams, arena and links", 35, _each(15, _LINKS)),
    Part(3, "bits of compiled steps", 85, _each(30, _STEPS), bits=True),
    Part(4, "bits of followed loops", 60, _each(25, _LOOPS), bits=True),
    Part(5, "ResNet-50, batch 640, in 16 GiB", 85, _each(70, "row 3: ours; row 3: plain", alone=True)),
    Part(6, "ViT-giant at 0.41 of its memory", 75, _each(60, "row 1: ours; row 1: plain", alone=True)),
    Part(7, "time of the host", 65, _each(25, _HOST)),
    Part(8, "a followed loop at half of its memory", 55, _each(75, "half: ours; half: plain", alone=True)),
    Part(9, "Qwen3-0.6B shape at 0.69 of its memory", 70, _each(60, "row 4: ours; row 4: plain", alone=True)),
    Part(10, "ResNet-50 at 7.5 times the batch of 16 GiB", 110, _each(110, "row 2: ours", alone=True)),
    Part(
        11,
        "what kernels return, and rivals",
        60,
        _each(20, _FAKES) + _each(60, "row 3: checkpoint; row 1: checkpoint", alone=True),
    ),
    # Compiling takes a second or two for each kernel that Inductor's cache does not have yet.
    Part(
        12,
        "compiled kernels",
        240,
        _each(90, "kernels: gpt, bits")
        + _each(60, _KERNELS)
        + _each(60, _OTHERS_KERNELS, alone=True)
        + _each(60, "kernels: convolutional, bits"),
    ),
)
USUAL = "1-8"
SUSPECTS = 11


def unpack_missing(wheels: Path, folder: Path) -> list[str]:
    """Unpack the wheels whose packages are not installed, and return their names.

    A wheel is an archive of what goes on the path, so neither pip nor a network is needed.
    """
    unpacked: list[str] = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            tops = {name.split("/")[0] for name in archive.namelist()}
            names = {top.removesuffix(".py") for top in tops if not top.endswith((".dist-info", ".data"))}
            if names and all(name.isidentifier() and importlib.util.find_spec(name) is not None for name in names):
                continue
            archive.extractall(folder)
            unpacked.append(wheel.name)
    return unpacked


def environment(site: Path) -> dict[str, str]:
    """Return the environment of a process: the package itself, the wheels, and what makes crashes print a traceback."""
    paths = [str(ROOT / "src"), str(ROOT / "tools"), str(site), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        # What one process builds and measures, the next ones find, wherever the home folder is.
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(ROOT / "build" / "gpu-visit-cache"),
    }


class Log:
    """A file of bounded size that keeps its beginning and its end.

    The end is a ring in the file itself, so a process that is killed leaves both; ``close`` puts it in order.
    """

    def __init__(self, path: Path, most: int = FILE_BYTES) -> None:
        self._half = (most - 100) // 2
        self._file = path.open("w+b", buffering=0)
        self._begun = 0  # bytes of the beginning
        self._ring = 0  # bytes that were written to the ring, the overwritten ones included

    def write(self, line: bytes) -> None:
        """Add a line."""
        if not self._ring and self._begun + len(line) <= self._half:
            self._file.write(line)
            self._begun += len(line)
            return
        self._ring += max(len(line) - self._half, 0)
        line = line[-self._half :]
        while line:
            at = self._ring % self._half
            piece, line = line[: self._half - at], line[self._half - at :]
            self._file.seek(self._begun + at)
            self._file.write(piece)
            self._ring += len(piece)

    def close(self) -> None:
        """Put the end in order."""
        if self._ring > self._half:
            self._file.seek(self._begun)
            ring, at = self._file.read(self._half), self._ring % self._half
            self._file.seek(self._begun)
            self._file.write(f"\n[... {self._ring - self._half} bytes left out ...]\n".encode())
            self._file.write(ring[at:] + ring[:at])
        self._file.close()


@dataclass
class Outcome:
    """How a process ended: its exit status, None where it was killed, its results and the end of its output."""

    status: int | None
    seconds: float
    results: list[dict[str, Any]]
    tail: str


_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def _end_with_parent() -> None:
    """Have this process killed when its parent dies, so that nobody holds the GPU after a visit that was killed."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(
    command: Sequence[str],
    until: Callable[[], float],
    log: Log,
    env: dict[str, str],
    hear: Callable[[dict[str, Any]], None] = lambda result: None,
) -> Outcome:
    """Run a process to its end or its deadline, and kill what it leaves running.

    Args:
        command: what to run.
        until: returns the deadline on the monotonic clock, which may change while the process runs.
        log: receives all output.
        env: the environment.
        hear: is called with each result as it comes.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - it calls one function that is loaded already
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    tail: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            log.write(line)
            text = line.decode(errors="replace").rstrip()
            if text.startswith(MARK):
                with contextlib.suppress(ValueError):
                    results.append(json.loads(text[len(MARK) :]))
                    hear(results[-1])
                    continue
            if text:
                tail.append(text)
                del tail[:-12]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    status: int | None = None
    while True:
        try:
            status = process.wait(min(max(until() - time.monotonic(), 0.01), 0.2))
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until():
                process.send_signal(signal.SIGABRT)  # Python's fault handler prints where it was
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DUMP_S)
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    process.wait()
    reader.join(_DUMP_S)
    return Outcome(status, round(time.monotonic() - begin, 1), results, "\n".join(tail))


_PROBE = """
import json, time
begin, found = time.monotonic(), {}
try:
    import torch
    found["import_s"] = round(time.monotonic() - begin, 1)
    found["torch"] = torch.__version__
    found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def probe(env: dict[str, str], limit: float = _IMPORT_S) -> dict[str, Any]:
    """Return which GPU and PyTorch are here and how long the first import took, asked in a process of its own.

    An image that nobody has read yet may need minutes for that import: this is no reason not to go on.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=env, text=True, capture_output=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"slow": f"the first import of torch was not done in {limit:.0f} s; going on without knowing the GPU"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-500:] or f"exit status {done.returncode}"}


def choose_parts(text: str) -> list[Part]:
    """Return the parts that a text such as "1-8" or "3,5" names, in their order.

    Raises:
        SystemExit: there is no such part.
    """
    numbers: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        try:
            numbers |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise SystemExit(f"gpu-visit: {piece!r} names no parts; write 1-8 or 3,5") from None
    known = {part.number for part in PARTS}
    if not numbers or numbers - known:
        raise SystemExit(f"gpu-visit: there is no part {text}; there are {min(known)} to {max(known)}")
    return [part for part in PARTS if part.number in numbers]


def describe(parts: Iterable[Part]) -> str:
    """Return what would be done, in words."""
    lines: list[str] = []
    for part in parts:
        lines.append(f"{part.number:2}  {part.what}, {part.seconds:.0f} s")
        lines += [f"      {one.name} (at most {one.limit:.0f} s)" for one in part.measurements]
    return "\n".join(["gpu-visit would do, on a machine with a GPU:", *lines])


def page(lines: Sequence[str], most: int = SUMMARY_LINES) -> list[str]:
    """Return at most so many lines, failures before the rest."""
    bad = [line[:_LINE_CHARACTERS] for line in lines if line.startswith("!!")]
    good = [line[:_LINE_CHARACTERS] for line in lines if not line.startswith("!!")]
    kept = [*bad, *good][:most]
    if len(lines) > most:
        kept[-1] = f"   ... and {len(lines) - most + 1} lines more in results.jsonl"
    return kept


def compare(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each job that ran in several ways: their times as shares of plain PyTorch's."""
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    for one in results:
        if one.get("passed") and "job" in one and "seconds_a_step" in one:
            jobs.setdefault(one["job"], {})[one["mode"]] = one
    lines: list[str] = []
    for job, ways in jobs.items():
        plain = ways.pop("plain", None)
        if plain is None or not ways:
            continue
        told: list[str] = []
        for mode, way in ways.items():
            text = f"{mode} {way['seconds_a_step'] / plain['seconds_a_step']:.2f}x"
            if "host_s" in way and plain.get("host_s"):
                text += f" (host {way['host_s'] / plain['host_s']:.2f}x)"
            if way.get("cap") and plain.get("peak_reserved"):
                text += f" in {way['cap'] / plain['peak_reserved']:.2f} of its memory"
            if way.get("foretold_share"):
                text += f" (beforehand {way['foretold_share']:.2f}x)"
            pairs = zip(way.get("losses", ()), plain.get("losses", ()), strict=False)
            if any(abs(a - b) > 0.01 * abs(b) for a, b in pairs):
                text += " WITH OTHER LOSSES"
            told.append(text)
        line = f"{job}: of plain PyTorch's step: {', '.join(told)}"
        lines.append(f"!! {line}" if "WITH OTHER LOSSES" in line else f"   {line}")
    return lines


@dataclass
class Visit:
    """Runs parts, and writes what comes of them."""

    out: Path
    env: dict[str, str]
    end: float  # on the monotonic clock
    patience: float = 1
    small: bool = False
    begin: float = field(default_factory=time.monotonic)
    results: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of all parts
    _written: int = 0
    _logs: dict[int, Log] = field(default_factory=dict)

    def tell(self, **result: Any) -> None:
        """Write a result."""
        result = {"at_s": round(time.monotonic() - self.begin, 1), **result}
        self.results.append(result)
        text = json.dumps(result, default=str)
        if len(text) > _RESULT_CHARACTERS:
            text = json.dumps({**{k: v for k, v in result.items() if len(str(v)) < 2000}, "shortened": len(text)})
        self._written += len(text) + 1
        if self._written <= FILE_BYTES:
            with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def print_summary(self, title: str, lines: Sequence[str]) -> None:
        """Print and write at most ``SUMMARY_LINES`` lines."""
        text = "\n".join([title, *page(lines, SUMMARY_LINES - 1)])
        print(text, flush=True)
        with (self.out / "summary.txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def run_all(self, parts: Sequence[Part]) -> bool:
        """Run parts one after the other; returns whether everything passed."""
        todo, due, done = list(parts), time.monotonic(), set[int]()
        while todo:
            part = todo.pop(0)
            done.add(part.number)
            due = min(due + part.seconds * self.patience, self.end)
            failed = self.run_part(part, part.measurements, due)
            if part.bits and failed:
                again = [one for one in part.measurements if one.name in failed]
                self.run_part(part, again, due, CUDA_LAUNCH_BLOCKING="1")
                suspects = [one for one in PARTS if one.number == SUSPECTS and one.number not in done]
                todo = [*suspects, *(one for one in todo if one.number != SUSPECTS)]
        passed = all(one["passed"] for one in self.results if "passed" in one)
        self.print_summary(f"== all parts, {time.monotonic() - self.begin:.0f} s", self.lines)
        return passed

    def run_part(self, part: Part, measurements: Sequence[Measurement], due: float, **env: str) -> set[str]:
        """Run measurements of a part until a deadline; returns the names of those that failed, but for memory alone."""
        begin, first = time.monotonic(), len(self.results)
        todo = list(measurements)
        while todo and due - time.monotonic() >= _LEAST_S:
            shared = next((n for n, one in enumerate(todo) if one.alone), len(todo))
            group = todo[: max(shared, 1)]
            todo = todo[self._run_group(part, group, due, env) :]
        for one in todo if not env else ():
            self.tell(part=part.number, measurement=one.name, skipped="no time left", passed=False)
        lines: list[str] = []
        found = self.results[first:]
        for result in found:
            if "passed" in result:
                lines.append(_line(result, env))
        lines += compare(found)
        title = f"== part {part.number}: {part.what}{', again with ' + ' '.join(env) if env else ''}"
        self.print_summary(f"{title}, {time.monotonic() - begin:.0f} s", lines)
        self.lines += lines
        # A budget that is exceeded is told, and leaves the cause of wrong bits nothing to explain.
        return {
            one["measurement"]
            for one in found
            if not one.get("passed", True) and "skipped" not in one and one.get("error") != "OverBudgetError"
        }

    def _run_group(self, part: Part, group: Sequence[Measurement], due: float, env: dict[str, str]) -> int:
        """Run measurements in one process until one of them fails; returns how many are done with."""
        ended = 0
        began = time.monotonic()

        def until() -> float:
            limit = group[min(ended, len(group) - 1)].limit
            return min(began + limit * self.patience, due)

        def hear(result: dict[str, Any]) -> None:
            nonlocal ended, began
            self.tell(part=part.number, **result, **env)
            if "passed" in result:
                ended, began = ended + 1, time.monotonic()

        command = [sys.executable, "-u", str(ROOT / "tools" / "gpu_pieces.py"), *(["--small"] if self.small else [])]
        outcome = run([*command, *(one.name for one in group)], until, self._log(part), {**self.env, **env}, hear)
        if ended < len(group) and not (ended and not outcome.results[-1].get("passed", True)):
            seconds = time.monotonic() - began
            how = f"stopped after {seconds:.0f} s" if outcome.status is None else f"died, exit status {outcome.status}"
            name = group[ended].name
            self.tell(
                part=part.number, measurement=name, passed=False, seconds=round(seconds, 1), error=how,
                tail=outcome.tail[-3000:], **env,
            )  # fmt: skip
            ended += 1
        return ended

    def _log(self, part: Part) -> Log:
        number = (part.number + 1) // 2
        if number not in self._logs:
            self._logs[number] = Log(self.out / f"parts-{2 * number - 1}-{2 * number}.log")
        return self._logs[number]

    def close(self) -> None:
        """Put the logs in order."""
        for log in self._logs.values():
            log.close()


def _line(result: dict[str, Any], env: dict[str, str]) -> str:
    """Return a result in words."""
    told = result.get("say") or result.get("skipped") or result.get("error") or ""
    if result.get("detail"):
        told = f"{told}: {str(result['detail']).splitlines()[0]}"
    again = f", {' '.join(f'{k}={v}' for k, v in env.items())}" if env else ""
    seconds = f" ({result['seconds']:.1f} s)" if "seconds" in result else ""
    return f"{'ok' if result['passed'] else '!!'} {result['part']} {result['measurement']}{again}{seconds}: {told}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-visit", help="folder for results and logs")
    parser.add_argument("--parts", default=USUAL, help="such as 9-11 or 3,5; by default %(default)s")
    parser.add_argument("--seconds", type=float, default=0, help="for everything; 0, the default: the sum of the parts")
    parser.add_argument("--patience", type=float, default=1, help="factor of all deadlines, for a slow machine")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to rehearse the visit")
    given = parser.parse_args(arguments)
    begin = time.monotonic()
    parts = choose_parts(given.parts)
    # A process that is aborted holds gigabytes: nobody is to write them to a disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="gpu-visit-") as folder:
        site = Path(folder)
        unpacked = unpack_missing(WHEELS, site) if WHEELS.is_dir() else []
        env = environment(site)
        there = probe(env, min(_IMPORT_S, given.seconds / 2) if given.seconds else _IMPORT_S)
        if not there.get("gpu") and "slow" not in there:
            why = there.get("error") or f"PyTorch {there['torch']} sees no CUDA device"
            print(f"gpu-visit: {why}; nothing has been run.\n{describe(parts)}", flush=True)
            return 2
        given.out.mkdir(parents=True, exist_ok=True)
        end = begin + given.seconds if given.seconds else float("inf")
        visit = Visit(given.out, env, end, given.patience, given.small, begin)
        visit.tell(probe=there, unpacked=unpacked, parts=[part.number for part in parts])
        print(f"gpu-visit: {there.get('slow') or there}", flush=True)
        try:
            return 0 if visit.run_all(parts) else 1
        finally:
            visit.close()


if __name__ == "__main__":
    sys.exit(main())
