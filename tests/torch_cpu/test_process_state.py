"""Tests of restoring the process settings that a test changes, and of naming the others."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any

import process_state
import pytest
import torch

CHANGES: dict[str, Callable[[], Any]] = {
    "the environment": lambda: os.environ.update(LEFT_BY_A_TEST="1"),
    "loggers": lambda: logging.getLogger("outofcore.planning").setLevel(logging.ERROR),
    "garbage collection": gc.disable,
    "PyTorch's threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "gradients": lambda: torch.set_grad_enabled(False),
    "oneDNN": lambda: torch.backends.mkldnn.set_flags(False),
    "precisions": lambda: torch.set_float32_matmul_precision("medium"),
    "denormal numbers": lambda: torch.set_flush_denormal(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "hooks of all modules": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_restored(name: str) -> None:
    settings = process_state.settings()
    before = process_state.read(settings)
    CHANGES[name]()
    assert [n for n, value in process_state.read(settings).items() if value != before[n]] == [name]
    assert process_state.restore(settings, before) == []
    assert process_state.read(settings) == before


def test_open_mode_is_named() -> None:
    settings = process_state.settings()
    before = process_state.read(settings)
    with torch.overrides.BaseTorchFunctionMode():
        (line,) = process_state.restore(settings, before)
    assert line == "modes of functions and dispatch from (0, 0) to (1, 0)"
