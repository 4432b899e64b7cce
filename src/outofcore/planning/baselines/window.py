"""The adaptive window schedule of Hayakawa & Narihira (arXiv 2010.14109)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outofcore.analysis.gaps import full_overwrites_of, is_large, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.baselines.one_home import use_farthest_home
from outofcore.planning.policy import Asked, CheckedPolicy

# Replays of the step, after which residency at its end agrees with that at its start.
_CYCLES = 3
# Number of points at which the replay can resume.
_SNAPSHOTS = 256


@dataclass(frozen=True)
class Window(CheckedPolicy):
    """The adaptive window schedule: Hayakawa & Narihira, arXiv 2010.14109, section 3.

    It has two byte budgets: for resident bytes, and for how far ahead copies-in may run, the *window*. Before each op
    the window is extended over the next uses until either budget is full. So it reaches far over small ops and not far
    over large ones. After an op, storages without a use in the window are evicted. Room is waited for only when it is
    needed, oldest copy-out first. If a storage enters the window again, its pending copy-out is cancelled. If an op's
    results do not fit, the latest prefetches are cancelled: they may not start before the next op, and the schedule is
    made again.

    Different from the paper (see ``src/nbla/lms/swap_in_out_scheduler.cpp`` of nnabla): clean storages are evicted
    without a copy. Storages in the window at the end of a step stay resident, unless ``persist`` is False. Workspaces
    take room like results. The schedule is made again only from shortly before the first cancelled prefetch. Parameters
    are treated like other storages; storages below 64 KiB stay. Of several homes the farthest is used. Left out:
    virtual addressing, type casts and "preclear", which programs here do not need.

    Attributes:
        reach: the window in multiples of the bytes that may be resident; the paper's implementation uses 1.5.
        persist: whether storages that are resident when a step ends may stay for the next.

    >>> Window(reach=2.0)
    Window(reach=2.0, persist=True)
    >>> Window(reach=0)
    Traceback (most recent call last):
    outofcore.errors.InputError: the policy 'window': reach must be above 0, not 0
    """

    name = "window"
    reach: float = 1.5
    persist: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("reach", self.reach > 0, "above 0")

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        def plan(home_costs: Costs, room: int) -> Plan:
            return window(graph, home_costs, room, reach=self.reach, persist=self.persist)

        return (use_farthest_home(graph, costs, plan),) if costs.homes else ()


@dataclass(frozen=True)
class _UseOrder:
    """The uses of large storages over several steps.

    A *name* stands for one lifetime of a storage's contents. Storages that do not persist have another name in each
    step, and so have storages that an op overwrites as a whole while they are not held.
    """

    uses: tuple[tuple[int, int], ...]  # time and name of each
    at: tuple[tuple[int, ...], ...]  # for each op of all steps the names that it touches
    # For each op the names that it creates or overwrites as a whole, without reading them.
    fresh: tuple[frozenset[int], ...]
    dying: tuple[frozenset[int], ...]  # for each op the names that it uses last
    storage: tuple[int, ...]  # by name
    final: dict[int, int]  # by storage, its name at the end of the last step

    @staticmethod
    def of(graph: StepGraph, steps: int) -> _UseOrder:
        """List the uses of large storages in a number of consecutive steps."""
        n = len(graph.ops)
        moves = [is_large(s.bytes) and s.kind is not StorageKind.CONSTANT for s in graph.storages]
        renewed = {
            (op, s.id) for s in graph.storages for op in full_overwrites_of(graph, s.id) if op != graph.uses[s.id][0]
        }
        storage: list[int] = []
        name: dict[int, int] = {}
        last: dict[int, int] = {}  # by name
        at: list[tuple[int, ...]] = []
        fresh: list[frozenset[int]] = []
        dying: list[set[int]] = [set() for _ in range(steps * n)]
        for now in range(steps * n):
            op = graph.ops[now % n]
            touched = [s for s in op.touched if moves[s]]
            for s in touched:
                is_other = (op.id, s) in renewed or (s not in graph.persistent and op.id == graph.uses[s][0])
                if is_other and s in name:
                    dying[last[name[s]]].add(name[s])
                if is_other or s not in name:
                    name[s] = len(storage)
                    storage.append(s)
                last[name[s]] = now
            at.append(tuple(name[s] for s in touched))
            needless = (s for s in touched if s in op.creates or (op.id, s) in graph.overwrites)
            fresh.append(frozenset(name[s] for s in needless))
        for s in set(name) - graph.persistent:
            dying[last[name[s]]].add(name[s])
        uses = tuple((now, s) for now, names in enumerate(at) for s in names)
        return _UseOrder(uses, tuple(at), tuple(fresh), tuple(map(frozenset, dying)), tuple(storage), name)


@dataclass
class _ReplayState:
    used: int = 0  # bytes on the device, pending copies-out included
    ahead: int = 0  # bytes of the window
    head: int = 0  # the first use that is not in the window yet
    counts: dict[int, int] = field(default_factory=dict[int, int])  # by name, its uses in the window
    resident: set[int] = field(default_factory=set[int])
    pending: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])  # copies-out not awaited yet
    leaving: int = 0  # bytes of these
    dirty: set[int] = field(default_factory=set[int])
    last: dict[int, int] = field(default_factory=dict[int, int])  # by name, its last use so far
    released_at: dict[int, int] = field(default_factory=dict[int, int])  # by name, when its room became free
    allocated_at: dict[int, int] = field(default_factory=dict[int, int])  # by name, when its room was last taken
    entered: list[int] = field(default_factory=list[int])  # by use up to the window's end, when it entered
    decided: dict[Gap, Decision] = field(default_factory=dict[Gap, Decision])

    def copy(self) -> _ReplayState:
        return _ReplayState(
            self.used,
            self.ahead,
            self.head,
            dict(self.counts),
            set(self.resident),
            OrderedDict(self.pending),
            self.leaving,
            set(self.dirty),
            dict(self.last),
            dict(self.released_at),
            dict(self.allocated_at),
            list(self.entered),
            dict(self.decided),
        )


class _WindowReplay:
    """Replays a step several times; the decisions of the last repetition become the plan."""

    def __init__(self, graph: StepGraph, costs: Costs, limit: int, reach: int, steps: int) -> None:
        self.graph, self.costs, self.limit, self.reach, self.steps = graph, costs, limit, reach, steps
        self.order = _UseOrder.of(graph, steps)
        self.sizes = [placed_bytes(graph.storages[s].bytes) for s in self.order.storage]
        self.stops = [0] * len(self.order.uses)  # before this op a use may not enter the window
        self.state = _ReplayState()

    def run(self) -> tuple[Decision, ...]:
        """Replay all steps; return the decisions of the last one."""
        total = len(self.order.at)
        stride = total // _SNAPSHOTS + 1
        snapshots: dict[int, _ReplayState] = {}
        now = 0
        while now < total:
            if now % stride == 0:
                snapshots[now] = self.state.copy()
            resume_at = self._run_op(now)
            if resume_at is None:
                now += 1
            else:
                now = resume_at - resume_at % stride
                self.state = snapshots[now]
        return tuple(map(self._final_decision, sorted(self.state.decided)))

    def _final_decision(self, gap: Gap) -> Decision:
        """Return the decision about a gap, with the final release time if only one step is replayed."""
        decision, n = self.state.decided[gap], len(self.graph.ops)
        if gap.end < n or self.steps > 1:
            return decision
        released = self.state.released_at.get(self.order.final[gap.storage], n)
        return replace(decision, release_by=min(max(released, gap.start + 1), n))

    def _run_op(self, now: int) -> int | None:
        """Replay one op; if it does not fit, return the op from which to replay, else None."""
        state = self.state
        self._extend(now)
        op = self.graph.ops[now % len(self.graph.ops)]
        scratch = placed_bytes(self.costs.ops[op.id].workspace_bytes)
        scratch = scratch if is_large(scratch) else 0
        allocated = [s for s in self.order.at[now] if s not in state.resident]
        need = scratch + sum(self.sizes[s] for s in allocated)
        while state.used + need > self.limit:
            if not self._wait_for_oldest(now):
                return self._delay_fetches(now, state.used + need - self.limit)
        for s in allocated:
            self._allocate(s, now)
        self._evict_unused(now)
        return None

    def _extend(self, now: int) -> None:
        """Fetch storages for op ``now`` and later ops while they fit; raise ``BudgetError`` if ``now`` cannot fit."""
        state, uses = self.state, self.order.uses
        while state.head < len(uses):
            when, s = uses[state.head]
            size, enters = self.sizes[s], not state.counts.get(s)
            if when > now and (self.stops[state.head] > now or (enters and state.ahead + size > self.reach)):
                return
            if s in state.pending:
                del state.pending[s]
                state.leaving -= size
            elif enters and s not in state.resident and s not in self.order.fresh[when]:
                if state.used - state.leaving + size > self.limit:
                    if when > now:
                        return
                    raise self._too_small_error(now)
                while state.used + size > self.limit:
                    self._wait_for_oldest(now)
                self._allocate(s, now)
            if enters:
                state.ahead += size
            state.counts[s] = state.counts.get(s, 0) + 1
            state.head += 1
            state.entered.append(now)

    def _wait_for_oldest(self, now: int) -> bool:
        """Wait for the oldest pending copy out, which frees its bytes; return whether there was one."""
        state = self.state
        if not state.pending:
            return False
        s, _ = state.pending.popitem(last=False)
        state.leaving -= self.sizes[s]
        self._free(s, now)
        return True

    def _allocate(self, s: int, when: int) -> None:
        self.state.used += self.sizes[s]
        self.state.resident.add(s)
        self.state.allocated_at[s] = when

    def _free(self, s: int, when: int) -> None:
        self.state.used -= self.sizes[s]
        self.state.resident.discard(s)
        self.state.dirty.discard(s)
        self.state.released_at[s] = when

    def _delay_fetches(self, now: int, missing: int) -> int:
        """Delay the latest fetches past op ``now`` to save ``missing`` bytes; return the op from which to replay."""
        state, counts = self.state, dict(self.state.counts)
        first, at = now, state.head
        while missing > 0:
            at -= 1
            when, s = self.order.uses[at]
            if when <= now:
                raise self._too_small_error(now)
            if counts[s] == 1:
                missing -= self.sizes[s] if s in state.resident else 0
                self.stops[at] = now + 1
                first = min(first, state.entered[at])
            counts[s] -= 1
        return first

    def _too_small_error(self, now: int) -> BudgetError:
        op = self.graph.ops[now % len(self.graph.ops)]
        return BudgetError(f"op {op.id} ({op.name}) needs more than the {self.limit} bytes that the window may use")

    def _evict_unused(self, now: int) -> None:
        """Record the offloads that end at op ``now``; evict the op's storages without further uses in the window."""
        state = self.state
        op = self.graph.ops[now % len(self.graph.ops)]
        for s in self.order.at[now]:
            storage = self.order.storage[s]
            self._record_offload(s, now)
            if storage in op.mutates or storage in op.creates:
                state.dirty.add(s)
            state.last[s] = now
            state.counts[s] -= 1
            if state.counts[s]:
                continue
            state.ahead -= self.sizes[s]
            if s in state.dirty and s not in self.order.dying[now]:
                state.pending[s] = None
                state.leaving += self.sizes[s]
            else:
                self._free(s, now + 1)

    def _record_offload(self, s: int, now: int) -> None:
        """Record the offload, if any, before the use of ``s`` at op ``now``, but only in the last repetition."""
        n, state = len(self.graph.ops), self.state
        storage, before, taken_at = self.order.storage[s], state.last.get(s), state.allocated_at[s]
        base = (self.steps - 1) * n
        if now < base:
            return
        fetch = max(taken_at - base, 0)
        if before is None:
            if self.graph.storages[storage].arrives and s not in self.order.fresh[now]:
                gap = Gap(storage, -1, now - base)
                state.decided[gap] = Decision(gap, Residency.OFFLOAD, 0, fetch)
            elif storage in self.graph.persistent and now == self.graph.uses[storage][0]:
                # The only step begins and ends with an empty device.
                gap = Gap(storage, self.graph.uses[storage][-1], n + now)
                state.decided[gap] = Decision(gap, Residency.OFFLOAD, n, n + fetch)
        elif taken_at > before:
            release = max(state.released_at[s], before + 1)
            if before >= base:
                gap = Gap(storage, before - base, now - base)
                state.decided[gap] = Decision(gap, Residency.OFFLOAD, release - base, max(taken_at, release) - base)
            else:
                gap = Gap(storage, before - base + n, now - base + n)
                state.decided[gap] = Decision(gap, Residency.OFFLOAD, min(release - base + n, n), n + fetch)


def window(graph: StepGraph, costs: Costs, budget: int, *, reach: float = 1.5, persist: bool = True) -> Plan:
    """Plan a step (see ``Window``); raise ``BudgetError`` if an op by itself exceeds the budget."""
    replay = _WindowReplay(graph, costs, budget, int(budget * reach), _CYCLES if persist else 1)
    return Plan("window", budget, replay.run())
