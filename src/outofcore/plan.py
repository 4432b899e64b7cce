"""The plan: a decision for each gap between two uses of a storage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Residency(Enum):
    """The decision about a gap."""

    KEEP = "keep"  # the bytes stay on the device
    OFFLOAD = "offload"  # the bytes are copied home and fetched before the next use
    RECOMPUTE = "recompute"  # the bytes are dropped and recomputed before the next use


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """The half-open interval from one use of a storage to its next, in op indices.

    In a graph of n ops, the cyclic gap of a persistent storage ends at n + its first use. The first gap of an input
    starts at -1.
    """

    storage: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a plan about one gap.

    Always ``start < release_by <= fetch_at <= end``.

    OFFLOAD: if the copy at ``home`` (an index into ``Costs.homes``) is stale, a copy out starts after op ``start``,
    whether other homes are current or not. From op ``release_by`` on the device bytes count as free; an op that reuses
    them may wait for that copy. From op ``fetch_at`` on the copy in occupies device bytes. In a cyclic gap
    ``release_by <= n <= fetch_at``, since the user reads the storage at home between steps; its ``home`` is the
    storage's home then. For the first gap of an input only ``fetch_at`` matters. Inputs and outputs use the first home.

    RECOMPUTE: the bytes are dropped after op ``start`` (``release_by`` is ``start + 1``). Right before op ``fetch_at``
    the ops that made them run again, preceded by those that made inputs which are neither on the device nor at home.
    Decisions with the same ``fetch_at`` share these runs (the speed-centric mode of SuperNeurons, arXiv 1801.04380);
    others keep no intermediates (its memory-centric mode). Persistent storages cannot be recomputed.
    """

    gap: Gap
    residency: Residency
    release_by: int
    fetch_at: int
    home: int = 0


@dataclass(frozen=True)
class Plan:
    """The decisions of one policy under one budget; other gaps are kept.

    The recomputation sequence before an op runs each op at most once, in graph order.

    Outputs and changed inputs are copied to the first home after their last use. Their bytes may be reused at once, and
    the op that reuses them waits for the copy, unless an OFFLOAD decision for the gap to the end of the step sets
    ``release_by``. ``staying`` are created gradients without decisions that stay on the device until the next step.
    """

    policy: str
    budget: int  # bytes that the policy may use
    decisions: tuple[Decision, ...]
    staying: tuple[int, ...] = ()
