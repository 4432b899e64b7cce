"""Greedy eviction as a step runs: what Dynamic Tensor Rematerialization would do, decided before the step.

Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021, arXiv 2006.09616), section 2 and its heuristic h_DTR
(section 4.1): the step is followed op by op; where bytes do not suffice, that storage is evicted for which

    seconds to compute it again, with its evicted neighbours
    --------------------------------------------------------
            bytes x seconds since it was last used

is least; and what an op needs and was evicted is computed again right before it, with what that takes. What such a
chain of runs makes on its way, and a later op needs, stays from then on, until it is evicted in its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outofcore.planning.problem import Ints
from outofcore.planning.remat.chains import AGAIN, Chain, Choices
from outofcore.planning.remat.selection import Snapshot

# Seconds since the last use count for no less than this share of the step.
_LEAST_STALE = 1e-9
# How often a step is followed, each time with more that must be kept.
_TRIES = 12
# Ops of chains that are looked at, at most, before it is followed once more.
_WORK = 100_000
# How many contents may go from which a chain starts, one by one.
_MORE = 8


def evicted_online(choices: Choices, limit: int, bound: Ints | None = None) -> Snapshot | None:
    """What is computed again if the step is followed with greedy eviction.

    Args:
        choices: of the step; only read.
        limit: bytes of large blocks that may be held.
        bound: as of ``Choices``.

    Returns:
        The gaps that are computed again, as a change to choices in which all are kept; None if an op does not fit with
        all evicted that can be. It says less than was followed: what has been evicted between two uses is dropped after
        the first of them, and of several times that it is there again between two uses only the last remains. So it may
        take more bytes, and more seconds. Where what was evicted cannot be computed again for lack of room, the step is
        followed once more from the start, with that kept, and all that is made and used alike.
    """
    pinned: frozenset[int] = frozenset()
    work = 0
    for _ in range(_TRIES):
        following = _Following(choices, limit, bound, pinned)
        snapshot = following.run()
        work += following.state.work
        if snapshot is not None or not following.missed or work > _WORK:
            return snapshot
        kinds = {_kind(choices, g) for g in following.missed}
        pinned |= {g for g in choices.free if _kind(choices, g) in kinds}
    return None


def _kind(choices: Choices, g: int) -> tuple[object, ...]:
    """What gaps have in common of which one step of an unrolled network has one each, such as sums of gradients."""
    ops = choices.problem.graph.ops
    maker, reader = ops[choices.contents.maker[choices.content[g]]], ops[choices.end[g]]
    return maker.name, maker.module, reader.name, reader.module, choices.bytes[g]


@dataclass
class _Following:
    like: Choices
    limit: int
    bound: Ints | None = None
    pinned: frozenset[int] = frozenset()
    missed: list[int] = field(default_factory=list[int])  # what could not be computed again where it was needed
    clock: float = 0.0
    known: dict[int, Chain] = field(default_factory=dict[int, Chain])  # by resident gap, its chain at present
    seen_by: dict[int, set[int]] = field(
        default_factory=dict[int, set[int]]
    )  # content -> gaps whose known chain saw it
    children: dict[int, frozenset[int]] = field(
        default_factory=dict[int, frozenset[int]]
    )  # evicted -> what it rests on

    def __post_init__(self) -> None:
        like = self.like
        self.state = state = Choices(like.problem, like.contents, like=like, bound=self.bound)
        count = len(state.kind)
        self.can = np.array(state.can, dtype=np.bool_)
        self.size = np.array(state.bytes, dtype=np.float64)
        self.content = np.array(state.content, dtype=np.int64)
        self.resident = np.zeros(count, dtype=np.bool_)
        self.stale = np.zeros(count, dtype=np.bool_)  # whether the chain has to be found anew
        self.cost = np.full(count, np.inf)
        self.last = np.zeros(count)
        self.below: list[float] = [0.0] * len(like.contents.storage)  # by content, seconds of what rests on it, evicted
        self.opening: dict[int, list[int]] = {}
        self.closing: dict[int, list[int]] = {}
        for g in state.free:
            if g in self.pinned:
                continue
            self.opening.setdefault(state.start[g], []).append(g)
            self.closing.setdefault(state.end[g], []).append(g)
        self.dying: dict[int, list[int]] = {}
        for content, op in enumerate(like.contents.gone):
            self.dying.setdefault(op, []).append(content)

    def run(self) -> Snapshot | None:
        """Follow the step; None, with the reason in ``missed``, where something does not fit."""
        state, contents = self.state, self.like.contents
        self.held = state.held.copy()  # without what is evicted
        for op, seconds in enumerate(contents.seconds):
            due = [g for g in self.closing.get(op, ()) if state.kind[g] == AGAIN and state.fetch[g] == op]
            for g in self.closing.get(op, ()):
                self.resident[g] = False
            chain = state.chain(op, due) if due else None
            need, locked = self._takes(op, chain)
            more = _MORE
            while not self._make_room(op, need, locked):
                # What the chain starts from may go as well: then it makes that, too.
                more -= 1
                if not due or more < 0 or not self._evict_one(op, locked):
                    return self._missed(due)
                chain = state.chain(op, due)
                need, locked = self._takes(op, chain)
            if chain is not None:
                self.clock += chain.seconds
                self._bring_back(op, chain)
                if not self._make_room(op, need, locked - chain.links.made):
                    return self._missed(due)
            self.clock += seconds
            for g in due:
                self._forget_children(g)
            for content in self.dying.get(op, ()):
                self._changed(content)
            for g in self.opening.get(op, ()):
                self.resident[g] = self.stale[g] = True
                self.last[g] = self.clock
        return state.snapshot()

    def _missed(self, due: list[int]) -> None:
        self.missed = due

    def _takes(self, op: int, chain: Chain | None) -> tuple[int, frozenset[int]]:
        """Bytes that an op takes with its chain, and the contents that must not be evicted for it."""
        alone = int(self.state.alone[op])
        if chain is None:
            return alone, frozenset()
        return max(alone, self.like.contents.before[op] - chain.held + chain.bytes), chain.links.seen

    def _evict_one(self, op: int, among: frozenset[int]) -> bool:
        """Evict what the heuristic says of these contents; False if none of them is there to be evicted."""
        allowed = self.resident & np.isin(self.content, list(among))
        return self._evict_first(op, allowed)

    def _make_room(self, op: int, need: int, locked: frozenset[int]) -> bool:
        """Evict what the heuristic says until an op with its chain fits; False if nothing is left to evict."""
        if self.held[op] + need <= self.limit:
            return True
        allowed = self.resident.copy()
        if locked:
            for g in np.flatnonzero(allowed).tolist():
                if self.state.content[g] in locked:
                    allowed[g] = False
        while self.held[op] + need > self.limit:
            if not self._evict_first(op, allowed):
                return False
        return True

    def _evict_first(self, op: int, allowed: NDArray[np.bool_]) -> bool:
        """Evict the one for which the heuristic is least, and allow it no more; False if none can be."""
        least = _LEAST_STALE * (self.clock + 1e-12)
        open_now = np.flatnonzero(allowed)
        if not len(open_now):
            return False
        for g in open_now[self.stale[open_now]].tolist():
            self._rate(op, g)
        score = self.cost[open_now] / (self.size[open_now] * np.maximum(self.clock - self.last[open_now], least))
        g = int(open_now[score.argmin()])
        if not np.isfinite(self.cost[g]):
            return False
        allowed[g] = False
        self._evict(op, g)
        return True

    def _rate(self, op: int, g: int) -> None:
        """Find what computing a gap's content again would take now."""
        state = self.state
        self.stale[g] = False
        found = state.once(op, (g,))
        content = state.content[g]
        old = self.known.pop(g, None)
        before = frozenset[int]() if old is None else old.links.seen
        now = frozenset[int]() if found is None else found.links.seen
        for seen in before - now:
            self.seen_by[seen].discard(g)
        for seen in now - before:
            self.seen_by.setdefault(seen, set()).add(g)
        if found is None:
            self.cost[g] = np.inf
            return
        self.known[g] = found
        self.cost[g] = found.seconds + self.below[content]

    def _evict(self, op: int, g: int) -> None:
        state, contents = self.state, self.like.contents
        content = state.content[g]
        state.kind[g], state.fetch[g] = AGAIN, state.end[g]
        self.held[op : state.end[g]] -= state.bytes[g]
        self.resident[g] = False
        chain = self.known.pop(g)
        for seen in chain.links.seen:
            self.seen_by[seen].discard(g)
        rests = chain.links.seen - {content}
        self.children[g] = rests
        own = contents.seconds[contents.maker[content]]
        for other in rests:
            self.below[other] += own
        self._changed(content)

    def _forget_children(self, g: int) -> None:
        contents = self.like.contents
        content = self.state.content[g]
        own = contents.seconds[contents.maker[content]]
        for other in self.children.pop(g, ()):
            self.below[other] -= own

    def _bring_back(self, op: int, chain: Chain) -> None:
        """What a chain has made and a later op needs is there again."""
        state = self.state
        for content in sorted(chain.links.made):
            self._changed(content)
            for g in state.gaps_of[content]:
                if state.kind[g] == AGAIN and state.start[g] < op < state.end[g] and state.fetch[g] == state.end[g]:
                    state.fetch[g] = op
                    self.held[op : state.end[g]] += state.bytes[g]
                    self.resident[g] = self.stale[g] = True
                    self.last[g] = self.clock
                    self._forget_children(g)

    def _changed(self, content: int) -> None:
        """A content has come or gone: what rested on it costs something else now."""
        for g in self.seen_by.get(content, ()):
            self.stale[g] = True
