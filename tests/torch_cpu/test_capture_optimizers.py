"""Tests of optimizer updates: state, settings and rehearsals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import capture_cases as cases
import pytest
import torch
from effort import some_of
from replay import Replay
from torch.multiprocessing.reductions import StorageWeakRef

import outofcore
from outofcore.capture import OptimizerUpdate, StateOwner, capture_step
from outofcore.capture import optimizers as optimizers_module
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


def build_adam() -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    return torch.optim.Adam([parameter], lr=0.1), parameter


ADAM = ("step", "exp_avg", "exp_avg_sq")


def adam_states(value: float = 7.0) -> list[list[torch.Tensor]]:
    return [[torch.tensor(value), torch.full((3, 4), value), torch.full((3, 4), value)]]


def test_first_update_creates_state_over_any_previous_bytes() -> None:
    optimizer, parameter = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states(float("nan"))
    assert update.creates_state()
    update(params, grads, states)
    assert not update.creates_state()
    update(params, grads, states)
    parameter.grad = grads[0]
    optimizer.step()
    optimizer.step()
    assert torch.equal(params[0], parameter)
    for name, tensor in zip(ADAM, states[0], strict=True):
        assert torch.equal(tensor, optimizer.state[parameter][name])
    assert torch.equal(grads[0], torch.full((3, 4), 0.5))


def test_update_continues_from_the_users_state() -> None:
    optimizer, parameter = build_adam()
    parameter.grad = torch.ones(3, 4)
    optimizer.step()
    update, params, grads = update_of(optimizer, ADAM)
    states = [[optimizer.state[parameter][name].clone() for name in ADAM]]
    assert not update.creates_state()
    update(params, grads, states)
    parameter.grad = grads[0]
    optimizer.step()
    assert torch.equal(params[0], parameter)
    assert states[0][0] == 2


def test_forgotten_state_is_created_again() -> None:
    optimizer, _ = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    update(params, grads, states)
    update.forget()
    assert update.creates_state()
    update(params, grads, states)
    assert states[0][0] == 1


def test_settings_are_read_in_each_step() -> None:
    optimizer, parameter = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    parameter.grad = grads[0]
    for lr in (0.1, 0.3, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        update(params, grads, states)
        optimizer.step()
        assert torch.equal(params[0], parameter)
        del optimizer.state[parameter]["step"]  # the update remembers which state exists
        optimizer.state[parameter] = dict(zip(ADAM, [t.clone() for t in states[0]], strict=True))


def test_update_keeps_no_reference_to_its_arguments() -> None:
    optimizer, _ = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    update(params, grads, states)
    update(params, grads, states)
    memory = [StorageWeakRef(t.untyped_storage()) for t in (*params, *grads, *states[0])]
    del params, grads, states
    assert all(storage.expired() for storage in memory)


def test_state_unlike_the_captured_state_stays_with_the_optimizer() -> None:
    optimizer, parameter = build_adam()
    update, params, grads = update_of(optimizer, ("step", "exp_avg"))
    assert not update.needs_recapture
    update(params, grads, [adam_states()[0][:2]])
    assert update.needs_recapture
    assert set(optimizer.state[parameter]) == {"exp_avg_sq"}
    optimizer, parameter = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    wrong = adam_states()
    wrong[0][1] = torch.zeros(4, 3)
    update(params, grads, wrong)
    assert update.needs_recapture
    assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_update_of_a_range_with_new_state_is_refused() -> None:
    optimizer, _ = build_adam()
    update, params, grads = update_of(optimizer, ("step", "exp_avg"))
    with pytest.raises(StateError, match="exp_avg_sq"):
        update.for_range(0, is_last=False)(params, grads, [adam_states()[0][:2]])


def test_rehearsal_changes_neither_optimizer_nor_flags() -> None:
    optimizer, _ = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    rehearsal = Rehearsal(update)
    assert rehearsal.creates_state
    before = copy.deepcopy(optimizer.state_dict())
    garbage = [[t.fill_(-1e30) for t in adam_states()[0]]]
    rehearsal.run_first(params, grads, garbage)
    rehearsal(params, grads, garbage)
    rehearsal(params, grads, [[t.fill_(-1e30) for t in adam_states()[0]]])
    assert update.creates_state()
    assert optimizer.state_dict() == before
    update(params, grads, adam_states())
    second_rehearsal = Rehearsal(update)
    assert not second_rehearsal.creates_state
    second_rehearsal(params, grads, [[t.fill_(-1e30) for t in adam_states()[0]]])
    assert not update.creates_state()


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
def test_state_layouts_are_learned_without_a_step(make: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 6).t())
    optimizer = make([parameter])
    before = copy.deepcopy(optimizer.state_dict())
    (layouts,) = StateLayouts(optimizer).find([(0, parameter)], [shape_of(parameter)])
    assert {name: shape.shape for name, shape in layouts.tensors.items()} == shapes
    assert all(shape.stride == (1, 6) for shape in layouts.tensors.values() if shape.shape == (6, 4))
    assert str(optimizer.state_dict()) == str(before)


def test_state_bindings_name_their_owner() -> None:
    case = cases.mlp(lambda p: torch.optim.Adam(p, lr=0.01))
    optimizer, model = case.optimizers[0], case.models[0]
    captured = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    bindings = [b for b in captured.states if b.kind is StorageKind.OPTIMIZER_STATE]
    assert all(b.tensor is None for b in bindings)
    owners = {(id(b.owner.parameter), b.owner.name) for b in bindings}
    assert owners == {(id(p), name) for p in model.parameters() for name in ADAM}
    case.step(*case.batch())
    recaptured = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    for binding in recaptured.states:
        if binding.kind is StorageKind.OPTIMIZER_STATE:
            assert isinstance(binding.owner, StateOwner)
            assert binding.owner.optimizer is optimizer
            assert binding.tensor is optimizer.state[binding.owner.parameter][binding.owner.name]
    assert [o.family for o in captured.graph.ops][-1] != [o.family for o in recaptured.graph.ops][-1]


def test_two_optimizer_steps_in_one_step_share_state() -> None:
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
    plain_step = cases.supervised_step(plain, optimizer)
    torch.manual_seed(5)
    plain_step(*args)
    plain_step(*args)
    for actual, expected in zip(case.models[0].parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_every_update_can_be_rehearsed_on_scratch_tensors() -> None:
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


KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "capturable": False}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_bound_update_matches_the_plain_optimizer(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    """Settings change, state is replaced, and all state is cleared once."""
    torch.manual_seed(0)
    users = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in users]
    groups = [{"params": [users[0]], "lr": 0.1}, {"params": [users[1]], "lr": 0.2}]
    optimizer = kind(groups, **settings)
    twin = kind([{"params": [twins[0]], "lr": 0.1}, {"params": [twins[1]], "lr": 0.2}], **settings)
    layouts = StateLayouts(optimizer)
    grads = [torch.randn_like(p) for p in users]
    tensor_shapes = [
        layouts.find([(n, p)], [shape_of(g)])[0].tensors for n, (p, g) in enumerate(zip(users, grads, strict=True))
    ]
    members = [Member(p, n, tuple(names)) for n, (p, names) in enumerate(zip(users, tensor_shapes, strict=True))]
    params = [p.detach().clone() for p in users]
    states = [[shape.empty(torch.device("cpu")).fill_(9) for shape in names.values()] for names in tensor_shapes]
    update = OptimizerUpdate(optimizer, members, set())
    bound = update.bind(params, grads, states)
    for number in range(9):
        for gradient in grads:
            gradient.normal_()
        for current, values in ((optimizer, users), (twin, twins)):
            current.param_groups[0]["lr"] = 0.1 / (1 + number)
            entries = current.state.get(values[0], {})
            if number == 7 and entries:
                current.state[values[0]] = dict(entries)
        if number == 4:
            optimizer.state.clear()
            twin.state.clear()
            update.forget()
        for parameter, gradient in zip(twins, grads, strict=True):
            parameter.grad = gradient.clone()
        bound(params, grads, states)
        twin.step()
        assert [torch.equal(a, b) for a, b in zip(params, twins, strict=True)] == [True, True]
        for member, values, parameter in zip(members, states, twins, strict=True):
            expected = twin.state.get(parameter, {})
            assert all(
                torch.equal(t, expected[n])
                for n, t in zip(member.names, values, strict=True)
                if expected.get(n) is not None
            )
    assert set(optimizer.state) <= set(users)
    assert bool(optimizer.state) <= bool(twin.state)
    assert bound._shadow is not None


def test_failed_update_restarts_from_the_users_state(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    states = adam_states()
    bound = update.bind(params, grads, states)
    for _ in range(3):
        bound(params, grads, states)
    shadow, before = bound._shadow, params[0].clone()
    assert shadow is not None

    def fail(failing: torch.optim.Optimizer) -> None:
        for entries in failing.state.values():
            entries["step"] = torch.tensor(1e6)
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(optimizers_module, "plain_optimizer_step", lambda _: fail)
        with pytest.raises(RuntimeError, match="no more"):
            bound(params, grads, states)
    assert torch.equal(params[0], before)
    bound(params, grads, states)
    assert {float(entries["step"]) for entries in shadow.state.values()} == {4.0}


def test_bound_update_releases_its_tensors_when_deleted() -> None:
    optimizer, _ = build_adam()
    update, params, grads = update_of(optimizer, ADAM)
    bound, states = update.bind(params, grads, adam_states()), adam_states()
    for _ in range(3):
        bound(params, grads, states)
    reference = StorageWeakRef(params[0].untyped_storage())
    del bound, params, grads, states
    assert reference.expired()


def test_parameter_and_moments_may_be_on_different_devices() -> None:
    """The device "meta" stands for the accelerator."""
    far, near = torch.device("meta"), torch.device("cpu")
    for parameter_at, moments_at in ((far, near), (near, far), (near, near), (far, far)):
        parameter = torch.nn.Parameter(torch.empty(3, 4, device=parameter_at))
        optimizer = torch.optim.AdamW([parameter])
        moments = {name: torch.empty(3, 4, device=moments_at) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
        (layouts,) = StateLayouts(optimizer, far).find([(0, parameter)], [shape_of(parameter)])
        assert set(layouts.tensors) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("make", "options"),
    some_of(
        [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.Adamax, {})],
        lambda case: case[0] is torch.optim.Adam,
    ),
)
def test_measured_update_requests_are_not_reused_for_other_settings(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    # Weight decay needs one more tensor; measurements without it are cached for later steps.
    def run(rate: float) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 128)
        optimizer = make(model.parameters(), weight_decay=rate, foreach=False, **options)

        step, batch = cases.supervised_step(model, optimizer), cases.classify(256, 128)
        with outofcore.compile(step, model, optimizer, budget="64MiB", cache=tmp_path) as ours:
            for _ in range(2):
                ours(*batch())
                assert ours.stats.off_plan == 0
            arena_bytes = ours.planned.program.arena_bytes
            # Simulates a schedule of the user.
            optimizer.param_groups[0]["weight_decay"] = 0.01 - rate
            ours(*batch())
            assert ours.stats.off_plan == 0
            return arena_bytes

    assert run(0.0) < run(0.01)
    assert run(0.0) == run(0.0)


class Counting(torch.optim.Optimizer):
    """An optimizer that creates the state of its last parameter first, with a number between two tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in reversed(self.param_groups):
            for parameter in reversed(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(last=torch.zeros_like(parameter), count=0, sum=torch.zeros_like(parameter))
                state["count"] += 1
                state["sum"].add_(parameter.grad)
                state["last"].copy_(parameter.grad)
                parameter.sub_(state["sum"], alpha=group["lr"] / state["count"])


class IndependentCounting(Counting):
    outofcore_independent = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["rounds"] = state.get("rounds", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["rounds"])


ORDERED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Counting": (Counting, {}),
    "Alone": (IndependentCounting, {}),
}


class Wide(torch.nn.Module):
    """A model with large parameters, updated alone, and small ones, updated together."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Linear(4, 260)
        self.large = torch.nn.Linear(260, 260)
        self.head = torch.nn.Linear(260, 3)
        self.late = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, *, late: bool) -> torch.Tensor:
        y = self.head(self.large(self.small(x)))
        return y * self.late if late else y


def state_orders(kind: Any, settings: dict[str, Any], budget: str) -> list[Any]:
    torch.manual_seed(0)
    model = Wide()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    late, small, small_bias, large, large_bias, head, head_bias = (
        *(model.late, model.small.weight, model.small.bias, model.large.weight, model.large.bias),
        *(model.head.weight, model.head.bias),
    )
    groups = [{"params": [head_bias, late]}, {"params": [small_bias, large, small], "lr": 0.01}]
    optimizers = [kind(groups, **settings), kind([head, large_bias], **settings)]

    def step(x: torch.Tensor, late: bool) -> torch.Tensor:
        loss = model(x, late=late).square().mean()
        loss.backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = outofcore.compile(step, model, optimizers, budget=budget, home="host", policy="keep-all") if budget else step
    results: list[Any] = []
    for number, with_late in enumerate((False, True, False, True)):
        if number == 3:
            del optimizers[0].state[small_bias]
        run(torch.ones(2, 4), with_late)
        for optimizer in optimizers:
            saved = optimizer.state_dict()
            results.append([(names[id(p)], list(state)) for p, state in optimizer.state.items()])
            results.append([(number, list(state)) for number, state in saved["state"].items()])
            results.append([list(group) for group in saved["param_groups"]])
    return [*results, *[parameter.detach().sum().item() for parameter in model.parameters()]]


@pytest.mark.parametrize("name", ORDERED)
def test_state_order_matches_plain_pytorch(name: str) -> None:
    """The order of parameters and names, with late gradients and deleted state."""
    kind, settings = ORDERED[name]
    assert state_orders(kind, settings, "4MiB") == state_orders(kind, settings, "")
