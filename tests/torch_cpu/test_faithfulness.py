"""Tests of comparing the results of an op with its captured description."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import outofcore
from outofcore.capture import CaptureOptions, capture_step
from outofcore.capture.captured import Captured
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.errors import CaptureError
from outofcore.profiling.faithfulness import Difference, find_differences
from outofcore.profiling.ops import profile_ops


def captured_mul() -> tuple[Captured, int]:
    model = torch.nn.Linear(4, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).exp()

    captured = capture_step(step, [model], [], (torch.ones(3, 4),), {})
    return captured, next(op.id for op in captured.graph.ops if "exp" in op.name)


RESULTS: list[tuple[object, str, bool]] = [
    (None, "kind", False),
    (7, "kind", False),
    (torch.ones(3, 6, device="meta"), "device", False),
    (torch.ones(3, 6, dtype=torch.float64), "dtype", False),
    (torch.ones(6, 3), "shape", False),
    (torch.ones(6, 3).t(), "stride", True),
    (torch.ones(30, 6)[:3], "bytes", True),
]


@pytest.mark.parametrize(("result", "aspect", "survived"), RESULTS)
def test_most_severe_difference_is_reported(result: object, aspect: str, survived: bool) -> None:
    captured, place = captured_mul()
    op = captured.graph.ops[place]
    assert find_differences(captured, op, [torch.ones(3, 6)]) == []
    (difference,) = find_differences(captured, op, [result])
    assert isinstance(difference, Difference)
    assert (difference.aspect, difference.is_harmless) == (aspect, survived)


def test_result_captured_as_empty_is_compared() -> None:
    """A kernel may fill a result that its fake leaves empty, such as one saved for the backward pass."""
    captured, place = captured_mul()
    index = captured.calls[place].results[0]
    assert index is not None
    values = list(captured.values)
    values[index] = replace(values[index], shape=(0,), stride=(1,))
    reported = find_differences(replace(captured, values=tuple(values)), captured.graph.ops[place], [torch.ones(3, 6)])
    assert [difference.aspect for difference in reported] == ["shape"]


@torch.library.custom_op("outofcore_test::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a second result that the fake describes as empty."""
    return x * 2, torch.ones(5)


@keeps.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty(0)


def test_op_with_a_larger_result_than_its_fake_is_refused_by_name() -> None:
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        y, saved = keeps(model(x).detach())
        return y * saved.sum()

    captured = capture_step(step, [model], [], (torch.ones(3, 4),), {})
    with pytest.raises(CaptureError, match=r"result 1 of the operator outofcore_test\.keeps.* shape \(5,\)"):
        profile_ops(captured, measure_time=False)


def test_compiled_step_has_the_strides_of_kernels(caplog: pytest.LogCaptureFixture) -> None:
    layout = torch.channels_last
    model = torch.nn.Conv2d(3, 3, 3, padding=1).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    image, target = torch.randn(2, 2, 3, 16, 16).unbind()

    def learn(image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(image), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with caplog.at_level("INFO", logger="outofcore"), outofcore.compile(learn, model, optimizer, budget="4MiB") as step:
        step(image.to(memory_format=layout), target.to(memory_format=layout))
        assert any("mse_loss_backward" in op.name for op in step.captured.graph.ops)
    assert "was captured with" not in caplog.text


def test_kernel_layouts_keep_random_state_and_survive_errors() -> None:
    model = torch.nn.RReLU()
    image = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)[0, 0].t().exp().multinomial(1)  # raises for zeros

    state, layouts = torch.get_rng_state(), KernelLayouts()
    captured = capture_step(step, [model], [], (image,), {}, options=CaptureOptions(layouts=layouts))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("generator" in op.name for op in captured.graph.ops)
    assert any("rrelu" in key for key in layouts._layouts)
    assert any("multinomial" in key and layout is None for key, layout in layouts._layouts.items())


python_kernel_runs: list[tuple[int, ...]] = []


@torch.library.custom_op("outofcore_test::in_python", mutates_args=())
def in_python(x: torch.Tensor) -> torch.Tensor:
    """Call functions that capture records or refuses."""
    python_kernel_runs.append(x.stride())
    torch.set_rng_state(torch.get_rng_state())
    return x * float(x.sum().item() + torch.rand(1).item())


@in_python.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_capture_runs_no_kernels_of_custom_operators() -> None:
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(in_python(x.t()))

    captured = capture_step(step, [model], [], (torch.ones(4, 4),), {}, options=CaptureOptions(layouts=KernelLayouts()))
    assert python_kernel_runs == []
    assert captured.graph.ops[0].name == "outofcore_test.in_python.default"
