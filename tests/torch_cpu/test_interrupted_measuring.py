"""Ctrl-C while ops and links are measured: nothing is left half done, and the next call works."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import some_of
from torch import nn

from outofcore.capture.step import capture_step
from outofcore.errors import CaptureError
from outofcore.execution.arena import Arena, ScopeTable
from outofcore.profiling import ops as profiling_ops
from outofcore.profiling.ops import profile_ops
from outofcore.transforms.passes import leanest
from outofcore.units import MIB

SCRIPT = Path(__file__).with_name("interrupted.py")


@pytest.mark.parametrize("stage", some_of(["measure ops", "measure copies"], ["measure ops"]))
def test_a_process_that_is_interrupted_at_any_moment_trains_on(stage: str) -> None:
    command = [sys.executable, str(SCRIPT), "--stage", stage, "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(json.loads(line)["interrupts"] for line in done.stdout.splitlines()[1:]) > 0


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RuntimeError("on purpose")])
def test_an_op_that_fails_leaves_its_scope(raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    class Watched(ScopeTable):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begin, end = self.begin, self.end

            def entered(scope: int) -> None:
                begin(scope)
                inside.append(True)
                raise raised

            def left() -> None:
                end()
                inside.clear()

            self.begin, self.end = entered, left

    monkeypatch.setattr(profiling_ops, "ScopeTable", Watched)
    layer = nn.Linear(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).sum()
        loss.backward()
        layer.zero_grad()
        return loss

    captured = leanest(capture_step(step, [layer], [], (torch.ones(8, 64),), {}))
    # An op that no made-up tensors suit is refused.
    with pytest.raises(KeyboardInterrupt if isinstance(raised, KeyboardInterrupt) else CaptureError):
        profile_ops(captured)
    assert inside == []


def test_a_table_that_goes_while_its_scope_is_current_takes_the_scope_along() -> None:
    with Arena(4 * MIB) as arena:
        table = ScopeTable(arena, [[(MIB, 0), (MIB, MIB)]])
        table.begin(0)
        first = torch.empty(MIB, dtype=torch.uint8)
        assert first.data_ptr() == arena.address
        del table
        gc.collect()
        other = torch.empty(MIB, dtype=torch.uint8)
        assert not arena.address <= other.data_ptr() < arena.address + arena.bytes
        assert arena.counters().served == 1
