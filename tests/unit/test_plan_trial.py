"""Which plan a step ends up with, on a machine whose true costs are known: noisy, and other than was believed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from effort import examples, pairs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LIMITS

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan_trial import Exchange, Phase, PlanAgain, PlanOthers, PlanTrial
from outofcore.planning import (
    Alternative,
    Planned,
    SearchParams,
    alternatives,
    in_core_budget,
    plan_step,
    smallest_budget,
)
from outofcore.program import Program, Timeline
from outofcore.simulator import simulate
from outofcore.units import MIB
from outofcore.validator import validate

PARAMS = SearchParams(polish_ops=0, tuned=1, tunings=50, further=0, also=0)
SEARCHED = SearchParams(polish_ops=0, tuned=1, tunings=200)
LAYERS = 10


def model() -> StepGraph:
    """Layers that each leave two maps for the backward pass, of which one is cheap to make again; and their updates."""
    storages = [Storage(0, 4 * MIB, StorageKind.INPUT, "x")]
    ops: list[Op] = []

    def new(kind: StorageKind, name: str, size: int = 4 * MIB) -> int:
        storages.append(Storage(len(storages), size, kind, name))
        return len(storages) - 1

    def op(
        name: str, reads: tuple[int, ...], mutates: tuple[int, ...] = (), creates: tuple[int, ...] = (), layer: int = 0
    ) -> None:
        ops.append(Op(len(ops), name, reads, mutates, creates, family=name, module=f"layers.{layer}"))

    weights = [new(StorageKind.PARAMETER, f"w{i}", MIB) for i in range(LAYERS)]
    last, saved = 0, []
    for i, weight in enumerate(weights):
        product = new(StorageKind.ACTIVATION, f"product{i}")
        op("product", (last, weight), (), (product,), i)
        out = new(StorageKind.ACTIVATION, f"out{i}")
        op("activation", (product,), (), (out,), i)
        saved.append((last, product))
        last = out
    gradient = new(StorageKind.ACTIVATION, "gradient")
    op("loss", (last,), (), (gradient,))
    for i in reversed(range(LAYERS)):
        before, product = saved[i]
        inner = new(StorageKind.ACTIVATION, f"inner{i}")
        op("activation backward", (product, gradient), (), (inner,), i)
        of_weight = new(StorageKind.GRADIENT, f"of_weight{i}", MIB)
        op("weight backward", (inner, before), (), (of_weight,), i)
        gradient = new(StorageKind.ACTIVATION, f"gradient{i}")
        op("product backward", (inner, weights[i]), (), (gradient,), i)
        op("update", (weights[i], of_weight), (weights[i],), (), i)
    graph = StepGraph(tuple(storages), tuple(ops))
    graph.check()
    return graph


GRAPH = model()
SECONDS = {"product": 10e-3, "activation": 4e-3, "loss": 1e-3, "update": 1e-3}
OPS = tuple(OpCost(SECONDS.get(op.name, 10e-3)) for op in GRAPH.ops)
BELIEVED = Costs(OPS, (Home("disk", None, 320.0 * MIB, 320.0 * MIB, 1e-4),))


def with_link(costs: Costs, times: float, slowdown: float = 0.0) -> Costs:
    """A link so many times as fast, which takes something from ops."""
    home = costs.homes[0]
    faster = replace(
        home,
        bytes_per_s_out=home.bytes_per_s_out * times,
        bytes_per_s_in=home.bytes_per_s_in * times,
        compute_slowdown=slowdown,
    )
    return replace(costs, homes=(faster,))


def with_ops(costs: Costs, times: float) -> Costs:
    """Ops that take so many times as long."""
    return replace(costs, ops=tuple(OpCost(cost.seconds * times) for cost in costs.ops))


@dataclass
class Machine:
    """Runs programs as long as they truly take, and longer where something else uses the processor."""

    truth: Costs
    noise: Callable[[int], float] = lambda step: 1.0  # how many times as long ops take, by step
    jitter: float = 0.003
    steps: int = 0
    seconds: list[float] = field(default_factory=list)

    def seconds_of(self, program: Program) -> float:
        return simulate(GRAPH, self.truth, program).step_seconds

    def run(self, program: Program) -> Timeline:
        draw = random.Random(self.steps)
        times = self.noise(self.steps)
        ops = tuple(OpCost(cost.seconds * times * (1 + self.jitter * draw.random())) for cost in self.truth.ops)
        self.steps += 1
        timeline = simulate(GRAPH, replace(self.truth, ops=ops), program)
        self.seconds.append(timeline.step_seconds)
        return timeline


@dataclass
class Run:
    """What came of some steps."""

    trial: PlanTrial
    machine: Machine
    seen: list[Planned] = field(default_factory=list)
    planned: int = 0  # how often it was planned again
    exchanges: int = 0  # beyond those

    def true_seconds(self) -> float:
        return self.machine.seconds_of(self.trial.planned.program)

    def best_seconds(self) -> float:
        return min(self.machine.seconds_of(planned.program) for planned in self.seen)


@cache
def best(costs: Costs, budget: int, params: SearchParams = PARAMS) -> Planned:
    return plan_step(GRAPH, costs, budget, params=params)


@cache
def others(costs: Costs, budget: int, chosen: Planned) -> tuple[Alternative, ...]:
    return tuple(alternatives(GRAPH, costs, budget, chosen))


def train(
    machine: Machine,
    believed: Costs,
    budget: int,
    *,
    most: int = 2,
    steps: int = 150,
    exchanging: float = 1e-3,
    params: SearchParams = PARAMS,
) -> Run:
    """As a session does: the first step of a program warms up, and takes longer."""
    trial = PlanTrial(GRAPH, believed, best(believed, budget, params), set(), most=most)
    run = Run(trial, machine, [trial.planned])
    warming = True
    for _ in range(steps):
        asked = trial.ran(machine.run(trial.planned.program), warming=warming)
        warming = False
        if isinstance(asked, PlanAgain):
            again = best(asked.costs, budget, params)
            run.seen.append(again)
            run.planned += 1
            asked = trial.planned_again(again, 0.01)
            if not isinstance(asked, PlanOthers):
                trial.exchanged(exchanging)
            warming = True
        if isinstance(asked, PlanOthers):
            made = others(asked.costs, budget, trial.planned)
            run.seen += [plan.planned for plan in made]
            asked = trial.others_made(made, 0.01)
            if not isinstance(asked, Exchange):
                trial.exchanged(exchanging)
            warming = True
        if isinstance(asked, Exchange):
            run.exchanges += 1
            trial.exchanged(exchanging)
            warming = True
    return run


BUDGET = in_core_budget(GRAPH, BELIEVED) // 2


def bursts(steps: Iterable[int], times: float = 1.6) -> Callable[[int], float]:
    disturbed = frozenset(steps)
    return lambda step: times if step in disturbed else 1.0


@pytest.mark.parametrize(
    ("noisy", "link", "slowdown"),
    pairs_of([(), range(1, 10, 2), range(10), range(3, 7)], [0.3, 0.85, 1.0, 2.5], [0.0, 0.2]),
)
def test_the_best_of_all_plans_stays(link: float, slowdown: float, noisy: Iterable[int]) -> None:
    """Wherever links are mispredicted, and whenever something else runs."""
    run = train(Machine(with_link(BELIEVED, link, slowdown), bursts(noisy)), BELIEVED, BUDGET)
    assert run.trial.phase is Phase.SETTLED
    assert run.true_seconds() <= run.best_seconds() * 1.02


def test_a_plan_made_while_the_machine_was_busy_does_not_stay() -> None:
    """A slow start: ops seem to take half as long again, and steps are planned for that."""
    run = train(Machine(BELIEVED, bursts(range(14), 1.55)), BELIEVED, BUDGET)
    assert run.planned
    assert run.true_seconds() <= run.best_seconds() * 1.02
    assert run.trial.costs.compute_seconds == pytest.approx(BELIEVED.compute_seconds, rel=0.05)


@pytest.mark.exhaustive
@settings(LIMITS, max_examples=examples(15))
@given(
    st.floats(0.3, 3.0),
    st.floats(0.0, 0.3),
    st.sampled_from([0, 1]),
    st.floats(1.2, 3.0),
    st.sampled_from([0.35, 0.5, 0.7]),
)
def test_noise_in_every_other_step_of_the_first_ten_leads_to_no_slower_plan(
    link: float, slowdown: float, first: int, times: float, share: float
) -> None:
    budget = max(int(in_core_budget(GRAPH, BELIEVED) * share), smallest_budget(GRAPH, BELIEVED) * 2)
    truth = with_link(BELIEVED, link, slowdown)
    # With more search: a short one finds plans that differ by more where costs differ a little.
    noisy = train(Machine(truth, bursts(range(first, 10, 2), times)), BELIEVED, budget, params=SEARCHED)
    calm = train(Machine(truth), BELIEVED, budget, params=SEARCHED)
    assert noisy.true_seconds() <= calm.true_seconds() * 1.03


def test_trials_take_a_small_share_of_the_first_hundred_steps() -> None:
    for link in (0.4, 0.8, 1.0, 2.0):
        for exchanging in (1e-3, 0.05, 0.3):
            machine = Machine(with_link(BELIEVED, link))
            run = train(machine, BELIEVED, BUDGET, steps=100, exchanging=exchanging)
            # Beyond the steps themselves the first exchange, which is counted as planning, and a twentieth.
            assert run.trial._spent <= 0.06 * 100 * run.true_seconds()


def test_steps_that_are_tiny_beside_an_exchange_are_not_held_up() -> None:
    """What an exchange takes is a hundred steps' worth, and shows when the first is made: there is one back, if any."""
    seconds = best(BELIEVED, BUDGET).timeline.step_seconds
    truth = with_link(BELIEVED, 0.9, 0.3)
    usual = train(Machine(truth), BELIEVED, BUDGET, steps=100).trial.tried
    assert [one.steps for one in usual] == [6, 6, 6]
    run = train(Machine(truth), BELIEVED, BUDGET, steps=100, exchanging=100 * seconds)
    assert run.exchanges <= 2
    assert all(one.steps <= 3 for one in run.trial.tried)
    # Once they have been run often enough, plans are compared all the same.
    run = train(Machine(truth), BELIEVED, BUDGET, steps=1500, exchanging=2 * seconds)
    assert len(run.trial.tried) >= 2
    assert all(one.seconds for one in run.trial.tried)
    assert run.trial._spent <= 0.06 * 1500 * run.true_seconds()


def test_no_plan_is_run_beside_where_trials_are_off() -> None:
    run = train(Machine(with_link(BELIEVED, 0.5)), BELIEVED, BUDGET, most=0)
    assert run.planned == 1
    assert run.trial.tried == ()
    assert run.trial.current == 0


def test_it_says_what_was_tried_and_why_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outofcore")
    run = train(Machine(with_link(BELIEVED, 0.7, 0.2)), BELIEVED, BUDGET)
    tried = run.trial.tried
    assert len(tried) >= 2
    assert sum(one.stays for one in tried) == 1
    assert all(one.seconds > 0 and one.steps for one in tried)
    assert run.trial.why
    assert "plans are compared by running them in turn: by auto" in caplog.text
    for one in tried:
        assert str(one) in caplog.text


def test_alternatives_keep_the_budget_and_pass_the_validator() -> None:
    found = others(BELIEVED, BUDGET, best(BELIEVED, BUDGET))
    assert found
    for one in found:
        assert one.planned.program.arena_bytes <= BUDGET
        validate(GRAPH, one.planned.program, BUDGET, BELIEVED)
        assert one.planned.timeline == simulate(GRAPH, BELIEVED, one.planned.program)
    again = others.__wrapped__(BELIEVED, BUDGET, best(BELIEVED, BUDGET))
    assert [(one.how, one.planned.plan, one.planned.program) for one in again] == [
        (one.how, one.planned.plan, one.planned.program) for one in found
    ]


def test_what_fits_has_no_alternatives() -> None:
    budget = in_core_budget(GRAPH, BELIEVED)
    assert not others(BELIEVED, budget, best(BELIEVED, budget))


def test_no_others_are_made_where_none_could_be_quicker() -> None:
    """With a link so fast that steps take what their ops do."""
    truth = with_link(BELIEVED, 50.0)
    run = train(Machine(truth, jitter=0.0), truth, BUDGET)
    assert run.planned == 0
    assert run.seen == [best(truth, BUDGET)]
    assert run.trial.phase is Phase.SETTLED
