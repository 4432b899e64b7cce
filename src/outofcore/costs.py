"""What things cost: seconds and workspace of each op, bytes per second of each link."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from outofcore.errors import GraphError
from outofcore.graph import StepGraph

# Costs were measured on a busy machine if ops that were take more than this share of the time of all.
_BUSY_SHARE = 0.1
# The least part of the contention that copies either way bear: with all of it they would stop.
LEAST_PART = 0.05


@dataclass(frozen=True, slots=True)
class Home:
    """A place for bytes that are not on the device, and the link to it.

    ``contention`` is what copies both ways take from each other: the shares of their speeds that the two
    lose while both run, added up, from 0 (two links) to 1 (one link that they share). ``contention_out`` is the part of
    that which copies out bear: a disk may hold up writing much more than reading. ``compute_slowdown`` is the share by
    which ops take longer for each copy that runs beside them. ``busy`` is as for ``OpCost``.
    """

    name: str  # "host", "disk"
    bytes: int | None  # capacity; None: no limit worth planning for
    bytes_per_s_out: float  # device to home, while ops run and nothing is copied the other way
    bytes_per_s_in: float  # home to device, likewise
    latency_s: float = 0.0  # per copy, either way
    contention: float = 0.0
    compute_slowdown: float = 0.0
    contention_out: float = 0.5
    busy: int = field(default=0, repr=False)

    def lost(self, *, out: bool) -> float:
        """Return the share of their speed that copies one way lose while others run the other way."""
        return self.contention * (self.contention_out if out else 1 - self.contention_out)

    def out_seconds(self, count: int) -> float:
        """Return the seconds of a copy of ``count`` bytes from the device."""
        return self.latency_s + count / self.bytes_per_s_out

    def in_seconds(self, count: int) -> float:
        """Return the seconds of a copy of ``count`` bytes to the device."""
        return self.latency_s + count / self.bytes_per_s_in


# Where no link was measured and it matters only that what leaves has somewhere to go.
SOMEWHERE = Home("somewhere", None, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class OpCost:
    """What running an op once takes.

    ``workspace_bytes`` is device memory beyond what it reads, writes and creates. ``busy`` is how many times in a row
    it was measured while the machine was busy with something else, up to the last time.
    """

    seconds: float
    workspace_bytes: int = 0
    busy: int = field(default=0, repr=False)


@dataclass(frozen=True)
class Costs:
    """Costs of a graph on one machine.

    Attributes:
        ops: one for each op of the graph, in order.
        homes: nearest first; empty where nothing can be offloaded.
    """

    ops: tuple[OpCost, ...]
    homes: tuple[Home, ...] = ()

    def check(self, graph: StepGraph) -> None:
        """Refuse costs that do not fit the graph.

        Raises:
            GraphError: their number differs from that of the ops, one is negative, or what copies take from
                each other and from ops cannot be.
        """
        if len(self.ops) != len(graph.ops):
            raise GraphError(f"{len(self.ops)} op costs for a graph of {len(graph.ops)} ops")
        for index, cost in enumerate(self.ops):
            if not cost.seconds >= 0 or cost.workspace_bytes < 0:
                raise GraphError(f"op {index} has a negative cost: {cost}")
        for home in self.homes:
            if not 0 <= home.contention <= 1 or not 0 <= home.compute_slowdown < inf:
                raise GraphError(
                    f"home {home.name} has contention {home.contention} and compute slowdown {home.compute_slowdown}; "
                    "the one must lie from 0 to 1, and neither may be negative"
                )
            if not LEAST_PART <= home.contention_out <= 1 - LEAST_PART:
                raise GraphError(
                    f"home {home.name} has contention_out {home.contention_out}; it must lie from {LEAST_PART} to "
                    f"{1 - LEAST_PART}, or copies one way would stop while others run the other way"
                )

    @property
    def compute_seconds(self) -> float:
        """All ops once, one after the other."""
        return sum(cost.seconds for cost in self.ops)

    @property
    def is_busy(self) -> bool:
        """Whether a notable part was measured while the machine was busy with something else."""
        busy = sum(cost.seconds for cost in self.ops if cost.busy)
        return busy > _BUSY_SHARE * self.compute_seconds or any(home.busy for home in self.homes)
