"""Measure the link to a home: alone, concurrently with ops, and both ways at once; and how much copies slow ops down.

A step copies while it computes, and both share cores, memory and buses. So plans use the rates measured concurrently
with ops; ``Home`` also has how much copies both ways slow each other, and ops, down. The protocol is one
(``_measured``); threads and the host's clock, or streams and the device's clock, run and time it.
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

from outofcore.busy import Watch, is_due, read_disk, was_busy, was_disk_busy
from outofcore.costs import LEAST_PART, Home
from outofcore.errors import GraphError, StateError
from outofcore.execution.arena import Memory
from outofcore.execution.backend import Backend
from outofcore.execution.cuda.interface import Driver, Mark, Stream
from outofcore.execution.cuda.staging import Staging, first_stream, last_stream
from outofcore.execution.interrupts import Deferred
from outofcore.jsonfile import convert_json
from outofcore.profiling.cache import Cache, Shelf
from outofcore.profiling.ops import machine_facts
from outofcore.runtime.homes import DiskHome, HomeStore
from outofcore.runtime.memory import Region, map_anonymous
from outofcore.units import MIB, PAGE_BYTES, round_up

_log = logging.getLogger("outofcore.profiling")

_LATENCY_COPIES = 9  # of a page, of which the median is taken
_MOST_COPIES = 500  # that are issued to a device at once
# How often what plans go by is measured, in turn with the others; in how many parts this and copies alone are.
_ROUNDS = 3
_PARTS = 4 * _ROUNDS + 2
# Disks fill up and grow old: what was measured longer ago is measured again.
_FRESH_SECONDS = 7 * 24 * 3600.0
# Nothing that was measured lies beyond these; what is kept and does is damaged.
_Seconds = Annotated[float, Meta(ge=1e-12, le=1e6)]
_Rate = Annotated[float, Meta(ge=1.0, le=1e15)]  # bytes per second


class _Measured(Struct):
    measured_at: Annotated[float, Meta(ge=0, le=1e12)]  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second each way."""

    out: _Rate
    into: _Rate


@dataclass(frozen=True, slots=True)
class LinkReport:
    """A measured link.

    Attributes:
        capacity: of the home, in bytes.
        latency_s: of a copy of one page, alone.
        alone: one way at a time, with nothing else to do.
        computing: one way at a time, concurrently with ops.
        together: both ways at once, concurrently with ops.
        compute_alone_s: seconds of the ops, alone.
        compute_single_s: concurrently with copies one way, the median of both ways.
        compute_both_s: concurrently with copies both ways.
        busy: as for ``costs.OpCost``.
    """

    name: str
    capacity: int | None
    latency_s: _Seconds
    alone: Rates
    computing: Rates
    together: Rates
    compute_alone_s: _Seconds
    compute_single_s: _Seconds
    compute_both_s: _Seconds
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
        return min(max(part, LEAST_PART), 1 - LEAST_PART)

    @property
    def compute_slowdown(self) -> float:
        single = self.compute_single_s / self.compute_alone_s - 1
        both = (self.compute_both_s / self.compute_alone_s - 1) / 2
        return max((single + both) / 2, 0.0)

    @property
    def home(self) -> Home:
        """The costs of the home during a step."""
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
class Work:
    """The ops that copies are measured beside: products of matrices, and a pass over memory that no cache holds."""

    rows: int  # of a square matrix
    products: int
    pass_bytes: int


_HOST_WORK, _DEVICE_WORK = Work(512, 4, 32 * MIB), Work(2048, 1, 64 * MIB)


def links_to(stores: Sequence[HomeStore], cache: Cache | None, backend: Backend, buffer_bytes: int) -> tuple[Home, ...]:
    """Return the costs of a step's homes.

    The homes are in use, or soon will be: each is measured on one like it, so that it loses no room. Raises as
    ``measure_link``.
    """
    found: list[Home] = []
    for store in stores:
        other = store.sibling(2 * max(buffer_bytes, PAGE_BYTES))
        try:
            link = known_link(other, cache, buffer_bytes=buffer_bytes, driver=backend.driver, device=backend.facts())
            found.append(replace(link.home, bytes=store.capacity))
        finally:
            other.close()
    return tuple(found)


def known_link(
    home: HomeStore,
    cache: Cache | None,
    *,
    buffer_bytes: int = 64 * MIB,
    driver: Driver | None = None,
    device: Mapping[str, object] | None = None,
) -> LinkReport:
    """Return the cached link to a home, or measure and keep it; raises as ``measure_link``.

    ``buffer_bytes`` is rounded down to a power of two; each buffer size is another link. ``driver`` is the device at
    the other end and ``device`` the facts about it; None: the CPU.
    """
    size = 1 << max(buffer_bytes, PAGE_BYTES).bit_length() - 1
    if cache is None:
        return measure_link(home, buffer_bytes=size, driver=driver)
    shelf, key = _shelf(cache, device), f"{home.identity}/{size}"
    kept, where, busy = shelf.read().get(key), f"$.entries.{key}", 0
    if kept is not None:
        try:
            age = time.time() - convert_json(kept, _Measured, shelf.path, where).measured_at
            if 0 <= age < _FRESH_SECONDS:
                found = convert_json(kept, LinkReport, shelf.path, where)
                if not is_due(found.busy, age):
                    # How much room there is may have changed.
                    return replace(found, name=home.name, capacity=home.capacity)
                busy = found.busy
        except GraphError as error:
            _log.warning("the link is measured anew: %s", error)
    report = measure_link(home, buffer_bytes=size, driver=driver)
    report = replace(report, busy=busy + 1) if report.busy else report
    shelf.write({key: {"measured_at": time.time(), **asdict(report)}})
    return report


def keep_link(
    home: HomeStore, cache: Cache, before: Home, after: Home, device: Mapping[str, object] | None = None
) -> None:
    """Replace a link's measured costs (``before``) in the cache by those that steps have shown (``after``).

    Those are the rates, and how much copies slow ops down. ``device`` are facts about a device other than the CPU.
    """
    if before == after:
        return
    shelf = _shelf(cache, device)
    out, into = after.bytes_per_s_out / before.bytes_per_s_out, after.bytes_per_s_in / before.bytes_per_s_in
    changed: dict[str, object] = {}
    for key, kept in shelf.read().items():
        if not key.startswith(f"{home.identity}/"):
            continue
        try:
            found = convert_json(kept, LinkReport, shelf.path, f"$.entries.{key}")
            at = convert_json(kept, _Measured, shelf.path, f"$.entries.{key}").measured_at
        except GraphError:
            continue  # it is damaged, and measured anew when it is next asked for
        report = replace(
            found,
            computing=Rates(found.computing.out * out, found.computing.into * into),
            together=Rates(found.together.out * out, found.together.into * into),
            compute_single_s=found.compute_alone_s * (1 + after.compute_slowdown),
            compute_both_s=found.compute_alone_s * (1 + 2 * after.compute_slowdown),
        )
        changed[key] = {"measured_at": at, **asdict(report)}
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
    """Measure the link between memory, or a device, and a home.

    Copies go between fresh memory and room past the end of the home's contents; the home is larger afterwards by twice
    the buffer. Bandwidth is the median of several copies, latency that of copies of one page. Between a device and a
    disk they go as in a step, through buffers in host memory. Ctrl-C takes effect when the link is measured; a second
    one when the copies that are under way have ended.

    Args:
        home: an open or unopened home; for a device pinned at best, or a disk.
        buffer_bytes: size of a copy, rounded up to whole pages.
        seconds: about how long to measure, in equal parts: three each for ops alone, for copies out and in concurrently
            with ops, and for both at once; one each for copies out and in alone. At least three copies are timed.
        driver: the device; None: the memory of the process.
        compute: what runs concurrently; by default ops bound by arithmetic and by memory in turn.

    Limits: the speed is that of this half second. A drive may slow down once its write cache is full, or while others
    use it; copies may slow other ops down more, or less.

    Raises:
        ArenaError: the device has no room for two buffers and 192 MiB for ops.
        SpillError: the home has no room for the measurement.
        StateError: the system gives no thread for copies.
        TransferError: a copy failed.
    """
    size = round_up(buffer_bytes, PAGE_BYTES)
    folder = home.directory if isinstance(home, DiskHome) else None
    with Deferred("the measurement of a link"):
        slots = home.reserve(size), home.reserve(size)
        disk = None if folder is None else read_disk(folder)
        if driver is None:
            report = _measured(home, size, seconds / _PARTS, _host_bench(home, slots, size, compute))
        else:
            with _device_bench(driver, home, slots, size, compute) as bench:
                # A device's own clock counts nothing that others do to the cores.
                report = replace(_measured(home, size, seconds / _PARTS, bench), busy=0)
        is_marked = report.busy or (folder is not None and was_disk_busy(disk, read_disk(folder)))
        return replace(report, busy=int(is_marked))


@dataclass(frozen=True, eq=False)
class _Action:
    """A repeated action, on a stream."""

    call: Callable[[], object]
    stream: Stream = Stream.COMPUTE  # on a device: where it is issued


# Runs actions side by side, of which the first is that of the ops if they are among them, for about so many seconds and
# each at least so often: the seconds that each run of each took while all others were at work.
_Times = Callable[[Sequence[_Action], float, int], list[list[float]]]


@dataclass(frozen=True)
class _Bench:
    """The measured actions, and how they are timed."""

    times: _Times
    work: _Action  # ops
    put: _Action  # a copy to the home
    get: _Action  # a copy from the home
    put_page: _Action
    get_page: _Action


def _measured(home: HomeStore, size: int, part: float, bench: _Bench) -> LinkReport:
    work, put, get, pages = bench.work, bench.put, bench.get, (bench.put_page, bench.get_page)
    # The first writes to fresh pages of memory and of a file cost more than all later ones; so does an op's first run.
    for action in (put, get, work, *pages):
        bench.times((action,), 0.0, 1)
    latency = statistics.median(t for page in pages for t in bench.times((page,), 0.0, _LATENCY_COPIES)[0])
    # In turn, several times over: what else runs for a while would else seem to be what copies take from ops.
    series = ((work,), (work, put), (work, get), (work, put, get))
    rounds: list[list[list[list[float]]]] = []
    watch = Watch()
    for _ in range(_ROUNDS):
        # Beside copies, the own threads want more cores than there may be.
        with watch:
            alone = bench.times(series[0], part, 1)
        rounds.append([alone, *(bench.times(actions, part, 1) for actions in series[1:])])
    out_s, in_s = (statistics.median(bench.times((copy,), part, _ROUNDS)[0]) for copy in (put, get))

    def copying(which: int, action: int) -> float:
        return statistics.median(t for one in rounds for t in one[which][action])

    def computing(which: int) -> float:
        return min(statistics.median(one[which][0]) for one in rounds)

    with_out, with_in = (computing(1), copying(1, 1)), (computing(2), copying(2, 1))
    both = computing(3), copying(3, 1), copying(3, 2)

    def rates(*copies: float) -> Rates:
        # Once the latency is taken off, as ``costs.Home`` counts it.
        return Rates(*(size / max(taken - latency, taken / 2) for taken in copies))

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


def _ops(
    left: torch.Tensor, product: torch.Tensor, source: torch.Tensor, target: torch.Tensor, products: int
) -> Callable[[], object]:
    """Return ops whose results take no new memory, so that no page fault disturbs them."""
    left.fill_(0.5)
    source.fill_(0.5)

    def run() -> None:
        with torch.no_grad():
            for _ in range(products):
                torch.mm(left, left, out=product)
            torch.add(source, 1.0, out=target)

    return run


def _host_bench(home: HomeStore, slots: tuple[int, int], size: int, compute: Callable[[], object] | None) -> _Bench:
    region = Region(map_anonymous(2 * size), 2 * size)
    outgoing, incoming = region.memory(0, size), region.memory(size, size)
    random = torch.Generator().manual_seed(0)  # of its own: the user's draws are not to be shifted
    torch.frombuffer(outgoing, dtype=torch.int64).random_(generator=random)  # compressible bytes would flatter
    home.write(slots[1], outgoing)
    work = _HOST_WORK
    squares, passes = torch.empty(2, work.rows, work.rows), torch.empty(2, work.pass_bytes // 4)
    return _Bench(
        beside_each_other,
        _Action(compute or _ops(*squares, *passes, products=work.products)),
        _Action(lambda: home.write(slots[0], outgoing)),
        _Action(lambda: home.read(slots[1], incoming)),
        _Action(lambda: home.write(slots[0], outgoing[:PAGE_BYTES])),
        _Action(lambda: home.read(slots[1], incoming[:PAGE_BYTES])),
    )


def beside_each_other(actions: Sequence[_Action], seconds: float, least: int) -> list[list[float]]:
    """Time actions (see ``_Times``): the first runs in this thread, the others in threads of their own.

    No thread is left when this returns or raises, whatever interrupts it. Raises ``StateError`` if the system gives no
    thread.
    """
    times: list[list[float]] = [[] for _ in actions]
    enough = [threading.Event() for _ in actions]
    start = threading.Barrier(len(actions))

    def stop() -> None:
        start.abort()
        for event in enough:
            event.set()

    def run(which: int) -> None:
        try:
            start.wait()
            taken = 0.0
            # Go on until the others have enough too: what runs alone would not count.
            while not all(event.is_set() for event in enough):
                begin = time.perf_counter()
                actions[which].call()
                times[which].append(time.perf_counter() - begin)
                taken += times[which][-1]
                if len(times[which]) >= least and taken >= seconds:
                    enough[which].set()
        finally:
            stop()  # either all have enough, or this one has failed

    # Those who waited for one that failed say nothing new.
    waited_in_vain = suppress(threading.BrokenBarrierError)
    pool = ThreadPoolExecutor(len(actions), "outofcore-measure")
    try:
        others = [_submit(pool, run, which) for which in range(1, len(actions))]
        with waited_in_vain:
            run(0)
    finally:
        stop()
        _join(pool)
    while others:
        with waited_in_vain:
            others.pop(0).result()
    return times


def _submit(pool: ThreadPoolExecutor, run: Callable[[int], None], which: int) -> Future[None]:
    try:
        return pool.submit(run, which)
    except RuntimeError as error:
        raise StateError(
            f"the system gives no thread to measure copies beside ops ({error}); raise the limit on processes "
            "(ulimit -u), or end other programs"
        ) from error


def _join(pool: ThreadPoolExecutor) -> None:
    """Return when the threads of a pool have ended, whatever interrupts the wait."""
    try:
        pool.shutdown()
    except BaseException:  # of the handler of a signal; the threads use memory that the caller closes
        _join(pool)
        raise


def measure_memory_bandwidth(*, buffer_bytes: int = 64 * MIB) -> float:
    """Return the bytes per second that PyTorch's threads read plus write when they copy one large tensor to another."""
    source = torch.ones(buffer_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    (times,) = beside_each_other([_Action(lambda: target.copy_(source))], 0.2, 2)
    return 2 * buffer_bytes / statistics.median(times)


@contextmanager
def _device_bench(
    driver: Driver, home: HomeStore, slots: tuple[int, int], size: int, compute: Callable[[], object] | None
) -> Iterator[_Bench]:
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
            compute = _ops(*squares, *passes, products=products)
        work = compute
        with driver.step(None):
            if isinstance(home, DiskHome):
                copies = _disk_copies(driver, home, arena, slots, size)
            else:
                copies = _memory_copies(driver, home, arena, slots, size)
            yield _Bench(_DeviceTimes(driver), _Action(lambda: driver.launch(None, work)), *copies)
    finally:
        # Copies that were issued end before their memory goes.
        driver.synchronize()
        arena.close()


def _memory_copies(
    driver: Driver, home: HomeStore, arena: Memory, slots: tuple[int, int], size: int
) -> tuple[_Action, ...]:
    """Return copies between the first bytes of an arena and host memory: out, in, and a page each way."""
    host = [home.face(slot, size) for slot in slots]
    device = arena.view(0, size), arena.view(size, size)
    host[1].fill_(1)

    def put(count: int) -> _Action:
        to, of = host[0][:count], device[0][:count]
        return _Action(lambda: driver.copy(Stream.COPY_OUT, -1, to, of), Stream.COPY_OUT)

    def get(count: int) -> _Action:
        to, of = device[1][:count], host[1][:count]
        return _Action(lambda: driver.copy(Stream.COPY_IN, -1, to, of), Stream.COPY_IN)

    return put(size), get(size), put(PAGE_BYTES), get(PAGE_BYTES)


def _disk_copies(
    driver: Driver, home: DiskHome, arena: Memory, slots: tuple[int, int], size: int
) -> tuple[_Action, ...]:
    """Return copies between the first bytes of an arena and a disk: out, in, and a page each way."""
    staging = Staging(driver, home)

    def put(count: int, slot: int) -> _Action:
        parts = staging.parts(arena.view, 0, slot, count)
        return _Action(lambda: staging.out(-1, parts), Stream.DISK_OUT)

    def get(count: int) -> _Action:
        parts = staging.parts(arena.view, size, slots[1], count)
        return _Action(lambda: staging.into(-1, parts, ()), Stream.DISK_IN)

    # What was never written is not read from the disk.
    put(size, slots[1]).call()
    driver.synchronize()
    return put(size, slots[0]), get(size), put(PAGE_BYTES, slots[0]), get(PAGE_BYTES)


class _DeviceTimes:
    """Times actions (see ``_Times``) on concurrent streams by the device's clock."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._alone: dict[_Action, float] = {}

    def __call__(self, actions: Sequence[_Action], seconds: float, least: int) -> list[list[float]]:
        if not seconds:
            return self._issue(actions, [least] * len(actions))
        for action in actions:
            if action not in self._alone:
                self._alone[action] = statistics.median(*self._issue((action,), [2]))
        counts = [
            min(max(math.ceil(seconds / max(self._alone[action], 1e-6)), least), _MOST_COPIES) for action in actions
        ]
        if len(actions) > 1:
            # Together they are slower, so that twice as many of the others may be needed while one is at work.
            return self._issue(actions, [2 * count for count in counts])
        found = self._issue(actions, counts)
        self._alone[actions[0]] = statistics.median(found[0])
        return found

    def _issue(self, actions: Sequence[_Action], counts: Sequence[int]) -> list[list[float]]:
        """Return the seconds of each repetition that began before another stream ran dry."""
        driver = self._driver
        begin = driver.mark(timed=True)
        driver.record(Stream.COMPUTE, begin)
        for action in actions:
            if action.stream is not Stream.COMPUTE:
                driver.wait(first_stream(action.stream), begin)
        stamps: list[list[tuple[Mark, Mark]]] = [[] for _ in actions]
        turns = zip_longest(*([which] * count for which, count in enumerate(counts)))
        for which in (which for turn in turns for which in turn if which is not None):
            start, end = driver.mark(timed=True), driver.mark(timed=True)
            driver.record(first_stream(actions[which].stream), start)
            actions[which].call()
            driver.record(last_stream(actions[which].stream), end)
            stamps[which].append((start, end))
        driver.synchronize()
        spans = [[(driver.seconds(begin, start), driver.seconds(begin, end)) for start, end in s] for s in stamps]
        until = min(found[-1][1] for found in spans)
        return [
            [end - start for start, end in found if start < until] or [found[0][1] - found[0][0]] for found in spans
        ]
