"""Tests of steps on a GPU: the bits of plain PyTorch under any stream timing, within a hard limit."""

from __future__ import annotations

import functools
import gc
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import WORLDS, World, convolutional, dense, differing_tensors, train_eagerly

import outofcore
from outofcore import _torch_internals as internals
from outofcore.capture import capture_step
from outofcore.costs import Home
from outofcore.errors import BudgetError, TransferError
from outofcore.execution.arena import ScopeTable
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.cuda.driver import CudaDriver
from outofcore.execution.cuda.interface import Stream
from outofcore.execution.opening import OpenHome
from outofcore.execution.replay import Replay
from outofcore.options import MemoryOptions, PlanOptions, RunOptions, UserStep
from outofcore.policies import policy_of
from outofcore.profiling.links import measure_homes
from outofcore.program import CopyIn, CopyOut
from outofcore.runtime.homes import DiskHome, HomeStore, PinnedHome
from outofcore.step import Step
from outofcore.units import GIB, KIB, MIB

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

CPU = torch.device("cpu")
STEPS = 4
POLICIES = ("offload-all", "auto", "window", "sqrt-checkpoint", "keep-all")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


class Delayed(CudaDriver):
    def __init__(self, device: torch.device, seed: int, slow: frozenset[Stream]) -> None:
        super().__init__(device)
        self._random = random.Random(seed)
        self._slow = slow

    def launch(self, run: Any, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        self._dawdle(stream)
        super().launch(run, call, stream)

    def copy(self, stream: Stream, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self._dawdle(stream)
        super().copy(stream, index, target, source)

    def transfer(self, stream: Stream, index: int, home: HomeStore, offset: int, memory: torch.Tensor) -> None:
        self._dawdle(stream)
        super().transfer(stream, index, home, offset, memory)

    def _dawdle(self, stream: Stream) -> None:
        if stream in self._slow and self._random.random() < 0.5:
            with torch.cuda.stream(self._streams[stream]):
                internals.let_device_idle(self._random.randrange(1_000_000))


def compile_world(
    world: World,
    budget: int,
    policy: str,
    driver: CudaDriver,
    near: int = GIB,
    behind: Sequence[HomeStore] = (),
    replay: Any = True,
) -> Step:
    backend = CudaBackend(driver.device, driver, replay=replay)
    home = OpenHome([backend.home(near), *behind], stays_open=False)
    memory, planning, running = MemoryOptions(budget, home), PlanOptions(policy_of(policy)), RunOptions(backend)
    step = Step(UserStep(world.step, [world.model], [world.optimizer]), memory, planning, running)
    step._session.planner.links = tuple(replace(link(type(store)), bytes=store.capacity) for store in home.stores)
    return step


@functools.cache
def link(kind: type[HomeStore]) -> Home:
    """Measure the link to a kind of home, once for all tests: it takes more than a second."""
    backend = CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    with tempfile.TemporaryDirectory() as folder:
        store = backend.home(64 * MIB) if kind is PinnedHome else DiskHome(folder)
        try:
            return measure_homes([store], None, backend, 8 * MIB)[0]
        finally:
            store.close()


@functools.cache
def smallest(make: Callable[[torch.device], World], device: torch.device) -> int:
    for _ in range(2):  # at first, libraries may take memory for new streams
        world, budget = make(CPU), beside(device) + 256 * KIB
        step = outofcore.compile(world.step, world.model, world.optimizer, budget=budget, device=device, cache=False)
        step._session.planner.links = (link(PinnedHome),)
        with step, pytest.raises(BudgetError) as caught:
            step(*world.batch(0))
        if caught.value.smallest_budget is not None:
            return caught.value.smallest_budget - budget + 256 * KIB
    raise caught.value


def beside(device: torch.device) -> int:
    return CudaBackend(device).unavailable_bytes(128 * MIB, 4, 0)


def check_bits(world: World, step: Step, losses: list[torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(1)
    actual = [step(*world.batch(index)).detach().cpu() for index in range(STEPS)]
    assert [torch.equal(a, b) for a, b in zip(actual, losses, strict=True)] == [True] * STEPS
    assert differing_tensors(world.state(), state) == []


def test_requests_are_served_at_their_planned_offsets(device: torch.device) -> None:
    arena = CudaDriver(device).open_arena(4 * MIB, MIB)
    table = ScopeTable(arena, [[(MIB, 512 * KIB), (2 * MIB, 2 * MIB)]])
    table.begin(0)
    first, second = (torch.empty(count, dtype=torch.uint8, device=device) for count in (MIB, 2 * MIB))
    table.end()
    assert [t.data_ptr() - arena.address for t in (first, second)] == [512 * KIB, 2 * MIB]
    assert arena.counters().served == 2
    first.fill_(3)
    assert int(arena.view(512 * KIB, MIB).max()) == 3
    view = arena.view(0, 512)
    arena.close()
    view.fill_(1)  # the view keeps the memory alive
    assert int(view.sum()) == 512


def test_record_stream_keeps_the_memory_of_a_small_result(device: torch.device) -> None:
    """PyTorch's allocator made it, with another deleter."""
    arena = CudaDriver(device).open_arena(4 * MIB, MIB)
    table = ScopeTable(arena, [[]])
    side = torch.cuda.Stream(device)
    table.begin(0)
    small = torch.empty(64, device=device)
    table.end()
    address = small.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(1e9))
    small.record_stream(side)
    del small
    pending = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["address"] == address]
    side.synchronize()
    arena.close()
    assert [block["state"] for block in pending] == ["active_pending_free"]


def test_host_memory_is_pinned_to_the_page(device: torch.device) -> None:
    home = CudaBackend(device).home(64 * MIB)
    first, second = home.reserve(3 * 4096), home.reserve(5 * MIB)
    assert home.bytes == 3 * 4096 + 5 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert home.tensor_of(first, 4096).is_pinned()
        assert home.tensor_of(second, 5 * MIB).is_pinned()
    assert home.edges == [3 * 4096, 3 * 4096 + 5 * MIB]
    home.close()


@pytest.mark.parametrize("placement", ["model on the CPU", "model on the device"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list(WORLDS))
def test_step_has_the_bits_of_plain_pytorch(name: str, policy: str, placement: str, device: torch.device) -> None:
    make = WORLDS[name]
    losses, state = train_eagerly(make(device), STEPS)
    arena = smallest(make, device)
    room = {"offload-all": arena, "window": arena + 2 * MIB, "auto": arena + 4 * MIB}.get(policy, 64 * MIB)
    world = make(CPU if placement == "model on the CPU" else device)
    with compile_world(world, room + beside(device) + 8 * MIB, policy, CudaDriver(device)) as step:
        check_bits(world, step, losses, state)
        moved = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut)]
        assert policy != "offload-all" or len(moved) > 10
    assert differing_tensors(world.state(), state) == []


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["keep-all", "offload-all"])
@pytest.mark.parametrize("name", list(WORLDS))
def test_native_replay_has_the_bits_of_plain_pytorch(
    name: str, policy: str, graphs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    plain = Replay.run

    def counting(self: Replay, first: int, *args: Any, **kwargs: Any) -> int:
        reached = plain(self, first, *args, **kwargs)
        counts.append(reached - first)
        return reached

    monkeypatch.setattr(Replay, "run", counting)
    made_graphs: list[bool] = []
    graph_of = CudaDriver.capture_graph

    def noting(self: CudaDriver, call: Callable[[], object]) -> Callable[[], object] | None:
        actual = graph_of(self, call)
        made_graphs.append(actual is not None)
        return actual

    monkeypatch.setattr(CudaDriver, "capture_graph", noting)
    make, steps = WORLDS[name], 12  # the first six are measured, and one is recorded
    losses, state = train_eagerly(make(device), steps)
    room = smallest(make, device) if policy == "offload-all" else 64 * MIB
    world = make(device)
    replay = "graphs" if graphs else True
    driver = CudaDriver(device)
    with compile_world(world, room + beside(device) + 8 * MIB, policy, driver, replay=replay) as step:
        torch.manual_seed(1)
        actual = [step(*world.batch(index)).detach().cpu() for index in range(steps)]
        # All graphs share one pool of memory.
        assert len({graph.pool() for graph in driver._graphs}) == bool(made_graphs)
        assert [torch.equal(a, b) for a, b in zip(actual, losses, strict=True)] == [True] * steps
        assert differing_tensors(world.state(), state) == []
        assert max(counts) > 10
        assert all(made_graphs)
        # With offload-all, the plan decides whether enough ops follow each other for a graph.
        assert bool(made_graphs) == graphs or policy == "offload-all"
        assert graphs or not made_graphs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slow", [{Stream.COMPUTE}, {Stream.COPY_OUT}, {Stream.COPY_IN}, set(Stream)])
def test_delayed_streams_keep_the_bits(slow: set[Stream], seed: int, device: torch.device) -> None:
    losses, state = train_eagerly(dense(device), STEPS)
    world = dense(CPU)
    budget = smallest(dense, device) + beside(device) + 2 * MIB
    with compile_world(world, budget, "offload-all", Delayed(device, seed, frozenset(slow))) as step:
        check_bits(world, step, losses, state)


@pytest.mark.parametrize("slow", [set(), {Stream.WRITE, Stream.READ}, {Stream.DISK_OUT, Stream.DISK_IN}, set(Stream)])
def test_disk_behind_host_memory_keeps_the_bits(slow: set[Stream], device: torch.device, tmp_path: Path) -> None:
    losses, state = train_eagerly(dense(device), STEPS)
    world = dense(CPU)
    budget = smallest(dense, device) + beside(device) + 2 * MIB
    driver = Delayed(device, 0, frozenset(slow))
    with compile_world(world, budget, "offload-all", driver, 600 * KIB, [DiskHome(tmp_path)]) as step:
        check_bits(world, step, losses, state)
        moved = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut) and i.home == 1]
        assert len(moved) > 10
    assert differing_tensors(world.state(), state) == []


def test_transfer_failure_is_raised(device: torch.device, tmp_path: Path) -> None:
    driver, home = CudaDriver(device), DiskHome(tmp_path)
    home.ensure(MIB)
    memory = driver.allocate_staging(2 * MIB)
    with driver.step(None):
        driver.transfer(Stream.READ, -1, home, 0, memory)  # more than the file has
        with pytest.raises(TransferError, match="the file ends there"):
            driver.synchronize()
        driver.transfer(Stream.READ, -1, home, 0, memory[:MIB])
        driver.synchronize()
    home.close()


@contextmanager
def limit_memory(device: torch.device, budget: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_step_stays_below_a_hard_limit_at_the_budget(device: torch.device) -> None:
    losses, state = train_eagerly(convolutional(device), STEPS)
    gc.collect()
    torch.cuda.empty_cache()
    arena = smallest(convolutional, device)
    world = convolutional(CPU)
    budget = arena + beside(device) + 4 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with limit_memory(device, budget):
        step = compile_world(world, budget, "auto", CudaDriver(device))
        step._session.planner.links = (Home("host", None, 2e10, 2e10),)  # measuring it would need more buffers
        with step:
            check_bits(world, step, losses, state)
            assert torch.cuda.max_memory_reserved(device) <= budget
            assert step.stats.off_plan == 0


def test_host_does_not_wait_within_a_step(device: torch.device) -> None:
    world = dense(device, "sgd")
    with compile_world(world, GIB, "auto", CudaDriver(device)) as step:
        for index in range(8):  # the last steps are not measured
            step(*world.batch(index))
        batch = world.batch(9)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_files_are_read_and_written_by_separate_threads(device: torch.device, tmp_path: Path) -> None:
    driver, home = CudaDriver(device), DiskHome(tmp_path)
    home.ensure(4 * MIB)
    memory = driver.allocate_staging(4 * MIB)
    if driver._lanes is None or len(driver._lanes.by_stream) < 2:
        pytest.skip("streams of this device do not wait for threads")
    written, read = memory[: 2 * MIB], memory[2 * MIB :]
    first, second = driver.create_mark(), driver.create_mark()
    with driver.step(None):
        for number in range(1, 40):
            written.fill_(number)
            read.zero_()
            driver.transfer(Stream.WRITE, -1, home, 0, written)
            driver.record(Stream.WRITE, first)
            driver.wait(Stream.READ, first)
            driver.transfer(Stream.READ, -1, home, 0, read)
            driver.record(Stream.READ, second)
            driver.await_mark(second)  # the bytes arrive before the mark is reached
            assert torch.equal(written, read)
        driver.synchronize()
    home.close()


def gradient_in_loss(device: torch.device) -> World:
    """Return a step whose loss contains a gradient: autograd adds nodes during the backward pass."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = slope.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return World(model, optimizer, step, lambda index: (torch.ones(8, 32, device=device),))


def test_backward_ops_have_the_same_modules_on_gpu_and_cpu(device: torch.device) -> None:
    ops_by_device = []
    for target in (CPU, device):
        world = gradient_in_loss(target)
        captured = capture_step(world.step, [world.model], [world.optimizer], world.batch(0), {}, target)
        ops = captured.graph.ops
        ops_by_device.append([(op.name, op.module, op.source) for op in ops if not op.name.startswith("optimizer")])
    assert ops_by_device[0] == ops_by_device[1]
