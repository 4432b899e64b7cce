"""Tell whether other processes wanted the cores, or a disk, while something was measured.

Linux counts for each thread how long it was ready to run and waited for a core (``/proc/self/task/*/schedstat``). Where
no other process computes, that is next to nothing, whatever is measured. A container may hide it. Then the CPU time of
the calling thread is compared with the time that passed: what computes all the time loses it to others alone. Of a disk
the bytes of all processes (``/proc/diskstats``) are compared with the own ones (``/proc/self/io``).

A measurement taken while the machine was busy is used, with a mark: how many times in a row it was. It is measured
again by later processes, up to ``_RETRIES`` times, and after that once a day, so that a machine that is always busy
does not measure at each start.

Limits: what others take while there are cores to spare (caches, memory bandwidth, clock rate), and what other virtual
machines take, is not seen.
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
# Threads that waited for cores for more of the time than this share were held up by others.
_DELAYED = 0.05
# The calling thread was, if it did not run for more than this share, where nothing better is known.
_AWAY = 0.25
# Less than this is what waking a few threads takes, or a moment's work of the system.
_LEAST_SECONDS = 1e-3
# Others compute if they do on more than this part of a core, and for longer than the system's ticks may be off.
_OTHERS_CORES, _TICKS_SECONDS = 0.25, 0.02
# A repetition was held up if the thread did not run for this share of it, and for longer than clocks are off.
_HELD_UP, _CLOCKS_SECONDS = 0.05, 20e-6
# Others use a disk if they move more than this share of the own bytes, and more than what a file system writes beside.
_OTHERS_SHARE, _OTHERS_BYTES = 0.2, 8 << 20
_SECTOR_BYTES = 512
_RETRIES, _RETRY_SECONDS = 3, 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Counters:
    """What a clock and the system have counted.

    Attributes:
        seconds: that have passed.
        cpu_seconds: for which the calling thread ran.
        delayed_seconds: that threads were ready and waited for a core; None where the system does not say.
        others_seconds: of all cores, for which other processes ran; None: not known, or not asked for.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    delayed_seconds: float | None = 0.0
    others_seconds: float | None = None

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._with(other, -1)

    def _with(self, other: Counters, sign: int) -> Counters:
        def known(one: float | None, another: float | None) -> float | None:
            return None if one is None or another is None else one + sign * another

        return Counters(
            self.seconds + sign * other.seconds,
            self.cpu_seconds + sign * other.cpu_seconds,
            known(self.delayed_seconds, other.delayed_seconds),
            known(self.others_seconds, other.others_seconds),
        )


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Bytes that have been read from and written to a disk: by this process, and by all."""

    own_bytes: int
    all_bytes: int


def was_busy(counted: Counters, *, computes: bool = True) -> bool:
    """Return whether other processes held up what was measured.

    Args:
        counted: meanwhile.
        computes: whether the calling thread had no reason to wait, so that its CPU time says something.
    """
    others = counted.others_seconds
    if others is not None and others <= max(_OTHERS_CORES * counted.seconds, _TICKS_SECONDS):
        return False  # what waited did so for threads of this process
    if counted.delayed_seconds is not None:
        return counted.delayed_seconds > max(_DELAYED * counted.seconds, _LEAST_SECONDS)
    away = counted.seconds - counted.cpu_seconds
    return computes and away > max(_AWAY * counted.seconds, _LEAST_SECONDS)


def was_disk_busy(before: DiskCounters | None, after: DiskCounters | None) -> bool:
    """Return whether other processes used a disk; False where the system does not say."""
    if before is None or after is None:
        return False
    own = after.own_bytes - before.own_bytes
    others = after.all_bytes - before.all_bytes - own
    return others > max(_OTHERS_SHARE * own, _OTHERS_BYTES)


def is_due(busy: int, age: float) -> bool:
    """Return whether to measure again what was ``busy`` times in a row measured on a busy machine, ``age`` seconds ago.

    >>> is_due(0, 1e9), is_due(1, 0.0), is_due(3, 60.0), is_due(4, 60.0), is_due(4, 90_000.0)
    (False, True, True, False, True)
    """
    return busy > 0 and (busy <= _RETRIES or not 0 <= age < _RETRY_SECONDS)


def typical_seconds(runs: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a repeated computation, given those of each repetition and the CPU time of its thread.

    It is the median of the repetitions that were not held up, or the shortest if all were.
    """
    calm = [wall for wall, cpu in runs if wall - cpu <= max(_HELD_UP * wall, _CLOCKS_SECONDS)]
    return statistics.median(calm) if calm else min(wall for wall, _ in runs)


def read_counters(proc: Path = _PROC) -> Counters:
    """Read the clocks, and the waits of all threads of this process."""
    try:
        tasks = [*(proc / "self" / "task").iterdir()]
    except OSError:
        tasks = []
    return Counters(perf_counter(), thread_time(), _delayed_seconds(tasks))


def read_loop_counters(proc: Path = _PROC) -> Counters:
    """Read the clocks, the waits of the calling thread alone, and for how long other processes ran.

    This is for threads that compute while other threads of their process do, too.
    """
    try:
        user, nice, system, *_ = map(int, (proc / "stat").read_text().splitlines()[0].split()[1:])
        others = (user + nice + system) / os.sysconf("SC_CLK_TCK") - process_time()
    except (OSError, ValueError, IndexError):
        others = None
    return Counters(perf_counter(), thread_time(), _delayed_seconds([proc / "thread-self"]), others)


def _delayed_seconds(tasks: Sequence[Path]) -> float | None:
    nanos = slices = 0
    for task in tasks:
        # A thread may have ended, or the file be hidden.
        with contextlib.suppress(OSError, ValueError):
            _, delayed, count = map(int, (task / "schedstat").read_bytes().split())
            nanos, slices = nanos + delayed, slices + count
    return nanos / 1e9 if slices else None  # a kernel that does not count says 0


def read_disk(folder: Path, proc: Path = _PROC) -> DiskCounters | None:
    """Read the counters of the disk that has a folder; None where the system does not say."""
    try:
        device = folder.stat().st_dev
        wanted = [str(os.major(device)), str(os.minor(device))]
        lines = (line.split() for line in (proc / "diskstats").read_text().splitlines())
        read, written = next((int(line[5]), int(line[9])) for line in lines if line[:2] == wanted)
        own = dict(line.split(": ") for line in (proc / "self" / "io").read_text().splitlines())
        return DiskCounters(int(own["read_bytes"]) + int(own["write_bytes"]), _SECTOR_BYTES * (read + written))
    except (OSError, ValueError, LookupError, StopIteration):
        return None


class Watch:
    """Counts while it is entered; what it counts adds up."""

    def __init__(self) -> None:
        self.counted = self._begin = Counters()

    def __enter__(self) -> Self:
        self._begin = read_counters()
        return self

    def __exit__(self, *_: object) -> None:
        self.counted += read_counters() - self._begin
