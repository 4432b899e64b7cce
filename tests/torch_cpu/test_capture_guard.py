"""Tests that steps with side effects are refused and that the user's objects stay unchanged."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_world import World, assert_same_snapshot, snapshot
from torch import nn

from outofcore.capture import capture_step
from outofcore.errors import CaptureError

MakeStep = Callable[[World], Callable[..., Any]]


def store_in_attribute(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.hidden = w.model(x)
        return w.learn(x)

    return step


def append_to_list(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.kept.append(w.learn(x))

    return step


def add_to_closure(w: World) -> Any:
    total: Any = 0.0

    def step(x: torch.Tensor) -> None:
        nonlocal total
        total = total + w.learn(x)

    return step


def append_to_closure(w: World) -> Any:
    history: list[Any] = []

    def step(x: torch.Tensor) -> None:
        history.append(w.learn(x))

    return step


def change_learning_rate(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        for group in w.optimizer.param_groups:
            group["lr"] *= 0.9
        return w.learn(x)

    return step


def draw_from_python(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x * random.random())

    return step


def draw_from_numpy(w: World) -> Any:
    np.random.random()  # the second number changes only the position of the generator

    def step(x: torch.Tensor) -> Any:
        return w.learn(x * np.random.random())

    return step


def replace_buffer_by_other_shape(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.mean = x.mean()
        return w.learn(x)

    return step


def replace_parameter(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.linear.weight = nn.Parameter(w.model.linear.weight * 2)
        return w.learn(x)

    return step


def freeze_bias(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = w.learn(x)
        w.model.linear.bias.requires_grad_(False)
        return loss

    return step


def skip_training(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.model(x)

    return step


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def return_box(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return Box(w.learn(x))

    return step


WITHOUT_LINE = [
    (store_in_attribute, r"Noisy\.hidden.*register it as a buffer"),
    (append_to_list, r"Noisy\.kept.*return it"),
    (add_to_closure, r"stores a tensor in total: it would be out of date"),
    (append_to_closure, r"stores a tensor in history: it would be out of date"),
    (change_learning_rate, r"settings of AdamW.*after the step"),
    (draw_from_python, r"random numbers from Python"),
    (draw_from_numpy, r"random numbers from Python or NumPy"),
    (replace_buffer_by_other_shape, r"replaces mean by a torch.float32 tensor of shape \(\)"),
    (replace_parameter, r"replaces a parameter or a submodule of linear"),
    (freeze_bias, r"requires_grad of linear.bias"),
    (skip_training, r"neither updates a parameter nor leaves a gradient"),
    (return_box, r"returns a Box with tensors inside"),
]


@pytest.mark.parametrize(("make", "message"), WITHOUT_LINE, ids=lambda value: getattr(value, "__name__", None))
def test_step_with_side_effect_is_refused(make: MakeStep, message: str) -> None:
    world = World()
    step = make(world)
    before = snapshot(world)
    with pytest.raises(CaptureError, match=message):
        world.capture(step)
    assert_same_snapshot(before, snapshot(world))


def test_users_list_keeps_its_length_after_a_refusal() -> None:
    world = World()
    history: list[Any] = [1]

    def step(x: torch.Tensor) -> None:
        history.append(world.learn(x))

    with pytest.raises(CaptureError):
        world.capture(step)
    assert history == [1]


def test_incomparable_argument_is_refused_by_name() -> None:
    world = World()
    with pytest.raises(CaptureError, match=r"argument 1\['box'\]\[0\] holds a Box"):
        world.capture(lambda x, more: world.learn(x), world.x, {"box": [Box(1)]})


def test_argument_computed_with_gradients_is_refused() -> None:
    world = World()
    x = world.x.requires_grad_() * 2
    with pytest.raises(CaptureError, match="argument 0 has been computed with gradients"):
        world.capture(world.learn, x)


def test_gradient_left_in_an_argument_is_refused() -> None:
    world = World()
    with pytest.raises(CaptureError, match="leaves a gradient in argument 0"):
        world.capture(world.learn, world.x.requires_grad_())


def test_writing_into_shared_arguments_is_refused() -> None:
    world = World()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return world.learn(x + y)

    with pytest.raises(CaptureError, match="writes into argument 0, whose memory another"):
        world.capture(step, world.x, world.x)
    world.capture(step, world.x, world.x.clone())


class WrappingOptimizer(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(params, lr=0.1)


class HidingOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.place = place

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                hidden = torch.zeros_like(p)
                if self.place == "list":
                    self.state[p]["all"] = [hidden]
                elif self.place == "attribute":
                    self.made = hidden
                elif self.place == "group":
                    group["made"] = hidden
                else:
                    self.state["all"] = {"made": hidden}


def test_unsupported_optimizers_are_refused() -> None:
    world = World()
    parameters = list(world.model.parameters())
    hooked = torch.optim.SGD(parameters, lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    replaced = torch.optim.SGD(parameters, lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign]
    for optimizer, reason in [
        (torch.optim.LBFGS(parameters), "unknown number of times"),
        (torch.optim.SparseAdam(parameters), "sparse gradients"),
        (torch.optim.Adam(parameters, differentiable=True), "autograd graph"),
        (hooked, "hooks"),
        (replaced, "has been replaced"),
        (WrappingOptimizer(parameters), "wraps another"),
        (HidingOptimizer(parameters, "list"), "inside a list"),
        (HidingOptimizer(parameters, "attribute"), "in its attribute 'made'"),
        (HidingOptimizer(parameters, "group"), "in its setting 'made'"),
        (HidingOptimizer(parameters, "state"), "not of one of its parameters"),
    ]:
        world.optimizer = optimizer
        before = set(vars(optimizer))
        with pytest.raises(CaptureError, match=re.escape(reason)):
            world.capture(world.learn)
        assert set(vars(optimizer)) == before
        assert not any(isinstance(key, str) for key in optimizer.state)


def test_lazy_parameter_argument_is_refused() -> None:
    with pytest.raises(CaptureError, match="argument 0 is a UninitializedParameter"):
        capture_step(lambda x: x, [], [], (nn.LazyLinear(3).weight,), {})


def test_error_raised_by_the_step_propagates_unchanged() -> None:
    world = World()
    mine = ValueError("mine")

    def step(x: torch.Tensor) -> None:
        world.model.calls += 1
        world.model.hidden = world.model(x)
        raise mine

    before = snapshot(world)
    with pytest.raises(ValueError, match="mine") as caught:
        world.capture(step)
    assert caught.value is mine
    assert_same_snapshot(before, snapshot(world))
    with pytest.raises(RuntimeError, match=r"reduction dim|mat1 and mat2"):
        world.capture(world.learn, torch.ones(2, 7))
    assert_same_snapshot(before, snapshot(world))


def test_capture_leaves_the_users_objects_unchanged() -> None:
    world = World()
    world.learn(world.x)
    F.mse_loss(world.model(world.x), torch.ones(5, 3)).backward()
    before = snapshot(world)
    world.capture(world.learn)
    assert_same_snapshot(before, snapshot(world))
    world.learn(world.x)
    world.scheduler.step()


def test_constants_and_metadata_of_tensors_may_be_read() -> None:
    world = World()

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(2.0)
        rows = x.shape[0] + world.outside.shape[0]
        if scale.item() > 1 and bool(torch.tensor(True)):
            x = x * scale * rows
        return world.learn(x)

    assert world.capture(step).constants
