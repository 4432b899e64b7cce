"""The exactness claims of a split step: what its bits rely on, for ``profiling.equality`` to check on the machine.

A claim says that the parts of an op, or the op on arguments that lie elsewhere in memory, compute the bits of the op as
it was. Its key holds all that decides this, so a claim is checked once per machine. A claim that does not hold is
refused: the step is split once more without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from outofcore._torch_internals import OpOverload
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.capture.captured import Call, Captured, Value
from outofcore.graph import Op
from outofcore.transforms.split.cells import CellMap
from outofcore.transforms.split.tensors import named_refs
from outofcore.transforms.split.ways import AS_ONE, Choice, Name, Way


@dataclass(frozen=True)
class Claim:
    """An exactness check to be made: that the parts of an op compute, to the bit, what the whole op does.

    Attributes:
        key: the op's family, the axis and where parts begin; equal keys mean the same check.
        ends: where the parts begin, and the last one ends.
        of: the call whose results the op must reproduce; None: its own.
        laid: strides of arguments that are given whole but gathered, where those differ from the unsplit op's, or begin
            at the start of memory of their own.
    """

    key: str
    call: Call
    way: Way
    ends: tuple[int, ...]
    of: Call | None = None
    laid: Mapping[Name, tuple[int, ...]] = field(default_factory=dict[Name, tuple[int, ...]])


def claim_of(captured: Captured, cell_map: CellMap, op: int, choice: Choice) -> Claim:
    """Return the claim that the parts of an op compute what the whole does."""
    laid = _laid(captured, cell_map, op, choice.way)
    name = f"{captured.graph.ops[op].family} by {choice.way.name} at {list(choice.ends)}{_lies(captured, op, laid)}"
    return Claim(name, captured.calls[op], choice.way, choice.ends, laid=laid)


def claims_of_gathered(captured: Captured, cell_map: CellMap, chosen: Iterable[int]) -> Iterator[tuple[Op, Claim]]:
    """Yield claims that whole ops compute the same if their arguments, gathered from cells, have other layouts."""
    cut = set(chosen)
    for op in captured.graph.ops:
        if op.id in cut or cell_map.cuts.keys().isdisjoint(op.touched):
            continue
        laid = _laid(captured, cell_map, op.id, None)
        if laid:
            key = f"{op.family} as one{_lies(captured, op.id, laid)}"
            yield op, Claim(key, captured.calls[op.id], AS_ONE, (0, 1), laid=laid)


def _lies(captured: Captured, op: int, laid: Mapping[Name, tuple[int, ...]]) -> str:
    """Return a key of argument layouts that the op's family does not determine."""
    named = named_refs(captured.calls[op])
    shifts = {name: shift for name, index in named if (shift := _misaligned(captured.values[index]))}
    return "".join(f" {what} {sorted(d.items())}" for what, d in (("shifted", shifts), ("laid", laid)) if d)


def _laid(captured: Captured, cell_map: CellMap, op: int, way: Way | None) -> dict[Name, tuple[int, ...]]:
    """Return the strides of arguments that are given whole but gathered from cells, where those differ."""
    found: dict[Name, tuple[int, ...]] = {}
    for name, index in named_refs(captured.calls[op]):
        value = captured.values[index]
        if value.storage not in cell_map.cuts or (way is not None and (name in way.given or name[0] in way.unread)):
            continue
        axes, place = cell_map.axes[value.storage], cell_map.places[index]
        box = axes.box_of(place)
        strides = None if box is None else axes.strides(place, value.shape, box)
        if strides is None:
            continue
        pairs = zip(strides, value.stride, value.shape, strict=True)
        if _misaligned(value) or any(new != old for new, old, size in pairs if size > 1):
            found[name] = strides
    return found


def can_be_tried(op: Op, call: Call) -> bool:
    """Return whether an op only makes results and draws no random numbers, which would be missing later."""
    plain = isinstance(call.func, OpOverload) and call.func.namespace == "aten" and call.rehearse is None
    return plain and not op.random and not op.communicates


def _misaligned(value: Value) -> int:
    """Return by how many bytes a value misses a cache line: libraries may then add up otherwise."""
    return value.offset * value.dtype.itemsize % SMALL_ALIGNMENT
