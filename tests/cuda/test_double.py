"""Tests of steps on the double of a CUDA device: exact bits and necessary waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from double import POISON, FakeBackend, FakeCuda, RaceError
from effort import some_of
from worlds import (
    CPU,
    STEPS,
    WORLDS,
    World,
    budget_of,
    compile_on_double,
    convolutional,
    dense,
    differing_tensors,
    train_eagerly,
)

from outofcore.estimation.costing import LocalMachine, cost_step
from outofcore.execution.cuda.interface import Stream
from outofcore.known_steps import make_runner
from outofcore.options import UserStep
from outofcore.planning import QUICK
from outofcore.policies import Auto
from outofcore.profiling import links
from outofcore.program import CopyIn, CopyOut, Program, Queue, Wait
from outofcore.progress import ignore_progress
from outofcore.runtime.homes import HostHome
from outofcore.step import Step
from outofcore.units import MIB
from outofcore.validator import validate

POLICIES = [
    ("offload-all", 0.0),
    (Auto(QUICK), 0.3),
    ("auto:polish_ops=0", 0.0),
    ("sqrt-checkpoint", 0.6),
    ("keep-all", 1.2),
]


@pytest.mark.parametrize(
    ("name", "number"),
    some_of(
        [(name, number) for name in WORLDS for number in range(len(POLICIES))],
        lambda case: (case[0] == "dense") == (case[1] % 2 == 0),
    ),
)
def test_step_has_the_bits_of_plain_pytorch(name: str, number: int) -> None:
    make, (policy, share) = WORLDS[name], POLICIES[number]
    losses, state = train_eagerly(make(CPU), STEPS)
    world = make(CPU)
    budget = budget_of(make, share)
    driver = FakeCuda(seed=number, bytes_per_s=(1e10, 1e9, 2e8)[number % 3])
    with compile_on_double(world, budget, policy, driver) as step:
        torch.manual_seed(1)
        actual = [step(*world.batch(index)).clone() for index in range(STEPS)]
        moved = [i for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut)]
        assert len(moved) >= {"offload-all": 4, "auto:polish_ops=0": 1}.get(str(policy), 0)
        validate(step.captured.graph, step.planned.program, budget, step.costs)
        assert differing_tensors(world.state(), state) == []
    assert [torch.equal(a, b) for a, b in zip(actual, losses, strict=True)] == [True] * STEPS
    assert differing_tensors(world.state(), state) == []


def test_blocks_start_at_cuda_alignment() -> None:
    world = convolutional(CPU)
    with compile_on_double(world, budget_of(convolutional, 0.2), "auto:polish_ops=0", FakeCuda()) as step:
        step(*world.batch(0))
        program = step.planned.program
    assert {block.offset % 512 for block in program.blocks if block.bytes} == {0}
    assert any(0 < block.bytes < 65536 for block in program.blocks)


def without_one_wait(program: Program) -> Iterator[tuple[Program, int, Wait]]:
    for index, instruction in enumerate(program.instructions):
        for wait in instruction.waits:
            remaining = tuple(candidate for candidate in instruction.waits if candidate is not wait)
            changed = list(program.instructions)
            changed[index] = replace(instruction, waits=remaining)
            yield replace(program, instructions=tuple(changed)), index, wait


@pytest.mark.parametrize(
    ("make", "policy", "share"), [(dense, "offload-all", 0.0), (convolutional, "auto:polish_ops=0", 0.1)]
)
def test_each_wait_of_a_program_is_necessary(make: Callable[[torch.device], World], policy: str, share: float) -> None:
    world = make(CPU)
    driver = FakeCuda()
    with compile_on_double(world, budget_of(make, share), policy, driver) as step:
        for index in range(2):
            step(*world.batch(index))
        session = step._session
        runner, arena, shown = session.steps.runner, session.steps.arena, session.steps.last_step
        assert runner is not None
        assert arena is not None
        assert shown is not None
        before, queues, unnoticed = world.state(), [], []
        for program, index, wait in without_one_wait(shown.planned.program):
            runner.yield_arena()
            changed = replace(shown, planned=replace(shown.planned, program=program))
            runner = make_runner(changed, session.keeper, runner.states)
            runner.enter(arena)
            queues.append(wait.queue)
            try:
                runner.run(session.engine, list(world.batch(2)))
            except RaceError:
                continue
            unnoticed.append((index, wait))
        assert session.steps.active is not None
        session.steps.active.runner = runner
        assert unnoticed == []
        # How many there are depends on the plan, which uses every queue.
        assert set(queues) == set(Queue) - {Queue.COMMUNICATE}
        assert policy != "offload-all" or len(queues) > 10
        # A race is raised when the step is issued, before the step runs.
        assert differing_tensors(world.state(), before) == []


def train(world: World, step: Step, steps: int) -> None:
    for index in range(steps):
        step(*world.batch(index))


def test_streams_are_joined_around_a_step() -> None:
    """Without the waits around a step, consecutive steps race."""
    budget = budget_of(dense, 0.0)
    world = dense(CPU)
    driver = FakeCuda(waits_on_host=False)
    with compile_on_double(world, budget, "offload-all", driver) as step:
        train(world, step, 3)
        before = driver.waits
        train(world, step, 1)
        count = driver.waits - before
    raced: set[int] = set()
    # The first two waits of a step are for its copies, and the last two are for its ops.
    for place in (0, 1, count - 2, count - 1):
        world = dense(CPU)
        driver = FakeCuda(waits_on_host=False)
        with compile_on_double(world, budget, "offload-all", driver) as step:
            train(world, step, 1)
            driver.drop = frozenset(driver.waits + place + k * count for k in range(3))
            try:
                train(world, step, 3)
            except RaceError:
                raced.add(place)
    # The ops of this program wait for all copies in, and all copies out for ops, so two of the four are implied.
    assert raced == {1, count - 2}


def test_read_before_arrival_finds_poison() -> None:
    source, target, values = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), []
    driver = FakeCuda(bytes_per_s=1)
    with driver.step(None):
        driver.copy(Stream.COPY_IN, 0, target, source)
        driver.launch(None, lambda: values.append(int(target[0])))
        mark = driver.create_mark()
        driver.record(Stream.COPY_IN, mark)
        driver.wait(Stream.COMPUTE, mark)
        driver.launch(None, lambda: values.append(int(target[0])))
    driver.synchronize()
    assert values == [POISON, 0]


def test_write_during_a_copy_out_changes_the_copy() -> None:
    source, target = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    driver = FakeCuda(bytes_per_s=1)
    with driver.step(None):
        driver.copy(Stream.COPY_OUT, 0, target, source)
        driver.launch(None, lambda: source.fill_(7))
    driver.synchronize()
    assert int(target[0]) == 7


def test_link_is_measured_by_the_device_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_make_ops", lambda *_, **__: lambda: None)
    driver = FakeCuda(bytes_per_s=2e9, shared=2.0)
    home = HostHome(64 * MIB)
    try:
        link = links.measure_link(home, driver=driver, buffer_bytes=MIB, seconds=0.05)
    finally:
        home.close()
    assert link.alone.out == pytest.approx(2e9, rel=0.05)
    assert link.alone.into == pytest.approx(2e9, rel=0.05)
    assert link.computing.out == pytest.approx(2e9, rel=0.05)
    assert 0.9e9 < min(link.together.out, link.together.into) < 1.3e9


def test_resident_state_is_copied_only_in_the_first_step() -> None:
    world = dense(CPU, "sgd")
    with compile_on_double(world, 1 << 30, "auto", FakeCuda()) as step:
        for index in range(2):
            step(*world.batch(index))
        states = {s.id for s in step.captured.graph.storages if s.id in step.captured.graph.persistent}
        blocks, instructions = step.planned.program.blocks, step.planned.program.instructions
        moved = {blocks[i.block].storage for i in instructions if isinstance(i, CopyIn | CopyOut)}
    assert not moved & states


def test_costs_are_measured_on_the_target_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_make_ops", lambda *_, **__: lambda: None)
    world, driver = dense(CPU), FakeCuda(bytes_per_s=2e8)
    user = UserStep(world.step, [world.model], [world.optimizer])
    machine = LocalMachine(FakeBackend(driver), [HostHome(512 * MIB)])
    graph, costs, *_ = cost_step(user, world.batch(0), {}, machine, tell=ignore_progress)
    assert {storage.bytes % 512 for storage in graph.storages} == {0}
    assert [home.name for home in costs.homes] == ["host"]
    # By the clock of the device: this machine's own memory is far faster.
    assert costs.homes[0].bytes_per_s_out == pytest.approx(2e8, rel=0.05)
