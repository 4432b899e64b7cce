"""Tests that a compiled step with a stored plan starts without planning, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreground_planning import WITHOUT_RECOMPUTATION, ForegroundPlanner
from torch import nn
from typer.testing import CliRunner

import outofcore
from outofcore.background import BackgroundPlanner
from outofcore.cli.app import app
from outofcore.follow import loop_planner
from outofcore.plan_store import PlanStore
from outofcore.planned_step import PlannedStep
from outofcore.profiling import links, ops
from outofcore.runtime.homes import HostHome
from outofcore.step_variants import StepVariants
from outofcore.units import MIB
from outofcore.variant import FUSED, Variant

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, BATCH, LAYERS = 192, 512, 3
# Without the search over placed plans, which takes seconds even for these short steps.
QUICKLY = "auto:polish_ops=0,tunings=20,further=0"
Step = Callable[[torch.Tensor], torch.Tensor]


def make(*, keeps_gradients: bool = False, layers: int = LAYERS) -> tuple[Step, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        return loss

    return step, model, optimizer


def train(step: Step, count: int = 3, rows: int = BATCH) -> list[float]:
    torch.manual_seed(2)
    return [step(torch.randn(rows, WIDTH)).item() for _ in range(count)]


def smallest(split: str, rows: int = BATCH, **kind: Any) -> int:
    return outofcore.smallest_budget(*make(**kind), inputs=(torch.randn(rows, WIDTH),), split=split)


def compile_step(
    budget: int, cache: Path, *, keeps_gradients: bool = False, layers: int = LAYERS, **options: Any
) -> AbstractContextManager[Any]:
    case = make(keeps_gradients=keeps_gradients, layers=layers)
    return outofcore.compile(*case, budget=budget, cache=cache, **{"policy": QUICKLY, "home": "host", **options})


def run(budget: int, cache: Path, *, rows: int = BATCH, **options: Any) -> tuple[list[float], PlannedStep]:
    with compile_step(budget, cache, **options) as step:
        losses = train(step, rows=rows)
        return losses, step._session.steps.last_step


def files(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("plan-*.json")}


@pytest.fixture(autouse=True)
def _without_better_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundPlanner, "start", lambda *_: False)
    monkeypatch.setattr("outofcore.replanning.SHARE", 0.0)


def forbid_planning(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Make planning, packing and measuring fail; return a list of the variants that are made."""

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("it was measured or planned again")

    for name in ("plan_step", "plans_of_step", "plan_in_core", "smallest_budget", "explain_too_small"):
        monkeypatch.setattr(f"outofcore.planning.{name}", never)
    for name in (
        "variant.smallest_budget",
        "planning.placing.pack",
        "planning.placing.place",
        "planning.placing.fit_policy",
    ):
        monkeypatch.setattr(f"outofcore.{name}", never)
    monkeypatch.setattr(links, "measure_link", never)
    monkeypatch.setattr(ops._OpBench, "_measure", never)
    variants: list[Variant] = []
    make_variant = StepVariants._make

    def record_variant(self: StepVariants, variant: Variant) -> Any:
        variants.append(variant)
        return make_variant(self, variant)

    monkeypatch.setattr(StepVariants, "_make", record_variant)
    return variants


@pytest.mark.parametrize(
    "kind", ["fused", "low memory", "split", "split, gradients kept", "gradients kept", "by window", "on disk"]
)
def test_stored_plan_runs_without_planning(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps, is_split = "gradients kept" in kind, "split" in kind
    monkeypatch.setattr("outofcore.variant._MAX_HALVINGS", 2)  # else the search for splits takes half a minute
    step: dict[str, Any] = {"keeps_gradients": keeps, "layers": 1 if is_split else LAYERS}
    rows, split = (8 * BATCH, "exact") if is_split else (BATCH, "off")
    smallest_bytes = smallest(split, rows, **step)
    if is_split and smallest_bytes >= smallest("off", rows, **step):
        pytest.skip("split ops give other bits than whole ops on this processor")
    budget = 1 << 30 if kind == "fused" else smallest_bytes + MIB // 2
    options: dict[str, Any] = {"rows": rows, "split": split, **step}
    if is_split or kind == "by window":
        options["policy"] = "window"
    if kind == "on disk":
        options["home"] = "disk"
    expected = train(make(**step)[0], rows=rows)
    losses, before = run(budget, tmp_path, **options)
    assert losses == expected
    assert (before.variant.op_bytes is not None) == is_split
    assert (before.variant == FUSED) == (kind == "fused")
    stored = files(tmp_path)
    assert len(stored) == 1 + keeps  # the first call and later ones have different plans
    variants = forbid_planning(monkeypatch)
    losses, after = run(budget, tmp_path, **options)
    assert losses == expected
    assert len(set(variants)) <= 1 + keeps  # made again if the step is captured again
    assert variants[-1] == before.variant == after.variant
    assert after.planned.program == before.planned.program
    assert after.planned.plan == before.planned.plan
    assert (after.graph, after.is_quick) == (replace(before.graph, ops=after.graph.ops), before.is_quick)
    assert after.planning_seconds == 0 < before.planning_seconds or kind == "fused"
    assert files(tmp_path) == stored


def test_each_planning_input_makes_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = smallest("off") + 2 * MIB
    options: dict[str, Any] = {"split": "off"}
    run(budget, tmp_path, **options)
    stored = files(tmp_path)
    run(budget, tmp_path, **options)
    assert files(tmp_path) == stored

    def adds_plans(**changed: Any) -> bool:
        before = files(tmp_path)
        settings: dict[str, Any] = {"budget": budget, **options, **changed}
        run(settings.pop("budget"), tmp_path, **settings)
        return before < files(tmp_path)

    assert adds_plans(budget=budget + MIB)
    assert adds_plans(policy="window")
    assert adds_plans(policy=QUICKLY.replace("tunings=20", "tunings=21"))
    assert adds_plans(split="exact")
    assert adds_plans(rows=BATCH // 2)
    assert adds_plans(home="disk")
    assert adds_plans(home="disk", host_budget="4MiB")
    assert adds_plans(home="disk", host_budget="6MiB")
    assert adds_plans(keeps_gradients=True)
    assert adds_plans(keeps_gradients=True, repeats=False)
    with monkeypatch.context() as patch:
        patch.setattr("outofcore.plan_store.library_version", lambda: "another")
        assert adds_plans()
    with monkeypatch.context() as patch:
        patch.setattr(HostHome, "capacity", property(lambda _: 5 * MIB))
        assert adds_plans()
    assert not adds_plans()


@pytest.mark.parametrize("damage", ["cut", "foreign", "of another budget", "of an older version"])
def test_damaged_plan_is_made_again_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = smallest("off") + MIB
    expected, _ = run(budget, tmp_path, split="off")
    (name,) = files(tmp_path)
    path = tmp_path / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "foreign":
        path.write_text('{"format": "outofcore-plan/1"}')
    elif damage == "of an older version":
        # Stored at an obsolete path; ignored without an error.
        path.rename(tmp_path / "plan-00000000000000000000000000000000-quick.json")
        (tmp_path / "loops").mkdir()
        (tmp_path / "loops" / "0.json").write_text("{")
    else:
        run(2 * budget, tmp_path, split="off")
        (other_name,) = files(tmp_path) - {name}
        (tmp_path / other_name).replace(path)
    caplog.clear()
    losses, step = run(budget, tmp_path, split="off")
    assert losses == expected
    assert step.arena_bytes <= budget
    assert ("a stored plan cannot be used and is made again" in caplog.text) == (damage != "of an older version")
    caplog.clear()
    assert run(budget, tmp_path, split="off")[0] == expected
    assert "made anew" not in caplog.text


def test_stored_plan_is_replaced_when_its_costs_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = smallest("off") + MIB
    expected = train(make()[0], 8)
    _, before = run(budget, tmp_path, split="off", policy="window")
    with monkeypatch.context() as patch:
        for name, value in (("undisturbed.DISTURBED", 1e6), ("replanning.DISTURBED", 1e6), ("replanning.SHARE", 1e6)):
            patch.setattr(f"outofcore.{name}", value)
        patch.setattr("outofcore.replanning._MAX_OPS_SHARE", 1e6)
        patch.setattr("outofcore.background._CLEARLY", -1e6)
        patch.setattr("outofcore.replanning.is_off", lambda *_: True)
        patch.setattr("outofcore.plan_updates.BackgroundPlanner", ForegroundPlanner)
        with compile_step(budget, tmp_path, split="off", policy="window") as step:
            assert train(step, 8) == expected
            shown = step._session.steps.last_step
        assert shown.planned is not before.planned
        assert shown.costs != before.costs
        assert shown.choice == before.choice
    variants = forbid_planning(monkeypatch)
    _, after = run(budget, tmp_path, split="off", policy="window")
    assert variants == [after.variant]
    assert after.planned.program == shown.planned.program


def test_prepare_replaces_a_quick_plan(tmp_path: Path) -> None:
    budget = smallest("off") + MIB
    _, before = run(budget, tmp_path, split="off")
    assert before.is_quick
    with compile_step(budget, tmp_path, split="off") as step:
        step.prepare(torch.randn(BATCH, WIDTH))
        (entry,) = step._session.steps.by_signature.values()
        assert not entry.step.is_quick
        assert entry.step.planning_seconds > 0
    _, after = run(budget, tmp_path, split="off")
    assert not after.is_quick
    assert after.planning_seconds == 0


def test_plan_of_a_busy_machine_is_made_again_when_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = smallest("off") + MIB

    def plans(*, is_busy: bool) -> bool:
        monkeypatch.setattr(ops, "was_busy", lambda _: is_busy)
        _, step = run(budget, tmp_path, split="off")
        assert step.costs.is_busy == is_busy
        return step.planning_seconds > 0

    # Planning again cannot help while the machine is busy.
    assert [plans(is_busy=busy) for busy in (True, True, False, False)] == [True, False, True, False]


def test_refusal_is_not_stored(tmp_path: Path) -> None:
    budget = smallest("off") - 64 * 1024
    for _ in range(2):
        with pytest.raises(outofcore.BudgetError), compile_step(budget, tmp_path, split="off") as step:
            train(step)
        assert not files(tmp_path)


def test_plans_are_not_stored_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("the store was used")

    for name in ("find", "save"):
        monkeypatch.setattr(PlanStore, name, never)
    with compile_step(smallest("off") + MIB, False, split="off") as step:  # type: ignore[arg-type]
        train(step)


def test_clear_cache_deletes_plans_of_steps_and_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_planner, "BackgroundPlanner", ForegroundPlanner)
    run(smallest("off") + MIB, tmp_path, split="off")
    step, model, _ = make()
    with outofcore.budget(3 * MIB, model, cache=tmp_path, policy=WITHOUT_RECOMPUTATION, home="host"):
        train(step, 4)
    kinds = {path.name.partition("-")[0] for path in tmp_path.glob("*.json")}
    assert {"plan", "loop"} <= kinds
    (tmp_path / "mine.txt").write_text("")
    result = CliRunner().invoke(app, ["doctor", "--cache", str(tmp_path), "--clear-cache"])
    assert result.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
