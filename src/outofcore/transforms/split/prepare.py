"""Rewrite ops that no rule can split into ops that can be: norms' backward passes and losses of many classes.

Both compute the same bits: a norm's two gradients come from one op each, which is claimed and checked, and a loss reads
only the log-probabilities of the targets, which needs no check.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture.captured import Call, Captured, Ref, Value, with_ops
from outofcore.capture.operators import family_text
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.transforms.passes import halves_of_norm
from outofcore.transforms.split.exactness import Claim
from outofcore.transforms.split.tensors import dense_like
from outofcore.transforms.split.ways import AS_ONE

_aten = torch.ops.aten
_NOWHERE = -100  # a target that is left out
# Losses that look at one class of each row or place, with the dimensions of their log-probabilities.
_LOSSES: dict[OpOverload, int] = {_aten.nll_loss_forward.default: 2, _aten.nll_loss2d_forward.default: 4}


def halved(captured: Captured, most: int, refused: Set[str]) -> tuple[Captured, list[Claim]]:
    """Split norms' large backward passes into two ops, and return the claims that the bits are the same.

    The gradient of the input can be cut by rows, those of scale and offset by columns.
    """
    graph = captured.graph
    pairs: list[tuple[Op, Call]] = []
    claims: list[Claim] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        need = sum(graph.storages[s].bytes for s in op.touched)
        halves = halves_of_norm(captured, op, call) if need > most else [(op, call)]
        found = [Claim(f"{half.family} as a half", of_half, AS_ONE, (0, 1), call) for half, of_half in halves]
        if len(halves) == 1 or any(claim.key in refused for claim in found):
            pairs.append((op, call))
        else:
            pairs += halves
            claims += found
    return (with_ops(captured, pairs), claims) if claims else (captured, [])


def small_losses(captured: Captured, most: int) -> Captured:
    """Let losses of large log-probabilities read only those of the targets, without changing a bit.

    ``nll_loss`` adds up one number for each row or place of an image. On a tensor with one class, that holds these
    numbers, it does the same.
    """
    graph, values = captured.graph, list(captured.values)
    storages = list(graph.storages)
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        need = sum(storages[s].bytes for s in op.touched)
        pairs += (_small_loss(op, call, storages, values) if need > most else None) or [(op, call)]
    if len(pairs) == len(graph.ops):
        return captured
    graph = StepGraph(tuple(storages), graph.ops, graph.outputs)
    return with_ops(replace(captured, graph=graph, values=tuple(values)), pairs)


def _small_loss(op: Op, call: Call, storages: list[Storage], values: list[Value]) -> list[tuple[Op, Call]] | None:
    """Return a loss that reads only the targets' log-probabilities, and the ops before it; None if it cannot."""
    rank = _LOSSES.get(call.func) if isinstance(call.func, OpOverload) else None
    if rank is None or call.kwargs:
        return None
    logs, target, weight, reduction, ignored = call.args
    given, wanted = values[logs.value], values[target.value]
    if weight is not None or len(given.shape) != rank or wanted.dtype is not torch.int64:
        return None
    pairs: list[tuple[Op, Call]] = []

    def made(func: OpOverload, args: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> Ref:
        storage, reads = len(storages), tuple(values[arg.value].storage for arg in args if isinstance(arg, Ref))
        count = prod(shape) * dtype.itemsize
        storages.append(Storage(storage, count, StorageKind.ACTIVATION, f"{op.module} loss".strip()))
        values.append(Value(storage, dtype, shape, dense_like(shape, tuple(range(len(shape), 0, -1)))))
        family = family_text(str(func), args, {}, values)
        new = Op(-1, str(func), reads, (), (storage,), family=family, module=op.module, source=op.source)
        new = replace(new, module_class=op.module_class)
        pairs.append((new, Call(func, args, {}, (len(values) - 1,))))
        return Ref(len(values) - 1)

    shape = wanted.shape
    column = (shape[0], 1, *shape[1:])
    counts = made(_aten.ne.Scalar, (target, ignored), torch.bool, shape)
    kept = values[made(_aten.mul.Tensor, (target, counts), torch.int64, shape).value]
    values.append(replace(kept, shape=column, stride=(kept.stride[0], *kept.stride)))
    own = made(_aten.gather.default, (logs, 1, Ref(len(values) - 1)), given.dtype, column)
    out = made(_aten.eq.Scalar, (target, ignored), torch.bool, shape)
    first = made(_aten.mul.Scalar, (out, _NOWHERE), torch.int64, shape)
    args = (own, first, None, reduction, _NOWHERE)
    reads = values[own.value].storage, values[first.value].storage
    family = family_text(op.name, args, {}, values)
    return [*pairs, (replace(op, reads=reads, family=family), replace(call, args=args))]
