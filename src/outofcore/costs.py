"""What things cost: seconds and workspace of each op, bytes per second of each link."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.errors import GraphError
from outofcore.graph import StepGraph


@dataclass(frozen=True, slots=True)
class Home:
    """A place for bytes that are not on the device, and the link to it."""

    name: str  # "host", "disk"
    bytes: int | None  # capacity; None: no limit worth planning for
    bytes_per_s_out: float  # device to home
    bytes_per_s_in: float  # home to device
    latency_s: float = 0.0  # per copy, either way

    def out_seconds(self, count: int) -> float:
        """Seconds that a copy of ``count`` bytes from the device takes."""
        return self.latency_s + count / self.bytes_per_s_out

    def in_seconds(self, count: int) -> float:
        """Seconds that a copy of ``count`` bytes to the device takes."""
        return self.latency_s + count / self.bytes_per_s_in


@dataclass(frozen=True, slots=True)
class OpCost:
    """What running an op once takes."""

    seconds: float
    workspace_bytes: int = 0  # device memory beyond what it reads, writes and creates


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
            GraphError: their number differs from that of the ops, or one is negative.
        """
        if len(self.ops) != len(graph.ops):
            raise GraphError(f"{len(self.ops)} op costs for a graph of {len(graph.ops)} ops")
        for index, cost in enumerate(self.ops):
            if not cost.seconds >= 0 or cost.workspace_bytes < 0:
                raise GraphError(f"op {index} has a negative cost: {cost}")

    @property
    def compute_seconds(self) -> float:
        """All ops once, one after the other."""
        return sum(cost.seconds for cost in self.ops)
