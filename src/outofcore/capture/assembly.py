"""Puts together what a trace has written down into a ``Captured``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outofcore.capture.captured import (
    Call,
    Captured,
    GradientLeft,
    InputBinding,
    LeafKind,
    OutputLeaf,
    Ref,
    StateBinding,
    Value,
)
from outofcore.capture.mirror import Mirror
from outofcore.capture.tables import Tables, TracedOp
from outofcore.errors import CaptureError
from outofcore.graph import Op, StepGraph, Storage


@dataclass
class Ending:
    """How the step ends, in the trace's own numbers.

    Attributes:
        leaves: of the return value; the index of a STATE leaf is the place among ``Mirror.states`` or,
            from there on, among its gradients in order.
        gradients: for each parameter (place in ``Mirror.states``) the value left in ``.grad``.
        cleared: parameters without a gradient.
    """

    leaves: list[OutputLeaf] = field(default_factory=list)
    spec: Any = None
    gradients: dict[int, int] = field(default_factory=dict)
    cleared: list[int] = field(default_factory=list)


def assemble(tables: Tables, mirror: Mirror, optimizer_states: Sequence[StateBinding], ending: Ending) -> Captured:
    """The capture, with the storages and values that no op and no result uses left out."""
    outputs = [tables.values[leaf.index].storage for leaf in ending.leaves if leaf.kind is LeafKind.VALUE]
    outputs += [tables.values[value].storage for value in ending.gradients.values()]
    traced = _wanted(tables.ops, outputs)
    touched = {s for op in traced for s in (*op.reads, *op.mutates, *op.creates)} | set(outputs)

    kept, places = _states(tables, mirror, optimizer_states, ending, touched)
    _check_gradients(kept, [places[parameter] for parameter in ending.gradients])
    inputs = [(entry.leaf, entry.value) for entry in mirror.inputs if tables.values[entry.value].storage in touched]
    values = _Renumbered(_values_named(tables, traced, kept, inputs, ending))
    storages = _Renumbered(touched | {tables.values[value].storage for value in values.old})

    def remap(value: int) -> Value:
        return replace(tables.values[value], storage=storages[tables.values[value].storage])

    ops = tuple(
        Op(
            id=index,
            name=op.name,
            reads=storages.all(op.reads),
            mutates=storages.all(op.mutates),
            creates=storages.all(op.creates),
            rerunnable=op.rerunnable,
            random=op.random,
            family=op.family,
            module=op.module,
            source=op.source,
            discards=storages.all(op.discards),
        )
        for index, op in enumerate(traced)
    )
    graph = StepGraph(
        storages=tuple(
            Storage(new, tables.storages[old].bytes, tables.storages[old].kind, tables.storages[old].name)
            for new, old in enumerate(storages.old)
        ),
        ops=ops,
        outputs=tuple(dict.fromkeys(storages.all(outputs))),
    )
    graph.check()
    return Captured(
        graph=graph,
        calls=tuple(_renumber_call(op.call, values) for op in traced),
        values=tuple(remap(value) for value in values.old),
        inputs=tuple(InputBinding(leaf, values[value]) for leaf, value in inputs),
        states=tuple(replace(binding, value=values[binding.value]) for binding in kept),
        gradients_left=tuple(GradientLeft(places[p], values[v]) for p, v in ending.gradients.items()),
        gradients_cleared=tuple(places[p] for p in ending.cleared if p in places),
        constants={storages[old]: tensor for old, tensor in tables.constants.items() if old in touched},
        outputs=tuple(_renumber_leaf(leaf, values, places) for leaf in ending.leaves),
        output_spec=ending.spec,
        device=tables.device,
    )


def _check_gradients(states: Sequence[StateBinding], left: Iterable[int]) -> None:
    """Refuse a step that has to do with a gradient from before it and leaves another: one name cannot be both.

    Args:
        states: of the capture.
        left: the places of parameters whose gradients are left.

    Raises:
        CaptureError: it is such a step.
    """
    known = {binding.key for binding in states}
    both = [states[place].key for place in left if f"{states[place].key}.grad" in known]
    if both:
        raise CaptureError(
            f"the step uses the gradient that {both[0]} had before it, and leaves another one in its place: clear "
            "gradients at the end of the step (optimizer.zero_grad()), or give what you need of the old ones to the "
            "step as an argument"
        )


def _wanted(ops: Sequence[TracedOp], outputs: Sequence[int]) -> list[TracedOp]:
    """The ops without those of PyTorch's own that do nothing but make what nobody looks at."""
    seen = set(outputs)
    kept: list[TracedOp] = []
    for op in reversed(ops):
        idle = op.name.startswith("aten.") and op.creates and not op.mutates and not op.random
        if not idle or not seen.isdisjoint(op.creates):
            kept.append(op)
            seen.update(op.reads, op.mutates)
    return kept[::-1]


class _Renumbered:
    """Old numbers in order, each under its new number: its place."""

    def __init__(self, old: Iterable[int]) -> None:
        self.old = sorted(set(old))
        self._new = {number: index for index, number in enumerate(self.old)}

    def __getitem__(self, old: int) -> int:
        return self._new[old]

    def all(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._new[number] for number in numbers)


def _states(
    tables: Tables,
    mirror: Mirror,
    optimizer_states: Sequence[StateBinding],
    ending: Ending,
    touched: set[int],
) -> tuple[list[StateBinding], dict[int, int]]:
    """The bindings of the states that the step has to do with, and their places by the mirror's numbers."""
    returned = {leaf.index for leaf in ending.leaves if leaf.kind is LeafKind.STATE}
    # A parameter that no op touches is there all the same if its gradient comes or goes.
    changed = set(ending.gradients) | {p for p in ending.cleared if p in mirror.gradients}
    bindings: list[StateBinding] = []
    places: dict[int, int] = {}
    numbered = [*enumerate(mirror.states)]
    numbered += [(len(mirror.states) + i, m) for i, m in enumerate(mirror.gradients.values())]
    for number, entry in numbered:
        if tables.values[entry.value].storage in touched or number in returned or number in changed:
            places[number] = len(bindings)
            bindings.append(StateBinding(entry.key, entry.kind, entry.real, entry.value))
    return bindings + list(optimizer_states), places


def _values_named(
    tables: Tables, ops: list[TracedOp], states: list[StateBinding], inputs: list[tuple[int, int]], ending: Ending
) -> set[int]:
    named = {binding.value for binding in states} | {value for _, value in inputs} | set(ending.gradients.values())
    named |= {leaf.index for leaf in ending.leaves if leaf.kind is LeafKind.VALUE}
    for op in ops:
        named.update(result for result in op.call.results if result is not None)
        _refs_in((op.call.args, op.call.kwargs), named)
    return named


def _refs_in(tree: Any, found: set[int]) -> None:
    if isinstance(tree, Ref):
        found.add(tree.value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            _refs_in(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _refs_in(item, found)


def _renumber_tree(tree: Any, values: _Renumbered) -> Any:
    if isinstance(tree, Ref):
        return Ref(values[tree.value])
    if isinstance(tree, list):
        return [_renumber_tree(item, values) for item in tree]
    if type(tree) is tuple:
        return tuple(_renumber_tree(item, values) for item in tree)
    if isinstance(tree, dict):
        return {key: _renumber_tree(item, values) for key, item in tree.items()}
    return tree


def _renumber_call(call: Call, values: _Renumbered) -> Call:
    return replace(
        call,
        args=_renumber_tree(call.args, values),
        kwargs=_renumber_tree(call.kwargs, values),
        results=tuple(None if result is None else values[result] for result in call.results),
    )


def _renumber_leaf(leaf: OutputLeaf, values: _Renumbered, places: dict[int, int]) -> OutputLeaf:
    if leaf.kind is LeafKind.VALUE:
        return replace(leaf, index=values[leaf.index])
    if leaf.kind is LeafKind.STATE:
        return replace(leaf, index=places[leaf.index])
    return leaf
