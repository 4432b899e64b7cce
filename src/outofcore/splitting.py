"""Steps of which single ops need more memory than there is, in parts: how fine they are cut, and what that gives.

How fine is a number of bytes: what an op shall need at most (see ``capture.tiles``). It halves until nothing is won
any more. Which parts are the whole, to the bit, the machine says (``profiling.equality``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from outofcore import planning
from outofcore.capture import Captured
from outofcore.capture.passes import leanest
from outofcore.capture.tiles import Tiled, tiled
from outofcore.costs import SOMEWHERE, Costs, OpCost
from outofcore.errors import InputError
from outofcore.execution.backend import Backend
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import refuted
from outofcore.profiling.ops import OpProfile, profile_ops

# A step of more ops takes longer to plan than it is worth.
MOST_OPS = 20_000
# Ops that need no more than this are not cut: their fixed price is what they cost.
LEAST_BYTES = 1 << 20
# What a finer cut has to save of the smallest budget.
_WORTH = 0.95
_LEVELS = 8


class Split(Enum):
    """Whether an op that needs more memory than there is may run in parts."""

    EXACT = "exact"  # where its parts give the bits of the whole
    OFF = "off"  # never


def split_of(name: str) -> Split:
    """What a user means.

    Raises:
        InputError: nothing.
    """
    try:
        return Split(name)
    except ValueError:
        raise InputError(f"there is no split {name!r}; choose 'exact' or 'off'") from None


@dataclass(frozen=True)
class Splitting:
    """How steps are cut on a machine.

    Attributes:
        backend: where parts are tried; None: not at all, for a device that is not here. Then all are taken to be exact.
        room: bytes that a trial may take.
        cache: where verdicts are kept.
    """

    backend: Backend | None
    room: int
    cache: Cache | None = None

    def in_parts(self, traced: Captured, most: int, room: int | None = None) -> Captured | None:
        """The step with its ops in parts, in the form that needs the least memory; None if nothing can be cut.

        Args:
            traced: the step.
            most: bytes that an op shall need.
            room: bytes that a trial may take, if others than else.
        """
        refused: frozenset[str] = frozenset()
        while True:
            found = tiled(traced, most, refused=refused, limit=MOST_OPS)
            if not found.claims:
                return None
            wrong = self._wrong(found, room or self.room)
            if not wrong:
                return leanest(found.captured)
            refused |= wrong

    def _wrong(self, found: Tiled, room: int) -> frozenset[str]:
        if self.backend is None:
            return frozenset()
        return refuted(found.claims, found.values, self.backend, room, self.cache)

    def finest(self, traced: Captured) -> tuple[Captured, int] | None:
        """The step in parts that need the least, and how many bytes an op was to need; None if no cut saves anything.

        What workspaces the parts have is not known yet. The same step gives the same parts, whatever ``room`` is.
        """
        whole = need_of(leanest(traced))
        best, level = whole, 0
        for most in levels(whole):
            found = tiled(traced, most, limit=MOST_OPS)
            if not found.claims:
                break
            need = need_of(leanest(found.captured))
            if need > best * _WORTH:
                break
            best, level = need, most
        parts = self.in_parts(traced, level, best) if level else None
        return None if parts is None else (parts, level)


def levels(need: int) -> Iterator[int]:
    """Bytes that an op shall need, from half of what the neediest does on."""
    for level in range(1, _LEVELS):
        most = need >> level
        if most < LEAST_BYTES:
            return
        yield most


def need_of(captured: Captured) -> int:
    """The smallest budget of a step, without workspaces."""
    ops = tuple(OpCost(0.0) for _ in captured.graph.ops)
    return planning.smallest_budget(captured.graph, Costs(ops, (SOMEWHERE,)))


def smallest_in_parts(
    traced: Captured, whole: int, backend: Backend, cache: Cache | None
) -> tuple[int, Captured, tuple[OpProfile, ...]] | None:
    """The smallest budget of a step in parts, with the parts and their memory; None where it is no smaller.

    Args:
        traced: the step.
        whole: its smallest budget with ops as a whole.
        backend: where it runs.
        cache: where measurements are kept.
    """
    found = Splitting(backend, whole, cache).finest(traced)
    if found is None:
        return None
    captured = found[0].aligned(backend.alignment)
    profiles = profile_ops(captured, measure_time=False, cache=cache, backend=backend)
    costs = Costs(tuple(profile.cost for profile in profiles), (SOMEWHERE,))
    smallest = planning.smallest_budget(captured.graph, costs)
    return (smallest, captured, profiles) if smallest < whole else None
