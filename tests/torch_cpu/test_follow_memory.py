"""Tests of the small tensors of a loop, and of loops on systems with little memory."""

from __future__ import annotations

import ctypes
import gc
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outofcore
from outofcore.errors import BudgetError
from outofcore.follow import space
from outofcore.units import KIB, MIB

pytestmark = pytest.mark.usefixtures("one_thread")


SLACK = 16 * KIB


@pytest.fixture(autouse=True)
def free_earlier_tensors() -> None:
    """Free small tensors of earlier tests, which would otherwise be freed in the middle of a loop."""
    gc.collect()


def total(run: outofcore.Loop) -> int:
    stats = run.stats
    return stats.bytes_in_use + stats.small_bytes


def test_small_tensors_are_counted_while_they_live() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)])
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    with outofcore.budget("4MiB", model, home="host") as run:
        gc.collect()
        before = run.stats
        assert parameter_bytes <= before.small_bytes <= before.peak_small_bytes
        tensors = [torch.full((60, 64), float(i)) for i in range(20)]
        during = run.stats.small_bytes
        assert before.small_bytes + 20 * 60 * 64 * 4 - SLACK <= during < before.small_bytes + 20 * 64 * KIB
        del tensors
        gc.collect()
        assert abs(run.stats.small_bytes - before.small_bytes) < SLACK
        assert run.stats.peak_small_bytes >= during
        tensors = [torch.ones(1000) for _ in range(10)]
    with outofcore.budget("4MiB", model, home="host") as run:
        assert parameter_bytes <= run.stats.small_bytes < parameter_bytes + 4 * KIB  # excludes tensors of earlier loops
    assert len(tensors) == 10


def test_stats_itemise_the_memory_of_the_process() -> None:
    model = nn.Linear(1024, 1024)
    with outofcore.budget("24MiB", model, home="host") as run:
        model(torch.ones(512, 1024)).sum().backward()
        before = run.stats
        buffer = bytearray(64 * MIB)
        buffer[::4096] = b"1" * (16 * 1024)  # touches each page without other allocations
        after = run.stats
    assert before.bytes_in_use <= before.arena_bytes <= 24 * MIB
    assert 56 * MIB < after.other_bytes - before.other_bytes < 80 * MIB
    assert 0 < after.file_pages_bytes < after.resident_bytes
    assert after.arena_bytes + after.file_pages_bytes + after.other_bytes <= after.resident_bytes + MIB
    assert len(buffer) == 64 * MIB


def test_scratch_memory_of_kernels_is_not_counted_permanently() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(0, 1), nn.Flatten(), nn.Linear(30 * 30, 4))
    counts = []
    with outofcore.budget("16MiB", model, home="host", policy=None) as run:
        x = torch.rand(4, 3, 32, 32)
        for _ in range(2):
            for _ in range(20):
                model(x).sum().backward()
            model.zero_grad()
            gc.collect()
            counts.append(run.stats.small_bytes)
    assert abs(counts[0] - counts[1]) < SLACK


def train_with_small_tensors(model: nn.Module, observe: Callable[[], None]) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    small_tensors: list[Tensor] = []
    for _ in range(4):
        x = torch.rand(64, 256)
        for layer in model.children():
            x = torch.relu(layer(x))
            small_tensors += [x[:32].clone() * i for i in range(4)]  # 32 KiB each
            observe()
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*small_tensors, *(p.detach().clone() for p in model.parameters())]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])


@pytest.mark.parametrize("home", ["disk", "host"])
def test_large_tensors_make_room_for_small_ones(home: Any) -> None:
    expected = train_with_small_tensors(layers(), lambda: None)
    model, peak = layers(), 0

    def observe() -> None:
        nonlocal peak
        peak = max(peak, total(run))

    with outofcore.budget(8 * MIB, model, home=home, policy=None) as run:
        ours = train_with_small_tensors(model, observe)
        assert run.stats.small_bytes >= 4 * 8 * 4 * 32 * KIB
        assert run.stats.evictions > 0
    assert all(mine.equal(theirs) for mine, theirs in zip(ours, expected, strict=True))
    assert peak <= 8 * MIB


def test_budget_error_reports_bytes_of_small_tensors() -> None:
    tensors: list[Tensor] = []
    with (
        pytest.raises(BudgetError, match=r"tensors below 64\.0 KiB take 1\.\d+ MiB") as error,
        outofcore.budget(2 * MIB, home="host", policy=None) as run,
    ):
        tensors += [torch.ones(60, 128) for _ in range(48)]
        assert run.stats.small_bytes >= 48 * tensors[0].nbytes
        torch.ones(256, 1024)
    smallest = error.value.smallest_budget
    assert smallest is not None
    with outofcore.budget(smallest, home="host", policy=None):
        assert torch.ones(256, 1024).sum() == 256 * 1024
    assert len(tensors) == 48  # they counted in the second loop too


@pytest.fixture
def hidden_page_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make homes unable to read /proc/self/pagemap, for lack of descriptors."""
    original_call = space.call

    def call(library: ctypes.CDLL, name: str, *arguments: Any) -> int:
        if name != "follow_add_home":
            return original_call(library, name, *arguments)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            return original_call(library, name, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    monkeypatch.setattr(space, "call", call)


@pytest.mark.usefixtures("hidden_page_map")
def test_prefetching_is_off_when_the_page_map_is_unreadable() -> None:
    expected, model = train_with_small_tensors(layers(), lambda: None), layers()
    with outofcore.budget(6 * MIB, model, home="host", policy=None) as run:
        ours = train_with_small_tensors(model, lambda: None)
        assert run.stats.fetches_ahead == 0 < run.stats.fetches
    assert all(mine.equal(theirs) for mine, theirs in zip(ours, expected, strict=True))


SPARING = """
import resource, sys, torch, outofcore
torch.set_num_threads(1)
def trained(budget):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    def steps():
        for size in (64, 200, 333, 128, 300, 64):
            model(torch.ones(size, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if budget is None:
        steps()
    else:
        used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + 8 * budget, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        with outofcore.budget(budget, model, home="host") as run:
            steps()
            print(run.stats.evictions > 0, run.stats.peak_bytes <= budget)
    return [p.detach().clone() for p in model.parameters()]
trained(None)
wanted = trained(None)
print(all(map(torch.equal, trained(16 << 20), wanted)))
"""


def test_loop_runs_under_strict_overcommit() -> None:
    """``RLIMIT_DATA`` counts mappings as ``vm.overcommit_memory=2`` does."""
    process = subprocess.run([sys.executable, "-c", SPARING], capture_output=True, text=True, timeout=120, check=False)
    assert process.stdout.split() == ["True", "True", "True"], process.stderr
