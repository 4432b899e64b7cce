"""What the engine keeps, lets go of and says when a device fails; and steps whose copies are issued in one go."""

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
    """No step is measured but the first."""
    monkeypatch.setattr(engine, "_MEASURED_STEPS", engine._MeasuredSteps(first=1, every=1 << 30))
    yield


@pytest.mark.usefixtures("_tapes")
def test_steps_played_from_tapes_have_the_bits_of_plain_pytorch() -> None:
    losses, state = train_eagerly(dense(CPU), 4)
    world, driver = dense(CPU), FakeCuda(seed=1)
    with compile_on_double(world, budget_of(dense, 0.0), "offload-all", driver) as step:
        torch.manual_seed(1)
        found = [step(*world.batch(index)).clone() for index in range(4)]
        assert driver.tapes > 4
        assert differing_tensors(world.state(), state) == []
    assert [torch.equal(a, b) for a, b in zip(found, losses, strict=True)] == [True] * 4


@dataclass
class Witness(FakeCuda):
    """A double that sees whether the memory of one arena is gone when the next is opened, and opened arenas."""

    region: Callable[[], object] = lambda: None
    others: int = 0
    opened: int = 0

    def open_arena(self, count: int, reserve: int) -> Arena:
        gc.collect()
        self.others += self.region() is not None
        arena = super().open_arena(count, reserve)
        self.region = weakref.ref(arena.region._buffer)
        self.opened += 1
        return arena


def test_an_arena_is_gone_before_the_next_is_opened() -> None:
    world, driver = dense(CPU), Witness()
    step = compile_on_double(world, budget_of(dense, 0.5), "auto", driver)
    for count in (128, 256, 64):
        step(*[part[:count] for part in world.batch(0)])
    assert driver.opened > 3
    assert driver.others == 0
    step.close()
    gc.collect()
    assert driver.region() is None


@dataclass
class Failing(FakeCuda):
    """A device that fails at an op, and at all that it is asked to do from then on."""

    at: int = -1  # the op
    silent: bool = False  # whether it is told only at the end of the step
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
def test_a_device_that_fails_is_told_of_first_and_the_step_is_torn(silent: bool) -> None:
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
    """A double to which the caller's own memory is pinned."""

    awaited: int = 0

    def pinned(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def await_mark(self, mark: object) -> None:
        self.awaited += 1
        super().await_mark(mark)


def test_input_that_is_pinned_may_be_changed_as_soon_as_the_call_has_returned() -> None:
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
    """Takes scratch memory that its first run alone wants, as a library does that times its kernels."""
    RUNS.append(1)
    scratch = torch.empty(4 * x.numel() if len(RUNS) == 1 else x.numel())
    return x + scratch.fill_(1.0)[: x.numel()].view_as(x)


@tries.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(("warms_up", "most"), [(True, 2), (False, 5)])
def test_an_op_is_recorded_once_it_has_run_where_libraries_try_kernels(warms_up: bool, most: int) -> None:
    model, backend = torch.nn.Linear(8, 256), FakeBackend(FakeCuda())
    backend.warms_up = warms_up

    def step(x: torch.Tensor) -> torch.Tensor:
        return tries(model(x).detach())

    captured = capture_step(step, [model], [], (torch.ones(256, 8),), {})
    place = next(op.id for op in captured.graph.ops if "tries" in op.name)
    RUNS.clear()
    profile = profile_ops(captured, measure_time=False, backend=backend)[place]
    one = 256 * 256 * 4
    assert profile.cost.workspace_bytes <= most * one
    assert warms_up or profile.cost.workspace_bytes >= 4 * one


@dataclass
class Asked(FakeCuda):
    """A double that notes what the host waits for at the end of each step."""

    waited: list[bool] = field(default_factory=list)
    known: tuple[int, ...] = (0,) * len(Stream)  # by stream, how much the host has waited for

    def finish(self, *, host: bool) -> None:
        self.waited.append(host)
        super().finish(host=host)

    def await_mark(self, mark: FakeMark) -> None:
        self.known = tuple(map(max, self.known, mark.clock))
        super().await_mark(mark)

    def pending(self, start: int, count: int) -> list[str]:
        """Accesses to some bytes that the host has not waited for."""
        return [
            access.what
            for stream, accesses in self._accesses.items()
            for access in accesses
            if access.start < start + count and start < access.end and access.number > self.known[stream]
        ]

    def is_done(self, stream: Stream) -> bool:
        """Whether the host has waited for all of a stream."""
        return self.known[stream] >= self._clocks[stream][stream]


@pytest.mark.usefixtures("_tapes")
@pytest.mark.parametrize(("policy", "where", "at_home"), [("keep-all", 1.0, False), ("offload-all", 0.0, True)])
def test_the_host_waits_for_copies_of_the_model_where_it_is_in_its_memory_alone(
    policy: str, where: float, at_home: bool
) -> None:
    states = [train_eagerly(dense(CPU), index + 1)[1] for index in range(4)]
    world, driver = dense(CPU), Asked()
    with compile_on_double(world, budget_of(dense, where), policy, driver) as step:
        torch.manual_seed(1)
        for index in range(4):
            step(*world.batch(index))
            # What the user may look at now is that of this step.
            assert differing_tensors(world.state(), states[index]) == []
            if index and at_home:
                large = [p for p in world.model.parameters() if p.nbytes >= LARGE_BYTES]
                assert [driver.pending(p.data_ptr(), p.nbytes) for p in large] == [[]] * 4
        assert driver.waited == [True, False, False, False]  # the first is measured
        assert any(driver.known) == at_home


def _frozen(device: torch.device) -> World:
    """A model of which the last layer is trained: the others are only read."""
    world = dense(device)
    world.model[:-1].requires_grad_(False)
    return world


@pytest.mark.usefixtures("_tapes")
def test_the_host_does_not_wait_for_ops_behind_the_last_copy_of_the_model() -> None:
    states = [train_eagerly(_frozen(CPU), index + 1)[1] for index in range(3)]
    world, driver = _frozen(CPU), Asked()
    # The smallest one, less than a layer more: none of them stays on the device.
    with compile_on_double(world, budget_of(_frozen, 0.0) - 200 * 1024, "offload-all", driver) as step:
        torch.manual_seed(1)
        for index in range(3):
            step(*world.batch(index))
            if index:
                large = [p for p in world.model.parameters() if p.nbytes >= LARGE_BYTES]
                assert [driver.pending(p.data_ptr(), p.nbytes) for p in large] == [[]] * 4
                assert any(driver.known)
                assert not driver.is_done(Stream.COMPUTE)
            assert differing_tensors(world.state(), states[index]) == []
