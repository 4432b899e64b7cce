"""Tests that refusals name the user's line in one traceback without internal frames."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_world import World
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

import outofcore
from outofcore.errors import CaptureError, InputError

MakeStep = Callable[[World], Callable[[torch.Tensor], Any]]


def store_on_module(w: World) -> Any:
    def step(x: torch.Tensor) -> None:
        loss = w.learn(x)
        w.model.hidden = loss  # here

    return step


def append_to_list(w: World) -> Any:
    def step(x: torch.Tensor) -> None:
        loss = w.learn(x)
        w.model.kept.append(loss)  # here

    return step


def change_rate(w: World) -> Any:
    def step(x: torch.Tensor) -> None:
        w.learn(x)
        w.optimizer.param_groups[0]["lr"] = 0.5  # here

    return step


def replace_parameter(w: World) -> Any:
    def step(x: torch.Tensor) -> None:
        w.learn(x)
        w.model.linear.weight = nn.Parameter(torch.ones(3, 4))  # here

    return step


def draw_number(w: World) -> Any:
    def step(x: torch.Tensor) -> None:
        w.learn(x * random.random())  # here

    return step


def read_value(w: World) -> Any:
    def step(x: torch.Tensor) -> None:
        if w.learn(x) > 0:  # here
            raise ValueError

    return step


@pytest.mark.parametrize(
    "make", [store_on_module, append_to_list, change_rate, replace_parameter, draw_number, read_value]
)
def test_refusal_names_the_line_in_one_traceback(make: MakeStep) -> None:
    world = World()
    with pytest.raises(CaptureError) as error:
        world.capture(make(world))
    code = make.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    here = next(n for n, line in enumerate(lines, 1) if n >= code.co_firstlineno and "# here" in line)
    assert error.value.location == f"{__file__}:{here}"
    assert str(error.value).startswith(f"{__file__}:{here}: ")
    text = "".join(traceback.format_exception(error.value))
    assert text.count("Traceback") == 1
    assert "recorder.py" not in text
    assert "substitute.py" not in text


def test_tensor_from_outside_is_named() -> None:
    world = World()
    average = AveragedModel(world.model)

    def step(x: torch.Tensor) -> None:
        world.learn(x)
        average.update_parameters(world.model)

    with pytest.raises(CaptureError, match=r"from outside, average\.n_averaged"):
        world.capture(step)


def test_model_in_place_of_the_step_is_refused() -> None:
    world = World()
    with pytest.raises(InputError, match="first argument must be the training function, and is the model: write"):
        outofcore.compile(world.model, world.optimizer, budget="1GiB")  # type: ignore[arg-type]


def averaging(average_of: Callable[[nn.Module], AveragedModel]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    average = average_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss

    return [model, average], optimizer, step


@pytest.mark.parametrize(
    "average_of",
    [
        AveragedModel,
        lambda model: AveragedModel(model, avg_fn=get_swa_avg_fn(), use_buffers=True),
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    ],
    ids=["mean", "mean with buffers", "moving"],
)
def test_averaged_model_is_updated_within_the_step(average_of: Callable[[nn.Module], AveragedModel]) -> None:
    models, optimizer, step = averaging(average_of)
    plain_models, _, plain = averaging(average_of)
    compiled = outofcore.compile(step, models, optimizer, budget="64MiB")
    for _ in range(4):
        x = torch.randn(16, 8)
        assert torch.equal(compiled(x), plain(x))
        for actual, expected in zip(
            models[1].state_dict().values(), plain_models[1].state_dict().values(), strict=True
        ):
            assert torch.equal(actual, expected)
    compiled.close()
