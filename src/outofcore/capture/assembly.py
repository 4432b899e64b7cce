"""What a trace has written down, and what the step has left at its end, put together into a ``Captured``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outofcore._torch_internals import FakeTensor, tree_flatten
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
from outofcore.capture.guard import Guard
from outofcore.capture.mirror import Mirror, Mirrored
from outofcore.capture.tables import Tables, TracedOp, covers, leaves_in, map_leaves
from outofcore.errors import CaptureError
from outofcore.graph import Op, StepGraph, Storage, StorageKind


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
        named.update(ref.value for ref in leaves_in((op.call.args, op.call.kwargs), Ref))
    return named


def _renumber_call(call: Call, values: _Renumbered) -> Call:
    def renumbered(ref: Ref) -> Ref:
        return Ref(values[ref.value])

    return replace(
        call,
        args=map_leaves(call.args, Ref, renumbered),
        kwargs=map_leaves(call.kwargs, Ref, renumbered),
        results=tuple(None if result is None else values[result] for result in call.results),
    )


def _renumber_leaf(leaf: OutputLeaf, values: _Renumbered, places: dict[int, int]) -> OutputLeaf:
    if leaf.kind is LeafKind.VALUE:
        return replace(leaf, index=values[leaf.index])
    if leaf.kind is LeafKind.STATE:
        return replace(leaf, index=places[leaf.index])
    return leaf


RunOp = Callable[..., torch.Tensor]


def read_ending(result: Any, mirror: Mirror, tables: Tables, guard: Guard, run: RunOp) -> Ending:
    """Look at what the step has left, and record the ops that bring it into the form that a graph can leave.

    ``run(func, *args)`` runs an ATen operator on fakes and records it.

    Raises:
        CaptureError: state would be left in a form that the next step could not start from.
    """
    _check_flags(mirror)
    _put_back_state(mirror, tables, guard, run)
    ending = Ending()
    _read_gradients(ending, mirror, tables, run)
    leaves, ending.spec = tree_flatten(result)
    ending.leaves = [_leaf(leaf, mirror, tables, run) for leaf in leaves]
    return ending


def check_inputs(mirror: Mirror, tables: Tables) -> None:
    """Refuse a step that writes into an argument whose memory another argument or state shares.

    Raises:
        CaptureError: the write would not be seen through the other one.
    """
    written = {storage for op in tables.ops for storage in op.mutates}
    for storage, entry in mirror.sharing_inputs().items():
        if storage in written:
            raise CaptureError(
                f"the step writes into argument {entry.name}, whose memory another argument, parameter or buffer "
                "shares: the other one would not see it; pass a clone(), or do not write in place"
            )
    for entry in mirror.inputs:
        if entry.fake.grad is not None:
            raise CaptureError(
                f"the step leaves a gradient in argument {entry.name}: it could not be found there after the next "
                "step; use torch.autograd.grad and return the gradient"
            )


def _check_flags(mirror: Mirror) -> None:
    for state in mirror.states:
        if state.fake.requires_grad != state.requires_grad:
            raise CaptureError(
                f"the step leaves requires_grad of {state.name} at {state.fake.requires_grad}, not as it was: the "
                "next step would be another one; set it back at the end of the step, or set it before the step"
            )


def _put_back_state(mirror: Mirror, tables: Tables, guard: Guard, run: RunOp) -> None:
    """Copy what parameters and buffers are now into the storages that they had before the step."""
    by_real = {id(state.real): state for state in mirror.states}
    moved: list[tuple[Mirrored, torch.Tensor]] = []
    for path, old, bound in guard.rebound_buffers():
        state, new = by_real.get(id(old)), mirror.fakes.get(id(bound), bound)
        if state is None or not isinstance(new, FakeTensor):
            raise CaptureError(
                f"the step replaces the buffer {path} by {'nothing' if new is None else 'a tensor from outside'}: the "
                "graph would go on with the old one; copy_() into it instead"
            )
        moved.append((state, new))
    replaced = {id(state) for state, _ in moved}
    moved += [(state, state.fake) for state in mirror.states if id(state) not in replaced]
    changed = [(state, now) for state, now in moved if tables.storage_of(now) != tables.values[state.value].storage]
    for state, now in changed:
        if now.shape != state.alias.shape or now.dtype != state.alias.dtype or now.device != state.alias.device:
            raise CaptureError(
                f"the step replaces {state.name} by a {now.dtype} tensor of shape {tuple(now.shape)}; it was "
                f"{state.alias.dtype} of shape {tuple(state.alias.shape)}: the next step would be another one; keep "
                "the shape and dtype, or return the new tensor"
            )
    # Where states change places, all are read before any is written.
    own = {tables.values[state.value].storage for state, _ in changed}
    sources = [
        run(torch.ops.aten.clone.default, now.detach()) if tables.storage_of(now) in own else now.detach()
        for _, now in changed
    ]
    for (state, _), source in zip(changed, sources, strict=True):
        run(torch.ops.aten.copy_.default, state.alias, source)


def _read_gradients(ending: Ending, mirror: Mirror, tables: Tables, run: RunOp) -> None:
    taken: set[int] = set()
    for place, state in enumerate(mirror.states):
        if state.kind is not StorageKind.PARAMETER or not state.fake.is_leaf:
            continue
        grad = state.fake.grad
        if grad is None:
            ending.cleared.append(place)
            continue
        storage = tables.storage_of(grad)
        before = mirror.gradients.get(place)
        if before is not None and tables.values[before.value].storage == storage:
            continue
        value = tables.value_of(grad)
        entry = tables.storages[storage]
        if not entry.created or storage in taken or not covers(tables.values[value], entry.bytes):
            value = tables.value_of(run(torch.ops.aten.clone.default, grad.detach()))
            storage = tables.values[value].storage
            entry = tables.storages[storage]
        taken.add(storage)
        entry.kind, entry.name = StorageKind.GRADIENT, f"{state.name}.grad"
        ending.gradients[place] = value


def _leaf(leaf: Any, mirror: Mirror, tables: Tables, run: RunOp) -> OutputLeaf:
    if not isinstance(leaf, torch.Tensor):
        if any(isinstance(item, FakeTensor) for item in getattr(leaf, "__dict__", {}).values()):
            raise CaptureError(
                f"the step returns a {type(leaf).__name__} with tensors inside, which cannot be taken apart: return "
                "the tensors in a tuple, list or dict, or register the class with torch.utils._pytree"
            )
        return OutputLeaf(LeafKind.CONSTANT, constant=leaf)
    fake = mirror.fakes.get(id(leaf), leaf)
    if not isinstance(fake, FakeTensor):
        return OutputLeaf(LeafKind.CONSTANT, constant=leaf)
    storage, value = tables.storage_of(fake), tables.value_of(fake)
    for entry in mirror.inputs:
        if entry.fake is fake:
            return OutputLeaf(LeafKind.INPUT, entry.leaf)
    for place, state in enumerate((*mirror.states, *mirror.gradients.values())):
        if state.value == value:
            return OutputLeaf(LeafKind.STATE, place)
    if not tables.storages[storage].created:
        value = tables.value_of(run(torch.ops.aten.clone.default, fake.detach()))
        storage = tables.values[value].storage
    if tables.storages[storage].kind is StorageKind.ACTIVATION:
        tables.storages[storage].kind = StorageKind.OUTPUT
    return OutputLeaf(LeafKind.VALUE, value)
