"""Tests of ops replayed by native code: exact results, the same errors, and a fallback to Python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outofcore
from outofcore.execution import cpu, replay
from outofcore.execution.arena import Arena, ScopeTable
from outofcore.execution.binding import BoundRun, GeneratorUse
from outofcore.runtime.native import load_native


@pytest.fixture(autouse=True)
def _always_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_worth_replaying", lambda calls, seconds: True)


@pytest.fixture
def op_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    counts: list[int] = []
    run = replay.Replay.run

    def run_and_count(self: replay.Replay, first: int, *args: Any, **kwargs: Any) -> int:
        reached = run(self, first, *args, **kwargs)
        counts.append(reached - first)
        return reached

    monkeypatch.setattr(replay.Replay, "run", run_and_count)
    yield counts


@given(st.lists(st.booleans()))
def test_spans_end_at_the_next_unrecorded_op(recorded: list[bool]) -> None:
    ends = replay.find_span_ends(recorded)
    assert len(ends) == len(recorded)
    for start, end in enumerate(ends):
        assert (end > start) == recorded[start]
        assert all(recorded[start:end])
        assert end == start or end == len(recorded) or not recorded[end]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.convolution(x))).flatten(2).transpose(1, 2)
        x, _ = self.lstm(x)
        x = F.dropout(x, 0.2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(torch.cat(x.chunk(2, 1), 2).sum(1)[:, :24])


def trainer(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(x: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


@pytest.mark.parametrize("share", [2.0, 0.6, 0.0])
def test_replayed_steps_are_exact(share: float, op_counts: list[int]) -> None:
    torch.manual_seed(0)
    model = Net()
    compiled_model = copy.deepcopy(model)
    x, targets = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    eager, step = trainer(model), trainer(compiled_model)
    smallest = outofcore.smallest_budget(step, compiled_model, step.optimizer, inputs=(x, targets))  # type: ignore[attr-defined]
    budget = int(smallest * (1 + share))
    losses = []
    with outofcore.compile(step, compiled_model, step.optimizer, budget=budget, dynamic=False) as compiled:  # type: ignore[attr-defined]
        for run in (eager, compiled):
            torch.manual_seed(1)
            losses.append([run(x, targets).item() for _ in range(6)])
    assert losses[0] == losses[1]
    for (name, expected), actual in zip(model.state_dict().items(), compiled_model.state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name
    assert sum(op_counts) > 5 * 30


def failing_step(kind: str) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return a step, a valid argument and an invalid one."""
    good = torch.zeros(8, dtype=torch.long)
    if kind == "index":
        return lambda x: torch.arange(20.0).exp().index_select(0, x), good, good + 99
    if kind == "linalg":
        return lambda x: torch.linalg.cholesky(x * 1.0).sum(), torch.eye(8), -torch.eye(8)
    return lambda x: F.nll_loss(torch.zeros(8, 4).log_softmax(1), x), good, good + 77


@pytest.mark.parametrize("kind", ["index", "linalg", "runtime"])
def test_failing_op_raises_the_same_error_as_in_python(kind: str, op_counts: list[int]) -> None:
    plain, good, bad = failing_step(kind)
    model = nn.Linear(2, 2)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return plain(x)

    with pytest.raises(Exception) as expected:
        plain(bad)
    with outofcore.compile(step, model, budget="8MiB", dynamic=False) as compiled:
        for _ in range(3):
            assert torch.equal(compiled(good), plain(good))
        assert op_counts
        with pytest.raises(type(expected.value)) as caught:
            compiled(bad)
        assert type(caught.value) is type(expected.value)
        assert str(caught.value).splitlines()[0] == str(expected.value).splitlines()[0]
        assert torch.equal(compiled(good), plain(good))


def test_op_with_numbers_between_its_results_is_replayed() -> None:
    # Attention on a GPU returns such results; no CPU op does.
    def attend(x: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        return x + 1, x, x, x, 7, 7, x * 2, x, x

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", attend, "CPU")
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    x, more, twice = torch.ones(4), torch.zeros(4), torch.zeros(4)
    results = ((0, more.data_ptr(), more, (1,)), (6, twice.data_ptr(), twice, (1,)))
    run = BoundRun(0, 0, op, (x, x, x, None, False), {}, results, (), 1, False, GeneratorUse.UNTOUCHED)
    calls, arena = replay.Replay(load_native(), 1), Arena(4096)
    with calls.watch_calls():
        assert calls.expect_call(run)
        op(*run.args)
        assert calls.record_call(0, run, 0)
    x.fill_(3)
    assert calls.run(0, 1, ScopeTable(arena, [[]]), None, None, ends_scopes=True) == 1
    assert more.tolist() == [4.0] * 4
    assert twice.tolist() == [6.0] * 4
    arena.close()


def test_dispatch_mode_sees_every_op(op_counts: list[int]) -> None:
    op_names: list[str] = []

    class RecordingMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            op_names.append(func.name())
            return func(*args, **(kwargs or {}))

    model = nn.Linear(64, 64)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).exp().sum()

    x = torch.randn(8, 64)
    with outofcore.compile(step, model, budget="8MiB", dynamic=False) as compiled:
        for _ in range(3):
            compiled(x)
        assert op_counts
        op_counts.clear()
        with RecordingMode():
            compiled(x)
        assert not op_counts
        assert "aten::exp" in op_names
        compiled(x)
        assert op_counts


def test_replay_option_off_leaves_ops_to_python(op_counts: list[int]) -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).exp().sum()

    with outofcore.compile(step, model, budget="8MiB", dynamic=False, replay=False) as compiled:
        assert all(torch.equal(compiled(x), step(x)) for _ in range(3))
    assert not op_counts


def test_replay_is_worth_it_only_for_short_ops() -> None:
    assert replay.is_worth_replaying(100, 0.01)
    assert not replay.is_worth_replaying(100, 1.0)
