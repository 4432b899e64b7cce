"""Which gaps are computed again (rematerialized) and what that takes: a state that a search changes gap by gap.

The state says of each gap: kept, offloaded, or computed again right before the op ``fetch`` and held from there to its
next use. Everything fetched before one op is made by one *chain* of runs, as the lowering does it. A chain depends on
what else is there at its time. So the state remembers which contents each chain looked at, and a change to a gap
changes the chains that looked at its content and no others.
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
_NOTHING: frozenset[int] = frozenset()


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
        self.lookers: dict[int, set[int]] = {}  # content -> ops whose chains depend on its presence
        self.targets: dict[int, set[int]] = {}  # op -> gaps that are fetched there
        self.limit = problem.limit if self.limit < 0 else self.limit
        # What each op takes by itself, or its chain if that takes more.
        self.alone: Ints = problem.limit - problem.free
        self.need: Ints = self.alone.copy()
        self.held: Ints = problem.held(problem.nothing_leaves() == -1)
        # Chains for single gaps while everything else is kept: by gap and the op before which they run.
        self.single: dict[tuple[int, int], Chain | None] = {} if like is None else like.single
        self.sent = False  # whether any gap has been offloaded
        self.can: list[bool] = (
            like.can
            if like is not None
            else [
                info.gap.storage not in problem.graph.persistent
                and not info.arriving
                and info.segment > 0
                and contents.maker[self.content[g]] >= 0
                and self._single(g, info.gap.end) is not None
                for g, info in enumerate(gaps)
            ]
        )
        # The gaps that a search may change.
        self.free: list[int] = [g for g, can in enumerate(self.can) if can]

    def snapshot(self) -> Snapshot:
        """The gaps that are computed again, each with its kind and the op before which it comes back."""
        return tuple((g, self.kind[g], self.fetch[g]) for g in self.free if self.kind[g] == AGAIN)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this state."""
        wanted = {g: (kind, fetch) for g, kind, fetch in snapshot}
        # Whatever is kept makes more chains possible, so everything that will change is kept first.
        for g in self.free:
            if self.kind[g] == AGAIN and wanted.get(g) != (AGAIN, self.fetch[g]):
                self.set(g, KEPT, self.end[g])
        for g, (kind, fetch) in wanted.items():
            if self.kind[g] != kind:
                self.set(g, kind, fetch)

    def begin(self, snapshot: Snapshot) -> bool:
        """Go from choices in which nothing is computed again to a snapshot, each chain looked at once.

        False, with these choices of no more use, if something cannot be computed again that way.
        """
        for g, kind, fetch in snapshot:
            self._hold(g, self.kind[g], self.fetch[g], kind, fetch)
            self.kind[g], self.fetch[g] = kind, fetch
            if kind == AGAIN:
                self.targets.setdefault(fetch, set()).add(g)
        made: dict[int, Chain | None] = {}
        for at in sorted(self.targets):
            made[at] = chain = self.chain(at, sorted(self.targets[at]))
            if chain is None:
                return False
            self.seconds += chain.seconds
        self._install(made, {})
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

    def _single(self, g: int, at: int) -> Chain | None:
        """The chain for one gap where nothing else is computed again."""
        if (g, at) not in self.single:
            self.single[g, at] = self.chain(at, (g,))
        return self.single[g, at]

    def _after(self, at: int, chain: Chain | None) -> int:
        """Bytes that op ``at`` needs with its chain, beside what is held over it."""
        alone = int(self.alone[at])
        if chain is None:
            return alone
        return max(alone, self.contents.before[at] - chain.held + chain.bytes)

    def set(self, g: int, kind: int, fetch: int) -> Change | None:
        """Change one gap; None, with nothing changed, if that cannot be."""
        old_kind, old_fetch = self.kind[g], self.fetch[g]
        changed = self._changed(g, kind, fetch)
        if changed is None:
            return None
        again, made, total = changed
        self.sent |= kind == AWAY
        self.kind[g], self.fetch[g] = kind, fetch
        undo = Change(g, old_kind, old_fetch, self.seconds, {at: self.chains.get(at) for at in made}, {})
        # Members that change at the ops that are fetched at.
        for at in (old_fetch if old_kind == AGAIN else None, fetch if kind == AGAIN else None):
            if at is not None and at not in undo.targets:
                undo.targets[at] = self.targets.get(at)
        self._install(made, {at: again[at] for at in undo.targets})
        self._hold(g, old_kind, old_fetch, kind, fetch)
        self.seconds = total
        return undo

    def _changed(
        self, g: int, kind: int, fetch: int
    ) -> tuple[dict[int, set[int]], dict[int, Chain | None], float] | None:
        """Of a change to a gap: what is fetched where chains change, those chains, and the seconds of all chains."""
        old_kind, old_fetch = self.kind[g], self.fetch[g]
        content, start = self.content[g], self.start[g]
        again: dict[int, set[int]] = {}
        if old_kind == AGAIN:
            again[old_fetch] = self.targets[old_fetch] - {g}
        if kind == AGAIN:
            again[fetch] = again.get(fetch, self.targets.get(fetch, set())) | {g}
        # Chains that depend on whether its content is there.
        was = old_fetch if old_kind == AGAIN else start
        now = fetch if kind == AGAIN else start
        lo, hi = min(was, now), max(was, now)
        if AWAY in (old_kind, kind):
            lo, hi = start, self.end[g]
        for at in self.lookers.get(content, ()):
            if lo <= at <= hi and at > start and at not in again:
                again[at] = self.targets[at]
        total = self.seconds
        made: dict[int, Chain | None] = {}
        order = sorted(again)
        for at in order:
            before = self.chains.get(at)
            total -= before.seconds if before else 0.0
        self.kind[g], self.fetch[g] = kind, fetch
        try:
            for at in order:
                if not again[at]:
                    made[at] = None
                    continue
                alone = not self.chains and not self.sent and kind == AGAIN and at == fetch
                chain = self._single(g, at) if alone else self.chain(at, tuple(again[at]))
                if chain is None:
                    return None
                total += chain.seconds
                made[at] = chain
        finally:
            self.kind[g], self.fetch[g] = old_kind, old_fetch
        return again, made, total

    def undo(self, undo: Change) -> None:
        """Take the last change back."""
        g = undo.gap
        self._hold(g, self.kind[g], self.fetch[g], undo.kind, undo.fetch)
        self.kind[g], self.fetch[g] = undo.kind, undo.fetch
        self._install(undo.chains, undo.targets)
        self.seconds = undo.seconds

    def _install(self, chains: dict[int, Chain | None], targets: dict[int, set[int] | None]) -> None:
        for at, members in targets.items():
            if members:
                self.targets[at] = members
            else:
                self.targets.pop(at, None)
        for at, chain in chains.items():
            old = self.chains.get(at)
            before = _NOTHING if old is None else old.links.seen
            now = _NOTHING if chain is None else chain.links.seen
            for content in before - now:
                self.lookers[content].discard(at)
            for content in now - before:
                self.lookers.setdefault(content, set()).add(at)
            if chain is None:
                self.chains.pop(at, None)
            else:
                self.chains[at] = chain
            self.need[at] = self._after(at, chain)

    def _hold(self, g: int, old_kind: int, old_fetch: int, kind: int, fetch: int) -> None:
        """Count the bytes of a gap where it is held now, and no longer where it was."""
        for k, f, sign in ((old_kind, old_fetch, -1), (kind, fetch, 1)):
            count = sign * self.bytes[g]
            if k == KEPT:
                for first, last in self.problem.inside(self.problem.gaps[g]):
                    self.held[first:last] += count
            elif k == AGAIN:
                self.held[f : self.end[g]] += count

    def over(self) -> Ints:
        """Bytes above the limit at each op, of shape (ops,); an op and its chain alone must keep to the problem's."""
        found = self.held + self.need
        found -= self.limit
        if self.limit > self.problem.limit:
            np.maximum(found, self.need - self.problem.limit, out=found)
        return np.maximum(found, 0, out=found)

    def meetings(self, g: int) -> list[int]:
        """Ops before which chains run that make or use a gap's content while it is open."""
        first, last = self.start[g], self.end[g]
        return sorted(at for at in self.lookers.get(self.content[g], ()) if first < at < last)


def _links(lists: Lists, size: Sequence[int]) -> Links:
    ops, made, seen, home = lists.unpacked()
    return Links(tuple(ops), frozenset(made), frozenset(seen), tuple(size[x] for x in home), frozenset(home))


@dataclass(slots=True)
class Change:
    """The state before a change."""

    gap: int
    kind: int
    fetch: int
    seconds: float
    chains: dict[int, Chain | None]
    targets: dict[int, set[int] | None]


def decisions_again(choices: Choices) -> tuple[Decision, ...]:
    """The decisions of what is computed again."""
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
