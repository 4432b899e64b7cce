"""Split sums over rows or samples into partial sums: the pass behind ``split="close"``.

One op needs all addends on the device at once; several ops need one part at a time. Another order of additions rounds
differently, so such a step is close to plain PyTorch and not equal to the bit. The number of parts depends on tensor
sizes alone, so the bits are the same at every budget.

Limits: sums of 16-bit numbers (each part would be rounded to 16 bits), batch norm statistics and embedding tables stay
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture.assembly import drop_unused
from outofcore.capture.captured import Call, Captured, Ref, Value, with_ops
from outofcore.capture.operators import arguments_by_name, arrange_arguments, family_text
from outofcore.capture.tables import covers, map_leaves
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.transforms.passes import halves_of_convolution, halves_of_norm
from outofcore.transforms.split.rules import ROWS
from outofcore.transforms.split.ways import Adjust, ArgumentName, CallView, Cut
from outofcore.units import MIB

_aten = torch.ops.aten
# Minimal bytes that a part adds up, and maximal number of parts.
PART_BYTES, _MAX_PARTS = 4 * MIB, 16
_PRECISE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


@dataclass(frozen=True)
class SumSplit:
    """The axis along which an op's sum can be split."""

    extent: int  # of the summed axis
    argument_cuts: Mapping[ArgumentName, Cut]  # the arguments that have this axis
    adjust: Adjust | None = None  # adjusts constants to a part
    grain: int = 1  # smallest length of a part


def capture_and_split_sums(capture: Callable[..., Captured], *, is_on: bool) -> Callable[..., Captured]:
    """Return a capture function that also splits large sums; ``capture`` itself unless ``is_on``."""
    return (lambda **arguments: split_sums(capture(**arguments))) if is_on else capture


def split_sums(captured: Captured, *, part_bytes: int = PART_BYTES) -> Captured:
    """Split large sums over rows or samples into partial sums, each of at least ``part_bytes`` bytes."""
    batch_independent = _batch_independent_storages(captured)
    values, storages = list(captured.values), list(captured.graph.storages)
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        halves = [
            part for half in halves_of_convolution(captured, op, call) for part in halves_of_norm(captured, *half)
        ]
        splits = [_find_split(captured, *half, batch_independent, part_bytes) for half in halves]
        if not any(splits):  # then the backward pass stays one op, too
            pairs.append((op, call))
            continue
        for (half, of_half), split in zip(halves, splits, strict=True):
            if split is None:
                pairs.append((half, of_half))
            else:
                pairs += _build_parts(half, of_half, *split, values, storages)
    if len(pairs) == len(captured.graph.ops):
        return captured
    graph = StepGraph(tuple(storages), captured.graph.ops, captured.graph.outputs)
    return drop_unused(with_ops(replace(captured, graph=graph, values=tuple(values)), pairs))


def _batch_independent_storages(captured: Captured) -> frozenset[int]:
    """Return the storages that do not depend on the inputs, such as parameters and constants."""
    graph = captured.graph
    independent = {s.id for s in graph.storages if s.id not in graph.creator and s.kind is not StorageKind.INPUT}
    for op in graph.ops:
        if op.reads and independent.issuperset(op.reads):
            independent.update(op.creates)
    return frozenset(independent)


def _find_split(
    captured: Captured, op: Op, call: Call, batch_independent: frozenset[int], part_bytes: int
) -> tuple[SumSplit, tuple[int, ...]] | None:
    """Return the split of an op's sum and the ends of its parts; None if the sum stays whole."""
    func = call.func
    rule = _SUMS.get(func._schema.name) if isinstance(func, OpOverload) else None
    if rule is None or not isinstance(func, OpOverload) or op.mutates or op.random or op.communicates:
        return None
    values, storages = captured.values, captured.graph.storages
    view = CallView(func, call, values, arguments_by_name(func, call.args, call.kwargs))
    results = view.results().values()
    if any(v.dtype not in _PRECISE or not covers(v, storages[v.storage].bytes) for v in results):
        return None
    if set(op.creates) != {v.storage for v in results}:
        return None
    if any(v.foreign or v.conjugate or v.negated for v in view.tensors().values()):
        return None
    split = rule(view)
    if split is None or split.extent < 2:
        return None
    summed_bytes = 0
    for name, cut in split.argument_cuts.items():
        value = view.value(*name)
        if value is None or value.merge_dims(cut.dims) is None or value.storage in batch_independent:
            return None
        summed_bytes += prod(value.shape) * value.dtype.itemsize
    parts = 1
    while 2 * parts <= min(_MAX_PARTS, split.extent // split.grain) and summed_bytes >= 2 * parts * part_bytes:
        parts *= 2
    if parts == 1:
        return None
    return split, tuple(split.extent * part // parts for part in range(parts + 1))


def _build_parts(
    op: Op, call: Call, split: SumSplit, ends: tuple[int, ...], values: list[Value], storages: list[Storage]
) -> list[tuple[Op, Call]]:
    """Return ops that compute the parts of a sum and add them up; extends ``values`` and ``storages``."""
    func: Any = call.func
    pairs: list[tuple[Op, Call]] = []
    numbers: dict[Value, int] = {}

    def number(value: Value) -> int:
        if value not in numbers:
            numbers[value] = len(values)
            values.append(value)
        return numbers[value]

    for low, high in pairwise(ends):
        named = dict(arguments_by_name(func, call.args, call.kwargs))
        for (name, place), cut in split.argument_cuts.items():
            item = named[name] if place < 0 else named[name][place]
            merged = values[item.value].merge_dims(cut.dims)
            if merged is None:
                raise RuntimeError(f"the split of {op.name} cannot be viewed as slices; please report this")
            part = Ref(number(merged.narrow(cut.dims[0], low, high)))
            named[name] = part if place < 0 else [part if p == place else i for p, i in enumerate(named[name])]
        if split.adjust is not None:
            split.adjust(named, low, high)
        args, kwargs = arrange_arguments(func, call, named)
        results = call.results
        if low:
            results = tuple(
                None if v is None else _add_value_like(values[v], op, values, storages) for v in call.results
            )
        creates = tuple(dict.fromkeys(values[v].storage for v in results if v is not None))
        # An argument of which only the shape matters may be the result itself.
        own_results = dict(zip(call.results, results, strict=True))
        args, kwargs = map_leaves((args, kwargs), partial(_replace_ref, own_results), Ref)
        family = family_text(op.name, args, kwargs, values)
        pairs.append((replace(op, creates=creates, family=family), Call(func, args, kwargs, results)))
        for result, result_part in zip(call.results, results, strict=True):
            if low and result is not None and result_part is not None:
                reads, mutates = (values[result].storage, values[result_part].storage), (values[result].storage,)
                args = (Ref(result), Ref(result_part))
                family = family_text("aten.add_.Tensor", args, {}, values)
                addition = Op(-1, "aten.add_.Tensor", reads, mutates, (), family=family, module=op.module)
                addition = replace(addition, source=op.source, module_class=op.module_class)
                pairs.append((addition, Call(_aten.add_.Tensor, args, {}, (None,))))
    return pairs


def _replace_ref(own_results: Mapping[int | None, int | None], ref: Ref) -> Ref:
    replacement = own_results.get(ref.value)
    return ref if replacement is None else Ref(replacement)


def _add_value_like(value: Value, op: Op, values: list[Value], storages: list[Storage]) -> int:
    """Append a value of the same layout with a new storage; return its index."""
    old = storages[value.storage]
    storages.append(Storage(len(storages), old.bytes, StorageKind.ACTIVATION, f"{old.name} part".strip()))
    values.append(replace(value, storage=len(storages) - 1))
    return len(values) - 1


# --- rules for splitting sums ----------------------------------------------------------------------------------------


def _split_product(view: CallView) -> SumSplit | None:
    """Split the product of two matrices along the dimension that it sums over."""
    first = view.value("self")
    if first is None or len(first.shape) != 2:
        return None
    cuts: dict[ArgumentName, Cut] = {("self", -1): Cut((1, 2)), ("mat2", -1): Cut((0, 1))}
    return SumSplit(first.shape[1], cuts, grain=ROWS)


def _split_sum(view: CallView) -> SumSplit | None:
    """Return the split of a sum along its first dimension; None if there is no such split."""
    summand, dims = view.value("self"), view.named.get("dim")
    if summand is None or not summand.shape or not dims or view.named.get("dtype") is not None:
        return None
    if 0 not in {d % len(summand.shape) for d in dims}:
        return None
    return SumSplit(summand.shape[0], {("self", -1): Cut((0, 1))})


def _split_weight_gradients(*arguments: str, sized: str = "") -> Callable[[CallView], SumSplit | None]:
    """Return a rule that splits weight gradients by samples; ``sized`` names the sample count, if any."""

    def set_size(named: dict[str, Any], low: int, high: int) -> None:
        if sized:
            named[sized] = high - low

    def rule(view: CallView) -> SumSplit | None:
        first = view.value(arguments[0])
        if view.named["output_mask"][0] or first is None or not first.shape:
            return None
        cuts: dict[ArgumentName, Cut] = {(name, -1): Cut((0, 1)) for name in arguments}
        if any((value := view.value(name)) is None or value.shape[0] != first.shape[0] for name in arguments):
            return None
        return SumSplit(first.shape[0], cuts, set_size)

    return rule


def _split_layer_norm_gradients(*arguments: str) -> Callable[[CallView], SumSplit | None]:
    """Return a rule that splits weight gradients of a layer norm by leading dimensions of its arguments."""

    def rule(view: CallView) -> SumSplit | None:
        first = view.value("input")
        if view.named["output_mask"][0] or first is None:
            return None
        lead = len(first.shape) - len(view.named["normalized_shape"])
        cuts: dict[ArgumentName, Cut] = {(name, -1): Cut((0, lead)) for name in ("input", *arguments)}
        return SumSplit(prod(first.shape[:lead]), cuts, grain=ROWS) if lead else None

    return rule


_SUMS: dict[str, Callable[[CallView], SumSplit | None]] = {
    "aten::mm": _split_product,
    "aten::sum": _split_sum,
    "aten::convolution_backward": _split_weight_gradients("grad_output", "input"),
    "aten::native_group_norm_backward": _split_weight_gradients("grad_out", "input", "mean", "rstd", sized="N"),
    "aten::native_layer_norm_backward": _split_layer_norm_gradients("grad_out", "mean", "rstd"),
}
