"""Tests of the engine on the double: arenas, device failures, pinned inputs, and tapes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from double import FakeBackend, FakeCuda, FakeMark
from worlds import CPU, World, budget_of, compile_on_double, dense, differing_tensors, train_eagerly

from outofcore.analysis import LARGE_BYTES
from outofcore.capture import capture_step
from outofcore.errors import DeviceError, StateError
from outofcore.execution.arena import Arena
from outofcore.execution.binding import BoundRun
from outofcore.execution.cuda import engine
from outofcore.execution.cuda.interface import Stream
from outofcore.profiling.ops import profile_ops


@pytest.fixture
def _tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure only the first step."""
    monkeypatch.setattr(engine, "_MEASURED_STEPS", engine._MeasuredSteps(first=1, every=1 << 30))
    yield


@pytest.mark.usefixtures("_tapes")
def test_steps_from_tapes_have_the_bits_of_plain_pytorch() -> None:
    losses, state = train_eagerly(dense(CPU), 4)
    world, driver = dense(CPU), FakeCuda(seed=1)
    with compile_on_double(world, budget_of(dense, 0.0), "offload-all", driver) as step:
        torch.manual_seed(1)
        actual = [step(*world.batch(index)).clone() for index in range(4)]
        assert driver.tapes > 4
        assert differing_tensors(world.state(), state) == []
    assert [torch.equal(a, b) for a, b in zip(actual, losses, strict=True)] == [True] * 4


@dataclass
class Witness(FakeCuda):
    """A double that checks that the memory of one arena is released before the next is opened."""

    region: Callable[[], object] = lambda: None
    overlapping: int = 0
    opened: int = 0

    def open_arena(self, count: int, reserve: int) -> Arena:
        gc.collect()
        self.overlapping += self.region() is not None
        arena = super().open_arena(count, reserve)
        self.region = weakref.ref(arena.region._buffer)
        self.opened += 1
        return arena


def test_arena_is_released_before_the_next_is_opened() -> None:
    world, driver = dense(CPU), Witness()
    step = compile_on_double(world, budget_of(dense, 0.5), "auto", driver)
    for count in (128, 256, 64):
        step(*[part[:count] for part in world.batch(0)])
    assert driver.opened > 3
    assert driver.overlapping == 0
    step.close()
    gc.collect()
    assert driver.region() is None


@dataclass
class Failing(FakeCuda):
    """A device that fails at an op and at every later call."""

    at: int = -1  # the op that fails
    silent: bool = False  # whether it reports the failure only at the end of the step
    failed: bool = False

    def launch(self, run: BoundRun | None, call: Callable[[], object], stream: Stream = Stream.COMPUTE) -> None:
        if run is not None and run.op == self.at:
            self.failed = True
            if not self.silent:
                raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        super().launch(run, call, stream)

    def finish(self, *, host: bool) -> None:
        self._ask()
        super().finish(host=host)

    def synchronize(self) -> None:
        self._ask()
        super().synchronize()

    def _ask(self) -> None:
        if self.failed:
            raise DeviceError("the device failed: CUDA error: device-side assert triggered")


@pytest.mark.parametrize("silent", [False, True])
def test_device_failure_is_reported_and_later_calls_are_refused(silent: bool) -> None:
    world, driver = dense(CPU), Failing(silent=silent)
    step = compile_on_double(world, budget_of(dense, 0.3), "auto", driver)
    step(*world.batch(0))
    driver.at = 2
    with pytest.raises((torch.AcceleratorError, DeviceError), match="device-side assert") as caught:
        step(*world.batch(1))
    assert isinstance(caught.value, DeviceError) == silent
    notes = "\n".join(caught.value.__notes__)
    assert "CUDA_LAUNCH_BLOCKING=1" in notes
    assert "failed half way" in notes
    with pytest.raises(StateError, match="failed half way"):
        step(*world.batch(1))
    driver.failed = False
    step.close()


@dataclass
class Pinning(FakeCuda):
    awaited: int = 0

    def to_pinned(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def await_mark(self, mark: object) -> None:
        self.awaited += 1
        super().await_mark(mark)


def test_pinned_input_may_be_changed_after_the_call() -> None:
    losses, state = train_eagerly(dense(CPU), 3)
    world, driver = dense(CPU), Pinning()
    with compile_on_double(world, 1 << 30, "auto", driver) as step:
        torch.manual_seed(1)
        for index in range(3):
            batch = world.batch(index)
            loss = step(*batch)
            for part in batch:
                part.zero_()
            assert torch.equal(loss, losses[index])
        assert differing_tensors(world.state(), state) == []
    assert driver.awaited >= 3 * 2


RUNS: list[int] = []


@torch.library.custom_op("outofcore_test::tries", mutates_args=())
def tries(x: torch.Tensor) -> torch.Tensor:
    """Use more scratch memory in the first run, like a library that times its kernels."""
    RUNS.append(1)
    scratch = torch.empty(4 * x.numel() if len(RUNS) == 1 else x.numel())
    return x + scratch.fill_(1.0)[: x.numel()].view_as(x)


@tries.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(("warms_up", "max_units"), [(True, 2), (False, 5)])
def test_op_is_recorded_after_its_warm_up(warms_up: bool, max_units: int) -> None:
    model, backend = torch.nn.Linear(8, 256), FakeBackend(FakeCuda())
    backend.warms_up = warms_up

    def step(x: torch.Tensor) -> torch.Tensor:
        return tries(model(x).detach())

    captured = capture_step(step, [model], [], (torch.ones(256, 8),), {})
    place = next(op.id for op in captured.graph.ops if "tries" in op.name)
    RUNS.clear()
    profile = profile_ops(captured, measure_time=False, backend=backend)[place]
    unit_bytes = 256 * 256 * 4
    assert profile.cost.workspace_bytes <= max_units * unit_bytes
    assert warms_up or profile.cost.workspace_bytes >= 4 * unit_bytes


@dataclass
class Asked(FakeCuda):
    """A double that records the host's waits at the end of each step."""

    waited: list[bool] = field(default_factory=list)
    awaited_clock: tuple[int, ...] = (0,) * len(Stream)  # by stream, how much the host has waited for

    def finish(self, *, host: bool) -> None:
        self.waited.append(host)
        super().finish(host=host)

    def await_mark(self, mark: FakeMark) -> None:
        self.awaited_clock = tuple(map(max, self.awaited_clock, mark.clock))
        super().await_mark(mark)

    def pending(self, start: int, count: int) -> list[str]:
        return [
            access.label
            for stream, accesses in self._accesses.items()
            for access in accesses
            if access.start < start + count and start < access.end and access.number > self.awaited_clock[stream]
        ]

    def is_done(self, stream: Stream) -> bool:
        return self.awaited_clock[stream] >= self._clocks[stream][stream]


@pytest.mark.usefixtures("_tapes")
@pytest.mark.parametrize(("policy", "share", "at_home"), [("keep-all", 1.0, False), ("offload-all", 0.0, True)])
def test_host_waits_for_model_copies_only_if_state_is_at_home(policy: str, share: float, at_home: bool) -> None:
    states = [train_eagerly(dense(CPU), index + 1)[1] for index in range(4)]
    world, driver = dense(CPU), Asked()
    with compile_on_double(world, budget_of(dense, share), policy, driver) as step:
        torch.manual_seed(1)
        for index in range(4):
            step(*world.batch(index))
            # The user sees the state of this step.
            assert differing_tensors(world.state(), states[index]) == []
            if index and at_home:
                large = [p for p in world.model.parameters() if p.nbytes >= LARGE_BYTES]
                assert [driver.pending(p.data_ptr(), p.nbytes) for p in large] == [[]] * 4
        assert driver.waited == [True, False, False, False]  # the first step is measured
        assert any(driver.awaited_clock) == at_home


def _frozen(device: torch.device) -> World:
    world = dense(device)
    world.model[:-1].requires_grad_(False)
    return world


@pytest.mark.usefixtures("_tapes")
def test_host_does_not_wait_for_ops_after_the_last_model_copy() -> None:
    states = [train_eagerly(_frozen(CPU), index + 1)[1] for index in range(3)]
    world, driver = _frozen(CPU), Asked()
    # The smallest budget minus a layer: all parameters are at home.
    with compile_on_double(world, budget_of(_frozen, 0.0) - 200 * 1024, "offload-all", driver) as step:
        torch.manual_seed(1)
        for index in range(3):
            step(*world.batch(index))
            if index:
                large = [p for p in world.model.parameters() if p.nbytes >= LARGE_BYTES]
                assert [driver.pending(p.data_ptr(), p.nbytes) for p in large] == [[]] * 4
                assert any(driver.awaited_clock)
                assert not driver.is_done(Stream.COMPUTE)
            assert differing_tensors(world.state(), states[index]) == []
