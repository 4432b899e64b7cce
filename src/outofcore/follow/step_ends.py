"""Where steps of an eager loop end: what PyTorch reports says so, in the order of ``Sign``."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable


class Sign(enum.IntEnum):
    """What ends a step of a loop. A loop uses the strongest sign that it has given so far.

    Where a sign comes from several sources, such as the two optimizers of a GAN, each step ends with the same one: the
    first that gave it, until another gives it twice in between.
    """

    CALL = 1  # a call of a model without gradients has ended
    # A backward pass has ended that frees its graph, as in loops that update by hand; its source is the line that calls
    # it. The first one is no sign yet: most loops step an optimizer next. Where gradients are accumulated, the first
    # step of the optimizer takes over.
    BACKWARD = 2
    OPTIMIZER = 3  # an optimizer has stepped


class StepEnds:
    """Counts the steps of a loop, and chooses the source that ends them.

    Attributes:
        count: of steps that have ended.
        sign: the strongest so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sign = Sign.CALL
        self._leader: Hashable | None = None  # of the sources of the sign, the one that ends steps
        self._others: set[Hashable] = set()  # that have come since
        self._passes = 0  # backward passes, while no optimizer has stepped

    def note_backward(self) -> bool:
        """Note the end of a complete backward pass; return whether it is a sign."""
        self._passes += 1
        self.count += self._passes == 2  # the first one was a step as well
        return self._passes > 1

    def note(self, sign: Sign) -> None:
        """Count a step that has ended by this sign or a stronger one."""
        if sign > self.sign:
            if self.sign is Sign.BACKWARD:  # the passes until now were parts of this step
                self.count -= self._passes
            self.sign, self._leader = sign, None
            self._others.clear()
        self.count += 1

    def ends_step(self, source: Hashable) -> bool:
        """Return whether this source of the sign ends a step of the loop, always the same of several."""
        leader = self._leader
        gone = leader is None or (isinstance(leader, weakref.ref) and leader() is None)
        if gone or source in self._others:
            self._leader = source
        elif source != leader:
            self._others.add(source)
            return False
        self._others.clear()
        return True
