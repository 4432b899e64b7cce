"""Which gaps are recomputed (rematerialized), and what that takes.

Each gap is kept, offloaded, or recomputed right before the op ``fetch`` and held from there to its next use. Everything
fetched before one op is made by one *chain* of runs, as the lowering does it. A chain depends on what else is there at
its time. The searches of ``compiled`` begin with such choices, and change them gap by gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from outofcore.plan import Decision, Residency
from outofcore.planning.problem import Ints, Problem
from outofcore.planning.remat.compiled import CompiledChains, CompiledSearch, Lists
from outofcore.planning.remat.contents import Contents

KEPT, AWAY, AGAIN = 0, 1, 2
# Gaps that are recomputed, each with its kind and the op before which it comes back.
Snapshot = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Links:
    """What a chain is made of.

    Attributes:
        ops: that run, in that order.
        made: contents that it makes.
        seen: contents that it makes, or found and needs: what it depends on.
        copied: bytes of each content that it reads from home.
        home: those contents.
    """

    ops: tuple[int, ...]
    made: frozenset[int]
    seen: frozenset[int]
    copied: tuple[int, ...]
    home: frozenset[int]


class Chain:
    """What runs again right before one op.

    Attributes:
        seconds: of all its runs.
        bytes: the most that it holds beside what is there already.
        held: bytes of what it was run for, which stay.
    """

    __slots__ = ("_links", "bytes", "held", "seconds")

    def __init__(self, seconds: float, count: int, held: int, links: Links | Callable[[], Links]) -> None:
        self.seconds, self.bytes, self.held = seconds, count, held
        self._links = links

    @property
    def links(self) -> Links:
        """What it is made of; put together when it is first asked for, as most chains are only weighed."""
        if not isinstance(self._links, Links):
            self._links = self._links()
        return self._links


@dataclass
class Choices:
    """Residencies of all gaps of a problem, and the chains that follow from them.

    Attributes:
        problem: the step under its limit.
        contents: of the step.
        limit: bytes of large blocks that may be held; by default those of the problem.
        kind: by gap, KEPT, AWAY or AGAIN.
        fetch: by gap, the op before which it comes back if it is computed again.
        chains: by the op before which they run.
        seconds: of all chains.
        work: ops in all chains looked at so far; effort is counted in these.
        like: other choices for the same problem, with which what never changes is shared.
    """

    problem: Problem
    contents: Contents
    limit: int = -1
    kind: array[int] = field(default_factory=lambda: array("q"))
    fetch: array[int] = field(default_factory=lambda: array("q"))
    chains: dict[int, Chain] = field(default_factory=dict[int, Chain])
    seconds: float = 0.0
    work: int = 0
    like: Choices | None = None

    def __post_init__(self) -> None:
        problem, contents, like = self.problem, self.contents, self.like
        gaps = problem.gaps
        self.start = [info.gap.start for info in gaps]
        self.end = [info.gap.end for info in gaps]
        self.bytes = [info.bytes for info in gaps]
        self.content = [contents.first[info.gap.storage] + info.segment for info in gaps]
        if not self.kind:
            self.kind = array("q", [AWAY if info.arriving else KEPT for info in gaps])
            self.fetch = array("q", self.end)
        self.gaps_of: list[list[int]] = [[] for _ in contents.storage]
        for g, info in enumerate(gaps):
            self.gaps_of[self.content[g]].append(g)
            if info.cyclic:
                self.gaps_of[contents.first[info.gap.storage]].append(g)
        self.compiled = CompiledChains(contents, self.gaps_of, self.start) if like is None else like.compiled
        self.limit = problem.limit if self.limit < 0 else self.limit
        # What each op takes by itself, or its chain if that takes more.
        self.alone: Ints = problem.limit - problem.free
        self.need: Ints = self.alone.copy()
        self.held: Ints = problem.held(problem.nothing_leaves() == -1)
        self.can: list[bool] = (
            like.can
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
        self.free: list[int] = [g for g, can in enumerate(self.can) if can]

    def snapshot(self) -> Snapshot:
        """The gaps that are computed again, each with its kind and the op before which it comes back."""
        return tuple((g, self.kind[g], self.fetch[g]) for g in self.free if self.kind[g] == AGAIN)

    def begin(self, snapshot: Snapshot) -> bool:
        """Go from choices in which all gaps are kept to a snapshot.

        False, with these choices of no more use, if something cannot be computed again that way.
        """
        targets: dict[int, list[int]] = {}
        for g, kind, fetch in snapshot:
            self.problem.take(self.held, g, self.bytes[g])
            self.kind[g], self.fetch[g] = kind, fetch
            if kind == AGAIN:
                self.held[fetch : self.end[g]] += self.bytes[g]
                targets.setdefault(fetch, []).append(g)
        for at in sorted(targets):
            chain = self.chain(at, sorted(targets[at]))
            if chain is None:
                return False
            self.chains[at] = chain
            self.seconds += chain.seconds
            # The bytes of the op and its chain, without those of gaps held over the op.
            self.need[at] = max(int(self.alone[at]), self.contents.before[at] - chain.held + chain.bytes)
        return True

    def search(self) -> CompiledSearch:
        """A compiled search that begins with these choices, in which nothing may be recomputed or offloaded yet."""
        return CompiledSearch(
            self.compiled,
            end=self.end,
            sizes=self.bytes,
            content=self.content,
            kind=self.kind,
            free=self.free,
            alone=self.alone.tolist(),
            held=self.held.tolist(),
            before=self.contents.before,
        )

    def chain(self, at: int, gaps: Sequence[int], limit: float = float("inf")) -> Chain | None:
        """The chain before op ``at`` that makes what these gaps hold; None if none takes ``limit`` seconds at most."""
        targets = sorted({self.content[g] for g in gaps})
        found = self.compiled.once(at, targets, limit, self.kind, self.fetch)
        if found is None:
            return None
        seconds, most, held, lists = found
        self.work += lists.ops
        return Chain(seconds, most, held, partial(_links, lists, self.contents.size))

    def over(self) -> Ints:
        """Bytes above the limit at each op, of shape (ops,); an op and its chain alone must keep to the problem's."""
        found = self.held + self.need
        found -= self.limit
        if self.limit > self.problem.limit:
            np.maximum(found, self.need - self.problem.limit, out=found)
        return np.maximum(found, 0, out=found)


def _links(lists: Lists, size: Sequence[int]) -> Links:
    ops, made, seen, home = lists.unpacked()
    return Links(tuple(ops), frozenset(made), frozenset(seen), tuple(size[x] for x in home), frozenset(home))


def decisions_again(choices: Choices) -> tuple[Decision, ...]:
    """Return the decisions to recompute gaps."""
    gaps = choices.problem.gaps
    return tuple(
        Decision(gaps[g].gap, Residency.RECOMPUTE, choices.start[g] + 1, choices.fetch[g])
        for g in choices.free
        if choices.kind[g] == AGAIN
    )


def arrivals(choices: Choices) -> tuple[Decision, ...]:
    """When inputs come that cannot be there from the start of the step: as early as there is room for them.

    Inputs about which nothing is said come before the first op.
    """
    room = choices.limit - (choices.held + choices.need)
    found: list[Decision] = []
    for info in choices.problem.gaps:
        if not info.arriving:
            continue
        first = info.gap.end
        while first > 0 and room[first - 1] >= info.bytes:
            first -= 1
        room[first : info.gap.end] -= info.bytes
        if first:
            found.append(Decision(info.gap, Residency.OFFLOAD, 0, first))
    return tuple(found)
