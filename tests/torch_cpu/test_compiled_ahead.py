"""Tests of compiling kernels in helper processes."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outofcore.capture.helpers import pack_work
from outofcore.capture.step import capture_step
from outofcore.progress import ProgressCallback, ignore_progress
from outofcore.transforms import compiled_ahead, kernels
from outofcore.transforms.compiled_ahead import compile_ahead, serve
from outofcore.transforms.fusing import fuse_ops


class _Recipes(kernels.Kernels):
    """Collects recipes without compiling them."""

    def compile_all(
        self, recipes: Iterable[kernels.Recipe], tell: ProgressCallback = ignore_progress
    ) -> Mapping[str, kernels.Kernel]:
        self.collected = list({recipe.text: recipe for recipe in recipes}.values())
        return {}


@pytest.fixture(scope="module")
def recipes() -> list[kernels.Recipe]:
    layers = [layer for width in range(8, 32, 2) for layer in (nn.Linear(width, width + 2), nn.GELU(), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).softmax(1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    collector = _Recipes()
    fuse_ops(capture_step(step, [model], [optimizer], (torch.ones(4096, 8),), {}, torch.device("cpu")), collector)
    assert len(collector.collected) >= 8
    return collector.collected


def test_helper_receives_recipes_unchanged(recipes: list[kernels.Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[tuple[kernels.Recipe, int]] = []
    monkeypatch.setattr(kernels, "compile_recipe", lambda recipe, threads: collected.append((recipe, threads)))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pack_work(recipes, 1))))
    threads = torch.get_num_threads()
    try:
        serve()
    finally:
        torch.set_num_threads(threads)
    assert [recipe for recipe, _ in collected] == recipes
    assert {count for _, count in collected} == {1}
    assert all(kernels.describe_recipe(recipe) == recipe.text for recipe, _ in collected)


def test_helper_continues_after_a_failed_compilation(
    recipes: list[kernels.Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(recipe: kernels.Recipe, threads: int) -> None:
        tried.append(recipe.text)
        raise RuntimeError("refused")

    monkeypatch.setattr(kernels, "compile_recipe", refuse)
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pack_work(recipes[:2], torch.get_num_threads())))
    )
    serve()
    assert tried == [recipe.text for recipe in recipes[:2]]


@pytest.mark.parametrize(("cores", "helpers"), [(1, 0), (2, 1), (3, 2), (64, 2)])
def test_helpers_share_recipes_in_reverse_order_and_end_with_the_block(
    recipes: list[kernels.Recipe], monkeypatch: pytest.MonkeyPatch, cores: int, helpers: int
) -> None:
    shares: list[list[str]] = []
    started: list[subprocess.Popen[bytes]] = []

    def packing(share: Any, threads: int) -> bytes:
        shares.append([recipe.text for recipe in share])
        return b""

    def start(main: str, work: bytes) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    monkeypatch.setattr(compiled_ahead, "pack_work", packing)
    monkeypatch.setattr(compiled_ahead, "start_process", start)
    with compile_ahead(recipes[:8], 2, cores) as count:
        assert count == len(started) == helpers
        assert all(helper.poll() is None for helper in started)
    assert all(helper.returncode is not None for helper in started)
    assert sorted(text for share in shares for text in share) == sorted(r.text for r in recipes[:8] if helpers)
    order = [recipe.text for recipe in recipes[:8]]
    for place, share in enumerate(shares):
        assert share == order[::-1][place::helpers]


def test_recipes_stay_in_this_process_when_helpers_cannot_start(
    recipes: list[kernels.Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with compile_ahead(recipes, 2, 8) as count:
        assert count == 0
