"""Rewrite ops that no rule can split: the backward passes of norms, and losses of many classes."""

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
from outofcore.transforms.split.exactness import ExactnessCheck
from outofcore.transforms.split.tensors import dense_like
from outofcore.transforms.split.ways import UNSPLIT

_aten = torch.ops.aten
_IGNORED_TARGET = -100  # an ignored target
# Losses that read one class per row or pixel, with the rank of their log-probabilities.
_LOSSES: dict[OpOverload, int] = {_aten.nll_loss_forward.default: 2, _aten.nll_loss2d_forward.default: 4}


def split_norms(captured: Captured, max_bytes: int, refused: Set[str]) -> tuple[Captured, list[ExactnessCheck]]:
    """Split large backward passes of norms into two ops each; return the step and the exactness checks it needs."""
    graph = captured.graph
    pairs: list[tuple[Op, Call]] = []
    kept_checks: list[ExactnessCheck] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        need = sum(graph.storages[s].bytes for s in op.touched)
        halves = halves_of_norm(captured, op, call) if need > max_bytes else [(op, call)]
        checks = [
            ExactnessCheck(f"{half.family} as a half", of_half, UNSPLIT, (0, 1), call) for half, of_half in halves
        ]
        if len(halves) == 1 or any(check.key in refused for check in checks):
            pairs.append((op, call))
        else:
            pairs += halves
            kept_checks += checks
    return (with_ops(captured, pairs), kept_checks) if kept_checks else (captured, [])


def shrink_losses(captured: Captured, max_bytes: int) -> Captured:
    """Let large losses read only the log-probabilities of the targets, which a new op gathers."""
    graph, values = captured.graph, list(captured.values)
    storages = list(graph.storages)
    pairs: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        need = sum(storages[s].bytes for s in op.touched)
        pairs += (_shrink_loss(op, call, storages, values) if need > max_bytes else None) or [(op, call)]
    if len(pairs) == len(graph.ops):
        return captured
    graph = StepGraph(tuple(storages), graph.ops, graph.outputs)
    return with_ops(replace(captured, graph=graph, values=tuple(values)), pairs)


def _shrink_loss(op: Op, call: Call, storages: list[Storage], values: list[Value]) -> list[tuple[Op, Call]] | None:
    """Return ops that compute a loss from only the targets' log-probabilities; None to keep the loss."""
    rank = _LOSSES.get(call.func) if isinstance(call.func, OpOverload) else None
    if rank is None or call.kwargs:
        return None
    logs, target, weight, reduction, ignored = call.args
    log_probabilities, targets = values[logs.value], values[target.value]
    if weight is not None or len(log_probabilities.shape) != rank or targets.dtype is not torch.int64:
        return None
    pairs: list[tuple[Op, Call]] = []

    def add_op(func: OpOverload, args: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> Ref:
        storage, reads = len(storages), tuple(values[arg.value].storage for arg in args if isinstance(arg, Ref))
        count = prod(shape) * dtype.itemsize
        storages.append(Storage(storage, count, StorageKind.ACTIVATION, f"{op.module} loss".strip()))
        values.append(Value(storage, dtype, shape, dense_like(shape, tuple(range(len(shape), 0, -1)))))
        family = family_text(str(func), args, {}, values)
        new = Op(-1, str(func), reads, (), (storage,), family=family, module=op.module, source=op.source)
        new = replace(new, module_class=op.module_class)
        pairs.append((new, Call(func, args, {}, (len(values) - 1,))))
        return Ref(len(values) - 1)

    shape = targets.shape
    column = (shape[0], 1, *shape[1:])
    counts = add_op(_aten.ne.Scalar, (target, ignored), torch.bool, shape)
    target_indices = values[add_op(_aten.mul.Tensor, (target, counts), torch.int64, shape).value]
    values.append(replace(target_indices, shape=column, stride=(target_indices.stride[0], *target_indices.stride)))
    target_logs = add_op(_aten.gather.default, (logs, 1, Ref(len(values) - 1)), log_probabilities.dtype, column)
    is_ignored = add_op(_aten.eq.Scalar, (target, ignored), torch.bool, shape)
    first = add_op(_aten.mul.Scalar, (is_ignored, _IGNORED_TARGET), torch.int64, shape)
    args = (target_logs, first, None, reduction, _IGNORED_TARGET)
    reads = values[target_logs.value].storage, values[first.value].storage
    family = family_text(op.name, args, {}, values)
    return [*pairs, (replace(op, reads=reads, family=family), replace(call, args=args))]
