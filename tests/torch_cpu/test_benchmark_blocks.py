"""Tests of the benchmarks' activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _blocks import blocks_of, checkpoint_blocks, checkpoint_chains
from torch import nn

from outofcore import zoo
from outofcore.errors import InputError

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": ({"batch": 2, "layers": 3, "width": 32, "heads": 2, "context": 16}, 3),
    "resnet": ({"batch": 2, "depth": 18, "size": 32}, 8),
    "unet3d": ({"batch": 2, "size": 8, "base": 4}, 7),
}


def train(name: str, checkpoint: Callable[[nn.Module], object]) -> list[torch.Tensor]:
    options, count = MODELS[name]
    torch.manual_seed(0)
    work = zoo.workload(name, **options)
    model = work.build()
    assert len(blocks_of(model)) == count
    checkpoint(model)
    work.make_step(model, work.optimizer(model))(*next(work.batches()))
    return list(model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_models_train_to_the_same_bits(name: str) -> None:
    plain = train(name, lambda model: None)
    for checkpoint in (checkpoint_blocks, lambda model: checkpoint_chains(model, 2)):
        assert all(map(torch.equal, train(name, checkpoint), plain))


def test_models_without_known_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="Linear has no known blocks"):
        checkpoint_blocks(nn.Linear(2, 2))
