"""A model with steps that fail on purpose, and its plain counterpart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.execution import cpu
from outofcore.execution.binding import BoundCopy
from outofcore.runtime.file_io import ByteStore
from outofcore.runtime.file_ranges import FIRST_RANGE

NO_FILE = 1_000_000  # in place of a descriptor

Sides = tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]]


def build_sides() -> Sides:
    """Build a model with dropout, and a step that changes batch norm early and large parameters late."""
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
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{name}": tensor.clone() for name, tensor in entries.items()}
    return tensors


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key


def smallest_budget() -> int:
    model, optimizer, step = build_sides()
    return outofcore.smallest_budget(step, model, optimizer, inputs=(batch(0),), split="off")


@contextmanager
def two_homes(policy: str, smallest: int, folder: Path) -> Iterator[tuple[Sides, Any]]:
    """Yield the plain sides and compiled sides with a host and a disk home, both after two steps.

    The host home is so small that every plan reads from the disk.
    """
    plain, (model, optimizer, step) = build_sides(), build_sides()
    budget = smallest if policy == "offload-all" else smallest * 9 // 8
    with outofcore.compile(
        step, model, optimizer, budget=budget, home=folder, host_budget="300KiB", policy=policy
    ) as ours:
        torch.manual_seed(5)
        theirs = [plain[2](batch(k)) for k in range(2)]
        torch.manual_seed(5)
        assert [ours(batch(k)) for k in range(2)] == theirs
        yield plain, (model, optimizer, ours)


def assert_training_continues(plain: Sides, ours: Any) -> None:
    model, optimizer, step = ours
    for k in range(2, 4):
        torch.manual_seed(k)
        theirs = plain[2](batch(k))
        torch.manual_seed(k)
        assert torch.equal(step(batch(k)), theirs)
        step._session.keeper.check_invariants()
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


@contextmanager
def act_before_op(patch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """Call ``act`` before the ``number``-th op that Python calls; yield the list of called ops."""
    called_ops: list[int] = []
    plain = cpu._OpCaller.__call__

    def record_call(self: Any, scope: int, run: Any) -> None:
        called_ops.append(run.op)
        if len(called_ops) == number:
            act()
        plain(self, scope, run)

    with patch.context() as context:
        context.setattr(cpu._OpCaller, "__call__", record_call)
        yield called_ops


class FaultError(Exception):
    """An arbitrary error."""


def fail_at(monkeypatch: pytest.MonkeyPatch, step: Any, kind: str, number: int, error: BaseException) -> None:
    """Make one read or write of a home fail, counting first the native copies of a step, then Python's."""
    slots = [
        (copies.pieces[copy.first_piece], copies.sources[copy.first_piece])
        for copies in step._session.engine._copies.values()
        for copy in sorted(copies.arrays[2], key=lambda copy: copy.index)
        if copy.writes == (kind == "write") and copies.sources[copy.first_piece] is not None
    ]
    for home in step.homes:
        monkeypatch.setattr(home, "transfer_error", lambda *_, **__: error)
    if number <= len(slots):
        piece, source = slots[number - 1]
        if source.offset < FIRST_RANGE:
            monkeypatch.setattr(piece, "descriptor", NO_FILE)
            return
        locate = source.home.locate
        monkeypatch.setattr(
            source.home,
            "locate",
            lambda at, count: replace(locate(at, count), **({"descriptor": NO_FILE} if at == source.offset else {})),
        )
        return
    count = [len(slots)]
    for home in step.homes:
        original = getattr(home, kind)

        def fail_once(*args: Any, original: Callable[..., Any] = original) -> Any:
            count[0] += 1
            if count[0] == number:
                raise error
            return original(*args)

        monkeypatch.setattr(home, kind, fail_once)


def misplace(patch: pytest.MonkeyPatch, step: Any, is_chosen: Callable[[BoundCopy, bool], bool]) -> None:
    """Redirect native copies to a wrong offset of the file if ``is_chosen(copy, writes)``."""
    home = step.homes[-1]
    for bound, copies in step._session.engine._copies.items():
        bounds = {copy.index: copy for work in bound.copies for copy in work}
        for copy in copies.arrays[2]:
            piece = copies.pieces[copy.first_piece]
            if is_chosen(bounds[copy.index], bool(copy.writes)):
                offset = home.reserve(piece.bytes)
                ByteStore.write(home, offset, memoryview(os.urandom(piece.bytes)))
                patch.setattr(piece, "outside", offset)
