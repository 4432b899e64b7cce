"""Passes over a captured step; each rewrites the step without changing a bit.

``fastest`` combines those for plentiful memory, ``leanest`` those for short memory.

- Splitting: a convolution's backward pass becomes two ops, for the gradient of its input and for those of weight and
  bias. The peak is then that of the larger one; the first needs only the input's shape.
- By shape: an op that reads another tensor only for its shape, as dropout does for its mask, does without it.
- Recomputing casts: a widening cast runs again in the backward pass, so that its input is saved and not its result.
- Reuse: an elementwise op writes its result over an argument that nobody needs any more.
- Hoisting: updates and gradient norms move up to where gradients are final.
- Joining: consecutive updates become one op, as an optimizer's step has a fixed price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import OpOverload, OpOverloadPacket
from outofcore.analysis import LARGE_BYTES, fullest_op, is_large, live_bytes
from outofcore.analysis.hoisting import hoisted_order
from outofcore.capture.assembly import compacted
from outofcore.capture.captured import Call, Captured, Ref, with_ops
from outofcore.capture.device_traits import traits_of
from outofcore.capture.operators import by_name, family_text, placed, traits
from outofcore.capture.optimizer_steps import call_of_update
from outofcore.capture.optimizers import OptimizerUpdate, is_torchs_own
from outofcore.capture.tables import covers, map_leaves
from outofcore.capture.value_errors import ops_that_may_raise
from outofcore.graph import Op, StepGraph, StorageKind

_aten = torch.ops.aten
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_NORMS_BACKWARD = frozenset({"aten::native_group_norm_backward", "aten::native_layer_norm_backward"})


def split(captured: Captured) -> Captured:
    """Split every convolution's backward pass that has both halves into two ops."""
    pairs = zip(captured.graph.ops, captured.calls, strict=True)
    return with_ops(captured, [part for op, call in pairs for part in halves_of_convolution(captured, op, call)])


def halves_of_convolution(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]]:
    """Split a convolution's backward pass into two ops; return any other op, or one with a single half, unchanged."""
    halves = _halves(captured, op, call) if call.func is _CONVOLUTION_BACKWARD else None
    if halves is None:
        return [(op, call)]
    (of_input, call_of_input), of_weights = halves
    place = traits(_CONVOLUTION_BACKWARD).names.index("input")
    given, result, values = call_of_input.args[place], call_of_input.results[0], captured.values
    if result is not None and isinstance(given, Ref) and values[given.value].is_laid_like(values[result]):
        # Of the input only the shape matters.
        args = (*call_of_input.args[:place], Ref(result), *call_of_input.args[place + 1 :])
        used = {values[arg.value].storage for arg in args if isinstance(arg, Ref)}
        of_input = replace(of_input, reads=tuple(storage for storage in op.reads if storage in used))
        call_of_input = replace(call_of_input, args=args)
    return [of_weights, (of_input, call_of_input)]


def halves_of_norm(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]]:
    """Split a layer or group norm's backward pass into two ops: gradient of the input, and of the weights.

    Any other op is returned unchanged.
    """
    is_norm = isinstance(call.func, OpOverload) and call.func._schema.name in _NORMS_BACKWARD
    return (_halves(captured, op, call) if is_norm else None) or [(op, call)]


def _halves(captured: Captured, op: Op, call: Call) -> list[tuple[Op, Call]] | None:
    """Split a backward pass into the gradient of its input and those of its weights; None if it makes only one."""
    func: Any = call.func
    named = by_name(func, call.args, call.kwargs)
    wanted = [bool(flag) for flag in named["output_mask"]]
    if not wanted[0] or not any(wanted[1:]) or len(call.results) != len(wanted):
        return None
    halves: list[tuple[Op, Call]] = []
    for mask in ([True] + [False] * len(wanted[1:]), [False, *wanted[1:]]):
        args, kwargs = placed(func, call, named | {"output_mask": mask})
        results = tuple(v if flag else None for v, flag in zip(call.results, mask, strict=True))
        creates = tuple(dict.fromkeys(captured.values[v].storage for v in results if v is not None))
        half = replace(op, creates=creates, family=f"{op.family}{mask}")
        halves.append((half, replace(call, args=args, kwargs=kwargs, results=results)))
    return halves


# Operators that take nothing of a tensor but its shape, and the number that they fill another with; None: with nothing.
_AS_LARGE: dict[Any, int | None] = {
    _aten.empty_like.default: None,
    _aten.new_empty.default: None,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}


def by_shape(captured: Captured) -> Captured:
    """Drop arguments of which an op needs only the shape."""
    pairs = zip(captured.graph.ops, captured.calls, strict=True)
    return with_ops(captured, [_by_shape(captured, op, call) for op, call in pairs])


def _by_shape(captured: Captured, op: Op, call: Call) -> tuple[Op, Call]:
    if call.func not in _AS_LARGE or not op.reads or op.mutates or len(op.creates) != 1:
        return op, call
    result = call.results[0]
    value = None if result is None else captured.values[result]
    if value is None or value.foreign or value.conjugate or value.negated:
        return op, call
    if not covers(value, captured.graph.storages[value.storage].bytes):
        return op, call
    kwargs = {"dtype": value.dtype, "device": captured.device, "pin_memory": False}
    fill, shape = _AS_LARGE[call.func], list(value.shape)
    args: tuple[Any, ...] = (shape, list(value.stride))
    func = _aten.empty_strided.default
    if fill is not None:
        if value.stride != tuple(prod(value.shape[dim + 1 :]) for dim in range(len(value.shape))):
            return op, call
        func, args = (_aten.zeros.default if fill == 0 else _aten.ones.default), (shape,)
    family = family_text(str(func), args, kwargs, [])
    return replace(op, name=str(func), reads=(), family=family), Call(func, args, kwargs, call.results)


# What may be written over: what the step itself has made, and what nobody sees when it ends.
PASSING = frozenset({StorageKind.ACTIVATION, StorageKind.GRADIENT})


def may_be_overwritten(graph: StepGraph, storage: int) -> bool:
    """Return whether only ops of the step can miss what a storage held."""
    return graph.storages[storage].kind in PASSING and storage in graph.creator and storage not in graph.outputs


def recompute_casts(captured: Captured) -> Captured:
    """Return the same step, to the bit, with widening casts recomputed in the backward pass.

    Norms of a bfloat16 model cast their input to float32. Plain PyTorch saves the copy for the backward pass and frees
    the input. Here the input is saved, in half the bytes, and the cast runs a second time before the first use of the
    copy in the backward pass. A plan can then recompute a transformer block from its input as well.
    """
    graph = captured.graph
    turn = fullest_op(graph)
    storages, values = list(graph.storages), list(captured.values)
    copy_of: dict[int, int] = {}  # the second copy of a storage, which all ops after the turn use
    casts: dict[int, list[tuple[Op, Call]]] = {}  # the second casts, by the op before which they run

    @cache
    def in_copy(ref: Ref) -> Ref:
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
        results = tuple(None if value is None else in_copy(Ref(value)).value for value in call.results)
        first_use = next(use for use in graph.uses[saved] if use > turn)
        casts.setdefault(first_use, []).append((replace(op, creates=(copy,)), replace(call, results=results)))

    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        pairs += casts.get(op.id, [])
        if op.id > turn and not copy_of.keys().isdisjoint(op.touched):
            args, kwargs = map_leaves((call.args, call.kwargs), in_copy, Ref)
            used = {
                name: tuple(copy_of.get(s, s) for s in getattr(op, name)) for name in ("reads", "mutates", "discards")
            }
            pairs.append((replace(op, **used), replace(call, args=args, kwargs=kwargs)))
        else:
            pairs.append((op, call))
    return with_ops(replace(captured, graph=replace(graph, storages=tuple(storages)), values=tuple(values)), pairs)


def _is_worth_recomputing(captured: Captured, op: Op, call: Call, turn: int) -> bool:
    """Return whether an op is a widening cast that can run again after the turn and whose input is freed before."""
    graph = captured.graph
    if call.func is not _aten._to_copy.default or len(op.reads) != 1 or len(op.creates) != 1 or op.mutates:
        return False
    [source], [saved] = op.reads, op.creates
    narrow, wide = graph.storages[source], graph.storages[saved]
    first_use = next((use for use in graph.uses[saved] if use > turn), None)
    if first_use is None or op.id >= turn or wide.bytes <= narrow.bytes or not is_large(wide.bytes):
        return False
    if wide.kind is not StorageKind.ACTIVATION or saved in graph.outputs:
        return False
    # If the input outlives the first use, a plan can recompute the cast by itself.
    if narrow.kind not in PASSING or source not in graph.creator or graph.uses[source][-1] >= first_use:
        return False
    if any(source in graph.ops[use].mutates for use in graph.uses[source] if use > op.id):
        return False
    if any(saved in graph.ops[use].mutates for use in graph.uses[saved] if use < first_use):
        return False
    tensors = [*call.results, *(arg.value for arg in call.args if isinstance(arg, Ref))]
    return not any(captured.values[tensor].foreign for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class Over:
    """The overload of an op that takes the place of its result, and which argument it may overwrite."""

    run: OpOverload
    out: str | None  # what it calls the tensor that it writes its result to; None: it is always the first argument
    place: int  # of the argument that is written over

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.run(*args, **self.completed(args, kwargs))

    def completed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for ``run``."""
        return kwargs if self.out is None else {**kwargs, self.out: args[self.place]}


def reuse(captured: Captured, *, least: int = LARGE_BYTES) -> Captured:
    """Write large results of elementwise ops, of at least ``least`` bytes, over an argument.

    An argument is overwritten if this is its last use, the step has made it, and its layout is that of the result.
    """
    graph = captured.graph
    into: dict[int, int] = {}  # a storage that is gone, and the one in its place
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        over = _written_over(captured, op, call, least)
        if over is None:
            pairs.append((op, call))
            continue
        kept: int = captured.values[call.args[over.place].value].storage
        into[op.creates[0]] = into.get(kept, kept)
        family = f"{op.family}, over argument {over.place}" if op.family else ""
        op_over = replace(op, mutates=(*op.mutates, kept), creates=(), family=family)
        pairs.append((op_over, replace(call, func=over, results=(None,))))
    return compacted(with_ops(captured, pairs), into) if into else captured


def _written_over(captured: Captured, op: Op, call: Call, least: int) -> Over | None:
    """Return how an op writes its result over one of its arguments; None if it may not."""
    graph, values = captured.graph, captured.values
    func = call.func
    if not isinstance(func, OpOverload) or torch.Tag.pointwise not in func.tags:
        return None
    if len(op.creates) != 1 or op.mutates or op.random or len(call.results) != 1 or call.results[0] is None:
        return None
    ways = _told_where(func)
    result = values[call.results[0]]
    gone = op.creates[0]
    if not ways or gone in graph.outputs or graph.storages[gone].bytes < least:
        return None
    refs = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, Ref)]
    for place, item in enumerate(call.args):
        if not isinstance(item, Ref) or (ways[0].out is None and place != 0):
            continue
        value = values[item.value]
        kept = value.storage
        if (
            (value.dtype, value.layout()) == (result.dtype, result.layout())
            and graph.storages[kept].bytes == graph.storages[gone].bytes
            and may_be_overwritten(graph, kept)
            and graph.uses[kept][-1] == op.id
            and sum(values[ref.value].storage == kept for ref in refs) == 1
        ):
            return replace(ways[0], place=place)
    return None


@cache
def _told_where(func: OpOverload) -> list[Over]:
    """Return how to run an op with its result in a given place: in any, or in that of its first argument only."""
    packet = func._overloadpacket
    found = [Over(other, outs[0], -1) for other, outs in _alike(func, packet) if len(outs) == 1]
    in_place = getattr(torch.ops.aten, f"{packet.__name__}_", None)
    if not found and in_place is not None:
        found = [Over(other, None, 0) for other, outs in _alike(func, in_place) if not outs]
    return found


def _alike(func: OpOverload, packet: OpOverloadPacket) -> Iterator[tuple[OpOverload, list[str]]]:
    """Yield a packet's overloads that take an op's arguments, with the names of their extra arguments for results."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = other._schema.arguments
        same = [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted
        # Those generated from the plain overload compute elsewhere and then copy.
        if same and torch.Tag.generated not in other.tags:
            yield other, [a.name for a in arguments if a.is_out]


def hoisting(captured: Captured) -> tuple[int, ...]:
    """Order the op ids so that some ops move up to where memory is freed soonest; the bits stay the same.

    Moved are optimizer updates that draw no random numbers, and ops that turn large storages into small ones without
    changing any, such as the norm of a gradient. Ops that may raise stay where they are, and updates behind them: so a
    step that raises leaves what plain PyTorch leaves, or less.
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


def reordered(captured: Captured, order: Sequence[int]) -> Captured:
    """Return the step with its ops in another order, which must respect all dependencies."""
    return with_ops(captured, [(captured.graph.ops[old], captured.calls[old]) for old in order])


# Updates that go over all parameters at once need scratch memory for as many: a small part of what the step holds.
_SMALL_PART = 8
# Parameters that are updated together, where memory is short, are of this part of it at most.
SHARE_OF_UPDATES = 16


def delayed(captured: Captured, most: int) -> Captured:
    """Move each update down to the last one that it can be joined with.

    At most ``most`` bytes of parameters wait for their update.
    """
    # By op, what runs in its place. The updates of a row all do so in that of its last one.
    places: list[list[int]] = [[op.id] for op in captured.graph.ops]
    row: list[tuple[Op, Call]] = []
    held: set[int] = set()
    at_once = traits_of(captured.device).updates_all_at_once
    raising = ops_that_may_raise(captured)
    for pair in zip(captured.graph.ops, captured.calls, strict=True):
        op = pair[0]
        if _update(*pair, at_once=at_once) is None:
            if op.id in raising or not held.isdisjoint(op.touched):
                row, held = [], set()
            continue
        if row and _follows(row, pair, most, at_once=at_once):
            before = places[row[-1][0].id]
            places[op.id] = [*before, op.id]
            before.clear()
        else:
            row, held = [], set()
        row.append(pair)
        held.update(op.touched)
    return reordered(captured, [op for place in places for op in place])


def together(captured: Captured, most: int | None = None) -> Captured:
    """Join consecutive updates.

    An optimizer that goes from parameter to parameter needs scratch memory for one at a time; the fused ones need none.
    Those that go over all at once are joined on a device alone, where their fixed price is what counts. ``most`` limits
    the bytes of parameters of an op; None chooses a limit that needs little more memory.
    """
    device = traits_of(captured.device)
    at_once, sizes = device.updates_all_at_once, device.update_bytes
    if most is None:
        most = sizes.joined
        if at_once:
            most = max(sizes.chunk, min(live_bytes(captured.graph) // _SMALL_PART, most))
    rows: list[list[tuple[Op, Call]]] = []
    for pair in zip(captured.graph.ops, captured.calls, strict=True):
        if rows and _follows(rows[-1], pair, most, at_once=at_once):
            rows[-1].append(pair)
        else:
            rows.append([pair])
    return with_ops(captured, map(_joined, rows))


def _update(op: Op, call: Call, *, at_once: bool) -> OptimizerUpdate | None:
    """Return the op's update if it may be joined with others: on the CPU, if it goes from parameter to parameter."""
    update = call.func
    if not isinstance(update, OptimizerUpdate) or not is_torchs_own(update.optimizer) or op.random:
        return None
    for index in {member.group for member in update.members}:
        group = update.optimizer.param_groups[index]
        # Where nothing is said, torch.optim goes over all at once, but for the CPU.
        if group.get("foreach") and not group.get("fused") and not at_once:
            return None
    return update


def _follows(row: Sequence[tuple[Op, Call]], pair: tuple[Op, Call], most: int, *, at_once: bool) -> bool:
    """Return whether an op can join a row of updates without exceeding ``most`` bytes of parameters."""
    first, update = _update(*row[0], at_once=at_once), _update(*pair, at_once=at_once)
    if first is None or update is None or update.optimizer is not first.optimizer:
        return False
    if update.is_first() != first.is_first():
        return False  # those that have yet to make their state ask for other memory
    known = [m for _, call in row if isinstance(call.func, OptimizerUpdate) for m in call.func.members]
    # A parameter that is updated twice has a second update of its own.
    if {id(m.parameter) for m in known} & {id(m.parameter) for m in update.members}:
        return False
    return sum(m.parameter.numel() * m.parameter.element_size() for m in (*known, *update.members)) <= most


def _joined(row: Sequence[tuple[Op, Call]]) -> tuple[Op, Call]:
    if len(row) == 1:
        return row[0]
    parts, calls = [op for op, _ in row], [call for _, call in row]
    update = OptimizerUpdate.joined([call.func for call in calls if isinstance(call.func, OptimizerUpdate)])
    params, grads, states = ([item for call in calls for item in call.args[place]] for place in range(3))
    args = (params, grads, states)
    op = replace(
        parts[0],
        reads=tuple(dict.fromkeys(s for part in parts for s in part.reads)),
        mutates=tuple(dict.fromkeys(s for part in parts for s in part.mutates)),
        family=" ".join(part.family for part in parts),
    )
    return op, call_of_update(update, args)


def fastest(traced: Captured) -> Captured:
    """Rewrite a trace for plentiful memory: the ops as plain PyTorch runs them, except for reuse.

    Updates in a row run faster than updates among other ops, which evict each other's code and data from the caches.
    """
    return reuse(together(by_shape(traced)))


def leanest(traced: Captured) -> Captured:
    """Rewrite a trace to need the least memory: split ops and hoisted updates."""
    captured = reuse(split(recompute_casts(by_shape(traced))))
    return reordered(captured, hoisting(captured))


def lean(traced: Captured, room: int) -> Captured:
    """Rewrite a trace as ``leanest`` does, but join updates where a step within ``room`` bytes can afford it.

    Each update costs some hundred microseconds, and a single one finds its optimizer's code out of the processor's
    caches. So parameters whose gradients come soon after one another are updated together, and the first gradients are
    held longer.
    """
    captured = leanest(traced)
    most = min(room // SHARE_OF_UPDATES, traits_of(captured.device).update_bytes.delayed)
    return together(delayed(captured, most), most)
