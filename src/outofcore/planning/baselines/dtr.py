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
from outofcore.planning.policy import Asked, CheckedPolicy
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import RECOMPUTED, Chain, Choices, Snapshot, arrival_decisions, recompute_decisions
from outofcore.planning.remat.contents import StepContents

# The least time since the last use, as a share of the step.
_MIN_AGE = 1e-9
# Maximum number of simulations of a step, each with more gaps pinned.
_TRIES = 12
# Number of inspected ops of chains after which no further simulation starts.
_WORK = 100_000
# Maximum number of simulations with lower limits. If a plan exceeds the room, the limit falls by at least the room
# divided by this number.
_LOWER = 16
# Maximum number of a chain's inputs that are evicted to make it fit.
_MAX_EVICTED_INPUTS = 8


@dataclass(frozen=True)
class DTR(CheckedPolicy):
    """Evicts, whenever memory runs out, the tensor that is cheapest to recompute for its bytes and age.

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
        """Return a single variant: a function that plans by simulating greedy eviction."""
        contents = StepContents.of(graph, costs)
        whole = Choices(Problem.of(graph, costs, room_for_large(graph, costs, budget)), contents)

        def plan(room: int) -> Plan:
            """Return a plan in which large blocks take at most ``room`` bytes; raise ``BudgetError`` if that fails."""
            limit = room
            for _ in range(_LOWER):
                evicted = evict_online(whole, limit)
                choices = Choices(Problem.of(graph, costs, room), contents, like=whole)
                if evicted is None or not choices.apply_snapshot(evicted):
                    break
                over = int(choices.overload().max(initial=0))
                if not over:
                    decisions = (*arrival_decisions(choices), *recompute_decisions(choices))
                    return Plan(self.name, room, tuple(sorted(decisions, key=lambda decision: decision.gap)))
                limit -= max(over, room // _LOWER)
            raise BudgetError(
                f"greedy eviction finds no plan in which large blocks take at most {room} bytes; raise the budget, or "
                "choose another policy than dtr"
            )

        return (plan,)


def evict_online(choices: Choices, limit: int) -> Snapshot | None:
    """Simulate greedy eviction, and return the gaps to recompute; None if an op does not fit.

    ``choices`` must have every gap resident. A plan drops a storage right after the use before its eviction, and keeps
    only the last fetch before the next use, so it may take more bytes and seconds than the simulation.
    """
    # Gaps that could not be recomputed for lack of room, and similar gaps: the next simulation keeps them resident.
    pinned: frozenset[int] = frozenset()
    work = 0
    for _ in range(_TRIES):
        simulation = _GreedyEviction(choices, limit, pinned)
        snapshot = simulation.run()
        work += simulation.state.work
        if snapshot is not None or not simulation.unrecomputable or work > _WORK:
            return snapshot
        kinds = {_similarity_key(choices, g) for g in simulation.unrecomputable}
        pinned |= {g for g in choices.recomputable if _similarity_key(choices, g) in kinds}
    return None


def _similarity_key(choices: Choices, g: int) -> tuple[object, ...]:
    """Return a key that similar gaps share, such as the gaps of an unrolled network's time steps."""
    ops = choices.problem.graph.ops
    maker, reader = ops[choices.contents.maker[choices.content[g]]], ops[choices.end[g]]
    return maker.name, maker.module, reader.name, reader.module, choices.bytes[g]


@dataclass
class _GreedyEviction:
    """One simulation of greedy eviction over a step, in which ``pinned`` gaps stay resident."""

    template: Choices
    limit: int
    pinned: frozenset[int] = frozenset()
    unrecomputable: list[int] = field(
        default_factory=list[int]
    )  # gaps that could not be recomputed where they were needed
    clock: float = 0.0
    cached_chains: dict[int, Chain] = field(default_factory=dict[int, Chain])  # by resident gap, its present chain
    dependents: dict[int, set[int]] = field(
        default_factory=dict[int, set[int]]
    )  # content -> gaps with a cached chain that depends on it
    dependencies: dict[int, frozenset[int]] = field(
        default_factory=dict[int, frozenset[int]]
    )  # evicted gap -> contents that its chain depends on

    def __post_init__(self) -> None:
        like = self.template
        self.state = state = Choices(like.problem, like.contents, like=like)
        count = len(state.kind)
        self.size = np.array(state.bytes, dtype=np.float64)
        self.content = np.array(state.content, dtype=np.int64)
        self.resident = np.zeros(count, dtype=np.bool_)
        self.stale = np.zeros(count, dtype=np.bool_)  # whether the cached chain is out of date
        self.cost = np.full(count, np.inf)
        self.last = np.zeros(count)
        # By content, the seconds of evicted contents that depend on it.
        self.dependent_seconds: list[float] = [0.0] * len(like.contents.storage)
        self.opening: dict[int, list[int]] = {}
        self.closing: dict[int, list[int]] = {}
        for g in state.recomputable:
            if g in self.pinned:
                continue
            self.opening.setdefault(state.start[g], []).append(g)
            self.closing.setdefault(state.end[g], []).append(g)
        self.dying: dict[int, list[int]] = {}
        for content, op in enumerate(like.contents.gone):
            self.dying.setdefault(op, []).append(content)

    def run(self) -> Snapshot | None:
        """Simulate the step and return the gaps to recompute; None if an op does not fit."""
        state, contents = self.state, self.template.contents
        self.held = state.held.copy()  # without evicted gaps
        for op, seconds in enumerate(contents.seconds):
            due = [g for g in self.closing.get(op, ()) if state.kind[g] == RECOMPUTED and state.fetch[g] == op]
            for g in self.closing.get(op, ()):
                self.resident[g] = False
            chain = state.chain(op, due) if due else None
            need, locked = self._bytes_and_locked(op, chain)
            more = _MAX_EVICTED_INPUTS
            while not self._make_room(op, need, locked):
                # Evict an input of the chain, which then recomputes it.
                more -= 1
                if not due or more < 0 or not self._evict_cheapest_of(op, locked):
                    return self._record_failure(due)
                chain = state.chain(op, due)
                need, locked = self._bytes_and_locked(op, chain)
            if chain is not None:
                self.clock += chain.seconds
                self._mark_resident_again(op, chain)
                if not self._make_room(op, need, locked - chain.contents.made):
                    return self._record_failure(due)
            self.clock += seconds
            for g in due:
                self._forget_dependencies(g)
            for content in self.dying.get(op, ()):
                self._mark_stale(content)
            for g in self.opening.get(op, ()):
                self.resident[g] = self.stale[g] = True
                self.last[g] = self.clock
        return state.snapshot()

    def _record_failure(self, due: list[int]) -> None:
        self.unrecomputable = due

    def _bytes_and_locked(self, op: int, chain: Chain | None) -> tuple[int, frozenset[int]]:
        """Return the bytes that an op with its recomputation needs, and the contents that must not be evicted."""
        op_bytes = int(self.state.alone[op])
        if chain is None:
            return op_bytes, frozenset()
        return max(op_bytes, self.template.contents.before[op] - chain.target_bytes + chain.bytes), chain.contents.seen

    def _evict_cheapest_of(self, op: int, among: frozenset[int]) -> bool:
        """Evict the cheapest gap of the contents ``among``; return False if no such gap can be evicted."""
        allowed = self.resident & np.isin(self.content, list(among))
        return self._evict_cheapest(op, allowed)

    def _make_room(self, op: int, need: int, locked: frozenset[int]) -> bool:
        """Evict storages until ``need`` bytes are free at an op; return whether that succeeded."""
        if self.held[op] + need <= self.limit:
            return True
        allowed = self.resident.copy()
        if locked:
            for g in np.flatnonzero(allowed).tolist():
                if self.state.content[g] in locked:
                    allowed[g] = False
        while self.held[op] + need > self.limit:
            if not self._evict_cheapest(op, allowed):
                return False
        return True

    def _evict_cheapest(self, op: int, allowed: NDArray[np.bool_]) -> bool:
        """Evict the gap that is cheapest for its bytes and age; return False if no gap can be evicted."""
        min_age = _MIN_AGE * (self.clock + 1e-12)
        open_now = np.flatnonzero(allowed)
        if not len(open_now):
            return False
        for g in open_now[self.stale[open_now]].tolist():
            self._update_cost(op, g)
        score = self.cost[open_now] / (self.size[open_now] * np.maximum(self.clock - self.last[open_now], min_age))
        g = int(open_now[score.argmin()])
        if not np.isfinite(self.cost[g]):
            return False
        allowed[g] = False
        self._evict(op, g)
        return True

    def _update_cost(self, op: int, g: int) -> None:
        """Update the cost in seconds of evicting gap ``g`` at an op; infinite if the gap cannot be recomputed."""
        state = self.state
        self.stale[g] = False
        chain = state.chain(op, (g,))
        content = state.content[g]
        cached = self.cached_chains.pop(g, None)
        dependencies = frozenset[int]() if cached is None else cached.contents.seen
        new_dependencies = frozenset[int]() if chain is None else chain.contents.seen
        for dependency in dependencies - new_dependencies:
            self.dependents[dependency].discard(g)
        for dependency in new_dependencies - dependencies:
            self.dependents.setdefault(dependency, set()).add(g)
        if chain is None:
            self.cost[g] = np.inf
            return
        self.cached_chains[g] = chain
        self.cost[g] = chain.seconds + self.dependent_seconds[content]

    def _evict(self, op: int, g: int) -> None:
        """Evict gap ``g`` at an op, and raise the cost of evicting the contents that its recomputation needs."""
        state, contents = self.state, self.template.contents
        content = state.content[g]
        state.kind[g], state.fetch[g] = RECOMPUTED, state.end[g]
        self.held[op : state.end[g]] -= state.bytes[g]
        self.resident[g] = False
        chain = self.cached_chains.pop(g)
        for dependency in chain.contents.seen:
            self.dependents[dependency].discard(g)
        dependencies = chain.contents.seen - {content}
        self.dependencies[g] = dependencies
        maker_seconds = contents.seconds[contents.maker[content]]
        for ancestor in dependencies:
            self.dependent_seconds[ancestor] += maker_seconds
        self._mark_stale(content)

    def _forget_dependencies(self, g: int) -> None:
        """Undo the cost increases made by evicting gap ``g``, since it is resident again."""
        contents = self.template.contents
        content = self.state.content[g]
        maker_seconds = contents.seconds[contents.maker[content]]
        for dependency in self.dependencies.pop(g, ()):
            self.dependent_seconds[dependency] -= maker_seconds

    def _mark_resident_again(self, op: int, chain: Chain) -> None:
        """Mark evicted gaps as resident again if a recomputation (chain) has made their contents."""
        state = self.state
        for content in sorted(chain.contents.made):
            self._mark_stale(content)
            for g in state.gaps_of[content]:
                if (
                    state.kind[g] == RECOMPUTED
                    and state.start[g] < op < state.end[g]
                    and state.fetch[g] == state.end[g]
                ):
                    state.fetch[g] = op
                    self.held[op : state.end[g]] += state.bytes[g]
                    self.resident[g] = self.stale[g] = True
                    self.last[g] = self.clock
                    self._forget_dependencies(g)

    def _mark_stale(self, content: int) -> None:
        """Mark each chain that depends on a content as out of date."""
        for g in self.dependents.get(content, ()):
            self.stale[g] = True
