"""Activation checkpointing of the benchmarks' models with PyTorch's own tools."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from outofcore.errors import InputError
from outofcore.zoo.gpt import TransformerBlock
from outofcore.zoo.vision import BasicBlock, Bottleneck

# Blocks of the benchmarks' models, by class, by class name, or by the name of the list that contains them.
_BLOCKS = (BasicBlock, Bottleneck, TransformerBlock)
_BLOCK_NAMES = frozenset({"BertLayer", "T5Block"})  # of transformers
_LISTS_OF_BLOCKS = frozenset({"down", "merge"})
# Selective checkpointing saves the results of matrix products and of fused attention, which are expensive to recompute.
# PyTorch chooses among several attention kernels (cuDNN's on recent GPUs).
_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules to checkpoint, each with one tensor as its first argument."""
    blocks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, _BLOCKS)
        or type(module).__name__ in _BLOCK_NAMES
        or name.rpartition(".")[0] in _LISTS_OF_BLOCKS
    ]
    if not blocks:
        raise InputError(
            f"{type(model).__name__} has no known blocks to checkpoint; add their class to benchmarks/_blocks.py"
        )
    return blocks


def checkpoint_blocks(model: nn.Module, *, selective: bool = False) -> None:
    """Checkpoint each block: save only its input, and run it again in the backward pass."""
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = functools.partial(checkpointing.create_selective_checkpoint_contexts, list(_PRODUCTS))
    for block in blocks_of(model):
        block.forward = functools.partial(checkpointing.checkpoint, block.forward, use_reentrant=False, **options)


def checkpoint_chains(model: nn.Module, segments: int) -> None:
    """Run each chain of the model in ``segments`` segments with ``checkpoint_sequential``.

    A chain is a run of consecutive blocks, or the layers of one block where blocks are not consecutive (a U-Net).
    PyTorch never checkpoints the last segment.
    """
    blocks = set(blocks_of(model))
    chained: set[nn.Module] = set()
    for module in list(model.modules()):  # outer modules first
        if module in chained:
            continue
        links = _links(module)
        if type(module) is nn.Sequential and (module in blocks or blocks.issuperset(links)):
            chained.update(module.modules())
            module.forward = functools.partial(_run, links, segments)
        elif isinstance(module, nn.ModuleList) and blocks.issuperset(module) and type(module[0]) is not nn.Sequential:
            # transformers models call the layers of a list in a loop with the same extra arguments. One layer that runs
            # all of them replaces the list's content.
            chained.update(module.modules())
            chain = _Chain(list(module), segments)
            del module[1:]
            module[0] = chain


def _links(module: nn.Module) -> list[nn.Module]:
    """Return the modules of a sequence, with nested sequences flattened."""
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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def link(layer: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda hidden: layer(hidden, *args, **kwargs)

        return _run([link(layer) for layer in self.layers], self.segments, x)
