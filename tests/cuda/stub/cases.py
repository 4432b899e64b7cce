"""The cases of the suite that are not in tests/cuda; ``suite.py`` runs each in a process of its own.

    python build.py -- python cases.py NAME [key=value ...]

A case prints its result in one line after a marker. It fails by an exception or a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_visit import MARK
from models import CPU, CUDA, Job
from torch.utils.data import DataLoader, Dataset
from worlds import World, differing_tensors, train_eagerly

import outofcore
from outofcore.errors import ArenaError, BudgetError, DeviceError, StateError
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.follow import devices
from outofcore.follow.gpu import BudgetShares
from outofcore.program import CopyIn, CopyOut
from outofcore.step import Step
from outofcore.units import KIB, MIB

STEPS = 4


class WrongError(Exception):
    pass


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise WrongError(message)


def stub() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.stub_count.restype = ctypes.c_uint64
    library.stub_fail_after.argtypes = (ctypes.c_int64,)
    library.stub_fail_after.restype = None
    return library


# As StubCount in shared.h.
EVENTS, DEVICE_BYTES, PINNED_PIECES = 14, 11, 12


def describe_differences(actual: list[torch.Tensor], losses: list[torch.Tensor], final: Any, state: Any) -> str:
    """Name the steps and tensors in which two trainings differ by any bit; empty: none."""
    expect(all(torch.isfinite(loss) for loss in losses), f"plain PyTorch's losses are not finite: {losses}")
    steps = [index for index, (a, b) in enumerate(zip(actual, losses, strict=True)) if not torch.equal(a, b)]
    tensors = differing_tensors(final, state)
    return f"losses of steps {steps[:8]} and tensors {tensors[:4]} differ" if steps or tensors else ""


# Compiled steps


def find_smallest_budget(job: Job, home: str) -> int:
    """Return the smallest budget, from the refusal of a smaller one."""
    gc.collect()
    torch.cuda.empty_cache()
    world = job.world(CPU)
    backend = CudaBackend(CUDA)
    backend.prepare()
    budget = backend.unavailable_bytes(128 * MIB, 4, 0) + 256 * KIB
    for _ in range(24):
        with outofcore.compile(world.step, world.model, world.optimizer, budget=budget, device="cuda") as step:
            try:
                step(*world.batch(0))
            except BudgetError as error:
                if error.smallest_budget is not None:
                    return error.smallest_budget + 256 * KIB + (MIB if home == "disk" else 0)
        budget += 2 * MIB  # a library may take memory at first use
    raise WrongError(f"{budget} bytes are too few, and the refusal names no sufficient budget")


def compile_job(job: Job, policy: str, home: str, near: int | None = None, steps: int = STEPS) -> tuple[World, Step]:
    """Compile a model on the CPU within nearly the smallest budget."""
    world = job.world(CPU)
    budget = find_smallest_budget(job, home) + (MIB if policy == "auto" else 0)
    options: dict[str, Any] = {} if home == "host" else {"host_budget": near or 512 * KIB}
    step = outofcore.compile(
        world.step, world.model, world.optimizer, budget=budget, device="cuda", policy=policy, home=home, **options
    )
    return world, step


def count_copies(step: Step, home: int) -> int:
    return sum(isinstance(i, CopyIn | CopyOut) and i.home == home for i in step.planned.program.instructions)


def bits(
    model: str,
    update: str = "foreach",
    amp: str = "",
    policy: str = "offload-all",
    home: str = "host",
    steps: str = "4",
) -> str:
    """Check that a compiled step has the bits of plain PyTorch."""
    job, count = Job(model, update, bool(amp)), int(steps)
    losses, state = train_eagerly(job.world(CUDA), count)
    world, step = compile_job(job, policy, home)
    with step:
        torch.manual_seed(1)
        actual = [step(*world.batch(index)).cpu() for index in range(count)]
        copies, disk_copies = count_copies(step, 0), count_copies(step, 1)
        mismatch = describe_differences(actual, losses, world.state(), state)
        expect(not mismatch, mismatch)
        expect(policy != "offload-all" or copies + disk_copies > 10, f"only {copies + disk_copies} copies")
        expect(home == "host" or disk_copies > 4, f"only {disk_copies} copies to and from the disk")
    expect(not differing_tensors(world.state(), state), "close() leaves another model")
    return f"{count} steps equal, {copies} copies each, {disk_copies} with the disk"


# Eager loops


def arena_of_the_whole_budget() -> contextlib.AbstractContextManager[object]:
    """Make the arena as large as the budget; small tensors and workspaces are outside of it."""
    return mock.patch.object(devices, "measure_shares", lambda budget, device: BudgetShares(budget, 0, 8 * MIB))


@contextlib.contextmanager
def eager_loop(world: World, budget: int, **options: Any) -> Iterator[Any]:
    """Run a loop whose tensors of 64 KiB and more are within a budget."""
    with loop_within(budget, world.model, **options) as run:
        yield run


@contextlib.contextmanager
def loop_within(budget: int, model: torch.nn.Module, **options: Any) -> Iterator[Any]:
    with (
        arena_of_the_whole_budget(),
        outofcore.budget(budget, model, **{"policy": None, "cache": False, **options}) as run,
    ):
        yield run


def peak_of(job: Job) -> int:
    world = job.world(CUDA)
    with eager_loop(world, torch.cuda.get_device_properties(0).total_memory // 4) as run:
        for index in range(2):
            world.step(*world.batch(index))
        return run.stats.peak_bytes


def loop(model: str, update: str = "foreach", amp: str = "", share: str = "0.6", steps: str = "5") -> str:
    """Check that an eager loop has the bits of plain PyTorch."""
    job, count = Job(model, update, bool(amp)), int(steps)
    losses, state = train_eagerly(job.world(CUDA), count)
    budget = int(float(share) * peak_of(job))
    world = job.world(CUDA)
    with eager_loop(world, budget) as run:
        torch.manual_seed(1)
        actual = [world.step(*world.batch(index)).cpu() for index in range(count)]
        stats = run.stats
    mismatch = describe_differences(actual, losses, world.state(), state)
    expect(not mismatch, mismatch)
    expect(stats.evictions > 0, "no tensor was evicted")
    expect(stats.peak_bytes <= budget, f"{stats.peak_bytes} bytes of {budget} in use")
    return f"{count} steps equal, {stats.evictions} out, {stats.fetches} in"


# Long runs


def races(mode: str, steps: str = "1000") -> str:
    job, count, begin = Job("mlp", "fused"), int(steps), time.monotonic()
    losses, state = train_eagerly(job.world(CUDA), count)
    plain_s = time.monotonic() - begin
    if mode == "loop":
        budget = int(0.5 * peak_of(job))
        world = job.world(CUDA)
        with eager_loop(world, budget) as run:
            torch.manual_seed(1)
            actual = [world.step(*world.batch(index)).cpu() for index in range(count)]
            copies = run.stats.evictions + run.stats.fetches
    else:
        world, step = compile_job(job, "offload-all", mode, near=MIB)
        with step:
            torch.manual_seed(1)
            # Losses stay on the device, so that the host runs ahead.
            clones = [step(*world.batch(index)).clone() for index in range(count)]
            actual = [loss.cpu() for loss in clones]
            copies = count * (count_copies(step, 0) + count_copies(step, 1))
    mismatch = describe_differences(actual, losses, world.state(), state)
    expect(not mismatch, mismatch)
    own_s = time.monotonic() - begin - plain_s
    return (
        f"{count} steps equal, {copies} copies; {own_s / count * 1e3:.0f} ms a step, plain {plain_s / count * 1e3:.0f}"
    )


# Failures


def no_memory() -> str:
    """Check that a full device raises an error and leaves the model intact."""
    job = Job("mlp")

    def world(device: torch.device) -> World:
        small = job.world(device)
        return replace(small, batch=lambda index: tuple(torch.cat([t] * 24) for t in small.batch(index)))

    losses, state = train_eagerly(world(CUDA), STEPS)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    trained = world(CPU)
    step = outofcore.compile(
        trained.step, trained.model, trained.optimizer, budget=total * 3 // 4, device="cuda", policy="keep-all"
    )
    hog = ctypes.c_void_p()  # memory outside of PyTorch's allocator, as if another process had it
    expect(
        stub().cudaMalloc(ctypes.byref(hog), ctypes.c_size_t(free - 64 * MIB)) == 0,
        "no room to fill the device",
    )
    with step:
        torch.manual_seed(1)
        try:
            step(*trained.batch(0))
        except (ArenaError, torch.OutOfMemoryError) as error:
            refusal = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        else:
            raise WrongError("a step has run on a full device")
        stub().cudaFree(hog)
        torch.manual_seed(1)
        actual = [step(*trained.batch(index)).cpu() for index in range(STEPS)]
        mismatch = describe_differences(actual, losses, trained.state(), state)
        expect(not mismatch, f"after the device was full: {mismatch}")
    losses, state = train_eagerly(job.world(CUDA), STEPS)
    trained = job.world(CUDA)
    with eager_loop(trained, int(0.6 * peak_of(job))):
        torch.manual_seed(1)
        actual = []
        for index in range(STEPS):
            actual.append(trained.step(*trained.batch(index)).cpu())
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(2 * total, dtype=torch.uint8, device="cuda")
                raise WrongError("an allocation beyond the device memory succeeded")
    mismatch = describe_differences(actual, losses, trained.state(), state)
    expect(not mismatch, f"a loop with failing requests: {mismatch}")
    return f"refused ({refusal}), then {STEPS} steps equal; and in a loop with failing requests"


def engines() -> str:
    """Check that a convolution without scratch memory is refused, and that cuDNN keeps its engine."""
    layer = torch.nn.Conv2d(3, 8, 3).cuda()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    expected = layer(torch.zeros_like(x)).detach().cpu()
    os.environ["STUB_DNN_MIB"] = "64"
    try:
        with loop_within(16 * MIB, layer):
            try:
                layer(x[:3])
            except torch.OutOfMemoryError as error:
                message = str(error).splitlines()[0]
            else:
                raise WrongError("a convolution has run although the budget has no room for its scratch memory")
            expect("cannot hold aten::" in message and "convolution" in message, message)
            expect(layer(torch.zeros_like(x)).detach().cpu().equal(expected), "the loop does not continue correctly")
        with loop_within(128 * MIB, layer) as run:
            layer(x[:3]).sum().item()
            expect(run.stats.peak_bytes >= 64 * MIB, "cuDNN used another engine")
    finally:
        del os.environ["STUB_DNN_MIB"]
    return message[:80]


def device_error(mode: str, kernels: str = "40") -> str:
    """Check that a device failure in mid-step is reported, and that later calls neither hang nor crash."""
    job = Job("mlp")
    failures = (DeviceError, torch.AcceleratorError)
    if mode == "compiled":
        world, step = compile_job(job, "offload-all", "host")
        for index in range(2):
            step(*world.batch(index))
        batch = world.batch(2)
        stub().stub_fail_after(int(kernels))
        try:
            float(step(*batch))
        except failures as error:
            message = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        else:
            raise WrongError("the failure of the device was not reported")
        try:
            step(*batch)
        except StateError as error:
            expect("failed half way" in str(error), f"the next call raised {error}")
        except failures:
            pass  # the device failed after this step, which is complete; the next one reports it
        with contextlib.suppress(*failures):
            step.close()
        return message
    world = job.world(CUDA)
    peak = peak_of(job)
    try:
        with eager_loop(world, int(0.6 * peak)):
            for index in range(2):
                world.step(*world.batch(index))
            stub().stub_fail_after(int(kernels))
            for index in range(2, 5):
                float(world.step(*world.batch(index)))
    except failures as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    raise WrongError("the failure of the device was not reported")


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(256, generator=draw), torch.randint(0, 10, (), generator=draw)


def forks(mode: str) -> str:
    """Check training with forked workers, and with children that read the model."""
    job = Job("mlp")

    def batches() -> Iterator[Any]:
        for rows in DataLoader(Rows(), batch_size=16, num_workers=2, pin_memory=True):
            yield [part.cuda(non_blocking=True) for part in rows]

    plain = job.world(CUDA)
    torch.manual_seed(1)
    losses = [plain.step(*batch).cpu() for batch in batches()]

    def train(call: Callable[..., torch.Tensor], model: torch.nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        actual: list[torch.Tensor] = []
        for batch in batches():
            child = os.fork()
            if child == 0:  # the child reads host memory and must not call CUDA
                os._exit(0 if all(p.device.type != "cpu" or p.numel() for p in model.parameters()) else 1)
            actual.append(call(*batch).cpu())
            expect(os.waitpid(child, 0)[1] == 0, "a child has died")
        return actual

    if mode == "compiled":
        world, step = compile_job(job, "offload-all", "host")
        with step:
            actual = train(step, world.model)
            mismatch = describe_differences(actual, losses, world.state(), plain.state())
    else:
        peak, world = peak_of(job), job.world(CUDA)
        with eager_loop(world, int(0.6 * peak)):
            actual = train(world.step, world.model)
        mismatch = describe_differences(actual, losses, world.state(), plain.state())
    expect(not mismatch, mismatch)
    return f"{len(actual)} steps equal, with 2 workers and {len(actual)} children"


def _count_resources() -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    count = stub().stub_count
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "device MiB": count(DEVICE_BYTES) >> 20,
        "pinned pieces": count(PINNED_PIECES),
        "events": count(EVENTS),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def leaks(mode: str, times: str = "100") -> str:
    """Check that repeated opening and closing leaks no memory, events, files or threads."""
    job, count = Job("mlp", "fused"), int(times)
    counts_after: list[dict[str, int]] = []
    peak = peak_of(job) if mode == "loop" else 0
    budget = 0 if mode == "loop" else find_smallest_budget(job, mode)
    options: dict[str, Any] = {"host_budget": 512 * KIB} if mode == "disk" else {}
    for _ in range(count):
        world = job.world(CUDA if mode == "loop" else CPU)
        if mode == "loop":
            with eager_loop(world, int(0.6 * peak)):
                world.step(*world.batch(0))
        else:
            with outofcore.compile(
                world.step, world.model, world.optimizer, budget=budget, device="cuda", policy="offload-all", home=mode,
                **options,
            ) as step:  # fmt: skip
                step(*world.batch(0))
        del world
        counts_after.append(_count_resources())
    early, last = counts_after[count // 5], counts_after[-1]
    grown = {name: last[name] - early[name] for name in last if last[name] > early[name]}
    resident_growth = grown.pop("resident MiB", 0)
    expect(not grown, f"after {count} times there is more than after {count // 5}: {grown}")
    expect(
        resident_growth <= 48,
        f"{resident_growth} MiB more of resident memory after {count} times than after {count // 5}",
    )
    return f"{count} times: {last}, resident memory {resident_growth} MiB above that after {count // 5}"


CASES: dict[str, Callable[..., str]] = {
    "bits": bits,
    "loop": loop,
    "races": races,
    "no-memory": no_memory,
    "engines": engines,
    "device-error": device_error,
    "forks": forks,
    "leaks": leaks,
}


def main() -> int:
    name, *pairs = sys.argv[1:]
    options = dict(part.split("=", 1) for part in pairs)
    torch.use_deterministic_algorithms(True)
    result = CASES[name](**options)
    print(f"{MARK}{json.dumps({'say': result})}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
