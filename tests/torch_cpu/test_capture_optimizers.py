"""Updates of optimizers: state made and kept, settings read anew, and rehearsals that change nothing."""

from __future__ import annotations

import copy
from typing import Any

import capture_cases as cases
import pytest
import torch
from replay import Replay
from torch.multiprocessing.reductions import StorageWeakRef

from outofcore.capture import OptimizerUpdate, StateOwner, capture_step
from outofcore.capture.captured import Call
from outofcore.capture.optimizer_steps import StateLayouts, shape_of
from outofcore.capture.optimizers import Member, Rehearsal
from outofcore.errors import StateError
from outofcore.graph import StorageKind


def update_of(
    optimizer: torch.optim.Optimizer, names: tuple[str, ...]
) -> tuple[OptimizerUpdate, list[torch.Tensor], list[torch.Tensor]]:
    members = [Member(p, 0, names) for p in optimizer.param_groups[0]["params"]]
    params = [m.parameter.detach().clone() for m in members]
    grads = [torch.full_like(p, 0.5) for p in params]
    return OptimizerUpdate(optimizer, members, set()), params, grads


def adam() -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    return torch.optim.Adam([parameter], lr=0.1), parameter


ADAM = ("step", "exp_avg", "exp_avg_sq")


def adam_states(value: float = 7.0) -> list[list[torch.Tensor]]:
    return [[torch.tensor(value), torch.full((3, 4), value), torch.full((3, 4), value)]]


def test_the_first_update_makes_the_state_whatever_was_there() -> None:
    optimizer, parameter = adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states(float("nan"))
    assert update.is_first()
    update(params, grads, states)
    assert not update.is_first()
    update(params, grads, states)
    parameter.grad = grads[0]
    optimizer.step()
    optimizer.step()
    assert torch.equal(params[0], parameter)
    for name, tensor in zip(ADAM, states[0], strict=True):
        assert torch.equal(tensor, optimizer.state[parameter][name])
    assert torch.equal(grads[0], torch.full((3, 4), 0.5))


def test_state_that_the_user_has_already_is_gone_on_with() -> None:
    optimizer, parameter = adam()
    parameter.grad = torch.ones(3, 4)
    optimizer.step()
    update, params, grads = update_of(optimizer, ADAM)
    states = [[optimizer.state[parameter][name].clone() for name in ADAM]]
    assert not update.is_first()
    update(params, grads, states)
    parameter.grad = grads[0]
    optimizer.step()
    assert torch.equal(params[0], parameter)
    assert states[0][0] == 2


def test_forgotten_state_is_made_anew() -> None:
    optimizer, _ = adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    update(params, grads, states)
    update.forget()
    assert update.is_first()
    update(params, grads, states)
    assert states[0][0] == 1


def test_settings_are_read_in_each_step() -> None:
    optimizer, parameter = adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    parameter.grad = grads[0]
    for lr in (0.1, 0.3, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        update(params, grads, states)
        optimizer.step()
        assert torch.equal(params[0], parameter)
        del optimizer.state[parameter]["step"]  # what exists, the update remembers by itself
        optimizer.state[parameter] = dict(zip(ADAM, [t.clone() for t in states[0]], strict=True))


def test_an_update_keeps_no_tensor_that_it_was_given() -> None:
    optimizer, _ = adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    update(params, grads, states)
    update(params, grads, states)
    memory = [StorageWeakRef(t.untyped_storage()) for t in (*params, *grads, *states[0])]
    del params, grads, states
    assert all(storage.expired() for storage in memory)


def test_state_unlike_that_of_the_capture_is_refused() -> None:
    optimizer, _ = adam()
    update, params, grads = update_of(optimizer, ("step", "exp_avg"))
    with pytest.raises(StateError, match="exp_avg_sq"):
        update(params, grads, [adam_states()[0][:2]])
    update, params, grads = update_of(optimizer, ADAM)
    wrong = adam_states()
    wrong[0][1] = torch.zeros(4, 3)
    with pytest.raises(StateError, match="exp_avg"):
        update(params, grads, wrong)


def test_a_rehearsal_changes_neither_optimizer_nor_flags() -> None:
    optimizer, _ = adam()
    update, params, grads = update_of(optimizer, ADAM)
    rehearsal = Rehearsal(update)
    assert rehearsal.makes_state
    before = copy.deepcopy(optimizer.state_dict())
    garbage = [[t.fill_(-1e30) for t in adam_states()[0]]]
    rehearsal.first(params, grads, garbage)
    rehearsal(params, grads, garbage)
    rehearsal(params, grads, [[t.fill_(-1e30) for t in adam_states()[0]]])
    assert update.is_first()
    assert optimizer.state_dict() == before
    update(params, grads, adam_states())
    again = Rehearsal(update)
    assert not again.makes_state
    again(params, grads, [[t.fill_(-1e30) for t in adam_states()[0]]])
    assert not update.is_first()


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": (6, 4)}),
        (
            lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
            {"step": (), "exp_avg": (6, 4), "exp_avg_sq": (6, 4), "max_exp_avg_sq": (6, 4)},
        ),
        (torch.optim.Adafactor, {"step": (), "row_var": (6, 1), "col_var": (1, 4)}),
        (torch.optim.Adagrad, {"step": (), "sum": (6, 4)}),
        (torch.optim.Muon, {"momentum_buffer": (6, 4)}),
    ],
)
def test_layouts_are_found_without_a_step(make: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 6).t())
    optimizer = make([parameter])
    before = copy.deepcopy(optimizer.state_dict())
    (found,) = StateLayouts(optimizer).learn([(0, parameter)], [shape_of(parameter)])
    assert {name: shape.shape for name, shape in found.items()} == shapes
    assert all(shape.stride == (1, 6) for shape in found.values() if shape.shape == (6, 4))
    assert str(optimizer.state_dict()) == str(before)


def test_bindings_of_state_say_where_it_belongs() -> None:
    case = cases.mlp(lambda p: torch.optim.Adam(p, lr=0.01))
    optimizer, model = case.optimizers[0], case.models[0]
    captured = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    found = [b for b in captured.states if b.kind is StorageKind.OPTIMIZER_STATE]
    assert all(b.tensor is None for b in found)
    owners = {(id(b.owner.parameter), b.owner.name) for b in found}
    assert owners == {(id(p), name) for p in model.parameters() for name in ADAM}
    case.step(*case.batch())
    again = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    for binding in again.states:
        if binding.kind is StorageKind.OPTIMIZER_STATE:
            assert isinstance(binding.owner, StateOwner)
            assert binding.owner.optimizer is optimizer
            assert binding.tensor is optimizer.state[binding.owner.parameter][binding.owner.name]
    assert [o.family for o in captured.graph.ops][-1] != [o.family for o in again.graph.ops][-1]


def test_two_steps_in_one_share_their_state() -> None:
    case = cases.mlp(lambda p: torch.optim.Adam(p, lr=0.01))
    inner = case.step

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner(x, y)
        return inner(x, y)

    plain = copy.deepcopy(case.models[0])
    args = case.batch()
    captured = capture_step(step, case.models, case.optimizers, args, {})
    updates = [call for call in captured.calls if isinstance(call.func, OptimizerUpdate)]
    assert len(updates) == 2
    assert updates[0].args[2] == updates[1].args[2]
    torch.manual_seed(5)
    Replay(captured)(*args)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    again = cases.supervised(plain, optimizer)
    torch.manual_seed(5)
    again(*args)
    again(*args)
    for one, other in zip(case.models[0].parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_every_update_can_be_rehearsed_on_scratch() -> None:
    case = cases.mlp(lambda p: torch.optim.NAdam(p, lr=0.01))
    captured = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    before = copy.deepcopy(case.optimizers[0].state_dict())

    def scratch(tree: Any) -> Any:
        if isinstance(tree, list | tuple):
            return [scratch(item) for item in tree]
        value = captured.values[tree.value]
        return torch.full(value.shape, -3, dtype=value.dtype)

    calls: list[Call] = [call for call in captured.calls if isinstance(call.func, OptimizerUpdate)]
    assert calls
    for call in calls:
        assert call.rehearse is not None
        assert call.rehearse_first is not None
        call.rehearse_first(*scratch(call.args))
        call.rehearse(*scratch(call.args))
    assert str(case.optimizers[0].state_dict()) == str(before)
