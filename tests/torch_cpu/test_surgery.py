"""What users do to a model between steps, in plain PyTorch and under a budget side by side: the same bits come out."""

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
from sides import Side, alike, batch, both, compiled, everything, plain, values
from torch import nn

import outofcore
from outofcore.errors import CaptureError, StateError

WAYS = ["smallest, one home", "smallest, own homes", "all, one home", "all, own homes"]


@pytest.fixture(params=some_of(WAYS, ["smallest, one home", "all, own homes"]))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    budget, home = request.param.split(", ")
    ours = compiled(0, budget=budget, home="disk", shared=home == "one home")
    yield ours, plain(0)
    for step in ours.steps:
        step.close()


def test_close_leaves_a_cast_model_unchanged(pair: tuple[Side, Side]) -> None:
    both(pair, lambda side: side.train(batch(0)))
    both(pair, lambda side: side.model.bfloat16() and None)
    for step in pair[0].steps:
        step.close()
    assert pair[0].weights()[0].dtype is torch.bfloat16
    assert alike(everything(pair[0]), everything(pair[1]))


def test_replaced_data_survives_closing_a_step(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        side.weights()[0].data = values(3).t()
        for step in side.steps[:1]:
            step.close()
        return side.evaluate(batch(1))

    both(pair, change)


def test_weight_transposed_in_place_is_noticed(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        side.weights()[0].data = side.weights()[0].data.t()
        return side.train(batch(1)), side.evaluate(batch(2))

    both(pair, change)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("which", [0, 1])
def test_weight_keeps_changed_strides(pair: tuple[Side, Side], which: int) -> None:
    """Kernels go by how tensors lie, and add up in another order: some with few rows, on some processors."""
    rows = 4

    def change(side: Side) -> Any:
        weight = side.weights()[which]
        found = [side.train(batch(0, rows)), side.gather(batch(1, rows))]
        weight.data = _turned(weight.data)
        found += [side.gather(batch(2, rows)), side.train(batch(3, rows)), side.renew(batch(4, rows))]
        assert weight.stride() == (1, len(weight))
        found.append(side.evaluate(batch(5, rows)))
        weight.data = weight.data.contiguous()
        return [one.detach() for one in (*found, side.train(batch(6, rows)))]

    both(pair, change)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_optimizer_state_keeps_changed_strides(pair: tuple[Side, Side], name: str) -> None:
    def change(side: Side) -> Any:
        found = [side.train(batch(0))]
        state = side.optimizer.state[side.weights()[0]]
        state[name] = _turned(state[name])
        found += [side.train(batch(number)) for number in range(1, 3)]
        assert state[name].stride() == (1, len(state[name]))
        state[name].data = state[name].data.contiguous()
        return [one.detach() for one in (*found, side.train(batch(3)))]

    both(pair, change)


def test_gradient_keeps_changed_strides(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        found = []
        for number in range(4):
            found.append(side.gather(batch(number)).detach())
            gradient = side.weights()[0].grad
            assert gradient is not None
            assert gradient.is_contiguous() == (number in (0, 3))
            if number != 1:
                side.weights()[0].grad = _turned(gradient) if number == 0 else gradient.contiguous()
        return found

    both(pair, change)


def test_gradient_norms_are_exact_when_strides_change(tmp_path: Path) -> None:
    found = []
    for budget in (None, "1MiB"):
        torch.manual_seed(0)
        model = nn.Linear(300, 300)

        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            (model(x) ** 2).mean().backward()
            return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        ours: Any = step if budget is None else outofcore.compile(step, model, budget=budget, home=tmp_path)
        for number in range(12):
            found.append(ours(torch.randn(8, 300, generator=torch.Generator().manual_seed(number))))
            gradient = model.weight.grad
            assert gradient is not None
            model.weight.grad = _turned(gradient) if number % 2 == 0 else gradient.contiguous()
        if budget is not None:
            ours.close()
    assert found[:12] == found[12:]


def test_prepared_steps_are_not_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outofcore")
    side = compiled(0, budget="smallest", home="disk", shared=True)
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
        state["exp_avg"] = _turned(state["exp_avg"])
        return side.train(batch(1)).detach()

    both(pair, change)


@pytest.mark.parametrize("before", ["renew", "evaluate"])
@pytest.mark.parametrize("after", ["train", "gather"])
def test_weight_tied_to_a_new_parameter_stays_tied(pair: tuple[Side, Side], before: str, after: str) -> None:
    def change(side: Side) -> Any:
        found = [getattr(side, before)(batch(0)).detach()]
        side.model[0].weight = nn.Parameter(values(3))
        side.weights()[1].data = side.weights()[0].data
        found += [getattr(side, after)(batch(1)).detach(), side.train(batch(2)).detach()]
        return [*found, side.evaluate(batch(3))]

    both(pair, change)


def test_restored_parameter_can_be_tied(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        found = [side.evaluate(batch(0))]
        own = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(3))
        found.append(side.evaluate(batch(1)))
        side.model[0].weight = own
        side.weights()[1].data = own.data
        found += [side.evaluate(batch(2)), side.train(batch(3)).detach()]
        return [*found, side.evaluate(batch(4))]

    both(pair, change)


def test_restored_parameter_keeps_changed_strides(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        found = [side.evaluate(batch(0))]
        own = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(3))
        found.append(side.evaluate(batch(1)))
        own.data = _turned(own.data)
        side.model[0].weight = own
        return [*found, side.evaluate(batch(2)), side.train(batch(3)).detach()]

    both(pair, change)


def test_restored_parameter_keeps_its_values(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        own = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(4))
        found = [side.evaluate(batch(1)), side.train(batch(2)).detach(), own.detach().clone()]
        side.model[0].weight = own
        return [*found, side.train(batch(3)).detach()]

    both(pair, change)


def test_layers_can_be_swapped(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        found = []
        for number in (1, 2):
            side.model[0], side.model[3] = side.model[3], side.model[0]
            found += [side.train(batch(number)).detach(), side.evaluate(batch(number))]
        return found

    both(pair, change)


def test_held_gradients_survive_zero_grad(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.gather(batch(0))
        taken = [p.grad for p in side.model.parameters()]
        side.model.zero_grad()
        side.gather(batch(1))
        return taken

    both(pair, change)


@pytest.mark.parametrize("leave", ["gather", "backward"])
def test_steps_accumulate_into_existing_gradients(pair: tuple[Side, Side], leave: str) -> None:
    def change(side: Side) -> Any:
        found = []
        for number in range(3):
            if leave == "gather":
                side.gather(batch(number))
            else:
                F.mse_loss(side.model(batch(number)), batch(number)).backward()
            found.append(side.train(batch(10 + number)).detach())
        return found

    both(pair, change)


def test_held_gradients_survive_accumulation_and_clearing(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        held = []
        for number in range(3):
            F.mse_loss(side.model(batch(number)), batch(number)).backward()
            held.append([p.grad for p in side.model.parameters()])
            side.train(batch(10 + number))
        return held

    both(pair, change)


def test_held_gradients_survive_renewal_by_the_next_step(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        held = []
        for number in range(4):
            side.renew(batch(number))
            held.append([p.grad for p in side.model.parameters()])
        side.evaluate(batch(4))
        return held

    both(pair, change)


def test_gradients_stay_visible_between_steps(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        found = []
        for number in range(3):
            side.renew(batch(number))
            side.weights()[0].grad.mul_(0.5)
            side.evaluate(batch(number))
            found += [p.grad.clone() for p in side.model.parameters()]
            found.append(side.gather(batch(number)).detach())
            found += [p.grad.clone() for p in side.model.parameters()]
        for step in side.steps:
            step.close()
        return found

    both(pair, change)


def test_replaced_optimizer_state_stays_unchanged(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        state = side.optimizer.state[side.weights()[0]]
        old, state["exp_avg"] = state["exp_avg"], values(5)
        side.train(batch(1))
        return old

    both(pair, change)


def test_parameters_can_be_tied_and_untied_by_data(pair: tuple[Side, Side]) -> None:
    def tie(side: Side) -> Any:
        side.train(batch(0))
        one, other = side.weights()
        other.data = one.data
        return side.train(batch(1)).detach(), side.train(batch(2)).detach()

    def untie(side: Side) -> Any:
        other = side.weights()[1]
        other.data = other.data.clone()
        return side.train(batch(3)).detach(), side.train(batch(4)).detach()

    both(pair, tie)
    both(pair, untie)


@pytest.mark.parametrize("way", ["whole", "lines"])
def test_parameter_data_can_be_swapped(pair: tuple[Side, Side], way: str) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        found = []
        for number in (1, 2):
            one, other = side.weights()
            first, second = one.data, other.data
            if way == "lines":  # which begin elsewhere in the other's memory, so that nothing is put aside by chance
                second = second.flip(0)
            one.data, other.data = second, first
            found += [side.train(batch(number)).detach(), side.evaluate(batch(number))]
        return found

    both(pair, change)


def test_optimizer_state_can_be_swapped(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        one, other = (side.optimizer.state[p] for p in side.weights())
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
        found = [side.train(batch(1)).detach()]
        one["exp_avg"].data, other["exp_avg"].data = other["exp_avg"].data, one["exp_avg"].data
        return [*found, side.train(batch(2)).detach()]

    both(pair, change)


def test_gradients_can_be_swapped(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.gather(batch(0))
        one, other = side.weights()
        one.grad, other.grad = other.grad, one.grad
        side.gather(batch(1))
        assert one.grad is not None
        assert other.grad is not None
        one.grad.data, other.grad.data = other.grad.data, one.grad.data
        side.gather(batch(2))
        return side.train(batch(3)).detach()

    both(pair, change)


def test_close_keeps_parameters_tied(pair: tuple[Side, Side]) -> None:
    def tie(side: Side) -> Any:
        side.train(batch(0))
        one, other = side.weights()
        other.data = one.data
        for step in side.steps:
            step.close()
        with torch.no_grad():
            one.mul_(2.0)

    both(pair, tie)


def test_steps_may_be_called_in_inference_mode(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        found = []
        for number in (0, 1):
            with torch.inference_mode():
                found.append(side.evaluate(batch(number)).clone())
            found.append(side.train(batch(number)).detach())
        with torch.no_grad():
            side.weights()[0].mul_(0.5)
        return found

    both(pair, change)


def test_optimizer_restarts_after_its_state_is_cleared(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        for number in range(3):
            side.train(batch(number))
        side.optimizer.state.clear()
        return side.train(batch(3)).detach(), side.train(batch(4)).detach()

    both(pair, change)


def test_memory_shared_between_processes_is_refused() -> None:
    side = compiled(0, budget="all", home="disk", shared=True)
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
        native = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        names = [thread.name for thread in threading.enumerate()] + native
        return sum(name.startswith("outofcore-") for name in names)

    gc.collect()
    before = threads(), open_files()
    side = plain(0)
    # Copies to a home, in threads of their own.
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
    side = plain(0)

    def train(x: torch.Tensor) -> torch.Tensor:
        old = sum((p.grad.abs().sum() for p in side.model.parameters() if p.grad is not None), torch.zeros(()))
        side.optimizer.zero_grad()
        loss = F.mse_loss(side.model(x), x)
        loss.backward()
        side.optimizer.step()
        return loss + old.detach()

    with outofcore.compile(train, side.model, side.optimizer, budget="64MiB") as step:
        step(batch(0))
        before = everything(side)
        with pytest.raises(CaptureError, match=r"uses the gradient that .* had before it"):
            step(batch(1))
        assert alike(everything(side), before)
        side.optimizer.zero_grad()
        step(batch(1))
