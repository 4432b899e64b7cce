"""Tests of a disk behind host memory, on the double: exact bits and necessary waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from double import FakeCuda, RaceError
from effort import is_exhaustive
from worlds import (
    CPU,
    STEPS,
    World,
    budget_of,
    compile_on_double,
    convolutional,
    dense,
    differing_tensors,
    train_eagerly,
)

from outofcore.errors import TransferError
from outofcore.execution.arena import ScopeTable
from outofcore.execution.binding import BoundCopy, BoundProgram
from outofcore.execution.cuda.engine import CudaEngine
from outofcore.execution.cuda.interface import Stream
from outofcore.execution.cuda.staging import reads_after_writes
from outofcore.graph import StepGraph
from outofcore.profiling import links
from outofcore.program import Block, CopyIn, CopyOut, Program
from outofcore.runtime.homes import DiskHome, HomeStore, HostHome
from outofcore.runtime.slots import SlotPiece
from outofcore.step import Step
from outofcore.units import KIB, MIB
from outofcore.validator import validate

# The model, the policy, the share of its in-core budget, and bytes of host memory, too few for the rest.
CASES = [
    (dense, "offload-all", 0.0, 600 * KIB),
    (convolutional, "offload-all", 0.0, 1000 * KIB),
    (convolutional, "window", 0.1, 600 * KIB),
]


def homes(near: int, folder: Path) -> list[HomeStore]:
    return [HostHome(near), DiskHome(folder)]


def to_and_from_disk(step: Step) -> list[CopyIn | CopyOut]:
    return [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut) and i.home == 1]


@pytest.mark.parametrize(("make", "policy", "share", "near"), CASES)
@pytest.mark.parametrize("rate", [1e10, 2e8])
def test_step_has_the_bits_of_plain_pytorch(
    make: Callable[[torch.device], World], policy: str, share: float, near: int, rate: float, tmp_path: Path
) -> None:
    losses, state = train_eagerly(make(CPU), STEPS)
    world, budget = make(CPU), budget_of(make, share)
    with compile_on_double(world, budget, policy, FakeCuda(bytes_per_s=rate), homes(near, tmp_path)) as step:
        torch.manual_seed(1)
        actual = [step(*world.batch(index)).clone() for index in range(STEPS)]
        assert {type(copy) for copy in to_and_from_disk(step)} == {CopyIn, CopyOut}
        validate(step.captured.graph, step.planned.program, budget, step.costs)
        assert differing_tensors(world.state(), state) == []
    assert [torch.equal(a, b) for a, b in zip(actual, losses, strict=True)] == [True] * STEPS
    assert differing_tensors(world.state(), state) == []


@pytest.mark.parametrize(("make", "policy", "share", "near"), CASES[:2])
def test_each_wait_within_a_step_is_necessary(
    make: Callable[[torch.device], World], policy: str, share: float, near: int, tmp_path: Path
) -> None:
    """Waits come from the program, from the engine for a file, and from staging buffers."""
    world, driver = make(CPU), FakeCuda()
    with compile_on_double(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        for index in range(2):
            step(*world.batch(index))
        runner = step._session.steps.runner
        assert runner is not None
        batch, before = list(world.batch(2)), driver.waits
        runner.run(step._session.engine, batch)
        count = driver.waits - before
        news = {n for n in range(count) if driver.advanced_clock[before + n]}
        state, unnoticed = world.state(), set[int]()
        # The first four waits are for the copies, and the last four for the ops: see the next test. Those between
        # repeat layer by layer, so every third or eleventh is enough.
        for place in range(4, count - 4, 3 if is_exhaustive() else 11):
            driver.drop = frozenset({driver.waits + place})
            try:
                runner.run(step._session.engine, batch)
            except RaceError:
                # A race is raised when the step is issued, before the step runs.
                assert differing_tensors(world.state(), state) == []
                continue
            unnoticed.add(place)
            state = world.state()
        # The unnoticed waits are implied by others.
        assert unnoticed & news == set()
        assert len(news) > 0.9 * count > 100
        driver.drop = frozenset()


def make_round_trip(driver: FakeCuda, folder: Path, home: int, *, out_first: bool) -> Callable[[], int]:
    """Return a step that copies a block out and in, or in and out, and counts its waits."""
    count, lane = 64 * KIB, 2 * home
    engine = CudaEngine(driver, homes(MIB, folder), MIB, 4)
    engine_homes = [engine._home, engine._disk]
    store = engine_homes[home]
    assert store is not None
    store.ensure(count)
    arena = driver.open_arena(count, 0)
    kinds = (CopyOut, CopyIn) if out_first else (CopyIn, CopyOut)
    program = Program(tuple(kind(0, 0, home=home) for kind in kinds), (Block(0, 0, count, 0, 0, True, 0),), count)
    queues: list[tuple[BoundCopy, ...]] = [(), (), (), ()]
    for index, kind in enumerate(kinds):
        queue = lane + (kind is CopyIn)
        waits = ((2 * lane + 2 - queue, 1),) if index else ()  # for the first copy; queues are numbered from 1
        queues[queue] = (BoundCopy(index, 0, home, 0, count, waits, 1, not index),)
    bound = BoundProgram(StepGraph((), (), ()), program, arena, (), tuple(queues))
    table, slots = ScopeTable(arena, []), {index: (SlotPiece(0, count),) for index in (0, 1)}

    def step() -> int:
        before = driver.waits
        engine.run(bound, table, slots, {})
        return driver.waits - before

    return step


# For each stream that waits or is awaited around a step: whether a step that copies out first needs that wait.
BEGIN = {Stream.COPY_OUT: True, Stream.COPY_IN: False, Stream.DISK_OUT: True, Stream.READ: False}
END = {Stream.COPY_OUT: False, Stream.COPY_IN: True, Stream.WRITE: False, Stream.DISK_IN: True}
AROUND = [("begin", stream, first) for stream, first in BEGIN.items()]
AROUND += [("end", stream, first) for stream, first in END.items()]


@pytest.mark.parametrize(("side", "stream", "out_first"), AROUND)
def test_each_wait_around_a_step_is_necessary(side: str, stream: Stream, out_first: bool, tmp_path: Path) -> None:
    """Without it, consecutive steps race."""
    home = 0 if stream in (Stream.COPY_OUT, Stream.COPY_IN) else 1
    sides = list(BEGIN if side == "begin" else END)[: 2 * home + 2]
    driver = FakeCuda(waits_on_host=False)
    step = make_round_trip(driver, tmp_path, home, out_first=out_first)
    count = step()
    step()
    place = sides.index(stream) if side == "begin" else count - len(sides) + sides.index(stream)
    # The end of this step, or the beginning of the next.
    driver.drop = frozenset({driver.waits + place + (count if side == "begin" else 0)})
    step()
    with pytest.raises(RaceError):
        step()


def test_transfer_failure_is_raised_in_the_same_step(tmp_path: Path) -> None:
    make, policy, share, near = CASES[1]
    world, driver = make(CPU), FakeCuda()
    with compile_on_double(world, budget_of(make, share), policy, driver, homes(near, tmp_path)) as step:
        step(*world.batch(0))
        driver.failing = True
        with pytest.raises(TransferError, match="no space left") as caught:
            step(*world.batch(1))
        assert any("part old and part new" in note for note in caught.value.__notes__)


def test_disk_link_is_measured_through_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_make_ops", lambda *_, **__: lambda: None)
    driver, home = FakeCuda(bytes_per_s=2e9), DiskHome(tmp_path)
    try:
        link = links.measure_link(home, driver=driver, buffer_bytes=32 * MIB, seconds=0.05)
    finally:
        home.close()
    # A transfer of the double's disk takes half to three times the time of a copy, drawn for each buffer.
    assert 0.5e9 < link.alone.out < 2e9
    assert 0.5e9 < link.alone.into < 2e9
    assert link.name == "disk"


def test_read_waits_for_the_last_write_of_its_pages() -> None:
    slots: dict[int, tuple[SlotPiece, ...]] = {
        0: (SlotPiece(0, 8192), SlotPiece(16384, 4096)),
        1: (SlotPiece(8192, 4096),),
        2: (SlotPiece(0, 4096),),
        3: (SlotPiece(16384, 4096),),
        4: (SlotPiece(8192, 4096),),
        5: (SlotPiece(40960, 4096),),
        6: (SlotPiece(4096, 8192),),
        7: (SlotPiece(8192, 4096),),
    }
    order = [(0, True), (1, True), (2, True), (3, False), (4, False), (5, False), (6, True), (7, False)]
    # 3 reads some pages of 0, 4 all pages of 1, 5 unwritten pages, 7 some pages of 6.
    assert reads_after_writes(order, slots) == {3: 0, 4: 1, 7: 6}
    # A wait for 1 implies one for 0.
    assert reads_after_writes([(0, True), (1, True), (4, False), (3, False)], slots) == {4: 1}
