"""Collectives of ``torch.distributed`` as ops of the step, each in place on the storage of its result.

Such an op blocks until the other processes have joined, and runs on its own queue concurrently with ops that do not use
its tensors. Dependencies in the graph replace the user's waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from outofcore._torch_internals import (
    FUNCTIONAL_COLLECTIVES,
    convert_reduction,
    gather_into,
    reduce_scatter_into,
    resolve_group,
    unbox_group,
)
from outofcore.capture.refusals import refusal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Prefixes of the names of collective operators.
NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")


class CollectiveKind(Enum):
    ALL_REDUCE = "all_reduce"  # every process gets the sum over all processes
    BROADCAST = "broadcast"  # every process gets the tensor of one
    ALL_GATHER = "all_gather_into_tensor"  # every process gets the concatenation of all tensors
    REDUCE_SCATTER = "reduce_scatter_tensor"  # every process gets its part of the sum
    ALL_TO_ALL = "all_to_all_single"  # every process gets its part of each tensor, concatenated


@dataclass(frozen=True)
class Collective:
    """The function of a collective op. Its arguments are the result tensor and, if separate, the source."""

    kind: CollectiveKind
    group: ProcessGroup = field(compare=False)
    bytes: int  # of the largest tensor
    dtype: torch.dtype
    reduction: str = ""  # such as "sum", or empty
    root: int = 0  # rank in the group, for a broadcast

    def __call__(self, *tensors: torch.Tensor) -> None:
        match self.kind:
            case CollectiveKind.ALL_REDUCE:
                torch.distributed.all_reduce(tensors[0], convert_reduction(self.reduction), group=self.group)
            case CollectiveKind.BROADCAST:
                torch.distributed.broadcast(tensors[0], group=self.group, group_src=self.root)
            case CollectiveKind.ALL_GATHER:
                gather_into(tensors[0], tensors[1], self.group)
            case CollectiveKind.REDUCE_SCATTER:
                reduce_scatter_into(tensors[0], tensors[1], convert_reduction(self.reduction), self.group)
            case CollectiveKind.ALL_TO_ALL:
                torch.distributed.all_to_all_single(tensors[0], tensors[1], group=self.group)

    def __str__(self) -> str:
        detail = self.reduction or (f"from rank {self.root}" if self.kind is CollectiveKind.BROADCAST else "")
        dtype = str(self.dtype).removeprefix("torch.")
        label = f"{self.kind.value}{f' ({detail})' if detail else ''}"
        return f"{label} of {self.bytes} bytes of {dtype} among {self.group.size()} processes"

    @property
    def sent_bytes(self) -> int:
        """The minimum bytes that each process sends, as in a ring algorithm."""
        count = self.group.size()
        share = 2 if self.kind is CollectiveKind.ALL_REDUCE else 1
        return share * self.bytes * (count - 1) // count


@dataclass(frozen=True)
class CollectiveRequest:
    """A collective that the user's code requests. If ``target`` is None, its result is a new tensor."""

    kind: CollectiveKind
    group: ProcessGroup
    source: torch.Tensor
    target: torch.Tensor | None
    reduction: str = ""
    root: int = 0


def read_request(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CollectiveRequest:
    """Return the collective that an operator call requests; raise ``CaptureError`` if it is not supported."""
    name = func._schema.name
    arguments = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    if name in FUNCTIONAL_COLLECTIVES:
        kind, is_in_place = FUNCTIONAL_COLLECTIVES[name]
        source: torch.Tensor = arguments["input"]
        target = source if is_in_place else arguments.get("out")
        group = resolve_group(arguments["group_name"])
        return CollectiveRequest(
            CollectiveKind(kind), group, source, target, arguments.get("reduce_op", "").lower(), arguments.get("src", 0)
        )
    match name:
        case "c10d::allreduce_" | "c10d::broadcast_" if len(arguments["tensors"]) == 1:
            tensor: torch.Tensor = arguments["tensors"][0]
            group = unbox_group(arguments["process_group"])
            if name == "c10d::broadcast_":
                return CollectiveRequest(CollectiveKind.BROADCAST, group, tensor, tensor, root=arguments["root_rank"])
            return CollectiveRequest(
                CollectiveKind.ALL_REDUCE, group, tensor, tensor, _reduction_name(func, arguments["reduce_op"])
            )
        case "c10d::_allgather_base_":
            group = unbox_group(arguments["process_group"])
            return CollectiveRequest(
                CollectiveKind.ALL_GATHER, group, arguments["input_tensor"], arguments["output_tensor"]
            )
        case "c10d::_reduce_scatter_base_":
            group, reduction = unbox_group(arguments["process_group"]), _reduction_name(func, arguments["reduce_op"])
            return CollectiveRequest(
                CollectiveKind.REDUCE_SCATTER, group, arguments["input_tensor"], arguments["output_tensor"], reduction
            )
        case _:
            raise refusal(
                f"the step uses the collective {func}",
                "a step can contain all_reduce, broadcast, all_gather_into_tensor and reduce_scatter_tensor, which "
                "return one tensor",
                "use one of these, or call it between two steps",
            )


def _reduction_name(func: Any, boxed_reduction: Any) -> str:
    """Return the name of a reduction, such as "sum"; refuse unsupported reductions. ``func`` is for the message."""
    name = convert_reduction(boxed_reduction)
    if isinstance(name, str):
        return name
    raise refusal(
        f"the step uses the collective {func} with {boxed_reduction}",
        "only the reductions sum, avg, product, min and max are supported",
        "use one of these; in place of a sum with a factor, use sum and multiply its result",
    )
