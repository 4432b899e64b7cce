"""A lower bound of the step time under a budget, by a linear program that relaxes all plans.

It adds to the shares of ``relaxation``, at the moments where ops begin and end:

    minimise  T
    where     T  >=  seconds of all ops + sum of waits,  T >= seconds of all copies of a link
              sum of waits  >=  sum of times_o * seconds of op o
              times_o  >=  sum of recomputed_g over the gaps of any one storage for which op o must run
              queue(t)  >=  queue(t') + (written between t' and t) - rate * (t - t')
              left(t)  >=  queue(t) - (copies of storages still in use at t)
              early(t')  >=  early(t) + (needed back between t' and t) - rate * (t - t')
              early(t)  <=  offloaded(t)
              resident(t) + sum of left(t) and early(t) over all homes  <=  free bytes at t

``queue`` are bytes written but not yet copied out. ``left`` are the bytes of the queue that only wait for the copy.
``early`` are bytes fetched before their use. Recomputing a gap runs its writer, and recursively the writers of its
inputs, unless these may be on the device or at home then. A wait precedes an op, or is anywhere in a *span* of ops that
share their moments. T also exceeds the seconds of collectives, which have their own queue.

Not modelled: addresses, blocks held until all of their bytes are copied out, and the memory of recomputation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, zip_longest

from outofcore.analysis.recipes import Content, History, ops_to_recompute
from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph
from outofcore.planning.linear_program import UNIT, add_levels, binding_ops
from outofcore.planning.placing import room_for_large
from outofcore.planning.problem import Problem
from outofcore.planning.relaxation import Relaxation

# The solver's result may exceed the true minimum by its tolerance.
_TOLERANCE = 1e-6
# Number of ops with a span of their own in steps of more than twelve times this many ops. The program grows with it,
# and more spans hardly improve the bound.
_OWN_SPANS = 50


def lower_bound_seconds(graph: StepGraph, costs: Costs, budget: int) -> float | None:
    """Return a lower bound of the seconds of a step over all plans; None if no plan fits the budget."""
    problem = Problem.of(graph, costs, room_for_large(graph, costs, budget))
    return LowerBound(problem).solve() if problem.is_feasible else None


class LowerBound(Relaxation):
    """A linear program with an optimum that no plan's step time can be below."""

    def __init__(self, problem: Problem) -> None:
        ops, costs = problem.graph.ops, problem.costs
        history = History.of(problem.graph)
        self.writers, runs = _writers(problem, history), _required_runs(problem, history)
        super().__init__(problem, runs, _spans(problem.free_bytes.tolist()), interior=True)
        # The first and the last op of each span, which may be the same, define the moments.
        last = {span: i for i, span in enumerate(self.spans)}
        self.moments = [i for span in last for i in (bisect_left(self.spans, span), last[span])]
        # The time that passes before each moment and before the end: waits and seconds of ops.
        slows = any(home.compute_slowdown for home in problem.homes)
        self.passing: list[tuple[list[int], float]] = []
        for wait, seconds in zip_longest(self.waits, self.seconds):
            self.passing.append(([wait], 0.0))
            if seconds is not None:
                self.passing.append(
                    ([self.program.add_variable(cost=1.0)] if slows or len(last) < len(ops) else [], seconds)
                )
        self.waiting = dict.fromkeys([wait for waits, _ in self.passing for wait in waits], 1.0)
        self.queue_seconds = [0.0, 0.0]
        for op, cost in zip(ops, costs.ops, strict=True):
            self.queue_seconds[op.communicates] += cost.seconds
        self._require_recomputation(runs)
        # By moment, the variables of bytes in flight. With collectives a block may wait, for one or for its address,
        # while later ops run. The bytes at a moment then differ from those at an op, so they are not modelled.
        self.flows: list[list[int]] = [[] for _ in self.moments]
        for home in range(len(problem.homes)):
            self._require_copies(home)
            if not any(op.communicates for op in ops):
                self._add_flow_out(home)
                self._add_flow_in(home)
        self._limit_memory()
        self.limit_homes()

    def solve(self) -> float | None:
        """Return the bound in seconds; None if no plan is possible."""
        if self.program.minimise() is None:
            return None
        return max(*self.queue_seconds, (self.queue_seconds[0] + self.program.objective()) * (1 - _TOLERANCE))

    def _require_recomputation(self, runs: Mapping[int, tuple[int, ...]]) -> None:
        """Require that the step takes at least the seconds of its ops and its recomputation."""
        ops, costs = self.problem.graph.ops, self.problem.costs
        served: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for g, needed in runs.items():
            for op in needed:
                served[op][self.problem.gaps[g].gap.storage][self.recomputed[g]] = -1.0
        took: list[dict[int, float]] = [{}, {}]
        for op, storages in served.items():
            times = self.program.add_variable()
            took[ops[op].communicates][times] = -costs.ops[op].seconds
            for terms in storages.values():
                self.program.add_row({times: 1.0} | terms, low=0.0)
        for seconds, terms in zip(self.queue_seconds, took, strict=True):
            self.program.add_row(self.waiting | terms, low=seconds - self.queue_seconds[0])

    def _require_copies(self, home: int) -> None:
        """Require that the step takes at least the seconds of all copies to a home, and of all copies from it."""
        place = self.problem.homes[home]
        out, back, low = dict(self.waiting), dict(self.waiting), -self.queue_seconds[0]
        for g, info in enumerate(self.problem.gaps):
            if (g, home) in self.copied_out:
                out[self.copied_out[g, home]] = -place.out_seconds(info.copied_bytes)
            if info.fetched and home in info.homes:
                constant, terms = self.share_at_home(g, home)
                low += constant * place.in_seconds(info.copied_bytes)
                for column, factor in terms.items():
                    back[column] = back.get(column, 0.0) - factor * place.in_seconds(info.copied_bytes)
        self.program.add_row(out, low=-self.queue_seconds[0])
        self.program.add_row(back, low=low)

    def _add_flow_out(self, home: int) -> None:
        """Add variables and constraints for the bytes that await a copy out to a home at each moment."""
        program, rate = self.program, self.problem.homes[home].bytes_per_s_out / UNIT
        written: list[dict[int, float]] = [{} for _ in self.passing]
        used: list[tuple[int, float, tuple[tuple[int, int], ...]]] = []
        for (g, at), copy in self.copied_out.items():
            if at == home:
                info, writer = self.problem.gaps[g], self.writers.get(g, -1)
                written[bisect_right(self.moments, writer)][copy] = -info.copied_bytes / UNIT
                used.append((copy, info.copied_bytes / UNIT, ((writer + 1, info.gap.start + 1),)))
        queue = [program.add_variable() for _ in self.moments]
        for m, (waits, seconds) in enumerate(self.passing):
            row = written[m] | dict.fromkeys(waits, rate)
            row |= {queue[m]: 1.0} if m < len(queue) else {}
            row |= {queue[m - 1]: -1.0} if m else {}
            program.add_row(row, low=-rate * seconds)
        for m, level in enumerate(add_levels(program, self.moments, used)):
            pending = queue[m] if level is None else program.add_variable()
            if level is not None:
                program.add_row({pending: 1.0, queue[m]: -1.0, level: 1.0}, low=0.0)
            self.flows[m].append(pending)

    def _add_flow_in(self, home: int) -> None:
        """Add variables and constraints for the bytes fetched from a home but not yet used at each moment."""
        program, rate, n = self.program, self.problem.homes[home].bytes_per_s_in / UNIT, len(self.spans)
        due: list[dict[int, float]] = [{} for _ in self.passing]
        due_always, there = [0.0] * len(self.passing), [0.0] * len(self.passing)
        offloaded: list[tuple[int, float, tuple[tuple[int, int], ...]]] = []
        for g, info in enumerate(self.problem.gaps):
            if info.fetched and home in info.homes:
                constant, terms = self.share_at_home(g, home)
                size, end = info.copied_bytes / UNIT, info.gap.end % n
                at = bisect_left(self.moments, end)
                since = 0 if info.cyclic else info.gap.start + 1
                due_always[at] += constant * size
                for m in range(bisect_left(self.moments, since), at):
                    there[m] += constant * size
                for column, factor in terms.items():
                    due[at][column] = due[at].get(column, 0.0) - factor * size
                    offloaded.append((column, factor * size, ((since, end),)))
        early = [program.add_variable() for _ in self.moments]
        for m, (waits, seconds) in enumerate(self.passing):
            row = due[m] | dict.fromkeys(waits, rate)
            row |= {early[m]: -1.0} if m < len(early) else {}
            row |= {early[m - 1]: 1.0} if m else {}
            program.add_row(row, low=due_always[m] - rate * seconds)
        for m, level in enumerate(add_levels(program, self.moments, offloaded)):
            program.add_row({early[m]: 1.0} | ({} if level is None else {level: -1.0}), high=there[m])
            self.flows[m].append(early[m])

    def _limit_memory(self) -> None:
        """Require that bytes that are resident or being copied fit the free memory."""
        problem, stays = self.problem, self.resident_terms()
        binding = binding_ops(problem.free_bytes.tolist(), [stay[1:] for stay in stays])
        rows = sorted([*zip(self.moments, self.flows, strict=True), *((i, []) for i in binding)])
        resident = add_levels(
            self.program, [i for i, _ in rows], [(column, size / UNIT, at) for column, size, at in stays]
        )
        for (i, flows), level in zip(rows, resident, strict=True):
            terms = dict.fromkeys(flows if level is None else [*flows, level], 1.0)
            if terms:
                self.program.add_row(terms, high=float(problem.free_bytes[i]) / UNIT)


def _writers(problem: Problem, history: History) -> dict[int, int]:
    """Map each gap to the op of this step that wrote its contents; leave out gaps with older contents."""
    gaps = {g: problem.gaps[g] for g in problem.movable}
    return {g: history.writes[info.gap.storage][info.segment - 1] for g, info in gaps.items() if info.segment}


def _required_runs(problem: Problem, history: History) -> dict[int, tuple[int, ...]]:
    """Map each recomputable gap to the ops that any recomputation of it must run."""
    graph = problem.graph
    last_use: dict[Content, int] = {}
    for storage, uses in enumerate(graph.uses):
        writes = history.writes[storage]
        for op in uses:
            # A use that writes reads the version before, and creates the next.
            version = bisect_left(writes, op)
            last_use[storage, version] = op
            if version < len(writes) and writes[version] == op:
                last_use[storage, version + 1] = op
    at_home = {(info.gap.storage, info.segment) for info in problem.gaps if info.homes}
    lasting = {s.id for s in graph.storages if s.id not in graph.creator} | set(graph.outputs)

    def may_be_held(content: Content, start: int) -> bool:
        return content[0] in lasting or content in at_home or last_use.get(content, -1) > start

    runs: dict[int, tuple[int, ...]] = {}
    for g in problem.movable:
        info = problem.gaps[g]
        if info.segment and not info.cyclic and not info.final:
            may_hold = partial(may_be_held, start=info.gap.start)
            with suppress(GraphError):
                runs[g] = ops_to_recompute(history, [(info.gap.storage, info.segment)], may_hold)
    return runs


def _spans(free: Sequence[int]) -> list[int]:
    """Group ops into spans, short where few bytes are free; return the number of each op's span."""
    width = 1 if len(free) <= 12 * _OWN_SPANS else -(-len(free) // _OWN_SPANS)
    tight = {min(range(i, min(i + width, len(free))), key=free.__getitem__) for i in range(0, len(free), width)}
    begins = [i in tight or i - 1 in tight for i in range(len(free))]
    return list(accumulate(begins[1:], initial=0))[: len(free)]
