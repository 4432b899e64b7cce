"""The cases of the suite that tests/cuda does not have: each a process of its own, started by ``suite.py``.

    python build.py -- python cases.py NAME [key=value ...]

A case prints what it has seen in one line behind a mark; it fails by an exception, or by dying.
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
    """What was found is not what it has to be."""


def expect(holds: bool, what: str) -> None:
    """Refuse what does not hold.

    Raises:
        WrongError: it does not.
    """
    if not holds:
        raise WrongError(what)


def stub() -> ctypes.CDLL:
    """The stub itself, which is loaded already."""
    library = ctypes.CDLL(None)
    library.stub_count.restype = ctypes.c_uint64
    library.stub_fail_after.argtypes = (ctypes.c_int64,)
    library.stub_fail_after.restype = None
    return library


# As StubCount in shared.h.
EVENTS, DEVICE_BYTES, PINNED_PIECES = 14, 11, 12


def describe_differences(found: list[torch.Tensor], losses: list[torch.Tensor], now: Any, state: Any) -> str:
    """Where two trainings differ by any bit; empty: nowhere."""
    expect(all(torch.isfinite(loss) for loss in losses), f"plain PyTorch itself has no numbers: {losses}")
    steps = [index for index, (a, b) in enumerate(zip(found, losses, strict=True)) if not torch.equal(a, b)]
    tensors = differing_tensors(now, state)
    return f"losses of steps {steps[:8]} and tensors {tensors[:4]} differ" if steps or tensors else ""


# Compiled steps


def least(job: Job, home: str) -> int:
    """The smallest budget, as the refusal of a smaller one tells."""
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
        budget += 2 * MIB  # for what a library takes on the way
    raise WrongError(f"{budget} bytes are neither refused with what would do, nor enough")


def compile_job(job: Job, policy: str, home: str, near: int | None = None, steps: int = STEPS) -> tuple[World, Step]:
    """A model given on the CPU, in a budget that nearly nothing less would do for."""
    world = job.world(CPU)
    budget = least(job, home) + (MIB if policy == "auto" else 0)
    options: dict[str, Any] = {} if home == "host" else {"host_budget": near or 512 * KIB}
    step = outofcore.compile(
        world.step, world.model, world.optimizer, budget=budget, device="cuda", policy=policy, home=home, **options
    )
    return world, step


def moved(step: Step, home: int) -> int:
    """Copies of a step to and from a home."""
    return sum(isinstance(i, CopyIn | CopyOut) and i.home == home for i in step.planned.program.instructions)


def bits(
    model: str,
    update: str = "foreach",
    amp: str = "",
    policy: str = "offload-all",
    home: str = "host",
    steps: str = "4",
) -> str:
    """A compiled step has the bits of plain PyTorch."""
    job, count = Job(model, update, bool(amp)), int(steps)
    losses, state = train_eagerly(job.world(CUDA), count)
    world, step = compile_job(job, policy, home)
    with step:
        torch.manual_seed(1)
        found = [step(*world.batch(index)).cpu() for index in range(count)]
        copies, far = moved(step, 0), moved(step, 1)
        wrong = describe_differences(found, losses, world.state(), state)
        expect(not wrong, wrong)
        expect(policy != "offload-all" or copies + far > 10, f"only {copies + far} copies")
        expect(home == "host" or far > 4, f"only {far} copies to and from the disk")
    expect(not differing_tensors(world.state(), state), "the model that close() leaves is another one")
    return f"{count} steps equal, {copies} copies each, {far} with the disk"


# Followed loops


def arena_of_the_whole_budget() -> contextlib.AbstractContextManager[object]:
    """Small tensors and workspaces lie beside the budget."""
    return mock.patch.object(devices, "shares_of", lambda budget, device: BudgetShares(budget, 0, 8 * MIB))


@contextlib.contextmanager
def followed(world: World, budget: int, **options: Any) -> Iterator[Any]:
    """A loop whose tensors of 64 KiB and more are within a budget."""
    with loop_within(budget, world.model, **options) as run:
        yield run


@contextlib.contextmanager
def loop_within(budget: int, model: torch.nn.Module, **options: Any) -> Iterator[Any]:
    """The same of any model."""
    with (
        arena_of_the_whole_budget(),
        outofcore.budget(budget, model, **{"policy": None, "cache": False, **options}) as run,
    ):
        yield run


def peak_of(job: Job) -> int:
    """Bytes that a followed loop has in use at the most where it may have all that it likes."""
    world = job.world(CUDA)
    with followed(world, torch.cuda.get_device_properties(0).total_memory // 4) as run:
        for index in range(2):
            world.step(*world.batch(index))
        return run.stats.peak_bytes


def loop(model: str, update: str = "foreach", amp: str = "", share: str = "0.6", steps: str = "5") -> str:
    """A loop that is followed reads the numbers of plain PyTorch."""
    job, count = Job(model, update, bool(amp)), int(steps)
    losses, state = train_eagerly(job.world(CUDA), count)
    budget = int(float(share) * peak_of(job))
    world = job.world(CUDA)
    with followed(world, budget) as run:
        torch.manual_seed(1)
        found = [world.step(*world.batch(index)).cpu() for index in range(count)]
        stats = run.stats
    wrong = describe_differences(found, losses, world.state(), state)
    expect(not wrong, wrong)
    expect(stats.evictions > 0, "nothing has left")
    expect(stats.peak_bytes <= budget, f"{stats.peak_bytes} bytes of {budget} in use")
    return f"{count} steps equal, {stats.evictions} out, {stats.fetches} in"


# A thousand steps


def races(how: str, steps: str = "1000") -> str:
    """As many steps as races need to show: no byte of what left and came back differs."""
    job, count, begin = Job("mlp", "fused"), int(steps), time.monotonic()
    losses, state = train_eagerly(job.world(CUDA), count)
    plain_s = time.monotonic() - begin
    if how == "loop":
        budget = int(0.5 * peak_of(job))
        world = job.world(CUDA)
        with followed(world, budget) as run:
            torch.manual_seed(1)
            found = [world.step(*world.batch(index)).cpu() for index in range(count)]
            copies = run.stats.evictions + run.stats.fetches
    else:
        world, step = compile_job(job, "offload-all", how, near=MIB)
        with step:
            torch.manual_seed(1)
            # Losses stay on the device, so that the host runs ahead.
            kept = [step(*world.batch(index)).clone() for index in range(count)]
            found = [loss.cpu() for loss in kept]
            copies = count * (moved(step, 0) + moved(step, 1))
    wrong = describe_differences(found, losses, world.state(), state)
    expect(not wrong, wrong)
    taken = time.monotonic() - begin - plain_s
    return (
        f"{count} steps equal, {copies} copies; {taken / count * 1e3:.0f} ms a step, plain {plain_s / count * 1e3:.0f}"
    )


# What goes wrong


def no_memory() -> str:
    """A device that is full says so, and what is there stays whole."""
    job = Job("mlp")

    def world(device: torch.device) -> World:
        small = job.world(device)
        return replace(small, batch=lambda index: tuple(torch.cat([t] * 24) for t in small.batch(index)))

    losses, state = train_eagerly(world(CUDA), STEPS)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    ours = world(CPU)
    step = outofcore.compile(
        ours.step, ours.model, ours.optimizer, budget=total * 3 // 4, device="cuda", policy="keep-all"
    )
    hog = ctypes.c_void_p()  # not PyTorch's: as if another process had it
    expect(stub().cudaMalloc(ctypes.byref(hog), ctypes.c_size_t(free - 64 * MIB)) == 0, "there is no room for a hog")
    with step:
        torch.manual_seed(1)
        try:
            step(*ours.batch(0))
        except (ArenaError, torch.OutOfMemoryError) as error:
            refused = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        else:
            raise WrongError("a step has run on a device that is full")
        stub().cudaFree(hog)
        torch.manual_seed(1)
        found = [step(*ours.batch(index)).cpu() for index in range(STEPS)]
        wrong = describe_differences(found, losses, ours.state(), state)
        expect(not wrong, f"after the device had been full: {wrong}")
    losses, state = train_eagerly(job.world(CUDA), STEPS)
    ours = job.world(CUDA)
    with followed(ours, int(0.6 * peak_of(job))):
        torch.manual_seed(1)
        found = []
        for index in range(STEPS):
            found.append(ours.step(*ours.batch(index)).cpu())
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(2 * total, dtype=torch.uint8, device="cuda")
                raise WrongError("there was more than all memory")
    wrong = describe_differences(found, losses, ours.state(), state)
    expect(not wrong, f"a loop beside requests that fail: {wrong}")
    return f"refused ({refused}), then {STEPS} steps equal; a loop with requests that fail as well"


def engines() -> str:
    """A convolution whose scratch memory is refused is refused, and cuDNN does not take another engine for good."""
    layer = torch.nn.Conv2d(3, 8, 3).cuda()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    expected = layer(torch.zeros_like(x)).detach().cpu()
    os.environ["STUB_DNN_MIB"] = "64"
    try:
        with loop_within(16 * MIB, layer):
            try:
                layer(x[:3])
            except torch.OutOfMemoryError as error:
                told = str(error).splitlines()[0]
            else:
                raise WrongError("a convolution has run whose scratch memory the budget does not hold")
            expect("cannot hold aten::" in told and "convolution" in told, told)
            expect(layer(torch.zeros_like(x)).detach().cpu().equal(expected), "the loop does not go on")
        with loop_within(128 * MIB, layer) as run:
            layer(x[:3]).sum().item()
            expect(run.stats.peak_bytes >= 64 * MIB, "another engine has been taken")
    finally:
        del os.environ["STUB_DNN_MIB"]
    return told[:80]


def device_error(how: str, kernels: str = "40") -> str:
    """A device that fails in mid-step is told of, and nothing hangs or dies afterwards."""
    job = Job("mlp")
    failures = (DeviceError, torch.AcceleratorError)
    if how == "compiled":
        world, step = compile_job(job, "offload-all", "host")
        for index in range(2):
            step(*world.batch(index))
        batch = world.batch(2)
        stub().stub_fail_after(int(kernels))
        try:
            float(step(*batch))
        except failures as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        else:
            raise WrongError("nothing was told of the device's failure")
        try:
            step(*batch)
        except StateError as error:
            expect("failed half way" in str(error), f"the next call says {error}")
        except failures:
            pass  # it failed behind this step, which is whole; the next one is told
        with contextlib.suppress(*failures):
            step.close()
        return told
    world = job.world(CUDA)
    peak = peak_of(job)
    try:
        with followed(world, int(0.6 * peak)):
            for index in range(2):
                world.step(*world.batch(index))
            stub().stub_fail_after(int(kernels))
            for index in range(2, 5):
                float(world.step(*world.batch(index)))
    except failures as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    raise WrongError("nothing was told of the device's failure")


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What workers read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(256, generator=draw), torch.randint(0, 10, (), generator=draw)


def forks(how: str) -> str:
    """Workers that are forked in mid-training, and a child that looks at the model."""
    job = Job("mlp")

    def batches() -> Iterator[Any]:
        for rows in DataLoader(Rows(), batch_size=16, num_workers=2, pin_memory=True):
            yield [part.cuda(non_blocking=True) for part in rows]

    plain = job.world(CUDA)
    torch.manual_seed(1)
    losses = [plain.step(*batch).cpu() for batch in batches()]

    def train(call: Callable[..., torch.Tensor], model: torch.nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found: list[torch.Tensor] = []
        for batch in batches():
            child = os.fork()
            if child == 0:  # what lies in host memory can be read there; nobody may ask CUDA
                os._exit(0 if all(p.device.type != "cpu" or p.numel() for p in model.parameters()) else 1)
            found.append(call(*batch).cpu())
            expect(os.waitpid(child, 0)[1] == 0, "a child has died")
        return found

    if how == "compiled":
        world, step = compile_job(job, "offload-all", "host")
        with step:
            found = train(step, world.model)
            wrong = describe_differences(found, losses, world.state(), plain.state())
    else:
        peak, world = peak_of(job), job.world(CUDA)
        with followed(world, int(0.6 * peak)):
            found = train(world.step, world.model)
        wrong = describe_differences(found, losses, world.state(), plain.state())
    expect(not wrong, wrong)
    return f"{len(found)} steps equal, with 2 workers and {len(found)} children"


def _held() -> dict[str, int]:
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


def leaks(how: str, times: str = "100") -> str:
    """Opened and closed so often, nothing is left: no memory of either kind, no events, files or threads."""
    job, count = Job("mlp", "fused"), int(times)
    seen: list[dict[str, int]] = []
    peak = peak_of(job) if how == "loop" else 0
    budget = 0 if how == "loop" else least(job, how)
    options: dict[str, Any] = {"host_budget": 512 * KIB} if how == "disk" else {}
    for _ in range(count):
        world = job.world(CUDA if how == "loop" else CPU)
        if how == "loop":
            with followed(world, int(0.6 * peak)):
                world.step(*world.batch(0))
        else:
            with outofcore.compile(
                world.step, world.model, world.optimizer, budget=budget, device="cuda", policy="offload-all", home=how,
                **options,
            ) as step:  # fmt: skip
                step(*world.batch(0))
        del world
        seen.append(_held())
    settled, last = seen[count // 5], seen[-1]
    grown = {name: last[name] - settled[name] for name in last if last[name] > settled[name]}
    few = grown.pop("resident MiB", 0)
    expect(not grown, f"after {count} times there is more than after {count // 5}: {grown}")
    expect(few <= 48, f"{few} MiB more of resident memory after {count} times than after {count // 5}")
    return f"{count} times: {last}, resident memory {few} MiB above that after {count // 5}"


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
    """Run one case."""
    name, *rest = sys.argv[1:]
    options = dict(part.split("=", 1) for part in rest)
    torch.use_deterministic_algorithms(True)
    said = CASES[name](**options)
    print(f"{MARK}{json.dumps({'say': said})}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
