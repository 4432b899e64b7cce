"""Detect whether other processes used the cores, or a disk, during a measurement.

Linux counts how long threads wait for a core (``/proc/self/task/*/schedstat``). If a container hides this, CPU time is
compared with elapsed time. For a disk, the bytes of all processes are compared with those of this process. Contention
for caches, memory bandwidth and clock rate, and by other virtual machines, is not detected.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Self

NOTE = "measured while the machine was busy: times may be too long; run it again on a quiet machine"

_PROC = Path("/proc")
# Threads that waited for cores for more than this share of the time were delayed by other processes.
_DELAYED_SHARE = 0.05
# Without scheduler statistics: the calling thread was delayed if it did not run for more than this share.
_NOT_RUNNING_SHARE = 0.25
# Shorter delays come from waking threads or from the operating system.
_MIN_DELAY_SECONDS = 1e-3
# Other processes compute if they use more than this share of a core, for longer than the tick resolution.
_OTHERS_CORES, _TICKS_SECONDS = 0.25, 0.02
# A repetition was delayed if its thread did not run for this share of it, and for longer than the clock resolution.
_REPETITION_DELAYED_SHARE, _CLOCKS_SECONDS = 0.05, 20e-6
# Others use a disk if they move more than this share of this process's bytes, and more than file system metadata.
_OTHERS_SHARE, _OTHERS_BYTES = 0.2, 8 << 20
_SECTOR_BYTES = 512
# Busy measurements are repeated by later processes this many times, then once a day.
_RETRIES, _RETRY_SECONDS = 3, 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Clock and scheduler counters, in seconds."""

    seconds: float = 0.0  # elapsed
    cpu_seconds: float = 0.0  # of the calling thread
    delayed_seconds: float | None = 0.0  # of threads that waited for a core; None if the system does not report it
    others_seconds: float | None = None  # CPU time of other processes; None if unavailable or not requested

    def __add__(self, other: Counters) -> Counters:
        return self._combine(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._combine(other, -1)

    def _combine(self, other: Counters, sign: int) -> Counters:
        """Add other counters, or subtract them if ``sign`` is -1."""

        def combine(first: float | None, second: float | None) -> float | None:
            return None if first is None or second is None else first + sign * second

        return Counters(
            self.seconds + sign * other.seconds,
            self.cpu_seconds + sign * other.cpu_seconds,
            combine(self.delayed_seconds, other.delayed_seconds),
            combine(self.others_seconds, other.others_seconds),
        )


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Bytes read from and written to a disk by this process and by all processes."""

    own_bytes: int
    all_bytes: int


def was_busy(counted: Counters, *, computes: bool = True) -> bool:
    """Return whether other processes delayed the measured work; set ``computes`` to False if the work may sleep."""
    others_seconds = counted.others_seconds
    if others_seconds is not None and others_seconds <= max(_OTHERS_CORES * counted.seconds, _TICKS_SECONDS):
        return False  # threads waited for other threads of this process
    if counted.delayed_seconds is not None:
        return counted.delayed_seconds > max(_DELAYED_SHARE * counted.seconds, _MIN_DELAY_SECONDS)
    not_running = counted.seconds - counted.cpu_seconds
    return computes and not_running > max(_NOT_RUNNING_SHARE * counted.seconds, _MIN_DELAY_SECONDS)


def was_disk_busy(before: DiskCounters | None, after: DiskCounters | None) -> bool:
    """Return whether other processes used a disk much between two readings; False if one is missing."""
    if before is None or after is None:
        return False
    own_bytes = after.own_bytes - before.own_bytes
    other_bytes = after.all_bytes - before.all_bytes - own_bytes
    return other_bytes > max(_OTHERS_SHARE * own_bytes, _OTHERS_BYTES)


def is_due(busy: int, age: float) -> bool:
    """Return whether to repeat a measurement, ``age`` seconds old, after ``busy`` attempts on a busy machine.

    >>> is_due(0, 1e9), is_due(1, 0.0), is_due(3, 60.0), is_due(4, 60.0), is_due(4, 90_000.0)
    (False, True, True, False, True)
    """
    return busy > 0 and (busy <= _RETRIES or not 0 <= age < _RETRY_SECONDS)


def typical_seconds(runs: Sequence[tuple[float, float]]) -> float:
    """Return the median time of undelayed runs, given as (elapsed, CPU) seconds, or else the minimum."""
    quiet = [wall for wall, cpu in runs if wall - cpu <= max(_REPETITION_DELAYED_SHARE * wall, _CLOCKS_SECONDS)]
    return statistics.median(quiet) if quiet else min(wall for wall, _ in runs)


def read_counters(proc: Path = _PROC) -> Counters:
    """Read the clocks, and the seconds for which threads of this process have waited for a core."""
    try:
        tasks = [*(proc / "self" / "task").iterdir()]
    except OSError:
        tasks = []
    return Counters(perf_counter(), thread_time(), _delayed_seconds(tasks))


def read_loop_counters(proc: Path = _PROC) -> Counters:
    """Read clock and scheduler counters of this thread, and the CPU time of other processes."""
    try:
        user, nice, system, *_ = map(int, (proc / "stat").read_text().splitlines()[0].split()[1:])
        others_seconds = (user + nice + system) / os.sysconf("SC_CLK_TCK") - process_time()
    except (OSError, ValueError, IndexError):
        others_seconds = None
    return Counters(perf_counter(), thread_time(), _delayed_seconds([proc / "thread-self"]), others_seconds)


def _delayed_seconds(thread_folders: Sequence[Path]) -> float | None:
    """Return the seconds that threads, given by their folders in /proc, waited for a core; None if unknown."""
    nanos = slices = 0
    for thread_folder in thread_folders:
        # The thread may have ended, or a container may hide the file.
        with contextlib.suppress(OSError, ValueError):
            _, delayed, count = map(int, (thread_folder / "schedstat").read_bytes().split())
            nanos, slices = nanos + delayed, slices + count
    return nanos / 1e9 if slices else None  # 0 from a kernel that does not count


def read_disk(folder: Path, proc: Path = _PROC) -> DiskCounters | None:
    """Read the counters of the disk that holds a folder; None if the system does not report them."""
    try:
        device = folder.stat().st_dev
        numbers = [str(os.major(device)), str(os.minor(device))]
        lines = (line.split() for line in (proc / "diskstats").read_text().splitlines())
        read, written = next((int(line[5]), int(line[9])) for line in lines if line[:2] == numbers)
        io_counts = dict(line.split(": ") for line in (proc / "self" / "io").read_text().splitlines())
        return DiskCounters(
            int(io_counts["read_bytes"]) + int(io_counts["write_bytes"]), _SECTOR_BYTES * (read + written)
        )
    except (OSError, ValueError, LookupError, StopIteration):
        return None


class BusyWatch:
    """A context manager that adds up the counters of the code that runs in it."""

    def __init__(self) -> None:
        self.counted = self._begin = Counters()

    def __enter__(self) -> Self:
        self._begin = read_counters()
        return self

    def __exit__(self, *_: object) -> None:
        self.counted += read_counters() - self._begin
