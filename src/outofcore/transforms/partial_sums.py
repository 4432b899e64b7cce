"""Sums over rows or samples computed in parts that are added up: the pass behind ``split="close"``.

The gradients of a weight, a norm's scale or a bias are sums over all rows or samples of a batch. One op needs
everything that it adds up on the device at once; several ops need one part at a time (``split``). Another order of
additions rounds differently, so such a step is close to plain PyTorch and not equal to the bit. The number of parts
depends on tensor sizes alone, and the pass precedes all that depend on the budget or the machine: the bits of a step
are the same at every budget.

Limits: sums of 16-bit numbers stay whole, as each part would be rounded to 16 bits; so do the statistics of batch
norms, and tables of embeddings.
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
from outofcore.capture.assembly import compacted
from outofcore.capture.captured import Call, Captured, Ref, Value, with_ops
from outofcore.capture.operators import by_name, family_text, placed
from outofcore.capture.tables import covers, map_leaves
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.transforms.passes import halves_of_convolution, halves_of_norm
from outofcore.transforms.split.rules import ROWS
from outofcore.transforms.split.ways import Cut, Given, Name, Settle
from outofcore.units import MIB

_aten = torch.ops.aten
# What a part adds up takes at least so many bytes; there are at most so many parts.
PART_BYTES, _MOST_PARTS = 4 * MIB, 16
_PRECISE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


@dataclass(frozen=True)
class Sum:
    """How an op's sum can be split.

    ``extent`` is the length of what is added up, ``given`` the arguments that are cut with it, ``settle`` what else
    changes from part to part, and ``grain`` the least length of a part.
    """

    extent: int
    given: Mapping[Name, Cut]
    settle: Settle | None = None
    grain: int = 1


def summing(capture: Callable[..., Captured], *, is_on: bool) -> Callable[..., Captured]:
    """Return ``capture`` followed by the pass; ``capture`` itself if it is off."""
    return (lambda **given: in_partial_sums(capture(**given))) if is_on else capture


def in_partial_sums(captured: Captured, *, part_bytes: int = PART_BYTES) -> Captured:
    """Split large sums over rows and samples into parts that each add up at least ``part_bytes``."""
    fixed = _fixed(captured)
    values, storages = list(captured.values), list(captured.graph.storages)
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        halves = [
            part for half in halves_of_convolution(captured, op, call) for part in halves_of_norm(captured, *half)
        ]
        apart = [_apart(captured, *half, fixed, part_bytes) for half in halves]
        if not any(apart):  # then it is not taken in halves either
            pairs.append((op, call))
            continue
        for (half, of_half), found in zip(halves, apart, strict=True):
            if found is None:
                pairs.append((half, of_half))
            else:
                pairs += _in_parts(half, of_half, *found, values, storages)
    if len(pairs) == len(captured.graph.ops):
        return captured
    graph = StepGraph(tuple(storages), captured.graph.ops, captured.graph.outputs)
    return compacted(with_ops(replace(captured, graph=graph, values=tuple(values)), pairs))


def _fixed(captured: Captured) -> frozenset[int]:
    """Return storages that are the same for every row: persistent ones and what follows from them alone."""
    graph = captured.graph
    found = {s.id for s in graph.storages if s.id not in graph.creator and s.kind is not StorageKind.INPUT}
    for op in graph.ops:
        if op.reads and found.issuperset(op.reads):
            found.update(op.creates)
    return frozenset(found)


def _apart(
    captured: Captured, op: Op, call: Call, fixed: frozenset[int], part_bytes: int
) -> tuple[Sum, tuple[int, ...]] | None:
    """Return how an op's sum is split, and where the parts begin and the last one ends; None if it stays whole."""
    func = call.func
    rule = _SUMS.get(func._schema.name) if isinstance(func, OpOverload) else None
    if rule is None or not isinstance(func, OpOverload) or op.mutates or op.random or op.communicates:
        return None
    values, storages = captured.values, captured.graph.storages
    given = Given(func, call, values, by_name(func, call.args, call.kwargs))
    results = given.results().values()
    if any(v.dtype not in _PRECISE or not covers(v, storages[v.storage].bytes) for v in results):
        return None
    if set(op.creates) != {v.storage for v in results}:
        return None
    if any(v.foreign or v.conjugate or v.negated for v in given.tensors().values()):
        return None
    found = rule(given)
    if found is None or found.extent < 2:
        return None
    count = 0
    for name, cut in found.given.items():
        value = given.value(*name)
        if value is None or value.merged(cut.dims) is None or value.storage in fixed:
            return None
        count += prod(value.shape) * value.dtype.itemsize
    parts = 1
    while 2 * parts <= min(_MOST_PARTS, found.extent // found.grain) and count >= 2 * parts * part_bytes:
        parts *= 2
    if parts == 1:
        return None
    return found, tuple(found.extent * part // parts for part in range(parts + 1))


def _in_parts(
    op: Op, call: Call, found: Sum, ends: tuple[int, ...], values: list[Value], storages: list[Storage]
) -> list[tuple[Op, Call]]:
    """Build the ops that compute the parts of a sum, each followed by the op that adds it to the earlier parts."""
    func: Any = call.func
    pairs: list[tuple[Op, Call]] = []
    numbers: dict[Value, int] = {}

    def number(value: Value) -> int:
        if value not in numbers:
            numbers[value] = len(values)
            values.append(value)
        return numbers[value]

    for low, high in pairwise(ends):
        named = dict(by_name(func, call.args, call.kwargs))
        for (name, place), cut in found.given.items():
            item = named[name] if place < 0 else named[name][place]
            whole = values[item.value].merged(cut.dims)
            if whole is None:
                raise RuntimeError(f"{op.name} was to be taken apart and cannot be; please report it")
            part = Ref(number(whole.narrowed(cut.dims[0], low, high)))
            named[name] = part if place < 0 else [part if p == place else i for p, i in enumerate(named[name])]
        if found.settle is not None:
            found.settle(named, low, high)
        args, kwargs = placed(func, call, named)
        results = call.results
        if low:
            results = tuple(None if v is None else _beside(values[v], op, values, storages) for v in call.results)
        creates = tuple(dict.fromkeys(values[v].storage for v in results if v is not None))
        # Where only the shape of a result matters, the result itself stands in.
        own = dict(zip(call.results, results, strict=True))
        args, kwargs = map_leaves((args, kwargs), partial(_standing, own), Ref)
        family = family_text(op.name, args, kwargs, values)
        pairs.append((replace(op, creates=creates, family=family), Call(func, args, kwargs, results)))
        for result, made in zip(call.results, results, strict=True):
            if low and result is not None and made is not None:
                reads, mutates = (values[result].storage, values[made].storage), (values[result].storage,)
                args = (Ref(result), Ref(made))
                family = family_text("aten.add_.Tensor", args, {}, values)
                added = Op(-1, "aten.add_.Tensor", reads, mutates, (), family=family, module=op.module)
                added = replace(added, source=op.source, module_class=op.module_class)
                pairs.append((added, Call(_aten.add_.Tensor, args, {}, (None,))))
    return pairs


def _standing(own: Mapping[int | None, int | None], ref: Ref) -> Ref:
    instead = own.get(ref.value)
    return ref if instead is None else Ref(instead)


def _beside(value: Value, op: Op, values: list[Value], storages: list[Storage]) -> int:
    """Add a value like another, on a new storage."""
    old = storages[value.storage]
    storages.append(Storage(len(storages), old.bytes, StorageKind.ACTIVATION, f"{old.name} part".strip()))
    values.append(replace(value, storage=len(storages) - 1))
    return len(values) - 1


# --- which sums can be taken apart -----------------------------------------------------------------------------------


def _product(given: Given) -> Sum | None:
    """Split the product of two matrices that both have a row for each row of the batch."""
    one = given.value("self")
    if one is None or len(one.shape) != 2:
        return None
    cuts: dict[Name, Cut] = {("self", -1): Cut((1, 2)), ("mat2", -1): Cut((0, 1))}
    return Sum(one.shape[1], cuts, grain=ROWS)


def _added_up(given: Given) -> Sum | None:
    """Split the sum over the first dimension, and maybe others."""
    one, dims = given.value("self"), given.named.get("dim")
    if one is None or not one.shape or not dims or given.named.get("dtype") is not None:
        return None
    if 0 not in {d % len(one.shape) for d in dims}:
        return None
    return Sum(one.shape[0], {("self", -1): Cut((0, 1))})


def _of_weights(*arguments: str, sized: str = "") -> Callable[[Given], Sum | None]:
    """Return a rule for the half of a backward pass that makes gradients of weights, split by samples."""

    def settle(named: dict[str, Any], low: int, high: int) -> None:
        if sized:
            named[sized] = high - low

    def rule(given: Given) -> Sum | None:
        first = given.value(arguments[0])
        if given.named["output_mask"][0] or first is None or not first.shape:
            return None
        cuts: dict[Name, Cut] = {(name, -1): Cut((0, 1)) for name in arguments}
        if any((value := given.value(name)) is None or value.shape[0] != first.shape[0] for name in arguments):
            return None
        return Sum(first.shape[0], cuts, settle)

    return rule


def _of_layer_norm(*arguments: str) -> Callable[[Given], Sum | None]:
    """Return a rule for the gradients of a layer norm's weights: split along the dimensions that are not normalized."""

    def rule(given: Given) -> Sum | None:
        first = given.value("input")
        if given.named["output_mask"][0] or first is None:
            return None
        lead = len(first.shape) - len(given.named["normalized_shape"])
        cuts: dict[Name, Cut] = {(name, -1): Cut((0, lead)) for name in ("input", *arguments)}
        return Sum(prod(first.shape[:lead]), cuts, grain=ROWS) if lead else None

    return rule


_SUMS: dict[str, Callable[[Given], Sum | None]] = {
    "aten::mm": _product,
    "aten::sum": _added_up,
    "aten::convolution_backward": _of_weights("grad_output", "input"),
    "aten::native_group_norm_backward": _of_weights("grad_out", "input", "mean", "rstd", sized="N"),
    "aten::native_layer_norm_backward": _of_layer_norm("grad_out", "mean", "rstd"),
}
