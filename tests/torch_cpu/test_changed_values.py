"""Tests of values read by a step that change between two calls: results stay plain PyTorch's."""

from __future__ import annotations

import argparse
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import logging
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.capture import snapshot

Change = Callable[[], object]
# Makes a step, and a function to call between two of its calls.
Case = Callable[["World"], tuple[Callable[[torch.Tensor], Any], Change]]

FACTOR = 1.0
FACTORS = [1.0, 2.0]
SETTINGS = types.SimpleNamespace(scale=1.0)
CHOSEN = contextvars.ContextVar("CHOSEN", default=1.0)


class Net(nn.Module):
    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.25)
        self.act = nn.LeakyReLU(0.1)
        self.last = nn.Linear(16, 1)
        self.scale = 1.0
        self.weights = [1.0, 0.5]
        self.config: dict[str, Any] = {"gain": 1.0, "inner": {"shift": 0.0}}
        self.calls = 0

    def shape(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.act(self.norm(self.first(x))))
        x = self.shape(x) * self.scale * self.weights[0] * self.config["gain"] + self.config["inner"]["shift"]
        return self.last(x / self.temperature)


class World:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(6, 8)

    def update(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.update(self.model(x).square().mean())

    def scaled_step(self, read: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.update(self.model(x).square().mean() * read())


def model_change(change: Callable[[Net], object]) -> Case:
    def case(w: World) -> tuple[Callable[..., Any], Change]:
        return w.plain, lambda: change(w.model)

    return case


def optimizer_change(change: Callable[[torch.optim.Optimizer], object]) -> Case:
    def case(w: World) -> tuple[Callable[..., Any], Change]:
        return w.plain, lambda: change(w.optimizer)

    return case


def double_output(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def set_attribute(path: str, value: Any) -> Case:
    def change(model: Net) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return model_change(change)


def new_method(model: Net) -> None:
    model.shape = types.MethodType(lambda self, x: x * 3, model)  # type: ignore[method-assign]


def hook_on_tensor(model: Net) -> None:
    model.last.weight.register_hook(lambda grad: grad * 2)


def hook_after_accumulation(model: Net) -> None:
    def zero(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.zero_()

    model.last.weight.register_post_accumulate_grad_hook(zero)


def backward_hook(model: Net) -> None:
    model.last.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 2,))


def cleared_hooks(w: World) -> tuple[Callable[..., Any], Change]:
    handle = w.model.last.register_forward_hook(double_output)
    return w.plain, handle.remove


def replaced_hook(w: World) -> tuple[Callable[..., Any], Change]:
    handle = w.model.last.register_forward_hook(double_output)

    def change() -> None:
        w.model.last._forward_hooks[handle.id] = lambda module, args, output: output * 3

    return w.plain, change


def hook_with_state(w: World) -> tuple[Callable[..., Any], Change]:
    noise = {"gain": 1.0}
    w.model.first.register_forward_hook(lambda module, args, output: output * noise["gain"])
    return w.plain, lambda: noise.update(gain=2.0)


def namespace(w: World) -> tuple[Callable[..., Any], Change]:
    args = argparse.Namespace(beta=1.0, steps=0)
    return w.scaled_step(lambda: args.beta), lambda: setattr(args, "beta", 2.0)


def namespace_as_dict(w: World) -> tuple[Callable[..., Any], Change]:
    args = argparse.Namespace(beta=1.0)
    return w.scaled_step(lambda: sum(vars(args).values())), lambda: setattr(args, "beta", 2.0)


def attribute_by_computed_name(w: World) -> tuple[Callable[..., Any], Change]:
    args = types.SimpleNamespace(weight_0=1.0, weight_1=2.0)
    return w.scaled_step(lambda: sum(getattr(args, f"weight_{k}") for k in range(2))), lambda: setattr(
        args, "weight_1", 5.0
    )


def new_attribute(w: World) -> tuple[Callable[..., Any], Change]:
    args = types.SimpleNamespace()
    return w.scaled_step(lambda: getattr(args, "beta", 1.0)), lambda: setattr(args, "beta", 2.0)


@dataclasses.dataclass
class Weights:
    kl: float = 1.0
    inner: list[float] = dataclasses.field(default_factory=lambda: [1.0, 2.0])


@dataclasses.dataclass(frozen=True)
class Fixed:
    kl: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    kl: float = 1.0


def a_dataclass(w: World) -> tuple[Callable[..., Any], Change]:
    weights = Weights()
    return w.scaled_step(lambda: weights.kl), lambda: setattr(weights, "kl", 2.0)


def fields_of_a_dataclass(w: World) -> tuple[Callable[..., Any], Change]:
    weights = Weights()
    return w.scaled_step(lambda: dataclasses.asdict(weights)["kl"]), lambda: setattr(weights, "kl", 2.0)


def list_in_a_dataclass(w: World) -> tuple[Callable[..., Any], Change]:
    weights = Weights()
    return w.scaled_step(lambda: sum(weights.inner)), lambda: weights.inner.append(3.0)


def all_attributes_replaced(w: World) -> tuple[Callable[..., Any], Change]:
    weights = Weights()
    return w.scaled_step(lambda: weights.kl), lambda: setattr(weights, "__dict__", {"kl": 2.0, "inner": []})


def all_attributes_of_a_module_replaced(w: World) -> tuple[Callable[..., Any], Change]:
    drop = w.model.drop
    return w.scaled_step(lambda: 1.0), lambda: object.__setattr__(drop, "__dict__", {**vars(drop), "p": 0.5})


class Counted(dict[str, float]):
    """A dict with a ``len`` beyond its number of items."""

    def __len__(self) -> int:
        return 2 * super().__len__()


def dict_of_another_length(w: World) -> tuple[Callable[..., Any], Change]:
    weights = Counted(kl=1.0)
    return w.scaled_step(lambda: weights["kl"]), lambda: weights.update(kl=2.0)


def frozen_dataclass_replaced(w: World) -> tuple[Callable[..., Any], Change]:
    holder = types.SimpleNamespace(weights=Fixed())
    return w.scaled_step(lambda: holder.weights.kl), lambda: setattr(holder, "weights", Fixed(2.0))


def slots(w: World) -> tuple[Callable[..., Any], Change]:
    weights = Slotted()
    return w.scaled_step(lambda: weights.kl), lambda: setattr(weights, "kl", 2.0)


class Annealed:
    floor = 0.5

    def __init__(self) -> None:
        self.step = 0

    @property
    def beta(self) -> float:
        return self.floor + self.step / 10

    @staticmethod
    def bonus() -> float:
        return FACTOR

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.beta * self.bonus()


def behind_a_property(w: World) -> tuple[Callable[..., Any], Change]:
    annealed = Annealed()
    return w.scaled_step(lambda: annealed.beta), lambda: setattr(annealed, "step", 3)


def callable_object(w: World) -> tuple[Callable[..., Any], Change]:
    loss = Annealed()
    return (lambda x: w.update(loss(w.model(x).square().mean()))), lambda: setattr(loss, "step", 3)


def class_attribute(w: World) -> tuple[Callable[..., Any], Change]:
    class Mine(Annealed):
        floor = 0.5

    loss = Mine()
    return (lambda x: w.update(loss(w.model(x).square().mean()))), lambda: setattr(Mine, "floor", 2.0)


def class_method_replaced(w: World) -> tuple[Callable[..., Any], Change]:
    class Mine(Annealed):
        pass

    loss = Mine()
    return (lambda x: w.update(loss(w.model(x).square().mean()))), lambda: setattr(Mine, "bonus", lambda self: 3.0)


def attribute_of_the_models_class(w: World) -> tuple[Callable[..., Any], Change]:
    class Other(Net):
        pass

    w.model.__class__ = Other
    return w.plain, lambda: setattr(Other, "temperature", 2.0)


def another_class(w: World) -> tuple[Callable[..., Any], Change]:
    class Other(Net):
        def shape(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return w.plain, lambda: setattr(w.model, "__class__", Other)


def closure_number(w: World) -> tuple[Callable[..., Any], Change]:
    beta = 1.0

    def step(x: torch.Tensor) -> Any:
        return w.update(w.model(x).square().mean() * beta)

    def change() -> None:
        nonlocal beta
        beta = 2.0

    return step, change


def closure_of_a_helper(w: World) -> tuple[Callable[..., Any], Change]:
    beta = 1.0

    def helper(loss: torch.Tensor) -> torch.Tensor:
        return loss * beta

    def change() -> None:
        nonlocal beta
        beta = 2.0

    return (lambda x: w.update(helper(w.model(x).square().mean()))), change


def rebound_function(w: World) -> tuple[Callable[..., Any], Change]:
    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    def step(x: torch.Tensor) -> Any:
        return w.update(loss_of(w.model(x)))

    def change() -> None:
        nonlocal loss_of

        def loss_of(y: torch.Tensor) -> torch.Tensor:
            return y.abs().mean()

    return step, change


def global_number(w: World) -> tuple[Callable[..., Any], Change]:
    return w.scaled_step(lambda: FACTOR), lambda: globals().update(FACTOR=2.0)


def reads_global() -> float:
    return FACTORS[1] * SETTINGS.scale


def global_list_of_a_helper(w: World) -> tuple[Callable[..., Any], Change]:
    return w.scaled_step(reads_global), lambda: FACTORS.__setitem__(1, 4.0)


def global_namespace_of_a_helper(w: World) -> tuple[Callable[..., Any], Change]:
    return w.scaled_step(reads_global), lambda: setattr(SETTINGS, "scale", 4.0)


def global_of_another_module(w: World) -> tuple[Callable[..., Any], Change]:
    return w.scaled_step(lambda: sys.modules[__name__].FACTOR), lambda: globals().update(FACTOR=3.0)


def context_variable(w: World) -> tuple[Callable[..., Any], Change]:
    return w.scaled_step(CHOSEN.get), lambda: CHOSEN.set(2.0)


def default_argument(w: World) -> tuple[Callable[..., Any], Change]:
    def step(x: torch.Tensor, beta: float = 1.0) -> Any:
        return w.update(w.model(x).square().mean() * beta)

    return step, lambda: setattr(step, "__defaults__", (2.0,))


def mutable_default(w: World) -> tuple[Callable[..., Any], Change]:
    schedule = [1.0]

    def step(x: torch.Tensor, betas: list[float] = schedule) -> Any:
        return w.update(w.model(x).square().mean() * betas[0])

    return step, lambda: schedule.__setitem__(0, 2.0)


def attribute_of_the_step(w: World) -> tuple[Callable[..., Any], Change]:
    def step(x: torch.Tensor) -> Any:
        return w.update(w.model(x).square().mean() * step.beta)  # type: ignore[attr-defined]

    step.beta = 1.0  # type: ignore[attr-defined]
    return step, lambda: setattr(step, "beta", 2.0)


def partial_argument(w: World) -> tuple[Callable[..., Any], Change]:
    loss = functools.partial(F.smooth_l1_loss, beta=1.0)

    def step(x: torch.Tensor) -> Any:
        return w.update(loss(w.model(x), torch.ones(6, 1)))

    return step, lambda: loss.keywords.update(beta=0.1)


def nested_dict(w: World) -> tuple[Callable[..., Any], Change]:
    config = {"loss": {"kl": {"weight": 1.0}}}
    return w.scaled_step(lambda: config["loss"]["kl"]["weight"]), lambda: config["loss"]["kl"].update(weight=2.0)


def new_key(w: World) -> tuple[Callable[..., Any], Change]:
    config: dict[str, float] = {}
    return w.scaled_step(lambda: config.get("kl", 1.0)), lambda: config.update(kl=2.0)


def all_items_of_a_large_dict(w: World) -> tuple[Callable[..., Any], Change]:
    config = {f"weight{k}": 0.01 for k in range(100)}
    return w.scaled_step(lambda: sum(config.values())), lambda: config.update(weight70=2.0)


def numbers_as_keys(w: World) -> tuple[Callable[..., Any], Change]:
    schedule = dict.fromkeys(range(100), 1.0)
    return w.scaled_step(lambda: schedule[7]), lambda: schedule.update({7: 2.0})


class AttributeDict(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


def items_as_attributes(w: World) -> tuple[Callable[..., Any], Change]:
    config = AttributeDict(kl=1.0, more=AttributeDict(tv=1.0))
    return w.scaled_step(lambda: config.kl * config.more.tv), lambda: config.more.update(tv=2.0)


def named_tuple(w: World) -> tuple[Callable[..., Any], Change]:
    Pair = collections.namedtuple("Pair", "one other")
    holder = types.SimpleNamespace(pair=Pair(1.0, 2.0))
    return w.scaled_step(lambda: holder.pair.other), lambda: setattr(holder, "pair", Pair(1.0, 3.0))


def a_set(w: World) -> tuple[Callable[..., Any], Change]:
    on = {"kl"}
    return w.scaled_step(lambda: 2.0 if "tv" in on else 1.0), lambda: on.add("tv")


def a_deque(w: World) -> tuple[Callable[..., Any], Change]:
    last = collections.deque([1.0, 2.0], maxlen=2)
    return w.scaled_step(lambda: last[0]), lambda: last.append(3.0)


def numpy_schedule(w: World) -> tuple[Callable[..., Any], Change]:
    betas = np.linspace(1.0, 2.0, 8)
    return w.scaled_step(lambda: float(betas[3])), lambda: betas.__setitem__(3, 5.0)


class Mode(enum.Enum):
    WARM = "warm"
    HOT = "hot"


def an_enum(w: World) -> tuple[Callable[..., Any], Change]:
    holder = types.SimpleNamespace(mode=Mode.WARM)
    return w.scaled_step(lambda: 1.0 if holder.mode is Mode.WARM else 3.0), lambda: setattr(holder, "mode", Mode.HOT)


def not_a_number(w: World) -> tuple[Callable[..., Any], Change]:
    holder = types.SimpleNamespace(limit=float("nan"))

    def step(x: torch.Tensor) -> Any:
        loss = w.model(x).square().mean()
        return w.update(loss if holder.limit != holder.limit else loss * holder.limit)

    return step, lambda: setattr(holder, "limit", 2.0)


def learning_rate_in_the_loss(w: World) -> tuple[Callable[..., Any], Change]:
    return (
        w.scaled_step(lambda: 1 + w.optimizer.param_groups[0]["lr"]),
        lambda: w.optimizer.param_groups[0].update(lr=0.5),
    )


def custom_setting(w: World) -> tuple[Callable[..., Any], Change]:
    w.optimizer.param_groups[0]["penalty"] = 1.0
    return (
        w.scaled_step(lambda: w.optimizer.param_groups[0]["penalty"]),
        lambda: w.optimizer.param_groups[0].update(penalty=2.0),
    )


def scheduler(w: World) -> tuple[Callable[..., Any], Change]:
    decay = torch.optim.lr_scheduler.StepLR(w.optimizer, 1, 0.5)
    return w.scaled_step(lambda: 1 + decay.last_epoch), decay.step


def state_of_the_optimizer(w: World) -> tuple[Callable[..., Any], Change]:
    return w.scaled_step(lambda: 2.0 if len(w.optimizer.state) else 1.0), lambda: None


def patched_function(w: World) -> tuple[Callable[..., Any], Change]:
    mine = types.ModuleType("mine")
    exec("def gain():\n    return 1.0\n", vars(mine))
    return w.scaled_step(lambda: mine.gain()), lambda: setattr(mine, "gain", lambda: 2.0)  # noqa: PLW0108 - it is rebound


def patched_builtin(w: World) -> tuple[Callable[..., Any], Change]:
    space: dict[str, Any] = {"w": w, "__name__": "apart"}
    exec("def step(x):\n    return w.update(w.model(x).square().mean() * max(1.0, 2.0))\n", space)
    return space["step"], lambda: space.update(max=min)


def attribute_of_an_adapter(w: World) -> tuple[Callable[..., Any], Change]:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.scaling = base, {"default": 1.0}
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.base(x)
            for name in self.scaling:
                out = out + self.up(self.down(x)) * self.scaling[name]
            return out

    w.model.last = adapted = Adapted(w.model.last)  # type: ignore[assignment]
    return w.plain, lambda: adapted.scaling.update(default=4.0)


def attribute_of_a_parameter(w: World) -> tuple[Callable[..., Any], Change]:
    w.model.last.weight.gain = 1.0  # type: ignore[attr-defined]
    return w.scaled_step(lambda: w.model.last.weight.gain), lambda: setattr(w.model.last.weight, "gain", 2.0)


def thread_local(w: World) -> tuple[Callable[..., Any], Change]:
    local = threading.local()
    local.beta = 1.0
    return w.scaled_step(lambda: local.beta), lambda: setattr(local, "beta", 2.0)


def environment(w: World) -> tuple[Callable[..., Any], Change]:
    os.environ["SCALE_OF_A_TEST"] = "1.0"
    return w.scaled_step(lambda: float(os.environ["SCALE_OF_A_TEST"])), lambda: os.environ.update(SCALE_OF_A_TEST="2.0")


def chained_maps(w: World) -> tuple[Callable[..., Any], Change]:
    defaults, overrides = {"beta": 1.0}, dict[str, float]()
    config = collections.ChainMap(overrides, defaults)
    return w.scaled_step(lambda: config["beta"]), lambda: overrides.update(beta=2.0)


def chosen_by_name(w: World) -> tuple[Callable[..., Any], Change]:
    losses = {"square": torch.square, "abs": torch.abs}
    chosen = ["square"]
    return (lambda x: w.update(losses[chosen[0]](w.model(x)).mean())), lambda: chosen.__setitem__(0, "abs")


def weights_chosen_by_closure(w: World) -> tuple[Callable[..., Any], Change]:
    regularised = w.model.first.weight

    def change() -> None:
        nonlocal regularised
        regularised = w.model.last.weight

    return (lambda x: w.update(w.model(x).square().mean() + regularised.square().sum())), change


def weights_chosen_by_attribute(w: World) -> tuple[Callable[..., Any], Change]:
    holder = types.SimpleNamespace(weight=w.model.first.weight)
    return (
        lambda x: w.update(w.model(x).square().mean() + holder.weight.square().sum()),
        lambda: setattr(holder, "weight", w.model.last.weight),
    )


def modules_swapped(w: World) -> tuple[Callable[..., Any], Change]:
    def change() -> None:
        w.model.drop, w.model.act = w.model.act, w.model.drop  # type: ignore[assignment]

    return w.plain, change


def decorated_step(w: World) -> tuple[Callable[..., Any], Change]:
    scale = 1.0

    @torch.enable_grad()
    def step(x: torch.Tensor) -> Any:
        return w.update(w.model(x).square().mean() * scale)

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return functools.partial(step), change


def method_of_an_object(w: World) -> tuple[Callable[..., Any], Change]:
    class Trainer:
        beta = 1.0

        def __init__(self) -> None:
            self.extra = [1.0]

        def step(self, x: torch.Tensor) -> Any:
            return w.update(w.model(x).square().mean() * self.beta * self.extra[0])

    trainer = Trainer()
    return trainer.step, lambda: trainer.extra.__setitem__(0, 3.0)


CASES: dict[str, Case] = {
    "dropout": set_attribute("drop.p", 0.75),
    "no dropout": set_attribute("drop.p", 0.0),
    "slope": set_attribute("act.negative_slope", 0.5),
    "momentum of norm": set_attribute("norm.momentum", 0.5),
    "eps of norm": set_attribute("norm.eps", 0.1),
    "attribute of the model": set_attribute("scale", 3.0),
    "list of the model": model_change(lambda m: m.weights.__setitem__(0, 2.0)),
    "dict of the model": model_change(lambda m: m.config.update(gain=2.0)),
    "dict inside": model_change(lambda m: m.config["inner"].update(shift=1.0)),
    "dict replaced": model_change(lambda m: setattr(m, "config", {"gain": 3.0, "inner": {"shift": 0.0}})),
    "attribute that shadows": set_attribute("temperature", 2.0),
    "method replaced": model_change(new_method),
    "forward replaced": model_change(lambda m: setattr(m.drop, "forward", lambda x: x * 2)),
    "module replaced": model_change(lambda m: setattr(m, "act", nn.Tanh())),
    "forward hook": model_change(lambda m: m.last.register_forward_hook(double_output)),
    "forward pre-hook": model_change(lambda m: m.last.register_forward_pre_hook(lambda _, args: (args[0] * 2,))),
    "backward hook": model_change(backward_hook),
    "hook on a tensor": model_change(hook_on_tensor),
    "hook after accumulation": model_change(hook_after_accumulation),
    "learning rate": optimizer_change(lambda o: o.param_groups[0].update(lr=0.1)),
    "weight decay": optimizer_change(lambda o: o.param_groups[0].update(weight_decay=0.3)),
    **{
        case.__name__.replace("_", " "): case
        for case in (
            *(cleared_hooks, replaced_hook, hook_with_state, namespace, namespace_as_dict, attribute_by_computed_name),
            *(new_attribute, a_dataclass, fields_of_a_dataclass, list_in_a_dataclass),
            *(frozen_dataclass_replaced, slots, behind_a_property, callable_object, class_attribute),
            *(class_method_replaced, attribute_of_the_models_class, another_class, closure_number),
            *(closure_of_a_helper, rebound_function, global_number, global_list_of_a_helper),
            *(global_namespace_of_a_helper, global_of_another_module, context_variable, default_argument),
            *(mutable_default, attribute_of_the_step, partial_argument, nested_dict, new_key),
            *(all_items_of_a_large_dict, numbers_as_keys, items_as_attributes, named_tuple, a_set, a_deque),
            *(numpy_schedule, an_enum, not_a_number, learning_rate_in_the_loss, custom_setting, scheduler),
            *(state_of_the_optimizer, patched_function, patched_builtin, attribute_of_an_adapter),
            *(method_of_an_object, decorated_step, attribute_of_a_parameter, thread_local, environment, chained_maps),
            *(all_attributes_replaced, all_attributes_of_a_module_replaced, dict_of_another_length),
            *(chosen_by_name, weights_chosen_by_closure, weights_chosen_by_attribute, modules_swapped),
        )
    },
}


def run_case(case: Case, *, cache: Path | None = None) -> list[Any]:
    """Return four losses with a change after the second, and the final model; compiled if there is a cache."""
    world = World()
    step, change = case(world)
    if cache is not None:
        step = outofcore.compile(step, world.model, world.optimizer, budget="8MiB", home="host", cache=cache)
    torch.manual_seed(1)
    losses: list[Any] = [step(world.x).item() for _ in range(2)]
    change()
    losses += [step(world.x).item() for _ in range(2)]
    if cache is not None:
        step.close()  # type: ignore[attr-defined]
    return [*losses, *(tensor.tolist() for tensor in world.model.state_dict().values())]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


def run_isolated(case: Case, change: bool = True, cache: Path | None = None) -> list[Any]:
    before, factors, scale = FACTOR, list(FACTORS), SETTINGS.scale
    CHOSEN.set(1.0)
    try:
        return run_case(case if change else lambda w: (case(w)[0], lambda: None), cache=cache)
    finally:
        globals().update(FACTOR=before)
        FACTORS[:], SETTINGS.scale = factors, scale


@pytest.mark.parametrize("name", CASES)
def test_change_between_two_calls_is_seen(name: str, cache: Path) -> None:
    plain = run_isolated(CASES[name])
    assert run_isolated(CASES[name], cache=cache) == plain
    if name != "state of the optimizer":
        assert run_isolated(CASES[name], change=False) != plain  # otherwise the change has no effect to detect


def counter_in_a_list(w: World) -> tuple[Callable[..., Any], Any]:
    count = [0]

    def note() -> None:
        count[0] += 1

    return note, count


def counter_in_a_dict(w: World) -> tuple[Callable[..., Any], Any]:
    count = {"n": 0}

    def note() -> None:
        count["n"] += 1

    return note, count


def counter_on_an_object(w: World) -> tuple[Callable[..., Any], Any]:
    holder = types.SimpleNamespace(n=0)

    def note() -> None:
        holder.n += 1

    return note, holder


def counter_on_the_model(w: World) -> tuple[Callable[..., Any], Any]:
    def note() -> None:
        w.model.calls += 1

    return note, lambda: w.model.calls


def nonlocal_counter(w: World) -> tuple[Callable[..., Any], Any]:
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    return note, lambda: count


COUNT = 0


def global_counter(w: World) -> tuple[Callable[..., Any], Any]:
    globals().update(COUNT=0)

    def note() -> None:
        global COUNT  # noqa: PLW0603 - the tested effect
        COUNT += 1

    return note, lambda: COUNT


def counter_of_a_class(w: World) -> tuple[Callable[..., Any], Any]:
    class Counted:
        n = 0

    def note() -> None:
        Counted.n += 1

    return note, lambda: Counted.n


def growing_list(w: World) -> tuple[Callable[..., Any], Any]:
    history: list[int] = []
    return (lambda: history.append(len(history))), history


def growing_set(w: World) -> tuple[Callable[..., Any], Any]:
    numbers: set[int] = set()
    return (lambda: numbers.add(len(numbers))), numbers


def full_deque(w: World) -> tuple[Callable[..., Any], Any]:
    last = collections.deque([0], maxlen=3)
    return (lambda: last.append(last[-1] + 1)), last


def counter_of_the_step_object(w: World) -> tuple[Callable[..., Any], Any]:
    class Counting:
        def __init__(self) -> None:
            self.inner = {"calls": [0, 0]}

        def __call__(self) -> None:
            self.inner["calls"][1] += 1

    counting = Counting()
    return counting, counting.inner


def item_set_to_the_same(w: World) -> tuple[Callable[..., Any], Any]:
    last: dict[str, Any] = {}
    return (lambda: last.update(shape=(6, 8), mode="train")), last


def write_only_attribute(w: World) -> tuple[Callable[..., Any], Any]:
    holder = types.SimpleNamespace()

    def note() -> None:
        holder.name = "step"

    return note, holder


EFFECTS = (
    *(counter_in_a_list, counter_in_a_dict, counter_on_an_object, counter_on_the_model, nonlocal_counter),
    *(global_counter, counter_of_a_class, growing_list, growing_set, full_deque, counter_of_the_step_object),
    *(item_set_to_the_same, write_only_attribute),
)


def record_effects(effect: Callable[[World], tuple[Callable[..., Any], Any]], cache: Path | None) -> list[Any]:
    world = World()
    run_effect, effect_state = effect(world)

    def step(x: torch.Tensor) -> torch.Tensor:
        run_effect()
        return world.plain(x)

    run: Any = step
    if cache is not None:
        run = outofcore.compile(step, world.model, world.optimizer, budget="8MiB", home="host", cache=cache)
    torch.manual_seed(1)
    results: list[Any] = []
    for _ in range(6):
        results.append((run(world.x).item(), copy.deepcopy(effect_state() if callable(effect_state) else effect_state)))
    if cache is not None:
        run.close()
    return results


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__name__)
def test_python_side_effects_happen_in_each_call(effect: Any, cache: Path) -> None:
    assert record_effects(effect, cache) == record_effects(effect, None)


def test_step_with_ever_changing_values_runs_as_an_eager_loop(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outofcore")
    world, args = World(), argparse.Namespace(beta=1.0, steps=0)
    step = world.scaled_step(lambda: args.beta)
    with outofcore.compile(step, world.model, world.optimizer, budget="8MiB", home="host", cache=cache) as compiled:
        for k in range(6):
            args.beta, args.steps = 1.0 + k, k
            compiled(world.x)
        assert "args.beta changed from" in compiled.stats.eager_reason
        assert "steps" not in compiled.stats.eager_reason
        assert [r.message for r in caplog.records if "running as an eager loop from now on: args.beta" in r.message]


def test_plan_is_reused_when_only_a_number_changes(cache: Path) -> None:
    world, args = World(), argparse.Namespace(beta=1.0, unread=0)
    step = world.scaled_step(lambda: args.beta)
    with outofcore.compile(step, world.model, world.optimizer, budget="8MiB", home="host", cache=cache) as compiled:
        compiled(world.x)
        captured = compiled.captured
        args.unread = 5
        compiled(world.x)
        assert compiled.captured is captured
        planned, args.beta = compiled.planned, 2.0
        compiled(world.x)
        assert compiled.captured is not captured
        assert compiled.planned is planned
        args.beta = 1.0
        compiled(world.x)
        assert compiled.captured is captured  # the first capture, again
        assert not compiled.stats.eager_reason


def test_step_with_an_uncapturable_hook_is_exact(cache: Path) -> None:
    def run(cache: Path | None) -> list[float]:
        world, sums = World(), list[float]()
        step: Any = world.plain
        if cache is not None:
            step = outofcore.compile(step, world.model, world.optimizer, budget="8MiB", home="host", cache=cache)
        torch.manual_seed(1)
        step(world.x)
        world.model.last.register_forward_hook(lambda module, args, output: sums.append(output.sum().item()))
        return [step(world.x).item() for _ in range(2)] + sums

    assert run(cache) == run(None)


@pytest.mark.parametrize("draw", ["python", "numpy", "iterator", "generator"])
def test_random_sources_and_iterators_are_refused(draw: str) -> None:
    world = World()
    source: Any = {
        "python": random.Random(0).random,
        "numpy": np.random.default_rng(0).random,
        "iterator": iter([1.0, 2.0, 3.0]).__next__,
        "generator": (float(k) for k in range(5)).__next__,
    }[draw]
    step = outofcore.compile(
        world.scaled_step(source), world.model, world.optimizer, budget="8MiB", home="host", cache=False
    )
    with pytest.raises(outofcore.CaptureError, match="takes numbers or items from"):
        step(world.x)
    if draw in ("python", "numpy"):
        assert source() == {"python": random.Random(0), "numpy": np.random.default_rng(0)}[draw].random()


def test_step_with_too_many_readable_values_runs_as_an_eager_loop(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST", replace(snapshot._MOST, entries=10))
    world = World()
    with outofcore.compile(world.plain, world.model, world.optimizer, budget="8MiB", home="host", cache=cache) as step:
        for _ in range(4):
            step(world.x)
        assert "can read more than" in step.stats.eager_reason


def test_draws_outside_the_step_do_not_capture_again(cache: Path) -> None:
    world, holder = World(), types.SimpleNamespace(rng=random.Random(0), draws=False)
    step = world.scaled_step(lambda: holder.rng.random() if holder.draws else 1.0)
    with outofcore.compile(step, world.model, world.optimizer, budget="8MiB", home="host", cache=cache) as compiled:
        compiled(world.x)
        captured = compiled.captured
        for _ in range(4):
            holder.rng.random()
            compiled(world.x)
        assert compiled.captured is captured


def test_profiler_stays_active_after_a_failed_capture(cache: Path) -> None:
    events = list[str]()

    def note(frame: Any, event: str, arg: Any) -> None:
        events.append(event)

    world = World()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with outofcore.compile(world.plain, world.model, budget="8MiB", home="host", cache=cache) as step:
            with pytest.raises(outofcore.CaptureError):  # the optimizer was not passed
                step(world.x)
            assert sys.getprofile() is note
    finally:
        sys.setprofile(before)
    assert events
