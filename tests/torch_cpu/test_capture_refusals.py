"""What cannot be captured is refused with the user's line and advice, and leaves everything as it was."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from outofcore.capture import capture_step
from outofcore.errors import CaptureError

Refused = Callable[["World"], Callable[..., Any]]


class Noisy(nn.Module):
    """Has an attribute to leave things in, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.hidden: Any = None
        self.calls = 0
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class World:
    """What a step may use."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Noisy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.outside = torch.ones(3)
        self.array = np.ones(3, dtype=np.float32)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.x = torch.randn(5, 4)

    def capture(self, step: Callable[..., Any], *args: Any) -> Any:
        return capture_step(step, [self.model], [self.optimizer], args or (self.x,), {})

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def picture(world: World) -> Any:
    """All that a capture must leave alone."""
    model, optimizer = world.model, world.optimizer
    return (
        {name: (id(t), t.clone(), t.requires_grad, id(t.grad)) for name, t in model.named_parameters()},
        {name: (id(t), t.clone()) for name, t in model.named_buffers()},
        {k: v for k, v in vars(model).items() if not isinstance(v, dict)},
        {k: id(v) for k, v in vars(model.linear).items()},
        list(model.kept),
        copy.deepcopy(optimizer.state_dict()),
        {k: id(v) for k, v in vars(optimizer).items()},
        [{k: id(v) for k, v in group.items()} for group in optimizer.param_groups],
        world.scheduler.state_dict(),
        torch.get_rng_state(),
        random.getstate(),
        (nn.Module.__call__, torch.autograd.Function.apply.__func__, torch.get_rng_state, torch.manual_seed),
        (torch.from_numpy, torch.autograd.graph._engine_run_backward, torch.amp.GradScaler.scale, type(optimizer).step),
        torch.is_grad_enabled(),
    )


def assert_same_picture(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_picture(one[key], other[key])
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_picture(a, b)
    else:
        assert one == other


def line_of(mark: str) -> int:
    """The line of this file that ends with the comment ``# <mark>``."""
    lines = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def item(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x).item()  # item

    return step


def as_float(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return float(w.learn(x))  # as_float

    return step


def branch(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        if (x > 0).all():  # branch
            return w.learn(x)
        return None

    return step


def tolist(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.learn(x)
        return x.tolist()  # tolist

    return step


def numpy(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x).detach().numpy()  # numpy

    return step


def printed(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        print(w.learn(x))  # printed

    return step


def formatted(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return f"{w.learn(x):.3f}"  # formatted

    return step


def in_model(w: World) -> Any:
    w.model.linear.register_forward_hook(
        lambda module, args, out: out * out.mean().item()  # in_model
    )
    return w.learn


def undeclared(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x * 2) + w.outside  # undeclared

    return step


def undeclared_module(w: World) -> Any:
    other = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> Any:
        return w.learn(other(x))  # undeclared_module

    return step


def undeclared_optimizer(w: World) -> Any:
    other = torch.optim.SGD(w.model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        w.model(x).sum().backward()
        other.step()  # undeclared_optimizer

    return step


def kept_step(w: World) -> Any:
    update = w.optimizer.step

    def step(x: torch.Tensor) -> Any:
        w.model(x).sum().backward()
        update()  # kept_step

    return step


def mask(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x[x.sum(1) > 0])  # mask

    return step


def from_array(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x) + torch.from_numpy(w.array)  # from_array

    return step


def tensor_of_array(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x) + torch.tensor(w.array)  # tensor_of_array

    return step


def long_list(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x) + torch.tensor([0.0] * 100).sum()  # long_list

    return step


def closure(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.optimizer.step(lambda: w.learn(x))  # closure

    return step


def scaler(w: World) -> Any:
    scale = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> Any:
        scale.scale(w.model(x).sum()).backward()  # scaler
        scale.step(w.optimizer)
        scale.update()

    return step


def sparse(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x.to_sparse().to_dense())  # sparse

    return step


def swallowed(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = w.learn(x)
        try:
            return loss.item()  # swallowed
        except Exception:
            return 0.0

    return step


def resized(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        y.resize_(100)  # resized
        return w.learn(x)

    return step


def seeded(w: World) -> Any:
    state = torch.get_rng_state()

    def step(x: torch.Tensor) -> Any:
        torch.set_rng_state(state)  # seeded
        return w.learn(x)

    return step


WITH_LINE = [
    (item, ".item()", "return the tensor"),
    (as_float, "float(tensor)", "return the tensor"),
    (branch, "branch on a tensor", "torch.where"),
    (tolist, ".tolist()", "return the tensor"),
    (numpy, ".numpy()", "return the tensor"),
    (printed, "printing a tensor", "return the tensor"),
    (formatted, "formatting a tensor", "return the tensor"),
    (in_model, ".item()", "keep the arithmetic in tensors"),
    (undeclared, "float32 tensor of shape (3,) from outside", "pass it as an argument"),
    (undeclared_module, "from outside", "add the module that it belongs to"),
    (undeclared_optimizer, "an optimizer (SGD) that was not given", "add it to the list"),
    (kept_step, "by a name kept from before", "write optimizer.step()"),
    (mask, "depends on the values", "torch.where"),
    (from_array, "NumPy array", "pass it as an argument"),
    (tensor_of_array, "NumPy array", "pass it as an argument"),
    (long_list, "100 elements from Python data", "register it as a buffer"),
    (closure, "with a closure", "loss.backward()"),
    (scaler, "GradScaler", "bfloat16"),
    (sparse, "sparse", "dense"),
    (swallowed, ".item()", "return the tensor"),
    (resized, "size of a tensor's memory", "make a new tensor"),
    (seeded, "state from outside", "before the step"),
]


@pytest.mark.parametrize(("make", "what", "advice"), WITH_LINE, ids=lambda value: getattr(value, "__name__", None))
def test_refused_with_the_line(make: Refused, what: str, advice: str) -> None:
    world = World()
    step = make(world)
    before = picture(world)
    with pytest.raises(CaptureError) as caught:
        world.capture(step)
    expected = f"{__file__}:{line_of(make.__name__)}"
    assert caught.value.location == expected
    assert str(caught.value).startswith(expected)
    assert what in str(caught.value)
    assert advice in str(caught.value)
    assert_same_picture(before, picture(world))


def left_in_attribute(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.hidden = w.model(x)
        return w.learn(x)

    return step


def left_in_list(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.kept.append(w.learn(x))

    return step


def left_in_closure(w: World) -> Any:
    total: Any = 0.0

    def step(x: torch.Tensor) -> None:
        nonlocal total
        total = total + w.learn(x)

    return step


def left_in_history(w: World) -> Any:
    history: list[Any] = []

    def step(x: torch.Tensor) -> None:
        history.append(w.learn(x))

    return step


def counted(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.calls += 1
        return w.learn(x)

    return step


def scheduled(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        for group in w.optimizer.param_groups:
            group["lr"] *= 0.9
        return w.learn(x)

    return step


def drawn(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x * random.random())

    return step


def buffer_of_other_shape(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.mean = x.mean()
        return w.learn(x)

    return step


def parameter_replaced(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.model.linear.weight = nn.Parameter(w.model.linear.weight * 2)
        return w.learn(x)

    return step


def frozen_inside(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = w.learn(x)
        w.model.linear.bias.requires_grad_(False)
        return loss

    return step


def idle(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.model(x)

    return step


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def boxed(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return Box(w.learn(x))

    return step


WITHOUT_LINE = [
    (left_in_attribute, r"Noisy\.hidden.*register it as a buffer"),
    (left_in_list, r"Noisy\.kept.*return it"),
    (left_in_closure, r"leaves something behind in total"),
    (left_in_history, r"leaves something behind in history"),
    (counted, r"Noisy\.calls from 0 to 1"),
    (scheduled, r"settings of AdamW.*after the step"),
    (drawn, r"random numbers from Python"),
    (buffer_of_other_shape, r"replaces mean by a torch.float32 tensor of shape \(\)"),
    (parameter_replaced, r"replaces a parameter or a submodule of linear"),
    (frozen_inside, r"requires_grad of linear.bias"),
    (idle, r"neither updates a parameter nor leaves a gradient"),
    (boxed, r"returns a Box with tensors inside"),
]


@pytest.mark.parametrize(("make", "message"), WITHOUT_LINE, ids=lambda value: getattr(value, "__name__", None))
def test_refused_at_the_end(make: Refused, message: str) -> None:
    world = World()
    step = make(world)
    before = picture(world)
    with pytest.raises(CaptureError, match=message):
        world.capture(step)
    assert_same_picture(before, picture(world))


def test_the_history_of_the_user_is_as_long_as_before() -> None:
    world = World()
    history: list[Any] = [1]

    def step(x: torch.Tensor) -> None:
        history.append(world.learn(x))

    with pytest.raises(CaptureError):
        world.capture(step)
    assert history == [1]


def test_arguments_that_cannot_be_compared_are_refused_by_name() -> None:
    world = World()
    with pytest.raises(CaptureError, match=r"argument 1\['box'\]\[0\] holds a Box"):
        world.capture(lambda x, more: world.learn(x), world.x, {"box": [Box(1)]})


def test_an_argument_computed_with_gradients_is_refused() -> None:
    world = World()
    x = world.x.requires_grad_() * 2
    with pytest.raises(CaptureError, match="argument 0 has been computed with gradients"):
        world.capture(world.learn, x)


def test_a_gradient_left_in_an_argument_is_refused() -> None:
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


class Stepping(torch.optim.SGD):
    """Wraps another optimizer."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(params, lr=0.1)


class Hiding(torch.optim.Optimizer):
    """Keeps a tensor where no plan can see it."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.place = place

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                made = torch.zeros_like(p)
                if self.place == "list":
                    self.state[p]["all"] = [made]
                elif self.place == "attribute":
                    self.made = made
                elif self.place == "group":
                    group["made"] = made
                else:
                    self.state["all"] = {"made": made}


def test_optimizers_that_cannot_be_taken_apart_are_refused() -> None:
    world = World()
    parameters = list(world.model.parameters())
    hooked = torch.optim.SGD(parameters, lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    replaced = torch.optim.SGD(parameters, lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign]
    for optimizer, why in [
        (torch.optim.LBFGS(parameters), "unknown number of times"),
        (torch.optim.SparseAdam(parameters), "sparse gradients"),
        (torch.optim.Adam(parameters, differentiable=True), "autograd graph"),
        (hooked, "hooks"),
        (replaced, "has been replaced"),
        (Stepping(parameters), "wraps another"),
        (Hiding(parameters, "list"), "inside a list"),
        (Hiding(parameters, "attribute"), "in its attribute 'made'"),
        (Hiding(parameters, "group"), "in its setting 'made'"),
        (Hiding(parameters, "state"), "not of one of its parameters"),
    ]:
        world.optimizer = optimizer
        before = set(vars(optimizer))
        with pytest.raises(CaptureError, match=re.escape(why)):
            world.capture(world.learn)
        assert set(vars(optimizer)) == before
        assert not any(isinstance(key, str) for key in optimizer.state)


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match="weight has no shape yet"):
        capture_step(lambda x: x, [nn.LazyLinear(3)], [], (torch.ones(1),), {})


def test_the_users_own_error_comes_through_unchanged() -> None:
    world = World()
    mine = ValueError("mine")

    def step(x: torch.Tensor) -> None:
        world.model.calls += 1
        world.model.hidden = world.model(x)
        raise mine

    before = picture(world)
    with pytest.raises(ValueError, match="mine") as caught:
        world.capture(step)
    assert caught.value is mine
    assert_same_picture(before, picture(world))
    with pytest.raises(RuntimeError, match=r"reduction dim|mat1 and mat2"):
        world.capture(world.learn, torch.ones(2, 7))
    assert_same_picture(before, picture(world))


def test_a_capture_leaves_everything_as_it_was() -> None:
    world = World()
    world.learn(world.x)
    F.mse_loss(world.model(world.x), torch.ones(5, 3)).backward()
    before = picture(world)
    world.capture(world.learn)
    assert_same_picture(before, picture(world))
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
