"""Tests of ops fused by Inductor: the same bits at every budget, close to plain PyTorch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fusible import MODELS, build_case, compile_case, train_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay import Replay

import outofcore
from outofcore import _torch_internals as internals
from outofcore.analysis.windows import TensorWindow, derive_window
from outofcore.capture.captured import Value
from outofcore.capture.step import capture_step
from outofcore.compiling import COMPILERS
from outofcore.errors import InputError
from outofcore.program import Run
from outofcore.transforms import kernels
from outofcore.transforms.fusing import fuse_ops
from outofcore.transforms.kernels import Kernel, Kernels, derive_view

pytestmark = pytest.mark.usefixtures("one_thread")
IN_CORE = "256MiB"


@pytest.fixture(autouse=True)
def _share_kernel_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run child processes on one thread, too, so that they reuse the kernels compiled here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def smallest_budget_of(name: str) -> int:
    model, optimizer, step, batches = build_case(name)
    return outofcore.smallest_budget(step, model, optimizer, inputs=batches[0], kernels="inductor")


def count_fused(step: Any) -> int:
    return sum(isinstance(call.func, Kernel) for call in step.captured.calls)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_equal_at_every_budget_and_close_to_eager(name: str) -> None:
    losses, state, step = train_case(name, IN_CORE)
    assert count_fused(step) > 1
    assert step.planned.plan.policy == "keep-all"
    smallest = smallest_budget_of(name)
    in_core = step.planned.program.arena_bytes
    assert smallest < in_core
    # The search takes long even for tiny steps: run it for two models only.
    half_policy = "auto" if name in ("convolutional", "dropping") else "offload-all"
    for budget, policy in ((max(in_core // 2, smallest), half_policy), (smallest, "offload-all")):
        budget_losses, budget_state, step = train_case(name, budget, policy=policy)
        assert budget_losses == losses
        assert all(map(torch.equal, state, budget_state))
        assert step.planned.program.arena_bytes <= budget
    plain, plain_state, step = train_case(name, IN_CORE, kernels="eager")
    assert not count_fused(step)
    for actual, expected in zip(losses, plain, strict=True):
        assert float.fromhex(actual) == pytest.approx(float.fromhex(expected), rel=1e-5)
    for actual, expected in zip(state, plain_state, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_fused_ops_are_recomputed_with_the_same_bits() -> None:
    losses, _, plain = train_case("convolutional", IN_CORE)
    budget = plain.planned.program.arena_bytes * 3 // 4
    recomputed_losses, _, step = train_case("convolutional", budget, policy="sqrt-checkpoint")
    recomputed_ops = {i.op for i in step.planned.program.instructions if isinstance(i, Run) and i.again}
    assert any(isinstance(step.captured.calls[op].func, Kernel) for op in recomputed_ops)
    assert recomputed_losses == losses


def test_fused_ops_follow_the_plan_and_take_no_scratch_memory() -> None:
    step, batches, _ = compile_case("convolutional", IN_CORE)
    with step:
        for batch in batches:
            step(*batch)
        costs = [
            cost.workspace_bytes
            for call, cost in zip(step.captured.calls, step.costs.ops, strict=True)
            if isinstance(call.func, Kernel)
        ]
        assert costs
        assert max(costs) < 4096
        assert step.stats.off_plan == 0
        eager, _, plain = train_case("convolutional", IN_CORE, kernels="eager")
        assert step.planned.program.arena_bytes <= plain.planned.program.arena_bytes
        assert eager


def test_equal_ops_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    compile_one = kernels.compile_recipe

    def compile_and_record(recipe: kernels.Recipe, threads: int) -> Any:
        texts.append(recipe.text)
        return compile_one(recipe, threads)

    monkeypatch.setattr(kernels, "compile_recipe", compile_and_record)
    step, batches, _ = compile_case("convolutional", IN_CORE)
    progress: list[tuple[str, int, int]] = []
    step.on_progress = lambda *args: progress.append(args)
    with step:
        step(*batches[0])
        assert len(set(texts)) == len(texts)
        assert count_fused(step) > len(texts)  # equal blocks share kernels
        assert ("compile kernels", len(texts), len(texts)) in progress
        step(batches[0][0][:4], batches[0][1][:4])  # other shapes: other kernels
        assert len(set(texts)) == len(texts)


@pytest.mark.exhaustive
def test_another_process_computes_the_same_bits(tmp_path: Path) -> None:
    losses, _, _ = train_case("convolutional", IN_CORE)
    path = tmp_path / "losses.json"
    budget = str(smallest_budget_of("convolutional") * 3 // 2)
    script = Path(__file__).with_name("fusible.py")
    subprocess.run([sys.executable, str(script), "convolutional", budget, str(path)], check=True)
    assert json.loads(path.read_text(encoding="utf-8")) == losses


def test_step_runs_unfused_and_warns_without_a_compiler(tmp_path: Path) -> None:
    losses, _, _ = train_case("perceptron", IN_CORE, kernels="eager")
    path = tmp_path / "losses.json"
    script = Path(__file__).with_name("fusible.py")
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    command = [sys.executable, str(script), "perceptron", IN_CORE, str(path)]
    process = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert json.loads(path.read_text(encoding="utf-8")) == losses
    assert process.stderr.count("cannot compile kernels: no C++ compiler") == 1
    assert COMPILERS[1] in process.stderr  # what to install


def _raise_without_compiler() -> None:
    raise RuntimeError("Failed to find C compiler.\nand more")


@pytest.mark.parametrize(
    ("reason", "has_package", "supports_gpu", "start"),
    [
        ("Triton is not installed; install the package triton", False, False, None),
        ("Triton does not support this GPU; it needs compute capability 7.0", True, False, None),
        (
            "Triton does not start: RuntimeError: Failed to find C compiler.. It needs a C compiler",
            True,
            True,
            _raise_without_compiler,
        ),
    ],
)
def test_log_names_the_missing_requirement_of_triton(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
    has_package: bool,
    supports_gpu: bool,
    start: Any,
) -> None:
    replaced = {"has_triton_package": lambda: has_package, "has_triton": lambda: supports_gpu, "triton_backend": start}
    compiler = {**internals._compiler(), **replaced}
    monkeypatch.setattr(internals, "_compiler", lambda: compiler)
    value = Value(0, (64,), (1,), torch.float32)
    recipe = kernels.Recipe((), (value,), (0,), (), (0,), torch.device("cuda", 0), "a recipe")
    second = replace(recipe, text="another")
    with caplog.at_level(logging.WARNING, logger="outofcore"):
        assert Kernels().compile_all([recipe, second]) == {}
    assert caplog.text.count("cannot compile kernels: ") == 1
    assert f"cannot compile kernels: {reason}" in caplog.text


def test_op_refused_by_inductor_stays_unfused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(recipe: kernels.Recipe, threads: int) -> Any:
        raise RuntimeError("not today\nand more")

    monkeypatch.setattr(kernels, "compile_recipe", refuse)
    with caplog.at_level(logging.WARNING, logger="outofcore"):
        losses, _, step = train_case("perceptron", IN_CORE)
    assert losses == train_case("perceptron", IN_CORE, kernels="eager")[0]
    assert not count_fused(step)
    assert "is not fused because Inductor failed: RuntimeError: not today" in caplog.text


def test_checkpoint_resumes_with_the_same_bits(tmp_path: Path) -> None:
    losses, _, _ = train_case("perceptron", IN_CORE)
    step, batches, _ = compile_case("perceptron", IN_CORE)
    with step:
        assert step(*batches[0]).item().hex() == losses[0]
        step.save(tmp_path / "saved")
    step, batches, _ = compile_case("perceptron", smallest_budget_of("perceptron"), policy="offload-all")
    with step:
        step.load(tmp_path / "saved")
        assert [step(*batch).item().hex() for batch in batches[1:]] == losses[1:]


def test_estimate_for_another_device_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step, batches = build_case("perceptron")
    options = {"inputs": batches[0], "device": "h100", "policy": "offload-all"}
    plain = outofcore.estimate(step, model, optimizer, **options)
    monkeypatch.setattr(kernels, "compile_recipe", lambda *_: pytest.fail("something was compiled"))
    estimate = outofcore.estimate(step, model, optimizer, kernels="inductor", **options)
    assert estimate.compute_seconds < plain.compute_seconds


def test_invalid_kernel_options_are_refused() -> None:
    model, optimizer, step, _ = build_case("perceptron")
    with pytest.raises(InputError, match="there are no kernels 'triton'; choose 'eager' or 'inductor'"):
        outofcore.compile(step, model, optimizer, budget=IN_CORE, kernels="triton")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave 'policy' and 'kernels' out"):
        outofcore.compile(step, model, optimizer, budget=IN_CORE, kernels="inductor", dynamic=True)


Shape = tuple[int, ...]
SHAPES: list[Shape] = [(6, 4, 8), (6, 8, 4), (24, 8)]
# Functions of a tensor and another tensor of the same shape.
CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: (x * 1).add_(y, alpha=0.5),
    "mul_": lambda x, y: (x + 0).mul_(y),
    "relu_": lambda x, y: torch.relu_(x - 0.1),
    "tanh": lambda x, y: x.tanh(),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "softmax": lambda x, y: x.softmax(-1) + y,
    "centred": lambda x, y: x - x.mean(-1, keepdim=True),
    "transposed": lambda x, y: x.transpose(-1, -2).contiguous().transpose(-1, -2) * y,
    "halves": lambda x, y: torch.stack([half.sin() for half in x.chunk(2, dim=-1)]).flatten()[: x.numel()].view_as(x),
    "rows": lambda x, y: x * y.select(-1, 0).unsqueeze(-1),
    "filled": lambda x, y: x + torch.zeros_like(y).fill_(2.0),
    "copied": lambda x, y: torch.empty_like(x).copy_(y) + x,
    "flat": lambda x, y: (x.reshape(-1) * 2).view_as(x),
    "double": lambda x, y: (x.double() * 1.5).float(),
}


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 5)), min_size=4, max_size=8),
    st.booleans(),
)
def test_random_steps_are_close_to_eager(shape: Shape, changes: list[tuple[str, int]], backward: bool) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = [x * weight, y]
        for name, position in changes:
            tensors.append(CHANGES[name](tensors[-1], tensors[position % len(tensors)]))
        loss = tensors[-1].square().mean()
        if backward:
            loss.backward()
        return loss, tensors[len(tensors) // 2].detach().clone()

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.rand(shape))
    model = torch.nn.Module()
    model.weight = weight
    x, y = torch.randn(shape), torch.randn(shape)
    captured = capture_step(step, [model], [], (x, y), {})
    fused_step = fuse_ops(captured, Kernels(), min_bytes=1)
    assert any(isinstance(call.func, Kernel) for call in fused_step.calls)
    results = Replay(fused_step)(x, y)
    gradient = None if weight.grad is None else weight.grad.clone()
    weight.grad = None
    expected = step(x, y)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
    if backward:
        assert gradient is not None
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))), st.permutations(range(len(shape))))
    ),
    st.integers(0, 2),
)
def test_view_is_derived_from_another_view_by_strides(
    layout: tuple[list[int], list[int], list[int]], repeated: int
) -> None:
    shape, inner, outer = layout
    source = torch.arange(torch.Size(shape).numel()).view(shape).permute(inner)
    expected = source.permute(outer).narrow(0, source.shape[outer[0]] - 1, 1)
    expected = expected.unsqueeze(-1).expand(*expected.shape, repeated + 1)
    source_window, target_window = (
        TensorWindow(tuple(t.shape), t.stride(), int(t.storage_offset())) for t in (source, expected)
    )
    changes = derive_window(source_window, target_window)
    assert changes is not None
    assert torch.equal(derive_view(source, changes), expected)
