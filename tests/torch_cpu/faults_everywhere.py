"""Make the n-th allocation, disk write, disk read or thread start fail, for n = 1, 2, ... until all have failed.

A process loads PyTorch once and forks a child for each n. The child trains a small model within a budget, with one
fault; ``fail_nth.cpp`` intercepts its system calls. The run passes if

- each call raises a documented error or gives eager PyTorch's result bit for bit;
- the model is unchanged or updated after the call, or the error reports it as torn;
- training continues and ends with eager's bits;
- the child leaks no file, descriptor, thread, process or mapping.

    python tests/torch_cpu/faults_everywhere.py --door compile --home disk --kind write
    python tests/torch_cpu/faults_everywhere.py --door budget --home host --kind allocation --from 5 --to 9

Prints one line of JSON for each run and one for each sweep; exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import enum
import errno
import faulthandler
import gc
import hashlib
import importlib
import json
import logging
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import failing_model
from native_threads import thread_names
from system_call_faults import environment

import outofcore
from outofcore.compiling import user_cache_folder
from outofcore.errors import OutOfCoreError, StateError
from outofcore.follow.failures import explain_error
from outofcore.follow.native import load_paging
from outofcore.runtime.native import load_native

STEPS = 3
# A child has hung if it computes for less than a second within IDLE_S, or for longer than MAX_S in all.
IDLE_S, MAX_S = 60, 300
# A thread's stack and pages cached by the heap do not count as leaks.
SLACK_BYTES = 24 << 20
UNCHANGED, DONE, TORN = "as they were before this step", "step has been made", "part old and part new"


class Kind(enum.IntEnum):
    """The kind of call that fails; numbered as in fail_nth.cpp."""

    ALLOCATION = 1
    OBJECT = 2  # operator new of any size in native code of the package
    WRITE = 3
    READ = 4
    THREAD = 5
    OPEN = 6
    SHORT = 7  # a transfer ends early, without an error
    INTERRUPTED = 8  # by a signal: EINTR


ERRORS = {
    Kind.ALLOCATION: errno.ENOMEM,
    Kind.OBJECT: errno.ENOMEM,
    Kind.WRITE: errno.ENOSPC,
    Kind.READ: errno.EIO,
    Kind.THREAD: errno.EAGAIN,
    Kind.OPEN: errno.EMFILE,
}
HARMLESS = frozenset({Kind.SHORT, Kind.INTERRUPTED})  # after these every call must succeed
DOORS, HOMES = ("compile", "budget"), ("disk", "host", "both")


@dataclass
class Run:
    """One run with a fault.

    Attributes:
        outcome: "right": no call raised; "error": a call raised and the model is whole; "torn": it is torn.
        where: the native stack of the failed call.
        faults: violations of the rules above.
    """

    door: str
    home: str
    kind: str
    n: int
    lasting: bool
    fired: int = 0
    seen: int = 0
    outcome: str = "right"
    raised: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Resources:
    threads: int
    descriptors: list[str]
    files: list[str]
    children: list[str]
    mapped_bytes: int
    mappings: list[str]  # of files in the home's folder or in memory


class Injector:
    def __init__(self, folder: Path) -> None:
        self.library = ctypes.CDLL(os.environ["FAIL_NTH"])
        for name in ("fail_fired", "fail_seen"):
            getattr(self.library, name).restype = ctypes.c_long
        self.library.fail_watch(os.fsencode(folder), os.fsencode(user_cache_folder()) + b"/")

    def arm(self, kind: Kind, number: int, lasting: bool) -> None:
        """Make call ``number`` fail, and all later calls if ``lasting``; 0 makes no call fail."""
        code = errno.EIO if kind is Kind.WRITE and number % 2 == 0 else ERRORS.get(kind, 0)
        last = (1 << 62) if lasting and number else number
        self.library.fail_arm(int(kind), ctypes.c_long(number), ctypes.c_long(last), code)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.library.fail_pause(1)
        try:
            yield
        finally:
            self.library.fail_pause(0)

    def disarm(self) -> None:
        self.library.fail_disarm()

    @property
    def failed_calls(self) -> int:
        return int(self.library.fail_fired())

    @property
    def counted_calls(self) -> int:
        return int(self.library.fail_seen())

    def native_stack(self) -> list[str]:
        text = ctypes.create_string_buffer(8192)
        self.library.fail_where(text, ctypes.c_size_t(len(text)))
        return [line for line in text.value.decode(errors="replace").splitlines() if "fail-nth" not in line]


def is_documented(error: BaseException, kind: Kind) -> bool:
    """Return whether the library documents an error, or PyTorch itself raises it on failed allocations."""
    # Within an eager loop PyTorch raises an error that the library replaces when the loop ends.
    if isinstance(error, OutOfCoreError) or isinstance(explain_error(error), OutOfCoreError):
        return True
    if kind not in (Kind.ALLOCATION, Kind.OBJECT):
        return False
    text = str(error)
    # PyTorch's CPU allocator and native code raise plain RuntimeErrors with these texts.
    return (
        isinstance(error, MemoryError)
        or isinstance(explain_error(error), MemoryError)
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in text or "std::bad_alloc" in text))
    )


def describe_error(error: BaseException) -> str:
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if "outofcore" in f.filename] or every
    at = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))
    return f"{type(error).__name__}: {str(error)[:300]} [{at}]"


def open_resources(folder: Path) -> Resources:
    gc.collect()
    descriptors = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptors.append(str(descriptor.readlink()))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    mapped = 0
    for line in maps:
        begin, end = line.split()[0].split("-")
        mapped += int(end, 16) - int(begin, 16)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return Resources(
        len(thread_names()),
        sorted(name for name in descriptors if not name.startswith("/proc/")),
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        children,
        mapped,
        [line for line in maps if str(folder) in line or "/memfd:" in line],
    )


def record_leaks(run: Run, before: Resources, after: Resources, baseline: Resources) -> None:
    """Record the resources that a run leaked but a run without a fault did not."""
    if after.threads > baseline.threads:
        run.faults.append(f"{after.threads} threads are left; without a fault {baseline.threads}")
    new_count = len(after.descriptors) - len(before.descriptors)
    if new_count > 0:
        new = [name for name in after.descriptors if name not in before.descriptors] or after.descriptors
        run.faults.append(f"{new_count} descriptors are left: {new}")
    files = sorted(set(after.files) - set(before.files))
    if files:
        run.faults.append(f"files are left: {files}")
    if after.children:
        run.faults.append(f"processes are left: {after.children}")
    if after.mappings:
        run.faults.append(f"mappings are left: {after.mappings}")
    if after.mapped_bytes > baseline.mapped_bytes + SLACK_BYTES:
        run.faults.append(f"{after.mapped_bytes - baseline.mapped_bytes} bytes more are mapped than without a fault")


def have_equal_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)


# ---- the compiled step ----------------------------------------------------------------------------------------------


def eager_step_results() -> Any:
    """Return the loss of each eager step, and the model before the first and after each."""
    model, optimizer, step = failing_model.build_sides()
    snapshots, losses = [failing_model.contents(model, optimizer)], []
    for k in range(STEPS):
        torch.manual_seed(k)
        losses.append(step(failing_model.batch(k)))
        snapshots.append(failing_model.contents(model, optimizer))
    return losses, snapshots


def compile_options(home: str, folder: Path, cache: Path, budget: int) -> dict[str, Any]:
    tiers: dict[str, Any] = {"host_budget": "300KiB"} if home == "both" else {}
    return {
        "budget": budget,
        "home": "host" if home == "host" else folder,
        "policy": "offload-all",
        "cache": cache,
        "dynamic": False,
        **tiers,
    }


def train_step(run: Run, kind: Kind, expected: Any, options: dict[str, Any], injector: Injector) -> None:
    losses, snapshots = expected
    model, optimizer, step = failing_model.build_sides()
    injector.arm(kind, run.n, run.lasting)

    def record_failure(error: BaseException) -> None:
        injector.disarm()
        run.raised.append(describe_error(error))
        run.outcome = "error"
        if kind in HARMLESS or not is_documented(error, kind) or not injector.failed_calls:
            run.faults.append(f"raised {run.raised[-1]}")

    ours: Any = None
    while ours is None:
        try:
            ours = outofcore.compile(step, model, optimizer, **options)
        except Exception as error:
            if run.raised:
                raise
            record_failure(error)
            if not have_equal_bits(failing_model.contents(model, optimizer), snapshots[0]):
                run.faults.append("compile() has changed the model")
    completed = 0
    while completed < STEPS:
        with injector.pause():
            torch.manual_seed(completed)
            batch = failing_model.batch(completed)
        try:
            loss = ours(batch)
        except Exception as error:
            if run.raised:
                raise
            record_failure(error)
            completed = completed_steps(run, error, failing_model.contents(model, optimizer), snapshots, completed)
            if run.outcome == "torn":
                check_refusal(run, ours, completed)
                break
            continue
        with injector.pause():
            if not torch.equal(loss, losses[completed]):
                run.faults.append(f"the loss of step {completed} is another one")
        completed += 1
    try:
        ours.close()
    except Exception as error:
        record_failure(error)
        ours.close()
    injector.disarm()
    now = failing_model.contents(model, optimizer)
    if run.outcome == "torn":
        if not all(torch.isfinite(tensor).all() for tensor in now.values()):
            run.faults.append("a torn model cannot be read")
    elif not have_equal_bits(now, snapshots[STEPS]):
        run.faults.append("the model is not as eager training leaves it")


def check_refusal(run: Run, ours: Any, completed: int) -> None:
    try:
        ours(failing_model.batch(completed))
    except StateError as error:
        if TORN in str(error):
            return
        run.faults.append(f"a torn step raised {describe_error(error)}")
    else:
        run.faults.append("a torn step went on")


def completed_steps(run: Run, error: BaseException, now: Any, snapshots: Any, completed: int) -> int:
    """Return the number of completed steps after a failed call."""
    notes = " ".join(getattr(error, "__notes__", ()))
    if TORN in notes:
        run.outcome = "torn"
        return completed
    if DONE in notes or UNCHANGED in notes:
        completed += DONE in notes
        if not have_equal_bits(now, snapshots[completed]):
            run.faults.append("the model does not match the note")
        return completed
    run.faults.append("there is no note")
    return completed


# ---- the eager loop -------------------------------------------------------------------------------------------------

LoopSides = tuple[nn.Module, torch.optim.Optimizer]


def loop_sides() -> LoopSides:
    """Build a model with movable weights and activations (64 KiB or more) and no state that forward changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loop_step(sides: LoopSides, number: int) -> float:
    model, optimizer = sides
    torch.manual_seed(number)
    optimizer.zero_grad()
    # Its address has been taken, and it is freed after the update has evicted it.
    scale = torch.rand(128, 256)
    scale.numpy()
    loss = ((model(failing_model.batch(number)) - 1) * scale).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def tensors_of(sides: LoopSides) -> dict[str, torch.Tensor]:
    """Return all persistent tensors except gradients."""
    model, optimizer = sides
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for number, parameter in enumerate(model.parameters()):
        for name, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{number}.{name}"] = tensor
    return tensors


class Fingerprints:
    """Hashes of a model's tensors, cached by tensor version."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[int, str]] = {}
        self.by_name: dict[str, str] = {}  # of the tensors, by name

    def digest(self, sides: LoopSides, touched: Collection[int] = ()) -> str:
        """Return one hash of the names and bits of all tensors.

        ``touched`` has addresses of tensors that an op may have changed before their versions change.
        """
        whole = hashlib.sha256()
        for name, tensor in sorted(tensors_of(sides).items()):
            key, version = id(tensor), tensor._version
            cached = self._cache.get(key)
            if cached is None or cached[0] != version or (touched and tensor.data_ptr() in touched):
                digest = hashlib.sha256(tensor.detach().clone().numpy().tobytes()).hexdigest()
                cached = self._cache[key] = version, digest
            self.by_name[name] = cached[1]
            whole.update(f"{name} {cached[1]}\n".encode())
        return whole.hexdigest()


class _CallAfterEachOp(TorchDispatchMode):
    def __init__(self, callback: Callable[[Collection[int]], None]) -> None:
        super().__init__()
        self._callback = callback
        self._quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._quiet:
            self._quiet = True
            self._callback({argument.data_ptr() for argument in args if isinstance(argument, torch.Tensor)})
            self._quiet = False
        return result


def eager_loop_results() -> Any:
    """Return the loss of each eager step, the model before and after each, and its hashes after each op."""
    sides, prints = loop_sides(), Fingerprints()
    losses, snapshots = [], [copy_tensors(sides)]
    hashes: list[tuple[set[str], defaultdict[str, set[str]]]] = []  # hashes of all tensors, and of each
    for k in range(STEPS + 1):
        whole_hashes, tensor_hashes = set[str](), defaultdict[str, set[str]](set)

        def record(
            touched: Collection[int],
            whole_hashes: set[str] = whole_hashes,
            tensor_hashes: defaultdict[str, set[str]] = tensor_hashes,
        ) -> None:
            whole_hashes.add(prints.digest(sides, touched))
            for name, digest in prints.by_name.items():
                tensor_hashes[name].add(digest)

        record(())
        with _CallAfterEachOp(record):
            losses.append(loop_step(sides, k))
        snapshots.append(copy_tensors(sides))
        hashes.append((whole_hashes, tensor_hashes))
    return losses, snapshots, hashes


def copy_tensors(sides: LoopSides) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(sides).items()}


def restore(sides: LoopSides, snapshot: dict[str, torch.Tensor]) -> None:
    """Restore the model and the optimizer as a user does from a checkpoint."""
    model, optimizer = sides
    model.load_state_dict({name: snapshot[name] for name in model.state_dict()})
    names = {name.partition(".")[0] for name in snapshot if name[0].isdigit() and name.partition(".")[2] in _STATE}
    state = {int(n): {key: snapshot[f"{n}.{key}"].clone() for key in _STATE} for n in names if f"{n}.step" in snapshot}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


_STATE = ("step", "exp_avg", "exp_avg_sq")


def budget_options(home: str, folder: Path, cache: Path, budget: int) -> dict[str, Any]:
    tiers: dict[str, Any] = {"host_budget": "300KiB"} if home == "both" else {}
    return {"limit": budget, "home": "host" if home == "host" else folder, "cache": cache, "check": "full", **tiers}


# Budgets that hold a part of the model and its activations.
BUDGETS = {"compile": 9 << 18, "budget": 1 << 20}


def train_loop(run: Run, kind: Kind, expected: Any, options: dict[str, Any], injector: Injector) -> None:
    """Run the steps of an eager loop, each failed one again, and then one more step in a second loop."""
    # Ops of the loop would also move tensors of the shared reference results.
    losses, snapshots, hashes = copy.deepcopy(expected)
    sides = loop_sides()
    injector.arm(kind, run.n, run.lasting)

    def record_failure(error: BaseException) -> None:
        injector.disarm()
        run.raised.append(describe_error(error))
        run.outcome = "error"
        if kind in HARMLESS or not is_documented(error, kind) or not injector.failed_calls:
            run.faults.append(f"raised {run.raised[-1]}")

    completed = 0
    for steps in (STEPS, STEPS + 1):
        loop: outofcore.Loop | None = None
        while loop is None:
            try:
                loop = outofcore.budget(model=sides[0], **options).start()
            except Exception as error:
                if run.raised:
                    raise
                record_failure(error)
                if not have_equal_bits(copy_tensors(sides), snapshots[completed]):
                    run.faults.append("start() has changed the model")
        array = None
        while completed < steps:
            try:
                loss = loop_step(sides, completed)
                if array is None:  # take the address of a tensor
                    array = sides[0][1].weight.detach().numpy()
            except Exception as error:
                if run.raised:
                    raise
                record_failure(error)
                prints = Fingerprints()
                if prints.digest(sides) not in hashes[completed][0]:
                    wrong = [
                        name for name, digest in prints.by_name.items() if digest not in hashes[completed][1][name]
                    ]
                    run.faults.append(f"in step {completed} the model is as after no op of it; of no op are {wrong}")
                if not have_equal_bits(copy_tensors(sides), snapshots[completed]):
                    restore(sides, snapshots[completed])
                continue
            if loss != losses[completed]:
                run.faults.append(f"the loss of step {completed} is {loss} and not {losses[completed]}")
            completed += 1
        try:
            loop.stop()
        except Exception as error:
            record_failure(error)
            loop.stop()
        with injector.pause():
            if array is not None and not (array == snapshots[completed]["1.weight"].numpy()).all():
                run.faults.append("an array over a weight shows other bytes")
            array = None
            if not have_equal_bits(copy_tensors(sides), snapshots[completed]):
                run.faults.append(f"the model is not as eager training leaves it after step {completed - 1}")
        if steps == STEPS:
            injector.disarm()


# ---- children -------------------------------------------------------------------------------------------------------

EAGER: dict[str, Callable[[], Any]] = {"compile": eager_step_results, "budget": eager_loop_results}
TRAIN = {"compile": train_step, "budget": train_loop}
OPTIONS = {"compile": compile_options, "budget": budget_options}


@dataclass(frozen=True)
class ChildResult:
    """The result of a child process, or its exit status and error output."""

    value: Any
    failure: str = ""


def computed_s(process: int) -> float:
    """Return the CPU seconds of a process, which distinguish a hang from a busy machine."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_in_child(function: Callable[[], Any]) -> ChildResult:
    """Call a function in a forked child, which is killed if it hangs."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as stderr_file:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reader)
            status = 1
            try:
                os.dup2(stderr_file.fileno(), 2)
                faulthandler.enable(file=2)
                result = function()
                with os.fdopen(writer, "wb") as out:
                    pickle.dump(result, out)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writer)
        progress_at, progress_s = time.monotonic(), 0.0
        received = b""
        is_hung = False
        with os.fdopen(reader, "rb", buffering=0) as answers:
            while True:
                ready, _, _ = select.select([answers], [], [], 2.0)
                if not ready:
                    now_s = computed_s(child)
                    if now_s - progress_s >= 1.0:
                        progress_at, progress_s = time.monotonic(), now_s
                    is_hung = now_s > MAX_S or time.monotonic() - progress_at > IDLE_S
                    if is_hung:
                        os.kill(child, signal.SIGABRT)
                        break
                    continue
                chunk = answers.read(1 << 20)
                if not chunk:
                    break
                received += chunk
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0 and received:
            return ChildResult(pickle.loads(received))
        stderr_file.seek(0)
        text = stderr_file.read().decode(errors="replace")
        reason = "it hung" if is_hung else f"it ended with status {status}"
        return ChildResult(None, f"{reason}: {text[-6000:]}")


@dataclass(frozen=True)
class Stage:
    folder: Path
    expected: Any

    @property
    def cache(self) -> Path:
        return self.folder / "cache"


def run_once(stage: Stage, run: Run, kind: Kind, budget: int, baseline: Resources | None) -> tuple[Run, Resources]:
    folder = Path(tempfile.mkdtemp(dir=stage.folder))
    home, cache = folder / "home", folder / "cache"
    home.mkdir()
    shutil.copytree(stage.cache, cache)
    injector = Injector(folder)
    before = open_resources(home)
    begin = time.perf_counter()
    try:
        TRAIN[run.door](run, kind, stage.expected, OPTIONS[run.door](run.home, home, cache, budget), injector)
    except Exception as error:
        run.faults.append(f"raised again: {describe_error(error)}")
    injector.disarm()
    run.seconds = round(time.perf_counter() - begin, 2)
    run.fired, run.seen = injector.failed_calls, injector.counted_calls
    if run.fired:
        run.where = injector.native_stack()
    gc.collect()
    after = open_resources(home)
    if baseline is not None:
        record_leaks(run, before, after, baseline)
    else:
        shutil.rmtree(stage.cache)
        shutil.copytree(cache, stage.cache)
    shutil.rmtree(folder)
    return run, after


class Sweep:
    def __init__(self, door: str, folder: Path) -> None:
        self.door = door
        self._rehearsals: dict[str, Resources] = {}
        (folder / "cache").mkdir(parents=True)
        self.stage = Stage(folder, _result_or_exit(run_in_child(EAGER[door])))
        self.budget = BUDGETS[door]

    def rehearse(self, home: str, kind: Kind) -> Resources:
        """Run without a fault to fill the cache, and return the resources that are open afterwards."""
        cached = self._rehearsals.get(home)
        if cached is not None:
            return cached
        for _ in range(2):
            run, resources, modules = _result_or_exit(run_in_child(lambda: self._rehearse_once(home, kind)))
            if run.faults or run.raised or resources.mappings or resources.children or resources.files:
                raise SystemExit(f"a run without a fault failed or left something behind: {run}, {resources}")
        for name in modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        if len(thread_names()) > 1:
            raise SystemExit("this process has threads, which the children of a fork would not have")
        self._rehearsals[home] = resources
        return resources

    def _rehearse_once(self, home: str, kind: Kind) -> tuple[Run, Resources, list[str]]:
        run, resources = run_once(
            self.stage, Run(self.door, home, kind.name.lower(), 0, False), kind, self.budget, None
        )
        return (
            run,
            resources,
            [name for name in sys.modules if name.partition(".")[0] in ("torch", "outofcore", "highspy")],
        )

    def run(self, home: str, kind: Kind, number: int, lasting: bool) -> Run:
        baseline = self.rehearse(home, kind)
        run = Run(self.door, home, kind.name.lower(), number, lasting)
        begin = time.perf_counter()
        result = run_in_child(lambda: run_once(self.stage, run, kind, self.budget, baseline)[0])
        if result.failure:
            run.faults.append(result.failure)
            run.fired, run.outcome, run.seconds = 1, "died", round(time.perf_counter() - begin, 2)
            return run
        finished: Run = result.value
        return finished


def _result_or_exit(result: ChildResult) -> Any:
    if result.failure:
        raise SystemExit(result.failure)
    return result.value


def requested_sweeps(options: argparse.Namespace, door: str) -> Iterator[tuple[str, Kind, Iterator[int]]]:
    for sample in options.sample or ():
        sample_door, home, kind, numbers = sample.split(":")
        if sample_door == door:
            yield home, Kind[kind.upper()], iter([int(number) for number in numbers.split(",")])
    if options.sample:
        return
    for home in options.home or HOMES:
        for kind in options.kind or [kind.name.lower() for kind in Kind if kind is not Kind.OBJECT]:
            yield home, Kind[kind.upper()], iter(range(options.first, options.last + 1, options.every))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=DOORS, action="append", help="Default: both.")
    parser.add_argument("--home", choices=HOMES, action="append", help="Default: all.")
    kinds = [kind.name.lower() for kind in Kind]
    parser.add_argument("--kind", choices=kinds, action="append", help="Default: all but 'object'.")
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="N")
    parser.add_argument(
        "--to", dest="last", type=int, default=1 << 40, metavar="N", help="Default: until no call fails."
    )
    parser.add_argument("--every", type=int, default=1, metavar="K", help="Run every K-th number.")
    parser.add_argument("--sample", nargs="+", metavar="DOOR:HOME:KIND:N,N", help="Run only these.")
    parser.add_argument("--lasting", action="store_true", help="Make all calls from the n-th on fail until one raises.")
    options = parser.parse_args()
    if "FAIL_NTH" not in os.environ:
        os.execve(sys.executable, [sys.executable, str(Path(__file__)), *sys.argv[1:]], environment())
    os.environ.pop("LD_PRELOAD", None)  # child programs do not need it
    logging.getLogger("outofcore").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    load_native(), load_paging()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for door in options.door or DOORS:
            sweep = Sweep(door, Path(folder) / door)
            for home, kind, numbers in requested_sweeps(options, door):
                counts: dict[str, int] = {}
                begin = time.perf_counter()
                for number in numbers:
                    run = sweep.run(home, kind, number, options.lasting)
                    if not run.fired:
                        if options.sample:
                            continue
                        break
                    print(json.dumps(asdict(run)), flush=True)
                    outcome = "failed" if run.faults else run.outcome
                    counts[outcome] = counts.get(outcome, 0) + 1
                    failed += bool(run.faults)
                line = {"door": door, "home": home, "kind": kind.name.lower(), "runs": sum(counts.values())}
                print(json.dumps({**line, **counts, "seconds": round(time.perf_counter() - begin, 1)}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
