"""Types that describe how an op is split, used by ``rules`` and the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import Call, Ref, Value

ArgumentName = tuple[str, int]  # an argument, and the index in it if it is a list, else -1


@dataclass(frozen=True, slots=True)
class Cut:
    """The slice of a tensor that belongs to the part ``low:high`` of an op.

    Along ``dims``, a range of dimensions merged into one, it is ``low * scale - before : high * scale + after``.
    Elements outside of the tensor are zero.
    """

    dims: tuple[int, int]
    scale: int = 1
    before: int = 0
    after: int = 0

    def ends(self, low: int, high: int) -> tuple[int, int]:
        return low * self.scale - self.before, high * self.scale + self.after

    def part_shape(self, shape: Sequence[int], low: int, high: int) -> tuple[int, ...]:
        """Return the shape of a tensor's slice for a part of the op."""
        first, last = self.ends(low, high)
        return (*shape[: self.dims[0]], last - first, *shape[self.dims[1] :])

    @property
    def is_adjacent(self) -> bool:
        return (self.scale, self.before, self.after) == (1, 0, 0)


# Adjusts the constants among the arguments, by name, to the part ``low:high``. Trial processes unpickle it, so it must
# be a module-level function or a partial of one.
Adjust = Callable[[dict[str, Any], int, int], None]


@dataclass(frozen=True)
class OpSplit:
    """An axis along which an op can be split."""

    name: str
    extent: int
    argument_cuts: Mapping[ArgumentName, Cut]  # other arguments are passed whole
    result_cuts: Mapping[int, Cut]  # by position; the first part computes the other results
    adjust: Adjust | None = None
    shape_only: frozenset[str] = frozenset()  # arguments of which only shape and dtype matter
    grain: int = 1  # parts should begin at multiples of this
    strict: bool = False  # parts must begin at multiples of the grain
    rebased_indices: str = ""  # argument of indices along the axis, which parts count from their own beginning
    is_lookup: bool = False  # each part looks up the rows in its slice of a table
    is_update: bool = False  # each part updates a range of a parameter
    min_length: int = 1  # length of the shortest part

    @property
    def is_exact(self) -> bool:
        """Whether parts need no check: looked-up rows are copied, and updates are elementwise."""
        return self.is_lookup or self.is_update

    def ends(self, parts: int, unit: int = 1) -> tuple[int, ...]:
        """Return the boundaries of at most ``parts`` parts, from 0 to the extent; (0, extent) if it cannot be split."""
        parts = min(parts, self.extent // self.min_length)
        count = self.extent // unit
        if self.extent % unit or count < 2 or parts < 2:
            return (0, self.extent)
        grain = self.grain // gcd(self.grain, unit)
        if self.strict:
            parts = max(min(parts, count // grain), 1)
        while grain > 1 and count // grain < parts:
            grain //= 2
        blocks = -(-count // grain)
        # Twice as many parts have all these ends, too.
        ends = {min(blocks * part // parts * grain, count) * unit for part in range(parts + 1)}
        return tuple(sorted(ends))


UNSPLIT = OpSplit("as one", 1, {}, {})


@dataclass(frozen=True)
class ChosenSplit:
    split: OpSplit
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class CallView:
    """A call as a split rule sees it: arguments by name, with ``Value`` descriptions instead of tensors."""

    func: OpOverload
    call: Call
    values: Sequence[Value]
    named: dict[str, Any] = field(default_factory=dict[str, Any])

    def value(self, name: str, place: int = -1) -> Value | None:
        item: Any = self.named.get(name)
        if place >= 0:
            item = item[place]
        return self.values[item.value] if isinstance(item, Ref) else None

    def tensors(self) -> dict[ArgumentName, Value]:
        tensors: dict[ArgumentName, Value] = {}
        for name, item in self.named.items():
            if isinstance(item, Ref):
                tensors[name, -1] = self.values[item.value]
            elif isinstance(item, list | tuple):
                parts = enumerate(item)
                tensors |= {(name, place): self.values[r.value] for place, r in parts if isinstance(r, Ref)}
        return tensors

    def result(self, place: int = 0) -> Value | None:
        index = self.call.results[place] if place < len(self.call.results) else None
        return None if index is None else self.values[index]

    def results(self) -> dict[int, Value]:
        return {place: self.values[v] for place, v in enumerate(self.call.results) if v is not None}
