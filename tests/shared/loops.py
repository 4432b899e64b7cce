"""Ordinary training loops: each trains on its model's device and returns all values that it read."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

WORDS, WIDTH, LENGTH, BATCH = 1024, 128, 64, 8

MakeOptimizer = Callable[[nn.Module], Optimizer]
Loop = Callable[[nn.Module, MakeOptimizer], list[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pictures(nn.Module):
    """A convolutional network with batch statistics large enough to be evicted."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int, norm: nn.Module, act: nn.Module) -> list[nn.Module]:
            return [nn.Conv2d(before, after, 3, padding=1), norm, act]

        self.body = nn.Sequential(
            *block(3, 16, nn.BatchNorm2d(16), nn.ReLU(inplace=True)), *block(16, 16, nn.BatchNorm2d(16), nn.SiLU()),
            *block(16, 16, nn.GroupNorm(4, 16), nn.GELU()), *block(16, 16, nn.InstanceNorm2d(16), nn.ReLU()),
            nn.MaxPool2d(2), nn.Dropout2d(0.1), *block(16, 64, nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def sentences(count: int, *, vary: bool = False, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for i in range(count):
        length = LENGTH - 8 * (i * 5 % 4) if vary else LENGTH
        ids = torch.randint(0, WORDS, (BATCH, length + 1), generator=draw).to(device)
        yield ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), targets.flatten())


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def plain(model: nn.Module, make: MakeOptimizer, steps: int = 5, *, vary: bool = False) -> list[Any]:
    optimizer, values = make(model), []
    for ids, targets in sentences(steps, vary=vary, device=device_of(model)):
        optimizer.zero_grad()
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return [*values, optimizer]


def lengths_vary(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    return plain(model, make, 9, vary=True)


def rich(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Accumulation, clipping, a schedule, printing, evaluation, skipped updates, cleared gradients."""
    optimizer, values = make(model), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=12)
    for i, (ids, targets) in enumerate(sentences(10, device=device_of(model))):
        loss = loss_of(model, ids, targets) / 2
        loss.backward()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print(f"step {i}: {loss:.6f}", loss)
        values.append(out.getvalue())
        if i % 2 == 0:
            continue
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if i != 5:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=i % 4 == 1)
        values.append((loss.item(), norm.item()))
        if i in (3, 7):
            model.eval()
            with torch.no_grad():
                values.append((model(ids).argmax(-1) == targets).float().mean().item())
            model.train()
    return [*values, optimizer]


def autocast(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    device = device_of(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**30, growth_interval=2)
    optimizer, values = make(model), []
    for ids, targets in sentences(6, device=device):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, ids, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        values.append((loss.item(), scaler.get_scale()))
    return [*values, optimizer]


def _by_blocks(model: nn.Module, make: MakeOptimizer, through: Callable[[nn.Module, Tensor], Tensor]) -> list[Any]:
    optimizer, values = make(model), []
    assert isinstance(model, Language)
    for ids, targets in sentences(4):
        optimizer.zero_grad()
        x = model.embed(ids)
        for block in model.blocks:
            x = through(block, x)
        loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return [*values, optimizer]


def checkpointed_loop(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    return _by_blocks(model, make, lambda block, x: checkpoint(block, x, use_reentrant=False))


def checkpointed_reentrant_loop(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    return _by_blocks(model, make, lambda block, x: checkpoint(block, x, use_reentrant=True))


class Swish(torch.autograd.Function):
    """Keeps one tensor by ``save_for_backward`` and one as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gate = x.sigmoid()
        return x * ctx.gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (ctx.gate * (1 + x * (1 - ctx.gate)))


def custom_function(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    return _by_blocks(model, make, lambda block, x: Swish.apply(block(x)))


def branches(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Ops depend on tensor values and on Python's random generator."""
    optimizer, values, draw = make(model), [], random.Random(3)
    assert isinstance(model, Language)
    for ids, targets in sentences(8):
        optimizer.zero_grad()
        x = model.embed(ids)
        for block in model.blocks:
            if draw.random() < 0.7:
                x = block(x)
            if x.abs().max() > 3.2:
                x = x * 0.5
        loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
        if loss.item() < 7.3:
            loss = loss + sum(p.square().sum() for p in model.parameters()) * 1e-5
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return [*values, optimizer]


def gradients_of_gradients(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    optimizer, values = make(model), []
    hooks = [p.register_hook(lambda g: g * 0.5) for p in model.parameters()]
    for _ in range(4):
        x = torch.randn(16, 3, 32, 32, requires_grad=True)
        optimizer.zero_grad()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.logsumexp(-1).sum(), x, create_graph=True)
        loss = scores.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    for hook in hooks:
        hook.remove()
    return [*values, optimizer]


def pictures(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Channels last, and an exponential moving average of the model."""
    optimizer, values = make(model), []
    model = model.to(memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for _ in range(5):
        x = torch.randn(16, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(x), torch.randint(0, 10, (16,)), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        values.append(loss.item())
    return [*values, optimizer, *average.state_dict().values()]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of one large tensor that forked loader workers share."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * 1, torch.tensor(index % 10)


def loaded_by_workers(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    optimizer, values, rows = make(model), [], Rows()
    for epoch in range(2):
        for x, targets in DataLoader(rows, batch_size=16, num_workers=2, shuffle=False):
            loss = F.cross_entropy(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
            if epoch == 0:
                rows.x.add_(0.125)  # running workers do not see this change
    return [*values, optimizer]


def ragged_loop(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    """Packed sequences of different lengths through an LSTM."""
    optimizer, values = make(model), []
    assert isinstance(model, nn.LSTM)
    for step in range(5):
        rows = [torch.randn(20 + (7 * i + 5 * step) % 30, 96) for i in range(12)]
        packed = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        out, (last, _) = model(packed)
        loss = out.data.square().mean() + last.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return [*values, optimizer]


def adversaries(model: nn.Module, make: MakeOptimizer) -> list[Any]:
    assert isinstance(model, nn.ModuleDict)
    makes, judges = model["makes"], model["judges"]
    optimizers, values = (make(makes), make(judges)), []
    for _ in range(4):
        real, noise = torch.randn(64, 512), torch.randn(64, 256)
        optimizers[1].zero_grad()
        fake = makes(noise)
        judged = F.softplus(-judges(real)).mean() + F.softplus(judges(fake.detach())).mean()
        judged.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = F.softplus(-judges(fake)).mean()
        fooled.backward()
        optimizers[0].step()
        values.append((judged.item(), fooled.item()))
    return [*values, *optimizers]


def ragged_model() -> nn.Module:
    return nn.LSTM(96, 160, num_layers=2, dropout=0.1)


def adversarial_model() -> nn.Module:
    def layers(*widths: int) -> nn.Module:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.LeakyReLU(0.2))))

    return nn.ModuleDict({"makes": layers(256, 512, 512, 512), "judges": layers(512, 512, 256, 1)})


# The loop and the model that it trains, by name.
LOOPS: dict[str, tuple[Loop, Callable[[], nn.Module]]] = {
    "plain": (plain, Language),
    "lengths_vary": (lengths_vary, Language),
    "rich": (rich, Language),
    "autocast": (autocast, Language),
    "checkpointed": (checkpointed_loop, Language),
    "checkpointed_reentrant": (checkpointed_reentrant_loop, Language),
    "custom_function": (custom_function, Language),
    "branches": (branches, Language),
    "gradients_of_gradients": (gradients_of_gradients, Pictures),
    "pictures": (pictures, Pictures),
    "loaded_by_workers": (loaded_by_workers, Pictures),
    "ragged": (ragged_loop, ragged_model),
    "adversaries": (adversaries, adversarial_model),
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Optimizer):
        yield from tensors_in(value.state_dict())
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Tensor):
        yield value
