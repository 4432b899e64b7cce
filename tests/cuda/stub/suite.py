"""The suite on the stub: tests of GPU failures on a machine without a GPU.

    make gpu-stub [ONLY=bits,races] [JOBS=2]

Builds the stub (``build.py``), then runs each case in a process with a time limit. Cases are the tests marked ``cuda``,
models and loops under many stream orders, failures, leaks, and removed waits between streams. Others rehearse the GPU
visit, also with planted faults that its summary must name. Prints a line per case and a summary; logs are in the folder
given. Exit status: 0 all passed, 1 some failed, 2 there is no CUDA build of PyTorch here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from gpu_visit import Log, Outcome, run

from build import HERE, OUT, BuildError, build, environment

INLINE: Mapping[str, object] = {}
# A result that the stub could not compute is undefined.
_NOT_COMPUTED = re.compile(r"^replay: .* failed", re.MULTILINE)


def lazy(seed: int) -> dict[str, object]:
    """Return the settings for streams that run their work in the oddest valid order."""
    return {"mode": "lazy", "seed": seed, "poison": 1}


def threads(seed: int, pause_us: int = 300) -> dict[str, object]:
    return {"mode": "threads", "seed": seed, "poison": 1, "delay_us": pause_us}


@dataclass(frozen=True)
class Case:
    """A process of the suite.

    Attributes:
        order: settings of the stub.
        names: for a visit with a planted fault: patterns of the failures that its summary must name.
    """

    group: str
    name: str
    command: tuple[str, ...]
    order: Mapping[str, object]
    limit: int = 300
    names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        mode = self.order.get("mode", "inline")
        return f"{self.group}: {self.name}, {mode} {self.order.get('seed', '')}".rstrip()


def tests(name: str, selection: str, order: Mapping[str, object], *files: str) -> Case:
    paths = [f"tests/cuda/{file}" for file in files]
    command = ("-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-m", "cuda", *paths, "-k", selection)
    return Case("tests", name, command, order, 600)


def case(group: str, case_name: str, order: Mapping[str, object], limit: int = 300, **options: object) -> Case:
    arguments = tuple(f"{name}={value}" for name, value in options.items())
    words = " ".join("amp" if name == "amp" else str(value) for name, value in options.items())
    name = words if case_name == group else f"{case_name} {words}".strip()
    return Case(group, name, (str(HERE / "cases.py"), case_name, *arguments), order, limit)


def visit(name: str, order: Mapping[str, object], parts: str, *names: str) -> Case:
    command = ("tools/gpu_visit.py", "--patience", "8", "--small", "--parts", parts)
    return Case("visit", name, command, order, 3000, names)


def cases() -> list[Case]:
    compiled = "delayed or disk or (bits and offload and not device and not replay)"
    steps = [
        case("bits", "bits", lazy(1), model="resnet50", update="momentum"),
        case("bits", "bits", threads(1), model="resnet50", update="momentum", amp=1, home="disk"),
        case("bits", "bits", lazy(2), model="gpt", update="foreach", amp=1),
        case("bits", "bits", threads(2), model="gpt", update="fused", home="disk"),
        case("bits", "bits", lazy(3), model="llama", update="fused", amp=1, policy="auto"),
        case("bits", "bits", threads(3), model="llama", update="foreach", home="disk"),
        case("bits", "bits", lazy(4), model="adapted", update="foreach", amp=1),
        case("bits", "bits", threads(4), model="adapted", update="fused"),
        case("bits", "bits", lazy(5), model="mlp", update="one", home="disk"),
        case("bits", "bits", INLINE, model="mlp", update="fused", steps=12),
    ]
    loops = [
        case("loops", "loop", lazy(1), model="resnet50", update="momentum", amp=1),
        case("loops", "loop", threads(1), model="resnet50", update="foreach"),
        case("loops", "loop", lazy(2), model="gpt", update="fused", amp=1),
        case("loops", "loop", threads(2), model="llama", update="foreach", amp=1),
        case("loops", "loop", lazy(3), model="adapted", update="fused"),
        case("loops", "loop", INLINE, model="llama", update="one"),
    ]
    failures = [
        case("failures", "no-memory", {**INLINE, "mem_mib": 640}),
        case("failures", "engines", INLINE),
        *(
            case("failures", "device-error", lazy(1), mode=mode, kernels=k)
            for mode in ("compiled", "loop")
            for k in (7, 60)
        ),
        case("failures", "device-error", threads(1), mode="compiled", kernels=25),
        *(
            case("failures", "forks", order, mode=mode)
            for mode in ("compiled", "loop")
            for order in (lazy(1), threads(1))
        ),
        *(case("leaks", "leaks", INLINE, 600, mode=mode) for mode in ("host", "disk", "loop")),
    ]
    lossy = {**lazy(1), "lose_wait": 20}  # a small share, which is noticed all the same
    return [
        case("races", "races", lazy(1), 600, mode="host"),
        case("races", "races", threads(1, 100), 600, mode="host"),
        case("races", "races", threads(2, 100), 600, mode="disk"),
        case("races", "races", lazy(2), 600, mode="loop"),
        case("races", "races", threads(3, 100), 600, mode="loop"),
        *steps,
        *loops,
        *failures,
        *(tests("of compiled steps", compiled, order, "test_gpu.py") for order in (lazy(11), lazy(12), threads(1))),
        *(tests("of followed loops", "not alternate", order, "test_follow_gpu.py") for order in (lazy(11), threads(1))),
        tests("of compiled kernels", "", lazy(11), "test_kernels_gpu.py"),
        visit("from end to end", INLINE, "1-11"),
        visit("of compiled kernels", INLINE, "12"),
        visit("a lost wait", lossy, "2-4", "2 tape.*LostWait", "3 bits.*WrongBits", "4 loop.*WrongBits"),
        visit("a wrong bit", {"flip_bit": 40}, "2-4", "2 tape.*: 1 bytes", "3 bits.*WrongBits", "4 loop.*WrongBits"),
        visit("an exceeded budget", {"hog_mib": 256}, "3-4", "3 bits.*OverBudget", "4 loop.*OverBudget"),
    ]


@dataclass
class Suite:
    out: Path
    built: Path
    lines: list[str] = field(default_factory=list[str])
    failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self, title: str, command: Sequence[str], order: Mapping[str, object], limit: float
    ) -> tuple[Outcome, Path]:
        path = self.out / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.log"
        log = Log(path)
        env = environment(self.built, quiet=1, **order)
        env |= {
            "OMP_NUM_THREADS": "1",  # cases run in parallel
            "PYTHONFAULTHANDLER": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Since PyTorch 2.15, each product takes a workspace from the allocator, larger than these models.
            "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
            # Builds are kept from run to run; measurements are not.
            "XDG_CACHE_HOME": str(self.built / "cache"),
        }
        try:
            end = time.monotonic() + limit
            return run([sys.executable, "-u", *command], lambda: end, log, env), path
        finally:
            log.close()

    def report(self, good: bool, title: str, seconds: float, text: str) -> None:
        line = f"{'ok' if good else '!!'} {title}, {seconds:.0f} s: {text}"
        with self._lock:
            self.failed |= not good
            self.lines.append(line)
            print(line, flush=True)

    def try_case(self, case_: Case) -> None:
        command, visit_folder = list(case_.command), self.out / f"visit-{case_.name.replace(' ', '-')}"
        if case_.group == "visit":
            shutil.rmtree(visit_folder, ignore_errors=True)
            command += ["--out", str(visit_folder)]
        outcome, path = self.run(case_.title, command, case_.order, case_.limit)
        text = path.read_text(encoding="utf-8", errors="replace")
        not_computed = _NOT_COMPUTED.search(text)
        good = outcome.status == 0 and not_computed is None
        reports = [str(answer["say"]) for answer in outcome.results if "say" in answer]
        last = outcome.tail.splitlines()[-1] if outcome.tail else ""
        summary_line = reports[-1] if reports and outcome.status == 0 else last
        if outcome.status is None:
            summary_line = f"stopped at its limit; {summary_line}"
        elif outcome.status != 0:
            summary_line = f"exit status {outcome.status}; {summary_line}"
        elif not_computed is not None:
            summary_line = not_computed[0]
        if case_.group == "visit" and outcome.status in (0, 1):
            summary = (visit_folder / "summary.txt").read_text(encoding="utf-8")
            summary_line = ", ".join(
                f"part {n} {s} s" for n, s in re.findall(r"^== part (\d+): .*, (\d+) s$", summary, re.MULTILINE)
            )
            if case_.names:
                unnamed = [name for name in case_.names if not re.search(f"^!! {name}", summary, re.MULTILINE)]
                good = outcome.status == 1 and not unnamed
                summary_line = (
                    f"{f'its summary does not name {unnamed}' if unnamed else 'its summary names it'}; {summary_line}"
                )
        self.report(good, case_.title, outcome.seconds, summary_line[:200])

    def try_waits(self, kind: str, implied: Mapping[str, str], orders: Sequence[Mapping[str, object]]) -> None:
        """Remove the waits one by one, under several stream orders, until each removal was noticed."""
        begin = time.monotonic()
        table: dict[str, str] = {}
        for order in orders:
            first, finished = -1, False
            title = f"waits of {kind}, {order['mode']} {order['seed']}"
            while not finished:
                command = [str(HERE / "waits.py"), kind, "--from", str(first)]
                outcome, path = self.run(f"{title}, from {first}", command, order, 900)
                for answer in outcome.results:
                    table[answer["wait"]] = table.get(answer["wait"]) or str(answer["noticed"])
                finished = outcome.status == 0
                if not finished:  # a crash counts as noticed
                    starts = re.findall(r"^--- (-?\d+) (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                    if outcome.status is None or not starts or int(starts[-1][0]) < first:
                        self.report(
                            False, title, time.monotonic() - begin, f"did not get through: {outcome.tail[-150:]}"
                        )
                        return
                    number, name = int(starts[-1][0]), starts[-1][1]
                    table[name] = table.get(name) or f"exit status {outcome.status}"
                    first = number + 1
            if not unnoticed_waits(table, implied):
                break
        (self.out / f"waits-of-{kind}.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
        problems = [f"{name} is not noticed" for name in unnoticed_waits(table, implied)]
        problems += [f"{name}: {noticed}" for name, noticed in table.items() if noticed and name.endswith("none")]
        noticed_count = sum(bool(noticed) for noticed in table.values())
        summary = "; ".join(problems) or f"{noticed_count} of {len(table)} noticed, the rest are implied"
        self.report(not problems, f"waits of {kind}", time.monotonic() - begin, summary[:400])


def unnoticed_waits(table: Mapping[str, str], implied: Mapping[str, str]) -> list[str]:
    """Return the waits that no other wait implies and that could be removed unnoticed."""

    def is_implied(name: str) -> bool:
        if name.endswith("none") or any(name.startswith(start) for start in implied):
            return True
        return any(
            was_noticed and name in combined.split(" and ")
            for combined, was_noticed in table.items()
            if " and " in combined
        )

    return [name for name, noticed in table.items() if not noticed and not is_implied(name)]


# Waits that others imply in these programs and loops: the beginning of each name, and the reason.
_OF_THE_DOUBLE = "ops of this program wait for it; tests/cuda/test_double_disk.py has a program without that wait"
IMPLIED_IN_STEPS = {
    "host: begin, COPY_OUT": _OF_THE_DOUBLE,
    "host: end, COPY_IN": _OF_THE_DOUBLE,
    "disk: begin, DISK_OUT": _OF_THE_DOUBLE,
    "disk: end, DISK_IN": _OF_THE_DOUBLE,
}
_SHOWN = "the loop's stream waits for a copy before it shows the result, and copies out wait for that stream"
_UNSEEN = "these loops do not write to tensors at home"
_BY_THE_DRIVER = "allocating and freeing driver memory waits for all work"
IMPLIED_IN_LOOPS = {
    "reserve:": _BY_THE_DRIVER,
    "save_foreign:": f"models are moved before the arena is reserved: {_BY_THE_DRIVER}",
    "give_slot:": _SHOWN,
    "save: streams_.wait(out_, order.home)": _SHOWN,
    "save: order.home": _SHOWN,
    "load: order.home": _SHOWN,
    "load: unobserved_.add": _UNSEEN,
    "load: streams_.wait(in_, unobserved_)": _UNSEEN,
    "note_unobserved:": _UNSEEN,
    "mark_slot_used:": _UNSEEN,
    "retire:": "no loop here shares a result of another stream without record_stream",
    "nanos_of_copy:": "it measures a copy, and the result is not read",
    "all_of: all.add(streams_.now(stream))": "ops of other streams have their own marks; this is for untracked code",
}


def forget_measurements(cache: Path) -> None:
    """Delete everything in the cache except built libraries."""
    for path in (cache / "outofcore").glob("*"):
        if path.is_dir() and not any(path.glob("*.so")):
            shutil.rmtree(path)


def select_cases(only: str) -> Iterator[Case]:
    groups = [name.strip() for name in only.split(",") if name.strip()]
    for case_ in cases():
        if not groups or case_.group in groups:
            yield case_


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="groups, e.g. bits,races; default: races, bits, loops, failures, "
                        "leaks, tests, visit, waits")  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="number of cases in parallel"
    )
    parser.add_argument("--stub", type=Path, default=OUT, help="folder in which the stub is built")
    parser.add_argument("--out", type=Path, help="folder for the logs; default: logs/ in the folder of the stub")
    arguments = parser.parse_args()
    begin = time.monotonic()
    try:
        built = build(arguments.stub.resolve())
    except BuildError as error:
        print(f"gpu-stub: {error}", file=sys.stderr)
        return 2
    out = (arguments.out or built / "logs").resolve()
    out.mkdir(parents=True, exist_ok=True)
    forget_measurements(built / "cache")
    print(f"gpu-stub: built in {time.monotonic() - begin:.0f} s; logs in {out}", flush=True)
    suite = Suite(out, built)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        # The longest first.
        list(pool.map(suite.try_case, sorted(select_cases(arguments.only), key=lambda case_: -case_.limit)))
    if not arguments.only or "waits" in arguments.only.split(","):
        suite.try_waits("compiled", IMPLIED_IN_STEPS, [lazy(1), lazy(2), threads(1)])
        suite.try_waits("loop", IMPLIED_IN_LOOPS, [lazy(1), lazy(2), threads(1)])
    bad = [line for line in suite.lines if not line.startswith("ok")]
    print(f"\ngpu-stub: {len(suite.lines) - len(bad)} of {len(suite.lines)} passed in {time.monotonic() - begin:.0f} s")
    print("\n".join(bad), flush=True)
    return int(suite.failed)


if __name__ == "__main__":
    sys.exit(main())
