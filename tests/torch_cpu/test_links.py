"""Measuring a link: the numbers describe the home that was given, and its slots survive."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outofcore.costs import Home
from outofcore.errors import SpillError, TransferError
from outofcore.execution.homes import DiskHome, HomeStore, HostHome
from outofcore.profiling.links import LinkReport, measure_link, measure_memory_bandwidth
from outofcore.units import MIB


class Clock(threading.local):
    """A clock of each thread's own: what one does takes the other no time, as on a link with two lanes."""

    now = 0.0


class Paced(HostHome):
    """A home whose copies take a known time on a made-up clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(64 * MIB)
        self._clock = clock

    def write(self, offset: int, source: memoryview) -> None:
        super().write(offset, source)
        self._clock.now += 0.005 + len(source) / (200 * MIB)

    def read(self, offset: int, target: memoryview) -> None:
        super().read(offset, target)
        self._clock.now += 0.005 + len(target) / (100 * MIB)


def test_a_known_link_is_measured_right(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    report = measure_link(Paced(clock), buffer_bytes=4 * MIB, seconds=0.3)
    home = report.home
    assert home.name == "host"
    assert home.latency_s == pytest.approx(0.005, rel=0.02)  # a page takes a little longer than nothing
    assert home.bytes_per_s_out == pytest.approx(200 * MIB, rel=0.01)
    assert home.bytes_per_s_in == pytest.approx(100 * MIB, rel=0.01)
    assert report.both_bytes_per_s_out == pytest.approx(home.bytes_per_s_out)
    assert report.both_bytes_per_s_in == pytest.approx(home.bytes_per_s_in)


def test_sharing_is_the_throughput_of_both_over_that_of_one() -> None:
    assert LinkReport(Home("disk", None, 100.0, 300.0), 100.0, 300.0).sharing == 2
    assert LinkReport(Home("disk", None, 100.0, 300.0), 50.0, 150.0).sharing == 1


@pytest.mark.parametrize("make", [DiskHome, lambda _: HostHome(64 * MIB)])
def test_what_the_home_holds_survives(make: Callable[[Path], HomeStore], tmp_path: Path) -> None:
    home = make(tmp_path)
    face = home.face(home.reserve(MIB), MIB)
    face.fill_(7)
    report = measure_link(home, buffer_bytes=2 * MIB, seconds=0.02)
    assert bool((face == 7).all())
    assert home.bytes == 5 * MIB
    assert report.home.bytes is not None
    assert report.home.bytes > 0
    assert min(report.home.bytes_per_s_in, report.home.bytes_per_s_out, report.home.latency_s) > 0
    home.close()


def test_failures_come_through_from_either_thread() -> None:
    with pytest.raises(SpillError):
        measure_link(HostHome(MIB), buffer_bytes=MIB)

    class Broken(HostHome):
        def read(self, offset: int, target: memoryview) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise TransferError("the disk is gone")
            super().read(offset, target)

    with pytest.raises(TransferError, match="gone"):
        measure_link(Broken(64 * MIB), buffer_bytes=MIB, seconds=0.01)


def test_memory_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # every copy takes one second
    assert measure_memory_bandwidth(buffer_bytes=MIB) == 2 * MIB
