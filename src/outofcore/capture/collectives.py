"""Collectives of ``torch.distributed`` as ops of the step, each in place on the storage of its result.

``dist.all_reduce`` and the like, synchronous or not, and the functional forms with ``wait_tensor`` all become one op
that blocks until the other processes have joined. It runs on a queue of its own, concurrently with ops that do not use
its tensors. The graph's dependencies replace the user's waits, which are not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from outofcore._torch_internals import (
    FUNCTIONAL_COLLECTIVES,
    gather_into,
    group_named,
    reduction_named,
    scatter_reduced,
    unboxed_group,
)
from outofcore.capture.refusals import refusal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# How the names of operators of collectives begin.
NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")


class Kind(Enum):
    ALL_REDUCE = "all_reduce"  # all processes get the sum of a tensor of each
    BROADCAST = "broadcast"  # all get the tensor of one
    ALL_GATHER = "all_gather_into_tensor"  # all get the tensors of all, one after the other
    REDUCE_SCATTER = "reduce_scatter_tensor"  # each gets its part of the sum
    ALL_TO_ALL = "all_to_all_single"  # each gets its part of the tensor of each, one after the other


@dataclass(frozen=True)
class Collective:
    """One collective of a step, to be called with its tensors: the result first, where it is not the only one.

    ``bytes`` is the size of its largest tensor, ``reduction`` is "sum", "max" and so on or empty, and ``root`` is the
    rank within the group whose tensor is broadcast.
    """

    kind: Kind
    group: ProcessGroup = field(compare=False)
    bytes: int
    dtype: torch.dtype
    reduction: str = ""
    root: int = 0

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run it and return when it is done; on a GPU when it is issued to the current stream."""
        match self.kind:
            case Kind.ALL_REDUCE:
                torch.distributed.all_reduce(tensors[0], reduction_named(self.reduction), group=self.group)
            case Kind.BROADCAST:
                torch.distributed.broadcast(tensors[0], group=self.group, group_src=self.root)
            case Kind.ALL_GATHER:
                gather_into(tensors[0], tensors[1], self.group)
            case Kind.REDUCE_SCATTER:
                scatter_reduced(tensors[0], tensors[1], reduction_named(self.reduction), self.group)
            case Kind.ALL_TO_ALL:
                torch.distributed.all_to_all_single(tensors[0], tensors[1], group=self.group)

    def __str__(self) -> str:
        how = self.reduction or (f"from rank {self.root}" if self.kind is Kind.BROADCAST else "")
        dtype = str(self.dtype).removeprefix("torch.")
        what = f"{self.kind.value}{f' ({how})' if how else ''}"
        return f"{what} of {self.bytes} bytes of {dtype} among {self.group.size()} processes"

    @property
    def sent_bytes(self) -> int:
        """The bytes that each process sends at least: those of a ring."""
        count = self.group.size()
        share = 2 if self.kind is Kind.ALL_REDUCE else 1
        return share * self.bytes * (count - 1) // count


@dataclass(frozen=True)
class Wanted:
    """A collective as the user's code requested it; ``target`` None asks for a new tensor."""

    kind: Kind
    group: ProcessGroup
    source: torch.Tensor
    target: torch.Tensor | None
    reduction: str = ""
    root: int = 0


def wanted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wanted:
    """Read the collective that an operator requests; raises ``CaptureError`` if it is not supported."""
    name = func._schema.name
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    if name in FUNCTIONAL_COLLECTIVES:
        kind, is_in_place = FUNCTIONAL_COLLECTIVES[name]
        source: torch.Tensor = given["input"]
        target = source if is_in_place else given.get("out")
        group = group_named(given["group_name"])
        return Wanted(Kind(kind), group, source, target, given.get("reduce_op", "").lower(), given.get("src", 0))
    match name:
        case "c10d::allreduce_" | "c10d::broadcast_" if len(given["tensors"]) == 1:
            tensor: torch.Tensor = given["tensors"][0]
            group = unboxed_group(given["process_group"])
            if name == "c10d::broadcast_":
                return Wanted(Kind.BROADCAST, group, tensor, tensor, root=given["root_rank"])
            return Wanted(Kind.ALL_REDUCE, group, tensor, tensor, _reduction(func, given["reduce_op"]))
        case "c10d::_allgather_base_":
            group = unboxed_group(given["process_group"])
            return Wanted(Kind.ALL_GATHER, group, given["input_tensor"], given["output_tensor"])
        case "c10d::_reduce_scatter_base_":
            group, reduction = unboxed_group(given["process_group"]), _reduction(func, given["reduce_op"])
            return Wanted(Kind.REDUCE_SCATTER, group, given["input_tensor"], given["output_tensor"], reduction)
        case _:
            raise refusal(
                f"the step uses the collective {func}",
                "a step can have all_reduce, broadcast, all_gather_into_tensor and reduce_scatter_tensor, whose "
                "results are one tensor each",
                "use one of these, or call it between two steps",
            )


def _reduction(func: Any, boxed: Any) -> str:
    found = reduction_named(boxed)
    if isinstance(found, str):
        return found
    raise refusal(
        f"the step uses the collective {func} with {boxed}",
        "it is not one of the plain reductions",
        "sum, and multiply the result",
    )
