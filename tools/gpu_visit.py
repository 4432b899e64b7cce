"""Visit a GPU machine: run all GPU measurements, most valuable first, within a time limit.

    python3 tools/gpu_visit.py --out FOLDER --seconds 540               # parts 1 to 8
    python3 tools/gpu_visit.py --out FOLDER --parts 9-11 --seconds 240  # remaining parts
    python3 tools/gpu_visit.py --out FOLDER --parts 12 --seconds 240    # compiled kernels

Needs Python, PyTorch's CUDA build and g++; missing packages come from ``.gpu-wheels`` (``make gpu-wheels``). A
measurement that exceeds its deadline, fails or dies ends its process of ``gpu_pieces.py``. After wrong bits, the failed
measurements run again with ``CUDA_LAUNCH_BLOCKING=1``. FOLDER receives at most 8 files of at most 8 MiB each:
``results.jsonl``, ``summary.txt`` and logs.

Exit status: 0: all passed; 1: a failure; 2: no GPU, and the program only prints its plan.
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
MARK = "@@"  # prefix of result lines on standard output
FILE_BYTES = 8 << 20
SUMMARY_LINES = 40
_LINE_CHARACTERS = 200  # per line of the summary
_RESULT_CHARACTERS = 64 << 10
_DUMP_S = 2  # for an aborted process to print its stack
_LEAST_S = 5  # minimum for a useful measurement
_IMPORT_S = 120


@dataclass(frozen=True)
class Measurement:
    """One measurement of ``gpu_pieces.py``; ``limit`` in seconds includes the start of its process."""

    name: str
    limit: float
    alone: bool = False


@dataclass(frozen=True)
class Part:
    """Measurements that answer one question.

    ``seconds`` is a time limit; later parts may use the time left. A part with ``bits`` compares bits; after a failure,
    ``SUSPECTS`` runs next.
    """

    number: int
    what: str
    seconds: float
    measurements: tuple[Measurement, ...]
    bits: bool = False


def _measurements(limit: float, names: str, *, alone: bool = False) -> tuple[Measurement, ...]:
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
# Ours runs before plain PyTorch, and both before rivals.
PARTS = (
    Part(
        1,
        "the machine and the native code",
        80,
        _measurements(75, "native code") + _measurements(25, "machine; host memory"),
    ),
    Part(2, "streams, arena and links", 35, _measurements(15, _LINKS)),
    Part(3, "bits of compiled steps", 85, _measurements(30, _STEPS), bits=True),
    Part(4, "bits of eager loops", 60, _measurements(25, _LOOPS), bits=True),
    Part(5, "ResNet-50, batch 640, in 16 GiB", 85, _measurements(70, "row 3: ours; row 3: plain", alone=True)),
    Part(6, "ViT-giant at 0.41 of its memory", 75, _measurements(60, "row 1: ours; row 1: plain", alone=True)),
    Part(7, "host time", 65, _measurements(25, _HOST)),
    Part(8, "an eager loop at half of its memory", 55, _measurements(75, "half: ours; half: plain", alone=True)),
    Part(9, "Qwen3-0.6B shape at 0.69 of its memory", 70, _measurements(60, "row 4: ours; row 4: plain", alone=True)),
    Part(10, "ResNet-50 at 7.5 times the batch of 16 GiB", 110, _measurements(110, "row 2: ours", alone=True)),
    Part(
        11,
        "results of kernels, and rivals",
        60,
        _measurements(20, _FAKES) + _measurements(60, "row 3: checkpoint; row 1: checkpoint", alone=True),
    ),
    # Each kernel that is missing in Inductor's cache takes a second or two to compile.
    Part(
        12,
        "compiled kernels",
        240,
        _measurements(90, "kernels: gpt, bits")
        + _measurements(60, _KERNELS)
        + _measurements(60, _OTHERS_KERNELS, alone=True)
        + _measurements(60, "kernels: convolutional, bits"),
    ),
)
USUAL = "1-8"
SUSPECTS = 11


def unpack_missing(wheels: Path, folder: Path) -> list[str]:
    """Unpack wheels whose packages are not installed, without pip and network, and return their names."""
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
    """Return the environment of a process: import paths, and settings that print tracebacks of crashes."""
    paths = [str(ROOT / "src"), str(ROOT / "tools"), str(site), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        # Later processes reuse builds and measurements of earlier ones, wherever the home folder is.
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(ROOT / "build" / "gpu-visit-cache"),
    }


class Log:
    """A file of bounded size that keeps its beginning and end; the end is a ring until ``close``."""

    def __init__(self, path: Path, max_bytes: int = FILE_BYTES) -> None:
        self._half = (max_bytes - 100) // 2
        self._file = path.open("w+b", buffering=0)
        self._begun = 0  # bytes kept from the beginning
        self._ring = 0  # bytes written to the ring, overwritten ones included

    def write(self, line: bytes) -> None:
        if not self._ring and self._begun + len(line) <= self._half:
            self._file.write(line)
            self._begun += len(line)
            return
        self._ring += max(len(line) - self._half, 0)
        line = line[-self._half :]
        while line:
            offset = self._ring % self._half
            piece, line = line[: self._half - offset], line[self._half - offset :]
            self._file.seek(self._begun + offset)
            self._file.write(piece)
            self._ring += len(piece)

    def close(self) -> None:
        if self._ring > self._half:
            self._file.seek(self._begun)
            ring, offset = self._file.read(self._half), self._ring % self._half
            self._file.seek(self._begun)
            self._file.write(f"\n[... {self._ring - self._half} bytes left out ...]\n".encode())
            self._file.write(ring[offset:] + ring[:offset])
        self._file.close()


@dataclass
class Outcome:
    """The end of a process: exit status (None if killed), results and the last output."""

    status: int | None
    seconds: float
    results: list[dict[str, Any]]
    tail: str


_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that it releases the GPU."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(
    command: Sequence[str],
    until: Callable[[], float],
    log: Log,
    env: dict[str, str],
    on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> Outcome:
    """Run a process until it ends or its deadline passes, and kill its descendants.

    ``until`` returns the deadline on the monotonic clock, which may change during the run. ``on_result`` is called with
    each result.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - calls an already loaded function
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
                    on_result(results[-1])
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
                process.send_signal(signal.SIGABRT)  # Python's fault handler prints the stack
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DUMP_S)
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process leads its session
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
    """Return the GPU, the PyTorch version and the first import's seconds; a slow import is not an error."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", _PROBE], env=env, text=True, capture_output=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {
            "slow": f"the first import of torch was not done in {limit:.0f} s; continuing without checking for a GPU"
        }
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    return (
        json.loads(lines[-1])
        if lines
        else {"error": process.stderr.strip()[-500:] or f"exit status {process.returncode}"}
    )


def choose_parts(text: str) -> list[Part]:
    """Return the parts that a text such as "1-8" or "3,5" names, in order."""
    numbers: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        try:
            numbers |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise SystemExit(f"gpu-visit: {piece!r} names no parts; write 1-8 or 3,5") from None
    available = {part.number for part in PARTS}
    if not numbers or numbers - available:
        raise SystemExit(f"gpu-visit: there is no part {text}; there are {min(available)} to {max(available)}")
    return [part for part in PARTS if part.number in numbers]


def describe(parts: Iterable[Part]) -> str:
    lines: list[str] = []
    for part in parts:
        lines.append(f"{part.number:2}  {part.what}, {part.seconds:.0f} s")
        lines += [f"      {measurement.name} (at most {measurement.limit:.0f} s)" for measurement in part.measurements]
    return "\n".join(["gpu-visit would do, on a machine with a GPU:", *lines])


def page(lines: Sequence[str], max_lines: int = SUMMARY_LINES) -> list[str]:
    """Return at most ``max_lines`` lines, failures first."""
    bad = [line[:_LINE_CHARACTERS] for line in lines if line.startswith("!!")]
    good = [line[:_LINE_CHARACTERS] for line in lines if not line.startswith("!!")]
    shown = [*bad, *good][:max_lines]
    if len(lines) > max_lines:
        shown[-1] = f"   ... and {len(lines) - max_lines + 1} lines more in results.jsonl"
    return shown


def compare(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each job that ran in several modes: step times over plain PyTorch's."""
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        if result.get("passed") and "job" in result and "seconds_a_step" in result:
            jobs.setdefault(result["job"], {})[result["mode"]] = result
    lines: list[str] = []
    for job, results_by_mode in jobs.items():
        plain = results_by_mode.pop("plain", None)
        if plain is None or not results_by_mode:
            continue
        texts: list[str] = []
        for mode, measured in results_by_mode.items():
            text = f"{mode} {measured['seconds_a_step'] / plain['seconds_a_step']:.2f}x"
            if "host_s" in measured and plain.get("host_s"):
                text += f" (host {measured['host_s'] / plain['host_s']:.2f}x)"
            if measured.get("cap") and plain.get("peak_reserved"):
                text += f" in {measured['cap'] / plain['peak_reserved']:.2f} of its memory"
            if measured.get("foretold_share"):
                text += f" (beforehand {measured['foretold_share']:.2f}x)"
            pairs = zip(measured.get("losses", ()), plain.get("losses", ()), strict=False)
            if any(abs(a - b) > 0.01 * abs(b) for a, b in pairs):
                text += " WITH OTHER LOSSES"
            texts.append(text)
        line = f"{job}: of plain PyTorch's step: {', '.join(texts)}"
        lines.append(f"!! {line}" if "WITH OTHER LOSSES" in line else f"   {line}")
    return lines


@dataclass
class Visit:
    """Runs parts and writes their results."""

    out: Path
    env: dict[str, str]
    end: float  # deadline on the monotonic clock
    patience: float = 1
    small: bool = False
    begin: float = field(default_factory=time.monotonic)
    results: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # summary lines of all parts
    _written: int = 0
    _logs: dict[int, Log] = field(default_factory=dict)

    def record(self, **result: Any) -> None:
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
        """Run the parts in order; return whether all measurements passed."""
        remaining, due, finished = list(parts), time.monotonic(), set[int]()
        while remaining:
            part = remaining.pop(0)
            finished.add(part.number)
            due = min(due + part.seconds * self.patience, self.end)
            failed = self.run_part(part, part.measurements, due)
            if part.bits and failed:
                to_repeat = [measurement for measurement in part.measurements if measurement.name in failed]
                self.run_part(part, to_repeat, due, CUDA_LAUNCH_BLOCKING="1")
                suspects = [
                    measurement
                    for measurement in PARTS
                    if measurement.number == SUSPECTS and measurement.number not in finished
                ]
                remaining = [*suspects, *(measurement for measurement in remaining if measurement.number != SUSPECTS)]
        passed = all(measurement["passed"] for measurement in self.results if "passed" in measurement)
        self.print_summary(f"== all parts, {time.monotonic() - self.begin:.0f} s", self.lines)
        return passed

    def run_part(self, part: Part, measurements: Sequence[Measurement], due: float, **env: str) -> set[str]:
        """Run measurements of a part until a deadline; return the failed ones, except for budget overruns."""
        begin, first = time.monotonic(), len(self.results)
        todo = list(measurements)
        while todo and due - time.monotonic() >= _LEAST_S:
            shared = next((n for n, measurement in enumerate(todo) if measurement.alone), len(todo))
            group = todo[: max(shared, 1)]
            todo = todo[self._run_group(part, group, due, env) :]
        for measurement in todo if not env else ():
            self.record(part=part.number, measurement=measurement.name, skipped="no time left", passed=False)
        lines: list[str] = []
        results = self.results[first:]
        for result in results:
            if "passed" in result:
                lines.append(_line(result, env))
        lines += compare(results)
        title = f"== part {part.number}: {part.what}{', again with ' + ' '.join(env) if env else ''}"
        self.print_summary(f"{title}, {time.monotonic() - begin:.0f} s", lines)
        self.lines += lines
        # An exceeded budget is reported, but cannot explain wrong bits.
        return {
            measurement["measurement"]
            for measurement in results
            if not measurement.get("passed", True)
            and "skipped" not in measurement
            and measurement.get("error") != "OverBudgetError"
        }

    def _run_group(self, part: Part, group: Sequence[Measurement], due: float, env: dict[str, str]) -> int:
        """Run measurements in one process until one fails; return the number that ended."""
        ended = 0
        start = time.monotonic()

        def until() -> float:
            limit = group[min(ended, len(group) - 1)].limit
            return min(start + limit * self.patience, due)

        def hear(result: dict[str, Any]) -> None:
            nonlocal ended, start
            self.record(part=part.number, **result, **env)
            if "passed" in result:
                ended, start = ended + 1, time.monotonic()

        command = [sys.executable, "-u", str(ROOT / "tools" / "gpu_pieces.py"), *(["--small"] if self.small else [])]
        outcome = run([*command, *(one.name for one in group)], until, self._log(part), {**self.env, **env}, hear)
        if ended < len(group) and not (ended and not outcome.results[-1].get("passed", True)):
            seconds = time.monotonic() - start
            failure = (
                f"stopped after {seconds:.0f} s" if outcome.status is None else f"died, exit status {outcome.status}"
            )
            name = group[ended].name
            self.record(
                part=part.number, measurement=name, passed=False, seconds=round(seconds, 1), error=failure,
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
        for log in self._logs.values():
            log.close()


def _line(result: dict[str, Any], env: dict[str, str]) -> str:
    text = result.get("say") or result.get("skipped") or result.get("error") or ""
    if result.get("detail"):
        text = f"{text}: {str(result['detail']).splitlines()[0]}"
    env_text = f", {' '.join(f'{k}={v}' for k, v in env.items())}" if env else ""
    seconds = f" ({result['seconds']:.1f} s)" if "seconds" in result else ""
    return f"{'ok' if result['passed'] else '!!'} {result['part']} {result['measurement']}{env_text}{seconds}: {text}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-visit", help="folder for results and logs")
    parser.add_argument("--parts", default=USUAL, help="parts to run, e.g. 9-11 or 3,5 (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0, help="time limit in seconds; 0: the sum of the parts (default: 0)"
    )
    parser.add_argument(
        "--patience", type=float, default=1, help="factor for all deadlines on a slow machine (default: 1)"
    )
    parser.add_argument("--small", action="store_true", help="rehearse the visit with tiny sizes")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    parts = choose_parts(options.parts)
    # An aborted process holds gigabytes; do not dump them to a disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="gpu-visit-") as folder:
        site = Path(folder)
        unpacked = unpack_missing(WHEELS, site) if WHEELS.is_dir() else []
        env = environment(site)
        found = probe(env, min(_IMPORT_S, options.seconds / 2) if options.seconds else _IMPORT_S)
        if not found.get("gpu") and "slow" not in found:
            reason = found.get("error") or f"PyTorch {found['torch']} sees no CUDA device"
            print(f"gpu-visit: {reason}; nothing has been run.\n{describe(parts)}", flush=True)
            return 2
        options.out.mkdir(parents=True, exist_ok=True)
        end = begin + options.seconds if options.seconds else float("inf")
        visit = Visit(options.out, env, end, options.patience, options.small, begin)
        visit.record(probe=found, unpacked=unpacked, parts=[part.number for part in parts])
        print(f"gpu-visit: {found.get('slow') or found}", flush=True)
        try:
            return 0 if visit.run_all(parts) else 1
        finally:
            visit.close()


if __name__ == "__main__":
    sys.exit(main())
