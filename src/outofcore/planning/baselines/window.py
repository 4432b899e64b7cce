"""The adaptive window schedule of Hayakawa & Narihira (arXiv 2010.14109).

Two byte budgets rule it: what may be resident, and how far ahead copies-in may run, the *window*.
Before each op the window is extended over the coming uses until either is full, so that it reaches
far over small ops and not far over large ones. After an op, what has no use within the window leaves;
room is waited for oldest copy-out first, and only when it is needed. A copy-out that nobody has
waited for yet is cancelled if its storage enters the window again. Where an op's own outputs do not
fit, the head of the window is pulled back.

Different from the paper: a storage whose home copy is up to date leaves without a copy; residency
persists over the end of a step, as far as the window reaches (``persist=False`` gives the paper's
behaviour, where everything leaves); pulling back takes back the latest prefetch directly where the
paper's implementation restarts with a stop mark, which comes to the same; and small storages
(below 64 KiB) always stay. Left out: virtual addressing, since blocks have planned addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from outofcore.analysis.gaps import is_large, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency

# How often the step is replayed until residency at its end agrees with that at its start.
_CYCLES = 3


@dataclass
class _Window:
    graph: StepGraph
    costs: Costs
    limit: int  # bytes of large blocks that may be resident
    reach: int  # bytes of the window
    cycles: int
    used: int = 0
    ahead: int = 0  # bytes of the storages in the window
    tail: int = 0  # the first use that is not in the window yet
    counts: dict[int, int] = field(default_factory=dict[int, int])  # uses of a storage in the window
    resident: set[int] = field(default_factory=set[int])
    pending: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])  # copies-out not waited for
    dirty: set[int] = field(default_factory=set[int])
    last: dict[int, int] = field(default_factory=dict[int, int])  # storage -> its last use so far
    left: dict[int, int] = field(default_factory=dict[int, int])  # storage -> when its room was free
    fetched: dict[int, int] = field(default_factory=dict[int, int])
    first_fetch: dict[int, int] = field(default_factory=dict[int, int])  # in a step that starts with nothing
    decided: dict[Gap, Decision] = field(default_factory=dict[Gap, Decision])

    def __post_init__(self) -> None:
        graph = self.graph
        sizes = [
            placed_bytes(s.bytes) if is_large(s.bytes) and s.kind is not StorageKind.CONSTANT else 0
            for s in graph.storages
        ]
        # What does not persist is another thing in each step: it gets a name of its own in each.
        count, n = len(sizes), len(graph.ops)
        self.sizes = sizes * self.cycles
        self.touched: list[tuple[int, ...]] = []
        for cycle in range(self.cycles):
            name = [s if s in graph.persistent else s + cycle * count for s in range(count)]
            self.touched += [tuple(name[s] for s in op.touched if sizes[s]) for op in graph.ops]
        self.order = [(now, s) for now, touched in enumerate(self.touched) for s in touched]
        self.created = [frozenset(op.creates) for op in graph.ops]
        self.last_in_step = {s: uses[-1] for s, uses in enumerate(graph.uses) if uses}
        self.real = count
        self.steps = n

    def run(self) -> tuple[Decision, ...]:
        n = self.steps
        for now in range(self.cycles * n):
            self._extend(now)
            op = self.graph.ops[now % n]
            scratch = placed_bytes(self.costs.ops[op.id].workspace_bytes)
            scratch = scratch if is_large(scratch) else 0
            need = scratch + sum(self.sizes[s] for s in op.creates)
            while self.used + need > self.limit:
                if not self._wait_for_oldest(now) and not self._pull_back(now):
                    raise BudgetError(
                        f"op {op.id} ({op.name}) needs more than the {self.limit} bytes that the window policy may use"
                    )
            self.used += need - scratch
            self.resident.update(s for s in self.touched[now] if s % self.real in self.created[op.id])
            self._leave(now)
        return tuple(self.decided[gap] for gap in sorted(self.decided))

    def _extend(self, now: int) -> None:
        n = self.steps
        while self.tail < len(self.order):
            when, storage = self.order[self.tail]
            size = self.sizes[storage]
            enters = not self.counts.get(storage)
            if when > now and enters and self.ahead + size > self.reach:
                return
            if storage in self.pending:
                del self.pending[storage]
            elif enters and storage not in self.resident and storage % self.real not in self.created[when % n]:
                while self.used + size > self.limit:
                    if not self._wait_for_oldest(now) and (when > now or not self._pull_back(now)):
                        break
                if self.used + size > self.limit:
                    if when > now:
                        return
                    raise BudgetError(f"op {when % n} does not fit the {self.limit} bytes of the window policy")
                self.used += size
                self.resident.add(storage)
                self.fetched[storage] = now
            if enters:
                self.ahead += size
            self.counts[storage] = self.counts.get(storage, 0) + 1
            self.tail += 1

    def _wait_for_oldest(self, now: int) -> bool:
        if not self.pending:
            return False
        storage, _ = self.pending.popitem(last=False)
        self._free(storage, now)
        self.dirty.discard(storage)
        return True

    def _free(self, storage: int, when: int) -> None:
        self.used -= self.sizes[storage]
        self.resident.discard(storage)
        self.left[storage] = when

    def _pull_back(self, now: int) -> bool:
        """Take the latest use out of the window; what was to be resident for it leaves."""
        while self.tail and self.order[self.tail - 1][0] > now:
            self.tail -= 1
            _, storage = self.order[self.tail]
            self.counts[storage] -= 1
            if self.counts[storage]:
                continue
            self.ahead -= self.sizes[storage]
            if storage not in self.resident:
                continue
            if self.fetched.get(storage, -2) > self.last.get(storage, -1):
                # It was fetched for this very use: as if it had never been.
                self.used -= self.sizes[storage]
                self.resident.discard(storage)
                del self.fetched[storage]
            elif storage in self.dirty:
                self.pending[storage] = None
                self._wait_for_oldest(now)
            else:
                self._free(storage, now)
            return True
        return False

    def _leave(self, now: int) -> None:
        """After an op: note what was decided about the gaps that end here, and let go."""
        index = now % self.steps
        op = self.graph.ops[index]
        for storage in self.touched[now]:
            real = storage % self.real
            self._decide(storage, now)
            if real in op.mutates or real in op.creates:
                self.dirty.add(storage)
            self.last[storage] = now
            self.counts[storage] -= 1
            if index == self.last_in_step[real] and real not in self.graph.persistent:
                self._free(storage, now + 1)
                self.dirty.discard(storage)
            elif not self.counts[storage]:
                if storage in self.dirty:
                    self.pending[storage] = None
                else:
                    self._free(storage, now + 1)
            if not self.counts[storage]:
                self.ahead -= self.sizes[storage]

    def _decide(self, storage: int, now: int) -> None:
        """Record the decision about the gap that ends with this use, in the last of the replayed steps."""
        n, real = self.steps, storage % self.real
        before, fetched = self.last.get(storage), self.fetched.get(storage)
        base = now - now % n
        if base != (self.cycles - 1) * n or fetched is None:
            return
        fetch = max(fetched - base, 0)
        if before is None:
            if self.graph.storages[real].kind is StorageKind.INPUT:
                gap = Gap(real, -1, now - base)
                self.decided[gap] = Decision(gap, Residency.OFFLOAD, 0, fetch)
            else:
                self.first_fetch[real] = fetch
            return
        if fetched <= before:
            return
        release = max(self.left[storage], before + 1)
        if before >= base:
            gap = Gap(real, before - base, now - base)
            self.decided[gap] = Decision(gap, Residency.OFFLOAD, release - base, max(fetched, release) - base)
        else:
            gap = Gap(real, before - base + n, now - base + n)
            self.decided[gap] = Decision(gap, Residency.OFFLOAD, min(release - base + n, n), n + fetch)


def window(graph: StepGraph, costs: Costs, budget: int, *, reach: float = 1.5, persist: bool = True) -> Plan:
    """Plan a step by the adaptive window.

    Args:
        graph: the step.
        costs: of which only the workspaces matter here.
        budget: bytes of large blocks (64 KiB and more) that may be resident.
        reach: the window in multiples of ``budget``; the paper's implementation takes 1.5.
        persist: let residency persist over the end of a step.

    Raises:
        BudgetError: an op needs more than the budget by itself.
    """
    cycles = _CYCLES if persist else 1
    state = _Window(graph, costs, budget, int(budget * reach), cycles)
    if persist:
        return Plan("window", budget, state.run())
    decisions = list(state.run())
    n = len(graph.ops)
    for storage in sorted(graph.persistent):
        uses = graph.uses[storage]
        if uses and state.sizes[storage]:
            fetch = n + min(state.first_fetch.get(storage, uses[0]), uses[0])
            gap = Gap(storage, uses[-1], n + uses[0])
            decisions.append(Decision(gap, Residency.OFFLOAD, n, fetch))
    return Plan("window", budget, tuple(decisions))
