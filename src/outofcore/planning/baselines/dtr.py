"""Greedy eviction as the step runs: Dynamic Tensor Rematerialization (arXiv 2006.09616), decided before the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.placing import room_for_large
from outofcore.planning.policy import Asked, Checked
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import AGAIN, Chain, Choices, Snapshot, arrivals, decisions_again
from outofcore.planning.remat.contents import Contents

# Seconds since the last use count for no less than this share of the step.
_LEAST_STALE = 1e-9
# How often a step is followed, each time with more that must be kept.
_TRIES = 12
# Ops of chains that are looked at, at most, before it is followed once more.
_WORK = 100_000
# How often a step is followed with fewer bytes where its plan takes more than allowed; each time they fall by one
# part in so many, or more.
_LOWER = 16
# How many contents may go from which a chain starts, one by one.
_MORE = 8


@dataclass(frozen=True)
class DTR(Checked):
    """Whatever is cheapest to compute again for its bytes and its age is evicted when room is needed.

    Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021, arXiv 2006.09616), sections 2 and 4.1: as the step
    runs, each allocation that does not fit evicts the tensor for which the heuristic h_DTR is least,

        h = (seconds of the op that made it and of its evicted neighbours) / (bytes x seconds since its last use)

    and an op whose input was evicted first computes that again, with what it takes.

        forward    a == b == c == d == e ==     at e there is no room: of a to d the cheapest for its age goes, say b
        backward   e, d, c, [b from a], a       [ ] computed again right before it is used; it may evict in its turn

    Neighbours are evicted storages that it is made from, and those that are made from it, each through evicted ones.

    Different from the paper: evictions are decided before the step runs, with the costs of its ops, and become a plan,
    which says less than a run does (``evict_online``). A storage is freed after its last use, and each chain of runs
    that needs it makes it again. Where the plan takes more bytes than allowed, the step is followed with fewer.
    What exists before the step stays, nothing is copied but inputs and outputs, and storages below 64 KiB stay. Left
    out: the cheaper approximations of the heuristic, since planning has the time.

    >>> DTR().name
    'dtr'
    """

    name = "dtr"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        """The one way there is."""
        contents = Contents.of(graph, costs)
        whole = Choices(Problem.of(graph, costs, room_for_large(graph, costs, budget)), contents)

        def plan(room: int) -> Plan:
            limit = room
            for _ in range(_LOWER):
                evicted = evict_online(whole, limit)
                choices = Choices(Problem.of(graph, costs, room), contents, like=whole)
                if evicted is None or not choices.begin(evicted):
                    break
                over = int(choices.over().max(initial=0))
                if not over:
                    decisions = (*arrivals(choices), *decisions_again(choices))
                    return Plan(self.name, room, tuple(sorted(decisions, key=lambda decision: decision.gap)))
                limit -= max(over, room // _LOWER)
            raise BudgetError(f"greedy eviction finds no plan in which large blocks take {room} bytes")

        return (plan,)


def evict_online(choices: Choices, limit: int) -> Snapshot | None:
    """Follow a step with greedy eviction, and return the gaps that are then recomputed.

    They are a change to choices in which all are kept. The change says less than was followed: what has been evicted
    between two uses is dropped after the first of them, and of several times that it is there again between two uses
    only the last remains. So it may take more bytes, and more seconds. Where what was evicted cannot be recomputed for
    lack of room, the step is followed once more from the start, with that kept, and all that is made and used alike.

    Args:
        choices: of the step; only read.
        limit: bytes of large blocks that may be held.

    Returns:
        None if an op does not fit with all evicted that can be.
    """
    pinned: frozenset[int] = frozenset()
    work = 0
    for _ in range(_TRIES):
        following = _Following(choices, limit, pinned)
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
        self.state = state = Choices(like.problem, like.contents, like=like)
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
        found = state.chain(op, (g,))
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
