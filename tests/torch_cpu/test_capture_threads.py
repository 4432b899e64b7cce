"""Tests of steps in several threads: captures take turns and do not record other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import outofcore
from outofcore.capture import capture_step


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor], torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def test_first_calls_in_several_threads_are_exact() -> None:
    count, x = 4, torch.randn(16, 64)
    started = threading.Barrier(count)

    def train(seed: int) -> list[torch.Tensor]:
        model, optimizer, step = make(seed)
        compiled = outofcore.compile(step, model, optimizer, budget="64MiB", cache=False)
        started.wait()
        losses = [compiled(x) for _ in range(2)]
        compiled.close()
        return losses

    with ThreadPoolExecutor(count) as pool:
        ours = list(pool.map(train, range(count)))
    for seed, losses in enumerate(ours):
        step = make(seed)[2]
        for loss in losses:
            assert torch.equal(loss, step(x))


def test_other_thread_trains_during_capture() -> None:
    model, optimizer, _ = make(0)
    captures, trained = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    def train() -> None:
        try:
            captures.wait(60)
            thread_model, thread_optimizer, _ = make(1)
            state = torch.get_rng_state()
            Twice.apply(thread_model(torch.ones(2, 64))).sum().backward()
            thread_optimizer.step()
            assert thread_model[0].weight.grad.tolist()
            assert isinstance(state, torch.Tensor)
            torch.from_numpy(torch.ones(3).numpy())
        except BaseException as error:
            failed.append(error)
        finally:
            trained.set()

    def step(x: torch.Tensor) -> None:
        captures.set()
        assert trained.wait(60)
        Twice.apply(model(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    thread = threading.Thread(target=train)
    thread.start()
    captured = capture_step(step, [model], [optimizer], (torch.ones(2, 64),), {})
    thread.join()
    assert failed == []
    assert {op.module for op in captured.graph.ops} >= {"0", "1", "2"}


def test_backward_runs_in_the_capturing_thread() -> None:
    """Nodes made in autograd's own thread have other numbers, so their modules and lines would not be found."""
    multithreading: list[bool] = []

    class Recording(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            multithreading.append(torch._C._is_multithreading_enabled())
            return grad

    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = Recording.apply(model(x)).sum()
        loss.backward()
        return loss

    captured = capture_step(step, [model], [], (torch.ones(2, 4),), {})
    assert multithreading == []
    for effect in captured.effects:
        effect()
    assert multithreading == [False]
    assert torch._C._is_multithreading_enabled()
