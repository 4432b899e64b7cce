"""Tests of how a loop ends: by ``outofcore.stop()``, or by itself when its handle is lost."""

from __future__ import annotations

import gc
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from interrupting import interrupt_everywhere
from torch import Tensor, nn

import outofcore
from outofcore._torch_internals import BACKWARD_ENTRY_POINTS, has_global_optimizer_hooks
from outofcore.capture import capture_step
from outofcore.follow import loop, space
from outofcore.follow.native import is_any_loop_running
from outofcore.follow.recipes import Recipes
from outofcore.follow.sources import Sources

WIDTH = 256
BUDGET = "1MiB"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def train_step(model: nn.Module, between: Callable[[], object] = lambda: None) -> float:
    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            between()
            return gradient * 1

    layers = list(model.children())
    x = torch.ones(64, WIDTH)
    for number, layer in enumerate(layers):
        x = layer(x)
        if number == len(layers) // 2:
            x = Between.apply(x)
    loss = x.square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
            p.grad = None
    return loss.item()


def unwatch_addresses() -> None:
    """Take an address while no tensor is in memory of a loop, which removes the address hooks."""
    gc.collect()
    torch.empty(1).data_ptr()


@pytest.fixture(autouse=True)
def check_ended() -> Iterator[None]:
    unwatch_addresses()
    before = torch._ops._compute_keyset, torch.autograd._engine_run_backward, torch.Tensor.numpy
    yield
    assert not is_any_loop_running()
    assert not outofcore.stop()
    unwatch_addresses()
    assert (torch._ops._compute_keyset, torch.autograd._engine_run_backward, torch.Tensor.numpy) == before
    assert not torch._C._dispatch_tls_local_include_set().has(torch._C._parse_dispatch_key("Fake"))


def assert_trained(model: nn.Module, losses: list[float]) -> None:
    """Check that the model has the bits of plain PyTorch, now and after one more step."""
    theirs = make_model()
    expected = [train_step(theirs) for _ in losses]
    assert losses == expected
    assert train_step(model) == train_step(theirs)
    for ours, plain in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, plain)


def test_stop_ends_the_loop_and_returns_whether_one_ran() -> None:
    model = make_model()
    run = outofcore.budget(BUDGET, model).start()
    losses = [train_step(model)]
    assert outofcore.stop()
    assert not outofcore.stop()
    assert run.stats.evictions > 0
    assert "stopped" in repr(run)
    run.stop()
    losses.append(train_step(model))
    assert_trained(model, losses)


def test_lost_loop_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    run: Any = outofcore.budget(BUDGET, model).start()
    losses = [train_step(model)]
    with caplog.at_level(logging.WARNING, "outofcore"):
        del run  # the last reference
    assert not is_any_loop_running()
    (record,) = caplog.records
    assert f"{__file__}:" in record.getMessage()
    losses.append(train_step(model))
    assert_trained(model, losses)


def test_loop_in_a_reference_cycle_ends_when_another_one_starts() -> None:
    model = make_model()
    cycle: list[Any] = [outofcore.budget(BUDGET, model).start()]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert is_any_loop_running()
        with outofcore.budget(BUDGET, model):
            losses = [train_step(model)]
    finally:
        gc.enable()
    assert_trained(model, losses)
    assert not has_global_optimizer_hooks()
    assert not model._forward_hooks


def test_second_loop_is_refused_with_the_line_of_the_first() -> None:
    run = outofcore.budget(BUDGET).start()
    line = sys._getframe().f_lineno - 1
    location = rf"{__file__}:{line}.*outofcore\.stop\(\)"
    with pytest.raises(outofcore.StateError, match="running already at " + location):
        outofcore.budget(BUDGET).start()
    with pytest.raises(outofcore.StateError, match=rf"running already; stop\(\) it first.*{__file__}:{line}"):
        run.start()
    with pytest.raises(outofcore.StateError, match=location), outofcore.budget(BUDGET):
        pass
    assert run.stats.ops == 0
    assert outofcore.stop()


def test_loop_ended_during_capture_restores_the_engine() -> None:
    model = make_model()
    before = [getattr(owner, name) for owner, name in BACKWARD_ENTRY_POINTS]
    run = outofcore.budget(BUDGET).start()

    def step(x: Tensor) -> None:
        run.stop()
        model(x).sum().backward()

    capture_step(step, [model], [], (torch.ones(2, WIDTH),), {})
    assert [getattr(owner, name) for owner, name in BACKWARD_ENTRY_POINTS] == before


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("in_thread", [False, True])
def test_loop_ends_in_the_middle_of_backward(in_thread: bool, recomputes: bool) -> None:
    model = make_model()
    run = outofcore.budget(BUDGET, model).start()
    if recomputes:
        assert run._space is not None
        Recipes(run._space).recompute_all()
    losses = [train_step(model)]

    def end() -> None:
        if not in_thread:
            assert outofcore.stop()
            return
        thread = threading.Thread(target=outofcore.stop)
        thread.start()
        thread.join()
        assert not is_any_loop_running()

    losses.append(train_step(model, end))
    losses.append(train_step(model))
    assert_trained(model, losses)


def test_loop_ends_after_the_running_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread ends the loop while an op runs with pinned operands."""
    model, asked = make_model(), threading.Event()
    library = torch.library.Library("outofcore_test_ends", "DEF")
    library.define("wait(Tensor x) -> Tensor")

    def wait(x: Tensor) -> Tensor:
        assert is_any_loop_running()
        thread = threading.Thread(target=lambda: (outofcore.stop(), asked.set()))
        thread.start()
        assert asked.wait(60)
        thread.join()
        running.append(is_any_loop_running())
        return x + 1

    running: list[bool] = []
    library.impl("wait", wait, "CPU")
    # Let native code treat the kernel as one op, not as Python code that runs other ops.
    monkeypatch.setattr("outofcore.follow.native.has_python_kernel", lambda name, overload: False)
    run = outofcore.budget(BUDGET, model).start()
    losses = [train_step(model)]
    x = torch.ones(64, WIDTH)
    y = torch.ops.outofcore_test_ends.wait(x)
    assert torch.equal(y, x + 1)
    assert running == [True]  # while the op ran
    assert not is_any_loop_running()
    assert "stopped" in repr(run)
    losses.append(train_step(model))
    assert_trained(model, losses)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("call", [0, 5])
def test_exception_in_a_native_callback_is_raised_or_printed(
    raised: type[BaseException], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised in the loop; other exceptions are printed, and the loop continues."""
    find, calls = Sources.of_backward, itertools.count()

    def fails_once(sources: Sources) -> str:
        if next(calls) == call:
            raise raised
        return find(sources)

    monkeypatch.setattr(Sources, "of_backward", fails_once)
    model = make_model()
    with outofcore.budget(BUDGET, model):
        if raised is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                train_step(model)
        losses = [train_step(model), train_step(model)]
    assert next(calls) > call + 1
    assert_trained(model, losses)


_METHODS = {"start", "_open_space", "pause", "resume", "stop", "end", "close"}


def _starts_or_ends(code: CodeType) -> bool:
    return code.co_filename in (loop.__file__, space.__file__) and code.co_name in _METHODS


def test_interrupted_start_or_end_leaves_no_loop_and_no_wrong_value() -> None:
    model = make_model()
    run = outofcore.budget(BUDGET, model)

    def start_and_stop() -> None:
        run.start()
        next(model.parameters()).sum()
        run.stop()

    def check() -> None:
        nonlocal model, run
        run.stop()
        assert not is_any_loop_running()
        assert run.stats.ops <= 1
        with run:
            losses = [train_step(model)]
        assert_trained(model, losses)
        model = make_model()
        run = outofcore.budget(BUDGET, model)

    assert interrupt_everywhere(start_and_stop, check, _starts_or_ends) == _METHODS - {"pause", "resume"}


def test_paused_loop_continues_after_interrupts() -> None:
    model = make_model()
    run = outofcore.budget(BUDGET, model).start()
    run.pause()

    def resume_and_pause() -> None:
        run.resume()
        run.pause()

    def check() -> None:
        run.resume()
        before = run.stats.ops
        next(model.parameters()).sum()
        assert run.stats.ops > before
        run.pause()
        assert not is_any_loop_running()

    assert interrupt_everywhere(resume_and_pause, check, _starts_or_ends) == {"pause", "resume", "_open_space"}
    run.stop()
    assert_trained(model, [])


def test_memory_of_a_lost_loop_is_freed_with_its_tensors() -> None:
    def resident() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024

    x = torch.ones(1 << 20)
    x += 1  # allocates the memory of a first use
    before = resident()
    for _ in range(3):
        run: Any = outofcore.budget("64MiB", home="host").start()
        tensors = [torch.ones(1 << 22) * 2 for _ in range(3)]  # 48 MiB
        del run
        gc.collect()
        assert not is_any_loop_running()
        assert all(t.sum() == 2 << 22 for t in tensors)
        del tensors
    assert resident() - before < 16 << 20


ENDLESS = """
import torch, outofcore
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loop = outofcore.budget("4MiB", model).start()
model(torch.ones(64, 512)).sum().backward()
optimizer.step()
print(loop.stats.steps)
"""


def test_process_ends_silently_when_its_loop_was_never_stopped() -> None:
    process = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=120, check=False)
    assert (process.stdout, process.stderr, process.returncode) == ("1\n", "", 0)
