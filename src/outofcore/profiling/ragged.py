"""Scratch inputs for ops whose work depends on whole numbers: all groups of a ragged product alike."""

from __future__ import annotations

import torch

from outofcore._torch_internals import OpOverload
from outofcore.capture import schema
from outofcore.execution.binding import BoundRun


def spread(run: BoundRun) -> None:
    """Let the offsets of a product of ragged groups of matrices divide what there is evenly.

    Zeros, which do for any index, would leave all groups empty and the op without work. How uneven groups are in
    training is not known before: routers of mixtures of experts are trained to keep them even.
    """
    if not isinstance(run.func, OpOverload) or run.func._schema.name != "aten::_grouped_mm":
        return
    given = schema.by_name(run.func, run.args, run.kwargs)
    one, other, offsets = given["self"], given["mat2"], given.get("offs")
    if offsets is None:
        return
    extent = other.shape[-1] if one.ndim == 3 else one.shape[0 if other.ndim == 3 else 1]
    groups = offsets.numel()
    offsets.copy_(torch.arange(1, groups + 1, dtype=torch.int64) * extent // groups)
