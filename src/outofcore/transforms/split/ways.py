"""How an op is split: the words in which ``rules`` answers and everything else asks.

A ``Way`` is an axis along which an op can be split: a ``Cut`` for each argument and result that has the axis. With the
ends of its parts it is a ``Choice``. ``Given`` is a call as rules see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import Call, Ref, Value

Name = tuple[str, int]  # an argument, and its place in it where it is a list; else -1


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that belongs to the part ``low:high`` of an op.

    Along ``dims``, a range of dimensions taken as one, it is ``low * scale - before : high * scale + after``; what lies
    outside of the tensor is zero.
    """

    dims: tuple[int, int]
    scale: int = 1
    before: int = 0
    after: int = 0

    def ends(self, low: int, high: int) -> tuple[int, int]:
        """Return the range of the tensor for a part of the op."""
        return low * self.scale - self.before, high * self.scale + self.after

    def part_shape(self, shape: Sequence[int], low: int, high: int) -> tuple[int, ...]:
        """Return the shape of a tensor's part for a part of the op, which may reach beyond its edges."""
        first, last = self.ends(low, high)
        return (*shape[: self.dims[0]], last - first, *shape[self.dims[1] :])

    @property
    def plain(self) -> bool:
        """Whether parts are adjacent, without overlap."""
        return (self.scale, self.before, self.after) == (1, 0, 0)


# Changes the constants among the arguments, by name, for the part from ``low`` to before ``high``. Other processes try
# parts as well, so it can be written down: a function of a module, or such a one with arguments.
Settle = Callable[[dict[str, Any], int, int], None]


@dataclass(frozen=True)
class Way:
    """An axis along which an op can be split.

    Attributes:
        given: arguments that are cut; the others are given whole.
        made: results that are cut, by their place; the first part alone makes the others, as a whole.
        settle: changes other arguments from part to part.
        unread: arguments of which only shape and dtype matter.
        grain: parts should begin at multiples of this.
        strict: parts must begin at multiples of ``grain``.
        rebased: an argument of indices along the axis, which a part counts from its beginning (see ``rebased``).
        looks_up: a part makes those rows of the result that are in its part of a table.
        updates: a part updates a range of a parameter.
        least: the length of the shortest part.
    """

    name: str
    extent: int
    given: Mapping[Name, Cut]
    made: Mapping[int, Cut]
    settle: Settle | None = None
    unread: frozenset[str] = frozenset()
    grain: int = 1
    strict: bool = False
    rebased: str = ""
    looks_up: bool = False
    updates: bool = False
    least: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether parts need no check: rows that are looked up are copied, and updates go element by element."""
        return self.looks_up or self.updates

    def ends(self, parts: int, unit: int = 1) -> tuple[int, ...]:
        """Return where at most ``parts`` parts begin and the last one ends, at multiples of ``unit``.

        The ends of half as many parts are among them.
        """
        parts = min(parts, self.extent // self.least)
        count = self.extent // unit
        if self.extent % unit or count < 2 or parts < 2:
            return (0, self.extent)
        grain = self.grain // gcd(self.grain, unit)
        if self.strict:
            parts = max(min(parts, count // grain), 1)
        while grain > 1 and count // grain < parts:
            grain //= 2
        blocks = -(-count // grain)
        found = {min(blocks * part // parts * grain, count) * unit for part in range(parts + 1)}
        return tuple(sorted(found))


# How an op runs that is not cut.
AS_ONE = Way("as one", 1, {}, {})


@dataclass(frozen=True)
class Choice:
    """How an op is split: along which axis, where its parts begin, and where the last one ends."""

    way: Way
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Given:
    """A call as rules see it: arguments by name, tensors as values."""

    func: OpOverload
    call: Call
    values: Sequence[Value]
    named: dict[str, Any] = field(default_factory=dict[str, Any])

    def value(self, name: str, place: int = -1) -> Value | None:
        """Return a tensor argument, or None."""
        item: Any = self.named.get(name)
        if place >= 0:
            item = item[place]
        return self.values[item.value] if isinstance(item, Ref) else None

    def tensors(self) -> dict[Name, Value]:
        found: dict[Name, Value] = {}
        for name, item in self.named.items():
            if isinstance(item, Ref):
                found[name, -1] = self.values[item.value]
            elif isinstance(item, list | tuple):
                parts = enumerate(item)
                found |= {(name, place): self.values[r.value] for place, r in parts if isinstance(r, Ref)}
        return found

    def result(self, place: int = 0) -> Value | None:
        """Return a result that the op creates, or None."""
        index = self.call.results[place] if place < len(self.call.results) else None
        return None if index is None else self.values[index]

    def results(self) -> dict[int, Value]:
        """Return all results that the op creates, by their place."""
        return {place: self.values[v] for place, v in enumerate(self.call.results) if v is not None}
