"""Plans compared by running them: whose turn it is, which steps count, and which plan stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import LIMITS

from outofcore.contest import Contest, Sample, Turn
from outofcore.profiling.undisturbed import Pace

Machine = Callable[[int, int], Sample]  # of a plan's number, and of a step's


def machine(seconds: list[float], noise: Callable[[int], float] = lambda step: 1.0) -> Machine:
    """Plans that take so long, on a machine that takes so many times as long at each step."""
    return lambda plan, step: Sample(seconds[plan] * noise(step), Pace(noise(step), noise(step)))


def held(plans: int, run: Machine, start: Contest | None = None) -> tuple[Contest, list[int]]:
    """A contest to its end, and the plans that ran, by step."""
    contest, order = start or Contest(plans), []
    while (plan := contest.next()) is not None:
        contest = contest.after(plan, run(plan, len(order)))
        order.append(plan)
        assert len(order) < 200
    return contest, order


def test_the_quickest_stays() -> None:
    for seconds in ([1.0, 0.9, 0.95], [1.0, 1.02, 0.97], [1.0, 1.2, 0.8]):
        contest, _ = held(3, machine(seconds))
        assert contest.winner() == seconds.index(min(seconds))
        for plan, one in enumerate(seconds):
            assert contest.quotient(plan) == pytest.approx(one)


def test_the_first_stays_unless_another_is_clearly_quicker() -> None:
    assert held(2, machine([1.0, 0.995]))[0].winner() == 0
    assert held(2, machine([1.0, 0.985]))[0].winner() == 1
    assert held(1, machine([1.0]))[0].winner() == 0


def test_a_plan_that_is_quicker_in_one_round_alone_does_not_stay() -> None:
    """Steps that differ by a fifth from one round to the next, at the same pace as far as that can be told."""
    seconds = {0: [1.0] * 6, 1: [0.7] * 3 + [1.02] * 3}

    def run(plan: int, step: int) -> Sample:
        return Sample(seconds[plan].pop(0), Pace(1.0, None))

    contest, _ = held(2, run)
    assert contest.quotient(1) == pytest.approx(0.86)
    assert contest.winner() == 0


def test_plans_take_turns_and_the_order_turns() -> None:
    _, order = held(3, machine([1.0, 1.01, 1.02]))
    assert order == [0] * 3 + [1] * 3 + [2] * 6 + [1] * 3 + [0] * 3


def test_what_was_run_before_counts() -> None:
    samples = tuple(Sample(1.0, Pace(1.0, 1.0)) for _ in range(3))
    contest, order = held(2, machine([1.0, 0.9]), Contest(2, (Turn(0, samples),)))
    assert order == [1] * 6 + [0] * 3
    assert contest.winner() == 1


def test_a_slow_plan_is_out_after_a_round_and_a_hopeless_one_after_a_step() -> None:
    assert held(2, machine([1.0, 1.1]))[1] == [0] * 3 + [1] * 3
    assert held(2, machine([1.0, 1.5]))[1] == [0] * 3 + [1]


def test_steps_that_were_disturbed_do_not_count() -> None:
    """Each second step takes 1.7 times as long, as when something else uses the processor now and then."""
    contest, order = held(2, machine([1.0, 0.97], lambda step: 1.7 if step % 2 else 1.0))
    assert contest.winner() == 1
    assert contest.quotient(1) == pytest.approx(0.97)
    assert len(order) > 12


def test_a_turn_that_was_disturbed_as_a_whole_is_not_compared() -> None:
    """While the second plan ran for the first time, all steps took 1.4 times as long."""
    contest, order = held(2, machine([1.0, 0.95], lambda step: 1.4 if 3 <= step < 6 else 1.0))
    assert contest.winner() == 1
    assert contest.quotient(1) == pytest.approx(0.95)
    assert order.count(1) > 6


def test_a_plan_whose_ops_are_slow_without_copies_beside_them_is_slow() -> None:
    """Whatever makes them so: there is no round in which the machine seems calm for both."""

    def run(plan: int, step: int) -> Sample:
        return Sample(1.0 if plan == 0 else 1.15, Pace(1.0, 1.0) if plan == 0 else Pace(1.2, 1.2))

    contest, order = held(2, run)
    assert contest.winner() == 0
    assert len(order) <= 4 * 2 * 7


_PACES = st.floats(0.5, 4.0)
_SECONDS = st.floats(0.5, 2.0)


@st.composite
def contests(draw: st.DrawFn) -> Contest:
    """Contests whose steps took any time at any pace."""
    plans = draw(st.integers(2, 4))

    def run(plan: int, step: int) -> Sample:
        quiet = draw(st.none() | _PACES)
        return Sample(draw(_SECONDS), Pace(draw(_PACES), quiet))

    return held(plans, run)[0]


@LIMITS
@given(contests(), st.floats(0.25, 4.0), st.integers(0, 3))
def test_a_machine_that_is_slower_for_a_round_changes_no_verdict(contest: Contest, times: float, slow: int) -> None:
    """All steps of one round take so many times as long."""
    made = dict.fromkeys(range(contest.plans), 0)
    turns: list[Turn] = []
    for turn in contest.turns:
        factor = times if made[turn.plan] == slow else 1.0
        made[turn.plan] += 1
        samples = tuple(
            Sample(
                s.seconds * factor,
                replace(s.pace, ops=s.pace.ops * factor, quiet=None if s.pace.quiet is None else s.pace.quiet * factor),
            )
            for s in turn.samples
        )
        turns.append(Turn(turn.plan, samples))
    # A factor that is a power of two leaves all quotients as they are to the last bit.
    if times in (0.25, 0.5, 1.0, 2.0, 4.0):
        assert Contest(contest.plans, tuple(turns)).winner() == contest.winner()
    for plan in range(contest.plans):
        before, after = contest.quotient(plan), Contest(contest.plans, tuple(turns)).quotient(plan)
        if _is_sure(contest):
            assert after == (None if before is None else pytest.approx(before))


def _is_sure(contest: Contest) -> bool:
    """Whether no step is so near to a bound that rounding decides whether it was disturbed."""
    for turn in contest.turns:
        lowest = min(s.pace.ops for s in turn.samples)
        if any(abs(s.pace.ops / lowest - 1.06) < 1e-9 for s in turn.samples):
            return False
    quiets = [s.pace.quiet for turn in contest.turns for s in turn.samples if s.pace.quiet is not None]
    ops = [s.pace.ops for turn in contest.turns for s in turn.samples]
    return all(abs(a / b - 1.06) > 1e-9 for a in quiets for b in quiets) and all(
        abs(a / b - 1.25) > 1e-9 for a in ops for b in ops
    )


@LIMITS
@given(st.lists(st.floats(0.8, 1.2), min_size=2, max_size=4), st.sampled_from([0, 1]), st.floats(1.2, 3.0))
def test_noise_in_every_other_step_decides_nothing(seconds: list[float], first: int, noise: float) -> None:
    """Up to the tenth step; whoever stays is as quick as any other, but for the hundredth that counts as as quick."""
    contest, _ = held(len(seconds), machine(seconds, lambda step: noise if step < 10 and step % 2 == first else 1.0))
    assert seconds[contest.winner()] <= min(seconds) * 1.0102


def turns(plan: int, *rounds: list[float]) -> list[Turn]:
    return [Turn(plan, tuple(Sample(seconds, Pace(1.0, 1.0)) for seconds in one)) for one in rounds]


@pytest.mark.parametrize(
    ("own", "winner"),
    [
        ([[0.97, 1.03, 0.98], [0.97, 0.99, 1.02]], 0),  # quicker by 2 % by the median, as a plan that is alike may be
        ([[0.94, 1.03, 0.95], [0.97, 0.99, 1.02]], 1),  # most steps of a round are quicker than the first's quickest
        ([[0.94, 0.95, 0.95], [1.02, 1.02, 1.02]], 0),  # slower in a round
    ],
)
def test_steps_have_to_stand_out(own: list[list[float]], winner: int) -> None:
    first = turns(0, [1.0, 0.96, 1.04], [1.01, 0.97, 1.0])
    rounds = zip(first, turns(1, *own), strict=True)
    assert Contest(2, tuple(turn for pair in rounds for turn in pair)).winner() == winner
