"""Ops that become one, compiled by Inductor: the same bits at every budget, no bytes lost, nearly those of eager."""

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
from fusible import MODELS, compiled, trained, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay import Replay

import outofcore
from outofcore import _torch_internals as internals
from outofcore.analysis.windows import Window, derivation
from outofcore.capture.captured import Value
from outofcore.capture.step import capture_step
from outofcore.compiling import COMPILERS
from outofcore.errors import InputError
from outofcore.program import Run
from outofcore.transforms import kernels
from outofcore.transforms.fusing import fused
from outofcore.transforms.kernels import Kernel, Kernels, derived

pytestmark = pytest.mark.usefixtures("one_thread")
IN_CORE = "256MiB"


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that tests start run on as many threads, so that what is compiled here is found there."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def smallest(name: str) -> int:
    model, optimizer, step, batches = world(name)
    return outofcore.smallest_budget(step, model, optimizer, inputs=batches[0], kernels="inductor")


def count_fused(step: Any) -> int:
    return sum(isinstance(call.func, Kernel) for call in step.captured.calls)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_same_at_every_budget_and_nearly_those_of_eager(name: str) -> None:
    losses, state, step = trained(name, IN_CORE)
    assert count_fused(step) > 1
    assert step.planned.plan.policy == "keep-all"
    least = smallest(name)
    in_core = step.planned.program.arena_bytes
    assert least < in_core
    # Tiny steps are searched for long: where that shows nothing new, policies that search nothing have to do.
    half = "auto" if name in ("convolutional", "dropping") else "offload-all"
    for budget, policy in ((max(in_core // 2, least), half), (least, "offload-all")):
        again, other, step = trained(name, budget, policy=policy)
        assert again == losses
        assert all(map(torch.equal, state, other))
        assert step.planned.program.arena_bytes <= budget
    plain, plain_state, step = trained(name, IN_CORE, kernels="eager")
    assert not count_fused(step)
    for one, other in zip(losses, plain, strict=True):
        assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-5)
    for one, other in zip(state, plain_state, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_what_is_fused_runs_again_with_the_same_bits() -> None:
    losses, _, plain = trained("convolutional", IN_CORE)
    budget = plain.planned.program.arena_bytes * 3 // 4
    again, _, step = trained("convolutional", budget, policy="sqrt-checkpoint")
    repeated = {i.op for i in step.planned.program.instructions if isinstance(i, Run) and i.again}
    assert any(isinstance(step.captured.calls[op].func, Kernel) for op in repeated)
    assert again == losses


def test_fused_ops_take_no_scratch_memory_and_lie_where_they_are_planned() -> None:
    step, batches, _ = compiled("convolutional", IN_CORE)
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
        eager, _, plain = trained("convolutional", IN_CORE, kernels="eager")
        assert step.planned.program.arena_bytes <= plain.planned.program.arena_bytes
        assert eager


def test_equal_ops_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    compile_one = kernels.compiled

    def counted(recipe: kernels.Recipe, threads: int) -> Any:
        texts.append(recipe.text)
        return compile_one(recipe, threads)

    monkeypatch.setattr(kernels, "compiled", counted)
    step, batches, _ = compiled("convolutional", IN_CORE)
    told: list[tuple[str, int, int]] = []
    step.on_progress = lambda *what: told.append(what)
    with step:
        step(*batches[0])
        assert len(set(texts)) == len(texts)
        assert count_fused(step) > len(texts)  # blocks are alike
        assert ("compile kernels", len(texts), len(texts)) in told
        step(batches[0][0][:4], batches[0][1][:4])  # other shapes: other kernels
        assert len(set(texts)) == len(texts)


@pytest.mark.exhaustive
def test_another_process_has_the_same_bits(tmp_path: Path) -> None:
    losses, _, _ = trained("convolutional", IN_CORE)
    found = tmp_path / "losses.json"
    budget = str(smallest("convolutional") * 3 // 2)
    script = Path(__file__).with_name("fusible.py")
    subprocess.run([sys.executable, str(script), "convolutional", budget, str(found)], check=True)
    assert json.loads(found.read_text(encoding="utf-8")) == losses


def test_without_a_compiler_the_step_runs_as_it_is_and_the_log_says_so(tmp_path: Path) -> None:
    losses, _, _ = trained("perceptron", IN_CORE, kernels="eager")
    found = tmp_path / "losses.json"
    script = Path(__file__).with_name("fusible.py")
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    command = [sys.executable, str(script), "perceptron", IN_CORE, str(found)]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert json.loads(found.read_text(encoding="utf-8")) == losses
    assert done.stderr.count("cannot compile kernels: no C++ compiler") == 1
    assert COMPILERS[1] in done.stderr  # what to install


def _no_headers() -> None:
    raise RuntimeError("Failed to find C compiler.\nand more")


@pytest.mark.parametrize(
    ("said", "package", "known", "start"),
    [
        ("Triton is not installed; install the package triton", False, False, None),
        ("Triton does not support this GPU; it needs compute capability 7.0", True, False, None),
        (
            "Triton does not start: RuntimeError: Failed to find C compiler.. It needs a C compiler",
            True,
            True,
            _no_headers,
        ),
    ],
)
def test_the_log_names_what_triton_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str, package: bool, known: bool, start: Any
) -> None:
    loaded = {"has_triton_package": lambda: package, "has_triton": lambda: known, "triton_backend": start}
    compiler = {**internals._compiler(), **loaded}
    monkeypatch.setattr(internals, "_compiler", lambda: compiler)
    value = Value(0, (64,), (1,), torch.float32)
    recipe = kernels.Recipe((), (value,), (0,), (), (0,), torch.device("cuda", 0), "a recipe")
    other = replace(recipe, text="another")
    with caplog.at_level(logging.WARNING, logger="outofcore"):
        assert Kernels().of([recipe, other]) == {}
    assert caplog.text.count("cannot compile kernels: ") == 1
    assert f"cannot compile kernels: {said}" in caplog.text


def test_what_inductor_refuses_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(recipe: kernels.Recipe, threads: int) -> Any:
        raise RuntimeError("not today\nand more")

    monkeypatch.setattr(kernels, "compiled", refuse)
    with caplog.at_level(logging.WARNING, logger="outofcore"):
        losses, _, step = trained("perceptron", IN_CORE)
    assert losses == trained("perceptron", IN_CORE, kernels="eager")[0]
    assert not count_fused(step)
    assert "is not fused because Inductor failed: RuntimeError: not today" in caplog.text


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    losses, _, _ = trained("perceptron", IN_CORE)
    step, batches, _ = compiled("perceptron", IN_CORE)
    with step:
        assert step(*batches[0]).item().hex() == losses[0]
        step.save(tmp_path / "saved")
    step, batches, _ = compiled("perceptron", smallest("perceptron"), policy="offload-all")
    with step:
        step.load(tmp_path / "saved")
        assert [step(*batch).item().hex() for batch in batches[1:]] == losses[1:]


def test_an_estimate_for_a_device_that_is_not_here_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step, batches = world("perceptron")
    how = {"inputs": batches[0], "device": "h100", "policy": "offload-all"}
    plain = outofcore.estimate(step, model, optimizer, **how)
    monkeypatch.setattr(kernels, "compiled", lambda *_: pytest.fail("something was compiled"))
    found = outofcore.estimate(step, model, optimizer, kernels="inductor", **how)
    assert found.compute_seconds < plain.compute_seconds


def test_what_does_not_go_together_is_refused() -> None:
    model, optimizer, step, _ = world("perceptron")
    with pytest.raises(InputError, match="there are no kernels 'triton'; choose 'eager' or 'inductor'"):
        outofcore.compile(step, model, optimizer, budget=IN_CORE, kernels="triton")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave 'policy' and 'kernels' out"):
        outofcore.compile(step, model, optimizer, budget=IN_CORE, kernels="inductor", dynamic=True)


Shape = tuple[int, ...]
SHAPES: list[Shape] = [(6, 4, 8), (6, 8, 4), (24, 8)]
# What may be done to a tensor, with another of the same shape at hand.
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
def test_random_steps_give_nearly_what_eager_gives(
    shape: Shape, changes: list[tuple[str, int]], backward: bool
) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = [x * weight, y]
        for name, other in changes:
            seen.append(CHANGES[name](seen[-1], seen[other % len(seen)]))
        loss = seen[-1].square().mean()
        if backward:
            loss.backward()
        return loss, seen[len(seen) // 2].detach().clone()

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.rand(shape))
    model = torch.nn.Module()
    model.weight = weight
    x, y = torch.randn(shape), torch.randn(shape)
    captured = capture_step(step, [model], [], (x, y), {})
    one = fused(captured, Kernels(), least=1)
    assert any(isinstance(call.func, Kernel) for call in one.calls)
    found = Replay(one)(x, y)
    gradient = None if weight.grad is None else weight.grad.clone()
    weight.grad = None
    wanted = step(x, y)
    for ours, theirs in zip(found, wanted, strict=True):
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
def test_views_are_made_of_other_views_as_their_strides_say(
    how: tuple[list[int], list[int], list[int]], repeated: int
) -> None:
    shape, inner, outer = how
    given_ = torch.arange(torch.Size(shape).numel()).view(shape).permute(inner)
    wanted = given_.permute(outer).narrow(0, given_.shape[outer[0]] - 1, 1)
    wanted = wanted.unsqueeze(-1).expand(*wanted.shape, repeated + 1)
    one, other = (Window(tuple(t.shape), t.stride(), int(t.storage_offset())) for t in (given_, wanted))
    found = derivation(one, other)
    assert found is not None
    assert torch.equal(derived(given_, found), wanted)
