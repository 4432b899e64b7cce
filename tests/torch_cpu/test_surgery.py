"""Tests of changes to a model between steps, with a budget and in plain PyTorch: the same bits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from native_threads import thread_names
from sides import Side, act_on_both, batch, build_side, compile_side, is_same, values, visible_tensors
from torch import nn

import outofcore
from outofcore.errors import CaptureError, StateError

SETUPS = ["smallest, one home", "smallest, own homes", "all, one home", "all, own homes"]


@pytest.fixture(params=some_of(SETUPS, ["smallest, one home", "all, own homes"]))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    budget, home = request.param.split(", ")
    ours = compile_side(0, budget=budget, home="disk", shared=home == "one home")
    yield ours, build_side(0)
    for step in ours.steps:
        step.close()


def test_close_leaves_a_cast_model_unchanged(pair: tuple[Side, Side]) -> None:
    act_on_both(pair, lambda side: side.train(batch(0)))
    act_on_both(pair, lambda side: side.model.bfloat16() and None)
    for step in pair[0].steps:
        step.close()
    assert pair[0].weights()[0].dtype is torch.bfloat16
    assert is_same(visible_tensors(pair[0]), visible_tensors(pair[1]))


def test_replaced_data_survives_closing_a_step(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        side.weights()[0].data = values(3).t()
        for step in side.steps[:1]:
            step.close()
        return side.evaluate(batch(1))

    act_on_both(pair, change)


def test_weight_transposed_in_place_is_noticed(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        side.weights()[0].data = side.weights()[0].data.t()
        return side.train(batch(1)), side.evaluate(batch(2))

    act_on_both(pair, change)


def _with_column_major_strides(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("index", [0, 1])
def test_weight_keeps_changed_strides(pair: tuple[Side, Side], index: int) -> None:
    """Kernels depend on strides: some add up in another order for few rows, on some processors."""
    rows = 4

    def change(side: Side) -> Any:
        weight = side.weights()[index]
        results = [side.train(batch(0, rows)), side.gather(batch(1, rows))]
        weight.data = _with_column_major_strides(weight.data)
        results += [side.gather(batch(2, rows)), side.train(batch(3, rows)), side.renew(batch(4, rows))]
        assert weight.stride() == (1, len(weight))
        results.append(side.evaluate(batch(5, rows)))
        weight.data = weight.data.contiguous()
        return [result.detach() for result in (*results, side.train(batch(6, rows)))]

    act_on_both(pair, change)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_optimizer_state_keeps_changed_strides(pair: tuple[Side, Side], name: str) -> None:
    def change(side: Side) -> Any:
        results = [side.train(batch(0))]
        state = side.optimizer.state[side.weights()[0]]
        state[name] = _with_column_major_strides(state[name])
        results += [side.train(batch(number)) for number in range(1, 3)]
        assert state[name].stride() == (1, len(state[name]))
        state[name].data = state[name].data.contiguous()
        return [result.detach() for result in (*results, side.train(batch(3)))]

    act_on_both(pair, change)


def test_gradient_keeps_changed_strides(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        results = []
        for number in range(4):
            results.append(side.gather(batch(number)).detach())
            gradient = side.weights()[0].grad
            assert gradient is not None
            assert gradient.is_contiguous() == (number in (0, 3))
            if number != 1:
                side.weights()[0].grad = _with_column_major_strides(gradient) if number == 0 else gradient.contiguous()
        return results

    act_on_both(pair, change)


def test_gradient_norms_are_exact_when_strides_change(tmp_path: Path) -> None:
    results = []
    for budget in (None, "1MiB"):
        torch.manual_seed(0)
        model = nn.Linear(300, 300)

        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            (model(x) ** 2).mean().backward()
            return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        ours: Any = step if budget is None else outofcore.compile(step, model, budget=budget, home=tmp_path)
        for number in range(12):
            results.append(ours(torch.randn(8, 300, generator=torch.Generator().manual_seed(number))))
            gradient = model.weight.grad
            assert gradient is not None
            model.weight.grad = _with_column_major_strides(gradient) if number % 2 == 0 else gradient.contiguous()
        if budget is not None:
            ours.close()
    assert results[:12] == results[12:]


def test_prepared_steps_are_not_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outofcore")
    side = compile_side(0, budget="smallest", home="disk", shared=True)
    for step in side.steps:
        step.prepare(batch(0))
        step(batch(0))
        step.close()
    assert not [text for text in caplog.messages if "forgotten" in text or "capturing again" in text]


def test_optimizer_state_keeps_strides_changed_after_prepare(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        if side.steps:
            side.steps[0].prepare(batch(1))
        F.mse_loss(side.model(batch(0)), batch(0)).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        state = side.optimizer.state[side.weights()[0]]
        state["exp_avg"] = _with_column_major_strides(state["exp_avg"])
        return side.train(batch(1)).detach()

    act_on_both(pair, change)


@pytest.mark.parametrize("before", ["renew", "evaluate"])
@pytest.mark.parametrize("after", ["train", "gather"])
def test_weight_tied_to_a_new_parameter_stays_tied(pair: tuple[Side, Side], before: str, after: str) -> None:
    def change(side: Side) -> Any:
        results = [getattr(side, before)(batch(0)).detach()]
        side.model[0].weight = nn.Parameter(values(3))
        side.weights()[1].data = side.weights()[0].data
        results += [getattr(side, after)(batch(1)).detach(), side.train(batch(2)).detach()]
        return [*results, side.evaluate(batch(3))]

    act_on_both(pair, change)


def test_restored_parameter_can_be_tied(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        results = [side.evaluate(batch(0))]
        original = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(3))
        results.append(side.evaluate(batch(1)))
        side.model[0].weight = original
        side.weights()[1].data = original.data
        results += [side.evaluate(batch(2)), side.train(batch(3)).detach()]
        return [*results, side.evaluate(batch(4))]

    act_on_both(pair, change)


def test_restored_parameter_keeps_changed_strides(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        results = [side.evaluate(batch(0))]
        original = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(3))
        results.append(side.evaluate(batch(1)))
        original.data = _with_column_major_strides(original.data)
        side.model[0].weight = original
        return [*results, side.evaluate(batch(2)), side.train(batch(3)).detach()]

    act_on_both(pair, change)


def test_restored_parameter_keeps_its_values(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        original = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(4))
        results = [side.evaluate(batch(1)), side.train(batch(2)).detach(), original.detach().clone()]
        side.model[0].weight = original
        return [*results, side.train(batch(3)).detach()]

    act_on_both(pair, change)


def test_layers_can_be_swapped(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        results = []
        for number in (1, 2):
            side.model[0], side.model[3] = side.model[3], side.model[0]
            results += [side.train(batch(number)).detach(), side.evaluate(batch(number))]
        return results

    act_on_both(pair, change)


def test_held_gradients_survive_zero_grad(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.gather(batch(0))
        gradients = [p.grad for p in side.model.parameters()]
        side.model.zero_grad()
        side.gather(batch(1))
        return gradients

    act_on_both(pair, change)


@pytest.mark.parametrize("leave", ["gather", "backward"])
def test_steps_accumulate_into_existing_gradients(pair: tuple[Side, Side], leave: str) -> None:
    def change(side: Side) -> Any:
        results = []
        for number in range(3):
            if leave == "gather":
                side.gather(batch(number))
            else:
                F.mse_loss(side.model(batch(number)), batch(number)).backward()
            results.append(side.train(batch(10 + number)).detach())
        return results

    act_on_both(pair, change)


def test_held_gradients_survive_accumulation_and_clearing(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        gradients = []
        for number in range(3):
            F.mse_loss(side.model(batch(number)), batch(number)).backward()
            gradients.append([p.grad for p in side.model.parameters()])
            side.train(batch(10 + number))
        return gradients

    act_on_both(pair, change)


def test_held_gradients_survive_renewal_by_the_next_step(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        gradients = []
        for number in range(4):
            side.renew(batch(number))
            gradients.append([p.grad for p in side.model.parameters()])
        side.evaluate(batch(4))
        return gradients

    act_on_both(pair, change)


def test_gradients_stay_visible_between_steps(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        results = []
        for number in range(3):
            side.renew(batch(number))
            side.weights()[0].grad.mul_(0.5)
            side.evaluate(batch(number))
            results += [p.grad.clone() for p in side.model.parameters()]
            results.append(side.gather(batch(number)).detach())
            results += [p.grad.clone() for p in side.model.parameters()]
        for step in side.steps:
            step.close()
        return results

    act_on_both(pair, change)


def test_replaced_optimizer_state_stays_unchanged(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        state = side.optimizer.state[side.weights()[0]]
        old, state["exp_avg"] = state["exp_avg"], values(5)
        side.train(batch(1))
        return old

    act_on_both(pair, change)


def test_parameters_can_be_tied_and_untied_by_data(pair: tuple[Side, Side]) -> None:
    def tie(side: Side) -> Any:
        side.train(batch(0))
        first, second = side.weights()
        second.data = first.data
        return side.train(batch(1)).detach(), side.train(batch(2)).detach()

    def untie(side: Side) -> Any:
        second = side.weights()[1]
        second.data = second.data.clone()
        return side.train(batch(3)).detach(), side.train(batch(4)).detach()

    act_on_both(pair, tie)
    act_on_both(pair, untie)


@pytest.mark.parametrize("variant", ["whole", "lines"])
def test_parameter_data_can_be_swapped(pair: tuple[Side, Side], variant: str) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        results = []
        for number in (1, 2):
            first_weight, second_weight = side.weights()
            first, second = first_weight.data, second_weight.data
            if variant == "lines":  # begins at another address, so that overlap is not handled by chance
                second = second.flip(0)
            first_weight.data, second_weight.data = second, first
            results += [side.train(batch(number)).detach(), side.evaluate(batch(number))]
        return results

    act_on_both(pair, change)


def test_optimizer_state_can_be_swapped(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        first, second = (side.optimizer.state[p] for p in side.weights())
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
        results = [side.train(batch(1)).detach()]
        first["exp_avg"].data, second["exp_avg"].data = second["exp_avg"].data, first["exp_avg"].data
        return [*results, side.train(batch(2)).detach()]

    act_on_both(pair, change)


def test_gradients_can_be_swapped(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.gather(batch(0))
        first, second = side.weights()
        first.grad, second.grad = second.grad, first.grad
        side.gather(batch(1))
        assert first.grad is not None
        assert second.grad is not None
        first.grad.data, second.grad.data = second.grad.data, first.grad.data
        side.gather(batch(2))
        return side.train(batch(3)).detach()

    act_on_both(pair, change)


def test_close_keeps_parameters_tied(pair: tuple[Side, Side]) -> None:
    def tie(side: Side) -> Any:
        side.train(batch(0))
        first, second = side.weights()
        second.data = first.data
        for step in side.steps:
            step.close()
        with torch.no_grad():
            first.mul_(2.0)

    act_on_both(pair, tie)


def test_steps_may_be_called_in_inference_mode(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        results = []
        for number in (0, 1):
            with torch.inference_mode():
                results.append(side.evaluate(batch(number)).clone())
            results.append(side.train(batch(number)).detach())
        with torch.no_grad():
            side.weights()[0].mul_(0.5)
        return results

    act_on_both(pair, change)


def test_optimizer_restarts_after_its_state_is_cleared(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        for number in range(3):
            side.train(batch(number))
        side.optimizer.state.clear()
        return side.train(batch(3)).detach(), side.train(batch(4)).detach()

    act_on_both(pair, change)


def test_memory_shared_between_processes_is_refused() -> None:
    side = compile_side(0, budget="all", home="disk", shared=True)
    side.train(batch(0))
    before = side.weights()[0].detach().clone()
    side.model.share_memory()
    with pytest.raises(StateError, match="memory that processes share"):
        side.train(batch(1))
    for step in side.steps:
        step.close()
    assert torch.equal(side.weights()[0], before)
    assert side.weights()[0].is_shared()


def test_unclosed_step_leaves_no_threads_or_open_files() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def threads() -> int:
        names = [*(thread.name for thread in threading.enumerate()), *thread_names().values()]
        return sum(name.startswith("outofcore-") for name in names)

    gc.collect()
    before = threads(), open_files()
    side = build_side(0)
    # Copies to a home run in their own threads.
    step = outofcore.compile(side.train, side.model, side.optimizer, budget="1GiB", policy="offload-all")
    step(batch(0))
    assert threads() > before[0]
    expected = side.weights()[0].detach().clone()
    weight = side.weights()[0]
    del side, step
    gc.collect()
    assert (threads(), open_files()) == before
    assert torch.equal(weight, expected)


def test_step_reading_old_and_leaving_new_gradients_is_refused() -> None:
    side = build_side(0)

    def train(x: torch.Tensor) -> torch.Tensor:
        old = sum((p.grad.abs().sum() for p in side.model.parameters() if p.grad is not None), torch.zeros(()))
        side.optimizer.zero_grad()
        loss = F.mse_loss(side.model(x), x)
        loss.backward()
        side.optimizer.step()
        return loss + old.detach()

    with outofcore.compile(train, side.model, side.optimizer, budget="64MiB") as step:
        step(batch(0))
        before = visible_tensors(side)
        with pytest.raises(CaptureError, match=r"uses the gradient that .* had before the step"):
            step(batch(1))
        assert is_same(visible_tensors(side), before)
        side.optimizer.zero_grad()
        step(batch(1))
