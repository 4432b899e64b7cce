"""Everything that wants a GPU, in one command and without a network, so that no minute on one is lost.

Needs Python, PyTorch built for CUDA, and for what else is missing the folder ``.gpu-wheels`` (``make gpu-wheels`` where
there is a network). Each piece is a process of its own with a limit of its own, and none stops the next:

    A  the machine: driver, libraries, host memory before and after it is touched, the native code built
    B  primitives without a step: streams, events, host functions, pinning, copies by size and direction, arena, caps
    C  what kernels return beside what PyTorch says they return: a table of differences, the list of repairs
    D  bits: small models within several plans beside plain PyTorch
    E  the host's time and the device's, beside plain PyTorch; one step as a CUDA graph
    F  compute-sanitizer on the smallest step, where it is installed
    G  the tests marked ``cuda``, in groups, going on after a crash
    I  loops that are followed, beside plain PyTorch and compiled steps
    H  the comparison: jobs within a memory cap, beside what else there is, and what was predicted beforehand

One line of JSON a piece, and in H one a row, as they end; logs whole in the folder given. Exit status: 0 all passed, 1
something did not, 2 there is no GPU here: then it says what it would do. ``--only A,B`` does a part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".gpu-wheels"
MARK = "@@"  # a line of a piece that begins with it is a result, and not only for the log
LOG_BYTES = 15 << 20  # of each log: what is beyond it is left out from the middle
SUMMARY_LINES = 40
_GRACE_S = 10


@dataclass(frozen=True)
class Piece:
    """One process.

    Attributes:
        key: its letter.
        what: it does, in a few words.
        limit: seconds.
    """

    key: str
    what: str
    limit: int


PIECES = (
    Piece("A", "the machine, host memory, the native build", 120),
    Piece("B", "streams, events, host functions, pinning, copies, arena, caps", 120),
    Piece("C", "fakes against kernels, of every family", 180),
    Piece("D", "the bits of plain PyTorch: dense, conv, GPT; in core, offloaded, auto, disk", 180),
    Piece("E", "time of the host and of the device, and one CUDA graph", 120),
    Piece("F", "compute-sanitizer on the smallest step", 180),
    Piece("G", "the tests marked cuda, in groups", 420),
    Piece("I", "loops that are followed, beside plain PyTorch and compiled steps", 300),
    Piece("H", "the comparison within caps", 1200),
)


def site_from(wheels: Path, folder: Path) -> list[str]:
    """Unpack wheels whose packages are not here into a folder; returns what was unpacked.

    A wheel is an archive of what goes on the path, so that neither pip nor a network is needed.
    """
    import importlib.util  # noqa: PLC0415 - here alone

    done: list[str] = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            tops = {name.split("/")[0] for name in archive.namelist()}
            names = {top.removesuffix(".py") for top in tops if not top.endswith((".dist-info", ".data"))}
            if names and all(name.isidentifier() and importlib.util.find_spec(name) is not None for name in names):
                continue
            archive.extractall(folder)
            done.append(wheel.name)
    return done


def environment(site: Path) -> dict[str, str]:
    """Of a piece: the package itself, the wheels, and what makes crashes speak."""
    paths = [str(ROOT / "src"), str(ROOT / "tools"), str(site), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        # cuBLAS is deterministic with a workspace of fixed size only.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


class Log:
    """A file of bounded size: its beginning, and its end."""

    def __init__(self, path: Path, most: int = LOG_BYTES) -> None:
        self._path, self._half = path, most // 2
        self._file = path.open("wb")
        self._written = 0
        self._end: list[bytes] = []
        self._end_bytes = 0
        self._lost = 0

    def write(self, line: bytes) -> None:
        """Add a line."""
        if self._written + len(line) <= self._half:
            self._file.write(line)
            self._file.flush()
            self._written += len(line)
            return
        self._end.append(line[-self._half :])
        self._end_bytes += len(self._end[-1])
        while self._end_bytes > self._half:
            gone = self._end.pop(0)
            self._end_bytes -= len(gone)
            self._lost += len(gone)

    def close(self) -> None:
        """Write the end."""
        if self._lost:
            self._file.write(f"\n[... {self._lost} bytes left out ...]\n".encode())
        self._file.write(b"".join(self._end))
        self._file.close()


@dataclass
class Outcome:
    """What came of a piece: its exit status, None where it was stopped, its results and the end of what it said."""

    status: int | None
    seconds: float
    results: list[dict[str, Any]]
    tail: str


def run(command: Sequence[str], limit: float, log: Log, env: dict[str, str], tell: Any = None) -> Outcome:
    """Run a process to its end or its limit, line by line into a log.

    It is asked to end by SIGINT at its limit, so that it can say where it was, and killed with all its children after.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    results: list[dict[str, Any]] = []
    tail: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            log.write(line)
            text = line.decode(errors="replace").rstrip()
            if text.startswith(MARK):
                try:
                    results.append(json.loads(text[len(MARK) :]))
                except ValueError:
                    tail.append(text)
                    continue
                if tell is not None:
                    tell(results[-1])
            elif text:
                tail.append(text)
                del tail[:-12]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    status: int | None
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)  # it leads a session of its own
                process.wait(_GRACE_S)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
    reader.join(_GRACE_S)
    return Outcome(status, round(time.monotonic() - begin, 1), results, "\n".join(tail))


_PROBE = """
import json
found = {}
try:
    import torch
    found["torch"] = torch.__version__
    found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def probe(env: dict[str, str]) -> dict[str, Any]:
    """Whether there is a GPU, asked in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=env, text=True, capture_output=True, check=False, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-500:] or f"exit status {done.returncode}"}


def chosen(only: str) -> list[Piece]:
    """The pieces named, in their order.

    Raises:
        SystemExit: there is no such piece.
    """
    if not only:
        return list(PIECES)
    wanted = {key.strip().upper() for key in only.split(",") if key.strip()}
    unknown = wanted - {piece.key for piece in PIECES}
    if unknown:
        raise SystemExit(f"gpu-visit: there is no piece {sorted(unknown)[0]}; there are A to I")
    return [piece for piece in PIECES if piece.key in wanted]


def plan_of(pieces: Sequence[Piece]) -> str:
    """What would be done, in words."""
    lines = [f"  {piece.key}  {piece.what} (at most {piece.limit} s)" for piece in pieces]
    return "\n".join(["gpu-visit would do, on a machine with a GPU:", *lines])


def summary(lines: Sequence[str]) -> str:
    """No more lines than fit on a page, failures before the rest."""
    bad = [line for line in lines if not line.startswith("ok")]
    good = [line for line in lines if line.startswith("ok")]
    return "\n".join([*bad, *good][:SUMMARY_LINES])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-visit", help="folder for the logs")
    parser.add_argument("--only", default="", help="pieces, such as A,B")
    parser.add_argument("--seconds", type=float, default=0, help="for all of it; 0: as long as it takes")
    parser.add_argument("--patience", type=float, default=1, help="limits are so many times as long: on a slow machine")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the pieces themselves")
    given = parser.parse_args(arguments)
    pieces = chosen(given.only)
    with tempfile.TemporaryDirectory(prefix="gpu-visit-") as folder:
        site = Path(folder)
        unpacked = site_from(WHEELS, site) if WHEELS.is_dir() else []
        env = environment(site)
        there = probe(env)
        if not there.get("gpu"):
            why = there.get("error") or f"PyTorch {there['torch']} sees no CUDA device"
            print(f"gpu-visit: {why}; nothing has been run.\n{plan_of(pieces)}", flush=True)
            return 2
        print(json.dumps({"visit": there, "unpacked": unpacked}), flush=True)
        return _visit(pieces, given, env)


def _visit(pieces: Sequence[Piece], given: argparse.Namespace, env: dict[str, str]) -> int:
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    deadline = time.monotonic() + given.seconds if given.seconds else None
    failed = False
    with (out / "results.jsonl").open("w", encoding="utf-8") as file:

        def tell(answer: dict[str, Any]) -> None:
            text = json.dumps(answer)
            file.write(f"{text}\n")
            file.flush()
            print(text[:4000], flush=True)

        # Eight files come back from some machines: two logs are shared.
        logs = {"A": "A-C", "B": "A-C", "C": "A-C", "D": "D-F", "E": "D-F", "F": "D-F", "G": "G", "H": "H", "I": "I"}
        opened = {name: Log(out / f"{name}.log") for name in sorted({logs[piece.key] for piece in pieces})}
        try:
            for piece in pieces:
                limit = piece.limit * given.patience
                if deadline is not None:
                    limit = min(limit, deadline - time.monotonic())
                if limit < 5:
                    tell({"piece": piece.key, "status": "no time left"})
                    lines.append(f"-- {piece.key} no time left")
                    continue
                command = [sys.executable, "-u", str(ROOT / "tools" / "gpu_pieces.py"), piece.key, str(out)]
                command += ["--seconds", f"{limit - 5:.0f}", *(["--small"] if given.small else [])]
                outcome = run(command, limit, opened[logs[piece.key]], env, tell)
                passed = outcome.status == 0
                failed |= not passed
                how = "passed" if passed else "stopped at its limit" if outcome.status is None else "failed"
                answer: dict[str, Any] = {"piece": piece.key, "status": how, "seconds": outcome.seconds}
                if not passed:
                    answer |= {"exit": outcome.status, "tail": outcome.tail[-3000:]}
                tell(answer)
                told = [item["say"] for item in outcome.results if "say" in item]
                lines.append(f"{'ok' if passed else '!!'} {piece.key} {how} in {outcome.seconds:.0f} s: {piece.what}")
                lines += [f"{'!!' if line.startswith('!') else 'ok'}    {line.lstrip('! ')}" for line in told]
        finally:
            for log in opened.values():
                log.close()
    text = summary(lines)
    (out / "summary.txt").write_text(f"{text}\n", encoding="utf-8")
    print(text, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
