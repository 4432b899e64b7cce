"""The pieces of a visit to a GPU: see ``gpu_visit.py``, which starts each in a process of its own.

What a piece finds it prints as lines of JSON behind a mark; all else is for the log. Each part of a piece is tried by
itself, so that one that fails leaves the rest. Has run on a runtime without a device; not on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_visit import MARK, ROOT

MIB, GIB = 1 << 20, 1 << 30
FAILED: list[str] = []
START = time.monotonic()


def tell(**answer: Any) -> None:
    """Print a result."""
    print(f"{MARK}{json.dumps(answer, default=str)}", flush=True)


@contextlib.contextmanager
def part(piece: str, name: str) -> Iterator[dict[str, Any]]:
    """Try a part, and tell what it found or how it failed."""
    found: dict[str, Any] = {}
    begin = time.monotonic()
    print(f"--- {piece} {name}", flush=True)
    try:
        yield found
    except Exception as error:  # whatever it is, the rest is tried
        traceback.print_exc()
        FAILED.append(name)
        first = str(error).splitlines()[0][:300] if str(error) else ""
        tell(**{**found, "piece": piece, "part": name, "error": type(error).__name__, "detail": str(error)[:1500]})
        tell(piece=piece, say=f"! {name}: {type(error).__name__}: {first}"[:160])
    else:
        tell(**{"piece": piece, "part": name, "part_s": round(time.monotonic() - begin, 2), **found})


def left(seconds: float) -> float:
    """Seconds until the limit."""
    return seconds - (time.monotonic() - START)


def said(command: Sequence[str], limit: float = 30) -> str:
    """What a command prints; how it failed, if it did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()


# A: the machine


def machine(seconds: float, small: bool) -> None:
    """What is here."""
    for command in (["nvidia-smi"], ["nvidia-smi", "-q"], ["lscpu"], ["free", "-g"], ["df", "-h"], ["uname", "-a"]):
        print(f"$ {' '.join(command)}\n{said(command)}", flush=True)
    print(said(["bash", "-c", "ulimit -a; cat /sys/kernel/mm/transparent_hugepage/*enabled; c++ --version"]))
    print(said([sys.executable, "-m", "pip", "list"]), flush=True)
    with part("A", "host memory") as found:
        before = _meminfo()
        count = (256 * MIB) if small else min(100 * GIB, int(_physical() * 0.9))
        begin = time.monotonic()
        _touch(count)
        found.update(touched_gib=count / GIB, touch_s=time.monotonic() - begin, before=before, after=_meminfo())
        tell(
            piece="A",
            say=f"host memory: {before['MemTotal'] >> 20} GiB before, {found['after']['MemTotal'] >> 20} GiB after "
            f"{count / GIB:.0f} GiB were touched in {found['touch_s']:.0f} s",
        )
    with part("A", "torch") as found:
        import torch

        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        found.update(
            torch=torch.__version__,
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            device=properties.name,
            capability=[properties.major, properties.minor],
            total=total,
            free=free,
            context_bytes=total - free,
            python=sys.version,
        )
        tell(piece="A", say=f"{properties.name}, {total / GIB:.0f} GiB, PyTorch {torch.__version__}")
    with part("A", "native code") as found:
        from outofcore.execution.native import Flavor, load_native

        begin = time.monotonic()
        native = load_native(Flavor.CUDA)
        found.update(build_s=time.monotonic() - begin, reason=native.reason)
        if native.library is None:
            raise RuntimeError(native.reason)


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    wanted = ("MemTotal:", "MemFree:", "MemAvailable:")
    return {line.split()[0].rstrip(":"): int(line.split()[1]) for line in lines if line.startswith(wanted)}


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _touch(count: int) -> None:
    """Touch so much memory from several processes: some machines get theirs only as it is used."""
    code = "import mmap,sys; m=mmap.mmap(-1,int(sys.argv[1])); [m.__setitem__(i,1) for i in range(0,len(m),4096)]"
    parts = max(min(os.cpu_count() or 1, 8), 1)
    processes = [subprocess.Popen([sys.executable, "-c", code, str(count // parts)]) for _ in range(parts)]
    for process in processes:
        process.wait()


# B: primitives


def primitives(seconds: float, small: bool) -> None:
    """What a step is made of, without a step."""
    import torch

    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.execution.cuda.driver import CudaDriver
    from outofcore.execution.cuda.interface import Copy, Record, Stream, Wait

    device = torch.device("cuda", 0)
    driver = CudaDriver(device)
    with part("B", "streams, marks and a tape"):
        home = CudaBackend(device, driver).home(64 * MIB)
        home.ensure(16 * MIB)
        arena = driver.open_arena(16 * MIB, MIB)
        host, there = home.face(0, 8 * MIB), arena.view(0, 8 * MIB)
        host.random_(0, 255)
        kept, mark = host.clone(), driver.mark()
        with driver.step(None):
            back = home.face(8 * MIB, 8 * MIB)
            play = driver.tape(
                [
                    Copy(Stream.COPY_IN, 0, there, host),
                    Record(Stream.COPY_IN, mark),
                    Wait(Stream.COPY_OUT, mark),
                    Copy(Stream.COPY_OUT, 1, back, there),
                ]
            )
            for _ in range(3):
                back.zero_()
                play()
                driver.synchronize()
                if not torch.equal(back, kept):
                    raise RuntimeError("what a tape has copied there and back is not what it was")
        arena.close()
        home.close()
    with part("B", "a disk, one way and both at once") as found:
        from outofcore.execution.homes import DiskHome

        disk = DiskHome(tempfile.mkdtemp(prefix="gpu-visit-", dir=os.environ.get("TMPDIR")))
        disk.ensure(32 * MIB)
        memory = driver.staging(16 * MIB)
        memory.fill_(7)
        halves = {Stream.WRITE: (0, memory[: 8 * MIB]), Stream.READ: (16 * MIB, memory[8 * MIB :])}
        rates: dict[str, float] = {}
        count = 4 if small else 32
        with driver.step(None):
            driver.transfer(Stream.WRITE, -1, disk, 16 * MIB, memory[8 * MIB :])
            driver.synchronize()
            for ways in ((Stream.WRITE,), (Stream.READ,), (Stream.WRITE, Stream.READ)):
                begin = time.monotonic()
                for _ in range(count):
                    for stream in ways:
                        driver.transfer(stream, -1, disk, *halves[stream])
                driver.synchronize()
                taken = time.monotonic() - begin
                rates[" and ".join(way.name for way in ways)] = count * len(ways) * 8 * MIB / taken
        threads = 0 if driver._lanes is None else len(driver._lanes.of)
        found.update(bytes_per_s=rates, direct=disk.direct, right=int(memory.min()) == int(memory.max()) == 7)
        found.update(threads=threads)
        told = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items())
        tell(piece="B", say=f"{'' if threads == 2 else '! '}a disk, GB/s: {told}; threads of its own: {threads}")
        disk.close()
    with part("B", "pinning") as found:
        rates = {}
        for count in (64 * MIB, GIB, *(() if small else (8 * GIB, 32 * GIB))):
            if count > _physical() // 2:
                continue
            home = CudaBackend(device, driver).home(count)
            begin = time.monotonic()
            home.ensure(count)
            rates[str(count >> 20)] = round(time.monotonic() - begin, 3)
            home.close()
        found.update(seconds_by_mib=rates, pinned=home.pinned)
        tell(piece="B", say=f"to reserve and pin, seconds by MiB: {rates}")
    with part("B", "a fork beside pinned memory") as found:
        home = CudaBackend(device, driver).home(GIB)
        home.ensure(256 * MIB if small else GIB)
        home.face(0, 4096).fill_(3)
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(0 if ctypes.c_ubyte.from_address(home.face(0, 4096).data_ptr()).value == 3 else 1)
        status = os.waitpid(child, 0)[1]
        found.update(seconds=time.monotonic() - begin, child_sees_it=status == 0)
        home.close()
    with part("B", "copy rates") as found:
        found["rates"] = _copy_rates(driver, [64 << 10, MIB, 16 * MIB, *(() if small else (256 * MIB,))])
        best = {name: rate if name == "mib" else rate / 1e9 for name, rate in found["rates"][-1].items()}
        tell(
            piece="B",
            say=f"copies of {best['mib']:.0f} MiB: {best['alone_in']:.0f} GB/s in, {best['alone_out']:.0f} out, "
            f"{best['both_in']:.0f} and {best['both_out']:.0f} at once",
        )
    with part("B", "issue costs") as found:
        found["us"] = _issue_costs(driver)
    with part("B", "arena") as found:
        from outofcore.execution.arena import ScopeTable

        arena = driver.open_arena(4 * MIB, MIB)
        table = ScopeTable(arena, [[(MIB, 512 << 10)]])
        table.begin(0)
        one = torch.empty(MIB, dtype=torch.uint8, device=device)
        table.end()
        found.update(served=arena.counters().served, at=one.data_ptr() - arena.address)
        arena.close()
        if found["at"] != 512 << 10:
            raise RuntimeError(f"a request was served at {found['at']} and not at {512 << 10}")
    with part("B", "cap"):
        from outofcore.errors import ArenaError

        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 64 * MIB) / total, device)
        try:
            driver.open_arena(256 * MIB, MIB)
        except ArenaError:
            pass
        else:
            raise RuntimeError("an arena beyond the cap was given")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    with part("B", "facts") as found:
        found.update(driver.facts())


def _copy_rates(driver: Any, sizes: Sequence[int]) -> list[dict[str, float]]:
    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.execution.cuda.interface import Stream

    rows: list[dict[str, float]] = []
    for size in sizes:
        home = CudaBackend(driver.device, driver).home(2 * size + 8192)
        home.ensure(2 * size)
        arena = driver.open_arena(2 * size, MIB)
        out = (home.face(0, size), arena.view(0, size))
        into = (arena.view(size, size), home.face(size, size))
        row: dict[str, float] = {"mib": size / MIB}
        with driver.step(None):
            for name, ways in (("alone", (True, False)), ("both", (None,))):
                for only in ways:
                    pairs = [
                        p
                        for p in ((Stream.COPY_OUT, *out), (Stream.COPY_IN, *into))
                        if only is None or (p[0] is Stream.COPY_OUT) is only
                    ]
                    marks = {s: (driver.mark(timed=True), driver.mark(timed=True)) for s, *_ in pairs}
                    count = max(4, min(64, (64 * MIB) // size))
                    for stream, *_ in pairs:
                        driver.record(stream, marks[stream][0])
                    for _ in range(count):
                        for stream, to, of in pairs:
                            driver.copy(stream, -1, to, of)
                    for stream, *_ in pairs:
                        driver.record(stream, marks[stream][1])
                    driver.synchronize()
                    for stream, *_ in pairs:
                        taken = max(driver.seconds(*marks[stream]), 1e-9)
                        row[f"{name}_{'out' if stream is Stream.COPY_OUT else 'in'}"] = count * size / taken
        arena.close()
        home.close()
        rows.append(row)
    return rows


def _issue_costs(driver: Any) -> dict[str, float]:
    """Microseconds of the host for one of each."""
    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.execution.cuda.interface import Copy, Record, Stream, Wait

    home = CudaBackend(driver.device, driver).home(MIB)
    home.ensure(MIB)
    arena = driver.open_arena(MIB, MIB)
    host, there, mark = home.face(0, 65536), arena.view(0, 65536), driver.mark()
    found: dict[str, float] = {}
    with driver.step(None):
        many = [Copy(Stream.COPY_IN, -1, there, host), Record(Stream.COPY_IN, mark), Wait(Stream.COMPUTE, mark)]
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "copy, by PyTorch": (lambda: driver.copy_callers(Stream.COPY_IN, -1, there, host), 1),
            "copy": (lambda: driver.copy(Stream.COPY_IN, -1, there, host), 1),
            "record": (lambda: driver.record(Stream.COPY_IN, mark), 1),
            "wait": (lambda: driver.wait(Stream.COMPUTE, mark), 1),
            "of a tape of 30": (driver.tape(many * 10), 30),
        }
        for name, (way, each) in ways.items():
            best = float("inf")
            for _ in range(5):
                driver.synchronize()
                begin = time.perf_counter()
                for _ in range(100):
                    way()
                best = min(best, (time.perf_counter() - begin) / 100)
            found[name] = round(best * 1e6 / each, 2)
        driver.synchronize()
    arena.close()
    home.close()
    return found


# C: what kernels return


def faithfulness(seconds: float, small: bool) -> None:
    """Every family of ops of many models, run once and compared with what it was captured to return."""
    import torch

    from outofcore import _torch_internals as internals
    from outofcore.capture import capture_step
    from outofcore.capture.passes import leanest
    from outofcore.errors import CaptureError
    from outofcore.execution.binding import unseen_results
    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.planning.placement.requests import Requests
    from outofcore.profiling.faithfulness import differences
    from outofcore.profiling.ops import _Bench
    from outofcore.profiling.scratch import contents_to_try

    backend = CudaBackend(torch.device("cuda", 0))
    backend.prepare()
    seen: Counter[str] = Counter()
    tables: list[dict[str, Any]] = []
    for name, make in _models(small).items():
        if left(seconds) < 10:
            tell(piece="C", say=f"! no time left for {name}")
            break
        with part("C", name) as found:
            step, models, optimizers, batch = make()
            try:
                captured = leanest(capture_step(step, models, optimizers, batch, {}, backend.device)).aligned(512)
            except CaptureError as error:  # it says so, and such a step is not run
                found["refused"] = str(error)
                tell(piece="C", say=f"{name} is refused: {error}"[:160])
                continue
            families: dict[str, Any] = {}
            for op in captured.graph.ops:
                if op.touched and (op.rerunnable or captured.calls[op.id].rehearse is not None):
                    families.setdefault(op.family or f"#{op.id}", op)
            rows: list[dict[str, Any]] = []
            with _Bench(captured, backend) as bench:
                for op in families.values():
                    call = captured.calls[op.id]
                    failed = ""
                    for contents in contents_to_try(captured.device):
                        try:
                            run, *_ = bench._bound(op, Requests((), 0), contents)
                            with internals.below_autograd():
                                leaves = internals.result_leaves((call.rehearse or call.func)(*run.args, **run.kwargs))
                                backend.driver.synchronize()
                        except Exception as error:
                            failed = f"{type(error).__name__}: {error}"[:400]
                            if "CUDA error" in failed or "device failed" in failed:
                                raise
                            continue
                        for one in differences(captured, op, leaves):
                            rows.append(
                                {
                                    "op": op.name,
                                    "what": one.what,
                                    "real": one.real,
                                    "captured": one.captured,
                                    "survived": one.survived,
                                }
                            )
                            seen[f"{op.name} {one.what}"] += 1
                        failed = ""
                        del leaves
                        break
                    if failed:
                        rows.append({"op": op.name, "what": "raises", "real": failed})
                        seen[f"{op.name} raises"] += 1
            found.update(families=len(families), unseen=len(unseen_results(captured.graph)), differences=rows)
            tables += rows
        gc.collect()
        torch.cuda.empty_cache()
    grave = [row for row in tables if not row.get("survived")]
    tell(piece="C", table=dict(seen))
    tell(
        piece="C",
        say=f"{'! ' if grave else ''}{len(grave)} results that a step would refuse, {len(tables) - len(grave)} more "
        "that it copies",
    )
    for name, count in seen.most_common(8):
        tell(piece="C", say=f"{name}: {count}")


_Made = tuple[Callable[..., Any], list[Any], list[Any], tuple[Any, ...]]


def _models(small: bool) -> dict[str, Callable[[], _Made]]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    from outofcore.zoo import workload

    def of_zoo(name: str, **options: Any) -> Callable[[], _Made]:
        def make() -> _Made:
            work = workload(name, **options)
            model = work.build()
            optimizer = work.optimizer(model)
            return work.make_step(model, optimizer), [model], [optimizer], next(work.batches())

        return make

    def plain(
        model: Callable[[], nn.Module], batch: Callable[[], tuple[Any, ...]], dtype: Any = None
    ) -> Callable[[], _Made]:
        def make() -> _Made:
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
        # The state of its dropout is drawn on the host by the first call of all, of which capturing cannot know.
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
        "attention, cudnn": plain(lambda: Attention(backends.CUDNN_ATTENTION), tokens, half),
        "attention, math": plain(lambda: Attention(backends.MATH, causal=False), tokens),
        "convolution 1d, group norm": plain(
            lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), lambda: (torch.randn(2, 4, 16),)
        ),
    }


# D: bits


def bits(seconds: float, small: bool) -> None:
    """Plain PyTorch on the device, and the same model within several plans."""
    import torch

    from outofcore.execution.cuda.backend import CudaBackend
    from outofcore.execution.cuda.driver import CudaDriver

    sys.path.insert(0, str(ROOT / "tests" / "cuda"))
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", 0)
    for name, make in _worlds().items():
        losses, state = _plain(make(device), 9)
        for policy, home in (("keep-all", "host"), ("offload-all", "host"), ("auto", "host"), ("offload-all", "disk")):
            if left(seconds) < 5:
                tell(piece="D", say=f"! no time left for {name}, {policy}")
                return
            with part("D", f"{name}, {policy}, {home}") as found:
                beside = CudaBackend(device, CudaDriver(device)).beside(128 * MIB, 4, 0)
                torch.cuda.reset_peak_memory_stats(device)
                world = make(torch.device("cpu"))
                room = GIB if policy == "keep-all" else _smallest(make, device) + (4 * MIB if policy == "auto" else 0)
                found.update(_compiled_bits(world, room + beside, policy, home, losses, state))
                gc.collect()
                torch.cuda.empty_cache()
                tell(
                    piece="D",
                    say=f"{name}, {policy}, {home}: equal, {found['copies']} copies, {found['off_plan']} off the plan",
                )


def _worlds() -> dict[str, Any]:
    from worlds import WORLDS, World

    from outofcore.zoo import workload

    def gpt(device: Any) -> Any:
        work = workload("gpt", batch=4, layers=3, width=128, context=64, amp=True)
        model = work.build().to(device)
        optimizer = work.optimizer(model)

        def batch(index: int) -> tuple[Any, ...]:
            return tuple(t.to(device) for t in next(work.batches(seed=index)))

        return World(model, optimizer, work.make_step(model, optimizer), batch)

    return {**WORLDS, "gpt": gpt}


def _plain(world: Any, steps: int) -> tuple[list[Any], dict[str, Any]]:
    from worlds import eager

    return eager(world, steps)


def _smallest(make: Any, device: Any) -> int:
    import torch

    import outofcore
    from outofcore.errors import BudgetError
    from outofcore.execution.cuda.backend import CudaBackend

    world = make(torch.device("cpu"))
    budget = CudaBackend(device).beside(128 * MIB, 4, 0) + (256 << 10)
    step = outofcore.compile(world.step, world.model, world.optimizer, budget=budget, device=device)
    try:
        with step:
            step(*world.batch(0))
    except BudgetError as error:
        return (error.smallest_budget or budget) - budget + (512 << 10)
    return MIB


def _compiled_bits(world: Any, budget: int, policy: str, home: str, losses: Any, state: Any) -> dict[str, Any]:
    import torch
    from worlds import same

    import outofcore
    from outofcore.program import CopyIn, CopyOut

    # So little host memory that what leaves goes on to the disk.
    options: dict[str, Any] = {"host_budget": 512 << 10} if home == "disk" else {}
    with outofcore.compile(
        world.step, world.model, world.optimizer, budget=budget, device="cuda", policy=policy, home=home, **options
    ) as step:
        torch.manual_seed(1)
        found = [step(*world.batch(index)).detach().cpu() for index in range(len(losses))]
        wrong = [index for index, (a, b) in enumerate(zip(found, losses, strict=True)) if not torch.equal(a, b)]
        differ = same(world.state(), state)
        copies = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut)]
        answer = {
            "copies": len(copies),
            "disk_copies": sum(copy.home == 1 for copy in copies),
            "off_plan": step.stats.off_plan,
            "step_s": step.stats.seconds,
            "predicted_s": step.stats.predicted_seconds,
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "budget": budget,
        }
    if home == "disk" and not answer["disk_copies"]:
        raise RuntimeError(f"nothing has been to the disk: {answer}")
    if wrong or differ:
        raise RuntimeError(f"other bits than plain PyTorch's: losses of steps {wrong}, tensors {differ[:5]}: {answer}")
    return answer


# E: time of the host


def host_time(seconds: float, small: bool) -> None:
    """A GPT and a ResNet in core and offloaded, beside plain PyTorch; how busy the device is; one CUDA graph."""
    import torch

    from outofcore.zoo import workload

    layers, width = (2, 128) if small else (12, 768)
    works = {
        "gpt": workload("gpt", batch=8, layers=layers, width=width, context=128 if small else 512, amp=True),
        "resnet50": workload(
            "resnet",
            batch=4 if small else 64,
            size=32 if small else 224,
            images="generated",
            amp=True,
            optimizer="momentum",
        ),
    }
    for name, work in works.items():
        with part("E", name) as found:
            found.update(_timed(work, 6 if small else 12))
            tell(
                piece="E",
                say=f"{name}: host {found['plain_host_ms']} ms in plain PyTorch, {found['in_core_host_ms']} in core, "
                f"{found['offloaded_host_ms']} offloaded ({found['in_core_by_python_host_ms']} and "
                f"{found['offloaded_by_python_host_ms']} by Python, {found['in_core_graphs_host_ms']} with "
                f"CUDA graphs); steps {found['plain_ms']}, {found['in_core_ms']}, "
                f"{found['offloaded_ms']} ms",
            )
        gc.collect()
        torch.cuda.empty_cache()
    with part("E", "a CUDA graph") as found:
        found.update(_graph())


def _timed(work: Any, steps: int) -> dict[str, Any]:
    import torch

    import outofcore
    from outofcore.execution.replay import load_replay

    def measure(step: Any, batch: Any, warm: int) -> tuple[float, float]:
        for _ in range(warm):
            step(*batch)
        torch.cuda.synchronize()
        host: list[float] = []
        whole: list[float] = []
        for _ in range(steps):
            begin, cpu = time.perf_counter(), time.process_time()
            step(*batch)
            host.append(time.process_time() - cpu)
            torch.cuda.synchronize()
            whole.append(time.perf_counter() - begin)
        return round(statistics.median(host) * 1e3, 2), round(statistics.median(whole) * 1e3, 2)

    found: dict[str, Any] = {}
    model = work.build().cuda()
    batch = tuple(t.cuda() for t in next(work.batches()))
    step = work.make_step(model, work.optimizer(model))
    found["plain_host_ms"], found["plain_ms"] = measure(step, batch, 4)
    found["plain_busy"] = _busy(lambda step=step: step(*batch))
    peak = torch.cuda.max_memory_allocated()
    del model, step
    gc.collect()
    torch.cuda.empty_cache()
    load_replay()
    ways: tuple[tuple[str, str, Any], ...] = (
        ("in_core", "auto", True),
        ("in_core_by_python", "auto", False),
        ("in_core_graphs", "auto", "graphs"),
        ("offloaded", "offload-all", True),
        ("offloaded_by_python", "offload-all", False),
    )
    for name, policy, replay in ways:
        model = work.build()
        optimizer = work.optimizer(model)
        with outofcore.compile(
            work.make_step(model, optimizer),
            model,
            optimizer,
            budget=2 * peak + GIB,
            device="cuda",
            policy=policy,
            replay=replay,
        ) as compiled:
            found[f"{name}_host_ms"], found[f"{name}_ms"] = measure(compiled, batch, 10)
            found[f"{name}_busy"] = _busy(lambda c=compiled: c(*batch))
            found[f"{name}_instructions"] = len(compiled.planned.program.instructions)
            found[f"{name}_predicted_ms"] = round(compiled.stats.predicted_seconds * 1e3, 2)
    return found


def _busy(call: Callable[[], object]) -> float | None:
    """The share of a step's time in which a kernel runs, as the profiler of PyTorch has it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken = time.perf_counter() - begin
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return None
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(end - max(start, until), 0)
        until = max(until, end)
    return round(busy / 1e6 / taken, 3)


def _graph() -> dict[str, Any]:
    """Ops of a program in core, from the first to the first update, captured as one CUDA graph and replayed."""
    import torch

    import outofcore
    from outofcore import _torch_internals as internals
    from outofcore.capture.optimizers import OptimizerUpdate
    from outofcore.execution.binding import Draws
    from outofcore.execution.cuda.engine import _call
    from outofcore.zoo import workload

    work = workload("gpt", batch=4, layers=2, width=128, context=64, dropout=0.0, optimizer="sgd")
    model = work.build()
    optimizer = work.optimizer(model)
    batch = tuple(t.cuda() for t in next(work.batches()))
    with outofcore.compile(
        work.make_step(model, optimizer), model, optimizer, budget=2 * GIB, device="cuda", policy="keep-all"
    ) as step:
        for _ in range(8):
            step(*batch)
        session = step._session
        placed = session.runner._placed
        calls = session.shown.captured.calls
        ops = [(scope, run) for scope, run in enumerate(placed.bound.runs)]
        ops = [(s, r) for s, r in ops if not isinstance(calls[r.op].func, OptimizerUpdate) and r.draws is Draws.FREELY]
        with internals.below_autograd():  # what comes from the host's memory, such as constants, cannot be captured
            ops = [
                (s, r) for s, r in ops if all(t.is_cuda for t in internals.tensor_leaves(r.func(*r.args, **r.kwargs)))
            ]
        stream = torch.cuda.Stream()
        prepared = session.engine._prepared
        with torch.cuda.stream(stream), internals.below_autograd():
            session.backend.driver._make_workspaces()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            issue = [_call(run, scope, placed.table, prepared.generators) for scope, run in ops]
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in issue:
                    call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        issued = time.perf_counter() - begin
        torch.cuda.synchronize()
        return {
            "ops": len(ops),
            "of": len(placed.bound.runs),
            "issue_ms": issued * 1e3,
            "replay_ms": (time.perf_counter() - begin) * 1e3,
        }


# F: compute-sanitizer


def sanitizer(seconds: float, small: bool) -> None:
    """The smallest step under the checker of memory: it sees ops that go beyond where the plan has their results."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with part("F", "memcheck") as found:
        if not Path(tool).exists():
            found["absent"] = tool
            tell(piece="F", say="compute-sanitizer is not installed")
            return
        command = [tool, "--tool", "memcheck", sys.executable, "-c", _SMALLEST]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds - 5, 5), check=False)
        except subprocess.TimeoutExpired as error:
            print(error.stdout, error.stderr)
            raise RuntimeError("not done in time") from None
        print(done.stdout, done.stderr)
        lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
        found.update(status=done.returncode, summary=lines)
        tell(piece="F", say=f"{lines[0] if lines else 'no summary'}, exit status {done.returncode}")
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {lines}")


_SMALLEST = """
import torch, outofcore
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
def step(x):
    loss = model(x).square().mean(); loss.backward(); opt.step(); opt.zero_grad(); return loss
with outofcore.compile(step, model, opt, budget="160MiB", device="cuda", policy="offload-all") as run:
    for k in range(3):
        print(float(run(torch.randn(64, 256))))
"""


# G: tests

_PLUGIN = """
import json, os, pytest
@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart(nodeid, location):
    with open(os.environ["VISIT_TESTS"], "a") as file: file.write(json.dumps({"test": nodeid}) + "\\n")
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        told = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        with open(os.environ["VISIT_TESTS"], "a") as file: file.write(json.dumps(told) + "\\n")
"""


def tests(seconds: float, small: bool) -> None:
    """The tests of the GPU in groups, each a process: one that dies is gone on from behind the test that killed it."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-visit-"))
    (folder / "visit_plugin.py").write_text(_PLUGIN, encoding="utf-8")
    counts: Counter[str] = Counter()
    groups = [
        "not (bits or dawdle or disk or test_follow_gpu)",
        "bits and dense",
        "bits and convolutional",
        "dawdle",
        "disk",
        "test_follow_gpu and not unchanged",
        "test_follow_gpu and unchanged",
    ]
    for number, group in enumerate(groups):
        done: list[str] = []
        for attempt in range(4):
            if left(seconds) < 15:
                tell(piece="G", say=f"! no time left in group {group!r}")
                FAILED.append(group)
                break
            report = folder / f"{number}-{attempt}.jsonl"
            report.touch()
            env = {
                **os.environ,
                "VISIT_TESTS": str(report),
                "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            }
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "visit_plugin",
                "-p",
                "no:cacheprovider",
                "--tb=short",
                "-v",
            ]
            command += ["--color=no", "-m", "cuda", "tests/cuda", "-k", group, *(f"--deselect={name}" for name in done)]
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=sys.stdout, stderr=subprocess.STDOUT)
            try:
                status: int | None = process.wait(left(seconds) - 10)
            except subprocess.TimeoutExpired:
                process.send_signal(2)
                try:
                    status = process.wait(8)
                except subprocess.TimeoutExpired:
                    process.kill()
                    status = None
            lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
            ended = {line["test"]: line["outcome"] for line in lines if "outcome" in line}
            for line in lines:
                if "outcome" in line:
                    counts[line["outcome"]] += 1
                    if line["outcome"] == "failed":
                        FAILED.append(line["test"])
                        tell(piece="G", say=f"! failed: {line['test'].rpartition('::')[2]}")
            begun = [line["test"] for line in lines if line["test"] not in ended]
            for name in dict.fromkeys(begun):
                counts["died"] += 1
                FAILED.append(name)
                tell(piece="G", say=f"! died in {name.rpartition('::')[2]}, exit status {status}")
            done += [*ended, *begun]
            tell(piece="G", group=group, attempt=attempt, status=status, outcomes=ended)
            if status in (0, 1, 5) or not lines:
                break
    tell(piece="G", counts=dict(counts), say=f"tests: {dict(counts)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("piece")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    if given.piece == "H":
        from gpu_rows import compare

        compare(given.seconds, given.small, tell, FAILED)
        return int(bool(FAILED))
    if given.piece == "I":
        from gpu_rows import paces

        paces(given.seconds, given.small, tell, FAILED)
        return int(bool(FAILED))
    pieces: dict[str, Callable[[float, bool], None]] = {
        "A": machine,
        "B": primitives,
        "C": faithfulness,
        "D": bits,
        "E": host_time,
        "F": sanitizer,
        "G": tests,
    }
    pieces[given.piece](given.seconds, given.small)
    return int(bool(FAILED))


if __name__ == "__main__":
    sys.exit(main())
