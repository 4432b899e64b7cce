"""Random changes to what is computed again, accepted the more readily the earlier: simulated annealing.

What is minimised is the seconds that run again plus, for each op, a price for every byte above the limit. Prices
rise while an op stays above the limit and fall slowly otherwise, as multipliers of a relaxation do, so that the
search passes through what does not fit and comes back from it. The best state that fits is what counts.

Kirkpatrick, Gelatt & Vecchi, "Optimization by simulated annealing" (1983). Numbers are drawn from a fixed seed, and
effort is counted in changes tried: the same state gives the same result.
"""

from __future__ import annotations

import math
import random

import numpy as np

from outofcore.planning.chains import AGAIN, KEPT, Choices

# Temperatures at the start and at the end, in mean seconds of what may run again.
_HOT, _COLD = 0.3, 0.001
# How prices change, and after how many tries.
_RISE, _FALL, _EVERY = 1.3, 0.97, 50
# How many ops of chains a try may look at, on average.
_WORK = 60
# How far prices may fall and rise from where they start.
_LEAST, _MOST = 1e-2, 1e4


def anneal(choices: Choices, tries: int) -> bool:
    """Leave the best state found that fits in ``choices``; False, and as it was, if none does.

    Args:
        choices: where to start; it need not fit.
        tries: changes to try.
    """
    free = choices.free
    snapshot = choices.snapshot()
    over = choices.over()
    best = (choices.seconds, snapshot) if not over.any() else None
    if free:
        found = _Walk(choices, tries).run(best)
        best = found if found is not None else best
    choices.restore(snapshot if best is None else best[1])
    return best is not None


Best = tuple[float, tuple[tuple[int, int, int], ...]]


class _Walk:
    def __init__(self, choices: Choices, tries: int) -> None:
        contents, free = choices.contents, choices.free
        self.choices, self.tries = choices, tries
        self.draw = random.Random(0).random
        unit = math.fsum(contents.seconds[contents.maker[choices.content[g]]] for g in free) / len(free)
        area = sum(choices.bytes[g] * (choices.end[g] - choices.start[g]) for g in free) / len(free)
        self.unit = max(unit, 1e-12)
        self.least, self.most = self.unit / area * _LEAST, self.unit / area * _MOST
        self.price = np.full(len(choices.held), self.unit / area)

    def run(self, best: Best | None) -> Best | None:
        choices, draw = self.choices, self.draw
        over = choices.over()
        fine = float(self.price @ over)
        enough = choices.work + self.tries * _WORK
        for turn in range(self.tries):
            if choices.work > enough:
                break
            if turn % _EVERY == _EVERY - 1:
                self.price *= _FALL
                self.price[over > 0] *= _RISE / _FALL
                np.clip(self.price, self.least, self.most, out=self.price)
                fine = float(self.price @ over)
            option = self._option()
            if option is None:
                continue
            heat = self.unit * _HOT * (_COLD / _HOT) ** (turn / self.tries)
            before = choices.seconds
            leave = -heat * math.log(max(draw(), 1e-12))
            undo = choices.set(*option, before + fine + leave)
            if undo is None:
                continue
            new_over = choices.over()
            new_fine = float(self.price @ new_over)
            if choices.seconds - before + new_fine - fine > leave:
                choices.undo(undo)
                continue
            over, fine = new_over, new_fine
            if fine == 0 and (best is None or choices.seconds < best[0] * (1 - 1e-12)):
                best = (choices.seconds, choices.snapshot())
        return best

    def _option(self) -> tuple[int, int, int] | None:
        """A gap, and something else to do with it than what is done now."""
        choices, draw = self.choices, self.draw
        g = choices.free[int(draw() * len(choices.free))]
        end = choices.end[g]
        now = (choices.kind[g], choices.fetch[g]) if choices.kind[g] == AGAIN else (KEPT, end)
        options = [(KEPT, end), (AGAIN, end)]
        meetings = choices.meetings(g)
        if meetings:
            options.append((AGAIN, meetings[int(draw() * len(meetings))]))
        options = [option for option in options if option != now]
        if not options:
            return None
        return (g, *options[int(draw() * len(options))])
