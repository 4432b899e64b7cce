"""The latency and bandwidth of collectives in a process group, measured by all its processes together.

A collective takes the latency plus the time in which its bytes go round a ring. In an all-reduce each process sends 2
(n - 1) / n of the bytes; in other collectives half of that (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009).

Limits: waits of processes for each other are not counted, and groups of the same size are assumed to be alike. ``busy``
needs two cores per process, because with fewer they slow each other down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from msgspec import Meta

from outofcore.busy import BusyWatch, is_due, was_busy
from outofcore.capture.captured import Captured
from outofcore.capture.collectives import Collective
from outofcore.capture.device_traits import synchronize_device
from outofcore.costs import OpCost
from outofcore.errors import GraphError
from outofcore.jsonfile import convert_json
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import OpProfile, machine_facts
from outofcore.report.machine import this_machine
from outofcore.units import MIB

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Message(NamedTuple):
    bytes: int
    rounds: int  # repetitions


# The small message measures latency, the large one bandwidth.
_SMALL, _LARGE = _Message(1024, 20), _Message(8 * MIB, 4)


@dataclass(frozen=True)
class GroupCost:
    """The measured latency and bandwidth of collectives in a process group."""

    latency_s: Annotated[float, Meta(ge=0, le=1e6)]
    bytes_per_s: Annotated[float, Meta(gt=0)]  # sent by each process
    busy: Annotated[int, Meta(ge=0, le=1 << 30)] = 0  # as for ``costs.OpCost``
    measured_at: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # seconds since the epoch; 0 unless busy

    def seconds(self, collective: Collective) -> float:
        return self.latency_s + collective.sent_bytes / self.bytes_per_s


def group_cost(group: ProcessGroup, device: torch.device, cache: Cache | None) -> GroupCost:
    """Return the cost of a group's collectives, cached or measured; all processes of the group must call this."""
    key = f"{torch.distributed.get_backend(group)}/{device.type}/{group.size()}"
    shelf = None if cache is None else cache.shelf("groups", machine_facts())
    cached: list[Any] = [None]
    busy = 0
    if group.rank() == 0 and shelf is not None and (entry := shelf.read().get(key)) is not None:
        try:
            entry_cost = convert_json(entry, GroupCost, shelf.path, f"$.entries.{key}")
            must_measure = is_due(entry_cost.busy, time.time() - entry_cost.measured_at)
            cached, busy = [None if must_measure else entry_cost], entry_cost.busy
        except GraphError:
            cached = [None]
    torch.distributed.broadcast_object_list(cached, group=group, group_src=0)
    if cached[0] is not None:
        return cached[0]
    with BusyWatch() as watch:
        cost = _measure(group, device)
    if device.type == "cpu" and 2 * group.size() <= this_machine().cores and was_busy(watch.counted, computes=False):
        cost = replace(cost, busy=busy + 1, measured_at=time.time())
    agreed = [cost]
    torch.distributed.broadcast_object_list(agreed, group=group, group_src=0)
    if group.rank() == 0 and shelf is not None:
        shelf.write({key: asdict(agreed[0])})
    return agreed[0]


def _measure(group: ProcessGroup, device: torch.device) -> GroupCost:
    small, large = _median_seconds(group, device, _SMALL), _median_seconds(group, device, _LARGE)
    count = group.size()
    sent = 2 * (_LARGE.bytes - _SMALL.bytes) * (count - 1) / count
    # A group of one process sends no bytes.
    return GroupCost(small, max(sent, 1.0) / max(large - small, 1e-9))


def _median_seconds(group: ProcessGroup, device: torch.device, message: _Message) -> float:
    """Return the median seconds of an all-reduce of a message."""
    tensor = torch.zeros(message.bytes, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(message.rounds + 1):
        begin = time.perf_counter()
        torch.distributed.all_reduce(tensor, group=group)
        synchronize_device(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])  # the first round opens connections


def collectives_of(captured: Captured) -> tuple[Collective, ...]:
    return tuple(call.func for call in captured.calls if isinstance(call.func, Collective))


def add_collective_costs(
    captured: Captured, profiles: tuple[OpProfile, ...], costs: Mapping[int, GroupCost]
) -> tuple[OpProfile, ...]:
    """Return the profiles with measured costs for collectives; ``costs`` has them by group size."""
    updated = list(profiles)
    for index, call in enumerate(captured.calls):
        if isinstance(call.func, Collective) and call.func.group.size() in costs:
            cost = costs[call.func.group.size()]
            updated[index] = replace(updated[index], cost=OpCost(cost.seconds(call.func), busy=cost.busy))
    return tuple(updated)
