"""Tests of first layers, which compute no input gradient in backward, out of core."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from torch import nn

import outofcore
from outofcore.program import CopyOut

IMAGE = (4, 16, 32, 32)
WORDS = (8, 32, 64)


class WordLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer((x.abs() * 100).long().clamp(max=255).flatten(1))


class FirstOutput(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    """Attention to a learned table, so that only the queries need no gradient."""

    def __init__(self, *, mask: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, 32, 16))
        self.bias = nn.Parameter(torch.zeros(32, 32)) if mask else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = x.view(8, 32, 4, 16).transpose(1, 2)
        table = self.table.expand(8, -1, -1, -1)
        return F.scaled_dot_product_attention(queries, table, table, attn_mask=self.bias)


class Grid(nn.Module):
    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.rand(4, *([32] * dimensions), dimensions) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        volume = x if self.places.ndim == 4 else x[:, :, None]
        return F.grid_sample(volume, self.places, align_corners=False)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch_norm_1d": (lambda: nn.BatchNorm1d(16), (64, 16, 64)),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(16), IMAGE),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(4), (2, 4, 8, 32, 32)),
    "batch_norm_without_statistics": (lambda: nn.BatchNorm2d(16, track_running_stats=False), IMAGE),
    "batch_norm_evaluated": (lambda: nn.BatchNorm2d(16).eval(), IMAGE),
    "instance_norm": (lambda: nn.InstanceNorm2d(16, affine=True), IMAGE),
    "instance_norm_tracking": (lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True), IMAGE),
    "group_norm": (lambda: nn.GroupNorm(4, 16), IMAGE),
    "layer_norm": (lambda: nn.LayerNorm([32, 32]), IMAGE),
    "layer_norm_without_bias": (lambda: nn.LayerNorm(32, bias=False), IMAGE),
    "rms_norm": (lambda: nn.RMSNorm(32), IMAGE),
    "convolution": (lambda: nn.Conv2d(16, 16, 3), IMAGE),
    "convolution_without_bias": (lambda: nn.Conv2d(16, 16, 3, bias=False), IMAGE),
    "convolution_1d": (lambda: nn.Conv1d(16, 16, 3), (16, 16, 128)),
    "convolution_3d": (lambda: nn.Conv3d(4, 4, 3), (2, 4, 8, 32, 32)),
    "convolution_transposed": (lambda: nn.ConvTranspose2d(16, 8, 3), IMAGE),
    "convolution_depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGE),
    "convolution_weight_frozen": (lambda: freeze(nn.Conv2d(16, 16, 3), "weight"), IMAGE),
    "batch_norm_bias_frozen": (lambda: freeze(nn.BatchNorm2d(16), "bias"), IMAGE),
    "layer_norm_weight_frozen": (lambda: freeze(nn.LayerNorm(32), "weight"), IMAGE),
    "linear": (lambda: nn.Linear(64, 64), WORDS),
    "bilinear": (lambda: TwoInputs(nn.Bilinear(64, 64, 8)), WORDS),
    "embedding": (lambda: WordLayer(nn.Embedding(256, 64)), (8, 32)),
    "embedding_bag_sum": (lambda: WordLayer(nn.EmbeddingBag(256, 128, mode="sum")), (512, 8)),
    "embedding_bag_mean": (lambda: WordLayer(nn.EmbeddingBag(256, 128)), (512, 8)),
    "embedding_bag_max": (lambda: WordLayer(nn.EmbeddingBag(256, 128, mode="max")), (512, 8)),
    "rnn": (lambda: FirstOutput(nn.RNN(64, 64, 2)), WORDS),
    "gru": (lambda: FirstOutput(nn.GRU(64, 64)), WORDS),
    "lstm": (lambda: FirstOutput(nn.LSTM(64, 64, 2)), WORDS),
    "prelu": (lambda: nn.PReLU(16), IMAGE),
    "attention": (lambda: Attention(mask=False), WORDS),
    "attention_with_learnt_mask": (lambda: Attention(mask=True), WORDS),
    "grid_2d": (lambda: Grid(2), IMAGE),
    "grid_3d": (lambda: Grid(3), (4, 1, 32, 32)),
}


class TwoInputs(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


def freeze(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        for _ in range(4):
            y = y.sin().exp().sigmoid()  # their saved tensors must be evicted
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# One layer of each kind of kernel; the others differ in dimensions and options.
KINDS = {
    "attention",
    "batch_norm_2d",
    "bilinear",
    "convolution",
    "convolution_transposed",
    "embedding",
    "embedding_bag_max",
    "grid_2d",
    "group_norm",
    "gru",
    "linear",
    "prelu",
    "rms_norm",
}


@pytest.mark.parametrize("name", some_of(LAYERS, KINDS))
def test_first_layer_trains_bit_for_bit_out_of_core(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    plain = make()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, ours)]
    x = torch.randn(shape)
    step = step_of(ours, optimizers[1])
    budget = outofcore.smallest_budget(step, ours, optimizers[1], inputs=(x,))
    compiled = outofcore.compile(step, ours, optimizers[1], budget=budget, policy="offload-all")
    eager = step_of(plain, optimizers[0])
    for number in range(2):
        batch = x + number
        assert torch.equal(compiled(batch), eager(batch))
    assert any(isinstance(instruction, CopyOut) for instruction in compiled.planned.program.instructions)
    for expected, actual in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(expected, actual)
    compiled.close()
