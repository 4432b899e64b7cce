"""What the link between a device and a home gives, by the device's clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from math import ceil

import torch

from outofcore.costs import Home
from outofcore.execution.arenas import Memory
from outofcore.execution.backend import Backend
from outofcore.execution.cuda.interface import Driver, Mark, Stream
from outofcore.execution.cuda.staging import Part, Staging, first_stream, last_stream
from outofcore.execution.homes import DiskHome, HomeStore
from outofcore.profiling.cache import Cache
from outofcore.profiling.links import LinkReport, Rates, link_to
from outofcore.units import MIB, PAGE_BYTES, round_up

_LATENCY_COPIES = 9
_MATRIX, _PASS_BYTES = 2048, 64 * MIB

_Issue = Callable[[], None]


def measure_device_link(
    driver: Driver, home: HomeStore, *, buffer_bytes: int = 64 * MIB, seconds: float = 1.2
) -> LinkReport:
    """Measure the link between a device and a home: host memory, or a disk behind it.

    Copies go between fresh device memory and room past the end of what the home holds, which is left as
    it is; the home is larger afterwards by twice the buffer. What runs together is issued on streams side by side,
    and only what began while all of them were at work counts. To and from a disk they go as in a step, through buffers
    in host memory.

    Args:
        driver: the device.
        home: pinned at best, or a disk.
        buffer_bytes: size of a copy, rounded up to whole pages.
        seconds: about how long to measure, in all.

    Raises:
        ArenaError: the device has no room for four buffers and 192 MiB for ops beside them.
        SpillError: the home has no room for the measurement.
        TransferError: a transfer to or from a disk failed.
    """
    size = round_up(buffer_bytes, PAGE_BYTES)
    slots = home.reserve(size), home.reserve(size)
    arena = driver.open_arena(2 * size + 2 * _PASS_BYTES + 3 * _MATRIX * _MATRIX * 4, 1 << 62)
    try:
        return _measure(driver, home, arena, slots, size, seconds / 7)
    finally:
        driver.synchronize()
        arena.close()


def _measure(
    driver: Driver, home: HomeStore, arena: Memory, slots: tuple[int, int], size: int, part: float
) -> LinkReport:
    arena.view(0, size).fill_(1)
    work = _ops(arena, 2 * size)

    def compute() -> None:
        driver.launch(None, work)

    link = (
        _DiskCopies(driver, home, arena, slots, size)
        if isinstance(home, DiskHome)
        else _MemoryCopies(driver, home, arena, slots, size)
    )
    out, into = link.streams
    put, get = partial(link.put, size), partial(link.get, size)
    page_out, page_in = partial(link.put, PAGE_BYTES), partial(link.get, PAGE_BYTES)
    streams = (Stream.COMPUTE, out, into)
    actions: dict[Stream, _Issue] = dict(zip(streams, (compute, put, get), strict=True))
    with driver.step(None):
        for action in (*actions.values(), page_out, page_in):
            action()
        driver.synchronize()
        pages = {out: page_out, into: page_in}
        latency = statistics.median(
            found
            for stream, action in pages.items()
            for found in _times(driver, {stream: action}, _LATENCY_COPIES)[stream]
        )
        alone = {stream: _median(driver, {stream: action}, part) for stream, action in actions.items()}

        def beside(*which: Stream) -> dict[Stream, float]:
            chosen = {stream: actions[stream] for stream in which}
            return _medians(driver, chosen, part, alone)

        with_out, with_in = beside(Stream.COMPUTE, out), beside(Stream.COMPUTE, into)
        both = beside(*streams)

    def rate(taken: float) -> float:
        return size / max(taken - latency, taken / 2)

    return LinkReport(
        name=home.name,
        capacity=home.capacity,
        latency_s=latency,
        alone=Rates(rate(alone[out]), rate(alone[into])),
        computing=Rates(rate(with_out[out]), rate(with_in[into])),
        together=Rates(rate(both[out]), rate(both[into])),
        compute_alone_s=alone[Stream.COMPUTE],
        compute_single_s=(with_out[Stream.COMPUTE] + with_in[Stream.COMPUTE]) / 2,
        compute_both_s=both[Stream.COMPUTE],
    )


class _MemoryCopies:
    """Copies between the first bytes of an arena and host memory."""

    streams = (Stream.COPY_OUT, Stream.COPY_IN)

    def __init__(self, driver: Driver, home: HomeStore, arena: Memory, slots: tuple[int, int], size: int) -> None:
        self._driver = driver
        self._host = home.face(slots[0], size), home.face(slots[1], size)
        self._device = arena.view(0, size), arena.view(size, size)
        self._host[1].fill_(1)

    def put(self, count: int) -> None:
        self._driver.copy(Stream.COPY_OUT, -1, self._host[0][:count], self._device[0][:count])

    def get(self, count: int) -> None:
        self._driver.copy(Stream.COPY_IN, -1, self._device[1][:count], self._host[1][:count])


class _DiskCopies:
    """Copies between the first bytes of an arena and a disk."""

    streams = (Stream.DISK_OUT, Stream.DISK_IN)

    def __init__(self, driver: Driver, home: DiskHome, arena: Memory, slots: tuple[int, int], size: int) -> None:
        self._staging = Staging(driver, home)
        self._arena, self._slots, self._size = arena, slots, size
        self._parts: dict[tuple[int, int], list[Part]] = {}
        with driver.step(None):
            # What was never written is not read from the disk.
            for slot in slots:
                self._staging.out(-1, self._staging.parts(arena.view, 0, slot, size))
            driver.synchronize()

    def _part(self, way: int, count: int) -> list[Part]:
        if (way, count) not in self._parts:
            self._parts[way, count] = self._staging.parts(self._arena.view, way * self._size, self._slots[way], count)
        return self._parts[way, count]

    def put(self, count: int) -> None:
        self._staging.out(-1, self._part(0, count))

    def get(self, count: int) -> None:
        self._staging.into(-1, self._part(1, count), ())


def _ops(arena: Memory, offset: int) -> Callable[[], None]:
    """A product of matrices and a pass over memory, on memory of the arena from an offset on."""
    square = _MATRIX * _MATRIX * 4

    def floats(at: int, count: int) -> torch.Tensor:
        return arena.view(offset + at, count).view(torch.float32)

    left, right, product = (floats(k * square, square).view(_MATRIX, _MATRIX) for k in range(3))
    source, target = floats(3 * square, _PASS_BYTES), floats(3 * square + _PASS_BYTES, _PASS_BYTES)
    for tensor in (left, right, source):
        tensor.fill_(0.5)

    def run() -> None:
        with torch.no_grad():
            torch.mm(left, right, out=product)
            torch.add(source, 1.0, out=target)

    return run


def _median(driver: Driver, action: dict[Stream, _Issue], part: float) -> float:
    """Median seconds of an action alone."""
    (stream,) = action
    first = statistics.median(_times(driver, action, 2)[stream])
    return statistics.median(_times(driver, action, _repeats(part, first))[stream])


def _medians(
    driver: Driver, actions: dict[Stream, _Issue], part: float, alone: dict[Stream, float]
) -> dict[Stream, float]:
    """Median seconds of actions on streams side by side."""
    # Together they are slower, so that twice as many of the others may be needed while one is at work.
    counts = {stream: 2 * _repeats(part, alone[stream]) for stream in actions}
    return {stream: statistics.median(found) for stream, found in _times(driver, actions, counts).items()}


def _repeats(part: float, one: float) -> int:
    return min(max(ceil(part / max(one, 1e-6)), 3), 500)


def _times(driver: Driver, actions: dict[Stream, _Issue], counts: int | dict[Stream, int]) -> dict[Stream, list[float]]:
    """Seconds of each repetition, of those that began before another stream ran dry."""
    wanted = counts if isinstance(counts, dict) else dict.fromkeys(actions, counts)
    begin = driver.mark(timed=True)
    driver.record(Stream.COMPUTE, begin)
    stamps: dict[Stream, list[tuple[Mark, Mark]]] = {stream: [] for stream in actions}
    for stream in actions:
        if stream is not Stream.COMPUTE:
            driver.wait(first_stream(stream), begin)
    order = zip_longest(*([stream] * wanted[stream] for stream in actions))
    for stream in (stream for turn in order for stream in turn if stream is not None):
        start, end = driver.mark(timed=True), driver.mark(timed=True)
        driver.record(first_stream(stream), start)
        actions[stream]()
        driver.record(last_stream(stream), end)
        stamps[stream].append((start, end))
    driver.synchronize()
    spans = {
        stream: [(driver.seconds(begin, start), driver.seconds(begin, end)) for start, end in pairs]
        for stream, pairs in stamps.items()
    }
    until = min(found[-1][1] for found in spans.values())
    return {
        stream: [end - start for start, end in found if start < until] or [found[0][1] - found[0][0]]
        for stream, found in spans.items()
    }


def links_to(stores: Sequence[HomeStore], cache: Cache | None, backend: Backend, buffer_bytes: int) -> tuple[Home, ...]:
    """The costs of the homes of a step that runs somewhere; as ``links.link_to`` has them."""
    measure = None if backend.driver is None else partial(measure_device_link, backend.driver)
    facts = backend.facts()
    return tuple(link_to(s, cache, buffer_bytes=buffer_bytes, measure=measure, device=facts) for s in stores)
