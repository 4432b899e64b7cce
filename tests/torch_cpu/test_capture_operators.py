"""Tests of fake results against real kernels, forward and backward, for one operator or module at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replay import Replay
from torch import nn

from outofcore.capture import CaptureOptions, capture_step
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.errors import CaptureError

Shape = tuple[int, ...]
IMAGE = (2, 8, 9, 9)
VOLUME = (2, 4, 6, 6, 6)
WORDS = (2, 5, 16)


class FirstOutput(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class TwoInputs(FirstOutput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)


class UnpoolLayer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[2:])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x)[0]


class Experts(nn.Module):
    """A mixture of experts in one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.weight = nn.Parameter(torch.randn(3, 16, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.flatten(0, 1)
        scores, expert = self.router(words).float().softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] == torch.arange(3)).sum(0).cumsum(0).to(torch.int32)
        products = torch._grouped_mm(words[order], self.weight, offs=ends)
        return torch.empty_like(products).index_copy(0, order, products).mul(scores[:, None])


MODULES: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "experts": (Experts, WORDS),
    "conv": (lambda: nn.Conv2d(8, 6, 3), IMAGE),
    "conv_depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1), IMAGE),
    "conv_dilated": (lambda: nn.Conv2d(8, 8, 3, dilation=2, stride=2, bias=False), IMAGE),
    "conv_pointwise": (lambda: nn.Conv2d(8, 8, 1), IMAGE),
    "conv_transposed": (lambda: nn.ConvTranspose2d(8, 6, 3, stride=2), IMAGE),
    "conv_1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 12)),
    "conv_3d": (lambda: nn.Conv3d(4, 6, 3), VOLUME),
    "batch_norm": (lambda: nn.BatchNorm2d(8), IMAGE),
    "batch_norm_1d": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Conv1d(5, 5, 3)), WORDS),
    "batch_norm_evaluated": (lambda: nn.BatchNorm2d(8).eval(), IMAGE),
    "batch_norm_after_conv": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)), IMAGE),
    "instance_norm": (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), IMAGE),
    "group_norm": (lambda: nn.GroupNorm(4, 8), IMAGE),
    "layer_norm": (lambda: nn.LayerNorm(9), IMAGE),
    "rms_norm": (lambda: nn.RMSNorm(9), IMAGE),
    "max_pool": (lambda: nn.MaxPool2d(3, 2), IMAGE),
    "avg_pool": (lambda: nn.AvgPool2d(2), IMAGE),
    "adaptive_avg_pool": (lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
    "adaptive_max_pool": (lambda: nn.AdaptiveMaxPool2d(3), IMAGE),
    "upsample_nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "upsample_bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "reflection_pad": (lambda: nn.ReflectionPad2d(1), IMAGE),
    "replication_pad": (lambda: nn.ReplicationPad2d(1), IMAGE),
    "reflection_pad_3d": (lambda: nn.ReflectionPad3d(1), VOLUME),
    "replication_pad_3d": (lambda: nn.ReplicationPad3d(1), VOLUME),
    "channel_shuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "max_unpool": (UnpoolLayer, IMAGE),
    "unfold": (lambda: nn.Unfold(3), IMAGE),
    "dropout": (lambda: nn.Dropout(0.3), IMAGE),
    "dropout_2d": (lambda: nn.Dropout2d(0.3), IMAGE),
    "rrelu": (nn.RReLU, IMAGE),
    "glu": (lambda: nn.GLU(1), IMAGE),
    "log_sigmoid": (nn.LogSigmoid, IMAGE),
    "prelu": (lambda: nn.PReLU(8), IMAGE),
    "attention": (Attention, WORDS),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), WORDS),
    "encoder_layer_evaluated": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), WORDS),
    "rnn": (lambda: FirstOutput(nn.RNN(16, 7, 2, dropout=0.1)), WORDS),
    "lstm": (lambda: FirstOutput(nn.LSTM(16, 7, 2, dropout=0.1)), WORDS),
    "lstm_projected": (lambda: FirstOutput(nn.LSTM(16, 7, proj_size=3)), WORDS),
    "bilinear": (lambda: TwoInputs(nn.Bilinear(5, 5, 3)), (4, 5)),
}

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.ones_like(x)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.ones_like(x)),
    "soft_margin": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "cross_entropy_smoothed": lambda x: F.cross_entropy(x, torch.arange(4), label_smoothing=0.1),
    "kl": lambda x: F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"),
    "one_hot": lambda x: F.one_hot(torch.arange(4), 5) * x,
    "sort_topk": lambda x: x.sort()[0].topk(2)[0],
    "cumulative": lambda x: x.cumsum(0) + x.exp().cumprod(1),
    "statistics": lambda x: x.std(0) + x.var(0) + x.logsumexp(0) + x.norm(dim=0),
    "index": lambda x: x[torch.tensor([0, 2, 1, 1]), torch.arange(4)] + x.gather(1, torch.zeros(4, 1).long()),
    "scatter": lambda x: x.scatter_add(1, torch.zeros(4, 1).long(), x[:, :1]),
    "in_place": lambda x: (x * 2).mul_(3).relu_().masked_fill(x > 0.5, 0.1),
    "in_place_on_a_view": lambda x: _fill_corner(x * 1),
    "embedding_bag": lambda x: F.embedding_bag(torch.arange(4) % 5, x.t(), torch.tensor([0, 2]), mode="mean"),
    "embedding_bag_sum": lambda x: F.embedding_bag(torch.arange(4) % 5, x.t(), torch.tensor([0, 2]), mode="sum"),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(x[0], torch.tensor([1, 0, -1, 2, 3])),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "expand_repeat": lambda x: x[:, None].expand(4, 3, 5).repeat(1, 2, 1) + x.repeat_interleave(6, 0).view(4, 6, 5),
    "linear_algebra": lambda x: torch.linalg.solve(x @ x.t() + 5 * torch.eye(4), x),
    "attention_causal": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 2, 5)] * 3, is_causal=True),
    "attention_masked": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 2, 2, 5)] * 3, attn_mask=torch.zeros(2, 2)
    ),
    "random": lambda x: x * torch.randn(4, 5) + torch.rand_like(x) + x[torch.randperm(4)],
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "grid_sample": lambda x: F.grid_sample(x[None, None], x.detach()[None, :, :2, None].expand(1, 4, 2, 2)),
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.empty(4, 5)) * x,
    "lazy_conjugate": lambda x: (torch.complex(x, 2 * x).conj().mT @ torch.complex(x, x * x)).abs(),
    "lazy_negative": lambda x: 3 * torch.complex(x, x * x).conj().imag + torch.complex(x, x).conj().imag.cos(),
    "written_conjugate": lambda x: torch.view_as_real(
        torch.complex(x, x).conj().clone().mul_(2j).conj().resolve_conj()
    ),
    "fourier": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.complex(x[:, :3], x[:, 2:]).conj(), n=5),
    "grouped_products": lambda x: torch._grouped_mm(
        x[:, :4].expand(2, 4, 4).contiguous(), x[:, :4].mT.reshape(1, 4, 4) * torch.ones(2, 1, 1)
    ),
    "complex_numbers": lambda x: ((torch.complex(x, x * x) * 2j) / (1 + 1j) - 3j).abs() + (1j * x).imag,
    "complex_functions": lambda x: (torch.complex(x, x).exp() ** 2).angle() + torch.complex(x, x).sqrt().real,
    "complex_products": lambda x: torch.view_as_real(
        torch.einsum("ij,kj->ik", torch.polar(x, x), torch.complex(x, 1 - x)).mH @ torch.complex(x, x).cos()
    ),
    "complex_in_place": lambda x: torch.complex(x, x * 2).mul_(2j).add_(torch.polar(x, x).conj()).div_(1 - 2j).abs(),
    "product": lambda x: torch.cumprod(x - 0.5, 1).select(1, -1) + x[:, :1].prod(1) + x.detach().prod(),
    "foreach": lambda x: sum(torch._foreach_add(list(x.unbind()), [1.0, 2.0, 3.0, 4.0])),
}


class Weighted(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(4, 5) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def _fill_corner(x: torch.Tensor) -> torch.Tensor:
    x.t()[1:3].zero_()
    x[0].copy_(x[1])
    return x


def check_bits(model: nn.Module, x: torch.Tensor, *, half: bool) -> None:
    def step(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = model(x)
        (y.float().cos().sum() + 0 * x.sum()).backward()
        return y.detach(), x.grad

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if half:  # some processors lack a kernel
        torch.manual_seed(3)
        try:
            step(x)
        except RuntimeError as error:
            pytest.skip(f"plain PyTorch does not run this here: {error}")
        model.load_state_dict(before)
        model.zero_grad()
    replay = Replay(capture_step(step, [model], [], (x,), {}, options=CaptureOptions(layouts=KernelLayouts())))
    torch.manual_seed(3)
    ours = replay(x)
    grads = [p.grad for p in model.parameters()]
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    model.zero_grad()
    torch.manual_seed(3)
    plain = step(x)
    for actual, expected in zip((*ours, *grads), (*plain, *[p.grad for p in model.parameters()]), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or torch.equal(actual, expected)
        assert actual is None or actual.stride() == expected.stride()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, after[name]), name
    assert replay.mismatches == []


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODULES)
def test_module_replays_bit_for_bit(name: str, half: bool) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    check_bits(make(), torch.randn(shape), half=half)


@pytest.mark.parametrize("name", [name for name, (_, shape) in MODULES.items() if len(shape) > 2])
def test_module_replays_bit_for_bit_with_channels_last(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    model, memory_format = make(), {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    if memory_format is not None:
        model = model.to(memory_format=memory_format)
    check_bits(model, torch.randn(shape).movedim(1, -1).contiguous().movedim(-1, 1), half=False)


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_replays_bit_for_bit(name: str, transposed: bool) -> None:
    torch.manual_seed(0)
    model = Weighted(FUNCTIONS[name])
    if transposed:
        model.weight = nn.Parameter(torch.rand(5, 4).t() + 0.5)
    x = torch.rand(5, 4).t() if transposed else torch.rand(4, 5)
    if name in {"cumulative", "product"} and torch.__version__ < "2.13":
        with pytest.raises(CaptureError, match="the gradient formula of cumprod depends on whether there are zeros"):
            check_bits(model, x, half=False)
    else:
        check_bits(model, x, half=False)


class SmoothedLoss(nn.Module):
    def __init__(self, places: Shape, reduction: str) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(5) + 0.5)
        self.register_buffer("targets", torch.randint(0, 5, places))
        self.loss = nn.CrossEntropyLoss(torch.rand(5), ignore_index=1, reduction=reduction, label_smoothing=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss((x.movedim(1, -1) * self.factor).movedim(-1, 1), self.targets)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("places", [(64,), (16, 3, 2)])
def test_smoothed_weighted_loss_skips_ignored_targets(places: Shape, reduction: str) -> None:
    """Under a Python mode PyTorch adds zeros for ignored targets, which changes the rounding."""
    for seed in range(8):
        torch.manual_seed(seed)
        check_bits(SmoothedLoss(places, reduction), torch.randn(places[0], 5, *places[1:]), half=False)


def test_users_sum_of_gathered_weights_adds_zeros() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(64) % 5
        weights = x.flatten().gather(0, targets)
        return weights.masked_fill_(targets == 1, 0).sum() * F.cross_entropy(x, torch.arange(4))

    for seed in range(8):
        torch.manual_seed(seed)
        check_bits(Weighted(total), torch.randn(4, 5), half=False)
