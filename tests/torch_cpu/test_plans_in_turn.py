"""Plans of a compiled step take turns: whichever runs, bits are those of plain PyTorch, and all of it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import outofcore
from outofcore import planning
from outofcore.plan_trial import Phase, PlanTrial
from outofcore.policies import Auto, SearchParams
from outofcore.program import Timeline
from outofcore.units import MIB

WIDTH, BATCH, LAYERS = 192, 512, 6
STEPS = 40
# Without the search over placed plans, which takes seconds for steps as short as these.
QUICKLY = "auto(polish_ops=0)"


def make(frozen: bool = False) -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, torch.optim.Optimizer]:
    """Layers with dropout, whose random numbers have to be those of plain PyTorch as well, however often drawn."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    if frozen:
        for layer in layers[: LAYERS // 2]:
            layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(BATCH, WIDTH, generator=generator)


def trained(step: Callable[[torch.Tensor], torch.Tensor], count: int = STEPS) -> list[float]:
    torch.manual_seed(2)
    stream = batches()
    return [step(next(stream)).item() for _ in range(count)]


def plans_made(step: outofcore.CompiledStep[..., object]) -> set[str]:
    """How the plans of a step were made, in words."""
    known = step._session._known.values()
    return {plan.how for one in known if one.trial is not None for plan in one.trial.plans}


def smallest(frozen: bool = False) -> int:
    step, model, optimizer = make(frozen)
    return outofcore.smallest_budget(step, model, optimizer, inputs=(next(batches()),))


@pytest.fixture
def eager_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs, however slow the others are foretold to be, and however restless the machine, they are run."""
    monkeypatch.setattr("outofcore.profiling.undisturbed._DISTURBED", 1e6)
    monkeypatch.setattr("outofcore.contest._OUT", 1e6)
    monkeypatch.setattr("outofcore.plan_trial._SHARE", 1e6)
    monkeypatch.setattr("outofcore.plan_trial._WORTH_RUNNING", 1e6)
    monkeypatch.setattr("outofcore.plan_trial._COULD_BE_QUICKER", 1e6)
    monkeypatch.setattr("outofcore.contest._HOPELESS", 1e6)


@pytest.mark.usefixtures("eager_trials")
@pytest.mark.parametrize("frozen", [False, True], ids=["all learn", "some frozen"])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_plans_take_turns_and_bits_stay(home: str, frozen: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outofcore")
    step, model, optimizer = make(frozen)
    expected = trained(step)
    weights = [p.detach().clone() for p in model.parameters()]
    budget = smallest(frozen) + MIB
    step, model, optimizer = make(frozen)
    ran: list[planning.Planned] = []
    with outofcore.compile(step, model, optimizer, budget=budget, home=home, policy=QUICKLY) as compiled:
        torch.manual_seed(2)
        stream = batches()
        for loss in expected:
            assert compiled(next(stream)).item() == loss
            planned = compiled.planned
            ran += [planned] if not any(planned.program is one.program for one in ran) else []
            assert planned.program.arena_bytes <= budget
            arena = compiled._session.arena  # there is none once the step has been planned again
            assert arena is None or arena.bytes <= budget
        trial = compiled._session.trial
        assert trial is not None
        assert trial.phase is not Phase.PLANNING
        assert len(trial.tried) >= 2
        assert len(ran) >= 2
        stats = compiled.stats
        assert len(stats.tried) == len(trial.tried)
        assert sum(line.endswith(", stays") for line in stats.tried) == 1
        assert stats.why
        assert "plans tried" in compiled._repr_html_()
        # What the user sees between two steps is right, whatever plan ran before.
        for parameter, found in zip(make(frozen)[1].parameters(), model.parameters(), strict=True):
            assert found.shape == parameter.shape
    for mine, theirs in zip(weights, model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert "plans are compared by running them in turn" in caplog.text
    assert "compared plans: " in caplog.text


@pytest.mark.usefixtures("eager_trials")
def test_what_the_user_changes_while_plans_take_turns_counts() -> None:
    def run(step: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> list[float]:
        torch.manual_seed(2)
        stream, found = batches(), []
        for number in range(60):
            found.append(step(next(stream)).item())
            with torch.no_grad():
                if number % 3 == 0:
                    next(model.parameters()).mul_(0.99)
        return found

    step, model, optimizer = make(frozen=True)
    expected = run(step, model)
    budget = smallest(frozen=True) + MIB
    step, model, optimizer = make(frozen=True)
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        assert run(compiled, model) == expected
        assert compiled.stats.tried


@pytest.mark.usefixtures("eager_trials")
def test_the_report_tells_what_was_tried(tmp_path: Path) -> None:
    budget = smallest() + MIB
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        trained(compiled)
        compiled.report(tmp_path / "report.html", budgets=0)
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "plans tried" in page
        assert "median of" in page


@pytest.mark.usefixtures("eager_trials")
@pytest.mark.parametrize(
    "policy", ["auto(trials=0, polish_ops=0)", Auto(SearchParams(trials=0, polish_ops=0)), "window"]
)
def test_nothing_is_tried_where_that_is_off(policy: str | Auto) -> None:
    budget = smallest() + 2 * MIB
    step, model, optimizer = make()
    expected = trained(step, 12)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=policy) as compiled:
        assert trained(compiled, 12) == expected
        assert compiled.stats.tried == ()
        assert len(plans_made(compiled)) == 1


@pytest.mark.usefixtures("eager_trials")
def test_no_broken_plan_takes_a_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Alternatives go through the validator as well."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = planning.alternatives

    def broken(*args: object, **kwargs: object) -> Iterator[planning.Alternative]:
        for one in made(*args, **kwargs):  # type: ignore[arg-type]
            program = one.planned.program
            yield planning.Alternative(
                one.how,
                planning.Planned(
                    one.planned.plan,
                    type(program)(program.instructions[1:], program.blocks, program.arena_bytes, program.results),
                    Timeline(one.planned.timeline.starts[1:], one.planned.timeline.ends[1:], 0.0),
                ),
            )

    monkeypatch.setattr(planning, "alternatives", broken)
    budget = smallest() + MIB
    step, model, optimizer = make()
    expected = trained(step, 12)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        assert trained(compiled, 12) == expected
        assert plans_made(compiled) <= {"by auto", "by auto, as it was before"}
    assert list(tmp_path.glob("outofcore-fault-*.zip"))


@pytest.mark.usefixtures("eager_trials")
def test_memory_stays_within_the_budget_when_programs_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one arena for all plans that take turns: none is made, nor grows, once there are others."""
    monkeypatch.setattr("outofcore.plan_trial.is_off", lambda *_: False)
    budget = smallest() + MIB
    step, model, optimizer = make()
    expected = trained(step)
    step, model, optimizer = make()
    exchanges: list[int] = []
    original = PlanTrial.exchanged
    monkeypatch.setattr(PlanTrial, "exchanged", lambda self, s: (exchanges.append(self.current), original(self, s)))
    with outofcore.compile(step, model, optimizer, budget=budget, policy=QUICKLY) as compiled:
        torch.manual_seed(2)
        stream = batches()
        arenas = []
        for loss in expected:
            assert compiled(next(stream)).item() == loss
            arena = compiled._session.arena
            if arena is None:  # left while others were made, after this step
                assert len(plans_made(compiled)) > 1
                arenas.clear()
                continue
            assert arena.bytes <= budget
            assert compiled.planned.program.arena_bytes <= arena.bytes
            arenas.append(arena)
        assert len(arenas) > STEPS // 2
        assert all(arena is arenas[0] for arena in arenas)
        assert len(exchanges) >= 2
        assert compiled.stats.off_plan == 0
