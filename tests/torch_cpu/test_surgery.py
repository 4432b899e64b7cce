"""What users do to a model between steps, in plain PyTorch and under a budget side by side: the same bits come out."""

from __future__ import annotations

import copy
import gc
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.errors import CaptureError, StateError

WIDTH = 144  # a weight of this width is large: it takes more than 64 KiB


def batch(number: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def values(number: int) -> torch.Tensor:
    return 0.1 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))


@dataclass
class Side:
    """A model with four steps over it, in plain PyTorch or compiled."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    train: Callable[..., torch.Tensor]
    renew: Callable[..., torch.Tensor]
    gather: Callable[..., torch.Tensor]
    evaluate: Callable[..., torch.Tensor]
    steps: list[outofcore.Step] = field(default_factory=list[outofcore.Step])
    kept: dict[str, Any] = field(default_factory=dict[str, Any])

    def weights(self) -> list[nn.Parameter]:
        return [self.model[0].weight, self.model[3].weight]  # type: ignore[list-item]


def plain(seed: int) -> Side:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def renew(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    def gather(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return Side(model, optimizer, train, renew, gather, evaluate)


def compiled(seed: int, *, budget: str, home: str, shared: bool, host_budget: str | None = None) -> Side:
    side = plain(seed)
    functions = [(side.train, side.optimizer), (side.renew, side.optimizer), (side.gather, None), (side.evaluate, None)]
    found: list[outofcore.Step] = []
    for function, optimizer in functions:
        smallest = outofcore.minimum_budget(function, side.model, optimizer, inputs=(batch(0),))
        if function is side.gather:
            smallest *= 2  # it adds to gradients, too
        room = {"smallest": smallest, "half": 3 * smallest // 2, "all": 1 << 28}[budget]
        if found and shared:
            where: dict[str, Any] = {"home": found[0].home}
        else:
            where = {"home": home, "host_budget": host_budget}
        found.append(outofcore.compile(function, side.model, optimizer, budget=room, policy="window", **where))
    side.train, side.renew, side.gather, side.evaluate = found
    side.steps = found
    return side


Act = Callable[[Side], Any]


def alike(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(alike(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def everything(side: Side) -> list[Any]:
    """All that can be seen of a side."""
    found: list[Any] = list(side.model.state_dict().values())
    for parameter in side.model.parameters():
        found.append(parameter.grad if parameter.grad is not None else "no gradient")
        state = side.optimizer.state.get(parameter, {})
        found += [state[name] for name in sorted(state)]
    return found


@pytest.fixture(params=["smallest", "all"])
def budget(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["one home", "own homes"])
def pair(request: pytest.FixtureRequest, budget: str) -> Iterator[tuple[Side, Side]]:
    ours = compiled(0, budget=budget, home="disk", shared=request.param)
    yield ours, plain(0)
    for step in ours.steps:
        step.close()


def both(pair: tuple[Side, Side], act: Act) -> None:
    results = []
    for side in pair:
        torch.manual_seed(7)
        results.append(act(side))
    assert alike(*results)
    assert alike(everything(pair[0]), everything(pair[1]))


def test_a_model_of_another_dtype_is_left_as_it_is_when_steps_are_closed(pair: tuple[Side, Side]) -> None:
    both(pair, lambda side: side.train(batch(0)))
    both(pair, lambda side: side.model.bfloat16() and None)
    for step in pair[0].steps:
        step.close()
    assert pair[0].weights()[0].dtype is torch.bfloat16
    assert alike(everything(pair[0]), everything(pair[1]))


def test_data_put_in_place_outlives_a_step_that_is_closed(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        side.weights()[0].data = values(3).t()
        for step in side.steps[:1]:
            step.close()
        return side.evaluate(batch(1))

    both(pair, change)


def test_a_weight_that_is_transposed_in_place_is_noticed(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        side.weights()[0].data = side.weights()[0].data.t()
        return side.train(batch(1)), side.evaluate(batch(2))

    both(pair, change)


def test_parameters_that_are_put_back_are_what_they_were(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        own = side.weights()[0]
        side.model[0].weight = nn.Parameter(values(4))
        found = [side.evaluate(batch(1)), side.train(batch(2)).detach(), own.detach().clone()]
        side.model[0].weight = own
        return [*found, side.train(batch(3)).detach()]

    both(pair, change)


def test_layers_change_places(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        found = []
        for number in (1, 2):
            side.model[0], side.model[3] = side.model[3], side.model[0]
            found += [side.train(batch(number)).detach(), side.evaluate(batch(number))]
        return found

    both(pair, change)


def test_gradients_that_are_taken_away_stay_as_they_are(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.gather(batch(0))
        taken = [p.grad for p in side.model.parameters()]
        side.model.zero_grad()
        side.gather(batch(1))
        return taken

    both(pair, change)


@pytest.mark.parametrize("leave", ["gather", "backward"])
def test_gradients_left_before_each_of_several_steps_are_added_to(pair: tuple[Side, Side], leave: str) -> None:
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


def test_gradients_that_a_step_adds_to_and_clears_stay_with_who_holds_them(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        held = []
        for number in range(3):
            F.mse_loss(side.model(batch(number)), batch(number)).backward()
            held.append([p.grad for p in side.model.parameters()])
            side.train(batch(10 + number))
        return held

    both(pair, change)


def test_gradients_that_the_next_step_makes_anew_stay_with_who_holds_them(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        held = []
        for number in range(4):
            side.renew(batch(number))
            held.append([p.grad for p in side.model.parameters()])
        side.evaluate(batch(4))
        return held

    both(pair, change)


def test_gradients_left_are_seen_wherever_they_are(pair: tuple[Side, Side]) -> None:
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


def test_optimizer_state_that_is_replaced_stays_as_it_was(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        side.train(batch(0))
        state = side.optimizer.state[side.weights()[0]]
        old, state["exp_avg"] = state["exp_avg"], values(5)
        side.train(batch(1))
        return old

    both(pair, change)


def test_parameters_are_tied_and_untied_by_their_data(pair: tuple[Side, Side]) -> None:
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


def test_parameters_that_are_tied_stay_so_when_steps_are_closed(pair: tuple[Side, Side]) -> None:
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


def test_an_optimizer_starts_again_without_state(pair: tuple[Side, Side]) -> None:
    def change(side: Side) -> Any:
        for number in range(3):
            side.train(batch(number))
        side.optimizer.state.clear()
        return side.train(batch(3)).detach(), side.train(batch(4)).detach()

    both(pair, change)


def test_memory_that_processes_share_is_refused() -> None:
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


def test_a_step_that_nobody_closes_leaves_nothing_behind() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def threads() -> int:
        return sum(thread.name.startswith("outofcore-") for thread in threading.enumerate())

    gc.collect()
    before = threads(), open_files()
    side = compiled(0, budget="smallest", home="disk", shared=False)
    side.train(batch(0))
    assert threads() > before[0]
    expected = side.weights()[0].detach().clone()
    weight = side.weights()[0]
    del side
    gc.collect()
    assert (threads(), open_files()) == before
    assert torch.equal(weight, expected)


# What a user may do next; each takes a number that says with what.


def _train(side: Side, number: int) -> Any:
    return side.train(batch(number, rows=4 + 4 * (number % 2))).detach()


def _renew(side: Side, number: int) -> Any:
    return side.renew(batch(number, rows=4 + 4 * (number % 2))).detach()


def _gather(side: Side, number: int) -> Any:
    return side.gather(batch(number)).detach()


def _evaluate(side: Side, number: int) -> Any:
    side.model.train(number % 2 == 0)
    found = side.evaluate(batch(number))
    side.model.train()
    return found


def _look(side: Side, number: int) -> Any:
    with torch.no_grad():
        return side.model(batch(number))


def _plain_step(side: Side, number: int) -> Any:
    F.mse_loss(side.model(batch(number)), batch(number)).backward()
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=number % 2 == 0)


def _initialise(side: Side, number: int) -> Any:
    # Drawn in memory of its own: what is transposed lies otherwise after a step than in plain PyTorch.
    with torch.no_grad():
        side.weights()[number % 2].copy_(nn.init.xavier_normal_(torch.empty(WIDTH, WIDTH)))


def _put(side: Side, number: int) -> Any:
    new = values(number)
    side.weights()[number % 2].data = (new, new.t(), new.as_strided((WIDTH, WIDTH), (WIDTH, 1)), new.clone())[
        number % 4
    ]


def _transpose(side: Side, number: int) -> Any:
    weight = side.weights()[number % 2]
    weight.data = weight.data.t()


def _tie(side: Side, number: int) -> Any:
    weights = side.weights()
    weights[number % 2].data = weights[1 - number % 2].data


def _untie(side: Side, number: int) -> Any:
    weight = side.weights()[number % 2]
    weight.data = weight.data.clone()


def _replace(side: Side, number: int) -> Any:
    place = 3 * (number % 2)
    key = f"parameter {place}"
    own, other = side.model[place].weight, side.kept.pop(key, None)
    if other is None:
        side.kept[key] = own
        other = nn.Parameter(values(number))
    side.model[place].weight = other  # type: ignore[assignment]


def _swap(side: Side, number: int) -> Any:
    side.model[0], side.model[3] = side.model[3], side.model[0]


def _freeze(side: Side, number: int) -> Any:
    weight = side.weights()[number % 2]
    weight.requires_grad_(not weight.requires_grad)
    weight.grad = None


def _group(side: Side, number: int) -> Any:
    side.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number % 5)
    side.optimizer.param_groups[0]["maximize"] = number % 3 == 0


def _clear_gradients(side: Side, number: int) -> Any:
    side.optimizer.zero_grad(set_to_none=number % 2 == 0)


def _take_gradients(side: Side, number: int) -> Any:
    side.kept["gradients"] = [p.grad for p in side.model.parameters() if p.grad is not None]
    side.model.zero_grad()


def _hold_gradients(side: Side, number: int) -> Any:
    side.kept["held"] = [p.grad for p in side.model.parameters() if p.grad is not None]


def _edit_gradient(side: Side, number: int) -> Any:
    weight = side.weights()[number % 2]
    if number % 3 == 0 and weight.requires_grad:
        weight.grad = values(number)
    elif weight.grad is not None:
        weight.grad.mul_(0.5)


def _edit_state(side: Side, number: int) -> Any:
    state = side.optimizer.state.get(side.weights()[number % 2])
    if state and number % 2:
        state["exp_avg"].mul_(0.5)
    elif state:
        side.kept["state"], state["exp_avg"] = state["exp_avg"], values(number)


def _lose_state(side: Side, number: int) -> Any:
    if number % 2:
        side.optimizer.state.clear()
    else:
        side.optimizer.state.pop(side.weights()[0], None)


def _remember(side: Side, number: int) -> Any:
    side.kept["dicts"] = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))


def _recall(side: Side, number: int) -> Any:
    if "dicts" in side.kept:
        model, optimizer = copy.deepcopy(side.kept["dicts"])
        side.model.load_state_dict(model, assign=number % 3 == 0)
        if number % 3 != 0:
            side.optimizer.load_state_dict(optimizer)


def _copy_model(side: Side, number: int) -> Any:
    side.kept["copy"] = [p.detach() for p in copy.deepcopy(side.model).parameters()]


def _save(side: Side, number: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        outofcore.save(Path(folder), side.model, side.optimizer)
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.zero_()
        outofcore.load(Path(folder), side.model, side.optimizer)


def _cast(side: Side, number: int) -> Any:
    side.model.double()
    side.model.float()


def _fail(side: Side, number: int) -> Any:
    with pytest.raises(RuntimeError):
        side.train(torch.zeros(8, WIDTH + 1))
    side.model.zero_grad()


ACTIONS: list[Callable[[Side, int], Any]] = [
    *[_train, _renew, _evaluate, _gather] * 4,
    *(_look, _plain_step, _initialise, _put, _transpose, _tie, _untie, _replace, _swap, _freeze, _group),
    *(
        _clear_gradients,
        _take_gradients,
        _hold_gradients,
        _edit_gradient,
        _edit_state,
        _lose_state,
        _remember,
        _recall,
        _copy_model,
    ),
    *(_save, _cast, _fail),
]


def live(side: Side) -> dict[str, Any]:
    """What the user has put aside and no step may touch."""
    return {name: side.kept[name] for name in ("gradients", "held", "state", "copy") if name in side.kept}


def wander(seed: int, length: int = 16) -> None:
    """A random walk through what users do; everything is compared after each of it."""
    draw = random.Random(seed)
    home = draw.choice(["disk", "host", "tiers"])
    ours = compiled(
        seed,
        budget=draw.choice(["smallest", "smallest", "half", "all"]),
        home="disk" if home == "tiers" else home,
        host_budget="400KiB" if home == "tiers" else None,
        shared=draw.random() < 0.5,
    )
    theirs = plain(seed)
    done: list[str] = [home]
    try:
        for _ in range(length):
            act, number = draw.choice(ACTIONS), draw.randrange(1000)
            done.append(f"{act.__name__}({number})")
            results = []
            for side in (ours, theirs):
                torch.manual_seed(number)
                results.append(act(side, number))
            assert alike(*results), done
            assert alike(everything(ours), everything(theirs)), done
            assert alike(list(live(ours).values()), list(live(theirs).values())), done
        for step in draw.sample(ours.steps, len(ours.steps)):
            step.close()
            assert alike(everything(ours), everything(theirs)), [*done, "close"]
    except Exception as error:
        error.add_note(f"seed {seed}: {' '.join(done)}")
        raise
    finally:
        for step in ours.steps:
            step.close()


@pytest.mark.parametrize("seed", [*range(8), 9, 116, 155, 162])
def test_whatever_is_done_between_steps_gives_the_same_bits(seed: int) -> None:
    wander(seed)


def test_a_step_that_reads_old_gradients_and_leaves_new_ones_is_refused() -> None:
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
