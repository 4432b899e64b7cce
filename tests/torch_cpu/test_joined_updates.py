"""Tests of the pass that joins consecutive updates into one op if that takes no more memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness import CASES, check_exact

from outofcore.analysis import live_bytes
from outofcore.capture import OptimizerUpdate, capture_step, device_traits
from outofcore.capture.captured import Captured
from outofcore.transforms.passes import delay_updates, join_updates, rewrite_for_low_memory, rewrite_for_lowest_memory
from outofcore.units import MIB


def capture_with(optimizer: type[torch.optim.Optimizer], twice: bool = False, **settings: Any) -> Captured:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
    instance = optimizer(model.parameters(), lr=0.1, **settings)

    def step(x: torch.Tensor) -> torch.Tensor:
        instance.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        instance.step()
        if twice:
            instance.step()
        return loss.detach()

    return capture_step(step, [model], [instance], (torch.randn(2, 300),), {})


def set_joined_bytes(monkeypatch: pytest.MonkeyPatch, device: str, count: int) -> None:
    traits = getattr(device_traits, device)
    monkeypatch.setattr(device_traits, device, replace(traits, update_bytes=replace(traits.update_bytes, joined=count)))


def updates(captured: Captured) -> list[OptimizerUpdate]:
    return [call.func for call in captured.calls if isinstance(call.func, OptimizerUpdate)]


@pytest.mark.parametrize("settings", [{}, {"foreach": False}, {"fused": True}])
def test_consecutive_updates_become_one_op(settings: dict[str, Any]) -> None:
    before = capture_with(torch.optim.AdamW, **settings)
    after = join_updates(before)
    assert len(updates(before)) > 1
    (update,) = updates(after)
    assert [m.parameter for m in update.members] == [m.parameter for u in updates(before) for m in u.members]
    old = [op for op, call in zip(before.graph.ops, before.calls, strict=True) if call.func in updates(before)]
    new = after.graph.ops[-1]
    assert set(new.reads) == {s for op in old for s in op.reads}
    assert set(new.mutates) == {s for op in old for s in op.mutates}
    assert [op.id for op in after.graph.ops] == list(range(len(after.graph.ops)))


def test_foreach_updates_stay_separate() -> None:
    before = capture_with(torch.optim.AdamW, foreach=True)
    assert len(updates(join_updates(before))) == len(updates(before)) > 1


def test_second_update_of_a_parameter_stays_second() -> None:
    before = capture_with(torch.optim.SGD, twice=True)
    first, second = updates(join_updates(before))
    assert [m.parameter for m in first.members] == [m.parameter for m in second.members]


def test_joined_updates_stay_below_the_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = capture_with(torch.optim.SGD)
    set_joined_bytes(monkeypatch, "_HOST", 2 * (300 * 300 + 300) * 4)
    assert 1 < len(updates(join_updates(before))) < len(updates(before))


def test_foreach_updates_are_joined_on_a_gpu() -> None:
    before = replace(capture_with(torch.optim.AdamW, foreach=True), device=torch.device("cuda"))
    after = join_updates(before)
    # Joined updates stay below an eighth of the step's live bytes.
    assert len(updates(after)) < len(updates(before))
    joined = [sum(m.parameter.numel() * 4 for m in update.members) for update in updates(after)]
    assert max(joined) <= max(4 * MIB, live_bytes(before.graph) // 8)


def test_default_limit_depends_on_the_device_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = capture_with(torch.optim.AdamW)
    set_joined_bytes(monkeypatch, "_HOST", 1)
    set_joined_bytes(monkeypatch, "_GPU", 1 << 30)
    monkeypatch.setattr("outofcore.transforms.passes._LIVE_SHARE_OF_UPDATES", 1)
    assert len(updates(join_updates(before))) == len(updates(before))
    assert len(updates(join_updates(replace(before, device=torch.device("cuda"))))) == 1


LAYER = (300 * 300 + 300) * 4


def test_lean_joins_updates_within_its_room() -> None:
    before = capture_with(torch.optim.AdamW)
    separate, after = rewrite_for_lowest_memory(before), rewrite_for_low_memory(before, 16 * 2 * LAYER)
    assert 1 < len(updates(after)) < len(updates(separate))
    assert sum(len(update.members) for update in updates(after)) == sum(
        len(update.members) for update in updates(separate)
    )
    sizes = [sum(m.parameter.numel() * 4 for m in update.members) for update in updates(after)]
    assert max(sizes) <= 2 * LAYER
    assert live_bytes(after.graph) <= live_bytes(separate.graph) + 2 * LAYER


def test_lean_leaves_updates_separate_without_room() -> None:
    before = capture_with(torch.optim.AdamW)
    assert len(updates(rewrite_for_low_memory(before, 64))) == len(updates(rewrite_for_lowest_memory(before)))


def test_delayed_update_precedes_later_reads() -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(4))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        return layers[2].weight.square().sum().detach()

    captured = rewrite_for_lowest_memory(capture_step(step, [layers], [optimizer], (torch.randn(2, 300),), {}))
    moved = delay_updates(captured, 1 << 40)
    weight = next(s.id for s in moved.graph.storages if s.name.endswith("2.weight"))
    ops = moved.graph.ops
    writes = next(op.id for op in ops if weight in op.mutates)
    reads = [op.id for op in ops if weight in op.reads and weight not in op.mutates]
    assert max(reads) > writes
    assert len(updates(join_updates(moved, 1 << 40))) < len(updates(captured))


@pytest.mark.parametrize("name", ["mlp", "conv_net", "gpt", "gan", "accumulation_across", "llama"])
@pytest.mark.parametrize("room", [64 << 10, 64 << 20])
def test_steps_with_joined_updates_are_exact(name: str, room: int) -> None:
    check_exact(CASES[name], functools.partial(rewrite_for_low_memory, room=room))
