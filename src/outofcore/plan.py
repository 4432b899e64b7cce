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

    In a graph of n ops, the gap from the last use of a persistent storage to its first use in the next step ends at n +
    that use; it is *cyclic*. The first gap of an input starts at -1.
    """

    storage: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a plan about one gap, with ``start < release_by <= fetch_at <= end``.

    OFFLOAD: if the copy at ``home`` (an index into ``Costs.homes``) is stale, a copy out starts after op ``start``.
    From op ``release_by`` on the device bytes count as free; an op that reuses them may wait for that copy. From op
    ``fetch_at`` on the copy in occupies device bytes. In a cyclic gap of a graph of n ops
    ``release_by <= n <= fetch_at``, and ``home`` is the storage's home between steps. Inputs and outputs use home 0.

    RECOMPUTE: the bytes are dropped after op ``start`` (``release_by`` is ``start + 1``). Right before op ``fetch_at``
    the ops that made them, and missing inputs of these, run again. Decisions with the same ``fetch_at`` share these
    runs (the speed-centric mode of SuperNeurons, arXiv 1801.04380). Persistent storages cannot be recomputed.
    """

    gap: Gap
    residency: Residency
    release_by: int
    fetch_at: int
    home: int = 0


@dataclass(frozen=True)
class Plan:
    """The decisions of one policy under one budget; other gaps are kept.

    Outputs and changed inputs are copied to the first home after their last use. An OFFLOAD decision about the gap to
    the end of the step sets when the copy must have ended (``release_by``). ``staying`` are created gradients that stay
    on the device until the next step.
    """

    policy: str
    budget: int  # bytes that the policy may use
    decisions: tuple[Decision, ...]
    staying: tuple[int, ...] = ()
