"""Which gaps are recomputed (rematerialized), and the chains of runs that this takes.

A recomputed gap is made right before the op ``fetch`` and held to its next use. One *chain* of runs makes everything
that is fetched before the same op, as in lowering; it depends on the contents resident then. The searches of
``compiled`` start from such choices and change them gap by gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from outofcore.plan import Decision, Residency
from outofcore.planning.problem import Ints, Problem
from outofcore.planning.remat.compiled import ChainLists, CompiledChains, CompiledSearch
from outofcore.planning.remat.contents import StepContents

# Kinds of gaps as chains find them: on the device, copied in from home by each chain, or made by a chain.
RESIDENT, OFFLOADED, RECOMPUTED = 0, 1, 2
# The recomputed gaps, each with its kind and the op before which it is fetched.
Snapshot = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ChainContents:
    """The ops of a chain, and the contents that it makes, reads and copies in."""

    ops: tuple[int, ...]  # in the order in which they run
    made: frozenset[int]  # contents that it makes
    seen: frozenset[int]  # contents that it makes or reads, and so depends on
    copied: tuple[int, ...]  # bytes of each content that it copies in from home
    home: frozenset[int]  # contents that it copies in from home


class Chain:
    """A sequence of ops that run again right before one op, to recompute freed storages."""

    __slots__ = ("_links", "bytes", "seconds", "target_bytes")

    def __init__(
        self, seconds: float, max_bytes: int, target_bytes: int, links: ChainContents | Callable[[], ChainContents]
    ) -> None:
        # The most bytes that it holds in addition to resident contents, and the bytes that stay after it.
        self.seconds, self.bytes, self.target_bytes = seconds, max_bytes, target_bytes
        self._links = links

    @property
    def contents(self) -> ChainContents:
        """The ops of the chain and the contents that they read and make."""
        if not isinstance(self._links, ChainContents):
            self._links = self._links()
        return self._links


@dataclass
class Choices:
    """The residency of each gap of a problem, and the recomputation (chains) that this requires."""

    problem: Problem
    contents: StepContents
    limit: int = -1  # bytes of large blocks that may be held; by default the problem's
    kind: array[int] = field(default_factory=lambda: array("q"))  # by gap, RESIDENT, OFFLOADED or RECOMPUTED
    # By gap, the op before which it is fetched if it is recomputed.
    fetch: array[int] = field(default_factory=lambda: array("q"))
    chains: dict[int, Chain] = field(default_factory=dict[int, Chain])  # by the op before which they run
    seconds: float = 0.0  # of all chains
    work: int = 0  # ops in all chains inspected so far, the unit of effort
    like: Choices | None = None  # other choices for the same problem, whose constant parts are shared

    def __post_init__(self) -> None:
        problem, contents, like = self.problem, self.contents, self.like
        gaps = problem.gaps
        self.start = [info.gap.start for info in gaps]
        self.end = [info.gap.end for info in gaps]
        self.bytes = [info.bytes for info in gaps]
        self.content = [contents.first[info.gap.storage] + info.segment for info in gaps]
        if not self.kind:
            self.kind = array("q", [OFFLOADED if info.arriving else RESIDENT for info in gaps])
            self.fetch = array("q", self.end)
        self.gaps_of: list[list[int]] = [[] for _ in contents.storage]
        for g, info in enumerate(gaps):
            self.gaps_of[self.content[g]].append(g)
            if info.cyclic:
                self.gaps_of[contents.first[info.gap.storage]].append(g)
        self.compiled = CompiledChains(contents, self.gaps_of, self.start) if like is None else like.compiled
        self.limit = problem.limit if self.limit < 0 else self.limit
        # Bytes of each op by itself, or of its chain if that needs more.
        self.alone: Ints = problem.limit - problem.free_bytes
        self.need: Ints = self.alone.copy()
        self.held: Ints = problem.resident_bytes(problem.all_resident() == -1)
        self.can_recompute: list[bool] = (
            like.can_recompute
            if like is not None
            else [
                info.gap.storage not in problem.graph.persistent
                and not info.arriving
                and not info.final
                and info.segment > 0
                and contents.maker[self.content[g]] >= 0
                and self.chain(info.gap.end, (g,)) is not None
                for g, info in enumerate(gaps)
            ]
        )
        # The gaps that a search may change.
        self.recomputable: list[int] = [g for g, can in enumerate(self.can_recompute) if can]

    def snapshot(self) -> Snapshot:
        return tuple((g, self.kind[g], self.fetch[g]) for g in self.recomputable if self.kind[g] == RECOMPUTED)

    def apply_snapshot(self, snapshot: Snapshot) -> bool:
        """Set the residencies of gaps from a snapshot; return False if a recomputation is impossible."""
        targets: dict[int, list[int]] = {}
        for g, kind, fetch in snapshot:
            self.problem.reserve(self.held, g, self.bytes[g])
            self.kind[g], self.fetch[g] = kind, fetch
            if kind == RECOMPUTED:
                self.held[fetch : self.end[g]] += self.bytes[g]
                targets.setdefault(fetch, []).append(g)
        for at in sorted(targets):
            chain = self.chain(at, sorted(targets[at]))
            if chain is None:
                return False  # the choices must not be used any more
            self.chains[at] = chain
            self.seconds += chain.seconds
            # Bytes of the op and its chain, without gaps that are held over the op.
            self.need[at] = max(int(self.alone[at]), self.contents.before[at] - chain.target_bytes + chain.bytes)
        return True

    def open_search(self) -> CompiledSearch:
        """Return a compiled search that starts from these choices; every gap must be resident."""
        return CompiledSearch(
            self.compiled,
            end=self.end,
            sizes=self.bytes,
            content=self.content,
            kind=self.kind,
            free=self.recomputable,
            alone=self.alone.tolist(),
            held=self.held.tolist(),
            before=self.contents.before,
        )

    def chain(self, at: int, gaps: Sequence[int], max_seconds: float = float("inf")) -> Chain | None:
        """Return the chain that recomputes these gaps before op ``at``; None if it is impossible in ``max_seconds``."""
        targets = sorted({self.content[g] for g in gaps})
        result = self.compiled.find_chain(at, targets, max_seconds, self.kind, self.fetch)
        if result is None:
            return None
        seconds, max_bytes, target_bytes, lists = result
        self.work += lists.ops
        return Chain(seconds, max_bytes, target_bytes, partial(_unpack_contents, lists, self.contents.size))

    def overload(self) -> Ints:
        """Return the bytes above the limit at each op."""
        excess = self.held + self.need
        excess -= self.limit
        # An op and its chain alone must fit the problem's own limit.
        if self.limit > self.problem.limit:
            np.maximum(excess, self.need - self.problem.limit, out=excess)
        return np.maximum(excess, 0, out=excess)


def _unpack_contents(lists: ChainLists, size: Sequence[int]) -> ChainContents:
    ops, contents_made, contents_seen, home = lists.unpack()
    return ChainContents(
        tuple(ops), frozenset(contents_made), frozenset(contents_seen), tuple(size[x] for x in home), frozenset(home)
    )


def recompute_decisions(choices: Choices) -> tuple[Decision, ...]:
    gaps = choices.problem.gaps
    return tuple(
        Decision(gaps[g].gap, Residency.RECOMPUTE, choices.start[g] + 1, choices.fetch[g])
        for g in choices.recomputable
        if choices.kind[g] == RECOMPUTED
    )


def arrival_decisions(choices: Choices) -> tuple[Decision, ...]:
    """Return a decision to fetch each input that does not fit from the start, as early as it fits."""
    room = choices.limit - (choices.held + choices.need)
    decisions: list[Decision] = []
    for info in choices.problem.gaps:
        if not info.arriving:
            continue
        first = info.gap.end
        while first > 0 and room[first - 1] >= info.bytes:
            first -= 1
        room[first : info.gap.end] -= info.bytes
        if first:
            decisions.append(Decision(info.gap, Residency.OFFLOAD, 0, first))
    return tuple(decisions)
