"""The suite on the stub: everything that can go wrong on a GPU and not on the CPU, where there is no GPU.

    make gpu-stub [ONLY=bits,races] [JOBS=2]

Builds the stub (``build.py``), then runs case after case, each a process of its own with a limit of its own: the tests
marked ``cuda``, models and loops in all orders of the streams, what goes wrong, what might be left behind, what the
waits between streams are good for, and the visit to a GPU: as it is, and with a fault planted, which its summary has
to name. A line for each as it ends, one summary, logs whole
in the folder given. Exit status: 0 all passed, 1 something did not, 2 there is no CUDA build of PyTorch here.
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
# A result that the stub could not compute leaves bytes that nobody meant.
_NOT_COMPUTED = re.compile(r"^replay: .* failed", re.MULTILINE)


def lazy(seed: int) -> dict[str, object]:
    """Streams do what they were given as late, as early or as oddly as their order allows."""
    return {"mode": "lazy", "seed": seed, "poison": 1}


def threads(seed: int, pause_us: int = 300) -> dict[str, object]:
    """A thread for each stream, with pauses."""
    return {"mode": "threads", "seed": seed, "poison": 1, "delay_us": pause_us}


@dataclass(frozen=True)
class Case:
    """One process.

    Attributes:
        group: by which it can be chosen.
        name: of it, within the group.
        command: what Python is given.
        order: settings of the stub.
        limit: seconds.
        names: of a visit with a planted fault: patterns of how lines of failures in its summary begin.
    """

    group: str
    name: str
    command: tuple[str, ...]
    order: Mapping[str, object]
    limit: int = 300
    names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name, with the order of the streams."""
        mode = self.order.get("mode", "inline")
        return f"{self.group}: {self.name}, {mode} {self.order.get('seed', '')}".rstrip()


def tests(name: str, chosen: str, order: Mapping[str, object], *files: str) -> Case:
    """Some of the tests marked ``cuda``."""
    paths = [f"tests/cuda/{file}" for file in files]
    command = ("-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-m", "cuda", *paths, "-k", chosen)
    return Case("tests", name, command, order, 600)


def case(group: str, what: str, order: Mapping[str, object], limit: int = 300, **options: object) -> Case:
    """One of ``cases.py``."""
    rest = tuple(f"{name}={value}" for name, value in options.items())
    words = " ".join("amp" if name == "amp" else str(value) for name, value in options.items())
    name = words if what == group else f"{what} {words}".strip()
    return Case(group, name, (str(HERE / "cases.py"), what, *rest), order, limit)


def visit(name: str, order: Mapping[str, object], parts: str, *names: str) -> Case:
    """A rehearsal of the visit to a GPU."""
    command = ("tools/gpu_visit.py", "--patience", "8", "--small", "--parts", parts)
    return Case("visit", name, command, order, 3000, names)


def cases() -> list[Case]:
    """All of them, but for the waits."""
    compiled = "dawdle or disk or (bits and offload and not device)"
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
    wrong = [
        case("failures", "no-memory", {**INLINE, "mem_mib": 640}),
        case("failures", "engines", INLINE),
        *(
            case("failures", "device-error", lazy(1), how=how, kernels=k)
            for how in ("compiled", "loop")
            for k in (7, 60)
        ),
        case("failures", "device-error", threads(1), how="compiled", kernels=25),
        *(case("failures", "forks", order, how=how) for how in ("compiled", "loop") for order in (lazy(1), threads(1))),
        *(case("leaks", "leaks", INLINE, 600, how=how) for how in ("host", "disk", "loop")),
    ]
    lost = {**lazy(1), "lose_wait": 20}  # few, which are noticed all the same
    return [
        case("races", "races", lazy(1), 600, how="host"),
        case("races", "races", threads(1, 100), 600, how="host"),
        case("races", "races", threads(2, 100), 600, how="disk"),
        case("races", "races", lazy(2), 600, how="loop"),
        case("races", "races", threads(3, 100), 600, how="loop"),
        *steps,
        *loops,
        *wrong,
        *(tests("of compiled steps", compiled, order, "test_gpu.py") for order in (lazy(11), lazy(12), threads(1))),
        *(
            tests("of followed loops", "not take_turns", order, "test_follow_gpu.py")
            for order in (lazy(11), threads(1))
        ),
        tests("of compiled kernels", "", lazy(11), "test_kernels_gpu.py"),
        visit("from end to end", INLINE, "1-11"),
        visit("of compiled kernels", INLINE, "12"),
        visit("a lost wait", lost, "2-4", "2 tape.*LostWait", "3 bits.*WrongBits", "4 loop.*WrongBits"),
        visit("a wrong bit", {"flip_bit": 40}, "2-4", "2 tape.*: 1 bytes", "3 bits.*WrongBits", "4 loop.*WrongBits"),
        visit("an exceeded budget", {"hog_mib": 256}, "3-4", "3 bits.*OverBudget", "4 loop.*OverBudget"),
    ]


@dataclass
class Suite:
    """Runs cases, and keeps what came of them."""

    out: Path
    built: Path
    lines: list[str] = field(default_factory=list[str])
    failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self, title: str, command: Sequence[str], order: Mapping[str, object], limit: float
    ) -> tuple[Outcome, Path]:
        """A process on the stub, its output in a log of its own."""
        path = self.out / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.log"
        log = Log(path)
        env = environment(self.built, quiet=1, **order)
        env |= {
            "OMP_NUM_THREADS": "1",  # cases run side by side
            "PYTHONFAULTHANDLER": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Since PyTorch 2.15 each product takes its workspace from the allocator: more than models here hold.
            "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
            # What it builds is kept from run to run; what it measures is not.
            "XDG_CACHE_HOME": str(self.built / "cache"),
        }
        try:
            end = time.monotonic() + limit
            return run([sys.executable, "-u", *command], lambda: end, log, env), path
        finally:
            log.close()

    def tell(self, good: bool, title: str, seconds: float, said: str) -> None:
        """A line, now and in the summary."""
        line = f"{'ok' if good else '!!'} {title}, {seconds:.0f} s: {said}"
        with self._lock:
            self.failed |= not good
            self.lines.append(line)
            print(line, flush=True)

    def try_case(self, one: Case) -> None:
        """Run a case to its end."""
        command, told_by = list(one.command), self.out / f"visit-{one.name.replace(' ', '-')}"
        if one.group == "visit":
            shutil.rmtree(told_by, ignore_errors=True)
            command += ["--out", str(told_by)]
        outcome, path = self.run(one.title, command, one.order, one.limit)
        text = path.read_text(encoding="utf-8", errors="replace")
        not_computed = _NOT_COMPUTED.search(text)
        good = outcome.status == 0 and not_computed is None
        told = [str(answer["say"]) for answer in outcome.results if "say" in answer]
        last = outcome.tail.splitlines()[-1] if outcome.tail else ""
        said = told[-1] if told and outcome.status == 0 else last
        if outcome.status is None:
            said = f"stopped at its limit; {said}"
        elif outcome.status != 0:
            said = f"exit status {outcome.status}; {said}"
        elif not_computed is not None:
            said = not_computed[0]
        if one.group == "visit" and outcome.status in (0, 1):
            summary = (told_by / "summary.txt").read_text(encoding="utf-8")
            said = ", ".join(
                f"part {n} {s} s" for n, s in re.findall(r"^== part (\d+): .*, (\d+) s$", summary, re.MULTILINE)
            )
            if one.names:
                unnamed = [name for name in one.names if not re.search(f"^!! {name}", summary, re.MULTILINE)]
                good = outcome.status == 1 and not unnamed
                said = f"{f'its summary does not name {unnamed}' if unnamed else 'its summary names it'}; {said}"
        self.tell(good, one.title, outcome.seconds, said[:200])

    def try_waits(self, kind: str, implied: Mapping[str, str], orders: Sequence[Mapping[str, object]]) -> None:
        """Take the waits out one after the other, in as many orders of the streams as are needed to notice all."""
        begin = time.monotonic()
        table: dict[str, str] = {}
        for order in orders:
            first, done = -1, False
            title = f"waits of {kind}, {order['mode']} {order['seed']}"
            while not done:
                command = [str(HERE / "waits.py"), kind, "--from", str(first)]
                outcome, path = self.run(f"{title}, from {first}", command, order, 900)
                for answer in outcome.results:
                    table[answer["wait"]] = table.get(answer["wait"]) or str(answer["noticed"])
                done = outcome.status == 0
                if not done:  # it died without one of them, which is a way to notice as well
                    begun = re.findall(r"^--- (-?\d+) (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                    if outcome.status is None or not begun or int(begun[-1][0]) < first:
                        self.tell(False, title, time.monotonic() - begin, f"did not get through: {outcome.tail[-150:]}")
                        return
                    number, name = int(begun[-1][0]), begun[-1][1]
                    table[name] = table.get(name) or f"exit status {outcome.status}"
                    first = number + 1
            if not unnoticed(table, implied):
                break
        (self.out / f"waits-of-{kind}.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
        wrong = [f"{name} is not noticed" for name in unnoticed(table, implied)]
        wrong += [f"{name}: {noticed}" for name, noticed in table.items() if noticed and name.endswith("none")]
        seen = sum(bool(noticed) for noticed in table.values())
        said = "; ".join(wrong) or f"{seen} of {len(table)} noticed, the rest are implied"
        self.tell(not wrong, f"waits of {kind}", time.monotonic() - begin, said[:400])


def unnoticed(table: Mapping[str, str], implied: Mapping[str, str]) -> list[str]:
    """What nothing has shown to be gone, although nothing else does the same."""

    def is_implied(name: str) -> bool:
        if name.endswith("none") or any(name.startswith(start) for start in implied):
            return True
        return any(seen and name in both.split(" and ") for both, seen in table.items() if " and " in both)

    return [name for name, noticed in table.items() if not noticed and not is_implied(name)]


# What others imply in the programs and loops that are tried: by its beginning, and why.
_OF_THE_DOUBLE = "ops of this program wait for it; tests/cuda/test_double_disk.py has one in which they do not"
IMPLIED_IN_STEPS = {
    "host: begin, COPY_OUT": _OF_THE_DOUBLE,
    "host: end, COPY_IN": _OF_THE_DOUBLE,
    "disk: begin, DISK_OUT": _OF_THE_DOUBLE,
    "disk: end, DISK_IN": _OF_THE_DOUBLE,
}
_SHOWN = "the loop's stream has waited for the copy before it shows what it copied, and copies out wait for that stream"
_UNSEEN = "these loops write nothing to what is at home"
_BY_THE_DRIVER = "giving memory to the driver, or taking it from there, waits for all work"
IMPLIED_IN_LOOPS = {
    "reserve:": _BY_THE_DRIVER,
    "save_foreign:": f"models are taken over before the arena is reserved: {_BY_THE_DRIVER}",
    "give_slot:": _SHOWN,
    "save: streams_.wait(out_, order.home)": _SHOWN,
    "save: order.home": _SHOWN,
    "load: order.home": _SHOWN,
    "load: unobserved_.add": _UNSEEN,
    "load: streams_.wait(in_, unobserved_)": _UNSEEN,
    "note_unobserved:": _UNSEEN,
    "mark_slot_used:": _UNSEEN,
    "retire:": "no loop here gives away what another stream has made without saying so to PyTorch",
    "nanos_of_copy:": "it measures, and nobody reads what it copies",
    "all_of: all.add(streams_.now(stream))": "other streams' ops have marks of their own; this is for what nobody sees",
}


def forget_measurements(cache: Path) -> None:
    """Leave the libraries that were built in the cache, and nothing else."""
    for path in (cache / "outofcore").glob("*"):
        if path.is_dir() and not any(path.glob("*.so")):
            shutil.rmtree(path)


def chosen(only: str) -> Iterator[Case]:
    """The cases of some groups, or all."""
    groups = [name.strip() for name in only.split(",") if name.strip()]
    for one in cases():
        if not groups or one.group in groups:
            yield one


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="groups, such as bits,races; all: races, bits, loops, failures, "
                        "leaks, tests, visit, waits")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="cases side by side")
    parser.add_argument("--stub", type=Path, default=OUT, help="folder in which the stub is built")
    parser.add_argument("--out", type=Path, help="folder for the logs; else logs/ beside the stub")
    given = parser.parse_args()
    begin = time.monotonic()
    try:
        built = build(given.stub.resolve())
    except BuildError as error:
        print(f"gpu-stub: {error}", file=sys.stderr)
        return 2
    out = (given.out or built / "logs").resolve()
    out.mkdir(parents=True, exist_ok=True)
    forget_measurements(built / "cache")
    print(f"gpu-stub: built in {time.monotonic() - begin:.0f} s; logs in {out}", flush=True)
    suite = Suite(out, built)
    with ThreadPoolExecutor(given.jobs) as pool:
        # The longest first.
        list(pool.map(suite.try_case, sorted(chosen(given.only), key=lambda one: -one.limit)))
    if not given.only or "waits" in given.only.split(","):
        suite.try_waits("compiled", IMPLIED_IN_STEPS, [lazy(1), lazy(2), threads(1)])
        suite.try_waits("loop", IMPLIED_IN_LOOPS, [lazy(1), lazy(2), threads(1)])
    bad = [line for line in suite.lines if not line.startswith("ok")]
    print(f"\ngpu-stub: {len(suite.lines) - len(bad)} of {len(suite.lines)} passed in {time.monotonic() - begin:.0f} s")
    print("\n".join(bad), flush=True)
    return int(suite.failed)


if __name__ == "__main__":
    sys.exit(main())
