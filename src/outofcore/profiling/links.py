"""What the link to a home gives: bytes per second each way, alone and both at once, and latency."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outofcore.costs import Home
from outofcore.execution.homes import HomeStore
from outofcore.execution.memory import Region, map_anonymous
from outofcore.units import MIB, PAGE_BYTES, round_up

_LATENCY_COPIES = 9


@dataclass(frozen=True, slots=True)
class LinkReport:
    """A measured link.

    Attributes:
        home: the costs of the home, from copies that ran alone.
        both_bytes_per_s_out, both_bytes_per_s_in: each direction while the other runs as well.
    """

    home: Home
    both_bytes_per_s_out: float
    both_bytes_per_s_in: float

    @property
    def sharing(self) -> float:
        """Throughput of both directions together over that of one alone, from about 1 (shared) to 2 (independent)."""
        one = (self.home.bytes_per_s_out + self.home.bytes_per_s_in) / 2
        return (self.both_bytes_per_s_out + self.both_bytes_per_s_in) / one


def measure_link(home: HomeStore, *, buffer_bytes: int = 64 * MIB, seconds: float = 0.5) -> LinkReport:
    """Measure the link between memory and a home.

    Copies go between fresh page-aligned memory and room past the end of what the home holds, which is
    left as it is; the home is larger afterwards by twice the buffer. Bandwidth is the median of several copies,
    latency that of copies of one page.

    Args:
        home: an open or unopened home.
        buffer_bytes: size of a copy, rounded up to whole pages.
        seconds: about how long to measure: a third each for out, in and both at once. At least two copies are timed.

    Limits: a drive that slows down after its write cache has filled, and one that others use at the same time,
    are seen only as they are in that half second.

    Raises:
        SpillError: the home has no room for the measurement.
        TransferError: a copy failed.
    """
    size = round_up(buffer_bytes, PAGE_BYTES)
    slot_out, slot_in = home.reserve(size), home.reserve(size)
    region = Region(map_anonymous(2 * size), 2 * size)
    outgoing, incoming = region.memory(0, size), region.memory(size, size)
    random = torch.Generator().manual_seed(0)  # of its own: the user's draws are not to be shifted
    torch.frombuffer(outgoing, dtype=torch.int64).random_(generator=random)  # compressible bytes would flatter
    # The first writes to fresh pages of memory and of a file cost more than all later ones.
    home.write(slot_in, outgoing)
    home.write(slot_out, outgoing)
    home.read(slot_in, incoming)

    def put() -> None:
        home.write(slot_out, outgoing)

    def get() -> None:
        home.read(slot_in, incoming)

    latency = statistics.median(
        [_timed(lambda: home.write(slot_out, outgoing[:PAGE_BYTES])) for _ in range(_LATENCY_COPIES)]
        + [_timed(lambda: home.read(slot_in, incoming[:PAGE_BYTES])) for _ in range(_LATENCY_COPIES)]
    )
    out_s, in_s = (statistics.median(_repeated(copy, seconds / 3)) for copy in (put, get))
    both_out_s, both_in_s = _together(put, get, seconds / 3)
    costs = Home(
        name=home.name,
        bytes=home.capacity,
        bytes_per_s_out=_rate(size, out_s, latency),
        bytes_per_s_in=_rate(size, in_s, latency),
        latency_s=latency,
    )
    return LinkReport(costs, _rate(size, both_out_s, latency), _rate(size, both_in_s, latency))


def measure_memory_bandwidth(*, buffer_bytes: int = 64 * MIB, seconds: float = 0.2) -> float:
    """Bytes per second that PyTorch's threads read plus write when they copy one large tensor to another."""
    source = torch.ones(buffer_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * buffer_bytes / statistics.median(_repeated(lambda: target.copy_(source), seconds))


def _timed(copy: Callable[[], object]) -> float:
    start = time.perf_counter()
    copy()
    return time.perf_counter() - start


def _repeated(copy: Callable[[], object], seconds: float) -> list[float]:
    """Durations of copies one after the other for about so long, two at the least."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        times.append(_timed(copy))
    return times


def _together(put: Callable[[], object], get: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median durations of two kinds of copies, each running for as long as the other does.

    Raises: what a copy raises.
    """
    failures: list[Exception] = []
    times: tuple[list[float], list[float]] = ([], [])
    enough = (threading.Event(), threading.Event())
    start = threading.Barrier(2)

    def run(which: int, copy: Callable[[], object]) -> None:
        try:
            start.wait()
            # Go on until the other has enough too: a copy that runs alone would not count.
            while not (enough[0].is_set() and enough[1].is_set()):
                times[which].append(_timed(copy))
                if len(times[which]) >= 2 and sum(times[which]) >= seconds:
                    enough[which].set()
        except Exception as error:
            failures.append(error)
            for event in enough:
                event.set()

    other = threading.Thread(target=run, args=(1, get), name="outofcore-measure")
    other.start()
    run(0, put)
    other.join()
    if failures:
        raise failures[0]
    return statistics.median(times[0]), statistics.median(times[1])


def _rate(count: int, seconds: float, latency: float) -> float:
    """Bytes per second once the latency is taken off, as ``costs.Home`` counts it."""
    return count / max(seconds - latency, seconds / 2)
