"""Steps on a GPU: the bits of plain PyTorch, whatever the streams do, within a hard limit."""

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
    """A device whose streams dawdle, each by itself."""

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


def compiled(
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
    """Of a kind of home, measured once for all tests: it takes more than a second."""
    backend = CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    with tempfile.TemporaryDirectory() as folder:
        store = backend.home(64 * MIB) if kind is PinnedHome else DiskHome(folder)
        try:
            return measure_homes([store], None, backend, 8 * MIB)[0]
        finally:
            store.close()


@functools.cache
def smallest(make: Callable[[torch.device], World], device: torch.device) -> int:
    """What the arena needs at the least, as the refusal of a smaller one tells."""
    for _ in range(2):  # the first time, libraries may take memory for streams that are new
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


def agree(world: World, step: Step, losses: list[torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(1)
    found = [step(*world.batch(index)).detach().cpu() for index in range(STEPS)]
    assert [torch.equal(a, b) for a, b in zip(found, losses, strict=True)] == [True] * STEPS
    assert differing_tensors(world.state(), state) == []


def test_requests_are_served_where_they_were_planned(device: torch.device) -> None:
    arena = CudaDriver(device).open_arena(4 * MIB, MIB)
    table = ScopeTable(arena, [[(MIB, 512 * KIB), (2 * MIB, 2 * MIB)]])
    table.begin(0)
    one, other = (torch.empty(count, dtype=torch.uint8, device=device) for count in (MIB, 2 * MIB))
    table.end()
    assert [t.data_ptr() - arena.address for t in (one, other)] == [512 * KIB, 2 * MIB]
    assert arena.counters().served == 2
    one.fill_(3)
    assert int(arena.view(512 * KIB, MIB).max()) == 3
    view = arena.view(0, 512)
    arena.close()
    view.fill_(1)  # it keeps the memory
    assert int(view.sum()) == 512


def test_record_stream_holds_the_memory_of_a_small_result(device: torch.device) -> None:
    """PyTorch's allocator made it, with a deleter that is not its own."""
    arena = CudaDriver(device).open_arena(4 * MIB, MIB)
    table = ScopeTable(arena, [[]])
    other = torch.cuda.Stream(device)
    table.begin(0)
    small = torch.empty(64, device=device)
    table.end()
    address = small.data_ptr()
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(1e9))
    small.record_stream(other)
    del small
    pending = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["address"] == address]
    other.synchronize()
    arena.close()
    assert [block["state"] for block in pending] == ["active_pending_free"]


def test_host_memory_is_pinned_to_the_page(device: torch.device) -> None:
    home = CudaBackend(device).home(64 * MIB)
    first, second = home.reserve(3 * 4096), home.reserve(5 * MIB)
    assert home.bytes == 3 * 4096 + 5 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert home.face(first, 4096).is_pinned()
        assert home.face(second, 5 * MIB).is_pinned()
    assert home.edges == [3 * 4096, 3 * 4096 + 5 * MIB]
    home.close()


@pytest.mark.parametrize("where", ["model on the CPU", "model on the device"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list(WORLDS))
def test_the_bits_of_plain_pytorch(name: str, policy: str, where: str, device: torch.device) -> None:
    make = WORLDS[name]
    losses, state = train_eagerly(make(device), STEPS)
    least = smallest(make, device)
    room = {"offload-all": least, "window": least + 2 * MIB, "auto": least + 4 * MIB}.get(policy, 64 * MIB)
    world = make(CPU if where == "model on the CPU" else device)
    with compiled(world, room + beside(device) + 8 * MIB, policy, CudaDriver(device)) as step:
        agree(world, step, losses, state)
        moved = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut)]
        assert policy != "offload-all" or len(moved) > 10
    assert differing_tensors(world.state(), state) == []


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["keep-all", "offload-all"])
@pytest.mark.parametrize("name", list(WORLDS))
def test_ops_that_native_code_calls(
    name: str, policy: str, graphs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    plain = Replay.run

    def counting(self: Replay, first: int, *args: Any, **kwargs: Any) -> int:
        reached = plain(self, first, *args, **kwargs)
        counts.append(reached - first)
        return reached

    monkeypatch.setattr(Replay, "run", counting)
    made: list[bool] = []
    graph_of = CudaDriver.capture_graph

    def noting(self: CudaDriver, call: Callable[[], object]) -> Callable[[], object] | None:
        found = graph_of(self, call)
        made.append(found is not None)
        return found

    monkeypatch.setattr(CudaDriver, "capture_graph", noting)
    make, steps = WORLDS[name], 12  # of which the first six are measured, and one is taken down
    losses, state = train_eagerly(make(device), steps)
    room = smallest(make, device) if policy == "offload-all" else 64 * MIB
    world = make(device)
    replay = "graphs" if graphs else True
    driver = CudaDriver(device)
    with compiled(world, room + beside(device) + 8 * MIB, policy, driver, replay=replay) as step:
        torch.manual_seed(1)
        found = [step(*world.batch(index)).detach().cpu() for index in range(steps)]
        # However many graphs there are, they share one pool of memory.
        assert len({graph.pool() for graph in driver._graphs}) == bool(made)
        assert [torch.equal(a, b) for a, b in zip(found, losses, strict=True)] == [True] * steps
        assert differing_tensors(world.state(), state) == []
        assert max(counts) > 10
        assert all(made)
        # Where all leaves, it is for the plan to say whether enough ops follow each other.
        assert bool(made) == graphs or policy == "offload-all"
        assert graphs or not made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slow", [{Stream.COMPUTE}, {Stream.COPY_OUT}, {Stream.COPY_IN}, set(Stream)])
def test_streams_that_dawdle(slow: set[Stream], seed: int, device: torch.device) -> None:
    losses, state = train_eagerly(dense(device), STEPS)
    world = dense(CPU)
    budget = smallest(dense, device) + beside(device) + 2 * MIB
    with compiled(world, budget, "offload-all", Delayed(device, seed, frozenset(slow))) as step:
        agree(world, step, losses, state)


@pytest.mark.parametrize("slow", [set(), {Stream.WRITE, Stream.READ}, {Stream.DISK_OUT, Stream.DISK_IN}, set(Stream)])
def test_a_disk_behind_host_memory(slow: set[Stream], device: torch.device, tmp_path: Path) -> None:
    losses, state = train_eagerly(dense(device), STEPS)
    world = dense(CPU)
    budget = smallest(dense, device) + beside(device) + 2 * MIB
    driver = Delayed(device, 0, frozenset(slow))
    with compiled(world, budget, "offload-all", driver, 600 * KIB, [DiskHome(tmp_path)]) as step:
        agree(world, step, losses, state)
        moved = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut) and i.home == 1]
        assert len(moved) > 10
    assert differing_tensors(world.state(), state) == []


def test_a_transfer_that_fails_is_told(device: torch.device, tmp_path: Path) -> None:
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
def capped(device: torch.device, budget: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_hard_limit_at_the_budget_is_never_met(device: torch.device) -> None:
    losses, state = train_eagerly(convolutional(device), STEPS)
    gc.collect()
    torch.cuda.empty_cache()
    least = smallest(convolutional, device)
    world = convolutional(CPU)
    budget = least + beside(device) + 4 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with capped(device, budget):
        step = compiled(world, budget, "auto", CudaDriver(device))
        step._session.planner.links = (Home("host", None, 2e10, 2e10),)  # its measurement wants buffers of its own
        with step:
            agree(world, step, losses, state)
            assert torch.cuda.max_memory_reserved(device) <= budget
            assert step.stats.off_plan == 0


def test_the_host_does_not_wait_within_a_step(device: torch.device) -> None:
    world = dense(device, "sgd")
    with compiled(world, GIB, "auto", CudaDriver(device)) as step:
        for index in range(8):  # by then no step is measured any more
            step(*world.batch(index))
        batch = world.batch(9)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_files_are_read_and_written_by_threads_of_their_own(device: torch.device, tmp_path: Path) -> None:
    driver, home = CudaDriver(device), DiskHome(tmp_path)
    home.ensure(4 * MIB)
    memory = driver.allocate_staging(4 * MIB)
    if driver._lanes is None or len(driver._lanes.by_stream) < 2:
        pytest.skip("streams of this device do not wait for threads")
    there, back = memory[: 2 * MIB], memory[2 * MIB :]
    first, second = driver.create_mark(), driver.create_mark()
    with driver.step(None):
        for number in range(1, 40):
            there.fill_(number)
            back.zero_()
            driver.transfer(Stream.WRITE, -1, home, 0, there)
            driver.record(Stream.WRITE, first)
            driver.wait(Stream.READ, first)
            driver.transfer(Stream.READ, -1, home, 0, back)
            driver.record(Stream.READ, second)
            driver.await_mark(second)  # the bytes are here before the mark is reached
            assert torch.equal(there, back)
        driver.synchronize()
    home.close()


def sloped(device: torch.device) -> World:
    """A step whose loss has a slope in it: autograd makes nodes while it goes back."""
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


def test_ops_of_the_way_back_belong_to_the_modules_that_they_belong_to_on_the_cpu(device: torch.device) -> None:
    found = []
    for where in (CPU, device):
        world = sloped(where)
        captured = capture_step(world.step, [world.model], [world.optimizer], world.batch(0), {}, where)
        ops = captured.graph.ops
        found.append([(op.name, op.module, op.source) for op in ops if not op.name.startswith("optimizer")])
    assert found[0] == found[1]
