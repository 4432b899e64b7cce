"""Better choices of what to keep, by changing them a little and rehearsing the step.

What an op waited for is kept, and what then is too much leaves instead; or what is kept leaves, and the room is there
for copies that run ahead. A change is taken if the step is then no slower.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from outofcore.planning.model import Ints, Model
from outofcore.planning.rehearsal import Rehearsal, rehearse, rehearse_again

# What a second of copying counts at least beside a second of the step.
_WEIGHT = 0.002
# How often a gap is drawn from those that were waited for.
_WAITED = 0.6


def value(model: Model, rehearsal: Rehearsal) -> float:
    """What rehearsals are compared by: their seconds, and what copies take from the ops beside them."""
    return rehearsal.seconds + _weight(model) * rehearsal.copied


def _weight(model: Model) -> float:
    return max(model.home.compute_slowdown if model.home else 0.0, _WEIGHT)


def lighten(model: Model, keep: NDArray[np.bool_], draw: random.Random, but: int = -1) -> bool:
    """Keep less until what is kept fits at every op, gap ``but`` apart; False if that cannot be."""
    free: Ints = model.free - model.held(keep)
    while True:
        worst = int(free.argmin()) if len(free) else 0
        if not len(free) or free[worst] >= 0:
            return True
        around = [g for g in np.flatnonzero(keep & model.around(worst)).tolist() if g != but]
        if not around:
            return False
        enough = [g for g in around if model.gaps[g].bytes >= -free[worst]]
        g = draw.choice(enough or around)
        keep[g] = False
        for first, last in model.inside(model.gaps[g]):
            free[first:last] += model.gaps[g].bytes


def tune(model: Model, keep: NDArray[np.bool_], tries: int) -> tuple[NDArray[np.bool_], Rehearsal]:
    """Choose better what to keep.

    Args:
        model: the step under its limit; with a home.
        keep: for each gap whether it is kept; fits.
        tries: how many rehearsals.
    """
    draw = random.Random(0)
    best = rehearse(model, keep)
    movable = [g for g, info in enumerate(model.gaps) if not info.arriving]
    if not movable:
        return keep, best
    for _ in range(tries):
        waited = sorted(g for g in best.waited if not model.gaps[g].arriving)
        if waited and draw.random() < _WAITED:
            g = draw.choices(waited, [best.waited[w] for w in waited])[0]
        else:
            g = draw.choice(movable)
        changed = keep.copy()
        changed[g] = not changed[g]
        if changed[g] and not lighten(model, changed, draw, g):
            continue
        found = rehearse_again(model, changed, best, value(model, best), _weight(model))
        if found is not None:
            keep, best = changed, found
    return keep, best
