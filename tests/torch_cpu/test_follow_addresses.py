"""Tests that memory with an exported address, or too large to move, stays in place in an eager loop."""

from __future__ import annotations

import copy
import ctypes
import io
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.dlpack import to_dlpack  # imported before any loop, as other modules do

import outofcore
from outofcore.follow.native import load_paging

MIB = 1 << 20
NUMPY = torch.Tensor.numpy  # the original method, from before any loop

pytestmark = pytest.mark.usefixtures("one_thread")


def location_of(tensor: Tensor) -> str:
    return ("outside", "arena", "away", "loose")[load_paging().follow_where(tensor.untyped_storage()._cdata)]


def evict_all(run: outofcore.Loop) -> None:
    """Evict all storages and fill the whole arena with other data."""
    assert load_paging().follow_evict_all(run._space) == 0
    for _ in range(2):
        torch.full((14 * MIB // 4,), 7.0)


def tensor_of(storage: Any) -> Tensor:
    return torch.empty(0).set_(storage, 0, (storage.nbytes() // 4,))


def at_address(address: int, count: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


BY_ARRAY: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "numpy_of_view": lambda x: x.view(-1, 4).t().numpy().T.reshape(-1),
    "numpy_of_detached": lambda x: x.detach().numpy(),
    "asarray": np.asarray,
    "array": lambda x: x.__array__(),
    "numpy_imported": NUMPY,
    "from_numpy": lambda x: torch.from_numpy(x.numpy()),
    "frombuffer": lambda x: torch.frombuffer(memoryview(x.numpy()), dtype=torch.float32),
}
BY_ADDRESS: dict[str, Callable[[Tensor], Any]] = {
    "numpy_from_dlpack": np.from_dlpack,
    "from_dlpack": torch.from_dlpack,
    "capsule": lambda x: torch.from_dlpack(x.__dlpack__()),
    "to_dlpack_imported": lambda x: torch.from_dlpack(to_dlpack(x)),
    "to_dlpack": lambda x: torch.from_dlpack(torch.to_dlpack(x)),
    "to_dlpack_versioned": lambda x: torch.from_dlpack(torch._C._to_dlpack_versioned(x)),  # type: ignore[attr-defined]
    "data_ptr": lambda x: at_address(x.data_ptr(), x.numel()),
    "storage_data_ptr": lambda x: at_address(x.untyped_storage().data_ptr(), x.numel()),
    "typed_storage_data_ptr": lambda x: at_address(x.storage().data_ptr(), x.numel()),
    "storage_slice": lambda x: tensor_of(x.untyped_storage()[:]),
    "pointer_storage": lambda x: tensor_of(
        torch._C._construct_storage_from_data_pointer(x.data_ptr(), x.device, x.nbytes)
    ),
}
if hasattr(torch.Tensor, "const_data_ptr"):
    BY_ADDRESS["const_data_ptr"] = lambda x: at_address(x.const_data_ptr(), x.numel())  # type: ignore[attr-defined]
ALL = BY_ARRAY | BY_ADDRESS


@pytest.fixture(params=["disk", "host"])
def run(request: pytest.FixtureRequest) -> Iterator[outofcore.Loop]:
    with outofcore.budget(16 * MIB, home=request.param) as loop:
        yield loop


def assert_alias(x: Tensor, alias: Any, run: outofcore.Loop) -> None:
    """Check that a tensor and its alias show each other's writes across evictions."""
    for value in (3.0, 5.0):
        x.fill_(value)
        evict_all(run)
        assert (alias == value).all()
        alias[:] = value + 1
        evict_all(run)
        assert x.add(0).eq(value + 1).all()
        alias[:] = value + 2  # right after an op used it
        evict_all(run)
        assert x.add(0).eq(value + 2).all()


@pytest.mark.parametrize("access", ALL)
def test_address_stays_valid_when_taken_in_a_loop(run: outofcore.Loop, access: str) -> None:
    x = torch.zeros(40000) + 1
    alias = ALL[access](x)
    assert_alias(x, alias, run)


@pytest.mark.parametrize("access", set(ALL) - {"numpy_imported"})
def test_address_stays_valid_when_taken_of_an_evicted_tensor(run: outofcore.Loop, access: str) -> None:
    x = torch.zeros(40000) + 1
    evict_all(run)
    alias = ALL[access](x)
    assert (alias == 1).all()
    assert_alias(x, alias, run)


def test_unseen_array_of_an_evicted_tensor_stays_valid(run: outofcore.Loop) -> None:
    x = torch.zeros(40000) + 1
    evict_all(run)
    array = NUMPY(x)
    assert_alias(x, array, run)
    assert location_of(x) == "away"
    assert x.data_ptr() == array.__array_interface__["data"][0]


@pytest.mark.parametrize("access", BY_ARRAY)
@pytest.mark.parametrize("use", ["op", "model", "address"])
def test_array_from_before_a_loop_stays_valid(access: str, use: str) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.ones(40000))
    x: Tensor = model.x  # type: ignore[assignment]
    alias = BY_ARRAY[access](x)
    with outofcore.budget(16 * MIB, *([model] if use == "model" else [])) as run:
        if use == "address":
            x.data_ptr()
        assert x.sum() == 40000
        assert location_of(x) == "outside"
        assert run.stats.untracked_uses > 0
        assert_alias(x, alias, run)
    alias[:] = 11
    assert x.eq(11).all()


def test_array_of_a_parameter_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(256, 256)
    array = model.weight.detach().numpy()
    with caplog.at_level(logging.WARNING, "outofcore"), outofcore.budget("4MiB", model):
        assert location_of(model.weight) == "outside"
        with torch.no_grad():
            model.weight.fill_(2)
        assert (array == 2).all()
    assert "256 KiB of parameters and buffers stay where they are" in caplog.text


@pytest.mark.parametrize("access", ALL)
@pytest.mark.parametrize("evicted", [False, True])
def test_address_stays_valid_when_taken_between_loops(access: str, evicted: bool) -> None:
    model = nn.Module()
    with outofcore.budget(4 * MIB + 4096) as run:  # a page for small tensors
        x = torch.zeros(40000) + 1
        fillers = [torch.zeros(2 * MIB // 4) for _ in range(2)]
        if evicted:  # the end of the loop fetches bytes up to the budget
            load_paging().follow_evict_all(run._space)
        else:
            x.add_(0)
    assert location_of(x) == ("away" if evicted else "arena")
    model.register_buffer("x", x)
    alias = ALL[access](x)
    for models in ([], [model]):
        with outofcore.budget(16 * MIB, *models) as run:
            assert (alias == x.mean().item()).all()
            assert_alias(x, alias, run)
            run.release()
            run.release([x])
            assert_alias(x, alias, run)
        alias[:] = 11
        assert x.eq(11).all()
    del fillers


@pytest.mark.parametrize("access", ALL)
def test_address_stays_valid_after_its_loop(access: str) -> None:
    with outofcore.budget(4 * MIB):
        x = torch.zeros(40000) + 1
        alias = ALL[access](x)
        torch.zeros(900000)
    with outofcore.budget(16 * MIB) as run:
        assert_alias(x, alias, run)


def test_address_of_data_too_large_to_move_stays_valid(run: outofcore.Loop) -> None:
    tensors: list[Tensor] = []
    thread = threading.Thread(target=lambda: tensors.append(torch.ones(9 * MIB // 4)))  # outside the thread of the loop
    thread.start()
    thread.join()
    address = tensors[0].data_ptr()
    assert tensors[0].sum() == 9 * MIB // 4
    evict_all(run)
    assert (at_address(address, 9 * MIB // 4) == 1).all()
    assert tensors[0].data_ptr() == address
    assert location_of(tensors[0]) == "outside"


def test_loaded_tensors_are_moved() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(40000), file)
    with outofcore.budget("4MiB"):
        resident = torch.ones(40000)  # keeps the address hooks installed
    before, copied = torch.load(io.BytesIO(file.getvalue())), copy.deepcopy(torch.ones(40000))
    assert not before.untyped_storage().resizable()
    with outofcore.budget("4MiB") as run:
        (before + copied + resident + torch.load(io.BytesIO(file.getvalue()))).sum()
        assert location_of(before) == location_of(copied) == location_of(resident) == "arena"
        assert run.stats.fixed == 0


def test_methods_are_restored_after_the_last_tensor_of_a_loop() -> None:
    """Runs in a new process, without tensors from loops of other tests."""
    code = f"import {Path(__file__).stem} as tests; tests.check_methods_are_restored()"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


def check_methods_are_restored() -> None:
    plain = torch.Tensor.data_ptr, torch.UntypedStorage.__getitem__, torch.Tensor.numpy
    with outofcore.budget("4MiB"):
        x = torch.zeros(40000) + 1
    assert torch.Tensor.data_ptr is not plain[0]
    x.data_ptr()
    assert torch.Tensor.data_ptr is not plain[0]
    del x
    torch.empty(1).data_ptr()
    assert (torch.Tensor.data_ptr, torch.UntypedStorage.__getitem__, torch.Tensor.numpy) == plain
    assert torch.Tensor.numpy is torch._C.TensorBase.numpy
    with pytest.raises(TypeError, match="must be Tensor"):
        to_dlpack(3)


def test_diverted_function_raises_the_errors_of_pytorch(run: outofcore.Loop) -> None:
    with pytest.raises(TypeError, match="must be Tensor"):
        to_dlpack(3)
    assert torch.from_dlpack(to_dlpack(torch.ones(3))).sum() == 3


# ---- data in memory ------------------------------------------------------------------------------------------------

BUDGET = 4 * MIB


@pytest.mark.parametrize("share", [0.3, 0.6, 1, 10])
@pytest.mark.parametrize("pattern", ["index", "slice", "rows", "loader"])
def test_data_set_is_read_in_place(share: float, pattern: str) -> None:
    data = torch.randn(int(share * BUDGET) // 4 // 256, 256)
    expected, batches = data.clone(), iter(DataLoader(TensorDataset(data), batch_size=32, shuffle=True))
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = {
        "index": lambda: data[torch.randint(0, len(data), (32,))],
        "slice": lambda: data[7:39],
        "rows": lambda: torch.stack([data[k] for k in range(32)]),
        "loader": lambda: next(batches)[0],
    }[pattern]
    with outofcore.budget(BUDGET, model) as run:
        for _ in range(4):
            model(rows()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert location_of(data) == "outside"
        assert run.stats.untracked_uses >= 4
        assert run.stats.fetched_bytes < data.nbytes
    assert data.equal(expected)


@pytest.mark.parametrize("share", [0.3, 0.4])
def test_batch_from_before_the_loop_is_moved(share: float) -> None:
    batches = [torch.randn(int(share * BUDGET) // 4 // 64, 64) for _ in range(4)]
    model = nn.Linear(64, 4)
    with outofcore.budget(BUDGET, model) as run:
        for batch in batches:
            model(batch).square().mean().backward()
        assert all(location_of(batch) in {"arena", "away"} for batch in batches)
        assert run.stats.peak_bytes <= BUDGET


def test_large_data_does_not_exceed_the_budget() -> None:
    weight = torch.randn(448, 448)
    for share in (0.3, 0.45, 0.6, 1, 3):
        data = torch.randn(int(share * BUDGET) // 4 // 448, 448)
        with outofcore.budget(BUDGET) as run:
            assert (data.sum(1) + data @ weight.clone()[0]).shape == (len(data),)
            assert run.stats.peak_bytes <= BUDGET


# ---- memory as the kernel counts it --------------------------------------------------------------------------------


def arena_in_smaps(run: outofcore.Loop) -> tuple[int, int, int]:
    """Return the arena's resident bytes, its bytes with all huge pages filled, and its number of mappings."""
    base = load_paging().follow_base(run._space)
    limits = (base, base + 64 * 64 * MIB)
    resident = possible = mappings = rss = size = 0
    counts = False
    with Path("/proc/self/smaps").open() as file:
        for line in file:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *$", line):
                begin, end = (int(number, 16) for number in match.groups())
                counts, size = limits[0] <= begin and end <= limits[1], end - begin
            elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                counts = False
            elif counts and line.startswith("Rss:"):
                rss = int(line.split()[1]) << 10
            elif counts and line.startswith("VmFlags:"):
                flags = line.split()
                if "nr" in flags:  # mapped without reserve, as the arena is
                    resident, mappings = resident + rss, mappings + 1
                    possible += size if "hg" in flags else rss if "nh" in flags else size
    return resident, possible, mappings


def churn(run: outofcore.Loop, count: int) -> list[Tensor]:
    draw, pool = random.Random(0), list[Tensor]()
    for _ in range(count):
        if len(pool) < 300 and draw.random() < 0.6:
            pool.append(torch.full((draw.choice((17000, 20000, 40000, 100000, 300000, 1500000)),), 1.0))
        elif pool:
            del pool[draw.randrange(len(pool))]
    return pool


def test_huge_pages_cannot_fill_beyond_the_budget() -> None:
    with outofcore.budget(64 * MIB, home="host") as run:
        pool = [torch.full((300000,), 1.0) for _ in range(20)]
        assert arena_in_smaps(run)[1] <= 64 * MIB + 4096
        pool = churn(run, 1500)
        resident, possible, mappings = arena_in_smaps(run)
        assert 32 * MIB < resident <= possible <= 64 * MIB + 4096
        assert mappings < 200
        for tensor in pool[::7]:
            tensor.data_ptr()
        load_paging().follow_evict_all(run._space)
        churn(run, 500)
        assert arena_in_smaps(run)[1] <= 64 * MIB + 4096
        del pool
        run.evict_all()
        torch.full((300000,), 1.0)
        assert arena_in_smaps(run)[1] <= 64 * MIB + 4096


@pytest.mark.exhaustive
def test_resident_memory_stays_within_the_budget_for_a_minute() -> None:
    with outofcore.budget(64 * MIB, home="host") as run:
        pool = churn(run, 20000)
        for _ in range(9):
            time.sleep(8)
            assert arena_in_smaps(run)[0] <= 64 * MIB + 4096
        del pool
