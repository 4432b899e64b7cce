"""Steps of which single ops need more memory than there is, in parts: how fine they are cut, and what that gives.

How fine is a number of bytes: what an op shall need at most (see ``capture.tiles``). It halves until nothing is won
any more. Which parts are the whole, to the bit, the machine says (``profiling.equality``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from outofcore import planning
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.capture import Captured
from outofcore.capture.passes import leanest
from outofcore.capture.tiles import Tiled, tiled
from outofcore.costs import SOMEWHERE, Costs, OpCost
from outofcore.errors import InputError
from outofcore.execution.backend import Backend
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import refuted
from outofcore.profiling.ops import OpProfile, profile_ops
from outofcore.units import MIB

# A step of more ops takes longer to plan than it is worth.
MOST_OPS = 20_000
# Ops that need no more than this are not cut: their fixed price is what they cost.
LEAST_BYTES = 1 << 20
# Trials may take so much memory on the CPU, however small the budget is: it is taken once, and PyTorch takes as much.
_TRIAL_BYTES = 256 * MIB
# What a finer cut has to save of the smallest budget.
_WORTH = 0.95
_LEVELS = 8


class Split(Enum):
    """Whether an op that needs more memory than there is may run in parts."""

    EXACT = "exact"  # where its parts give the bits of the whole
    CLOSE = "close"  # so too; and sums over rows and samples are always taken in parts, and rounded otherwise
    OFF = "off"  # never


def split_of(name: str) -> Split:
    """What a user means.

    Raises:
        InputError: nothing.
    """
    try:
        return Split(name)
    except ValueError:
        raise InputError(f"there is no split {name!r}; choose 'exact', 'close' or 'off'") from None


@dataclass(frozen=True)
class Parts:
    """A step in parts.

    Attributes:
        captured: the step.
        most: bytes that an op was to need.
        profiles: the memory that its ops ask for; None: nobody asked.
    """

    captured: Captured
    most: int
    profiles: tuple[OpProfile, ...] | None = None


@dataclass(frozen=True)
class Splitting:
    """How a step is cut on a machine.

    Attributes:
        traced: the step.
        backend: where it runs, and parts are tried. None: it is not here; then all parts are taken to be exact.
        cache: where measurements are kept.
        workspaces: bytes of scratch memory that ops take as a whole, by family, as far as that is known.
        home: bytes that the first home holds; None: as many as there are (see ``capture.tiles``).
    """

    traced: Captured
    backend: Backend | None
    cache: Cache | None = None
    workspaces: Mapping[str, int] = field(default_factory=dict[str, int])
    home: int | None = None

    def in_parts(self, most: int, room: int) -> Parts | None:
        """The step with its ops in parts, in the form that needs the least memory; None if nothing can be cut.

        Args:
            most: bytes that an op shall need.
            room: bytes that a trial may take.
        """
        refused: frozenset[str] = frozenset()
        while True:
            found = tiled(
                self.traced, most, refused=refused, limit=MOST_OPS, workspaces=self.workspaces, home=self.home
            )
            if not found.is_cut:
                return None
            wrong = self._wrong(found, room)
            if not wrong:
                alignment = SMALL_ALIGNMENT if self.backend is None else self.backend.alignment
                return Parts(leanest(found.captured).aligned(alignment), most)
            refused |= wrong

    def _wrong(self, found: Tiled, room: int) -> frozenset[str]:
        if self.backend is None:
            return frozenset()
        if self.backend.driver is None:
            room = max(room, _TRIAL_BYTES)
        return refuted(found.claims, found.values, self.backend, room, self.cache)

    def finest(self, whole: int) -> tuple[Parts, int] | None:
        """The step in parts that need the least, and its smallest budget; None if no cut saves anything.

        The same step gives the same parts, whatever its budget is.

        Args:
            whole: the smallest budget of the step as a whole.
        """
        best: tuple[Parts, int] | None = None
        in_vain = 0
        for most in levels(whole):
            parts = self.in_parts(most, most)
            if parts is None:
                break
            parts = self._profiled(parts)
            ops = [OpCost(0.0)] * len(parts.captured.graph.ops)
            costs = Costs(tuple([p.cost for p in parts.profiles] if parts.profiles else ops), (SOMEWHERE,))
            need = planning.smallest_budget(parts.captured.graph, costs)
            # Finer parts are more ops. One level may win little, and the next one much: where an op's scratch memory
            # is no matter of its size.
            is_worth = need <= (whole if best is None else best[1]) * _WORTH
            if is_worth or (best is None and need < whole):
                best = parts, need
            in_vain = 0 if is_worth else in_vain + 1
            if in_vain > 1:
                break
        return best

    def _profiled(self, parts: Parts) -> Parts:
        if self.backend is None:
            return parts
        profiles = profile_ops(parts.captured, measure_time=False, cache=self.cache, backend=self.backend)
        return replace(parts, profiles=profiles)


def levels(need: int) -> Iterator[int]:
    """Bytes that an op shall need, from half of what the neediest does on."""
    for level in range(1, _LEVELS):
        most = need >> level
        if most < LEAST_BYTES:
            return
        yield most


def workspaces_of(captured: Captured, profiles: Sequence[OpProfile]) -> dict[str, int]:
    """The scratch memory of ops, by family."""
    return {op.family: p.cost.workspace_bytes for op, p in zip(captured.graph.ops, profiles, strict=True)}
