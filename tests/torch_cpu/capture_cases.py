"""Small training steps; tests build each twice, for plain PyTorch and for a capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Case:
    """A training step with its models, its optimizers and a source of batches."""

    step: Callable[..., Any]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)


def classify(width: int = 8, classes: int = 4, rows: int = 6) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(rows, width), torch.randint(0, classes, (rows,)))


def supervised_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def mlp_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 4))


def mlp(make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)) -> Case:
    model = mlp_model()
    optimizer = make(model.parameters())
    return Case(supervised_step(model, optimizer), [model], [optimizer], classify())


def conv_net() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    batch = lambda: (torch.randn(4, 3, 10, 10), torch.randint(0, 4, (4,)))  # noqa: E731
    return Case(supervised_step(model, optimizer), [model], [optimizer], batch)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, checkpointing: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads, self.checkpointing = heads, checkpointing

    def body(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return checkpoint(self.body, x, use_reentrant=self.checkpointing == "reentrant")
        return self.body(x)


class GPT(nn.Module):
    def __init__(self, checkpointing: str = "", vocabulary: int = 23, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, 2, checkpointing) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(checkpointing: str = "", foreach: bool | None = None) -> Case:
    model = GPT(checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer], lambda: (torch.randint(0, 23, (3, 9)),))


def gpt_evaluated() -> Case:
    case = gpt()
    case.models[0].eval()
    return case


def recurrent(kind: type[nn.RNNBase]) -> Case:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(5, 7, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(14, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = lambda: (torch.randn(3, 6, 5), torch.randint(0, 4, (3,)))  # noqa: E731
    return Case(supervised_step(model, optimizer), [model], [optimizer], batch)


def autocast() -> Case:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
    model.append(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(2 * x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer], lambda: (torch.randn(4, 3, 10), torch.randint(0, 4, (4,))))


def accumulation_inside() -> Case:
    model = mlp_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> float | torch.Tensor:
        total: Any = 0.0
        for xs, ys in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = F.cross_entropy(model(xs), ys) / 3
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total

    return Case(step, [model], [optimizer], classify())


def gradients_left() -> Case:
    """Clear gradients at the start of the step, so that the gradients of the last call remain."""
    model = mlp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Case(step, [model], [optimizer], classify())


def accumulation_across() -> Case:
    """Accumulate gradients across steps, without an update."""
    model = mlp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Case(step, [model], [optimizer], classify())


def gan() -> Case:
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.9))
    judge_optimizer = torch.optim.RMSprop(judge.parameters(), lr=0.01)

    def step(real: torch.Tensor) -> dict[str, torch.Tensor]:
        fake = maker(torch.randn(real.shape[0], 4))
        mix = torch.rand(real.shape[0], 1)
        middle = (mix * real + (1 - mix) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(middle).sum(), middle, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        judge_loss = judge(fake.detach()).mean() - judge(real).mean() + penalty
        judge_optimizer.zero_grad()
        judge_loss.backward()
        judge_optimizer.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        maker_loss = -judge(fake).mean()
        maker_optimizer.zero_grad()
        maker_loss.backward()
        maker_optimizer.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)
        return {"judge": judge_loss, "maker": maker_loss}

    return Case(step, [maker, judge], [maker_optimizer, judge_optimizer], lambda: (torch.randn(5, 6),))


def moving_average() -> Case:
    model, mean = mlp_model(), mlp_model()
    mean.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inner = supervised_step(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        with torch.no_grad():
            for average, new in zip(mean.parameters(), model.parameters(), strict=True):
                average.lerp_(new, 0.1)
            torch._foreach_mul_(list(mean.parameters()), 0.999)
            for average, new in zip(mean.buffers(), model.buffers(), strict=True):
                average.copy_(new)
        return loss

    return Case(step, [model, mean], [optimizer], classify())


class Rebinding(nn.Module):
    """A module that rebinds its buffers to new tensors and swaps two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.one, self.other = self.other, self.one + self.mean
        self.count += 1
        return y - self.mean + self.one * self.count


def rebinding() -> Case:
    model = Rebinding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Case(supervised_step(model, optimizer), [model], [optimizer], classify())


def inference() -> Case:
    case = gpt()
    model = case.models[0]

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            scores = model(ids)
            return scores.argmax(-1), scores[:, -1]

    return Case(step, [model], [], lambda: (torch.randint(0, 23, (3, 9)),))


class Exponent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = (x * scale).exp()
        ctx.save_for_backward(x, scale, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale, out = ctx.saved_tensors
        return grad * out * scale, (grad * out * x).sum()


def custom_function() -> Case:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
            self.scale = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Exponent.apply(self.linear(x), self.scale) * torch.tensor(0.5)

    model = Scaled()
    model.scale.register_hook(lambda grad: 2 * grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Case(supervised_step(model, optimizer), [model], [optimizer], classify())


def mutated_input() -> Case:
    model = mlp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = supervised_step(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> Any:
        counts.add_(1)
        counts[:2].mul_(3)
        return {"loss": inner(x, y), "seen": counts, "weight": model[0].weight, "part": model[0].bias[:3], "n": 3}

    make = classify()
    return Case(step, [model], [optimizer], lambda: (*make(), torch.arange(12.0).view(4, 3).t()))


def hugging_face(kind: str) -> Case:
    import transformers  # noqa: PLC0415 - slow to import

    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.BertConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer], lambda: (torch.randint(0, 31, (2, 8)),))
