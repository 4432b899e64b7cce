"""Tests of ops that overwrite a whole storage, so that its old bytes are not needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replay import Replay
from torch import nn

from outofcore.capture import Captured, capture_step

Change = Callable[[torch.Tensor, torch.Tensor], object]

WHOLE: dict[str, Change] = {
    "zero": lambda x, y: x.zero_(),
    "fill": lambda x, y: x.fill_(2),
    "fill_with_a_tensor": lambda x, y: x.fill_(y[0, 0]),
    "copy": lambda x, y: x.copy_(y),
    "copy_of_a_row": lambda x, y: x.copy_(y[0]),
    "normal": lambda x, y: x.normal_(),
    "uniform": lambda x, y: x.uniform_(),
    "bernoulli": lambda x, y: x.bernoulli_(0.5),
    "bernoulli_of_a_tensor": lambda x, y: x.bernoulli_(y.sigmoid()),
    "random": lambda x, y: x.random_(10),
    "exponential": lambda x, y: x.exponential_(),
    "geometric": lambda x, y: x.geometric_(0.5),
    "log_normal": lambda x, y: x.log_normal_(),
    "cauchy": lambda x, y: x.cauchy_(),
    "result_elsewhere": lambda x, y: torch.mul(y, 2, out=x),
    "assigned": lambda x, y: x.__setitem__(slice(None), y),
    "transposed": lambda x, y: x.t().copy_(y.t()),
    "other_dtype": lambda x, y: x.view(torch.int32).zero_(),
    "foreach_zero": lambda x, y: torch._foreach_zero_([x]),
    "foreach_copy": lambda x, y: torch._foreach_copy_([x], [y]),
    "initialised": lambda x, y: nn.init.kaiming_uniform_(x),
}
PART: dict[str, Change] = {
    "row": lambda x, y: x[0].zero_(),
    "columns": lambda x, y: x[:, :2].copy_(y[:, :2]),
    "every_other": lambda x, y: x.view(-1)[::2].normal_(),
    "diagonal": lambda x, y: x.diagonal().zero_(),
    "row_as_result_elsewhere": lambda x, y: torch.mul(y[0], 2, out=x[0]),
    "halves": lambda x, y: torch._foreach_zero_([x[:2], x[2:]]),
    "masked": lambda x, y: x.masked_fill_(y > 0, 1.0),
    "itself": lambda x, y: x.copy_(x.t()),
    "itself_as_result_elsewhere": lambda x, y: torch.mul(x, 2, out=x),
    "added_to": lambda x, y: x.add_(y),
    "clamped": lambda x, y: x.clamp_(0, 1),
    "expanded": lambda x, y: torch.as_strided(x, (4, 4), (0, 1)).copy_(y[:1].expand(4, 4)),
}


def capture_change(change: Change) -> tuple[Captured, int]:
    """Capture a step that changes a buffer; return it and the storage of the buffer."""
    model = nn.Module()
    model.register_buffer("x", torch.rand(4, 4))

    def step(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            change(model.x, y)
        return model.x.sum()

    captured = capture_step(step, [model], [], (torch.randn(4, 4),), {})
    [state] = captured.states
    return captured, captured.values[state.value].storage


@pytest.mark.parametrize("name", WHOLE)
def test_fully_written_storage_is_not_read(name: str) -> None:
    captured, storage = capture_change(WHOLE[name])
    writes = [op for op in captured.graph.ops if storage in op.mutates]
    assert writes
    assert all((op.id, storage) in captured.graph.overwrites for op in writes)
    batch = torch.randn(4, 4)
    # The replay fills overwritten storages with garbage before the op.
    torch.manual_seed(1)
    ours = Replay(captured)(batch)
    after = captured.states[0].tensor
    assert after is not None
    result, plain = after.clone(), torch.rand(4, 4)
    torch.manual_seed(1)
    WHOLE[name](plain, batch)
    assert torch.equal(result, plain)
    assert torch.equal(ours, plain.sum())


@pytest.mark.parametrize("name", PART)
def test_partially_written_or_read_storage_is_not_overwritten(name: str) -> None:
    captured, storage = capture_change(PART[name])
    writes = [op for op in captured.graph.ops if storage in op.mutates]
    assert writes
    assert not any((op.id, storage) in captured.graph.overwrites for op in writes)


def test_gradients_set_to_zero_are_overwritten() -> None:
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()

    model(torch.ones(2, 4)).sum().backward()
    captured = capture_step(step, [model], [], (torch.ones(2, 4),), {})
    gradients = [captured.values[b.value].storage for b in captured.states if b.key.endswith(".grad")]
    assert len(gradients) == 2
    for storage in gradients:
        assert (captured.graph.uses[storage][0], storage) in captured.graph.overwrites
