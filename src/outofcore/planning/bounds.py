"""A lower bound on the step time of every plan: what no policy can beat.

The relaxation of ``relaxation`` with a third choice: besides being kept or offloaded, a share of a gap
may be recomputed. That takes at least one run of the op that wrote the value, and one run serves at
most one gap of each storage that the op writes:

    minimise  T
    where     T >= compute + sum of (seconds of the writer / storages that it writes) over recomputed shares
              T >= sum of seconds out,  T >= sum of seconds in
              sum of bytes_g * kept_g over the gaps g around op i  <=  free bytes at op i

Every valid plan is a point of this polytope, so the least T is a bound. It says nothing about copies
that come too late, about addresses, or about what recomputing an op takes beyond the op itself.
With several homes, whose links work side by side, copies are taken to go at the sum of their rates: over
any time all links together move no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from outofcore.analysis.gaps import constant_bytes, is_large
from outofcore.costs import Costs, Home
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Gap, Residency
from outofcore.planning.linear import UNIT, Linear, levels
from outofcore.planning.model import GapInfo, Model
from outofcore.planning.placing import small_region_bytes
from outofcore.planning.tight import tight_ops

# The solver's answer may lie above the true minimum by its tolerance.
_TOLERANCE = 1e-6


def lower_bound_seconds(graph: StepGraph, costs: Costs, budget: int) -> float | None:
    """Seconds that a step takes at least under a budget, whatever is kept, offloaded and recomputed.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.

    Returns:
        None if no plan can hold the step within the budget.
    """
    limit = budget - small_region_bytes(graph, costs) - constant_bytes(graph)
    model = Model.of(graph, costs, limit)
    if len(model.free) and int(model.free.min()) < 0:
        return None
    least = _Bound(model, _all_together(costs)).solve()
    return None if least is None else max(costs.compute_seconds, least * (1 - _TOLERANCE))


@dataclass(frozen=True)
class Prices:
    """What the bound says of single choices.

    Attributes:
        least: the bound in seconds.
        penalties: for each gap and each choice that there is for it, by how many seconds the step takes longer at
            least if that is chosen. Penalties of several gaps add up.
    """

    least: float
    penalties: Mapping[Gap, Mapping[Residency, float]]


def prices(graph: StepGraph, costs: Costs, budget: int) -> Prices | None:
    """The bound with the reduced costs of the linear program.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of the arena.

    Returns:
        None if no plan can hold the step within the budget.
    """
    limit = budget - small_region_bytes(graph, costs) - constant_bytes(graph)
    model = Model.of(graph, costs, limit)
    if len(model.free) and int(model.free.min()) < 0:
        return None
    return _Bound(model, _all_together(costs)).prices()


def _all_together(costs: Costs) -> Home | None:
    """A home with a link that moves as much as the links of all homes side by side."""
    homes = costs.homes
    if not homes:
        return None
    return Home(
        "all",
        None,
        sum(home.bytes_per_s_out for home in homes),
        sum(home.bytes_per_s_in for home in homes),
        # Latencies of different links pass side by side as well.
        homes[0].latency_s if len(homes) == 1 else 0.0,
    )


@dataclass
class _Bound:
    """The linear program while it is being put together. Column 0 is T."""

    model: Model
    home: Home | None
    linear: Linear = field(default_factory=Linear)
    stays: dict[int, int] = field(default_factory=dict[int, int])  # gap -> the column of the share that is kept
    again: dict[int, int] = field(default_factory=dict[int, int])  # gap -> that of the share that is computed again
    share_rows: dict[int, int] = field(default_factory=dict[int, int])  # gap -> the row that adds them up

    def solve(self) -> float | None:
        """The least T; None if the program has no solution."""
        self._build()
        return None if self.linear.minimise() is None else self.linear.least()

    def prices(self) -> Prices | None:
        """The least T and what each choice adds to it; None if the program has no solution."""
        self._build()
        if self.linear.minimise() is None:
            return None
        columns, rows = self.linear.duals()
        penalties: dict[Gap, dict[Residency, float]] = {}
        for g, stay in self.stays.items():
            found = {Residency.KEEP: {stay}, Residency.OFFLOAD: set[int]()}
            if g in self.again:
                found[Residency.RECOMPUTE] = {self.again[g]}
            own = [stay, *([self.again[g]] if g in self.again else [])]
            # Without homes the row is an equation, and every choice fulfils it.
            row = rows[self.share_rows[g]] if self.home else 0.0
            penalties[self.model.gaps[g].gap] = {
                choice: sum(_beyond(columns[c], float(c in chosen)) for c in own) + _beyond(row, float(len(chosen)))
                for choice, chosen in found.items()
            }
        least = self.linear.least() * (1 - _TOLERANCE)
        return Prices(max(self.model.costs.compute_seconds, least), penalties)

    def _build(self) -> None:
        model, home, linear = self.model, self.home, self.linear
        linear.column(model.costs.compute_seconds, cost=1.0)
        stays, again = self.stays, self.again
        computing: dict[int, float] = {0: 1.0}
        gaps = [g for g, info in enumerate(model.gaps) if not info.arriving]
        writers = _writers(model.graph)
        for g in gaps:
            info = model.gaps[g]
            stays[g] = linear.column(0.0, 1.0)
            seconds = _again_seconds(model, info, writers)
            if seconds is not None:
                again[g] = linear.column(0.0, 1.0)
                computing[again[g]] = -seconds
        # What is neither kept nor computed again is away: 1 - stays - again.
        shares = {g: {stays[g]: 1.0} | ({again[g]: 1.0} if g in again else {}) for g in gaps}
        linear.row(computing, low=model.costs.compute_seconds)
        for g in gaps:
            self.share_rows[g] = linear.row(shares[g], 0.0 if home else 1.0, 1.0)
        if home is not None:
            self._copies(home, gaps, shares)
        self._memory(gaps, stays)

    def _copies(self, home: Home, gaps: list[int], shares: dict[int, dict[int, float]]) -> None:
        model, linear = self.model, self.linear
        arriving: dict[int, float] = {0: 1.0}
        leaving: dict[int, float] = {0: 1.0}
        arrivals = 0.0
        outs: dict[tuple[int, int], int] = {}
        cyclic = {model.gaps[g].gap.storage: g for g in gaps if model.gaps[g].cyclic}
        for g in gaps:
            info = model.gaps[g]
            storage = info.gap.storage
            seconds = home.in_seconds(model.graph.storages[storage].bytes)
            arrivals += seconds
            for column in shares[g]:
                arriving[column] = arriving.get(column, 0.0) + seconds
            unchanged = info.cyclic and storage not in model.changed
            if unchanged or model.graph.storages[storage].kind is StorageKind.INPUT:
                continue  # its home is up to date, or may be
            key = (storage, info.segment)
            if key not in outs:
                outs[key] = linear.column(0.0, 1.0)
                leaving[outs[key]] = -home.out_seconds(model.graph.storages[storage].bytes)
            terms = {outs[key]: 1.0} | shares[g]
            bound = 1.0
            if info.segment == 0 and not info.cyclic and storage in cyclic:
                # A copy is needed only if the storage was resident when the step began.
                bound = 0.0
                for column in shares[cyclic[storage]]:
                    terms[column] = terms.get(column, 0.0) - 1.0
            linear.row(terms, low=bound)
        linear.row(arriving, low=arrivals)
        linear.row(leaving, low=0.0)

    def _memory(self, gaps: list[int], stays: dict[int, int]) -> None:
        model = self.model
        everything = model.held(np.isin(np.arange(len(model.gaps)), gaps))
        inside = {g: model.inside(model.gaps[g]) for g in gaps}
        ops = tight_ops(model.free.tolist(), ((model.gaps[g].bytes, inside[g]) for g in gaps))
        held = levels(self.linear, ops, ((stays[g], model.gaps[g].bytes / UNIT, inside[g]) for g in gaps))
        for i, level in zip(ops, held, strict=True):
            if level is not None and everything[i] > model.free[i]:
                self.linear.row({level: 1.0}, high=float(model.free[i]) / UNIT)


def _beyond(dual: float, value: float) -> float:
    """What a value in [0, 1] costs beyond the bound at which its dual holds it."""
    return dual * value if dual > 0 else -dual * (1.0 - value)


def _writers(graph: StepGraph) -> dict[int, list[int]]:
    """For each storage the ops that write it, in order."""
    found: dict[int, list[int]] = {}
    for op in graph.ops:
        for storage in dict.fromkeys(op.mutates + op.creates):
            found.setdefault(storage, []).append(op.id)
    return found


def _again_seconds(model: Model, info: GapInfo, writers: dict[int, list[int]]) -> float | None:
    """Seconds that computing a gap's value again takes at least; None if that is impossible."""
    if info.segment == 0 or info.cyclic:
        return None
    writer = model.graph.ops[writers[info.gap.storage][info.segment - 1]]
    if not writer.rerunnable:
        return None
    served = sum(is_large(model.graph.storages[s].bytes) for s in dict.fromkeys(writer.mutates + writer.creates))
    return model.costs.ops[writer.id].seconds / max(served, 1)
