"""Models of the cases: small, of many kinds, each with an optimizer and a step in a ``World``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import World

from outofcore.zoo import workload

VOCABULARY, LENGTH, ROWS = 256, 48, 4
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Rotary(nn.Module):
    """Llama's attention: rotary positions, and groups of query heads that share a key head."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, shared * self.size, bias=False) for _ in range(2))

    def rotate(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
        angles = torch.outer(steps, rates)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        real, imaginary = x.chunk(2, -1)
        return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, self.size)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        )
        attended = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Rotary(width, 4, 2)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (LoRA: Hu et al., 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + F.linear(F.linear(x, self.a), self.b)


def adapt_llama() -> nn.Module:
    model = Llama()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, Adapted):
                setattr(parent, name, Adapted(child))
    model.words.requires_grad_(False)
    return model


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        model: a name in ``MODELS``.
        update: "foreach", "fused" or "one", of AdamW; "momentum".
    """

    model: str
    update: str = "foreach"
    amp: bool = False

    def world(self, device: torch.device) -> World:
        """Return the job on a device, with the same initial state on each."""
        torch.manual_seed(0)
        model, batch = MODELS[self.model]()
        model.to(device)
        chosen = [p for p in model.parameters() if p.requires_grad]
        options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one": {"foreach": False}}
        if self.update == "momentum":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(chosen, lr=1e-3, **options[self.update])

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16) if self.amp else contextlib.nullcontext():
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(chosen, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return World(model, optimizer, step, lambda index: tuple(t.to(device) for t in batch(index)))


_Batch = Callable[[int], tuple[Tensor, ...]]


def _sentences(index: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _rows(index: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(index)
    return torch.randn(192, 256, generator=draw), torch.randint(0, 10, (192,), generator=draw)


def _mlp() -> tuple[nn.Module, _Batch]:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(256, 10)), _rows


def _resnet50() -> tuple[nn.Module, _Batch]:
    work = workload("resnet", depth=50, batch=4, size=32, images="generated")
    return work.build(), lambda index: next(work.batches(seed=index))


def _gpt() -> tuple[nn.Module, _Batch]:
    work = workload("gpt", batch=ROWS, layers=3, width=128, context=LENGTH)
    return work.build(), lambda index: next(work.batches(seed=index))


MODELS: dict[str, Callable[[], tuple[nn.Module, _Batch]]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "gpt": _gpt,
    "llama": lambda: (Llama(), _sentences),
    "adapted": lambda: (adapt_llama(), _sentences),
}
