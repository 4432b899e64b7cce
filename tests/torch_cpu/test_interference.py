"""Tests of signals, threads and processes that interfere with a step."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import some_of
from failing_model import (
    Sides,
    act_before_op,
    assert_same,
    assert_training_continues,
    batch,
    build_sides,
    contents,
    smallest_budget,
    two_homes,
)
from torch import nn

import outofcore
from outofcore.errors import ArenaError, StateError
from outofcore.execution.interrupts import DeferredSignals
from outofcore.planning import plan_step
from outofcore.program import CopyIn


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal: background processes and their children ignore it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture(scope="module")
def smallest() -> int:
    return smallest_budget()


@pytest.fixture(params=["offload-all", "auto:polish_ops=0"])
def plain_and_compiled(request: pytest.FixtureRequest, smallest: int, tmp_path: Path) -> Iterator[tuple[Sides, Any]]:
    with two_homes(request.param, smallest, tmp_path) as pair:
        yield pair


def test_signals_wait_for_the_end_of_a_deferred_block() -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals("the test"):
        signal.raise_signal(signal.SIGINT)
        events.append("to the end")
    assert events == ["to the end"]
    with pytest.raises(KeyboardInterrupt), DeferredSignals("the test"):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        events.append("never")
    assert events == ["to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), DeferredSignals("the test", stops=3):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        events.append("to the end")
    assert events == ["to the end"] * 2
    received: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with DeferredSignals("the test"):
            signal.raise_signal(signal.SIGTERM)
            assert not received
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)
    thread = threading.Thread(target=lambda: DeferredSignals("nothing").__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_step_finishes_or_undoes_the_step(
    plain_and_compiled: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = plain_and_compiled
    step = ours[2]
    before = contents(ours[0], ours[1])
    sent, notes = [], threading.Semaphore(0)
    note = DeferredSignals._defer_or_handle

    def note_and_release(self: DeferredSignals, *args: Any) -> None:
        notes.release()
        note(self, *args)

    def interrupt() -> None:
        sent.append(1)
        for _ in range(times):  # one at a time: two pending signals merge into one
            os.kill(os.getpid(), signal.SIGINT)
            assert notes.acquire(timeout=60)

    with monkeypatch.context() as patch, act_before_op(patch, 1, interrupt):
        patch.setattr(DeferredSignals, "_defer_or_handle", note_and_release)
        torch.manual_seed(9)
        with pytest.raises(KeyboardInterrupt) as caught:
            step(batch(9))
    assert sent
    if times == 1:
        torch.manual_seed(9)
        plain[2](batch(9))
        assert_same(contents(ours[0], ours[1]), contents(plain[0], plain[1]))
        assert_training_continues(plain, ours)
    elif any("as they were before" in note for note in getattr(caught.value, "__notes__", ())):
        assert_same(contents(ours[0], ours[1]), before)
        assert_training_continues(plain, ours)
    else:
        with pytest.raises(StateError, match="KeyboardInterrupt"):
            step(batch(9))


KILLED = """
import os, signal, sys
import torch
sys.path.insert(0, sys.argv[1])
import failing_model as here
import outofcore
import pytest
model, optimizer, step = here.build_sides()
ours = outofcore.compile(
    step, model, optimizer, budget=int(sys.argv[3]), home=sys.argv[2], host_budget="300KiB", policy="offload-all"
)
ours(here.batch(0))
def kill():
    print("spilling", flush=True)
    os.kill(os.getpid(), int(sys.argv[4]))
with here.act_before_op(pytest.MonkeyPatch(), 3, kill):
    ours(here.batch(1))
print("survived", flush=True)
"""


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]))
def test_process_killed_in_a_step_leaves_no_files(number: signal.Signals, smallest: int, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), str(smallest), str(int(number))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == -number, process.stderr
    assert process.stdout == "spilling\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", some_of([1, 2], [1]))
def test_ctrl_c_at_random_moments_leaves_the_state_in_the_note(seed: int, tmp_path: Path) -> None:
    """More moments: ``python tests/torch_cpu/interrupted.py --seed 3 --rounds 100``."""
    script = Path(__file__).with_name("interrupted.py")
    command = [sys.executable, str(script), "--seed", str(seed), "--rounds", "12", "--cache", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    rounds = [json.loads(line) for line in process.stdout.splitlines()][1:]
    assert len(rounds) == 12
    assert any("step has been made" in r["told"] for r in rounds)


def test_interrupt_chains_the_preceding_error() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, DeferredSignals("the test"):
        signal.raise_signal(signal.SIGINT)
        raise ArenaError("off the plan")
    assert isinstance(caught.value.__context__, ArenaError)


def _use_step_in_child(step: Any, model: nn.Module, pipe: Any) -> None:
    torch.set_num_threads(1)  # as data loader workers do: a fork has no OpenMP threads
    results: dict[str, str] = {"sum": repr(float(model[1].weight.double().sum()))}
    for name, act in (("call", lambda: step(batch(0))), ("close", step.close)):
        try:
            act()
            results[name] = "done"
        except StateError as error:
            results[name] = str(error)
    pipe.send(json.dumps(results))
    pipe.close()


def test_fork_cannot_run_the_step_and_leaves_it_intact(plain_and_compiled: Any) -> None:
    plain, ours = plain_and_compiled
    model, _, step = ours
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_use_step_in_child, args=(step, model, sender))
    child.start()
    try:
        assert receiver.poll(60)
        results = json.loads(receiver.recv())
        child.join()
    finally:
        child.kill()
    assert child.exitcode == 0
    assert results["sum"] == repr(float(model[1].weight.double().sum()))
    assert f"belongs to process {os.getpid()}" in results["call"]
    assert results["close"] == "done"
    assert_training_continues(plain, ours)


def test_data_loader_workers_leave_the_step_exact(plain_and_compiled: Any) -> None:
    plain, (model, optimizer, step) = plain_and_compiled
    data = torch.utils.data.TensorDataset(torch.cat([batch(k) for k in range(4)]))
    loader = torch.utils.data.DataLoader(data, batch_size=128, num_workers=1, multiprocessing_context="fork")
    torch.manual_seed(3)
    theirs = [plain[2](ids) for (ids,) in torch.utils.data.DataLoader(data, batch_size=128)]
    torch.manual_seed(3)
    assert [step(ids) for (ids,) in loader] == theirs
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


def test_two_steps_of_one_model_can_alternate(plain_and_compiled: Any, smallest: int, tmp_path: Path) -> None:
    plain, (model, optimizer, step) = plain_and_compiled

    def evaluate(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids)

    with outofcore.compile(evaluate, model, budget=smallest, home=tmp_path, policy="offload-all") as evaluation:
        for k in range(2, 5):
            torch.manual_seed(k)
            theirs = plain[2](batch(k))
            torch.manual_seed(k)
            assert torch.equal(step(batch(k)), theirs)
            torch.manual_seed(k)
            with torch.no_grad():
                expected = plain[0](batch(k))
            torch.manual_seed(k)
            assert torch.equal(evaluation(batch(k)), expected)
    assert_training_continues(plain, (model, optimizer, step))


@pytest.mark.parametrize("speed", [1e-3, 1.0, 1e3])
def test_plan_uses_the_disk_at_any_disk_speed(plain_and_compiled: Any, speed: float) -> None:
    step = plain_and_compiled[1][2]
    graph, costs, disk = step.captured.graph, step.costs, step.costs.homes[-1]
    scaled = replace(disk, bytes_per_s_in=disk.bytes_per_s_in * speed, bytes_per_s_out=disk.bytes_per_s_out * speed)
    costs = replace(costs, homes=(*costs.homes[:-1], scaled))
    program = plan_step(graph, costs, step.budget, step.policy).program
    assert any(
        isinstance(instruction, CopyIn) and instruction.home == len(costs.homes) - 1
        for instruction in program.instructions
    )


def test_model_memory_taken_by_another_step_is_detected(
    plain_and_compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (model, _, step) = plain_and_compiled

    def take() -> None:
        model[1].weight.data = model[1].weight.data.clone()  # as another step does when it takes the model

    with (
        act_before_op(monkeypatch, 1, take),
        pytest.raises(StateError, match=r"1\.weight got other memory while the step ran"),
    ):
        step(batch(9))
    with pytest.raises(StateError, match="part old and part new"):
        step(batch(9))


def test_concurrent_call_from_another_thread_is_refused(
    plain_and_compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = plain_and_compiled
    step = ours[2]
    messages: list[str] = []

    def call() -> None:
        try:
            step(batch(0))
        except StateError as error:
            messages.append(str(error))

    def call_in_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    torch.manual_seed(9)
    theirs = plain[2](batch(9))
    with act_before_op(monkeypatch, 1, call_in_thread):
        torch.manual_seed(9)
        assert torch.equal(step(batch(9)), theirs)
    assert "running already" in messages[0]
    assert_training_continues(plain, ours)


SECOND = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import failing_model as here
import outofcore
model, optimizer, step = here.build_sides()
with outofcore.compile(
    step, model, optimizer, budget=int(sys.argv[3]), home=sys.argv[2], host_budget="300KiB", policy="offload-all"
) as ours:
    torch.manual_seed(5)
    print([float(ours(here.batch(k))).hex() for k in range(3)])
"""


@pytest.mark.exhaustive
def test_two_processes_can_share_a_spill_folder(smallest: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SECOND, str(Path(__file__).parent), str(tmp_path), str(smallest)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    _, _, plain = build_sides()
    torch.manual_seed(5)
    expected = str([float(plain(batch(k))).hex() for k in range(3)])
    for (out, errors), process in zip(outputs, processes, strict=True):
        assert process.returncode == 0, errors
        assert out.strip() == expected
    assert list(tmp_path.iterdir()) == []
