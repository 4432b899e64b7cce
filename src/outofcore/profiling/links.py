"""What the link to a home gives: alone, beside ops, and both ways at once; and what copies take from ops.

A step copies while it computes, and both share cores and memory. So the rates to plan with are those measured beside
ops; how much copies both ways take from each other, and all of them from ops, is measured as well (``Home``).
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from outofcore.costs import Home
from outofcore.errors import GraphError
from outofcore.execution.homes import HomeStore
from outofcore.execution.memory import Region, map_anonymous
from outofcore.jsonfile import Node
from outofcore.profiling.cache import Cache, Shelf
from outofcore.profiling.kept import machine_facts
from outofcore.units import MIB, PAGE_BYTES, round_up

_log = logging.getLogger("outofcore.profiling")

_LATENCY_COPIES = 9
# The ops that copies are measured beside: a product of matrices, and a pass over memory that no cache holds.
_MATRIX, _PASS_BYTES = 512, 32 * MIB
# Disks fill up and grow old: what was measured longer ago is measured again.
_FRESH_SECONDS = 7 * 24 * 3600.0

_Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second each way."""

    out: float
    into: float


@dataclass(frozen=True, slots=True)
class LinkReport:
    """A measured link.

    Attributes:
        name: of the home.
        capacity: of the home, in bytes.
        latency_s: of a copy of one page, alone.
        alone: one way at a time, with nothing else to do.
        computing: one way at a time, beside ops.
        together: both ways at once, beside ops.
        compute_alone_s: seconds of the ops, alone.
        compute_single_s: likewise beside copies one way, the median of both ways.
        compute_both_s: likewise beside copies both ways.
    """

    name: str
    capacity: int | None
    latency_s: float
    alone: Rates
    computing: Rates
    together: Rates
    compute_alone_s: float
    compute_single_s: float
    compute_both_s: float

    @property
    def contention(self) -> float:
        """As in ``Home``: 0 for two links, 1 for one that both ways share."""
        lost = [
            1 - both / one
            for both, one in (
                (self.together.out, self.computing.out),
                (self.together.into, self.computing.into),
            )
        ]
        return min(max(sum(lost), 0.0), 1.0)

    @property
    def compute_slowdown(self) -> float:
        """As in ``Home``: the share by which ops take longer for each copy that runs beside them."""
        single = self.compute_single_s / self.compute_alone_s - 1
        both = (self.compute_both_s / self.compute_alone_s - 1) / 2
        return max((single + both) / 2, 0.0)

    @property
    def home(self) -> Home:
        """The costs of the home as they hold during a step."""
        return Home(
            self.name,
            self.capacity,
            self.computing.out,
            self.computing.into,
            self.latency_s,
            self.contention,
            self.compute_slowdown,
        )


def known_link(
    home: HomeStore,
    cache: Cache | None,
    *,
    buffer_bytes: int = 64 * MIB,
    measure: Callable[..., LinkReport] | None = None,
    device: Mapping[str, object] | None = None,
) -> LinkReport:
    """The link to a home as the cache has it, else measured now and kept.

    Args:
        home: an open or unopened home.
        cache: None measures whatever was measured before.
        buffer_bytes: rounded down to a power of two; what was measured with other buffers is another link.
        measure: measures it, as ``measure_link`` does, which is the default.
        device: facts about the device at the other end, if that is not the CPU.

    Raises: as ``measure_link``.
    """
    size = 1 << max(buffer_bytes, PAGE_BYTES).bit_length() - 1
    measure = measure or measure_link
    if cache is None:
        return measure(home, buffer_bytes=size)
    shelf, key = _shelf(cache, device), f"{home.identity}/{size}"
    node = shelf.read().get(key)
    if node is not None:
        try:
            measured = node.at("measured_at").number()
            if 0 <= time.time() - measured < _FRESH_SECONDS:
                return _read(node, home)
        except GraphError as error:
            _log.warning("the link is measured anew: %s", error)
    report = measure(home, buffer_bytes=size)
    shelf.write({key: {"measured_at": time.time(), **asdict(report)}})
    return report


def link_to(
    home: HomeStore,
    cache: Cache | None,
    *,
    buffer_bytes: int = 64 * MIB,
    measure: Callable[..., LinkReport] | None = None,
    device: Mapping[str, object] | None = None,
) -> Home:
    """The costs of a home that is in use, or soon will be: measured on one like it, so that it loses no room.

    Args: as for ``known_link``.

    Raises: as ``measure_link``.
    """
    other = home.sibling(2 * max(buffer_bytes, PAGE_BYTES))
    try:
        link = known_link(other, cache, buffer_bytes=buffer_bytes, measure=measure, device=device)
        return replace(link.home, bytes=home.capacity)
    finally:
        other.close()


def _shelf(cache: Cache, device: Mapping[str, object] | None) -> Shelf:
    return cache.shelf("links", {**machine_facts(), **(device or {})})


def forget_link(home: HomeStore, cache: Cache, device: Mapping[str, object] | None = None) -> None:
    """Let the link to a home be measured again when it is next asked for."""
    shelf = _shelf(cache, device)
    stale = [key for key in shelf.read() if key.startswith(f"{home.identity}/")]
    shelf.write({key: {"measured_at": 0.0} for key in stale})


def _read(node: Node, home: HomeStore) -> LinkReport:
    def positive(field: str, of: Node = node) -> float:
        found = of.at(field)
        if found.number() <= 0:
            found.refuse("must be above zero")
        return found.number()

    alone, computing, together = (
        Rates(positive("out", node.at(field)), positive("into", node.at(field)))
        for field in ("alone", "computing", "together")
    )
    times = [positive(f"compute_{which}_s") for which in ("alone", "single", "both")]
    # How much room there is may have changed.
    return LinkReport(home.name, home.capacity, positive("latency_s"), alone, computing, together, *times)


def measure_link(
    home: HomeStore, *, buffer_bytes: int = 64 * MIB, seconds: float = 1.2, compute: _Action | None = None
) -> LinkReport:
    """Measure the link between memory and a home.

    Copies go between fresh page-aligned memory and room past the end of what the home holds, which is
    left as it is; the home is larger afterwards by twice the buffer. Bandwidth is the median of several copies,
    latency that of copies of one page.

    Args:
        home: an open or unopened home.
        buffer_bytes: size of a copy, rounded up to whole pages.
        seconds: about how long to measure: a sixth each for ops alone, for copies out and in alone, out and in
            beside ops, and both at once beside ops. At least two copies are timed.
        compute: what copies are measured beside; by default ops bound by arithmetic and by memory in turn, on as
            many threads as PyTorch uses.

    Limits: a drive that slows down after its write cache has filled, and one that others use at the same time,
    are seen only as they are in that second; ops other than those measured may suffer more or less from copies.

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
    work = compute or _ops()
    # The first writes to fresh pages of memory and of a file cost more than all later ones; so does an op's first run.
    home.write(slot_in, outgoing)
    home.write(slot_out, outgoing)
    home.read(slot_in, incoming)
    work()

    def put() -> None:
        home.write(slot_out, outgoing)

    def get() -> None:
        home.read(slot_in, incoming)

    latency = statistics.median(
        [_timed(lambda: home.write(slot_out, outgoing[:PAGE_BYTES])) for _ in range(_LATENCY_COPIES)]
        + [_timed(lambda: home.read(slot_in, incoming[:PAGE_BYTES])) for _ in range(_LATENCY_COPIES)]
    )
    part = seconds / 6

    def rates(out_s: float, in_s: float) -> Rates:
        return Rates(_rate(size, out_s, latency), _rate(size, in_s, latency))

    (compute_s,), (out_s,), (in_s,) = (_together(part, action) for action in (work, put, get))
    beside_out, beside_in = _together(part, work, put), _together(part, work, get)
    both = _together(part, work, put, get)
    return LinkReport(
        name=home.name,
        capacity=home.capacity,
        latency_s=latency,
        alone=rates(out_s, in_s),
        computing=rates(beside_out[1], beside_in[1]),
        together=rates(both[1], both[2]),
        compute_alone_s=compute_s,
        compute_single_s=(beside_out[0] + beside_in[0]) / 2,
        compute_both_s=both[0],
    )


def measure_memory_bandwidth(*, buffer_bytes: int = 64 * MIB, seconds: float = 0.2) -> float:
    """Bytes per second that PyTorch's threads read plus write when they copy one large tensor to another."""
    source = torch.ones(buffer_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * buffer_bytes / _together(seconds, lambda: target.copy_(source))[0]


def _ops() -> _Action:
    """Ops whose results take no new memory, so that no page fault disturbs them."""
    left = torch.full((_MATRIX, _MATRIX), 0.5)
    product = torch.empty_like(left)
    source = torch.ones(_PASS_BYTES // 4)
    target = torch.empty_like(source)

    def run() -> None:
        with torch.no_grad():
            for _ in range(4):
                torch.mm(left, left, out=product)
            torch.add(source, 1.0, out=target)

    return run


def _timed(copy: _Action) -> float:
    start = time.perf_counter()
    copy()
    return time.perf_counter() - start


def _together(seconds: float, *actions: _Action) -> list[float]:
    """Median durations of actions that run beside each other, each for as long as any of the others does.

    The first runs in this thread, the others in threads of their own. Each runs for about so long, and twice at least.

    Raises: what an action raises.
    """
    failures: list[Exception] = []
    times: list[list[float]] = [[] for _ in actions]
    enough = [threading.Event() for _ in actions]
    start = threading.Barrier(len(actions))

    def run(which: int) -> None:
        try:
            start.wait()
            # Go on until the others have enough too: what runs alone would not count.
            while not all(event.is_set() for event in enough):
                times[which].append(_timed(actions[which]))
                if len(times[which]) >= 2 and sum(times[which]) >= seconds:
                    enough[which].set()
        except Exception as error:
            failures.append(error)
            for event in enough:
                event.set()

    others = [threading.Thread(target=run, args=(which,), name="outofcore-measure") for which in range(1, len(actions))]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()
    if failures:
        raise failures[0]
    return [statistics.median(taken) for taken in times]


def _rate(count: int, seconds: float, latency: float) -> float:
    """Bytes per second once the latency is taken off, as ``costs.Home`` counts it."""
    return count / max(seconds - latency, seconds / 2)
