"""The exactness checks of a split step, run by ``profiling.equality``; a mismatch excludes a split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from outofcore._torch_internals import OpOverload
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.capture.captured import Call, Captured, Value
from outofcore.graph import Op
from outofcore.transforms.split.cells import CellMap
from outofcore.transforms.split.tensors import named_refs
from outofcore.transforms.split.ways import UNSPLIT, ArgumentName, ChosenSplit, OpSplit


@dataclass(frozen=True)
class ExactnessCheck:
    """An exactness check: the parts of an op must compute the same bits as the whole op."""

    key: str  # the op's family, the axis and the ends of the parts; equal keys mean the same check
    call: Call
    split: OpSplit
    ends: tuple[int, ...]  # of the parts, from the start of the first one
    reference: Call | None = None  # the call with the expected results; None: `call`
    # Strides of uncut arguments that are gathered from cells into another layout or alignment.
    gathered_strides: Mapping[ArgumentName, tuple[int, ...]] = field(
        default_factory=dict[ArgumentName, tuple[int, ...]]
    )


def make_check(captured: Captured, cell_map: CellMap, op: int, chosen: ChosenSplit) -> ExactnessCheck:
    strides = _gathered_strides(captured, cell_map, op, chosen.split)
    layout = _layout_key(captured, op, strides)
    name = f"{captured.graph.ops[op].family} by {chosen.split.name} at {list(chosen.ends)}{layout}"
    return ExactnessCheck(name, captured.calls[op], chosen.split, chosen.ends, gathered_strides=strides)


def checks_of_gathered(
    captured: Captured, cell_map: CellMap, split_ops: Iterable[int]
) -> Iterator[tuple[Op, ExactnessCheck]]:
    """Yield unsplit ops that read arguments joined from pieces in another memory layout, with exactness checks."""
    split_op_ids = set(split_ops)
    for op in captured.graph.ops:
        if op.id in split_op_ids or cell_map.cuts.keys().isdisjoint(op.touched):
            continue
        gathered_strides = _gathered_strides(captured, cell_map, op.id, None)
        if gathered_strides:
            key = f"{op.family} as one{_layout_key(captured, op.id, gathered_strides)}"
            yield op, ExactnessCheck(key, captured.calls[op.id], UNSPLIT, (0, 1), gathered_strides=gathered_strides)


def _layout_key(captured: Captured, op: int, strides: Mapping[ArgumentName, tuple[int, ...]]) -> str:
    """Return the text of the argument layouts in a check's key, because the op's family omits them."""
    named = named_refs(captured.calls[op])
    shifts = {name: shift for name, index in named if (shift := _misalignment(captured.values[index]))}
    return "".join(
        f" {title} {sorted(entries.items())}" for title, entries in (("shifted", shifts), ("laid", strides)) if entries
    )


def _gathered_strides(
    captured: Captured, cell_map: CellMap, op: int, split: OpSplit | None
) -> dict[ArgumentName, tuple[int, ...]]:
    """Map arguments joined from pieces to their new strides, if the strides or the alignment change."""
    gathered_strides: dict[ArgumentName, tuple[int, ...]] = {}
    for name, index in named_refs(captured.calls[op]):
        value = captured.values[index]
        if value.storage not in cell_map.cuts or (
            split is not None and (name in split.argument_cuts or name[0] in split.shape_only)
        ):
            continue
        axes, place = cell_map.axes[value.storage], cell_map.places[index]
        box = axes.box_of(place)
        strides = None if box is None else axes.strides(place, value.shape, box)
        if strides is None:
            continue
        pairs = zip(strides, value.stride, value.shape, strict=True)
        if _misalignment(value) or any(new != old for new, old, size in pairs if size > 1):
            gathered_strides[name] = strides
    return gathered_strides


def is_triable(op: Op, call: Call) -> bool:
    """Return whether a trial can run an op: it is PyTorch's, local, and without random numbers."""
    is_plain = isinstance(call.func, OpOverload) and call.func.namespace == "aten" and call.rehearse is None
    return is_plain and not op.random and not op.communicates


def _misalignment(value: Value) -> int:
    """Return how many bytes a value begins after a cache line, which may change the order of additions."""
    return value.offset * value.dtype.itemsize % SMALL_ALIGNMENT
