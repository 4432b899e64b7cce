"""Passes that rewrite a captured step without changing a bit.

- Splitting: a convolution's backward pass becomes two ops, for the gradient of the input and of the weights.
- Shape-only arguments: an op that reads a tensor only for its shape no longer reads it.
- Recomputing casts: a widening cast runs again in the backward pass, so that its narrow input is saved.
- Reuse: an elementwise op writes its result over an argument at its last use.
- Hoisting: updates and gradient norms move up to where gradients are final.
- Joining: consecutive updates become one op, which saves fixed costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import OpOverload, OpOverloadPacket
from outofcore.analysis import LARGE_BYTES, is_large, live_bytes, peak_activation_op
from outofcore.analysis.hoisting import hoisted_order
from outofcore.capture.assembly import drop_unused
from outofcore.capture.captured import Call, Captured, Ref, with_ops
from outofcore.capture.device_traits import traits_of
from outofcore.capture.operators import arguments_by_name, arrange_arguments, family_text, traits
from outofcore.capture.optimizer_steps import call_of_update
from outofcore.capture.optimizers import OptimizerUpdate, is_torch_optimizer
from outofcore.capture.tables import covers, map_leaves
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.graph import Op, StepGraph, StorageKind

_aten = torch.ops.aten
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_NORMS_BACKWARD = frozenset({"aten::native_group_norm_backward", "aten::native_layer_norm_backward"})


def split_convolutions(captured: Captured) -> Captured:
    """Split each convolution's backward pass into one op for the input gradient and one for weight gradients."""
    pairs = zip(captured.graph.ops, captured.calls, strict=True)
    return with_ops(captured, [part for op, call in pairs for part in halves_of_convolution(captured, op, call)])


def halves_of_convolution(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]]:
    """Split a convolution's backward pass into two ops, for weights and input; return other ops unchanged."""
    halves = _halves(captured, op, call) if call.func is _CONVOLUTION_BACKWARD else None
    if halves is None:
        return [(op, call)]
    (of_input, call_of_input), of_weights = halves
    place = traits(_CONVOLUTION_BACKWARD).names.index("input")
    input_ref, result, values = call_of_input.args[place], call_of_input.results[0], captured.values
    if result is not None and isinstance(input_ref, Ref) and values[input_ref.value].has_same_layout(values[result]):
        # The op needs only the input's shape, which the result has.
        args = (*call_of_input.args[:place], Ref(result), *call_of_input.args[place + 1 :])
        used = {values[arg.value].storage for arg in args if isinstance(arg, Ref)}
        of_input = replace(of_input, reads=tuple(storage for storage in op.reads if storage in used))
        call_of_input = replace(call_of_input, args=args)
    return [of_weights, (of_input, call_of_input)]


def halves_of_norm(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]]:
    """Split the backward pass of a layer or group norm into two ops; return other ops unchanged."""
    is_norm = isinstance(call.func, OpOverload) and call.func._schema.name in _NORMS_BACKWARD
    return (_halves(captured, op, call) if is_norm else None) or [(op, call)]


def _halves(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]] | None:
    """Split a backward pass into input and weight gradients; None if it computes only one of the two."""
    func: Any = call.func
    named = arguments_by_name(func, call.args, call.kwargs)
    computed = [bool(flag) for flag in named["output_mask"]]
    if not computed[0] or not any(computed[1:]) or len(call.results) != len(computed):
        return None
    halves: list[tuple[Op, Call]] = []
    for mask in ([True] + [False] * len(computed[1:]), [False, *computed[1:]]):
        args, kwargs = arrange_arguments(func, call, named | {"output_mask": mask})
        results = tuple(v if flag else None for v, flag in zip(call.results, mask, strict=True))
        creates = tuple(dict.fromkeys(captured.values[v].storage for v in results if v is not None))
        half = replace(op, creates=creates, family=f"{op.family}{mask}")
        halves.append((half, replace(call, args=args, kwargs=kwargs, results=results)))
    return halves


# Operators that need only the shape of their argument, with their fill value; None: uninitialized.
_FILL_VALUES: dict[Any, int | None] = {
    _aten.empty_like.default: None,
    _aten.new_empty.default: None,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}


def drop_shape_only_arguments(captured: Captured) -> Captured:
    pairs = zip(captured.graph.ops, captured.calls, strict=True)
    return with_ops(captured, [_drop_shape_only_argument(captured, op, call) for op, call in pairs])


def _drop_shape_only_argument(captured: Captured, op: Op, call: Call) -> tuple[Op, Call]:
    """Replace an op such as ``zeros_like`` by one without tensor arguments; return other ops unchanged."""
    if call.func not in _FILL_VALUES or not op.reads or op.mutates or len(op.creates) != 1:
        return op, call
    result = call.results[0]
    value = None if result is None else captured.values[result]
    if value is None or value.foreign or value.conjugate or value.negated:
        return op, call
    if not covers(value, captured.graph.storages[value.storage].bytes):
        return op, call
    kwargs = {"dtype": value.dtype, "device": captured.device, "pin_memory": False}
    fill, shape = _FILL_VALUES[call.func], list(value.shape)
    args: tuple[Any, ...] = (shape, list(value.stride))
    func = _aten.empty_strided.default
    if fill is not None:
        if value.stride != tuple(prod(value.shape[dim + 1 :]) for dim in range(len(value.shape))):
            return op, call
        func, args = (_aten.zeros.default if fill == 0 else _aten.ones.default), (shape,)
    family = family_text(str(func), args, kwargs, [])
    return replace(op, name=str(func), reads=(), family=family), Call(func, args, kwargs, call.results)


# Kinds of storages that the step creates for itself alone; they may be overwritten.
OWN_KINDS = frozenset({StorageKind.ACTIVATION, StorageKind.GRADIENT})


def may_be_overwritten(graph: StepGraph, storage: int) -> bool:
    """Return whether the step creates a storage and needs its contents only within the step."""
    return graph.storages[storage].kind in OWN_KINDS and storage in graph.creator and storage not in graph.outputs


def recompute_casts(captured: Captured) -> Captured:
    """Repeat casts to wider data types in the backward pass, so that only narrow tensors are saved."""
    graph = captured.graph
    turn = peak_activation_op(graph)
    storages, values = list(graph.storages), list(captured.values)
    copy_of: dict[int, int] = {}  # the second copy of a storage, which all ops after the turn use
    casts: dict[int, list[tuple[Op, Call]]] = {}  # the second casts, by the op before which they run

    @cache
    def ref_in_copy(ref: Ref) -> Ref:
        value = values[ref.value]
        if value.storage not in copy_of:
            return ref
        values.append(replace(value, storage=copy_of[value.storage]))
        return Ref(len(values) - 1)

    for op, call in zip(graph.ops, captured.calls, strict=True):
        if not _is_worth_recomputing(captured, op, call, turn):
            continue
        [saved] = op.creates
        copy = copy_of[saved] = len(storages)
        storages.append(replace(storages[saved], id=copy))
        results = tuple(None if value is None else ref_in_copy(Ref(value)).value for value in call.results)
        first_use = next(use for use in graph.uses[saved] if use > turn)
        casts.setdefault(first_use, []).append((replace(op, creates=(copy,)), replace(call, results=results)))

    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        pairs += casts.get(op.id, [])
        if op.id > turn and not copy_of.keys().isdisjoint(op.touched):
            args, kwargs = map_leaves((call.args, call.kwargs), ref_in_copy, Ref)
            used = {
                name: tuple(copy_of.get(s, s) for s in getattr(op, name)) for name in ("reads", "mutates", "discards")
            }
            pairs.append((replace(op, **used), replace(call, args=args, kwargs=kwargs)))
        else:
            pairs.append((op, call))
    return with_ops(replace(captured, graph=replace(graph, storages=tuple(storages)), values=tuple(values)), pairs)


def _is_worth_recomputing(captured: Captured, op: Op, call: Call, peak_op: int) -> bool:
    """Return whether an op is a cast to a wider type, and repeating it after ``peak_op`` saves much memory."""
    graph = captured.graph
    if call.func is not _aten._to_copy.default or len(op.reads) != 1 or len(op.creates) != 1 or op.mutates:
        return False
    [source], [saved] = op.reads, op.creates
    narrow, wide = graph.storages[source], graph.storages[saved]
    first_use = next((use for use in graph.uses[saved] if use > peak_op), None)
    if first_use is None or op.id >= peak_op or wide.bytes <= narrow.bytes or not is_large(wide.bytes):
        return False
    if wide.kind is not StorageKind.ACTIVATION or saved in graph.outputs:
        return False
    # If the input outlives the first use, a plan can recompute the cast by itself.
    if narrow.kind not in OWN_KINDS or source not in graph.creator or graph.uses[source][-1] >= first_use:
        return False
    if any(source in graph.ops[use].mutates for use in graph.uses[source] if use > op.id):
        return False
    if any(saved in graph.ops[use].mutates for use in graph.uses[saved] if use < first_use):
        return False
    tensors = [*call.results, *(arg.value for arg in call.args if isinstance(arg, Ref))]
    return not any(captured.values[tensor].foreign for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class OverwritingOverload:
    """An overload that writes an op's result over one of its arguments."""

    run: OpOverload
    out: str | None  # name of the out argument; None: it writes to the first argument
    place: int  # of the overwritten argument

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.run(*args, **self.complete_kwargs(args, kwargs))

    def complete_kwargs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return ``kwargs``, with the argument to overwrite as the out argument if the overload has one."""
        return kwargs if self.out is None else {**kwargs, self.out: args[self.place]}


def reuse_arguments(captured: Captured, *, min_bytes: int = LARGE_BYTES) -> Captured:
    """Let elementwise ops write results of at least ``min_bytes`` over arguments that no later op uses."""
    graph = captured.graph
    reused: dict[int, int] = {}  # replaced storage -> reused storage
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        over = _find_overwriting(captured, op, call, min_bytes)
        if over is None:
            pairs.append((op, call))
            continue
        argument_storage: int = captured.values[call.args[over.place].value].storage
        reused[op.creates[0]] = reused.get(argument_storage, argument_storage)
        family = f"{op.family}, over argument {over.place}" if op.family else ""
        op_over = replace(op, mutates=(*op.mutates, argument_storage), creates=(), family=family)
        pairs.append((op_over, replace(call, func=over, results=(None,))))
    return drop_unused(with_ops(captured, pairs), reused) if reused else captured


def _find_overwriting(captured: Captured, op: Op, call: Call, min_bytes: int) -> OverwritingOverload | None:
    """Return an overload that writes an op's result over an argument that no later op uses; None if impossible."""
    graph, values = captured.graph, captured.values
    func = call.func
    if not isinstance(func, OpOverload) or torch.Tag.pointwise not in func.tags:
        return None
    if len(op.creates) != 1 or op.mutates or op.random or len(call.results) != 1 or call.results[0] is None:
        return None
    overloads = _overwriting_overloads(func)
    result = values[call.results[0]]
    result_storage = op.creates[0]
    if not overloads or result_storage in graph.outputs or graph.storages[result_storage].bytes < min_bytes:
        return None
    refs = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, Ref)]
    for place, item in enumerate(call.args):
        if not isinstance(item, Ref) or (overloads[0].out is None and place != 0):
            continue
        value = values[item.value]
        argument_storage = value.storage
        if (
            (value.dtype, value.layout()) == (result.dtype, result.layout())
            and graph.storages[argument_storage].bytes == graph.storages[result_storage].bytes
            and may_be_overwritten(graph, argument_storage)
            and graph.uses[argument_storage][-1] == op.id
            and sum(values[ref.value].storage == argument_storage for ref in refs) == 1
        ):
            return replace(overloads[0], place=place)
    return None


@cache
def _overwriting_overloads(func: OpOverload) -> list[OverwritingOverload]:
    """Return an operator's overloads that write into a given tensor: out variants, otherwise in-place ones."""
    packet = func._overloadpacket
    overloads = [
        OverwritingOverload(overload, outs[0], -1)
        for overload, outs in _matching_overloads(func, packet)
        if len(outs) == 1
    ]
    in_place = getattr(torch.ops.aten, f"{packet.__name__}_", None)
    if not overloads and in_place is not None:
        overloads = [
            OverwritingOverload(overload, None, 0) for overload, outs in _matching_overloads(func, in_place) if not outs
        ]
    return overloads


def _matching_overloads(func: OpOverload, packet: OpOverloadPacket) -> Iterator[tuple[OpOverload, list[str]]]:
    """Yield overloads in ``packet`` with the parameters of ``func``, each with the names of its out arguments."""
    parameters = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        has_parameters = [(a.name, str(a.type)) for a in arguments if not a.is_out] == parameters
        # Overloads generated from the plain one compute in another tensor and copy.
        if has_parameters and torch.Tag.generated not in overload.tags:
            yield overload, [a.name for a in arguments if a.is_out]


def hoist_order(captured: Captured) -> tuple[int, ...]:
    """Return the op ids in an order in which ops that free memory run earlier.

    Optimizer updates, and ops that turn large storages into small ones, run earlier unless they draw random numbers.
    They do not pass ops that may raise: when a step raises, it has run only updates that plain PyTorch would have run.
    """
    graph = captured.graph
    large = {s.id for s in graph.storages if is_large(s.bytes)}
    raising = ops_that_may_raise(captured)

    def shrinks(op: Op) -> bool:
        return bool(op.creates) and not op.mutates and large.isdisjoint(op.creates) and not large.isdisjoint(op.reads)

    movable = [
        op.id
        for op, call in zip(graph.ops, captured.calls, strict=True)
        if not op.random and op.id not in raising and (isinstance(call.func, OptimizerUpdate) or shrinks(op))
    ]
    return hoisted_order(graph, movable, raising)


def reorder(captured: Captured, order: Sequence[int]) -> Captured:
    return with_ops(captured, [(captured.graph.ops[old], captured.calls[old]) for old in order])


# Updates of all parameters at once need scratch memory: at most this fraction (1/8) of the step's live bytes.
_LIVE_SHARE_OF_UPDATES = 8
# When memory is short, parameters updated together take at most this fraction (1/16) of the room.
SHARE_OF_UPDATES = 16


def delay_updates(captured: Captured, max_bytes: int) -> Captured:
    """Delay optimizer updates so that joinable ones run consecutively, for up to ``max_bytes`` of parameters."""
    # The ops that run in the place of each op: a row of updates runs in the place of its last one.
    ops_by_place: list[list[int]] = [[op.id] for op in captured.graph.ops]
    row: list[tuple[Op, Call]] = []
    waiting: set[int] = set()
    foreach_by_default = traits_of(captured.device).updates_all_at_once
    raising = ops_that_may_raise(captured)
    for pair in zip(captured.graph.ops, captured.calls, strict=True):
        op = pair[0]
        if _joinable_update(*pair, foreach_by_default=foreach_by_default) is None:
            if op.id in raising or not waiting.isdisjoint(op.touched):
                row, waiting = [], set()
            continue
        if row and _can_join(row, pair, max_bytes, foreach_by_default=foreach_by_default):
            before = ops_by_place[row[-1][0].id]
            ops_by_place[op.id] = [*before, op.id]
            before.clear()
        else:
            row, waiting = [], set()
        row.append(pair)
        waiting.update(op.touched)
    return reorder(captured, [op for place in ops_by_place for op in place])


def join_updates(captured: Captured, max_bytes: int | None = None) -> Captured:
    """Join consecutive optimizer updates, up to ``max_bytes`` of parameters each (None: the device's limit)."""
    device = traits_of(captured.device)
    foreach_by_default, sizes = device.updates_all_at_once, device.update_bytes
    if max_bytes is None:
        max_bytes = sizes.joined
        if foreach_by_default:
            max_bytes = max(sizes.chunk, min(live_bytes(captured.graph) // _LIVE_SHARE_OF_UPDATES, max_bytes))
    rows: list[list[tuple[Op, Call]]] = []
    for pair in zip(captured.graph.ops, captured.calls, strict=True):
        if rows and _can_join(rows[-1], pair, max_bytes, foreach_by_default=foreach_by_default):
            rows[-1].append(pair)
        else:
            rows.append([pair])
    return with_ops(captured, map(_merge_updates, rows))


def _joinable_update(op: Op, call: Call, *, foreach_by_default: bool) -> OptimizerUpdate | None:
    """Return the optimizer update of an op; None for other ops and for updates that must stay alone."""
    update = call.func
    if not isinstance(update, OptimizerUpdate) or not is_torch_optimizer(update.optimizer) or op.random:
        return None
    for index in {member.group for member in update.members}:
        group = update.optimizer.param_groups[index]
        # By default torch.optim goes over all parameters at once, except on the CPU.
        if group.get("foreach") and not group.get("fused") and not foreach_by_default:
            return None
    return update


def _can_join(
    updates: Sequence[tuple[Op, Call]], candidate: tuple[Op, Call], max_bytes: int, *, foreach_by_default: bool
) -> bool:
    first, update = (
        _joinable_update(*updates[0], foreach_by_default=foreach_by_default),
        _joinable_update(*candidate, foreach_by_default=foreach_by_default),
    )
    if first is None or update is None or update.optimizer is not first.optimizer:
        return False
    if update.creates_state() != first.creates_state():
        return False  # first updates allocate their state, too
    members = [m for _, call in updates if isinstance(call.func, OptimizerUpdate) for m in call.func.members]
    # A parameter that is updated twice has a second update of its own.
    if {id(m.parameter) for m in members} & {id(m.parameter) for m in update.members}:
        return False
    return sum(m.parameter.numel() * m.parameter.element_size() for m in (*members, *update.members)) <= max_bytes


def _merge_updates(updates: Sequence[tuple[Op, Call]]) -> tuple[Op, Call]:
    if len(updates) == 1:
        return updates[0]
    ops, calls = [op for op, _ in updates], [call for _, call in updates]
    update = OptimizerUpdate.join([call.func for call in calls if isinstance(call.func, OptimizerUpdate)])
    params, grads, states = ([item for call in calls for item in call.args[place]] for place in range(3))
    args = (params, grads, states)
    op = replace(
        ops[0],
        reads=tuple(dict.fromkeys(s for part in ops for s in part.reads)),
        mutates=tuple(dict.fromkeys(s for part in ops for s in part.mutates)),
        family=" ".join(part.family for part in ops),
    )
    return op, call_of_update(update, args)


def rewrite_for_speed(traced: Captured) -> Captured:
    """Rewrite a step for plentiful memory: join optimizer updates and reuse arguments."""
    return reuse_arguments(join_updates(drop_shape_only_arguments(traced)))


def rewrite_for_lowest_memory(traced: Captured) -> Captured:
    """Rewrite a step to need the least memory, by all passes except joining optimizer updates."""
    captured = reuse_arguments(split_convolutions(recompute_casts(drop_shape_only_arguments(traced))))
    return reorder(captured, hoist_order(captured))


def rewrite_for_low_memory(traced: Captured, room: int) -> Captured:
    """Rewrite a step for low memory, with optimizer updates joined as far as ``room`` bytes allow it."""
    captured = rewrite_for_lowest_memory(traced)
    max_bytes = min(room // SHARE_OF_UPDATES, traits_of(captured.device).update_bytes.delayed)
    return join_updates(delay_updates(captured, max_bytes), max_bytes)
