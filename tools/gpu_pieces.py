"""The measurements of a GPU visit; ``gpu_visit.py`` runs them in processes of this file.

Each measurement returns its results, with a sentence under "say", or raises. The first failure ends the process,
because the device may be in an undefined state. All also run on the CUDA stub (``make gpu-stub ONLY=visit``).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from gpu_visit import MARK, ROOT

if TYPE_CHECKING:
    from following import TrainingResult

    from outofcore.execution.cuda.driver import CudaArena, CudaDriver
    from outofcore.runtime.homes import PinnedHome

sys.path[1:1] = [str(ROOT / "tests" / "cuda"), str(ROOT / "tests" / "shared")]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Measured = dict[str, Any]
_PLAN_LIMIT_S = 45


class WrongBitsError(Exception):
    """Training results differ from plain PyTorch's."""


class LostWaitError(Exception):
    """Work on one stream did not wait for work on another."""


class OverBudgetError(Exception):
    """Device memory exceeded the budget."""


class RefusedError(Exception):
    """An operation that must succeed failed."""


def print_result(**result: Any) -> None:
    print(f"{MARK}{json.dumps(result, default=str)}", flush=True)


def output_of(*command: str) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (process.stdout + process.stderr).strip()


# Part 1: the machine


def native_code(small: bool) -> Measured:
    """Build the native libraries of the GPU, the CPU and the planner concurrently."""
    begin = time.monotonic()
    import torch

    from outofcore.planning.placement import compiled as placing
    from outofcore.planning.remat import compiled as searching
    from outofcore.runtime.native import Flavor, load_native

    result: Measured = {"import_s": time.monotonic() - begin, "torch": torch.__version__}
    seconds: dict[str, float] = {}

    def build(name: str, load: Callable[[], Any]) -> None:
        started = time.monotonic()
        load()
        seconds[name] = round(time.monotonic() - started, 1)

    jobs: dict[str, Callable[[], Any]] = {
        "outofcore-cuda": lambda: load_native(Flavor.CUDA),
        "outofcore-cpu": load_native,
        "placement": placing.load_library,
        "remat": searching.load_library,
    }
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(build, name, load) for name, load in jobs.items()]:
            future.result()
    times = ", ".join(f"{name} {duration:.0f} s" for name, duration in seconds.items())
    return {**result, "build_s": seconds, "say": f"import {result['import_s']:.1f} s, then concurrently {times}"}


def machine(small: bool) -> Measured:
    """Describe the machine; details go to the log."""
    import torch

    for command in ("nvidia-smi", "nvidia-smi -q", "nvidia-smi topo -m", "lscpu", "free -g", "df -h", "uname -a"):
        print(f"$ {command}\n{output_of(*command.split())}", flush=True)
    print(output_of("bash", "-c", "ulimit -a; head /sys/kernel/mm/transparent_hugepage/*enabled; c++ --version"))
    print(output_of(sys.executable, "-m", "pip", "list"), flush=True)
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    facts: Measured = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "total": total,
        "context_bytes": total - free,
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version,
    }
    say = f"{properties.name}, {total / GIB:.0f} GiB, of which {(total - free) / MIB:.0f} MiB in use; "
    return {**facts, "say": f"{say}PyTorch {torch.__version__}, cuDNN {facts['cudnn']}, {facts['cpus']} processors"}


def host_memory(small: bool) -> Measured:
    """Touch 8 GiB from several processes; some machines allocate host memory only on first use."""
    before, count = _meminfo(), 64 * MIB if small else 8 * GIB
    begin = time.monotonic()
    _touch(count)
    duration, after = time.monotonic() - begin, _meminfo()
    say = f"{after['MemTotal'] >> 20} GiB, {after['MemAvailable'] >> 20} GiB of them available; "
    return {"before": before, "after": after, "say": f"{say}{count / GIB:.1f} GiB touched in {duration:.1f} s"}


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    prefixes = ("MemTotal:", "MemFree:", "MemAvailable:")
    return {line.split()[0].rstrip(":"): int(line.split()[1]) for line in lines if line.startswith(prefixes)}


def _touch(count: int) -> None:
    code = "import mmap,sys; m=mmap.mmap(-1,int(sys.argv[1])); [m.__setitem__(i,1) for i in range(0,len(m),4096)]"
    parts = max(min(os.cpu_count() or 1, 8), 1)
    processes = [subprocess.Popen([sys.executable, "-c", code, str(count // parts)]) for _ in range(parts)]
    for process in processes:
        process.wait()


# Part 2: streams, arena and links


def _driver() -> CudaDriver:
    import torch

    from outofcore.execution.cuda.driver import CudaDriver

    return CudaDriver(torch.device("cuda", 0))


@contextlib.contextmanager
def _home_and_arena(driver: CudaDriver, count: int) -> Iterator[tuple[PinnedHome, CudaArena]]:
    from outofcore.execution.cuda.backend import CudaBackend

    home = CudaBackend(driver.device, driver).home(count)
    home.ensure(count)
    arena = driver.open_arena(count, MIB)
    try:
        yield home, arena
    finally:
        driver.synchronize()
        arena.close()
        home.close()


def tape(small: bool) -> Measured:
    """Copy pieces in and out through one device buffer with a tape in which each copy waits for the previous one."""

    from outofcore.execution.cuda.interface import Action, DeviceCopy, RecordMark, Stream, WaitForMark

    driver, count, piece = _driver(), 32, 256 * KIB
    with _home_and_arena(driver, 2 * count * piece) as (home, opened), driver.step(None):
        device_view, into, out = opened.view(0, piece), driver.create_mark(), driver.create_mark()
        hosts = [home.tensor_of(number * piece, piece).fill_(number) for number in range(count)]
        backs = [home.tensor_of((count + number) * piece, piece).fill_(255) for number in range(count)]
        driver.record(Stream.COPY_OUT, out)
        actions: list[Action] = []
        for number in range(count):
            actions += [WaitForMark(Stream.COPY_IN, out), DeviceCopy(Stream.COPY_IN, 0, device_view, hosts[number])]
            actions += [RecordMark(Stream.COPY_IN, into), WaitForMark(Stream.COPY_OUT, into)]
            actions += [DeviceCopy(Stream.COPY_OUT, 1, backs[number], device_view), RecordMark(Stream.COPY_OUT, out)]
        play = driver.make_tape(actions)
        for _ in range(3):
            play()
            driver.synchronize()
            for number, (host, back) in enumerate(zip(hosts, backs, strict=True)):
                mismatch = back != host
                if not mismatch.any():
                    continue
                if int(back.min()) == int(back.max()):
                    raise LostWaitError(f"copy {number} did not wait for the previous copy: it copied other bytes")
                raise WrongBitsError(
                    f"{int(mismatch.sum())} bytes of copy {number} differ, the first is {int(back[mismatch][0])}"
                )
            for back in backs:
                back.fill_(255)
    return {"say": f"{3 * count} pieces copied in and out, each after the previous one"}


def arena(small: bool) -> Measured:
    """Check that a request is served at its planned offset."""
    import torch

    from outofcore.execution.arena import ScopeTable

    opened = _driver().open_arena(4 * MIB, MIB)
    table = ScopeTable(opened, [[(MIB, 512 * KIB)]])
    table.begin(0)
    tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    table.end()
    offset = tensor.data_ptr() - opened.address
    opened.close()
    if offset != 512 * KIB:
        raise RefusedError(f"a request was served at offset {offset} instead of {512 * KIB}")
    return {"say": "a request was served at its planned offset"}


def cap(small: bool) -> Measured:
    """Check that an arena beyond ``set_per_process_memory_fraction`` raises."""
    import torch

    from outofcore.errors import ArenaError

    driver = _driver()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + 64 * MIB) / total, 0)
    try:
        driver.open_arena(256 * MIB, MIB)
    except ArenaError:
        return {"say": "an arena beyond the cap raises ArenaError"}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    raise OverBudgetError("an arena beyond the cap was allocated")


def disk(small: bool) -> Measured:
    """Write and read a file by a driver's threads, in sequence and concurrently."""
    from outofcore.execution.cuda.interface import Stream
    from outofcore.runtime.homes import DiskHome

    driver = _driver()
    home = DiskHome(tempfile.mkdtemp(prefix="gpu-visit-", dir=os.environ.get("TMPDIR")))
    home.ensure(32 * MIB)
    memory = driver.allocate_staging(16 * MIB)
    memory.fill_(7)
    halves = {Stream.WRITE: (0, memory[: 8 * MIB]), Stream.READ: (16 * MIB, memory[8 * MIB :])}
    rates: dict[str, float] = {}
    count = 4 if small else 32
    with driver.step(None):
        driver.transfer(Stream.WRITE, -1, home, 16 * MIB, memory[8 * MIB :])
        driver.synchronize()
        for streams in ((Stream.WRITE,), (Stream.READ,), (Stream.WRITE, Stream.READ)):
            begin = time.monotonic()
            for _ in range(count):
                for stream in streams:
                    driver.transfer(stream, -1, home, *halves[stream])
            driver.synchronize()
            duration = time.monotonic() - begin
            rates[" and ".join(queue.name for queue in streams)] = count * len(streams) * 8 * MIB / duration
    threads = 0 if driver._lanes is None else len(driver._lanes.by_stream)
    if not int(memory.min()) == int(memory.max()) == 7:
        raise WrongBitsError("bytes read from the disk differ from the bytes written")
    is_direct = home._file is not None and home._file.direct
    home.close()
    rate_texts = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items())
    say = f"GB/s: {rate_texts}; {threads} driver threads"
    return {"bytes_per_s": rates, "direct": is_direct, "threads": threads, "say": say}


def copies(small: bool) -> Measured:
    """Measure copy rates by size, in one direction and in both concurrently."""
    rates = _copy_rates(_driver(), [64 * KIB, MIB, 16 * MIB, *(() if small else (256 * MIB,))])
    texts = [
        f"{row['mib']:g} MiB {row['alone_in'] / 1e9:.1f} in, {row['alone_out'] / 1e9:.1f} out, "
        f"{row['both_in'] / 1e9:.1f} and {row['both_out'] / 1e9:.1f} at once"
        for row in rates[::-1]
    ]
    return {"rates": rates, "say": f"GB/s: {'; '.join(texts)}"}


def _copy_rates(driver: CudaDriver, sizes: Sequence[int]) -> list[dict[str, float]]:
    from outofcore.execution.cuda.interface import Stream

    rows: list[dict[str, float]] = []
    for size in sizes:
        row: dict[str, float] = {"mib": size / MIB}
        rows.append(row)
        with _home_and_arena(driver, 2 * size) as (home, arena), driver.step(None):
            pairs = {
                "out": (home.tensor_of(0, size), arena.view(0, size)),
                "in": (arena.view(size, size), home.tensor_of(size, size)),
            }
            for name, directions in (("alone", ("in",)), ("alone", ("out",)), ("both", ("in", "out"))):
                streams = {
                    direction: Stream.COPY_OUT if direction == "out" else Stream.COPY_IN for direction in directions
                }
                marks = {
                    direction: (driver.create_mark(timed=True), driver.create_mark(timed=True))
                    for direction in directions
                }
                count = max(4, min(64, 64 * MIB // size))
                for direction in directions:
                    driver.record(streams[direction], marks[direction][0])
                for _ in range(count):
                    for direction in directions:
                        driver.copy(streams[direction], -1, *pairs[direction])
                for direction in directions:
                    driver.record(streams[direction], marks[direction][1])
                driver.synchronize()
                for direction in directions:
                    row[f"{name}_{direction}"] = count * size / max(driver.seconds(*marks[direction]), 1e-9)
    return rows


def issue_costs(small: bool) -> Measured:
    """Measure the host's microseconds for issuing copies, marks and waits."""
    from outofcore.execution.cuda.interface import DeviceCopy, RecordMark, Stream, WaitForMark

    driver = _driver()
    microseconds: dict[str, float] = {}
    with _home_and_arena(driver, MIB) as (home, arena), driver.step(None):
        host, device_view, mark = home.tensor_of(0, 64 * KIB), arena.view(0, 64 * KIB), driver.create_mark()
        many = [
            DeviceCopy(Stream.COPY_IN, -1, device_view, host),
            RecordMark(Stream.COPY_IN, mark),
            WaitForMark(Stream.COMPUTE, mark),
        ]
        actions: dict[str, tuple[Callable[[], object], int]] = {
            "copy, by PyTorch": (lambda: driver.copy_user_memory(Stream.COPY_IN, -1, device_view, host), 1),
            "copy": (lambda: driver.copy(Stream.COPY_IN, -1, device_view, host), 1),
            "record": (lambda: driver.record(Stream.COPY_IN, mark), 1),
            "wait": (lambda: driver.wait(Stream.COMPUTE, mark), 1),
            "one of a tape of 30": (driver.make_tape(many * 10), 30),
        }
        for name, (action, parts) in actions.items():
            best = float("inf")
            for _ in range(5):
                driver.synchronize()
                begin = time.perf_counter()
                for _ in range(100):
                    action()
                best = min(best, (time.perf_counter() - begin) / 100)
            microseconds[name] = round(best * 1e6 / parts, 2)
    return {
        "us": microseconds,
        "say": f"microseconds: {', '.join(f'{name} {us}' for name, us in microseconds.items())}",
    }


_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def pin(kind: str, small: bool) -> Measured:
    """Allocate pinned memory of one kind and measure copies."""
    import torch

    from outofcore.runtime.memory import map_anonymous, populate, unmap

    count = 64 * MIB if small else 8 * GIB
    setting = (_HUGE / "shmem_enabled").read_text(encoding="ascii").strip() if _HUGE.is_dir() else "never"
    if kind == "shared huge" and any(f"[{word}]" in setting for word in ("never", "deny")):
        return {"say": f"the kernel has no huge pages for shared memory: {setting}"}
    begin = time.monotonic()
    runtime: Any = torch.cuda.cudart()
    if kind == "cudaHostAlloc":
        memory = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        address, made_s = memory.data_ptr(), 0.0
    else:
        address = map_anonymous(count, shared=kind != "private huge")
        if kind == "shared":
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), _MADV_NOHUGEPAGE)
        populate(address, count)
        made_s = time.monotonic() - begin
        status = int(runtime.cudaHostRegister(address, count, 0))
        if status:
            raise RefusedError(f"cudaHostRegister of {count} bytes: error {status}")
        memory = torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    whole_s = time.monotonic() - begin
    piece = min(256 * MIB, count // 2)
    device_buffer = torch.empty(piece, dtype=torch.uint8, device="cuda")
    rates: dict[str, float] = {}
    for direction in ("in", "out"):
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        marks[0].record()
        for number in range(4):
            host = memory[number % 2 * piece : (number % 2 + 1) * piece]
            device_buffer.copy_(host, non_blocking=True) if direction == "in" else host.copy_(
                device_buffer, non_blocking=True
            )
        marks[1].record()
        torch.cuda.synchronize()
        rates[direction] = 4 * piece / (max(marks[0].elapsed_time(marks[1]), 1e-6) / 1e3)
    if kind != "cudaHostAlloc":
        del memory, host
        runtime.cudaHostUnregister(address)
        unmap(address, count)
    say = (
        f"{count / GIB:.2f} GiB in {whole_s:.2f} s, {count / GIB / whole_s:.1f} GiB/s, of which {made_s:.2f} s by the "
    )
    say += f"system; copies {rates['in'] / 1e9:.1f} GB/s in, {rates['out'] / 1e9:.1f} out"
    return {"whole_s": whole_s, "made_s": made_s, "rates": rates, "shmem_enabled": setting, "say": say}


_MADV_NOHUGEPAGE = getattr(mmap, "MADV_NOHUGEPAGE", 15)


# Parts 3 and 4: bits

_STEPS = 9
_FIRST_STEADY_STEP = 3  # first step after profiling, which takes memory of its own


def _make_deterministic() -> Any:
    import torch

    # cuBLAS is deterministic only with a workspace of fixed size. Set it here only: PyTorch 2.11 parses the variable
    # with a regular expression at each call of cuBLAS, which takes longer than the call.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    gc.collect()
    torch.cuda.empty_cache()
    return torch


def _make_world(name: str, device: Any) -> Any:
    from worlds import WORLDS, World

    from outofcore.zoo import workload

    if name != "gpt":
        return WORLDS[name](device)
    work = workload("gpt", batch=4, layers=3, width=128, context=64, amp=True)
    model = work.build().to(device)
    optimizer = work.optimizer(model)

    def batch(index: int) -> tuple[Any, ...]:
        return tuple(t.to(device) for t in next(work.batches(seed=index)))

    return World(model, optimizer, work.make_step(model, optimizer), batch)


@functools.cache
def _train_plainly(name: str) -> tuple[list[Any], dict[str, Any]]:
    import torch
    from worlds import train_eagerly

    return train_eagerly(_make_world(name, torch.device("cuda", 0)), _STEPS)


def _smallest_room(name: str, device: Any) -> int:
    """Return the smallest budget that a BudgetError names, without the memory of libraries."""
    import outofcore
    from outofcore.errors import BudgetError
    from outofcore.execution.cuda.backend import CudaBackend

    world = _make_world(name, "cpu")
    budget = CudaBackend(device).unavailable_bytes(128 * MIB, 4, 0) + 256 * KIB
    try:
        with outofcore.compile(world.step, world.model, world.optimizer, budget=budget, device=device) as step:
            step(*world.batch(0))
    except BudgetError as error:
        return (error.smallest_budget or budget) - budget + 512 * KIB
    return MIB


def compiled_bits(case: str, small: bool) -> Measured:
    """Compare a compiled step with plain PyTorch: all bits, and memory within the budget."""
    torch = _make_deterministic()
    from worlds import differing_tensors

    import outofcore
    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.program import CopyIn, CopyOut

    name, policy, *disk = case.split(", ")
    device = torch.device("cuda", 0)
    losses, state = _train_plainly(name)
    room = _smallest_room(name, device) + (4 * MIB if policy == "auto" else 0)
    gc.collect()
    torch.cuda.empty_cache()
    budget = room + CudaBackend(device, _driver()).unavailable_bytes(128 * MIB, 4, 0)
    # With this host budget, evicted tensors reach the disk.
    options: Measured = {"home": "disk", "host_budget": 512 * KIB} if disk else {"home": "host"}
    world = _make_world(name, "cpu")
    with outofcore.compile(
        world.step, world.model, world.optimizer, budget=budget, device="cuda", policy=policy, **options
    ) as step:
        torch.manual_seed(1)
        losses_of_step: list[Any] = []
        for index in range(_STEPS):
            if index == _FIRST_STEADY_STEP:
                torch.cuda.reset_peak_memory_stats()
            losses_of_step.append(step(*world.batch(index)).detach().cpu())
        reserved = torch.cuda.max_memory_reserved()
        copies = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut)]
        result: Measured = {
            "copies": len(copies),
            "disk_copies": sum(copy.home == 1 for copy in copies),
            "off_plan": step.stats.off_plan,
            "step_s": step.stats.seconds,
            "predicted_s": step.stats.predicted_seconds,
            "peak_reserved": reserved,
            "budget": budget,
        }
        wrong_tensors = differing_tensors(world.state(), state)
    wrong_steps = [
        index for index, (a, b) in enumerate(zip(losses_of_step, losses, strict=True)) if not torch.equal(a, b)
    ]
    if wrong_steps or wrong_tensors:
        summary = (
            f"losses of steps {wrong_steps}, {len(wrong_tensors)} of {len(state)} tensors, first {wrong_tensors[:3]}"
        )
        print_result(measurement=f"bits: {case}", **result)
        raise WrongBitsError(f"bits differ from plain PyTorch's: {summary}")
    if disk and not result["disk_copies"]:
        raise RefusedError(f"no copy reached the disk: {result}")
    _check_budget(reserved, budget)
    say = f"equal, {result['copies']} copies, {result['off_plan']} unplanned requests, "
    return {**result, "say": f"{say}{reserved / MIB:.1f} MiB of {budget / MIB:.1f} reserved"}


def _check_budget(reserved: int, budget: int) -> None:
    if reserved > budget:
        raise OverBudgetError(f"{reserved / MIB:.1f} MiB of the device were reserved within {budget / MIB:.1f} MiB")


@functools.cache
def _run_loop_plainly(name: str) -> tuple[TrainingResult, int]:
    """Return plain PyTorch's results, and the loop's peak bytes without eviction."""
    from following import peak_of, train_loop
    from gpu_loops import LOOPS

    return train_loop(*LOOPS[name])[0], peak_of(*LOOPS[name])


def loop_bits(case: str, small: bool) -> Measured:
    """Compare a loop within a budget with plain PyTorch: all values read and all state."""
    torch = _make_deterministic()
    from following import budget_for, train_loop
    from foreground_planning import WITHOUT_RECOMPUTATION, ForegroundPlanner
    from gpu_loops import LOOPS
    from loops import adamw

    from outofcore.follow import loop_planner

    loop_text, *policy_text = case.split(", ")
    name, _, share = loop_text.partition(" at ")
    plain, peak = _run_loop_plainly(name)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = budget_for(int(float(share) * peak), torch.device("cuda", 0))
    policy = WITHOUT_RECOMPUTATION if policy_text else None
    with mock.patch.object(loop_planner, "BackgroundPlanner", ForegroundPlanner):
        ours, stats = train_loop(*LOOPS[name], adamw, budget, policy=policy, cache=False)
    reserved = torch.cuda.max_memory_reserved()
    result: Measured = {"budget": budget, "peak_reserved": reserved, "loop": asdict(stats)}
    if differs := ours.differs_from(plain):
        print_result(measurement=f"loop: {case}", **result, differs=differs)
        steps_read = [
            number
            for number, pair in enumerate(zip(ours.read_values, plain.read_values, strict=False))
            if pair[0] != pair[1]
        ]
        raise WrongBitsError(
            f"bits differ from plain PyTorch's: {f'values read in steps {steps_read}' if steps_read else differs}"
        )
    if not stats.evictions or (policy_text and not stats.planned_ops):
        raise RefusedError(f"no tensor was evicted, or no plan was used: {stats}")
    _check_budget(reserved, budget)
    say = f"equal, {stats.evictions} out, {stats.fetches} in, {stats.plans} plans, {stats.planned_ops} ops planned; "
    return {**result, "say": f"{say}{reserved / MIB:.1f} MiB reserved, budget {budget / MIB:.1f}"}


# Parts 7 and 8: time


def _workload(name: str, small: bool) -> Any:
    from outofcore.zoo import workload

    if name == "gpt":
        shape = {"layers": 2, "width": 128, "context": 128} if small else {"layers": 12, "width": 768, "context": 512}
        return workload("gpt", batch=8, **shape, amp=True)
    if name == "25M":
        shape = {"layers": 2, "width": 128, "context": 64} if small else {"params": "25M", "context": 256}
        return workload("gpt", batch=4 if small else 32, **shape, optimizer="adamw")
    shape = {"batch": 4, "size": 32} if small else {"batch": 64, "size": 224}
    # On the stub's CPU, half precision may take ten times as long.
    return workload("resnet", **shape, images="generated", amp=not small, optimizer="momentum")


def _build_on_device(work: Any) -> tuple[Any, Callable[[], Any]]:
    model = work.build().cuda()
    batch = tuple(t.cuda() for t in next(work.batches()))
    step = work.make_step(model, work.optimizer(model))
    return model, lambda: step(*batch)


def _compile(work: Any, mode: str) -> Any:
    """Compile an in-core step in a mode such as "inductor graphs"."""
    import torch

    import outofcore

    model = work.build()
    optimizer = work.optimizer(model)
    return outofcore.compile(
        work.make_step(model, optimizer),
        model,
        optimizer,
        budget=torch.cuda.get_device_properties(0).total_memory // 2,
        device="cuda",
        policy="offload-all" if mode.endswith("offloaded") else "auto",
        replay="graphs" if mode.endswith("graphs") else True,
        kernels="inductor" if mode.startswith("inductor") else "eager",
    )


def host_time(case: str, small: bool) -> Measured:
    """Measure host time and total time of a step, and the share in which a kernel runs."""
    import torch

    import outofcore

    name, mode = case.split(", ")
    work = _workload(name, small)
    total = torch.cuda.get_device_properties(0).total_memory
    result: Measured = {"job": f"{name}, host", "mode": mode}
    with contextlib.ExitStack() as stack:
        if mode in ("plain", "followed"):
            model, step = _build_on_device(work)
            if mode == "followed":
                run = stack.enter_context(outofcore.budget(total // 4, model, cache=False))
                _step_until_planned(run, step)  # planning would take Python time
        else:
            compiled = stack.enter_context(_compile(work, mode))
            batch = tuple(t.cuda() for t in next(work.batches()))

            def step() -> Any:
                return compiled(*batch)

        host_s, whole_s = _host_and_total_seconds(step, 10, 6 if small else 12)
        busy, _ = _kernel_shares(step)
        if mode not in ("plain", "followed"):
            result["instructions"] = len(compiled.planned.program.instructions)
            result["predicted_s"] = compiled.stats.predicted_seconds
    result |= {"host_s": host_s, "seconds_a_step": whole_s, "busy": busy}
    say = f"host {host_s * 1e3:.2f} ms of {whole_s * 1e3:.2f} ms"
    return {**result, "say": say + (f", kernels run {busy:.0%} of it" if busy is not None else "")}


def _step_until_planned(run: Any, step: Callable[[], Any]) -> float:
    """Run steps until the loop uses a plan or a time limit ends; return the seconds."""
    import torch

    begin = time.monotonic()
    while not run.stats.planned_ops and time.monotonic() - begin < _PLAN_LIMIT_S:
        step()
        torch.cuda.synchronize()
    return time.monotonic() - begin


def _host_and_total_seconds(step: Callable[[], Any], warm_up: int, steps: int) -> tuple[float, float]:
    import torch

    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    host: list[float] = []
    total: list[float] = []
    for _ in range(steps):
        begin, cpu = time.perf_counter(), time.process_time()
        step()
        host.append(time.process_time() - cpu)
        torch.cuda.synchronize()
        total.append(time.perf_counter() - begin)
    return statistics.median(host), statistics.median(total)


def _kernel_shares(step: Callable[[], object]) -> tuple[float | None, float | None]:
    """Return the share of a step in which kernels run, and the share of copy time that overlaps with kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        duration = time.perf_counter() - begin
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_copy = event.name.startswith("Memcpy") and ("HtoD" in event.name or "DtoH" in event.name)
            spans[is_copy].append((event.time_range.start, event.time_range.end))
    kernels, moves = _join_spans(spans[False]), _join_spans(spans[True])
    if not kernels:
        return None, None
    overlapped = sum(max(min(a, b) - max(s, t), 0) for s, a in kernels for t, b in moves)
    copied = sum(end - start for start, end in moves)
    return sum(end - start for start, end in kernels) / 1e6 / duration, overlapped / copied if copied else None


def _join_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _peak_in_use(work: Any) -> int:
    import torch

    import outofcore

    model, step = _build_on_device(work)
    total = torch.cuda.get_device_properties(0).total_memory
    with outofcore.budget(total // 4, model, policy=None, cache=False) as run:
        for _ in range(2):
            step()
        return run.stats.peak_bytes


def loop_at_half(mode: str, small: bool) -> Measured:
    """Measure a loop over a GPT of 25 million parameters at half of its peak, once it has a plan."""
    import torch
    from following import budget_for
    from gpu_rows import time_steps

    import outofcore

    work = _workload("25M", small)
    result: Measured = {"job": "GPT, 25M, at half", "mode": mode}
    steps = 4 if small else 10
    if mode == "plain":
        _, step = _build_on_device(work)
        result |= time_steps(step, 10, steps)
        return {**result, "say": f"{result['seconds_a_step'] * 1e3:.2f} ms"}
    # Allocator segments with small tensors of the model stay when it leaves the device.
    budget = budget_for(_peak_in_use(work) // 2, torch.device("cuda", 0)) + 4 * MIB
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model, step = _build_on_device(work)
    with outofcore.budget(budget, model, cache=False) as run:
        planned_s = _step_until_planned(run, step)
        result |= time_steps(step, 10, steps)
        _, overlapped = _kernel_shares(step)
        stats = run.stats
    reserved = torch.cuda.max_memory_reserved()
    _check_budget(reserved, budget)
    result |= {"cap": budget, "peak_reserved": reserved, "planned_s": planned_s}
    result |= {"loop": asdict(stats), "overlapped": overlapped}
    result.pop("losses")  # not comparable: other steps than plain PyTorch's
    say = f"{result['seconds_a_step'] * 1e3:.2f} ms in {budget / MIB:.0f} MiB, after {planned_s:.0f} s with "
    say += f"{stats.plans} plans, {stats.planned_ops} of {stats.ops} ops planned, "
    say += f"{stats.fetches_ahead} of {stats.fetches} fetches ahead"
    if overlapped is not None:
        say += f"; {overlapped:.0%} of the copies' time overlaps with kernels"
    return {**result, "say": say if stats.planned_ops else f"ON DEMAND, no plan: {say}"}


# Part 11: results of kernels


def fakes(name: str, small: bool) -> Measured:
    """Run each op family of a model once and compare the results with the captured ones."""
    import torch

    from outofcore import _torch_internals as internals
    from outofcore.capture import capture_step
    from outofcore.errors import CaptureError
    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.planning.placement.requests import Requests
    from outofcore.profiling.faithfulness import find_differences
    from outofcore.profiling.ops import _OpBench
    from outofcore.profiling.scratch import contents_to_try
    from outofcore.transforms.passes import rewrite_for_lowest_memory

    backend = CudaBackend(torch.device("cuda", 0))
    backend.prepare()
    step, models, optimizers, batch = _models(small)[name]()
    try:
        captured = rewrite_for_lowest_memory(
            capture_step(step, models, optimizers, batch, {}, backend.device)
        ).align_to(512)
    except CaptureError as error:  # the library rejects such a step, too
        return {"refused": str(error), "say": f"cannot be captured: {error}"}
    families: dict[str, Any] = {}
    for op in captured.graph.ops:
        if op.touched and (op.rerunnable or captured.calls[op.id].rehearse is not None):
            families.setdefault(op.family or f"#{op.id}", op)
    rows: list[Measured] = []
    with _OpBench(captured, backend) as bench:
        for op in families.values():
            call = captured.calls[op.id]
            failure = ""
            for contents in contents_to_try(captured.device):
                try:
                    run, *_ = bench._bind(op, Requests((), 0), contents)
                    with internals.below_autograd():
                        leaves = internals.result_leaves((call.rehearse or call.func)(*run.args, **run.kwargs))
                        backend.driver.synchronize()
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"[:400]
                    if "CUDA error" in failure or "device failed" in failure:
                        raise
                    continue
                rows += [
                    {"op": op.name, "what": d.aspect, "real": d.real, "captured": d.captured, "survived": d.is_harmless}
                    for d in find_differences(captured, op, leaves)
                ]
                failure = ""
                del leaves
                break
            if failure:
                rows.append({"op": op.name, "what": "raises", "real": failure})
    failures = Counter(f"{row['op']} {row['what']}" for row in rows if not row.get("survived"))
    result: Measured = {"families": len(families), "unseen": len(captured.graph.unused), "differences": rows}
    if failures:
        print_result(measurement=f"fakes: {name}", **result)
        raise RefusedError(f"a step would raise for {', '.join(failures)}")
    return {**result, "say": f"{len(families)} families, {len(rows)} results differ in layout and are copied"}


_TrainingParts = tuple[Callable[..., Any], list[Any], list[Any], tuple[Any, ...]]


def _models(small: bool) -> dict[str, Callable[[], _TrainingParts]]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    from outofcore.zoo import workload

    def of_zoo(name: str, **options: Any) -> Callable[[], _TrainingParts]:
        def make() -> _TrainingParts:
            work = workload(name, **options)
            model = work.build()
            optimizer = work.optimizer(model)
            return work.make_step(model, optimizer), [model], [optimizer], next(work.batches())

        return make

    def plain(
        model: Callable[[], nn.Module], batch: Callable[[], tuple[Any, ...]], dtype: Any = None
    ) -> Callable[[], _TrainingParts]:
        def make() -> _TrainingParts:
            torch.manual_seed(0)
            net = model()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

            def step(*xs: Any) -> Any:
                with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
                    out = net(*xs)
                    out = out[0] if isinstance(out, tuple) else out
                    loss = out.float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return step, [net], [optimizer], batch()

        return make

    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.to(memory_format=torch.channels_last)

        def forward(self, x: Any) -> Any:
            return F.relu(self.norm(self.conv(x.to(memory_format=torch.channels_last))))

    class Attention(nn.Module):
        def __init__(self, kind: Any, *, causal: bool = True, mask: bool = False, dropout: float = 0.0) -> None:
            super().__init__()
            self.qkv, self.kind, self.causal, self.mask, self.dropout = nn.Linear(64, 192), kind, causal, mask, dropout

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).view(2, 64, 3, 2, 32).permute(2, 0, 3, 1, 4)
            mask = torch.ones(64, 64, dtype=torch.bool, device=x.device).tril() if self.mask else None
            with torch.nn.attention.sdpa_kernel(self.kind):
                return F.scaled_dot_product_attention(
                    q, k, v, mask, self.dropout, is_causal=self.causal and mask is None
                )

    backends = torch.nn.attention.SDPBackend

    def tokens() -> tuple[Any, ...]:
        return (torch.randn(2, 64, 64),)

    half = torch.bfloat16
    edge = 32 if small else 64
    return {
        "gpt, autocast": of_zoo("gpt", batch=2, layers=2, width=128, context=64, amp=True),
        "gpt, fused": of_zoo("gpt", batch=2, layers=2, width=128, context=64, optimizer_impl="fused"),
        "resnet": of_zoo("resnet", batch=4, depth=50, size=edge, images="generated", optimizer="momentum"),
        "resnet, autocast": of_zoo("resnet", batch=4, depth=50, size=edge, images="generated", amp=True),
        "vgg16": of_zoo("vgg16", batch=2, size=edge, images="generated", optimizer="sgd"),
        "densenet121": of_zoo("densenet121", batch=2, size=edge, images="generated", optimizer="rmsprop"),
        "unet3d": of_zoo("unet3d", batch=1, size=16, base=8, optimizer="adagrad"),
        "unet3d, autocast": of_zoo("unet3d", batch=1, size=16, base=8, amp=True),
        "lstm": plain(lambda: nn.LSTM(32, 48, 2, batch_first=True), lambda: (torch.randn(4, 10, 32),)),
        # Its dropout state is drawn on the host in the first call, which capture cannot see.
        "lstm, dropout": plain(lambda: nn.LSTM(32, 48, 2, dropout=0.1), lambda: (torch.randn(10, 4, 32),)),
        "gru, two ways": plain(lambda: nn.GRU(32, 48, bidirectional=True), lambda: (torch.randn(10, 4, 32),)),
        "channels last": plain(ChannelsLast, lambda: (torch.randn(2, 8, 16, 16),)),
        "channels last, autocast": plain(ChannelsLast, lambda: (torch.randn(2, 8, 16, 16),), half),
        "convolution 3d": plain(
            lambda: nn.Sequential(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8)), lambda: (torch.randn(2, 2, 8, 8, 8),)
        ),
        "attention, flash": plain(lambda: Attention(backends.FLASH_ATTENTION), tokens, half),
        "attention, flash, dropout": plain(lambda: Attention(backends.FLASH_ATTENTION, dropout=0.1), tokens, half),
        "attention, efficient": plain(lambda: Attention(backends.EFFICIENT_ATTENTION, mask=True), tokens),
        "attention, efficient, dropout": plain(lambda: Attention(backends.EFFICIENT_ATTENTION, dropout=0.1), tokens),
        "attention, cudnn": plain(lambda: Attention(backends.CUDNN_ATTENTION), tokens, half),
        "attention, math": plain(lambda: Attention(backends.MATH, causal=False), tokens),
        "convolution 1d, group norm": plain(
            lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), lambda: (torch.randn(2, 4, 16),)
        ),
    }


# Part 12: compiled kernels

_KERNEL_STEPS = 5
_LOSS_TOLERANCE = 0.02  # relative tolerance between losses with Inductor's and PyTorch's kernels in half precision


def compiled_kernels(case: str, small: bool) -> Measured:
    """Compare bits of Inductor's kernels at two budgets, or measure step times."""
    import torch

    name, mode = case.split(", ")
    if mode != "bits":
        return _measure_kernel_times(name, mode, small)
    try:
        return _compare_kernel_bits(name, small)
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # later measurements are timed


def _compare_kernel_bits(name: str, small: bool) -> Measured:
    torch = _make_deterministic()
    from worlds import World, differing_tensors

    import outofcore
    from outofcore.errors import BudgetError
    from outofcore.execution.cuda.backend import CudaBackend

    device = torch.device("cuda", 0)
    in_core_budget = torch.cuda.get_device_properties(0).total_memory // 2
    results: Measured = {}

    def make_world() -> Any:
        if name != "gpt":
            return _make_world(name, "cpu")
        work = _workload(name, small)
        model = work.build()
        optimizer = work.optimizer(model)
        return World(model, optimizer, work.make_step(model, optimizer), lambda seed: next(work.batches(seed=seed)))

    def train(label: str, budget: int, **options: Any) -> tuple[list[Any], dict[str, Any], int]:
        world, begin = make_world(), time.monotonic()
        with outofcore.compile(
            world.step, world.model, world.optimizer, budget=budget, device="cuda", **options
        ) as step:
            torch.manual_seed(1)
            losses = [step(*world.batch(index)).detach().cpu() for index in range(_KERNEL_STEPS)]
            arena = step.planned.program.arena_bytes
            results[label] = {
                **_kernel_facts(step),
                "seconds": time.monotonic() - begin,
                "budget": budget,
                "arena": arena,
            }
            results[label]["losses"] = [float(loss) for loss in losses]
            state = world.state()
        gc.collect()
        torch.cuda.empty_cache()
        print_result(measurement=f"kernels: {name}, bits", **results)
        return losses, state, arena

    losses_in_core, state, arena = train("in core", in_core_budget, kernels="inductor")
    if not results["in core"]["kernels"]:
        raise RefusedError("Inductor compiled no kernel; see the log")
    half = arena // 2 + CudaBackend(device, _driver()).unavailable_bytes(128 * MIB, 4, 0)
    options: Measured = {"kernels": "inductor", "policy": "offload-all"}
    try:
        losses_at_half, state_at_half, _ = train("at half", half, **options)
    except BudgetError as error:  # an optimizer that updates all parameters jointly may need more
        losses_at_half, state_at_half, _ = train("at half", (error.smallest_budget or half) + 512 * KIB, **options)
    plain_losses, _, _ = train("own kernels", in_core_budget)
    wrong_steps = [
        index for index, (a, b) in enumerate(zip(losses_in_core, losses_at_half, strict=True)) if not torch.equal(a, b)
    ]
    wrong_tensors = differing_tensors(state_at_half, state)
    if wrong_steps or wrong_tensors:
        summary = (
            f"losses of steps {wrong_steps}, {len(wrong_tensors)} of {len(state)} tensors, first {wrong_tensors[:3]}"
        )
        raise WrongBitsError(f"bits at half of the memory differ from those in core: {summary}")
    relative_errors = [
        abs(float(a) - float(b)) / abs(float(b)) for a, b in zip(losses_in_core, plain_losses, strict=True)
    ]
    results["apart"] = relative_errors
    if not max(relative_errors) < _LOSS_TOLERANCE:
        raise WrongBitsError(
            f"losses differ from PyTorch's kernels' by {relative_errors}, relative; limit {_LOSS_TOLERANCE}"
        )
    say = (
        f"equal in core and at half, {results['in core']['kernels']} ops of {results['in core']['distinct']} kernels, "
    )
    say += (
        f"{results['at half']['off_plan']} unplanned requests; "
        f"losses differ by {relative_errors[0]:.0e} to {max(relative_errors):.0e} from PyTorch's kernels; "
    )
    durations = ", ".join(
        f"{label_of_run} {results[label_of_run]['seconds']:.0f} s"
        for label_of_run in ("in core", "at half", "own kernels")
    )
    return {**results, "say": f"{say}{durations}"}


def _kernel_facts(step: Any) -> Measured:
    from outofcore.transforms.kernels import Kernel

    kernels = [call.func for call in step.captured.calls if isinstance(call.func, Kernel)]
    return {
        "kernels": len(kernels),
        "distinct": len({kernel.recipe.text for kernel in kernels}),
        "ops": len(step.captured.calls),
        "off_plan": step.stats.off_plan,
        "names": Counter(kernel.recipe.name for kernel in kernels).most_common(12),
    }


def _measure_kernel_times(name: str, mode: str, small: bool) -> Measured:
    import torch

    work = _workload(name, small)
    result: Measured = {"job": f"{name}, kernels", "mode": mode}
    with contextlib.ExitStack() as stack:
        if mode in ("plain", "torch.compile"):
            model = work.build().cuda()
            if mode == "torch.compile":
                model.compile()
            run = work.make_step(model, work.optimizer(model))
        else:
            run = stack.enter_context(_compile(work, mode))
        batch = tuple(t.cuda() for t in next(work.batches()))
        torch.manual_seed(1)
        torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        losses = [run(*batch).detach().clone()]
        torch.cuda.synchronize()
        result["first_s"] = time.monotonic() - begin
        if mode not in ("plain", "torch.compile"):
            result |= _kernel_facts(run)
        print_result(measurement=f"kernels: {name}, {mode}", **result)
        losses += [run(*batch).detach().clone() for _ in range(_KERNEL_STEPS - 1)]
        # With another summation order, later losses in half precision diverge.
        result["losses"] = [float(loss) for loss in (losses if mode in ("plain", "own") else losses[:1])]
        host_s, whole_s = _host_and_total_seconds(lambda: run(*batch), 8, 4 if small else 12)
        result |= {"host_s": host_s, "seconds_a_step": whole_s, "peak_reserved": torch.cuda.max_memory_reserved()}
        busy, _ = _kernel_shares(lambda: run(*batch))
    result["busy"] = busy
    say = f"host {host_s * 1e3:.2f} ms of {whole_s * 1e3:.2f} ms"
    say += f", kernels run {busy:.0%} of it" if busy is not None else ""
    if result.get("kernels"):
        say += f"; {result['kernels']} of {result['ops']} ops by {result['distinct']} kernels"
    return {**result, "say": f"{say}; first step {result['first_s']:.1f} s, {result['peak_reserved'] / MIB:.0f} MiB"}


def row(name: str, small: bool) -> Measured:
    """Measure one row of ``gpu_rows.py``."""
    from gpu_rows import measure

    # Let plain PyTorch use memory as well as it can; an arena is one segment.
    if not name.endswith("ours"):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return measure(name, small)


SINGLE: dict[str, Callable[[bool], Measured]] = {
    "native code": native_code,
    "machine": machine,
    "host memory": host_memory,
    "tape": tape,
    "arena": arena,
    "cap": cap,
    "copies": copies,
    "issue costs": issue_costs,
    "disk": disk,
}
FAMILIES: dict[str, Callable[[str, bool], Measured]] = {
    "pin": pin,
    "bits": compiled_bits,
    "loop": loop_bits,
    "row": row,
    "host": host_time,
    "half": loop_at_half,
    "fakes": fakes,
    "kernels": compiled_kernels,
}


def find_measurement(name: str) -> Callable[[bool], Measured]:
    """Return the measurement with a name such as "cap", "pin: shared" or "row 3: ours"."""
    if name in SINGLE:
        return SINGLE[name]
    family, case = name.split(" ", 1)
    return functools.partial(FAMILIES[family.rstrip(":")], case)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        print(f"--- {name}", flush=True)
        begin = time.monotonic()
        try:
            result = find_measurement(name)(arguments.small)
        except Exception as error:
            traceback.print_exc()
            print_result(
                measurement=name, passed=False, seconds=round(time.monotonic() - begin, 1), error=type(error).__name__,
                detail=str(error)[:1500],
            )  # fmt: skip
            return 1
        print_result(measurement=name, passed=True, seconds=round(time.monotonic() - begin, 1), **result)
        gc.collect()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
