"""What is checkpointed when models are trained in the ways that PyTorch itself offers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from outofcore.errors import InputError

# The blocks of the models of the benchmarks: by their class, or by the list that they stand in.
_BLOCKS = frozenset({"BasicBlock", "BertLayer", "Block", "Bottleneck", "T5Block"})
_LISTS_OF_BLOCKS = frozenset({"down", "merge"})
# What selective checkpointing keeps: the results of products, which cost most to compute again; of fused attention,
# those of each kernel that PyTorch chooses from (on recent GPUs that of cuDNN).
_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that one would checkpoint, each with one tensor as its first argument.

    Raises:
        InputError: none are known of such a model.
    """
    found = [
        module
        for name, module in model.named_modules()
        if type(module).__name__ in _BLOCKS or name.rpartition(".")[0] in _LISTS_OF_BLOCKS
    ]
    if not found:
        raise InputError(f"no blocks are known of a {type(model).__name__}; name their class in benchmarks/_blocks.py")
    return found


def checkpoint_blocks(model: nn.Module, *, selective: bool = False) -> None:
    """Let each block keep its input alone, and run once more in the backward pass."""
    more: dict[str, Any] = {}
    if selective:
        more["context_fn"] = functools.partial(checkpointing.create_selective_checkpoint_contexts, list(_PRODUCTS))
    for block in blocks_of(model):
        block.forward = functools.partial(checkpointing.checkpoint, block.forward, use_reentrant=False, **more)


def checkpoint_chains(model: nn.Module, segments: int) -> None:
    """Run each chain of the model by ``torch.utils.checkpoint.checkpoint_sequential``, in so many segments.

    A chain is the longest row of blocks that follow upon each other; where blocks do not (as in a U-Net, with its
    shortcuts), the layers of each block. The last segment of a chain is never checkpointed: that is PyTorch's rule.

    Raises:
        InputError: no blocks are known of such a model.
    """
    blocks = set(blocks_of(model))
    chained: set[nn.Module] = set()
    for module in list(model.modules()):  # those around others come first
        if module in chained:
            continue
        links = _links(module)
        if type(module) is nn.Sequential and (module in blocks or blocks.issuperset(links)):
            chained.update(module.modules())
            module.forward = functools.partial(_run, links, segments)
        elif isinstance(module, nn.ModuleList) and blocks.issuperset(module) and type(module[0]) is not nn.Sequential:
            # As in models of transformers, which call the layers of a list in a loop, all with the same further
            # arguments: the list is left with one layer that runs all of them.
            chained.update(module.modules())
            chain = _Chain(list(module), segments)
            del module[1:]
            module[0] = chain


def _links(module: nn.Module) -> list[nn.Module]:
    """The modules of a sequence, those of sequences in it among them."""
    if type(module) is not nn.Sequential:
        return [module]
    return [link for child in module for link in _links(child)]


def _run(links: list[Callable[[Tensor], Tensor]], segments: int, x: Tensor) -> Tensor:
    return checkpointing.checkpoint_sequential(links, min(segments, len(links)), x, use_reentrant=False)


class _Chain(nn.Module):
    def __init__(self, layers: list[nn.Module], segments: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.segments = segments

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        def link(layer: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda hidden: layer(hidden, *rest, **named)

        return _run([link(layer) for layer in self.layers], self.segments, x)
