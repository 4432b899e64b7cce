"""Tests of link measurements, their costs and their cache."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outofcore.busy import DiskCounters
from outofcore.errors import SpillError, StateError, TransferError
from outofcore.profiling import links
from outofcore.profiling.cache import Cache
from outofcore.profiling.links import (
    LinkReport,
    Rates,
    load_or_measure_link,
    measure_link,
    measure_memory_bandwidth,
    update_cached_link,
)
from outofcore.runtime import memory
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.units import GIB, MIB, PAGE_BYTES


class Clock(threading.local):
    """A clock for each thread, so that copies in both directions overlap, as on a link with two lanes."""

    now = 0.0


class Paced(HostHome):
    """A home with copies that advance a simulated clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(64 * MIB)
        self._clock = clock

    def write(self, offset: int, source: memoryview) -> None:
        super().write(offset, source)
        self._clock.now += 0.005 + len(source) / (200 * MIB)

    def read(self, offset: int, target: memoryview) -> None:
        super().read(offset, target)
        self._clock.now += 0.005 + len(target) / (100 * MIB)


def test_measured_rates_match_a_simulated_link(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def compute() -> None:
        clock.now += 0.02

    measurement = measure_link(Paced(clock), buffer_bytes=4 * MIB, seconds=0.3, compute=compute)
    home = measurement.home
    assert home.name == "host"
    assert home.latency_s == pytest.approx(0.005, rel=0.02)  # the page itself takes time, too
    for rates in (measurement.alone, measurement.computing, measurement.together):
        assert rates.out == pytest.approx(200 * MIB, rel=0.01)
        assert rates.into == pytest.approx(100 * MIB, rel=0.01)
    assert (home.bytes_per_s_out, home.bytes_per_s_in) == (measurement.computing.out, measurement.computing.into)
    assert home.contention == pytest.approx(0, abs=1e-9)
    assert home.compute_slowdown == pytest.approx(0, abs=1e-9)


def make_report(**changes: object) -> LinkReport:
    defaults: dict[str, object] = {
        "name": "disk",
        "capacity": None,
        "latency_s": 1e-4,
        "alone": Rates(400.0, 800.0),
        "computing": Rates(200.0, 400.0),
        "together": Rates(200.0, 400.0),
        "compute_alone_s": 1.0,
        "compute_single_s": 1.0,
        "compute_both_s": 1.0,
    }
    return LinkReport(**{**defaults, **changes})  # type: ignore[arg-type]


def test_costs_are_the_rates_during_ops() -> None:
    home = make_report().home
    assert (home.bytes_per_s_out, home.bytes_per_s_in, home.latency_s) == (200, 400, 1e-4)
    assert (home.contention, home.compute_slowdown) == (0, 0)


@pytest.mark.parametrize(
    ("together", "contention"),
    [
        (Rates(200.0, 400.0), 0.0),  # independent
        (Rates(100.0, 200.0), 1.0),  # half as fast: both directions share one link
        (Rates(200.0, 200.0), 0.5),
        (Rates(50.0, 50.0), 1.0),  # no copy can lose more than its time
        (Rates(220.0, 440.0), 0.0),  # noise
    ],
)
def test_contention_follows_from_the_rates_of_simultaneous_copies(together: Rates, contention: float) -> None:
    assert make_report(together=together).contention == pytest.approx(contention)


@pytest.mark.parametrize(
    ("together", "share"),
    [
        (Rates(200.0, 400.0), 0.5),  # no loss
        (Rates(100.0, 200.0), 0.5),
        (Rates(50.0, 300.0), 0.75),
        (Rates(40.0, 420.0), 0.95),  # noise: incoming copies are not delayed
    ],
)
def test_contention_out_is_the_share_of_outgoing_copies(together: Rates, share: float) -> None:
    assert make_report(together=together).contention_out == pytest.approx(share)
    assert make_report(together=together).home.contention_out == pytest.approx(share)


@pytest.mark.parametrize(
    ("single", "both", "slowdown"), [(1.1, 1.2, 0.1), (1.0, 1.0, 0.0), (1.2, 1.2, 0.15), (0.9, 0.9, 0.0)]
)
def test_slowdown_is_per_concurrent_copy(single: float, both: float, slowdown: float) -> None:
    measured = make_report(compute_single_s=single, compute_both_s=both).compute_slowdown
    assert measured == pytest.approx(slowdown)


def test_actions_measured_together_run_concurrently() -> None:
    meeting = threading.Barrier(3)
    calls = [0, 0, 0]

    def wait(index: int) -> None:
        calls[index] += 1
        if calls[index] == 1:
            meeting.wait(60)  # raises unless each action has its own thread

    times = links.time_concurrently([links._TimedAction(partial(wait, index)) for index in range(3)], 0.0, 2)
    assert len(times) == 3
    assert min(calls) >= 2


@pytest.mark.parametrize("make", [DiskHome, lambda _: HostHome(64 * MIB)])
def test_measurement_keeps_the_contents_of_a_home(make: Callable[[Path], HomeStore], tmp_path: Path) -> None:
    home = make(tmp_path)
    home_tensor = home.tensor_of(home.reserve(MIB), MIB)
    home_tensor.fill_(7)
    link = measure_link(home, buffer_bytes=2 * MIB, seconds=0.02).home
    assert bool((home_tensor == 7).all())
    assert home.bytes == 5 * MIB
    assert link.bytes is not None
    assert link.bytes > 0
    assert min(link.bytes_per_s_in, link.bytes_per_s_out, link.latency_s) > 0
    assert 0 <= link.contention <= 1
    home.close()


def test_error_in_either_thread_is_raised() -> None:
    with pytest.raises(SpillError):
        measure_link(HostHome(MIB), buffer_bytes=MIB)

    class Broken(HostHome):
        def read(self, offset: int, target: memoryview) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise TransferError("the disk is gone")
            super().read(offset, target)

    with pytest.raises(TransferError, match="gone"):
        measure_link(Broken(64 * MIB), buffer_bytes=MIB, seconds=0.01)


def test_interrupt_ends_the_copying_threads() -> None:
    """The interrupt is like a second Ctrl-C, which is raised at once while ops run."""
    before = threading.active_count()

    def compute() -> None:
        if threading.active_count() > before:
            raise KeyboardInterrupt

    home = HostHome(64 * MIB)
    with pytest.raises(KeyboardInterrupt):
        measure_link(home, buffer_bytes=MIB, seconds=0.5, compute=compute)
    assert threading.active_count() == before
    home.close()


def limit_threads(patch: pytest.MonkeyPatch, max_threads: int) -> None:
    """Let at most ``max_threads`` more threads start."""
    start, remaining = threading.Thread.start, max_threads

    def start_if_allowed(thread: threading.Thread) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", start_if_allowed)


@pytest.mark.parametrize("max_threads", [0, 1])
def test_measure_link_raises_without_threads(max_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    home = HostHome(64 * MIB)
    limit_threads(monkeypatch, max_threads)
    # Two of the three actions need a thread.
    actions = [links._TimedAction(lambda: None)] * 3
    with pytest.raises(StateError, match="cannot start a thread to measure"):
        links.time_concurrently(actions, 0.01, 1)
    with pytest.raises(StateError, match="cannot start a thread to measure"):
        measure_link(home, buffer_bytes=MIB, seconds=0.01)
    assert threading.active_count() == before
    home.close()


@pytest.mark.parametrize("max_threads", [0, 1])
def test_populate_makes_pages_without_threads(max_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_RUN_BYTES", MIB)
    region = memory.Region(memory.map_anonymous(4 * MIB), 4 * MIB)
    limit_threads(monkeypatch, max_threads)
    memory.populate(region.address, 4 * MIB)
    resident = np.zeros(4 * MIB // PAGE_BYTES, np.uint8)
    assert memory._libc.mincore(ctypes.c_void_p(region.address), ctypes.c_size_t(4 * MIB), resident.ctypes.data) == 0
    assert resident.all()


def test_memory_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # every copy takes one second
    assert measure_memory_bandwidth(buffer_bytes=MIB) == 2 * MIB


@pytest.fixture
def measured_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buffer sizes of the link measurements, in order."""
    sizes: list[int] = []

    def measure(home: HomeStore, *, buffer_bytes: int, driver: None) -> LinkReport:
        sizes.append(buffer_bytes)
        return make_report(name=home.name, capacity=home.capacity, latency_s=float(len(sizes)))

    monkeypatch.setattr(links, "measure_link", measure)
    return sizes


def test_link_is_measured_once(tmp_path: Path, measured_buffers: list[int]) -> None:
    first = load_or_measure_link(DiskHome(tmp_path), Cache(tmp_path / "cache"))
    (tmp_path / "below").mkdir()
    second = load_or_measure_link(DiskHome(tmp_path / "below", limit=GIB), Cache(tmp_path / "cache"))
    assert measured_buffers == [64 * MIB]
    assert second.capacity is not None
    assert second.capacity <= GIB  # the limit of the second home
    assert second.home == LinkReport(**{**fields_of(first), "capacity": second.capacity}).home
    load_or_measure_link(HostHome(GIB), Cache(tmp_path / "cache"))
    load_or_measure_link(DiskHome(tmp_path), Cache(tmp_path / "cache"), buffer_bytes=3 * MIB)
    assert measured_buffers == [64 * MIB, 64 * MIB, 2 * MIB]
    load_or_measure_link(DiskHome(tmp_path), None)
    assert len(measured_buffers) == 4


def fields_of(link: LinkReport) -> dict[str, object]:
    return {name: getattr(link, name) for name in LinkReport.__dataclass_fields__}


def test_old_and_damaged_links_are_measured_again(
    tmp_path: Path, measured_buffers: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, home = Cache(tmp_path), HostHome(GIB)
    load_or_measure_link(home, cache)
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: now + links._FRESH_SECONDS + 60)
        assert load_or_measure_link(home, cache).latency_s == 2
    # A measurement from the future is not fresh, either.
    assert load_or_measure_link(home, cache).latency_s == 3
    assert load_or_measure_link(home, cache).latency_s == 3
    shelf = cache.shelf("links", links.machine_facts())
    ((key, value),) = shelf.read().items()
    for wrong in ({"alone": 3}, {"latency_s": -1.0}, {"compute_both_s": None}):
        shelf.write({key: {**value, **wrong}})
        with caplog.at_level(logging.WARNING, "outofcore.profiling"):
            load_or_measure_link(home, cache)
    assert len(measured_buffers) == 6
    assert caplog.text.count("measuring the link again") == 3


def test_link_measured_on_a_busy_machine_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, home = Cache(tmp_path), HostHome(GIB)
    busy = [True, True, False]
    monkeypatch.setattr(links, "measure_link", lambda *_, **__: make_report(busy=int(busy.pop(0))))
    assert [load_or_measure_link(home, cache).home.busy for _ in range(5)] == [1, 2, 0, 0, 0]


def test_slow_ops_and_disk_traffic_mark_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "was_busy", lambda _: True)
    assert measure_link(HostHome(GIB), buffer_bytes=MIB).busy == 1
    monkeypatch.setattr(links, "was_busy", lambda _: False)
    assert measure_link(HostHome(GIB), buffer_bytes=MIB).busy == 0
    counters = iter([DiskCounters(0, 0), DiskCounters(MIB, GIB)])
    monkeypatch.setattr(links, "read_disk", lambda _: next(counters))
    assert measure_link(DiskHome(tmp_path), buffer_bytes=MIB).busy == 1


@pytest.mark.usefixtures("measured_buffers")
def test_link_costs_measured_in_steps_are_cached(tmp_path: Path) -> None:
    cache, home = Cache(tmp_path), HostHome(GIB)
    before = load_or_measure_link(home, cache).home
    after = replace(
        before,
        bytes_per_s_out=before.bytes_per_s_out / 2,
        bytes_per_s_in=before.bytes_per_s_in * 3,
        compute_slowdown=0.4,
    )
    update_cached_link(home, cache, before, after)
    cached = load_or_measure_link(home, cache).home
    assert cached.compute_slowdown == pytest.approx(0.4)
    assert cached.bytes_per_s_out == pytest.approx(after.bytes_per_s_out)
    assert cached.bytes_per_s_in == pytest.approx(after.bytes_per_s_in)
    assert (cached.contention, cached.latency_s) == (pytest.approx(before.contention), before.latency_s)


@pytest.mark.parametrize("busy", [range(3, 6), range(6), range(2, 9), range(12, 18)])
def test_temporary_load_is_not_attributed_to_copies(busy: range) -> None:
    """Ops take twice as long in successive measurements, as when another process runs for a second."""
    numbers = count(-7)  # after the warm-up and the latency

    def times(actions: Sequence[links._TimedAction], seconds: float, min_copies: int) -> list[list[float]]:
        load = 2.0 if next(numbers) in busy else 1.0
        slowdown = 1.0 + 0.05 * (len(actions) - 1)
        return [[load * slowdown] if action is bench.work else [0.5] for action in actions]

    bench = links._LinkBench(times, *(links._TimedAction(lambda: None) for _ in range(5)))
    home = SimpleNamespace(name="disk", capacity=None)
    measured = links._measure(home, 64 * MIB, 0.1, bench)  # type: ignore[arg-type]
    assert measured.compute_slowdown == pytest.approx(0.05)
    assert measured.home.contention == 0.0
