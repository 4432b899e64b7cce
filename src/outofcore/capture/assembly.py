"""Build a ``Captured`` from a trace and from the state in which the step ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from outofcore.capture.device_traits import traits_of
from outofcore.capture.guard import Guard
from outofcore.capture.mirror import Mirror, MirroredState
from outofcore.capture.tables import Tables, covers, leaves_in, map_leaves
from outofcore.errors import CaptureError
from outofcore.graph import PERSISTENT_KINDS, Op, StepGraph, Storage, StorageKind

_STORAGE_FIELDS = ("reads", "mutates", "creates", "discards")


@dataclass
class StepEnding:
    """The state in which a step ended: its results, and the gradients that it leaves or clears."""

    # The index of a STATE leaf counts ``Mirror.states``, then the mirror's gradients. Others refer to ``Tables``.
    leaves: list[OutputLeaf] = field(default_factory=list)
    spec: Any = None
    gradients: dict[int, int] = field(default_factory=dict)  # values of ``.grad``, by parameter's index in ``states``
    cleared: list[int] = field(default_factory=list)  # parameters without a gradient


def assemble(tables: Tables, mirror: Mirror, optimizer_states: Sequence[StateBinding], ending: StepEnding) -> Captured:
    """Return a traced step as a ``Captured``, without unused ops, storages and values."""
    outputs = [tables.values[leaf.index].storage for leaf in ending.leaves if leaf.kind is LeafKind.VALUE]
    outputs += [tables.values[value].storage for value in ending.gradients.values()]
    traced = _drop_idle_ops(tables.ops, outputs, tables.optional_ops)
    touched = {s for op, _ in traced for s in op.touched} | set(outputs)
    bindings, places = _bind_states(tables, mirror, optimizer_states, ending, touched)
    keys = {binding.key for binding in bindings}
    for key in (bindings[places[parameter]].key for parameter in ending.gradients):
        # The old and the new gradient would have the same name.
        if f"{key}.grad" in keys:
            raise CaptureError(
                f"the step uses the gradient that {key} had before the step, and leaves another one: a captured step "
                "has one gradient per parameter; clear gradients at the end of the step (optimizer.zero_grad()), or "
                "pass the old ones as an argument"
            )
    watched = PERSISTENT_KINDS if traits_of(tables.device).watches_state else frozenset()
    storages = tuple(
        Storage(index, s.bytes, s.kind, s.name, s.kind in watched) for index, s in enumerate(tables.storages)
    )
    return drop_unused(
        Captured(
            graph=StepGraph(storages, tuple(op for op, _ in traced), tuple(outputs)),
            calls=tuple(call for _, call in traced),
            values=tuple(tables.values),
            inputs=tuple(
                InputBinding(entry.leaf, entry.value)
                for entry in mirror.inputs
                if tables.values[entry.value].storage in touched
            ),
            states=tuple(bindings),
            gradients_left=tuple(GradientLeft(places[p], value) for p, value in ending.gradients.items()),
            gradients_cleared=tuple(places[p] for p in ending.cleared if p in places),
            constants=tables.constants,
            outputs=tuple(
                replace(leaf, index=places[leaf.index]) if leaf.kind is LeafKind.STATE else leaf
                for leaf in ending.leaves
            ),
            output_spec=ending.spec,
            device=tables.device,
        )
    )


def drop_unused(captured: Captured, replacements: Mapping[int, int] | None = None) -> Captured:
    """Apply ``replacements`` (old to new storage), then return the capture without unused storages and values."""
    graph, replacements = captured.graph, replacements or {}  # replacements of dropped storages
    named = {binding.value for binding in (*captured.inputs, *captured.states, *captured.gradients_left)}
    named |= {leaf.index for leaf in captured.outputs if leaf.kind is LeafKind.VALUE}
    for call in captured.calls:
        named.update(result for result in call.results if result is not None)
        named.update(ref.value for ref in leaves_in((call.args, call.kwargs), Ref))
    value = {old: new for new, old in enumerate(sorted(named))}
    used = {s for op in graph.ops for s in op.touched} | set(graph.outputs)
    used |= {captured.values[old].storage for old in value}
    used |= {captured.ranges[s].whole for s in used if s in captured.ranges}
    storage = {old: new for new, old in enumerate(sorted({replacements.get(s, s) for s in used}))}
    new_storages = (graph.storages[old] for old in storage)
    new_storages = tuple(entry if entry.id == new else replace(entry, id=new) for new, entry in enumerate(new_storages))
    storage |= {old: storage[replacements[old]] for old in used if old in replacements}

    def renumber(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(storage[s] for s in old))

    def renumber_call(call: Call) -> Call:
        args, kwargs = map_leaves((call.args, call.kwargs), lambda ref: Ref(value[ref.value]), Ref)
        results = tuple(None if result is None else value[result] for result in call.results)
        return replace(call, args=args, kwargs=kwargs, results=results)

    def move(value: Value) -> Value:
        new = storage[value.storage]
        return value if new == value.storage else replace(value, storage=new)

    ops = tuple(
        replace(op, id=index, **{field: renumber(getattr(op, field)) for field in _STORAGE_FIELDS})
        for index, op in enumerate(graph.ops)
    )
    compact = StepGraph(new_storages, ops, renumber(graph.outputs))
    compact.check()
    return replace(
        captured,
        graph=compact,
        # If no value is dropped, their numbers are unchanged.
        calls=captured.calls if len(value) == len(captured.values) else tuple(map(renumber_call, captured.calls)),
        values=tuple(move(captured.values[old]) for old in value),
        inputs=tuple(replace(binding, value=value[binding.value]) for binding in captured.inputs),
        states=tuple(replace(binding, value=value[binding.value]) for binding in captured.states),
        gradients_left=tuple(replace(binding, value=value[binding.value]) for binding in captured.gradients_left),
        constants={storage[old]: tensor for old, tensor in captured.constants.items() if old in storage},
        exact={storage[old]: count for old, count in captured.exact.items() if old in storage},
        ranges={
            storage[old]: replace(state_range, whole=storage[state_range.whole])
            for old, state_range in captured.ranges.items()
            if old in storage
        },
        outputs=tuple(
            replace(leaf, index=value[leaf.index]) if leaf.kind is LeafKind.VALUE else leaf for leaf in captured.outputs
        ),
    )


def _drop_idle_ops(
    ops: Sequence[tuple[Op, Call]], outputs: Sequence[int], optional: Collection[int]
) -> list[tuple[Op, Call]]:
    """Return all ops except unused ATen ops without side effects and unused ops listed in ``optional``."""
    used = set(outputs)
    wanted_ops: list[tuple[Op, Call]] = []
    for op, call in reversed(ops):
        idle = op.name.startswith("aten.") and op.creates and not op.mutates and not op.random
        if op.id in optional:
            idle = True
        if not idle or not used.isdisjoint(op.creates + op.mutates):
            wanted_ops.append((op, call))
            used.update(op.reads, op.mutates)
    return wanted_ops[::-1]


def _bind_states(
    tables: Tables,
    mirror: Mirror,
    optimizer_states: Sequence[StateBinding],
    ending: StepEnding,
    touched: set[int],
) -> tuple[list[StateBinding], dict[int, int]]:
    """Return bindings of all state that the step uses, and a dict from state numbers to indices of bindings.

    Numbers count the mirror's parameters and buffers, then its gradients. ``optimizer_states`` are the last bindings.
    """
    returned = {leaf.index for leaf in ending.leaves if leaf.kind is LeafKind.STATE}
    # A parameter that no op touches is needed if the step sets or clears its gradient.
    changed = set(ending.gradients) | {p for p in ending.cleared if p in mirror.gradients}
    bindings: list[StateBinding] = []
    positions: dict[int, int] = {}
    numbered = [*enumerate(mirror.states)]
    numbered += [(len(mirror.states) + i, m) for i, m in enumerate(mirror.gradients.values())]
    for number, entry in numbered:
        tensor, value = entry.persistent
        if tables.values[value].storage in touched or number in returned or number in changed:
            positions[number] = len(bindings)
            bindings.append(StateBinding(entry.key, entry.kind, tensor, value))
    return bindings + list(optimizer_states), positions


RunOp = Callable[..., torch.Tensor]


def read_ending(result: Any, mirror: Mirror, tables: Tables, guard: Guard, run: RunOp) -> StepEnding:
    """Collect a traced step's results and gradients, and record the copy ops that end the step."""
    _check_requires_grad(mirror)
    _restore_storages(mirror, tables, guard, run)
    if mirror.sharding is not None:
        mirror.sharding.sync_all(run)
    ending = StepEnding()
    _read_gradients(ending, mirror, tables, run)
    leaves, ending.spec = tree_flatten(result)
    ending.leaves = [_output_leaf(leaf, mirror, tables, run) for leaf in leaves]
    return ending


def check_inputs(mirror: Mirror, tables: Tables) -> None:
    """Raise ``CaptureError`` if the step writes to an input that shares memory, or leaves gradients in inputs."""
    written = {storage for op, _ in tables.ops for storage in op.mutates}
    for storage, entry in mirror.inputs_sharing_memory().items():
        if storage in written:
            raise CaptureError(
                f"the step writes into argument {entry.name}, whose memory another argument, parameter or buffer "
                "shares: the write would not reach the other one; pass a clone(), or do not write in place"
            )
    for entry in mirror.inputs:
        if entry.fake.grad is not None:
            raise CaptureError(
                f"the step leaves a gradient in argument {entry.name}: a captured step cannot set .grad of its "
                "arguments; use torch.autograd.grad and return the gradient"
            )


def _check_requires_grad(mirror: Mirror) -> None:
    """Refuse a step that leaves ``requires_grad`` of a parameter or buffer changed."""
    for state in mirror.states:
        if state.fake.requires_grad != state.requires_grad:
            raise CaptureError(
                f"the step leaves requires_grad of {state.name} at {state.fake.requires_grad}: the next step would "
                "compute something else; set it back at the end of the step, or set it before the step"
            )


def _restore_storages(mirror: Mirror, tables: Tables, guard: Guard, run: RunOp) -> None:
    """For each parameter or buffer that the step replaced, record a copy of the new tensor into the old storage."""
    moved: list[tuple[MirroredState, torch.Tensor]] = []
    for path, old, bound in guard.rebound_buffers():
        state, new = mirror.by_real.get(id(old)), mirror.fakes.get(id(bound), bound)
        if state is None or not isinstance(new, FakeTensor):
            raise CaptureError(
                f"the step replaces the buffer {path} by {'None' if new is None else 'a tensor from outside'}: the "
                "graph would go on using the old one; copy_() into it instead"
            )
        moved.append((state, new))
    replaced = {id(state) for state, _ in moved}
    moved += [(state, state.fake) for state in mirror.states if id(state) not in replaced]
    changed = [(state, now) for state, now in moved if tables.storage_of(now) != tables.values[state.value].storage]
    for state, now in changed:
        if now.shape != state.alias.shape or now.dtype != state.alias.dtype or now.device != state.alias.device:
            raise CaptureError(
                f"the step replaces {state.name} by a {now.dtype} tensor of shape {tuple(now.shape)}; it was "
                f"{state.alias.dtype} of shape {tuple(state.alias.shape)}: the next step would compute something "
                "else; keep the shape and dtype, or return the new tensor"
            )
    # If states swap storages, all of them must be read before any is written.
    shared = {tables.values[state.value].storage for state, _ in changed}
    sources = [
        run(torch.ops.aten.clone.default, now.detach()) if tables.storage_of(now) in shared else now.detach()
        for _, now in changed
    ]
    for (state, _), source in zip(changed, sources, strict=True):
        run(torch.ops.aten.copy_.default, state.alias, source)


def _read_gradients(ending: StepEnding, mirror: Mirror, tables: Tables, run: RunOp) -> None:
    """Add the step's new gradients, and the parameters that have no gradient, to ``ending``."""
    claimed: set[int] = set()
    for index, state in enumerate(mirror.states):
        if state.kind is not StorageKind.PARAMETER or not state.fake.is_leaf:
            continue
        grad = state.fake.grad
        if grad is None:
            ending.cleared.append(index)
            continue
        if state.traced is not None:
            traced_value = state.traced.end_gradient(grad, run)
            if traced_value is not None:
                ending.gradients[index] = traced_value
            continue
        storage = tables.storage_of(grad)
        before = mirror.gradients.get(index)
        if before is not None and tables.values[before.value].storage == storage:
            continue
        value = tables.value_of(grad)
        entry = tables.storages[storage]
        if not entry.created or storage in claimed or not covers(tables.values[value], entry.bytes):
            value = tables.value_of(run(torch.ops.aten.clone.default, grad.detach()))
            storage = tables.values[value].storage
            entry = tables.storages[storage]
        claimed.add(storage)
        entry.kind, entry.name = StorageKind.GRADIENT, f"{state.name}.grad"
        ending.gradients[index] = value


def _output_leaf(leaf: Any, mirror: Mirror, tables: Tables, run: RunOp) -> OutputLeaf:
    """Register one result of the step; clone it if it is a view of memory that the step did not create."""
    if not isinstance(leaf, torch.Tensor):
        if any(isinstance(item, FakeTensor) for item in getattr(leaf, "__dict__", {}).values()):
            raise CaptureError(
                f"the step returns a {type(leaf).__name__} with tensors inside, which the capture cannot find: return "
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
    for index, state in enumerate((*mirror.states, *mirror.gradients.values())):
        if state.value == value and state.own_shard is not None:
            raise CaptureError(
                f"the step returns {state.name}, whose bytes are spread over the processes between two steps; return "
                "a clone()"
            )
        if state.value == value:
            return OutputLeaf(LeafKind.STATE, index)
    if not tables.storages[storage].created:
        value = tables.value_of(run(torch.ops.aten.clone.default, fake.detach()))
        storage = tables.values[value].storage
    if tables.storages[storage].kind is StorageKind.ACTIVATION:
        tables.storages[storage].kind = StorageKind.OUTPUT
    return OutputLeaf(LeafKind.VALUE, value)
