"""Tests of step signatures: they differ exactly where captures differ, and describe the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outofcore.capture.signature import Signer


class World:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.signer = Signer([self.model], [self.optimizer])
        self.args: tuple[Any, ...] = (torch.ones(2, 3),)


def add_group(w: World) -> None:
    w.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def give_gradient(w: World) -> None:
    w.model[0].bias.grad = torch.zeros(3)


CHANGES: dict[str, tuple[Callable[[World], Any], str]] = {
    "eval": (lambda w: w.model[1].eval(), "model.1 switched to eval"),
    "eval_all": (lambda w: w.model.eval(), "model switched to eval (and 2 more)"),
    "freeze": (lambda w: w.model[0].weight.requires_grad_(False), "model.0.weight is now frozen"),
    "gradient": (give_gradient, "model.0.bias now has a .grad"),
    "module": (lambda w: w.model.append(nn.Linear(3, 3)), "modules, parameters or buffers have been added"),
    "parameter": (lambda w: setattr(w.model[0], "bias", None), "modules, parameters or buffers have been added"),
    "buffer": (lambda w: setattr(w.model[1], "running_mean", torch.zeros(3)), "have been added, removed or replaced"),
    "first_buffer": (lambda w: w.model[0].register_buffer("extra", torch.zeros(3)), "have been added"),
    "group": (add_group, "have been added"),
    "setting": (lambda w: w.optimizer.param_groups[0].update(nesterov=True), "settings of an optimizer"),
    "weight_decay": (lambda w: w.optimizer.param_groups[0].update(weight_decay=0.1), "settings of an optimizer"),
    "momentum": (lambda w: w.optimizer.param_groups[0].update(momentum=0.9), "settings of an optimizer"),
    "default_dtype": (lambda w: torch.set_default_dtype(torch.float64), "the default dtype changed"),
    "deterministic": (lambda w: torch.use_deterministic_algorithms(True), "deterministic algorithms changed"),
}
SAME: dict[str, Callable[[World], Any]] = {
    "nothing": lambda w: None,
    "lr": lambda w: w.optimizer.param_groups[0].update(lr=0.5),
    "lr_zero": lambda w: w.optimizer.param_groups[0].update(lr=0.0),
    "values": lambda w: w.model[0].weight.data.fill_(3),
    "other_batch": lambda w: setattr(w, "args", (torch.zeros(2, 3),)),
    "state": lambda w: w.optimizer.state[w.model[0].weight].update(x=torch.ones(1)),
}


@pytest.fixture(autouse=True)
def _restore_defaults() -> Any:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_detected_and_described(name: str) -> None:
    world = World()
    change, words = CHANGES[name]
    old = world.signer(world.args, {})
    change(world)
    new = world.signer(world.args, {})
    assert new != old
    assert words in world.signer.describe_change(old, new, world.args)


@pytest.mark.parametrize("name", SAME)
def test_irrelevant_change_keeps_the_signature(name: str) -> None:
    world = World()
    old = world.signer(world.args, {})
    SAME[name](world)
    new = world.signer(world.args, {})
    assert new == old
    assert hash(new) == hash(old)
    assert world.signer.describe_change(old, new, world.args) == "nothing"


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.ones(4, 3),), {}, "argument 0 changed shape (2, 3) -> (4, 3)"),
        ((torch.ones(3, 2).t(),), {}, "argument 0 changed strides (3, 1) -> (1, 2)"),
        ((torch.ones(2, 3).double(),), {}, "argument 0 changed dtype torch.float32 -> torch.float64"),
        ((torch.ones(2, 3).requires_grad_(),), {}, "argument 0 changed requires_grad False -> True"),
        ((torch.ones(2, 3), 1), {}, "structure of the arguments changed"),
        (([torch.ones(2, 3)],), {}, "structure of the arguments changed"),
        ((5,), {}, "argument 0 changed from a tensor to 5"),
    ],
)
def test_change_of_arguments_is_described(args: Any, kwargs: Any, words: str) -> None:
    world = World()
    old, new = world.signer(world.args, {}), world.signer(args, kwargs)
    assert old != new
    assert words in world.signer.describe_change(old, new, args, kwargs)


def test_constants_differ_by_type_and_value() -> None:
    world = World()

    def sign(value: Any) -> Any:
        return world.signer((), {"flag": value})

    different = [sign(value) for value in (1, True, 1.0, "1", None, 0, False, float("nan"), torch.float32)]
    assert len(set(different)) == len(different)
    assert sign(float("nan")) == sign(float("nan"))
    words = world.signer.describe_change(sign(1), sign(2), (), {"flag": 2})
    assert words == "argument flag changed from 1 to 2"


def test_strides_and_layout_of_a_gradient_change_the_signature() -> None:
    world = World()
    world.model[0].weight.grad = torch.ones(3, 3)
    old = world.signer(world.args, {})
    world.model[0].weight.grad = torch.ones(3, 3).t()
    new = world.signer(world.args, {})
    assert old != new
    words = world.signer.describe_change(old, new, world.args)
    assert words == "model.0.weight.grad changed strides (3, 1) -> (1, 3)"
    world.model[0].weight.grad = torch.ones(3, 3).to_sparse()
    assert world.signer(world.args, {}) != new


def test_parameter_as_argument_changes_the_signature() -> None:
    world = World()
    weight, copy = world.model[0].weight, nn.Parameter(torch.ones(3, 3))
    old, new = world.signer((copy,), {}), world.signer((weight,), {})
    assert old != new
    assert "became another parameter" in world.signer.describe_change(old, new, (weight,))


def test_signature_includes_autocast_and_grad_mode() -> None:
    world = World()
    plain = world.signer(world.args, {})
    with torch.autocast("cpu", torch.bfloat16):
        half = world.signer(world.args, {})
    with torch.no_grad():
        frozen = world.signer(world.args, {})
    assert len({plain, half, frozen}) == 3
    assert "autocast on the CPU changed from False to True" in world.signer.describe_change(plain, half, world.args)


def test_restored_structure_has_its_old_signature() -> None:
    world = World()
    old = world.signer(world.args, {})
    first, world.model[0] = world.model[0], nn.Linear(3, 3)
    assert world.signer(world.args, {}).structure != old.structure
    world.model[0] = first
    assert world.signer(world.args, {}).structure == old.structure
