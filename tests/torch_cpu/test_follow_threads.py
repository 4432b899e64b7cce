"""Tests of threads that run concurrently with an eager loop; ``thread_programs.py`` has the programs."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import is_exhaustive
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import outofcore
from outofcore._torch_internals import storage_address
from outofcore.follow.native import load_paging
from outofcore.follow.user_tensors import tensors_of

SCRIPT = Path(__file__).with_name("thread_programs.py")
TIGHT, STRESS = "--share 1.5..2", "--share 2..3 --stress"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Start a process that has imported PyTorch and runs thread programs."""
    command = [sys.executable, str(SCRIPT), "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_programs(server: subprocess.Popen[str], arguments: str, seed: int) -> None:
    """Run three programs from a seed on; exhaustive runs start programs for a minute."""
    assert server.stdin is not None
    assert server.stdout is not None
    amount = "--seconds 60" if is_exhaustive() else "--programs 3"
    server.stdin.write(f"{arguments} --seed {seed} {amount} --limit 30\n")
    server.stdin.flush()
    output: list[str] = []
    for line in server.stdout:
        if line.startswith("exit "):
            assert line == "exit 0\n", "".join(output)
            return
        output.append(line)
    pytest.fail(f"the process that runs programs ended: {''.join(output)}")


@pytest.mark.parametrize(
    ("roles", "options", "seed"),
    [
        ("loader", TIGHT, 5),
        ("saver", TIGHT, 5),
        ("checkpoint", TIGHT, 1),
        ("logger", TIGHT, 0),
        ("teacher", STRESS, 0),
        ("writer", TIGHT, 3),
        ("twin", TIGHT, 2),
        ("actor", STRESS, 1),
        ("collective", TIGHT, 0),
        ("functional", STRESS, 0),
        ("forker", TIGHT, 9),
    ],
)
def test_thread_gets_the_bits_of_plain_pytorch(
    server: subprocess.Popen[str], roles: str, options: str, seed: int
) -> None:
    """A thread loads, saves, logs, teaches, trains, forks or reduces with another process during the loop."""
    run_programs(server, f"--roles {roles} --contexts one {options}", seed)


@pytest.mark.parametrize("contexts", ["ends", "two"])
def test_context_ends_while_threads_work(server: subprocess.Popen[str], contexts: str) -> None:
    """Threads outlive a context; training goes on without one and, with ``two``, within a second."""
    run_programs(server, f"--roles actor twin loader --contexts {contexts} {TIGHT}", 0)


@pytest.mark.parametrize("launcher", ["futures", "pool"])
def test_thread_pool_can_be_older_than_the_context(server: subprocess.Popen[str], launcher: str) -> None:
    run_programs(server, f"--roles loader teacher --contexts one --launcher {launcher} {TIGHT}", 2)


class SlowFile(io.BytesIO):
    """A file that signals the start of a large write and waits for permission to end it."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        if len(data) > 100_000:
            self.began.set()
            assert self.may_end.wait(60)
        return super().write(data)


@pytest.mark.usefixtures("one_thread")
def test_address_request_waits_for_a_saving_thread() -> None:
    """A tensor does not move while a thread saves it; then it moves home and keeps that address."""
    file, arrays = SlowFile(), []
    with outofcore.budget("4MiB", home="host", policy=None):
        x = torch.arange(40000.0) + 0
        saving = threading.Thread(target=torch.save, args=(x, file))
        asking = threading.Thread(target=lambda: arrays.append(x.numpy()))
        saving.start()
        assert file.began.wait(60)
        asking.start()
        asking.join(0.3)
        waited = asking.is_alive()
        file.may_end.set()
        asking.join()
        saving.join()
        assert waited
        assert load_paging().follow_where(x.untyped_storage()._cdata) == 2  # at home
        assert x.equal(torch.arange(40000.0))
    assert torch.load(io.BytesIO(file.getvalue())).equal(x)
    assert np.array_equal(arrays[0], np.arange(40000))


@pytest.mark.usefixtures("one_thread")
def test_new_loop_does_not_move_a_tensor_during_its_save() -> None:
    """A thread saves a tensor of an earlier loop while a new loop would adopt it."""
    file, model = SlowFile(), nn.Module()
    with outofcore.budget("4MiB", home="host", policy=None):
        x = torch.arange(40000.0) + 0
    model.register_buffer("x", x)
    saving = threading.Thread(target=torch.save, args=(x, file))
    saving.start()
    assert file.began.wait(60)
    with outofcore.budget("4MiB", model, home="host", policy=None):
        torch.full((900_000,), 7.0)
        file.may_end.set()
        saving.join()
        assert x.equal(torch.arange(40000.0))
    assert torch.load(io.BytesIO(file.getvalue())).equal(torch.arange(40000.0))


class Waiting(torch.autograd.Function):
    """Doubles a tensor; the backward pass also calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        doubled = gradients[0] * 2
        ctx.call()
        return doubled, None


def wait_after_op(wait: Callable[[], None]) -> None:
    torch.ones(8) * 2
    wait()


def wait_in_backward(wait: Callable[[], None]) -> None:
    Waiting.apply(torch.ones(8, requires_grad=True), wait).sum().backward()


@torch.inference_mode()
def wait_in_inference_mode(wait: Callable[[], None]) -> None:
    wait_after_op(wait)


@pytest.mark.parametrize("sums_in_opener", [False, True])
@pytest.mark.parametrize("work", [wait_after_op, wait_in_backward, wait_in_inference_mode])
@pytest.mark.usefixtures("one_thread")
def test_tensor_does_not_move_while_another_thread_opens_a_loop(
    work: Callable[[Callable[[], None]], None], sums_in_opener: bool
) -> None:
    """An op of one thread reads a tensor of an ended loop while another thread opens the next loop with it."""
    has_run, first_ended, sums_now = threading.Event(), threading.Event(), threading.Event()
    first, second, sums = nn.Module(), nn.Module(), []
    x = torch.ones(40000)
    second.register_buffer("x", x)
    first.register_buffer("x", x)
    first.register_buffer("y", torch.ones(40000))  # keeps the addresses of the first loop valid

    def wait() -> None:
        has_run.set()
        assert first_ended.wait(60)

    def sum_slowly() -> None:
        sums_now.set()
        sums.append(x.expand(20000, -1).sum(0))

    def open_second() -> None:
        assert sums_now.wait(60)
        with outofcore.budget("4MiB", second, home="host", policy=None):
            pass

    in_thread, in_opener = (open_second, sum_slowly) if sums_in_opener else (sum_slowly, open_second)
    thread = threading.Thread(target=lambda: (work(wait), in_thread()))
    with outofcore.budget("4MiB", first, home="host", policy=None):
        thread.start()
        assert has_run.wait(60)
    first_ended.set()
    in_opener()
    thread.join()
    assert sums[0].equal(torch.full((40000,), 20000.0))


def make_model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(200, 200)
    model(torch.ones(200)).sum().backward()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.usefixtures("one_thread")
def test_optimizer_of_another_thread_is_not_adopted() -> None:
    """Its steps do not count as steps of the loop, and its parameters do not move."""
    (model, optimizer), (other_model, other_optimizer) = make_model_and_optimizer(), make_model_and_optimizer()
    with outofcore.budget("4MiB", model, home="host", policy=None) as run:
        optimizer.step()
        thread = threading.Thread(target=lambda: [other_optimizer.step() for _ in range(3)])
        thread.start()
        thread.join()
        assert run.stats.steps == 1
        assert run._space is not None
        names = {name for name, _ in run._read_log(run._space)[2].values()}
    assert {"weight", "gradient of weight", "momentum_buffer of weight"} <= names
    assert not any("parameter" in name for name in names)
    assert [len(list(tensors_of(module))) for module in (model, other_model)] == [4, 2]
    assert load_paging().follow_where(storage_address(other_model.get_parameter("weight").untyped_storage())) == 0


@pytest.mark.usefixtures("one_thread")
def test_new_loop_does_not_move_gradients_of_another_training_thread() -> None:
    """The thread has stepped its optimizer between two loops, and may step again at any time."""
    (model, optimizer), (other_model, other_optimizer) = make_model_and_optimizer(), make_model_and_optimizer()
    first_ended, stepped, may_end = (threading.Event() for _ in range(3))

    def step() -> None:
        assert first_ended.wait(60)
        other_optimizer.step()
        stepped.set()
        assert may_end.wait(60)

    thread = threading.Thread(target=step)
    with outofcore.budget("4MiB", model, home="host", policy=None):
        thread.start()
    first_ended.set()
    assert stepped.wait(60)
    optimizer.step()
    with outofcore.budget("4MiB", [model, other_model], home="host", policy=None):
        gradients = [module.get_parameter("weight").grad for module in (model, other_model)]
        addresses = [storage_address(gradient.untyped_storage()) for gradient in gradients if gradient is not None]
        places = [load_paging().follow_where(address) for address in addresses]
    may_end.set()
    thread.join()
    assert places == [2, 0]


@pytest.mark.usefixtures("one_thread")
def test_loop_ends_while_another_thread_steps_an_optimizer() -> None:
    began, may_end, errors = threading.Event(), threading.Event(), []
    (model, optimizer), (_, other_optimizer) = make_model_and_optimizer(), make_model_and_optimizer()

    def wait(stepped: torch.optim.Optimizer, *_: object) -> None:
        if stepped is other_optimizer:
            began.set()
            assert may_end.wait(60)

    def step() -> None:
        try:
            other_optimizer.step()
        except RuntimeError as error:
            errors.append(error)

    with outofcore.budget("4MiB", model, home="host", policy=None) as run:
        hooks = [register_optimizer_step_pre_hook(hook) for hook in (wait, lambda *_: None)]
        thread = threading.Thread(target=step)
        thread.start()
        assert began.wait(60)
        optimizer.step()
    may_end.set()
    thread.join()
    for hook in hooks:
        hook.remove()
    assert not errors
    assert run.stats.steps == 1
    with outofcore.budget("4MiB", model, home="host", policy=None) as run:
        optimizer.step()
        assert run.stats.steps == 1
