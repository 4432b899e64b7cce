"""Remove the waits between streams one by one, and report which removals change the stub's numbers.

    python build.py -- python waits.py compiled|loop [--from NUMBER] [--only NUMBER]

For compiled steps, kinds of waits are removed: all waits of a stream within a step, or around it. (The double of
``tests/cuda/double.py`` detects each single one, independent of the numbers.) For eager loops, each wait and mark in
``device_cuda.h`` is removed: that header is built once with a switch at each of these statements. Redundant statements
are also removed together.

Prints a line of JSON for each, with whether and how the removal was noticed. The environment sets the stream order.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import arena_of_the_whole_budget, compile_job, describe_differences
from following import TrainingResult, train_loop
from gpu_loops import LOOPS, Dense, batches
from gpu_visit import MARK
from loops import MakeOptimizer, adamw, loss_of
from models import CUDA, Job
from torch import nn
from worlds import train_eagerly

from outofcore.execution.cuda import engine
from outofcore.execution.cuda.driver import CudaDriver
from outofcore.execution.cuda.interface import ActionList, Stream
from outofcore.follow.native import load_paging
from outofcore.runtime import native
from outofcore.runtime.native import CSRC, Flavor
from outofcore.units import GIB, KIB

STEPS = 14  # the first six are measured, and the host waits for them
HEADER = "device_cuda.h"


def report(number: int, wait: str, noticed: str) -> None:
    print(f"{MARK}{json.dumps({'number': number, 'wait': wait, 'noticed': noticed})}", flush=True)


# Compiled steps


class WaitFilter:
    """A filter of waits of a stream: within steps, at their begin or at their end."""

    def __init__(self, side: str, stream: Stream) -> None:
        self.side, self.stream, self.now = side, stream, "step"

    @contextmanager
    def active(self) -> Iterator[None]:
        def track(name: str) -> Callable[..., Any]:
            original = getattr(engine.CudaEngine, f"_{name}")

            @functools.wraps(original)
            def call(*args: Any) -> Any:
                self.now = name
                try:
                    return original(*args)
                finally:
                    self.now = "step"

            return call

        def filter_waits(owner: type) -> Callable[..., None]:
            original = owner.wait

            @functools.wraps(original)
            def wait(this: Any, stream: Stream, mark: Any) -> None:
                if not self.leaves_out(owner, stream, mark):
                    original(this, stream, mark)

            return wait

        with ExitStack() as stack:
            for name in ("begin", "end"):
                stack.enter_context(mock.patch.object(engine.CudaEngine, f"_{name}", track(name)))
            for owner in (CudaDriver, ActionList):
                stack.enter_context(mock.patch.object(owner, "wait", filter_waits(owner)))
            self.ends: dict[int, Stream] = {}
            record = CudaDriver.record

            def record_end(this: CudaDriver, stream: Stream, mark: Any) -> None:
                if self.now == "end":
                    self.ends[id(mark)] = stream
                record(this, stream, mark)

            stack.enter_context(mock.patch.object(CudaDriver, "record", record_end))
            if self.side != "step":
                stack.enter_context(without_host_waits())
            yield

    def leaves_out(self, owner: type, stream: Stream, mark: Any) -> bool:
        """Return whether to leave a wait out. At the end of a step, the ops wait for each other stream."""
        if self.side == "step":
            return stream is self.stream and (self.now == "step" or owner is ActionList)
        if self.now != self.side or owner is ActionList:
            return False
        return self.stream is (stream if self.side == "begin" else self.ends.get(id(mark)))


@contextmanager
def without_host_waits() -> Iterator[None]:
    """Let steps follow each other without waits of the host, as if all state stayed on the device.

    Only then do the waits between steps matter.
    """
    finish = CudaDriver.finish
    with (
        mock.patch.object(CudaDriver, "finish", lambda this, host: finish(this, host=False)),
        mock.patch.object(CudaDriver, "await_mark", lambda this, mark: None),
    ):
        yield


def kinds(home: str) -> list[WaitFilter]:
    if home == "host":
        streams = [Stream.COMPUTE, Stream.COPY_OUT, Stream.COPY_IN]
        around = streams[1:]
        return [WaitFilter("step", s) for s in streams] + [
            WaitFilter(side, s) for side in ("begin", "end") for s in around
        ]
    streams = [Stream.DISK_OUT, Stream.DISK_IN, Stream.WRITE, Stream.READ]
    begin = [Stream.DISK_OUT, Stream.READ]
    end = [Stream.WRITE, Stream.DISK_IN]
    return [
        *(WaitFilter("step", s) for s in streams),
        *(WaitFilter("begin", s) for s in begin),
        *(WaitFilter("end", s) for s in end),
    ]


def of_compiled(first: int, only: int | None) -> None:
    job = Job("mlp")
    losses, state = train_eagerly(job.world(CUDA), STEPS)
    cases: list[tuple[str, str, AbstractContextManager[object]]] = []
    for home in ("host", "disk"):
        cases += [(home, "none", nullcontext()), (home, "unhindered, none", without_host_waits())]
    for home in ("host", "disk"):
        cases += [(home, f"{kind.side}, {kind.stream.name}", kind.active()) for kind in kinds(home)]
    for number, (home, case_name, context) in enumerate(cases):
        if number < first or (only is not None and number != only):
            continue
        name = f"{home}: {case_name}"
        print(f"--- {number} {name}", flush=True)
        world, step = compile_job(job, "offload-all", home)
        with context:
            try:
                with step:
                    torch.manual_seed(1)
                    losses_ = [step(*world.batch(index)).clone() for index in range(STEPS)]
                    torch.cuda.synchronize()
                    losses_ = [loss.cpu() for loss in losses_]
                    noticed = describe_differences(losses_, losses, world.state(), state)
            except Exception as error:  # any error counts as noticed
                noticed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        report(number, name, noticed[:120])


# Eager loops

_STATEMENT = re.compile(
    r"(?:streams_\.wait|fences_\.put|(?:\w+\.)*(?:after|before|home|all|marks|unobserved_)\.add"
    r"|c10::cuda::CUDACachingAllocator::recordStream)\("
)
_FUNCTION = re.compile(r"^  (?:static )?[\w:]+\*? (\w+)\(")
_SWITCH = """
// A bit for each statement that is left out.
extern "C" __attribute__((visibility("default"))) inline unsigned long long follow_left_out = 0;
"""
# Groups of redundant statements, by their beginnings, in loops of one stream. A stream that shows a storage at its home
# has waited for the copy there. The other waits are for untracked code and for additional streams.
_SHOWN = "use_slot: streams_"
TOGETHER = (
    ("mark_used: order.after", "all_of: all.add(streams_.now(order.stream"),
    ("move: order.before", "all_of: all.add(streams_.now(order.stream"),
    ("save: order.after", _SHOWN),
    ("all_of: all.add(order.after", _SHOWN),
    ("load: streams_.wait(in_, order.before", _SHOWN),
    ("fill: streams_.wait(stream, fences_", _SHOWN),
    ("move: streams_.wait(stream, all_of", "move: streams_.wait(stream, fences_", _SHOWN),
)


def add_switches(header: str) -> tuple[str, list[str]]:
    """Return the header with a switch at each statement that orders work, and the statements."""
    lines: list[str] = []
    names: list[str] = []
    function, inside = "", False
    for line in header.splitlines():
        inside = inside or line.startswith("class Device")
        if match_ := _FUNCTION.match(line):
            function = match_[1]

        def switch(match: re.Match[str], line: str = line, function: str = function) -> str:
            statement = line[match.start() :].partition(";")[0]
            names.append(f"{function}: {statement}")
            return f"if ((follow_left_out >> {len(names) - 1} & 1) == 0) {match[0]}"

        code = line.partition("//")[0]
        lines.append(_STATEMENT.sub(switch, code) + line[len(code) :] if inside else line)
    return "\n".join(lines).replace("namespace follow {", f"{_SWITCH}\nnamespace follow {{", 1) + "\n", names


@contextmanager
def load_switched_paging() -> Iterator[tuple[ctypes.c_ulonglong, list[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "csrc" / "follow"
        shutil.copytree(CSRC, copy.parent)
        text, names = add_switches((copy / HEADER).read_text(encoding="utf-8"))
        (copy / HEADER).write_text(text, encoding="utf-8")
        with mock.patch.object(native, "CSRC", copy.parent):
            library = load_paging(Flavor.CUDA)
        yield ctypes.c_ulonglong.in_dll(library, "follow_left_out"), names


def aside(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Train while another stream reads a constant, and synchronize only at the end."""
    optimizer, side, values = make(model), torch.cuda.Stream(), []
    fixed = torch.randn(512, 1024, generator=torch.Generator().manual_seed(3)).cuda()
    side.wait_stream(torch.cuda.current_stream())
    for rows, labels in batches(6, (256, 256)):
        with torch.cuda.stream(side):
            values.append((fixed * fixed).sum())
        loss = loss_of(model, rows.cuda(), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    torch.cuda.synchronize()
    return [value.item() for value in values]


def ahead(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Train without reading a value before the end, so that the host runs far ahead."""
    optimizer, values = make(model), []
    for rows, labels in batches(6, (256, 256)):
        loss = loss_of(model, rows.cuda(), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return [value.item() for value in values]


# The loops, the share of their peak as a budget, and whether to evict all storages after each op.
TRIED = [
    ("ahead", 0.4, False),
    ("ahead", 0.4, True),
    ("aside", 0.5, False),
    ("aside", 0.5, True),
    ("language", 0.4, False),
    ("side_stream", 0.5, True),
]
OWN = {"ahead": (ahead, lambda: Dense().cuda()), "aside": (aside, lambda: Dense().cuda())}


def run_on_demand(name: str, budget: int, *, stress: bool = False) -> tuple[TrainingResult, Any]:
    with arena_of_the_whole_budget():
        return train_loop(*LOOPS[name], adamw, budget, stress=stress, policy=None, cache=False)


def of_loops(first: int, only: int | None) -> None:
    """Train loops without each statement in turn, until a result differs."""
    LOOPS.update(OWN)
    with load_switched_paging() as (switches, names):
        plain = {name: train_loop(*LOOPS[name])[0] for name in dict.fromkeys(name for name, _, _ in TRIED)}
        peaks = {name: run_on_demand(name, GIB)[1].peak_bytes for name in plain}
        rows = [("none", 0), *((name, 1 << number) for number, name in enumerate(names))]
        for beginnings in TOGETHER:
            numbers = [next(n for n, name in enumerate(names) if name.startswith(start)) for start in beginnings]
            rows.append((" and ".join(names[n] for n in numbers), sum(1 << n for n in numbers)))
        for number, (name_, bits) in enumerate(rows):
            if number < first or (only is not None and number != only):
                continue
            print(f"--- {number} {name_}", flush=True)
            noticed = ""
            for name, share, stress in TRIED:
                switches.value = bits
                try:
                    result, _ = run_on_demand(name, int(share * peaks[name]) + 64 * KIB, stress=stress)
                    noticed = result.differs_from(plain[name])
                except Exception as error:  # any error counts as noticed
                    noticed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                finally:
                    switches.value = 0
                if noticed:
                    noticed = f"{name}: {noticed}"
                    break
            report(number, name_, noticed[:120])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["compiled", "loop"])
    parser.add_argument("--from", type=int, default=-1, dest="first", help="number to begin with")
    parser.add_argument("--only", type=int, help="a single one")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    {"compiled": of_compiled, "loop": of_loops}[arguments.kind](arguments.first, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
