"""Detect where the steps of an eager loop end, from PyTorch's reports."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable


class StepSign(enum.IntEnum):
    """An event that ends a step, the strongest last. A loop uses the strongest sign so far.

    Of several sources, such as a GAN's two optimizers, the first ends all steps, until another signs twice in between.
    """

    CALL = 1  # a call of a model without gradients has ended
    # A backward pass that frees its graph has ended, as in loops that update by hand; its source is the calling line.
    # The first pass is no sign yet, because most loops step an optimizer next. If gradients are accumulated, the
    # optimizer's first step becomes the sign.
    BACKWARD = 2
    OPTIMIZER = 3  # an optimizer has stepped


class StepEnds:
    """Counts the steps of a loop, and decides which events end them."""

    def __init__(self) -> None:
        self.count = 0  # ended steps
        self.sign = StepSign.CALL  # the strongest so far
        self._leader: Hashable | None = None  # the source that ends steps
        self._other_sources: set[Hashable] = set()  # the other sources since the leader's last sign
        self._backward_passes = 0  # backward passes before the first optimizer step

    def record_backward(self) -> bool:
        """Count a complete backward pass; return False for the first one, which ends no step yet."""
        self._backward_passes += 1
        self.count += self._backward_passes == 2  # the first pass was a step, too
        return self._backward_passes > 1

    def record_end(self, sign: StepSign) -> None:
        """Count a step that an event of the kind ``sign`` has ended."""
        if sign > self.sign:
            if self.sign is StepSign.BACKWARD:  # the earlier passes belong to this step
                self.count -= self._backward_passes
            self.sign, self._leader = sign, None
            self._other_sources.clear()
        self.count += 1

    def ends_step(self, source: Hashable) -> bool:
        """Record an event of an optimizer or other source, and return whether the event ends a step."""
        leader = self._leader
        gone = leader is None or (isinstance(leader, weakref.ref) and leader() is None)
        if gone or source in self._other_sources:
            self._leader = source
        elif source != leader:
            self._other_sources.add(source)
            return False
        self._other_sources.clear()
        return True
