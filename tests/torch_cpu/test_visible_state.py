"""Tests of state between steps: it is read, changed, saved and restored as in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import outofcore
from outofcore.errors import InputError, StateError
from outofcore.units import KIB


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def batch(number: int) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(number))


@pytest.fixture(params=some_of(["smallest", "halfway", "all"], ["smallest", "all"]))
def pair(request: pytest.FixtureRequest) -> Any:
    """Return (model, optimizer, step) in plain PyTorch, and the same under a budget."""
    model, optimizer, step = make()
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(batch(0),), split="off")
    budget = {"smallest": smallest, "halfway": 2 * smallest, "all": 1 << 30}[request.param]
    with outofcore.compile(step, model, optimizer, budget=budget, dynamic=False) as compiled:
        yield make(), (model, optimizer, compiled)


def both(pair: Any, act: Callable[..., Any]) -> tuple[Any, Any]:
    results = []
    for side in pair:
        torch.manual_seed(99)
        results.append(act(*side))
    return results[0], results[1]


def assert_alike(pair: Any) -> None:
    (plain, plain_optimizer, _), (model, optimizer, _) = pair
    for key, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    theirs, ours = plain_optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    assert theirs.keys() == ours.keys()
    for number, entries in theirs.items():
        for name, tensor in entries.items():
            assert torch.equal(ours[number][name], tensor), (number, name)


def train(pair: Any, steps: range) -> None:
    def act(model: nn.Module, optimizer: Any, step: Any) -> list[float]:
        return [float(step(batch(k))) for k in steps]

    ours, theirs = both(pair, act)
    assert ours == theirs


def test_state_is_up_to_date_after_every_step(pair: Any) -> None:
    for k in range(4):
        train(pair, range(k, k + 1))
        assert_alike(pair)


def test_evaluation_between_steps_is_exact(pair: Any) -> None:
    train(pair, range(2))

    def evaluate(model: nn.Module, optimizer: Any, step: Any) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            result = model(batch(7))
        model.train()
        return result

    ours, theirs = both(pair, evaluate)
    assert torch.equal(ours, theirs)
    train(pair, range(2, 4))
    assert_alike(pair)


def test_in_place_changes_are_seen(pair: Any) -> None:
    train(pair, range(2))

    def change(model: Any, optimizer: Any, step: Any) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[4].weight.data.add_(0.25)
            model[1].running_mean.zero_()
            optimizer.state[model[0].weight]["exp_avg"].zero_()

    both(pair, change)
    assert_alike(pair)
    train(pair, range(2, 4))
    assert_alike(pair)


def test_replaced_data_is_used_by_the_next_step(pair: Any) -> None:
    train(pair, range(2))

    def change(model: Any, optimizer: Any, step: Any) -> None:
        model[0].weight.data = torch.full_like(model[0].weight, 0.01)

    both(pair, change)
    train(pair, range(2, 4))
    assert_alike(pair)


def test_storage_of_a_replaced_parameter_stays_allocated(pair: Any) -> None:
    """Replaced parameters are detected by address, so the address must not be reused."""
    train(pair, range(2))
    for parameter in pair[1][0].parameters():
        shown = StorageWeakRef(parameter.untyped_storage())
        parameter.data = parameter.data.clone()
        # Small tensors may be stored outside of the arena, where no mix-up is possible.
        assert parameter.nbytes < 64 * KIB or not shown.expired()
    train(pair, range(2, 4))
    assert_alike(pair)


def test_aliases_show_the_current_values(pair: Any) -> None:
    train(pair, range(1))
    aliases = [side[0][0].weight.detach() for side in pair]
    train(pair, range(1, 4))
    assert torch.equal(aliases[0], aliases[1])


def test_state_dicts_are_saved_and_loaded(pair: Any) -> None:
    train(pair, range(2))

    def save(model: Any, optimizer: Any, step: Any) -> bytes:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    saved = both(pair, save)
    train(pair, range(2, 4))
    for side, data in zip(pair, saved, strict=True):
        checkpoint = torch.load(io.BytesIO(data))
        side[0].load_state_dict(checkpoint["model"])
        side[1].load_state_dict(checkpoint["optimizer"])
    assert_alike(pair)
    train(pair, range(2, 5))
    assert_alike(pair)


def test_model_can_be_copied(pair: Any) -> None:
    train(pair, range(2))
    ours, theirs = both(pair, lambda model, optimizer, step: copy.deepcopy(model))
    train(pair, range(2, 3))
    for expected, actual in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_learning_rate_changes_do_not_capture_again(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(side[1], T_max=6) for side in pair]
    caplog.set_level("INFO", logger="outofcore")
    for k in range(4):
        train(pair, range(k, k + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert_alike(pair)
    assert not [r for r in caplog.records if "captur" in r.message]


def test_eval_and_train_switches_are_noticed(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outofcore")
    train(pair, range(2))
    for side in pair:
        side[0][1].eval()
    train(pair, range(2, 4))
    for side in pair:
        side[0][1].train()
    train(pair, range(4, 6))
    assert_alike(pair)
    captures = [r.message for r in caplog.records if r.message.startswith("capturing again")]
    assert len(captures) == 1
    assert "eval" in captures[0]


def test_frozen_parameter_is_noticed(pair: Any) -> None:
    train(pair, range(2))
    for side in pair:
        side[0][0].weight.requires_grad_(False)
    train(pair, range(2, 4))
    for side in pair:
        side[0][0].weight.requires_grad_(True)
    train(pair, range(4, 6))
    assert_alike(pair)


def test_smaller_last_batch_is_noticed(pair: Any) -> None:
    train(pair, range(2))
    ours, theirs = both(pair, lambda model, optimizer, step: step(batch(5)[:7]))
    assert torch.equal(ours, theirs)
    train(pair, range(2, 4))
    assert_alike(pair)


collected = 0


def count_collection(phase: str, info: dict[str, int]) -> None:
    global collected  # noqa: PLW0603
    collected = collected + 1


def test_garbage_collector_callback_is_not_captured(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outofcore")
    threshold = gc.get_threshold()
    gc.callbacks.append(count_collection)
    gc.set_threshold(1)  # so that it runs while the step is captured
    try:
        train(pair, range(4))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(count_collection)
    assert collected
    assert gc.isenabled()
    assert_alike(pair)
    assert not messages(caplog, "capturing again")


def messages(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(start)]


def test_reason_for_capturing_again_is_logged(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outofcore")
    train(pair, range(1))

    def change(act: Callable[[Any, Any], Any]) -> None:
        for side in pair:
            act(side[0], side[1])
        train(pair, range(1, 2))

    change(lambda model, optimizer: model[0].weight.requires_grad_(False))
    change(lambda model, optimizer: optimizer.param_groups[0].update(maximize=True))
    both(pair, lambda model, optimizer, step: step(batch(5)[:7]))
    assert messages(caplog, "capturing again") == [
        "capturing again: model.0.weight is now frozen",
        "capturing again: the settings of an optimizer changed",
        "capturing again: argument 0 changed shape (32, 256) -> (7, 256)",
    ]
    # Other learning rates and weight decays do not capture again.
    caplog.clear()
    change(lambda model, optimizer: None)
    change(lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.3))
    both(pair, lambda model, optimizer, step: step(batch(6)[:7]))
    assert messages(caplog, "capturing again") == []
    assert messages(caplog, "known plan") == [
        "known plan: argument 0 changed shape (7, 256) -> (32, 256)",
        "known plan: argument 0 changed shape (32, 256) -> (7, 256)",
    ]
    assert_alike(pair)


def test_moving_average_can_be_swapped_in(pair: Any) -> None:
    averages = []
    for side in pair:
        averages.append({name: p.detach().clone() for name, p in side[0].named_parameters()})
    for k in range(3):
        train(pair, range(k, k + 1))
        for side, average in zip(pair, averages, strict=True):
            for name, p in side[0].named_parameters():
                average[name].lerp_(p.detach(), 0.1)
    backups = []
    for side, average in zip(pair, averages, strict=True):
        with torch.no_grad():
            backups.append({name: p.clone() for name, p in side[0].named_parameters()})
            for name, p in side[0].named_parameters():
                p.copy_(average[name])

    def evaluate(model: nn.Module, optimizer: Any, step: Any) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            result = model(batch(7))
        model.train()
        return result

    ours, theirs = both(pair, evaluate)
    assert torch.equal(ours, theirs)
    for side, backup in zip(pair, backups, strict=True):
        for name, p in side[0].named_parameters():
            p.data = backup[name]  # restored by assignment
    train(pair, range(3, 5))
    assert_alike(pair)


def test_replaced_parameter_survives_a_change_of_plan(pair: Any) -> None:
    train(pair, range(2))
    for side in pair:
        side[0][0].weight.data = torch.full((256, 256), 0.01)
    ours, theirs = both(pair, lambda model, optimizer, step: step(batch(5)[:7]))
    assert torch.equal(ours, theirs)
    for side in pair:
        side[0][4].weight.data = torch.full((256, 256), 0.02)
    train(pair, range(2, 4))
    assert_alike(pair)


def test_step_state_dict_restores_a_step(pair: Any) -> None:
    train(pair, range(2))
    _, (model, optimizer, step) = pair
    state = copy.deepcopy(step.state_dict())
    backup = copy.deepcopy(state)  # the optimizer goes on to use the loaded tensors, as in plain PyTorch
    train(pair, range(2, 4))
    expected = [p.detach().clone() for p in model.parameters()]
    step.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), state["generator"])
    torch.manual_seed(99)
    for k in range(2, 4):
        step(batch(k))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected, strict=True))
    with pytest.raises(InputError, match="1 models and 0 optimizers"):
        step.load_state_dict({**state, "optimizers": []})
    optimizer.param_groups[0]["betas"] = ("not a number", 0.9)
    with pytest.raises(TypeError):
        step(batch(4))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    step.load_state_dict(backup)
    torch.manual_seed(99)
    for k in range(2, 4):
        step(batch(k))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected, strict=True))


def test_held_results_stay_unchanged(pair: Any) -> None:
    results = both(pair, lambda model, optimizer, step: step(batch(0)))
    values = [float(x) for x in results]
    train(pair, range(1, 4))
    assert [float(x) for x in results] == values


def test_close_returns_the_model_to_plain_pytorch(pair: Any) -> None:
    train(pair, range(2))
    _, (model, _, step) = pair
    step.close()
    assert_alike(pair)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
    with pytest.raises(StateError, match="closed"):
        step(batch(0))


def test_step_continues_after_an_optimizer_error_unless_torn() -> None:
    model, optimizer, step = make()
    compiled = outofcore.compile(step, model, optimizer, budget="1GiB")
    compiled(batch(0))
    group = optimizer.param_groups[0]
    group["betas"] = ("not a number", 0.9)
    with pytest.raises(TypeError):
        compiled(batch(1))
    group["betas"] = (0.9, 0.999)
    compiled(batch(1))
    compiled._session.torn = "TransferError: the disk is gone"
    with pytest.raises(StateError, match="half way"):
        compiled(batch(1))
    compiled.close()  # the caught exception refers to it, which would keep its arena alive
