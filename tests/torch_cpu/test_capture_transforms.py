"""Tests of higher-order operators, torch.func transforms and kinds of modules: exact or refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch._ops import HigherOrderOperator
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import outofcore
from outofcore.capture import capture_step
from outofcore.errors import CaptureError, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:flex_attention called without")

Change = Callable[[torch.Tensor], torch.Tensor]


def line_of(mark: str) -> str:
    """Return ``file:line: `` of the line that ends with the comment ``# <mark>``."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(k for k, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}: "


class Twice(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("twice")

    def __call__(self, function: Change, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(function, x)  # twice


twice = Twice()


@twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def _(function: Change, x: torch.Tensor) -> torch.Tensor:
    return function(function(x))


@twice.py_impl(torch._C.DispatchKey.Autograd)
def _(function: Change, x: torch.Tensor) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return twice(function, x)


def cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # cond


def repeat(x: torch.Tensor) -> torch.Tensor:
    result = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x.detach()))  # while_loop
    return x + result[1]


def call_map(x: torch.Tensor) -> torch.Tensor:
    return map_over(torch.sin, x)  # map_impl


def call_scan(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda total, row: (total + row, total * row), x[0], x)[1]  # scan


def call_twice(x: torch.Tensor) -> torch.Tensor:
    return x + twice(torch.sin, x.detach())


def attention(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - takes a second

    tokens = x.detach().reshape(1, 1, 4, 8)
    return x + flex_attention(tokens, tokens, tokens).reshape(4, 8)  # flex_attention


class Body(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x)


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = Body(change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.linear(x))


def refusal_of(model: nn.Module, loss_of: Change = lambda y: y.square().mean()) -> CaptureError:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x))
        loss.backward()
        return loss.detach()

    with pytest.raises(CaptureError) as caught:
        capture_step(step, [model], [], (torch.randn(4, 8),), {})
    return caught.value


NAMES = {
    cond: "cond",
    repeat: "while_loop",
    call_map: "map_impl",
    call_scan: "scan",
    call_twice: "twice",
    attention: "flex_attention",
}


@pytest.mark.parametrize("change", NAMES, ids=list(NAMES.values()))
def test_higher_order_operator_is_refused_by_name(change: Change) -> None:
    name = NAMES[change]
    message = str(refusal_of(Net(change)))
    assert message.startswith(line_of(name) + f"the step uses the higher-order operator {name} in body: ")
    assert "outofcore.budget(limit, model)" in message


def test_higher_order_operator_in_loss_or_backward_is_refused() -> None:
    def loss_of(y: torch.Tensor) -> torch.Tensor:
        loss = y.square().mean()
        return torch.cond(loss > 1, torch.sin, torch.cos, (loss,))  # in a loss

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cond(gradient.sum() > 1, torch.sin, torch.cos, (gradient,))  # in a hook

    assert "operator cond: " in str(refusal_of(Net(torch.sin), loss_of))
    hooked = Net(torch.sin)
    hooked.linear.weight.register_hook(hook)
    message = str(refusal_of(hooked))
    assert message.startswith(line_of("in a hook"))
    assert "operator cond in linear: " in message


def test_higher_order_operator_in_an_optimizer_is_refused() -> None:
    class Branching(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(torch.cond(parameter.sum() > 0, torch.sin, torch.cos, (parameter.grad,)))  # in a step

    model = Net(torch.sin)
    optimizer = Branching(model.parameters(), {})

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match="higher-order operator cond") as caught:
        capture_step(step, [model], [optimizer], (torch.randn(4, 8),), {})
    assert str(caught.value).startswith(line_of("in a step"))


def test_higher_order_operator_runs_while_a_model_is_built(tmp_path: Path) -> None:
    class Drawn(nn.Linear):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(torch.cond(torch.rand(()) > 2, torch.zeros_like, torch.ones_like, (self.weight,)))

    with outofcore.open_home(tmp_path) as home:
        model = outofcore.build(lambda: Drawn(256, 300, bias=False), home=home)
        assert bool((model.weight == 1).all())


# Exact, or refused by name


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(NET, parameters, (x,)).square().mean()


def set_gradients(gradients: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for name, parameter in NET.named_parameters():
        parameter.grad = gradients[name]
    return sum(gradient.sum() for gradient in gradients.values()).detach() + x.sum()


def run_backward(value: torch.Tensor) -> torch.Tensor:
    loss = value.square().mean()
    loss.backward()
    return loss.detach()


def per_sample_gradients(x: torch.Tensor) -> torch.Tensor:
    frozen = {name: parameter.detach() for name, parameter in NET.named_parameters()}
    gradients = vmap(grad(loss_of), in_dims=(None, 0))(frozen, x)
    return set_gradients({name: gradient.mean(0) for name, gradient in gradients.items()}, x)


def batched_gradients(x: torch.Tensor) -> torch.Tensor:
    output, names = NET(x), [name for name, _ in NET.named_parameters()]
    seeds = torch.eye(4)
    gradients = torch.autograd.grad(output.squeeze(1), list(NET.parameters()), seeds, is_grads_batched=True)
    return set_gradients({name: gradient.sum(0) for name, gradient in zip(names, gradients, strict=True)}, x)


EXACT: dict[str, Change] = {
    "functional_call": lambda x: run_backward(loss_of(dict(NET.named_parameters()), x)),
    "grad": lambda x: set_gradients(grad(loss_of)(dict(NET.named_parameters()), x), x),
    "vmap": lambda x: run_backward(vmap(NET)(x)),
    "vmap of grad": per_sample_gradients,
    "grad of inputs": lambda x: run_backward(vmap(grad(lambda row: NET(row).sum()))(x)),
    "vjp": lambda x: run_backward(vjp(NET, x)[1](torch.ones(4, 1))[0]),
    "jacrev": lambda x: run_backward(jacrev(NET)(x[0])),
    "dropout": lambda x: run_backward(vmap(lambda row: nn.functional.dropout(NET(row)), randomness="different")(x)),
    "batched gradients": batched_gradients,
    "functionalize": lambda x: run_backward(torch.func.functionalize(NET)(x)),
    "a function of autograd": lambda x: run_backward(vmap(grad(lambda row: Square.apply(NET(row)).sum()))(x)),
    "associative_scan": lambda x: run_backward(associative_scan(torch.add, NET(x), 0, combine_mode="generic")),
    "cond on a bool": lambda x: run_backward(torch.cond(x.shape[0] > 3, NET, NET[0], (x,))),
}


@pytest.mark.parametrize("name", EXACT)
def test_transform_is_exact(name: str) -> None:
    def run(step: Change) -> list[Any]:
        torch.manual_seed(1)
        NET.zero_grad()
        loss = step(torch.linspace(-1, 1, 32).reshape(4, 8))
        return [loss, *[None if p.grad is None else p.grad.clone() for p in NET.parameters()]]

    plain = run(EXACT[name])
    with outofcore.compile(EXACT[name], NET, budget="8MiB", home="host") as step:
        ours = run(step)
    assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(plain, ours, strict=True))
    NET.zero_grad()


FORWARD: dict[str, Change] = {
    "jvp": lambda x: run_backward(jvp(NET, (x,), (x,))[1]),
    "jacfwd": lambda x: run_backward(jacfwd(NET)(x[0])),
    "linearize": lambda x: run_backward(linearize(NET, x)[1](x)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_derivative_is_refused_by_name(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"differentiates forward \(torch.func.{name}\).*with torch.func.vjp") as e:
        capture_step(FORWARD[name], [NET], [], (torch.ones(4, 8),), {})
    assert e.value.location.startswith(__file__)
    with pytest.raises(CaptureError, match=r"\(torch.func.jacfwd\)"):  # hessian uses jacfwd
        capture_step(
            lambda x: run_backward(hessian(lambda row: NET(row).sum())(x[0])), [NET], [], (torch.ones(4, 8),), {}
        )


def test_outside_tensor_in_a_transform_is_named() -> None:
    factor = torch.ones(1)

    with pytest.raises(CaptureError, match=r"float32 tensor of shape .* from outside, factor"):
        capture_step(lambda x: run_backward(vmap(lambda row: NET(row) * factor)(x)), [NET], [], (torch.ones(4, 8),), {})


# Kinds of modules


def save_and_load(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


SCRIPTED: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.ones(4, 8)),
    "load": save_and_load,
    "freeze": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
}


@pytest.mark.parametrize("kind", SCRIPTED)
def test_torchscript_is_refused_by_name(kind: str) -> None:
    scripted = SCRIPTED[kind](nn.Linear(8, 8))
    type_name = type(scripted).__name__
    whole, part = scripted, Net(torch.sin)
    part.body = nn.Sequential(scripted)
    for model, place in ((whole, "the model"), (part, "body.0")):
        with pytest.raises(CaptureError) as caught:
            outofcore.compile(model, model, budget="8MiB", home="host")
        assert str(caught.value).startswith(f"{place} ({type_name}) is TorchScript: ")
        assert (
            "torch.jit.script or torch.jit.trace was called on, or run the unchanged loop within outofcore.budget"
            in str(caught.value)
        )
        with pytest.raises(CaptureError, match="is TorchScript"):
            capture_step(model, [model], [], (torch.ones(4, 8),), {})


def test_torchscript_runs_when_the_step_is_dynamic() -> None:
    def run(follow: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

        def step(x: torch.Tensor) -> torch.Tensor:
            return run_backward(model(x))

        called = outofcore.compile(step, model, budget="8MiB", dynamic=True) if follow else step
        return [called(torch.ones(4, 8)) for _ in range(2)]

    assert all(map(torch.equal, run(follow=True), run(follow=False)))


@torch.jit.script
def scripted_function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def export_module(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (torch.ones(4, 8),)).module()


WORKING: dict[str, Callable[[nn.Module], Any]] = {
    "a scripted function": lambda _: Net(scripted_function),
    "exported": export_module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "a graph module": torch.fx.symbolic_trace,
    "data parallel": nn.DataParallel,
}


@pytest.mark.parametrize("kind", WORKING)
def test_kind_of_module_is_exact(kind: str) -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = WORKING[kind](nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

        def step(x: torch.Tensor) -> torch.Tensor:
            return run_backward(model(x))

        if not compiled:
            return [step(torch.ones(4, 8)), *[p.grad for p in model.parameters() if p.grad is not None]]
        with outofcore.compile(step, model, budget="8MiB", home="host") as ours:
            loss = ours(torch.ones(4, 8))
        return [loss, *[p.grad for p in model.parameters() if p.grad is not None]]

    assert all(map(torch.equal, run(compiled=True), run(compiled=False)))


def test_invalid_module_is_refused() -> None:
    class Uninitialised(nn.Module):
        def __init__(self) -> None:
            pass

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["_parameters"] = tuple(self._parameters)

    container = nn.Sequential()
    container._modules["inner"] = Uninitialised()
    program = torch.export.export(nn.Linear(8, 8), (torch.ones(4, 8),))
    for model, message in (
        (Uninitialised(), r"the model \(Uninitialised\) is not initialised: .*super\(\).__init__\(\)"),
        (container, r"inner \(Uninitialised\) is not initialised"),
        (program, "model must be a .*Module.*, not ExportedProgram"),
        (scripted_function, "model must be a .*Module.*, not ScriptFunction"),
        (copy.copy, "model must be a .*Module.*, not function"),
    ):
        with pytest.raises(InputError, match=message):
            outofcore.compile(lambda x: x, model, budget="8MiB")  # type: ignore[arg-type]
    message = r"the model \(Own\) does not store its parameters, buffers and submodules as torch.nn.Module does"
    with pytest.raises(CaptureError, match=message):
        outofcore.compile(lambda x: x, Own(), budget="8MiB")
