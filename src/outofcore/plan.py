"""The plan: what becomes of a storage between two uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Residency(Enum):
    """The decision about a gap."""

    KEEP = "keep"  # the bytes stay on the device
    OFFLOAD = "offload"  # the bytes leave for their home and come back before the next use
    RECOMPUTE = "recompute"  # the bytes are dropped and computed again before the next use


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """From one use of a storage to its next, in op indices, half-open.

    In a graph of n ops the cyclic gap of a persistent storage runs from its last use ``start`` to
    ``end`` = n + its first use. An input waits at its home for its first use: ``start`` is -1.
    """

    storage: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a plan says of one gap.

    For OFFLOAD, the copy-out (if the home copy is stale) starts when op ``start`` is done; from op
    ``release_by`` on the room is counted as free, so whoever takes it may have to wait for that copy;
    and from op ``fetch_at`` on the room of the copy-in is taken. Always
    ``start < release_by <= fetch_at <= end``. In a cyclic gap ``release_by <= n <= fetch_at``: what
    leaves the device around the end of a step is at home when the step ends, where the user sees it.
    For an input (``start`` = -1) only ``fetch_at`` matters.

    For RECOMPUTE, the bytes are dropped when op ``start`` is done (``release_by`` is ``start + 1``), and
    right before op ``fetch_at`` the ops that made them run again, and those that made their inputs where
    these are neither on the device nor at home. What decisions with the same ``fetch_at`` need in common
    runs once for all of them (the speed-centric mode of SuperNeurons, arXiv 1801.04380); with a
    ``fetch_at`` of its own each runs its own chain and keeps nothing of it (the memory-centric mode).
    Persistent storages cannot be recomputed.

    For OFFLOAD, ``home`` says where the bytes go: an index into ``Costs.homes``. What is copied to one home
    is not found at another, so a storage whose copy at this home is stale leaves with a copy, whatever lies
    elsewhere. The home of its cyclic gap is where a persistent storage lies between steps; inputs come from,
    and outputs go to, the first home.
    """

    gap: Gap
    residency: Residency
    release_by: int
    fetch_at: int
    home: int = 0


@dataclass(frozen=True)
class Plan:
    """The decisions of one policy under one budget. Gaps that are not named are kept.

    What is computed again right before one op is made by a chain that runs each op that it takes once, in the step's
    order.

    Outputs, and inputs that the step changes, go to the first home after their last use. A decision to offload the gap
    from there to the end of the step says by when they have left (``release_by``); without one, the room may be reused
    at once, and an op that reuses it waits for the copy. Those in ``staying`` stay on the device instead until the next
    step begins: gradients that the step creates and leaves, about which nothing else is decided.
    """

    policy: str
    budget: int  # bytes that the policy was allowed
    decisions: tuple[Decision, ...]
    staying: tuple[int, ...] = ()
