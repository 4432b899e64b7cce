"""Measure the link to a home: alone, concurrently with ops, and in both directions at once.

Copies and ops share cores, memory and buses, so plans use the rates measured concurrently with ops. ``_measure`` is the
protocol; threads and the host's clock, or streams and the device's clock, run and time it.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Annotated

import torch
from msgspec import Meta, Struct

from outofcore.busy import BusyWatch, is_due, read_disk, was_busy, was_disk_busy
from outofcore.costs import MIN_CONTENTION_SHARE, Home
from outofcore.errors import GraphError, StateError
from outofcore.execution.arena import DeviceArena
from outofcore.execution.backend import Backend
from outofcore.execution.cuda.interface import Driver, Mark, Stream
from outofcore.execution.cuda.staging import Staging, first_stream, last_stream
from outofcore.execution.interrupts import DeferredSignals
from outofcore.jsonfile import convert_json
from outofcore.profiling.cache import Cache, Shelf
from outofcore.profiling.ops import machine_facts
from outofcore.runtime.homes import DiskHome, HomeStore
from outofcore.runtime.memory import Region, map_anonymous
from outofcore.units import MIB, PAGE_BYTES, round_up

_log = logging.getLogger("outofcore.profiling")

_LATENCY_COPIES = 9  # one-page copies for the median latency
_MAX_COPIES = 500  # issued to a device at once
# Rounds of the four concurrent measurements, and the total number of parts, two of them for copies alone.
_ROUNDS = 3
_PARTS = 4 * _ROUNDS + 2
# Disks fill up and age, so older measurements are repeated.
_FRESH_SECONDS = 7 * 24 * 3600.0
# Ranges of plausible measurements; cached values outside are damaged.
_Seconds = Annotated[float, Meta(ge=1e-12, le=1e6)]
_Rate = Annotated[float, Meta(ge=1.0, le=1e15)]  # bytes per second


class _MeasurementTime(Struct):
    measured_at: Annotated[float, Meta(ge=0, le=1e12)]  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second in each direction."""

    out: _Rate
    into: _Rate


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The measured speed of copies to and from a home; ``busy`` is as in ``costs.OpCost``."""

    name: str
    capacity: int | None
    latency_s: _Seconds  # of a copy of one page, alone
    alone: Rates  # in one direction, with no other work
    computing: Rates  # in one direction, concurrently with ops
    together: Rates  # in both directions, concurrently with ops
    compute_alone_s: _Seconds  # of the ops, alone
    compute_single_s: _Seconds  # of the ops with copies in one direction, the mean of both
    compute_both_s: _Seconds  # of the ops with copies in both directions
    busy: Annotated[int, Meta(ge=0, le=1 << 30)] = 0

    @property
    def contention(self) -> float:
        lost = 2 - self.together.out / self.computing.out - self.together.into / self.computing.into
        return min(max(lost, 0.0), 1.0)

    @property
    def contention_out(self) -> float:
        out = max(1 - self.together.out / self.computing.out, 0.0)
        into = max(1 - self.together.into / self.computing.into, 0.0)
        part = out / (out + into) if out + into else 0.5
        return min(max(part, MIN_CONTENTION_SHARE), 1 - MIN_CONTENTION_SHARE)

    @property
    def compute_slowdown(self) -> float:
        single = self.compute_single_s / self.compute_alone_s - 1
        both = (self.compute_both_s / self.compute_alone_s - 1) / 2
        return max((single + both) / 2, 0.0)

    @property
    def home(self) -> Home:
        """Return the home with its measured costs, as the planner needs it."""
        return Home(
            self.name,
            self.capacity,
            self.computing.out,
            self.computing.into,
            self.latency_s,
            self.contention,
            self.compute_slowdown,
            self.contention_out,
            self.busy,
        )


@dataclass(frozen=True, slots=True)
class ComputeLoad:
    """The ops that run concurrently with copies: matrix products, and a pass over uncached memory."""

    rows: int  # of a square matrix
    products: int
    pass_bytes: int


_HOST_WORK, _DEVICE_WORK = ComputeLoad(512, 4, 32 * MIB), ComputeLoad(2048, 1, 64 * MIB)


def measure_homes(
    stores: Sequence[HomeStore], cache: Cache | None, backend: Backend, buffer_bytes: int
) -> tuple[Home, ...]:
    """Return homes (backing stores) with their copy costs, from the cache or measured on temporary stores."""
    homes: list[Home] = []
    for store in stores:
        sibling = store.sibling(2 * max(buffer_bytes, PAGE_BYTES))
        try:
            link = load_or_measure_link(
                sibling, cache, buffer_bytes=buffer_bytes, driver=backend.driver, device=backend.facts()
            )
            homes.append(replace(link.home, bytes=store.capacity))
        finally:
            sibling.close()
    return tuple(homes)


def load_or_measure_link(
    home: HomeStore,
    cache: Cache | None,
    *,
    buffer_bytes: int = 64 * MIB,
    driver: Driver | None = None,
    device: Mapping[str, object] | None = None,
) -> LinkReport:
    """Return the cached speed of copies to and from a home; measure it if it is missing or outdated.

    ``buffer_bytes`` is rounded down to a power of two; each buffer size is a separate link. ``driver`` is the device at
    the other end and ``device`` the facts about it; None means the CPU. Raises as ``measure_link``.
    """
    size = 1 << max(buffer_bytes, PAGE_BYTES).bit_length() - 1
    if cache is None:
        return measure_link(home, buffer_bytes=size, driver=driver)
    shelf, key = _shelf(cache, device), f"{home.identity}/{size}"
    entry, entry_path, busy = shelf.read().get(key), f"$.entries.{key}", 0
    if entry is not None:
        try:
            age = time.time() - convert_json(entry, _MeasurementTime, shelf.path, entry_path).measured_at
            if 0 <= age < _FRESH_SECONDS:
                cached = convert_json(entry, LinkReport, shelf.path, entry_path)
                if not is_due(cached.busy, age):
                    # The capacity may have changed.
                    return replace(cached, name=home.name, capacity=home.capacity)
                busy = cached.busy
        except GraphError as error:
            _log.warning("measuring the link again, because its cached measurement cannot be used: %s", error)
    report = measure_link(home, buffer_bytes=size, driver=driver)
    report = replace(report, busy=busy + 1) if report.busy else report
    shelf.write({key: {"measured_at": time.time(), **asdict(report)}})
    return report


def update_cached_link(
    home: HomeStore, cache: Cache, before: Home, after: Home, device: Mapping[str, object] | None = None
) -> None:
    """Apply the change in a home's costs from ``before`` to ``after`` to its cached measurements."""
    if before == after:
        return
    shelf = _shelf(cache, device)
    out, into = after.bytes_per_s_out / before.bytes_per_s_out, after.bytes_per_s_in / before.bytes_per_s_in
    changed: dict[str, object] = {}
    for key, entry in shelf.read().items():
        if not key.startswith(f"{home.identity}/"):
            continue
        try:
            cached = convert_json(entry, LinkReport, shelf.path, f"$.entries.{key}")
            measured_at = convert_json(entry, _MeasurementTime, shelf.path, f"$.entries.{key}").measured_at
        except GraphError:
            continue  # damaged; the next `load_or_measure_link` measures it again
        report = replace(
            cached,
            computing=Rates(cached.computing.out * out, cached.computing.into * into),
            together=Rates(cached.together.out * out, cached.together.into * into),
            compute_single_s=cached.compute_alone_s * (1 + after.compute_slowdown),
            compute_both_s=cached.compute_alone_s * (1 + 2 * after.compute_slowdown),
        )
        changed[key] = {"measured_at": measured_at, **asdict(report)}
    shelf.write(changed)


def _shelf(cache: Cache, device: Mapping[str, object] | None) -> Shelf:
    return cache.shelf("links", {**machine_facts(), **(device or {})})


def measure_link(
    home: HomeStore,
    *,
    buffer_bytes: int = 64 * MIB,
    seconds: float = 0.5,
    driver: Driver | None = None,
    compute: Callable[[], object] | None = None,
) -> LinkReport:
    """Measure the speed of copies between a home and process memory, or the memory of a device.

    Copies go between fresh memory and space past the end of the home's contents; the home grows by twice the buffer.
    The first Ctrl-C takes effect after the measurement, a second one after the current copies.
    ``buffer_bytes`` is the size of a copy, rounded up to whole pages, and ``seconds`` the approximate duration, of at
    least three copies. ``driver`` is the device (None: the memory of the process). ``compute`` is the concurrent work,
    by default ops bound by arithmetic and by memory in turn. Raises ``ArenaError`` or ``SpillError`` without space.
    """
    size = round_up(buffer_bytes, PAGE_BYTES)
    folder = home.directory if isinstance(home, DiskHome) else None
    with DeferredSignals("the measurement of a link"):
        slots = home.reserve(size), home.reserve(size)
        disk = None if folder is None else read_disk(folder)
        if driver is None:
            report = _measure(home, size, seconds / _PARTS, _host_bench(home, slots, size, compute))
        else:
            with _device_bench(driver, home, slots, size, compute) as bench:
                # Other processes on the cores do not affect the device's clock.
                report = replace(_measure(home, size, seconds / _PARTS, bench), busy=0)
        is_marked = report.busy or (folder is not None and was_disk_busy(disk, read_disk(folder)))
        return replace(report, busy=int(is_marked))


@dataclass(frozen=True, eq=False)
class _TimedAction:
    call: Callable[[], object]
    stream: Stream = Stream.COMPUTE  # only for a device


# Runs actions concurrently for about the given seconds, each at least the given number of times. Ops, if any, are
# the first action. Returns the seconds of each run of each action while all others ran.
_TimeActions = Callable[[Sequence[_TimedAction], float, int], list[list[float]]]


@dataclass(frozen=True)
class _LinkBench:
    time_actions: _TimeActions
    work: _TimedAction  # ops
    copy_out: _TimedAction  # a copy to the home
    copy_in: _TimedAction  # a copy from the home
    copy_page_out: _TimedAction
    copy_page_in: _TimedAction


def _measure(home: HomeStore, size: int, seconds_per_series: float, bench: _LinkBench) -> LinkReport:
    """Time copies of ``size`` bytes to and from a home, alone and concurrently with computation."""
    work, copy_out, copy_in, pages = (
        bench.work,
        bench.copy_out,
        bench.copy_in,
        (bench.copy_page_out, bench.copy_page_in),
    )
    # First writes to fresh pages of memory or a file are slower, and so is an op's first run.
    for action in (copy_out, copy_in, work, *pages):
        bench.time_actions((action,), 0.0, 1)
    latency = statistics.median(t for page in pages for t in bench.time_actions((page,), 0.0, _LATENCY_COPIES)[0])
    # Interleaved, so that a temporary load on the machine is not mistaken for a slowdown by copies.
    series = ((work,), (work, copy_out), (work, copy_in), (work, copy_out, copy_in))
    rounds: list[list[list[list[float]]]] = []
    watch = BusyWatch()
    for _ in range(_ROUNDS):
        # Not during copies, when the process's own threads may need more cores than the machine has.
        with watch:
            alone = bench.time_actions(series[0], seconds_per_series, 1)
        rounds.append([alone, *(bench.time_actions(actions, seconds_per_series, 1) for actions in series[1:])])
    out_s, in_s = (
        statistics.median(bench.time_actions((copy,), seconds_per_series, _ROUNDS)[0]) for copy in (copy_out, copy_in)
    )

    def copying(series_index: int, action: int) -> float:
        return statistics.median(t for series_times in rounds for t in series_times[series_index][action])

    def computing(series_index: int) -> float:
        return min(statistics.median(series_times[series_index][0]) for series_times in rounds)

    with_out, with_in = (computing(1), copying(1, 1)), (computing(2), copying(2, 1))
    both = computing(3), copying(3, 1), copying(3, 2)

    def rates(*copies: float) -> Rates:
        # Without the latency, which ``costs.Home`` adds.
        return Rates(*(size / max(copy_s - latency, copy_s / 2) for copy_s in copies))

    return LinkReport(
        name=home.name,
        capacity=home.capacity,
        latency_s=latency,
        alone=rates(out_s, in_s),
        computing=rates(with_out[1], with_in[1]),
        together=rates(both[1], both[2]),
        compute_alone_s=computing(0),
        compute_single_s=(with_out[0] + with_in[0]) / 2,
        compute_both_s=both[0],
        busy=int(was_busy(watch.counted)),
    )


def _make_ops(
    matrix: torch.Tensor, product: torch.Tensor, source: torch.Tensor, target: torch.Tensor, products: int
) -> Callable[[], object]:
    """Return a function that computes matrix products and a sum in existing memory, to load the device."""
    matrix.fill_(0.5)
    source.fill_(0.5)

    def run() -> None:
        with torch.no_grad():
            for _ in range(products):
                torch.mm(matrix, matrix, out=product)
            torch.add(source, 1.0, out=target)

    return run


def _host_bench(home: HomeStore, slots: tuple[int, int], size: int, compute: Callable[[], object] | None) -> _LinkBench:
    """Prepare a benchmark of copies between a home and process memory, with concurrent computation."""
    region = Region(map_anonymous(2 * size), 2 * size)
    outgoing, incoming = region.memory(0, size), region.memory(size, size)
    random = torch.Generator().manual_seed(0)  # separate, to keep the user's random numbers
    torch.frombuffer(outgoing, dtype=torch.int64).random_(generator=random)  # compressible bytes would be faster
    home.write(slots[1], outgoing)
    work = _HOST_WORK
    squares, passes = torch.empty(2, work.rows, work.rows), torch.empty(2, work.pass_bytes // 4)
    return _LinkBench(
        time_concurrently,
        _TimedAction(compute or _make_ops(*squares, *passes, products=work.products)),
        _TimedAction(lambda: home.write(slots[0], outgoing)),
        _TimedAction(lambda: home.read(slots[1], incoming)),
        _TimedAction(lambda: home.write(slots[0], outgoing[:PAGE_BYTES])),
        _TimedAction(lambda: home.read(slots[1], incoming[:PAGE_BYTES])),
    )


def time_concurrently(actions: Sequence[_TimedAction], seconds: float, min_runs: int) -> list[list[float]]:
    """Run actions concurrently, each at least ``min_runs`` times and for ``seconds``; return all run times."""
    times: list[list[float]] = [[] for _ in actions]
    has_enough = [threading.Event() for _ in actions]
    start = threading.Barrier(len(actions))

    def stop() -> None:
        start.abort()
        for event in has_enough:
            event.set()

    def run(index: int) -> None:
        try:
            start.wait()
            total = 0.0
            # Go on until all actions have enough runs, as each must run concurrently with all others.
            while not all(event.is_set() for event in has_enough):
                begin = time.perf_counter()
                actions[index].call()
                times[index].append(time.perf_counter() - begin)
                total += times[index][-1]
                if len(times[index]) >= min_runs and total >= seconds:
                    has_enough[index].set()
        finally:
            stop()  # all have enough runs, or this action failed

    # Raised in threads that waited for a failed one; the original error is raised below.
    waited_in_vain = suppress(threading.BrokenBarrierError)
    pool = ThreadPoolExecutor(len(actions), "outofcore-measure")
    try:
        futures = [_submit(pool, run, index) for index in range(1, len(actions))]
        with waited_in_vain:
            run(0)
    finally:
        stop()
        _join(pool)
    while futures:
        with waited_in_vain:
            futures.pop(0).result()
    return times


def _submit(pool: ThreadPoolExecutor, run: Callable[[int], None], index: int) -> Future[None]:
    try:
        return pool.submit(run, index)
    except RuntimeError as error:
        raise StateError(
            f"cannot start a thread to measure copies concurrently with ops: {error}. Raise the limit on processes "
            "(ulimit -u), or end other programs"
        ) from error


def _join(pool: ThreadPoolExecutor) -> None:
    """Wait until the threads of a pool have ended, even after an interrupt."""
    try:
        pool.shutdown()
    except BaseException:  # from a signal handler; the threads still use memory that the caller closes
        _join(pool)
        raise


def measure_memory_bandwidth(*, buffer_bytes: int = 64 * MIB) -> float:
    """Measure how many bytes per second PyTorch reads plus writes when it copies a large tensor."""
    source = torch.ones(buffer_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    (times,) = time_concurrently([_TimedAction(lambda: target.copy_(source))], 0.2, 2)
    return 2 * buffer_bytes / statistics.median(times)


@contextmanager
def _device_bench(
    driver: Driver, home: HomeStore, slots: tuple[int, int], size: int, compute: Callable[[], object] | None
) -> Iterator[_LinkBench]:
    """Yield the actions to time for copies between a device and two slots of a home."""
    rows, products, pass_bytes = _DEVICE_WORK.rows, _DEVICE_WORK.products, _DEVICE_WORK.pass_bytes
    square = rows * rows * 4
    arena = driver.open_arena(2 * (size + pass_bytes + square), 1 << 62)

    def floats(at: int, count: int) -> torch.Tensor:
        return arena.view(2 * size + at, count).view(torch.float32)

    try:
        arena.view(0, size).fill_(1)
        if compute is None:
            squares = (floats(k * square, square).view(rows, rows) for k in range(2))
            passes = (floats(2 * square + k * pass_bytes, pass_bytes) for k in range(2))
            compute = _make_ops(*squares, *passes, products=products)
        work = compute
        with driver.step(None):
            if isinstance(home, DiskHome):
                copies = _disk_copies(driver, home, arena, slots, size)
            else:
                copies = _memory_copies(driver, home, arena, slots, size)
            yield _LinkBench(_DeviceTimes(driver), _TimedAction(lambda: driver.launch(None, work)), *copies)
    finally:
        # Issued copies must end before their memory is released.
        driver.synchronize()
        arena.close()


def _memory_copies(
    driver: Driver, home: HomeStore, arena: DeviceArena, slots: tuple[int, int], size: int
) -> tuple[_TimedAction, ...]:
    """Return actions that copy between a device and a home in host memory: ``size`` bytes each way, then a page."""
    host = [home.tensor_of(slot, size) for slot in slots]
    device = arena.view(0, size), arena.view(size, size)
    host[1].fill_(1)

    def copy_out(count: int) -> _TimedAction:
        target, source = host[0][:count], device[0][:count]
        return _TimedAction(lambda: driver.copy(Stream.COPY_OUT, -1, target, source), Stream.COPY_OUT)

    def copy_in(count: int) -> _TimedAction:
        target, source = device[1][:count], host[1][:count]
        return _TimedAction(lambda: driver.copy(Stream.COPY_IN, -1, target, source), Stream.COPY_IN)

    return copy_out(size), copy_in(size), copy_out(PAGE_BYTES), copy_in(PAGE_BYTES)


def _disk_copies(
    driver: Driver, home: DiskHome, arena: DeviceArena, slots: tuple[int, int], size: int
) -> tuple[_TimedAction, ...]:
    """Return actions that copy between a device and a home on disk: ``size`` bytes each way, then a page."""
    staging = Staging(driver, home)

    def copy_out(count: int, slot: int) -> _TimedAction:
        parts = staging.cut_chunks(arena.view, 0, slot, count)
        return _TimedAction(lambda: staging.copy_out(-1, parts), Stream.DISK_OUT)

    def copy_in(count: int) -> _TimedAction:
        parts = staging.cut_chunks(arena.view, size, slots[1], count)
        return _TimedAction(lambda: staging.copy_in(-1, parts, ()), Stream.DISK_IN)

    # Reading bytes that were never written would not access the disk.
    copy_out(size, slots[1]).call()
    driver.synchronize()
    return copy_out(size, slots[0]), copy_in(size), copy_out(PAGE_BYTES, slots[0]), copy_in(PAGE_BYTES)


class _DeviceTimes:
    """Times actions on concurrent streams by the device's clock, as ``_TimeActions`` describes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._alone: dict[_TimedAction, float] = {}

    def __call__(self, actions: Sequence[_TimedAction], seconds: float, min_runs: int) -> list[list[float]]:
        if not seconds:
            return self._issue(actions, [min_runs] * len(actions))
        for action in actions:
            if action not in self._alone:
                self._alone[action] = statistics.median(*self._issue((action,), [2]))
        counts = [
            min(max(math.ceil(seconds / max(self._alone[action], 1e-6)), min_runs), _MAX_COPIES) for action in actions
        ]
        if len(actions) > 1:
            # Concurrent actions are slower, so one may overlap with twice as many runs of another.
            return self._issue(actions, [2 * count for count in counts])
        times = self._issue(actions, counts)
        self._alone[actions[0]] = statistics.median(times[0])
        return times

    def _issue(self, actions: Sequence[_TimedAction], counts: Sequence[int]) -> list[list[float]]:
        """Run action i ``counts[i]`` times, all actions concurrently; return the seconds of the overlapped runs."""
        driver = self._driver
        begin = driver.create_mark(timed=True)
        driver.record(Stream.COMPUTE, begin)
        for action in actions:
            if action.stream is not Stream.COMPUTE:
                driver.wait(first_stream(action.stream), begin)
        marks: list[list[tuple[Mark, Mark]]] = [[] for _ in actions]
        turns = zip_longest(*([index] * count for index, count in enumerate(counts)))
        for index in (index for turn in turns for index in turn if index is not None):
            start, end = driver.create_mark(timed=True), driver.create_mark(timed=True)
            driver.record(first_stream(actions[index].stream), start)
            actions[index].call()
            driver.record(last_stream(actions[index].stream), end)
            marks[index].append((start, end))
        driver.synchronize()
        spans = [[(driver.seconds(begin, start), driver.seconds(begin, end)) for start, end in s] for s in marks]
        first_end = min(action_spans[-1][1] for action_spans in spans)
        return [
            [end - start for start, end in action_spans if start < first_end]
            or [action_spans[0][1] - action_spans[0][0]]
            for action_spans in spans
        ]
