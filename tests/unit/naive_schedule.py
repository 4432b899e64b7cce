"""The schedule of copies, computed again in Python, to compare with ``remat/tuner.h``."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from outofcore.costs import Costs
from outofcore.plan import Decision, Gap, Residency
from outofcore.planning.problem import ON_DEVICE, GapInfo, Ints, Problem
from outofcore.planning.remat.chains import OFFLOADED, RECOMPUTED, Choices
from outofcore.planning.tuner import TunerState


@dataclass(frozen=True)
class Remainder:
    """A step without its recomputed gaps, and the original indices of the others."""

    problem: Problem
    gaps: list[int]
    whole: list[Gap]
    recomputed_decisions: tuple[Decision, ...]
    copying: dict[int, float]  # seconds of copies in for the recomputation before an op, if any
    op_seconds: list[float]  # seconds of each op without recomputation

    @staticmethod
    def of(choices: Choices) -> Remainder:
        problem = choices.problem
        n = len(problem.graph.ops)
        free: Ints = problem.limit - choices.need
        ops = list(problem.costs.ops)
        copying: dict[int, float] = {}
        for at, chain in choices.chains.items():
            ops[at] = replace(ops[at], seconds=ops[at].seconds + chain.seconds)
            if chain.contents.copied:
                copying[at] = sum(problem.homes[-1].in_seconds(count) for count in chain.contents.copied)
        remaining: list[GapInfo] = []
        index: list[int] = []
        recomputed: list[Decision] = []
        for g, info in enumerate(problem.gaps):
            gap = info.gap
            readers = [] if choices.kind[g] == OFFLOADED else _readers(choices, choices.content[g])
            if info.arriving:
                remaining.append(info)
                index.append(g)
            elif choices.kind[g] == RECOMPUTED:
                free[choices.fetch[g] : gap.end] -= info.bytes
                recomputed.append(Decision(gap, Residency.RECOMPUTE, gap.start + 1, choices.fetch[g]))
            elif info.cyclic:
                at_first = _readers(choices, choices.contents.first[gap.storage])
                if any(at > gap.start for at in _readers(choices, choices.content[g])) or any(
                    at < gap.end - n for at in at_first
                ):
                    problem.reserve(free, g, info.bytes)
                else:
                    remaining.append(info)
                    index.append(g)
            else:
                first = min((at for at in readers if gap.start < at < gap.end), default=gap.end)
                free[first : gap.end] -= info.bytes
                if first > gap.start + 1 or info.final:
                    short = replace(info, gap=Gap(gap.storage, gap.start, first), fetched=True)
                    remaining.append(short if first < gap.end else info)
                    index.append(g)
        remainder = replace(problem, costs=Costs(tuple(ops), problem.homes), gaps=tuple(remaining), free_bytes=free)
        return Remainder(
            remainder,
            index,
            [problem.gaps[g].gap for g in index],
            tuple(recomputed),
            copying,
            [op.seconds for op in problem.costs.ops],
        )


def _readers(choices: Choices, content: int) -> list[int]:
    chains = choices.chains.items()
    return sorted(at for at, chain in chains if content in chain.contents.seen - chain.contents.made)


@dataclass(frozen=True)
class Schedule:
    decisions: tuple[Decision, ...]
    seconds: float
    copied: float
    waited: dict[int, float]
    flowing: Ints
    starts: tuple[float, ...]


def schedule(base: Choices, state: TunerState, slack: float, passes: int) -> Schedule:
    """Schedule the copies of a state that fits, as ``Tuner.begin`` does."""
    choices = Choices(base.problem, base.contents, like=base)
    changed = [
        g for g, info in enumerate(base.problem.gaps) if not info.arriving and state.kind[g] in (RECOMPUTED, OFFLOADED)
    ]
    assert choices.apply_snapshot(tuple((g, state.kind[g], state.fetch[g]) for g in changed))
    remainder = Remainder.of(choices)
    choice = np.array([state.home[g] for g in remainder.gaps], dtype=np.int64)
    assert (remainder.problem.free_bytes - remainder.problem.resident_bytes(choice == ON_DEVICE)).min(initial=0) >= 0
    flowing: Ints = np.zeros(len(base.problem.graph.ops), dtype=np.int64)
    walk = _Walk(remainder, choice, flowing, None, slack).run()
    walk = best = _Walk(remainder, choice, walk.flowing, walk.starts, slack).run()
    for _ in range(passes - 1):
        walk = _Walk(remainder, choice, best.flowing, best.starts, slack).run()
        if walk.seconds >= best.seconds * 0.9999:
            break
        best = walk
    return best


@dataclass
class _Walk:
    remainder: Remainder
    choice: Ints
    reserved: Ints  # bytes that copies in reserve for copies out, by op
    begun: tuple[float, ...] | None
    slack: float
    release: dict[int, int] = field(default_factory=dict[int, int])
    fetch: dict[int, int] = field(default_factory=dict[int, int])
    waited: dict[int, float] = field(default_factory=dict[int, float])
    now: float = 0.0

    def __post_init__(self) -> None:
        problem, home_of = self.remainder.problem, self.choice.tolist()
        n, homes = len(problem.graph.ops), problem.homes
        self.away = [g for g, home in enumerate(home_of) if home != ON_DEVICE]
        self.home_of, self.dirty = home_of, problem.copies_needed(self.choice)
        self.end = [info.gap.end - n if info.cyclic else info.gap.end for info in problem.gaps]
        self.ins = {g: homes[home_of[g]].in_seconds(problem.gaps[g].copied_bytes) for g in self.away}
        self.outs = {g: homes[home_of[g]].out_seconds(problem.gaps[g].copied_bytes) for g in self.away if self.dirty[g]}
        self.due = {op: [g for g in self.away if problem.gaps[g].fetched and self.end[g] == op] for op in range(n)}
        self.lines = [[g for op in range(n) for g in self.due[op] if home_of[g] == home] for home in range(len(homes))]

    def _wait(self, until: float, g: int) -> None:
        if until > self.now:
            at = self.remainder.gaps[g]
            self.waited[at] = self.waited.get(at, 0.0) + until - self.now
            self.now = until

    def run(self) -> Schedule:
        problem, release, fetch, begun = self.remainder.problem, self.release, self.fetch, self.begun
        gaps, end = problem.gaps, self.end
        room: list[int] = (problem.free_bytes - problem.resident_bytes(self.choice == ON_DEVICE)).tolist()
        spare = np.array(room, dtype=np.int64) - self.reserved
        lanes, soonest = [deque(line) for line in self.lines], self._soonest()
        out_done, in_done = [0.0] * len(lanes), [0.0] * len(lanes)
        pending: list[tuple[float, int, int]] = []  # end of each copy out, and its gap
        outgoing = ahead = 0
        arrived: dict[int, float] = {}
        starts: list[float] = []
        flowing: list[int] = []

        def let_go(op: int) -> None:
            nonlocal outgoing
            g = heapq.heappop(pending)[2]
            outgoing -= gaps[g].bytes
            release[g] = op

        def bring(home: int, op: int, *, is_ahead: bool) -> None:
            nonlocal ahead
            lane = lanes[home]
            while lane:
                g = lane[0]
                info = gaps[g]
                at_home = info.cyclic or info.arriving
                if end[g] > op:
                    if not is_ahead or (begun is not None and begun[op + 1] <= soonest[g]):
                        break
                    if not at_home and (info.gap.start >= op or g not in release):
                        break
                    if room[op] - outgoing - ahead < info.bytes or int(spare[op : end[g]].min()) < info.bytes:
                        break
                    ahead += info.bytes
                    spare[op : end[g]] -= info.bytes
                else:
                    while g not in release and not at_home:
                        self._wait(pending[0][0], pending[0][2])
                        let_go(op)
                lane.popleft()
                fetch[g] = op
                arrived[g] = in_done[home] = max(in_done[home], self.now) + self.ins[g]

        for op, cost in enumerate(problem.costs.ops):
            while pending and pending[0][0] <= self.now:
                let_go(op)
            for home in range(len(lanes)):
                bring(home, op, is_ahead=home < len(lanes) - 1 or op not in self.remainder.copying)
            chain_begins = for_chain = 0.0
            if op in self.remainder.copying:
                chain_begins = max(in_done[-1], self.now)
                for_chain = in_done[-1] = chain_begins + self.remainder.copying[op]
                bring(len(lanes) - 1, op, is_ahead=True)
            for g in sorted(self.due[op], key=self.home_of.__getitem__):
                if fetch[g] < op:
                    ahead -= gaps[g].bytes
                self._wait(arrived[g], g)
            flowing.append(outgoing)
            while pending and outgoing + ahead > room[op]:
                self._wait(pending[0][0], pending[0][2])
                let_go(op)
            self.now = max(self.now, chain_begins)
            starts.append(self.now)
            self.now = max(self.now + cost.seconds, for_chain + self.remainder.op_seconds[op])
            for g in self.away:
                if gaps[g].gap.start != op or gaps[g].arriving:
                    continue
                if not self.dirty[g]:
                    release[g] = op + 1
                    continue
                home = self.home_of[g]
                out_done[home] = max(out_done[home], self.now) + self.outs[g]
                heapq.heappush(pending, (out_done[home], self.remainder.gaps[g], g))
                outgoing += gaps[g].bytes
        starts.append(self.now)
        copied = sum(self.ins[g] for g in self.away if gaps[g].fetched) + sum(self.outs.values())
        return Schedule(
            self._decisions(), max(self.now, *out_done), copied, self.waited, np.array(flowing), tuple(starts)
        )

    def _soonest(self) -> dict[int, float]:
        soonest: dict[int, float] = {}
        for line in self.lines if self.begun is not None else ():
            due = float("inf")
            for g in reversed(line):
                assert self.begun is not None
                due = min(due, self.begun[self.end[g]]) - self.ins[g]
                soonest[g] = due - self.slack * self.ins[g]
        return soonest

    def _decisions(self) -> tuple[Decision, ...]:
        whole = self.remainder.problem.graph
        n = len(whole.ops)
        decisions = list(self.remainder.recomputed_decisions)
        for g in self.away:
            info = self.remainder.problem.gaps[g]
            fetch = self.fetch[g] + (n if info.cyclic else 0) if info.fetched else info.gap.end
            release = 0 if info.arriving else max(min(self.release.get(g, n), n, fetch), info.gap.start + 1)
            decisions.append(Decision(self.remainder.whole[g], Residency.OFFLOAD, release, fetch, self.home_of[g]))
        return tuple(sorted(decisions, key=lambda decision: decision.gap))
