"""Small training steps for the tests on the double and on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from double import FakeBackend, FakeCuda
from torch import nn

from outofcore.costs import Home
from outofcore.execution.opening import OpenHome
from outofcore.options import MemoryOptions, PlanOptions, RunOptions, UserStep
from outofcore.planning import in_core_budget, smallest_budget
from outofcore.policies import PolicyLike
from outofcore.runtime.homes import HomeStore, HostHome
from outofcore.step import Step

CPU = torch.device("cpu")
STEPS = 3


@dataclass
class World:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    batch: Callable[[int], tuple[torch.Tensor, ...]]

    def state(self) -> dict[str, torch.Tensor]:
        tensors = dict(self.model.state_dict())
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{name}": value for name, value in slots.items() if isinstance(value, torch.Tensor)}
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _make_supervised_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def dense(device: torch.device, optimizer: str = "adamw") -> World:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(192, 192), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(192, 10)).to(device)
    optimizer_ = (
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=1e-2)
    )

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(256, 192, generator=_generator(index))
        return x.to(device), torch.randint(0, 10, (256,), generator=_generator(index)).to(device)

    return World(model, optimizer_, _make_supervised_step(model, optimizer_), batch)


def convolutional(device: torch.device) -> World:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(24, 24, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.norm(self.conv(x)) + x)

    layers = [
        nn.Conv2d(3, 24, 3, padding=1),
        Block(),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    ]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(8, 3, 24, 24, generator=_generator(index))
        return x.to(device), torch.randint(0, 10, (8,), generator=_generator(index)).to(device)

    return World(model, optimizer, _make_supervised_step(model, optimizer), batch)


WORLDS: dict[str, Callable[[torch.device], World]] = {"dense": dense, "convolutional": convolutional}


def train_eagerly(world: World, steps: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    losses = [world.step(*world.batch(index)).detach().cpu() for index in range(steps)]
    return losses, world.state()


def differing_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ by any bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(_bits(a[name]), _bits(b[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def compile_on_double(
    world: World, budget: int, policy: PolicyLike, driver: FakeCuda, homes: Sequence[HomeStore] | None = None
) -> Step:
    stores = [HostHome()] if homes is None else list(homes)
    home = OpenHome(stores, stays_open=False)
    memory, planning, running = MemoryOptions(budget, home), PlanOptions(policy), RunOptions(FakeBackend(driver))
    step = Step(UserStep(world.step, [world.model], [world.optimizer]), memory, planning, running)
    rate = driver.bytes_per_s
    # Fixed rates: these tests do not measure links.
    step._session.planner.links = tuple(
        Home(store.name, store.capacity, rate / 2**n, rate / 2**n) for n, store in enumerate(stores)
    )
    return step


@functools.cache
def budget_of(make: Callable[[torch.device], World], share: float) -> int:
    """Interpolate between the smallest budget (0) and the in-core budget (1)."""
    world = make(CPU)
    with compile_on_double(world, 1 << 30, "auto", FakeCuda()) as step:
        step(*world.batch(0))
        graph, costs = step.captured.graph, step.costs
    low, high = smallest_budget(graph, costs), in_core_budget(graph, costs)
    return int(low + share * (high - low)) + 256 * 1024
