"""A model whose steps are made to fail, beside one whose steps do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outofcore

Sides = tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]]


def sides() -> Sides:
    """Batch norm changes early in a step, large parameters late; dropout draws."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(64, 256), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (128,), generator=torch.Generator().manual_seed(number))


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": tensor.clone() for name, tensor in entries.items()}
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in right.items():
        assert torch.equal(left[key], tensor), key


def smallest_budget() -> int:
    model, optimizer, step = sides()
    return outofcore.smallest_budget(step, model, optimizer, inputs=(batch(0),), split="off")


@contextmanager
def two_homes(policy: str, smallest: int, folder: Path) -> Iterator[tuple[Sides, Any]]:
    """The plain sides, and others with a step of two homes; two steps have been made of both.

    While the neediest op runs, more of what lasts is elsewhere than the first home holds, so that every plan reads from
    the disk, whatever was measured.
    """
    plain, (model, optimizer, step) = sides(), sides()
    budget = smallest if policy == "offload-all" else smallest * 9 // 8
    with outofcore.compile(
        step, model, optimizer, budget=budget, home=folder, host_budget="300KiB", policy=policy
    ) as ours:
        torch.manual_seed(5)
        theirs = [plain[2](batch(k)) for k in range(2)]
        torch.manual_seed(5)
        assert [ours(batch(k)) for k in range(2)] == theirs
        yield plain, (model, optimizer, ours)


def goes_on(plain: Sides, ours: Any) -> None:
    """Both make the same steps from here on."""
    model, optimizer, step = ours
    for k in range(2, 4):
        torch.manual_seed(k)
        theirs = plain[2](batch(k))
        torch.manual_seed(k)
        assert torch.equal(step(batch(k)), theirs)
        step._session.keeper.check()
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


def by_python(monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    """Have native threads call Python for each copy, by ``read`` and ``write`` of its home."""
    for home in step.homes:
        monkeypatch.setattr(home, "locate", lambda *_: None)
    step._session.engine._copies.clear()


def in_the_middle(patch: pytest.MonkeyPatch, step: Any, act: Callable[[], object]) -> list[bool]:
    """Do something once, when the last home has been read in the middle of a step; the list then says so."""
    by_python(patch, step)
    home, engine = step.homes[-1], step._session.engine
    original, done = home.read, list[bool]()

    def read(*args: Any) -> None:
        original(*args)
        if not done and engine._arena is not None:  # else the model is being brought to where the step begins
            done.append(True)
            act()

    patch.setattr(home, "read", read)
    return done


class FaultError(Exception):
    """Stands in for whatever may be raised."""


def fail_at(monkeypatch: pytest.MonkeyPatch, step: Any, kind: str, number: int, error: BaseException) -> None:
    """Let the ``number``-th read or write of a home fail, once."""
    count = [0]
    by_python(monkeypatch, step)
    for home in step.homes:
        original = getattr(home, kind)

        def fails(*args: Any, original: Callable[..., Any] = original) -> Any:
            count[0] += 1
            if count[0] == number:
                raise error
            return original(*args)

        monkeypatch.setattr(home, kind, fails)
