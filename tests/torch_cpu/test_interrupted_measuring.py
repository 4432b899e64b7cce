"""Tests of Ctrl-C and errors while ops and links are measured."""

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
from outofcore.transforms.passes import rewrite_for_lowest_memory
from outofcore.units import MIB

SCRIPT = Path(__file__).with_name("interrupted.py")


@pytest.mark.parametrize("stage", some_of(["measure ops", "measure copies"], ["measure ops"]))
def test_process_trains_on_after_interrupts_at_random_moments(stage: str) -> None:
    command = [sys.executable, str(SCRIPT), "--stage", stage, "--rounds", "2"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert sum(json.loads(line)["interrupts"] for line in process.stdout.splitlines()[1:]) > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("on purpose")])
def test_failing_op_leaves_its_scope(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    open_scopes: list[bool] = []

    class Watched(ScopeTable):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begin, end = self.begin, self.end

            def begin_and_raise(scope: int) -> None:
                begin(scope)
                open_scopes.append(True)
                raise error

            def end_and_clear() -> None:
                end()
                open_scopes.clear()

            self.begin, self.end = begin_and_raise, end_and_clear

    monkeypatch.setattr(profiling_ops, "ScopeTable", Watched)
    layer = nn.Linear(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).sum()
        loss.backward()
        layer.zero_grad()
        return loss

    captured = rewrite_for_lowest_memory(capture_step(step, [layer], [], (torch.ones(8, 64),), {}))
    # Profiling refuses an op that fails on made-up tensors.
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CaptureError):
        profile_ops(captured)
    assert open_scopes == []


def test_freed_scope_table_ends_its_current_scope() -> None:
    with Arena(4 * MIB) as arena:
        table = ScopeTable(arena, [[(MIB, 0), (MIB, MIB)]])
        table.begin(0)
        first = torch.empty(MIB, dtype=torch.uint8)
        assert first.data_ptr() == arena.address
        del table
        gc.collect()
        second = torch.empty(MIB, dtype=torch.uint8)
        assert not arena.address <= second.data_ptr() < arena.address + arena.bytes
        assert arena.counters().served == 1
