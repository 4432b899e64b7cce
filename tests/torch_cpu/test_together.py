"""Updates in a row become one op where that takes no more memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outofcore.analysis import live_bytes
from outofcore.capture import OptimizerUpdate, capture_step
from outofcore.capture.captured import Captured
from outofcore.capture.passes import TOGETHER_BYTES, together


def captured_with(optimizer: type[torch.optim.Optimizer], twice: bool = False, **settings: Any) -> Captured:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
    made = optimizer(model.parameters(), lr=0.1, **settings)

    def step(x: torch.Tensor) -> torch.Tensor:
        made.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        made.step()
        if twice:
            made.step()
        return loss.detach()

    return capture_step(step, [model], [made], (torch.randn(2, 300),), {})


def updates(captured: Captured) -> list[OptimizerUpdate]:
    return [call.func for call in captured.calls if isinstance(call.func, OptimizerUpdate)]


@pytest.mark.parametrize("settings", [{}, {"foreach": False}, {"fused": True}])
def test_a_row_of_updates_becomes_one(settings: dict[str, Any]) -> None:
    before = captured_with(torch.optim.AdamW, **settings)
    after = together(before)
    assert len(updates(before)) > 1
    (one,) = updates(after)
    assert [m.parameter for m in one.members] == [m.parameter for u in updates(before) for m in u.members]
    old = [op for op, call in zip(before.graph.ops, before.calls, strict=True) if call.func in updates(before)]
    new = after.graph.ops[-1]
    assert set(new.reads) == {s for op in old for s in op.reads}
    assert set(new.mutates) == {s for op in old for s in op.mutates}
    assert [op.id for op in after.graph.ops] == list(range(len(after.graph.ops)))


def test_updates_that_need_memory_for_all_at_once_stay_apart() -> None:
    before = captured_with(torch.optim.AdamW, foreach=True)
    assert len(updates(together(before))) == len(updates(before)) > 1


def test_the_second_update_of_a_parameter_stays_the_second() -> None:
    before = captured_with(torch.optim.SGD, twice=True)
    first, second = updates(together(before))
    assert [m.parameter for m in first.members] == [m.parameter for m in second.members]


def test_an_op_of_updates_takes_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    before = captured_with(torch.optim.SGD)
    monkeypatch.setattr("outofcore.capture.passes.TOGETHER_BYTES", 2 * (300 * 300 + 300) * 4)
    assert 1 < len(updates(together(before))) < len(updates(before))


def test_on_a_device_those_that_go_over_all_at_once_are_joined_as_well() -> None:
    before = replace(captured_with(torch.optim.AdamW, foreach=True), device=torch.device("cuda"))
    after = together(before)
    # In as much as is a small part of what the step holds at once.
    assert len(updates(after)) < len(updates(before))
    joined = [sum(m.parameter.numel() * 4 for m in one.members) for one in updates(after)]
    assert max(joined) <= max(TOGETHER_BYTES, live_bytes(before.graph) // 8)


def test_where_nothing_is_said_the_device_of_the_step_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where the parameters are when it is captured."""
    before = captured_with(torch.optim.AdamW)
    monkeypatch.setattr("outofcore.capture.passes.TOGETHER_BYTES", 1)
    monkeypatch.setattr("outofcore.capture.passes.DEVICE_TOGETHER_BYTES", 1 << 30)
    monkeypatch.setattr("outofcore.capture.passes._SMALL_PART", 1)
    assert len(updates(together(before))) == len(updates(before))
    assert len(updates(together(replace(before, device=torch.device("cuda"))))) == 1
