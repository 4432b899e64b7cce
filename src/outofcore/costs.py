"""Costs of a step: seconds and workspace of each op, and bytes per second of each link."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from outofcore.errors import GraphError
from outofcore.graph import StepGraph

# Costs count as busy if ops measured on a busy machine take more than this share of the compute time.
_BUSY_SHARE = 0.1
# The minimum share of the contention in each direction: copies that bear all of it would stop.
MIN_CONTENTION_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Home:
    """A backing store for bytes that are not on the device, and the link to it.

    ``contention`` is the sum of the shares of their speeds that copies out and copies in lose while both run: 0 for
    separate links, 1 for one shared link. ``contention_out`` is the part of it that copies out bear.
    ``compute_slowdown`` is the share by which each concurrent copy lengthens an op. ``busy`` is as for ``OpCost``.
    """

    name: str  # "host", "disk"
    bytes: int | None  # capacity; None: unlimited
    bytes_per_s_out: float  # device to home, while ops run and no copy runs in the other direction
    bytes_per_s_in: float  # home to device, while ops run and no copy runs in the other direction
    latency_s: float = 0.0  # per copy, in either direction
    contention: float = 0.0
    compute_slowdown: float = 0.0
    contention_out: float = 0.5
    busy: int = field(default=0, repr=False)

    def lost_share(self, *, out: bool) -> float:
        """Return the share of speed that copies lose to concurrent copies in the other direction."""
        return self.contention * (self.contention_out if out else 1 - self.contention_out)

    def out_seconds(self, count: int) -> float:
        """Return the seconds of a copy of ``count`` bytes from the device to this home."""
        return self.latency_s + count / self.bytes_per_s_out

    def in_seconds(self, count: int) -> float:
        """Return the seconds of a copy of ``count`` bytes from this home to the device."""
        return self.latency_s + count / self.bytes_per_s_in


# A home for plans whose times do not matter.
SOMEWHERE = Home("somewhere", None, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of running an op once; ``busy`` counts consecutive measurements on a busy machine."""

    seconds: float
    workspace_bytes: int = 0  # device memory in addition to its storages
    busy: int = field(default=0, repr=False)


@dataclass(frozen=True)
class Costs:
    """Costs of a graph on one machine: one for each op, and the homes, nearest first."""

    ops: tuple[OpCost, ...]
    homes: tuple[Home, ...] = ()

    def check(self, graph: StepGraph) -> None:
        """Raise ``GraphError`` if the costs do not fit the graph or a value is out of range."""
        if len(self.ops) != len(graph.ops):
            raise GraphError(
                f"{len(self.ops)} op costs for a graph of {len(graph.ops)} ops; there must be one for each op"
            )
        for index, cost in enumerate(self.ops):
            if not cost.seconds >= 0 or cost.workspace_bytes < 0:
                raise GraphError(f"op {index} has a negative cost: {cost}; seconds and bytes must be 0 or more")
        for home in self.homes:
            if not 0 <= home.contention <= 1 or not 0 <= home.compute_slowdown < inf:
                raise GraphError(
                    f"home {home.name} has contention {home.contention} and compute slowdown {home.compute_slowdown}; "
                    "contention must be from 0 to 1, and the slowdown must not be negative"
                )
            if not MIN_CONTENTION_SHARE <= home.contention_out <= 1 - MIN_CONTENTION_SHARE:
                raise GraphError(
                    f"home {home.name} has contention_out {home.contention_out}; it must be from "
                    f"{MIN_CONTENTION_SHARE} to {1 - MIN_CONTENTION_SHARE}, or copies would stop while others run in "
                    "the other direction"
                )

    @property
    def compute_seconds(self) -> float:
        return sum(cost.seconds for cost in self.ops)

    @property
    def is_busy(self) -> bool:
        """Whether more than 10 % of the compute time, or any link, was measured on a busy machine."""
        busy = sum(cost.seconds for cost in self.ops if cost.busy)
        return busy > _BUSY_SHARE * self.compute_seconds or any(home.busy for home in self.homes)
