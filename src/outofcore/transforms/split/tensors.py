"""The tensors of a call by argument, and their layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import Call, Ref
from outofcore.capture.operators import arguments_by_name
from outofcore.capture.tables import leaves_in
from outofcore.transforms.split.ways import ArgumentName


def refs_of(call: Call) -> list[Ref]:
    return leaves_in((call.args, call.kwargs), Ref)


def values_of(call: Call) -> list[int]:
    """Return the value indices of a call's arguments, then of its results."""
    return [*(ref.value for ref in refs_of(call)), *(value for value in call.results if value is not None)]


def named_refs(call: Call) -> list[tuple[ArgumentName, int]]:
    """Return the name and the value index of each tensor argument of a call."""
    func = call.func
    if not isinstance(func, OpOverload):
        return [(("", place), ref.value) for place, ref in enumerate(refs_of(call))]
    refs: list[tuple[ArgumentName, int]] = []
    for name, item in arguments_by_name(func, call.args, call.kwargs).items():
        if isinstance(item, Ref):
            refs.append(((name, -1), item.value))
        elif isinstance(item, list | tuple):
            refs += [((name, place), ref.value) for place, ref in enumerate(item) if isinstance(ref, Ref)]
    return refs


def with_tensors(named: Mapping[str, Any], tensors: Mapping[ArgumentName, Any]) -> dict[str, Any]:
    """Return the arguments ``named`` with some tensors replaced by the values in ``tensors``."""
    replaced = dict(named)
    for name, item in named.items():
        if (name, -1) in tensors:
            replaced[name] = tensors[name, -1]
        elif isinstance(item, list | tuple) and any(isinstance(element, Ref) for element in item):
            replaced[name] = [tensors.get((name, place), element) for place, element in enumerate(item)]
    return replaced


def ref_at(call: Call, name: ArgumentName) -> Ref:
    func: Any = call.func
    if not isinstance(func, OpOverload):
        return refs_of(call)[name[1]]
    item = arguments_by_name(func, call.args, call.kwargs)[name[0]]
    return item if name[1] < 0 else item[name[1]]


def dense_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of ``shape`` without gaps; ``stride`` sets the order of its dimensions."""
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
