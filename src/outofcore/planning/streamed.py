"""Plans in which what leaves, where it goes and when is chosen for the links as they are in time.

The linear program of ``flow`` says what share of each gap goes to which home; what it leaves in parts is
rounded so that everything still fits, and ``laying`` gives the copies their room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Plan
from outofcore.planning.flow import Flow, flow
from outofcore.planning.laying import lay
from outofcore.planning.model import Model

_KEPT = -1
_TINY = 1e-6


def streamed(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    *,
    transit: float = 1.0,
    share: float = 1.0,
    spare: float = 0.0,
    times: Sequence[float] | None = None,
) -> Plan:
    """Plan by flows over the links.

    Args:
        graph: the step.
        costs: measured or assumed.
        budget: bytes of large blocks that may be resident.
        transit: see ``flow.flow``.
        share: of the budget, what the flows are planned for; the rest is left to copies that lay whole blocks
            where the program saw a stream of bytes.
        spare: of the bytes that the program has coming in early, the part that copies out leave room for.
        times: see ``Model.of``.

    Raises:
        BudgetError: no choice of gaps fits.
    """
    model = Model.of(graph, costs, budget, times)
    found = flow(Model.of(graph, costs, int(budget * share), times), transit=transit)
    if found is None:
        raise BudgetError(f"no choice of what to keep fits {budget} bytes")
    homes = rounded(model, found)
    return Plan("streamed", budget, lay(model, homes == _KEPT, np.maximum(homes, 0), spare * found.early))


# What is tried in turn: for how many times the seconds of its copies a gap must last, what share of the room the
# flows are planned for, and what part of the early bytes copies out leave room for.
_TRIES = tuple(
    (transit, share, spare) for spare in (0.0, 1.0) for share in (0.94, 1.0, 0.97, 0.91) for transit in (1.0, 2.0)
)
# Steps of more ops are long; of those only the first so many are tried.
_LONG, _LONG_TRIES = 2000, 10
# Of the room, what is tried next where a placement was too high, at most, and where it was not.
_LESS, _MORE = 0.985, 1.01
# A step that takes so little more than its ops is good enough.
_ENOUGH = 1.001


def tries(graph: StepGraph, costs: Costs, room: int, attempt: Callable[[Plan], tuple[float, float | None]]) -> None:
    """Make plans, one after the other, each with another choice of what the program cannot know.

    Which choice serves best depends on how whole blocks happen to follow each other, so several are tried. How closely
    the blocks of a step can be placed is learnt on the way.

    Args:
        graph: the step.
        costs: measured or assumed.
        room: bytes of large blocks that may be resident.
        attempt: places and simulates a plan; how high its blocks reach in multiples of the room (infinity: it
            does not fit its homes), and its step seconds where it fits.
    """
    scale = 1.0
    for transit, share, spare in _TRIES[: _LONG_TRIES if len(graph.ops) > _LONG else None]:
        try:
            plan = streamed(graph, costs, int(room * scale), transit=transit, share=share, spare=spare)
        except BudgetError:
            scale = min(scale * _MORE, 1.0)
            continue
        height, seconds = attempt(plan)
        if seconds is None:
            scale *= _LESS if height == float("inf") else max(min(1 / height, 0.998), _LESS)
            continue
        if seconds <= costs.compute_seconds * _ENOUGH:
            return
        scale = min(scale * _MORE, 1.0)


def rounded(model: Model, found: Flow) -> NDArray[np.int64]:
    """For each gap the home that it goes to, or -1: it is kept.

    What wholly stays or goes does; of the rest, the largest shares choose first, and keep or go where there is
    room for the whole.
    """
    homes = np.full(len(model.gaps), _KEPT, dtype=np.int64)
    kept = 1.0 - found.shares.sum(axis=1)
    held = model.held((kept >= 1 - _TINY) & ~_arriving(model))
    room = model.free - held - found.waiting
    slots = _Slots(model)
    order = sorted(range(len(model.gaps)), key=lambda g: (-max(kept[g], found.shares[g].max()), g))
    for g in order:
        info = model.gaps[g]
        if info.arriving:
            homes[g] = 0
            continue
        if kept[g] >= 1 - _TINY:
            continue
        choices = sorted(
            range(-1, len(model.costs.homes)), key=lambda h: (-(kept[g] if h < 0 else found.shares[g, h]), h)
        )
        for home in choices:
            if home < 0:
                if all(np.all(room[a:b] >= info.bytes) for a, b in model.inside(info)):
                    for first, last in model.inside(info):
                        room[first:last] -= info.bytes
                    break
            elif (found.shares[g, home] > _TINY or home == len(model.costs.homes) - 1) and slots.take(g, home):
                homes[g] = home
                break
    return homes


def _arriving(model: Model) -> NDArray[np.bool_]:
    return np.array([info.arriving for info in model.gaps], dtype=np.bool_)


class _Slots:
    """Bytes left at each home over the ops."""

    def __init__(self, model: Model) -> None:
        self.model = model
        n = len(model.graph.ops)
        inputs = sum(s.bytes for s in model.graph.storages if s.kind is StorageKind.INPUT)
        self.room = [
            None if place.bytes is None else np.full(n, place.bytes - (0 if home else inputs), dtype=np.int64)
            for home, place in enumerate(model.costs.homes)
        ]

    def take(self, g: int, home: int) -> bool:
        """Take a gap's slot at a home; False: it is full."""
        info, room = self.model.gaps[g], self.room[home]
        if room is None:
            return True
        first, last = (0, len(room)) if info.cyclic else (info.gap.start, info.gap.end + 1)
        if np.any(room[first:last] < info.bytes):
            return False
        room[first:last] -= info.bytes
        return True
