"""Greedy eviction by recomputation cost: Dynamic Tensor Rematerialization (arXiv 2006.09616)."""

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

# The least time since the last use, as a share of the step.
_LEAST_STALE = 1e-9
# Maximum number of simulations of a step, each with more gaps pinned.
_TRIES = 12
# Number of inspected ops of chains after which no further simulation starts.
_WORK = 100_000
# Maximum number of simulations with lower limits. If a plan exceeds the room, the limit falls by at least the room
# divided by this number.
_LOWER = 16
# Maximum number of a chain's inputs that are evicted to make it fit.
_MORE = 8


@dataclass(frozen=True)
class DTR(Checked):
    """Evicts the tensor that is cheapest to recompute for its bytes and its age whenever room is needed.

    Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021, arXiv 2006.09616), sections 2 and 4.1. As the step
    runs, each allocation that does not fit evicts the tensor with the smallest

        h_DTR = (seconds of the op that made it and of its evicted neighbours) / (bytes x seconds since its last use)

    and an op with an evicted input first recomputes it, recursively. Neighbours are the evicted storages that it is
    made from, or that are made from it, through evicted ones.

        forward    a == b == c == d == e ==     no room at e: evict the cheapest for its age of a to d, here b
        backward   e, d, c, [b from a], a       [ ] recomputed right before its use, which may evict others

    Different from the paper: evictions are simulated before the step and become a plan, which is less detailed than a
    run (``evict_online``). If the plan takes too many bytes, the step is simulated with fewer. Each chain that needs a
    freed storage makes it again. Storages that exist before the step, and those below 64 KiB, stay on the device. The
    cheaper approximations of the heuristic are left out.

    >>> DTR().name
    'dtr'
    """

    name = "dtr"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
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
    """Simulate greedy eviction, and return the gaps that are then recomputed; None if an op cannot fit.

    A plan drops a storage right after the use before its eviction, and keeps only the last fetch before the next use.
    So it may take more bytes and seconds than the simulation. If an evicted storage cannot be recomputed for lack of
    room, the simulation starts again with it and similar storages pinned. ``choices`` must have every gap resident.
    """
    pinned: frozenset[int] = frozenset()
    work = 0
    for _ in range(_TRIES):
        simulation = _Following(choices, limit, pinned)
        snapshot = simulation.run()
        work += simulation.state.work
        if snapshot is not None or not simulation.missed or work > _WORK:
            return snapshot
        kinds = {_kind(choices, g) for g in simulation.missed}
        pinned |= {g for g in choices.free if _kind(choices, g) in kinds}
    return None


def _kind(choices: Choices, g: int) -> tuple[object, ...]:
    """Return a key that similar gaps share, such as the gaps of an unrolled network's time steps."""
    ops = choices.problem.graph.ops
    maker, reader = ops[choices.contents.maker[choices.content[g]]], ops[choices.end[g]]
    return maker.name, maker.module, reader.name, reader.module, choices.bytes[g]


@dataclass
class _Following:
    like: Choices
    limit: int
    pinned: frozenset[int] = frozenset()
    missed: list[int] = field(default_factory=list[int])  # gaps that could not be recomputed where they were needed
    clock: float = 0.0
    known: dict[int, Chain] = field(default_factory=dict[int, Chain])  # by resident gap, its present chain
    seen_by: dict[int, set[int]] = field(
        default_factory=dict[int, set[int]]
    )  # content -> gaps with a cached chain that depends on it
    children: dict[int, frozenset[int]] = field(
        default_factory=dict[int, frozenset[int]]
    )  # evicted gap -> contents that its chain depends on

    def __post_init__(self) -> None:
        like = self.like
        self.state = state = Choices(like.problem, like.contents, like=like)
        count = len(state.kind)
        self.can = np.array(state.can, dtype=np.bool_)
        self.size = np.array(state.bytes, dtype=np.float64)
        self.content = np.array(state.content, dtype=np.int64)
        self.resident = np.zeros(count, dtype=np.bool_)
        self.stale = np.zeros(count, dtype=np.bool_)  # whether the cached chain is out of date
        self.cost = np.full(count, np.inf)
        self.last = np.zeros(count)
        # By content, the seconds of evicted contents that depend on it.
        self.below: list[float] = [0.0] * len(like.contents.storage)
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
        """Simulate the step; None, with the gaps in ``missed``, if an op does not fit."""
        state, contents = self.state, self.like.contents
        self.held = state.held.copy()  # without evicted gaps
        for op, seconds in enumerate(contents.seconds):
            due = [g for g in self.closing.get(op, ()) if state.kind[g] == AGAIN and state.fetch[g] == op]
            for g in self.closing.get(op, ()):
                self.resident[g] = False
            chain = state.chain(op, due) if due else None
            need, locked = self._takes(op, chain)
            more = _MORE
            while not self._make_room(op, need, locked):
                # Evict an input of the chain, which then recomputes it.
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
        """Return the bytes of an op with its chain, and the contents that must stay for it."""
        op_bytes = int(self.state.alone[op])
        if chain is None:
            return op_bytes, frozenset()
        return max(op_bytes, self.like.contents.before[op] - chain.held + chain.bytes), chain.links.seen

    def _evict_one(self, op: int, among: frozenset[int]) -> bool:
        """Evict the cheapest of these contents by the heuristic; return False if there is no such gap."""
        allowed = self.resident & np.isin(self.content, list(among))
        return self._evict_first(op, allowed)

    def _make_room(self, op: int, need: int, locked: frozenset[int]) -> bool:
        """Evict by the heuristic until an op with its chain fits; return False if no more can be evicted."""
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
        """Evict the allowed gap with the smallest heuristic and disallow it; return False without one."""
        min_age = _LEAST_STALE * (self.clock + 1e-12)
        open_now = np.flatnonzero(allowed)
        if not len(open_now):
            return False
        for g in open_now[self.stale[open_now]].tolist():
            self._rate(op, g)
        score = self.cost[open_now] / (self.size[open_now] * np.maximum(self.clock - self.last[open_now], min_age))
        g = int(open_now[score.argmin()])
        if not np.isfinite(self.cost[g]):
            return False
        allowed[g] = False
        self._evict(op, g)
        return True

    def _rate(self, op: int, g: int) -> None:
        state = self.state
        self.stale[g] = False
        chain = state.chain(op, (g,))
        content = state.content[g]
        cached = self.known.pop(g, None)
        dependencies = frozenset[int]() if cached is None else cached.links.seen
        new_dependencies = frozenset[int]() if chain is None else chain.links.seen
        for dependency in dependencies - new_dependencies:
            self.seen_by[dependency].discard(g)
        for dependency in new_dependencies - dependencies:
            self.seen_by.setdefault(dependency, set()).add(g)
        if chain is None:
            self.cost[g] = np.inf
            return
        self.known[g] = chain
        self.cost[g] = chain.seconds + self.below[content]

    def _evict(self, op: int, g: int) -> None:
        state, contents = self.state, self.like.contents
        content = state.content[g]
        state.kind[g], state.fetch[g] = AGAIN, state.end[g]
        self.held[op : state.end[g]] -= state.bytes[g]
        self.resident[g] = False
        chain = self.known.pop(g)
        for dependency in chain.links.seen:
            self.seen_by[dependency].discard(g)
        dependencies = chain.links.seen - {content}
        self.children[g] = dependencies
        maker_seconds = contents.seconds[contents.maker[content]]
        for ancestor in dependencies:
            self.below[ancestor] += maker_seconds
        self._changed(content)

    def _forget_children(self, g: int) -> None:
        contents = self.like.contents
        content = self.state.content[g]
        maker_seconds = contents.seconds[contents.maker[content]]
        for child in self.children.pop(g, ()):
            self.below[child] -= maker_seconds

    def _bring_back(self, op: int, chain: Chain) -> None:
        """Mark contents as resident that a chain has made and a later op needs."""
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
        """Mark the chains out of date that depend on a content that was evicted or made."""
        for g in self.seen_by.get(content, ()):
            self.stale[g] = True
