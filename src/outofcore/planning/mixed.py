"""Computing again and offloading in one plan.

Once it is known what is computed again (``chains``), the rest of a step is a step of its own: its ops last as long as
they and the chains before them, what is held for chains takes room, and the gaps that are computed again are gone. In
that step it is decided what to offload, by two relaxations (``streams``, ``relaxation``), and when, by a
``rehearsal``, which is also what the choices are compared by.

A chain of runs reads what it needs at its time, not at the time of the next use in the step. So an
offloaded gap has to be back when the first chain reads it: in the step of the rest it ends there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outofcore.costs import Costs
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.chains import AGAIN, AWAY, KEPT, Choices
from outofcore.planning.contents import AT_HOME
from outofcore.planning.model import GapInfo, Ints, Model
from outofcore.planning.rehearsal import Rehearsal, rehearse
from outofcore.planning.relaxation import relax
from outofcore.planning.streams import solve
from outofcore.planning.tuning import lighten, tune, value

# How many times its seconds a copy is charged for in the simpler relaxation.
_TRANSITS = (1.0, 0.0)
# What a second of copying counts at least beside a second of the step.
_WEIGHT = 1e-3
# How many ops the rehearsals may run through, by which choices are tuned once more when room is to be spared.
_RETUNED = 24_000
# But no more rehearsals than this: of tiny steps a plan is placed as quickly as it is rehearsed.
_MOST_RETUNED = 120
# How often things are changed because they take too much room.
_EASINGS = 60


@dataclass(frozen=True)
class Rest:
    """What there is to decide once it is known what is computed again.

    Attributes:
        model: the step of the rest.
        whole: by a gap of that step, the gap of the true step, where they differ.
        again: the decisions of what is computed again.
    """

    model: Model
    whole: dict[Gap, Gap]
    again: tuple[Decision, ...]

    @staticmethod
    def of(choices: Choices, model: Model) -> Rest:
        """The rest of a step.

        Args:
            choices: what is computed again.
            model: the step under its true limit.
        """
        n = len(model.graph.ops)
        free: Ints = model.limit - choices.need
        seconds = [cost.seconds for cost in model.costs.ops]
        for at, chain in choices.chains.items():
            seconds[at] += chain.seconds
            if model.home is not None:
                seconds[at] += sum(model.home.in_seconds(count) for count in chain.copied)
        left: list[GapInfo] = []
        whole: dict[Gap, Gap] = {}
        for g, info in enumerate(model.gaps):
            gap = info.gap
            readers = [] if choices.kind[g] == AWAY else _readers(choices, choices.content[g])
            if choices.kind[g] == AGAIN:
                free[choices.fetch[g] : gap.end] -= info.bytes
            elif info.arriving:
                left.append(info)
            elif info.cyclic:
                at_first = choices.contents.first[gap.storage]
                is_read = any(at > gap.start for at in readers)
                if is_read or any(at < gap.end - n for at in _readers(choices, at_first)):
                    for first, last in model.inside(info):
                        free[first:last] -= info.bytes
                else:
                    left.append(info)
            else:
                first = min((at for at in readers if gap.start < at < gap.end), default=gap.end)
                free[first : gap.end] -= info.bytes
                shorter = replace(info, gap=Gap(gap.storage, gap.start, first))
                if first < gap.end:
                    whole[shorter.gap] = gap
                if first > gap.start + 1:
                    left.append(shorter)
        ops = tuple(replace(cost, seconds=s) for cost, s in zip(model.costs.ops, seconds, strict=True))
        times = (0.0, *accumulate(seconds))
        rest = replace(model, costs=Costs(ops, model.costs.homes), gaps=tuple(left), free=free, times=times)
        return Rest(rest, whole, again_decisions(choices))

    def plan(self, rehearsal: Rehearsal) -> Plan:
        """The plan of the true step that does what was rehearsed for the rest."""
        found = (replace(d, gap=self.whole.get(d.gap, d.gap)) for d in rehearsal.decisions)
        return Plan("auto", self.model.limit, tuple(sorted((*self.again, *found), key=lambda d: d.gap)))


def eased(choices: Choices, model: Model) -> Rest | None:
    """The rest of a step, with less computed again where that takes too much room; None if it always does.

    What a chain reads need not be back by then: the chain can copy it in for itself. What is computed again early need
    not be. And what takes too long a chain can be offloaded after all.
    """
    for _ in range(_EASINGS):
        rest = Rest.of(choices, model)
        short = np.flatnonzero(rest.model.free < 0)
        if not len(short):
            return rest
        changed: set[int] = set()
        for at in short.tolist():
            if not any(choices.start[g] < at <= choices.end[g] for g in changed):
                g = _easing(choices, at)
                if g is None:
                    return None
                changed.add(g)
    return None


def _easing(choices: Choices, at: int) -> int | None:
    """Make room before an op by changing a gap, which is told; None if no change does."""
    gaps = choices.model.gaps
    over = [g for g, info in enumerate(gaps) if info.gap.start < at < info.gap.end and not info.arriving]
    over = [g for g in over if not gaps[g].cyclic]
    read = [g for g in over if choices.kind[g] == KEPT and _readers(choices, choices.content[g])]
    read = [g for g in read if min(_readers(choices, choices.content[g])) <= at]
    early = [g for g in over if choices.kind[g] == AGAIN and choices.fetch[g] <= at]
    for options, kind in ((early, AGAIN), (read, AWAY)):
        for g in sorted(options, key=lambda g: (-choices.bytes[g], g)):
            if choices.set(g, kind, choices.end[g]) is not None:
                return g
    for g in sorted(choices.targets.get(at, ())):
        if choices.set(g, KEPT, choices.end[g]) is not None:
            return g
    return None


def again_decisions(choices: Choices) -> tuple[Decision, ...]:
    """The decisions of what is computed again."""
    gaps = choices.model.gaps
    return tuple(
        Decision(gaps[g].gap, Residency.RECOMPUTE, choices.start[g] + 1, choices.fetch[g])
        for g in choices.free
        if choices.kind[g] == AGAIN
    )


def _readers(choices: Choices, content: int) -> list[int]:
    """Ops before which chains read a content that they do not make."""
    if choices.contents.lasting[content] == AT_HOME:
        return []
    return sorted(at for at in choices.lookers.get(content, ()) if content not in choices.chains[at].made)


@dataclass(frozen=True)
class Offer:
    """What to keep, offload and compute again, and what the step then takes by its rehearsal."""

    rest: Rest
    keep: NDArray[np.bool_]
    rehearsal: Rehearsal

    @property
    def value(self) -> float:
        """What offers are compared by: seconds, and a little for every copy."""
        return value(self.rest.model, self.rehearsal)

    def is_same(self, other: Offer) -> bool:
        """Whether another offer does the same."""
        return self.rest.again == other.rest.again and np.array_equal(self.keep, other.keep)

    @staticmethod
    def of(rest: Rest) -> Offer | None:
        """The best of what the relaxations say; None if nothing fits."""
        offers = [Offer(rest, keep, rehearse(rest.model, keep)) for keep in _kept(rest.model)]
        return min(offers, key=lambda offer: offer.value, default=None)

    def tuned(self, tries: int) -> Offer:
        """A better offer, if one is found."""
        return Offer(self.rest, *tune(self.rest.model, self.keep, tries))

    def sparing(self, spared: Ints) -> tuple[float, Plan] | None:
        """The plan that does so, and leaves bytes free at each op as far as that can be; None if that cannot be.

        It comes with its value, by which it can be compared with other offers.
        """
        if not spared.any():
            return self.value, self.rest.plan(self.rehearsal)
        free = self.rest.model.free
        model = replace(self.rest.model, free=np.where(free > 0, np.maximum(free - spared, 0), free))
        keep = self.keep.copy()
        if not lighten(model, keep, random.Random(0)):
            return None
        rehearsal = tune(model, keep, min(_RETUNED // max(len(model.graph.ops), 1), _MOST_RETUNED))[1]
        return value(model, rehearsal), self.rest.plan(rehearsal)


def _kept(model: Model) -> Iterator[NDArray[np.bool_]]:
    """What to keep, as the relaxations say."""
    if len(model.free) and int(model.free.min()) < 0:
        return
    slowdown = model.home.compute_slowdown if model.home else 0.0
    streams = solve(model, {})
    if streams is not None:
        yield streams.rounded(model)
    for transit in _TRANSITS:
        relaxed = relax(model, transit=transit, weight=max(slowdown, _WEIGHT))
        if relaxed is not None:
            keep = relaxed.rounded(model)
            if lighten(model, keep, random.Random(0)):
                yield keep
            return
