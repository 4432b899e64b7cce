"""Measurements are kept by how precise ops in float32 are, by whichever of PyTorch's two ways that was set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outofcore._torch_internals import precision_of
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import op_shelf


@pytest.fixture
def _as_before() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_as_before")
def test_the_newer_way_changes_the_shelf_and_raises_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    op_shelf(cache).write({"entry": {"seconds": 1.0}})
    assert "entry" in op_shelf(cache).read()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    assert precision_of(torch.backends.mkldnn, "matmul") == "bf16"
    # With that, PyTorch's older question raises.
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert "entry" not in op_shelf(cache).read()
