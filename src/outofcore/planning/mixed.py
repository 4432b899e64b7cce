"""Computing again and offloading in one plan.

What is cheap to compute again is found by ``dropping``, under a limit that lies above the true one; what is still
too much is offloaded, as ``priced`` does it, with the gaps that are computed again out of the way. How far
the limits lie apart says how the work is shared: not at all, and nothing is offloaded; far enough, and
nothing is computed again.

A chain of runs reads what it needs at its time, not at the time of the next use in the step. So an
offloaded gap has to be back when the first chain reads it: to the relaxation it ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from outofcore.costs import Costs
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.planning.chains import AGAIN, Choices
from outofcore.planning.contents import AT_HOME
from outofcore.planning.model import GapInfo, Ints, Model
from outofcore.planning.relaxation import relax
from outofcore.planning.timing import schedule


def again_decisions(choices: Choices) -> tuple[Decision, ...]:
    """The decisions of what is computed again."""
    gaps = choices.model.gaps
    return tuple(
        Decision(gaps[g].gap, Residency.RECOMPUTE, choices.start[g] + 1, choices.fetch[g])
        for g in choices.free
        if choices.kind[g] == AGAIN
    )


@dataclass(frozen=True)
class Rest:
    """What there is to decide once it is known what is computed again.

    Attributes:
        model: a step whose ops last as long as they and the chains before them, with the gaps that are left,
            each ending where a chain reads it.
        whole: by a gap of the model, the gap of the step.
    """

    model: Model
    whole: dict[Gap, Gap]

    @staticmethod
    def of(choices: Choices, model: Model, spared: Ints, times: Sequence[float] | None = None) -> Rest:
        """The rest of a step.

        Args:
            choices: what is computed again.
            model: the step under its true limit.
            spared: for each op the bytes to leave free there, as far as that can be.
            times: when each op starts, and when the step ends, where a simulation says so.
        """
        n = len(model.graph.ops)
        free = model.limit - choices.need
        seconds = [cost.seconds for cost in model.costs.ops]
        for at, chain in choices.chains.items():
            seconds[at] += chain.seconds
        left: list[GapInfo] = []
        whole: dict[Gap, Gap] = {}
        for g, info in enumerate(model.gaps):
            gap = info.gap
            if choices.kind[g] == AGAIN:
                free[choices.fetch[g] : gap.end] -= info.bytes
                continue
            if info.arriving:
                left.append(info)
                continue
            readers = [at for at in choices.lookers.get(choices.content[g], ()) if gap.start < at < gap.end]
            readers = [at for at in readers if choices.content[g] not in choices.chains[at].made]
            if info.cyclic:
                if readers or any(at < gap.end - n for at in _readers_of_first(choices, g)):
                    _hold(model, free, info)
                    continue
            elif readers:
                first = min(readers)
                free[first : gap.end] -= info.bytes
                if first <= gap.start + 1:
                    continue
                shorter = replace(info, gap=Gap(gap.storage, gap.start, first))
                whole[shorter.gap] = gap
                left.append(shorter)
                continue
            left.append(info)
        free = np.where(free > 0, np.maximum(free - spared, 0), free)
        ops = tuple(replace(cost, seconds=s) for cost, s in zip(model.costs.ops, seconds, strict=True))
        if times is None:
            times = (0.0, *accumulate(seconds))
        rest = replace(model, costs=Costs(ops, model.costs.homes), gaps=tuple(left), free=free, times=tuple(times))
        return Rest(rest, whole)

    def decisions(self, transit: float) -> tuple[Decision, ...] | None:
        """What is offloaded, and when; None if that does not do."""
        for charge in (transit, transit / 2, transit / 4, 0.0):
            relaxed = relax(self.model, transit=charge)
            if relaxed is not None:
                found = schedule(self.model, relaxed.rounded(self.model))
                return tuple(replace(d, gap=self.whole.get(d.gap, d.gap)) for d in found)
        return None


def _readers_of_first(choices: Choices, g: int) -> list[int]:
    """Chains that read a storage at the version it has when the step begins."""
    content = choices.contents.first[choices.model.gaps[g].gap.storage]
    if choices.contents.lasting[content] == AT_HOME:
        return []
    return [at for at in choices.lookers.get(content, ()) if content not in choices.chains[at].made]


def _hold(model: Model, free: Ints, info: GapInfo) -> None:
    for first, last in model.inside(info):
        free[first:last] -= info.bytes


def mixed(
    choices: Choices, model: Model, spared: Ints, transit: float, times: Sequence[float] | None = None
) -> Plan | None:
    """A plan that computes again what ``choices`` say, and offloads what is then too much; None: there is none."""
    again = again_decisions(choices)
    if model.home is None:
        return Plan("auto", model.limit, again)
    found = Rest.of(choices, model, spared, times).decisions(transit)
    if found is None:
        return None
    return Plan("auto", model.limit, tuple(sorted((*again, *found), key=lambda d: d.gap)))
