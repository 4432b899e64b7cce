"""Tests of planning again: once after measured times, and whenever an op needs more memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore import planning
from outofcore.errors import BudgetError
from outofcore.planning.placement.requests import ResultStorage, Scratch
from outofcore.profiling import ops as profiling_ops
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import OpProfile, ProfileCache
from outofcore.units import KIB, MIB

# Bytes of scratch memory that the operator below requests.
SCRATCH = [128 * KIB]


@torch.library.custom_op("outofcore_tests::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    """Add one, with scratch memory that is allocated before the result."""
    scratch = torch.empty(SCRATCH[0] // 4)
    scratch.fill_(1.0)
    return x + scratch[: x.shape[-1]]


@moody.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def _reset_scratch() -> Iterator[None]:
    SCRATCH[0] = 128 * KIB
    yield
    SCRATCH[0] = 128 * KIB


@pytest.fixture(autouse=True)
def _ignore_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no step as noisy and every plan as improvable; plan in the foreground at any cost."""
    monkeypatch.setattr("outofcore.undisturbed.DISTURBED", 1e6)
    monkeypatch.setattr("outofcore.replanning.DISTURBED", 1e6)
    monkeypatch.setattr("outofcore.replanning._MAX_OPS_SHARE", 1e6)
    monkeypatch.setattr("outofcore.replanning.SHARE", 1e6)
    monkeypatch.setattr("outofcore.background.BackgroundPlanner.start", lambda *_: False)


def make() -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(moody(x)), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def train(step: Callable[..., torch.Tensor], scratch_sizes: list[int]) -> list[float]:
    results = []
    for size in scratch_sizes:
        SCRATCH[0] = size
        results.append(step(torch.ones(256, 256)).item())
    return results


def memory_replans(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "planned again for memory" in r.getMessage()]


def test_growing_scratch_memory_is_planned_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "outofcore")
    usual_bytes, more_bytes, largest_bytes = 128 * KIB, MIB, 2 * MIB
    scratch_sizes = [
        usual_bytes,
        usual_bytes,
        more_bytes,
        more_bytes,
        more_bytes,
        usual_bytes,
        largest_bytes,
        largest_bytes,
    ]
    expected = train(make()[0], scratch_sizes)
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget="256MiB", cache=tmp_path) as compiled:
        assert train(compiled, scratch_sizes[:2]) == expected[:2]
        first = compiled.planned
        assert compiled.stats.off_plan == 0
        assert train(compiled, scratch_sizes[2:3]) == expected[2:3]
        # The scratch memory, and the result that was planned after it.
        assert compiled.stats.off_plan == 2
        (index,) = (op.id for op in compiled.captured.graph.ops if "moody" in op.name)
        assert train(compiled, scratch_sizes[3:5]) == expected[3:5]
        assert compiled.planned is not first
        assert compiled.costs.ops[index].workspace_bytes == more_bytes
        assert compiled.stats.off_plan == 2
        assert len(memory_replans(caplog)) == 1
        assert f"op {index} (outofcore_tests.moody" in caplog.text
        assert "scratch memory of 1.00 MiB instead of 128 KiB" in caplog.text
        # A smaller size fits into the op's workspace. A larger one is planned for once the step has ended.
        assert train(compiled, scratch_sizes[5:6]) == expected[5:6]
        assert compiled.stats.off_plan == 2
        assert train(compiled, scratch_sizes[6:7]) == expected[6:7]
        assert compiled.stats.off_plan == 3
        assert train(compiled, scratch_sizes[7:]) == expected[7:]
        assert compiled.stats.off_plan == 3
        assert compiled.costs.ops[index].workspace_bytes == largest_bytes
        assert len(memory_replans(caplog)) == 2


def test_step_beyond_the_budget_is_refused_and_undone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outofcore")
    step, model, optimizer = make()
    usual_bytes, more_bytes = 128 * KIB, 16 * MIB
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(torch.ones(256, 256),), cache=False)
    assert smallest < more_bytes
    expected = train(make()[0], [usual_bytes] * 4)
    step, model, optimizer = make()
    # With this policy calls are never run as an eager loop.
    with outofcore.compile(step, model, optimizer, budget=smallest, policy="offload-all", cache=False) as compiled:
        assert train(compiled, [usual_bytes] * 2) == expected[:2]
        for _ in range(2):
            with pytest.raises(BudgetError, match="moody") as caught:
                train(compiled, [more_bytes])
            assert more_bytes < (caught.value.smallest_budget or 0) < 2 * more_bytes
            assert any("undone and can be called again" in note for note in caught.value.__notes__)
        assert train(compiled, [usual_bytes] * 2) == expected[2:]
    assert memory_replans(caplog) == []
    step, model, optimizer = make()
    larger = caught.value.smallest_budget or 0
    with outofcore.compile(step, model, optimizer, budget=larger, policy="offload-all", cache=False) as compiled:
        assert train(compiled, [more_bytes, usual_bytes, more_bytes]) == expected[:3]


def test_scratch_memory_of_the_first_step_is_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outofcore")
    step, model, optimizer = make()
    with outofcore.compile(step, model, optimizer, budget="256MiB", cache=False) as compiled:
        original = profiling_ops.profile_selected

        def profile_and_grow(*args: Any, **kwargs: Any) -> Any:
            profiles = original(*args, **kwargs)
            SCRATCH[0] = MIB
            return profiles

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outofcore.step_variants.profile_selected", profile_and_grow)
            compiled(torch.ones(256, 256))
        train(compiled, [128 * KIB, MIB])
        assert compiled.stats.off_plan == 2
    assert len(memory_replans(caplog)) == 1


def test_corrected_profile_of_a_pytorch_op_is_cached(tmp_path: Path) -> None:
    """The cache starts with a wrong profile, which has no scratch memory for an op that needs it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    cache, x = Cache(tmp_path), torch.ones(4, 16, 32, 32)
    with outofcore.compile(step, model, budget="256MiB", cache=tmp_path) as compiled:
        compiled(x)
        graph, profiles = compiled.captured.graph, compiled._session.steps.last_step.profiles  # type: ignore[index]
    op_ids = [i for i, p in enumerate(profiles) if p.cost.workspace_bytes >= MIB // 8 and p.first_requests is None]
    if not op_ids:
        pytest.skip("no op of this step needs scratch memory on this machine")
    op, profile = graph.ops[op_ids[0]], profiles[op_ids[0]]
    cached_profiles = ProfileCache(cache)
    remaining = [r for r in profile.requests.requests if not isinstance(r.placement, Scratch)]
    wrong = OpProfile(
        replace(profile.cost, workspace_bytes=0),
        replace(profile.requests, requests=tuple(remaining), workspace_bytes=0),
    )
    cached_profiles.add(op, wrong, timed=True)
    cached_profiles.save()
    for parameter in model.parameters():
        parameter.grad = None
    with outofcore.compile(step, model, budget="256MiB", cache=tmp_path) as compiled:
        for _ in range(3):
            compiled(x)
            for parameter in model.parameters():
                parameter.grad = None
        assert compiled.costs.ops[op_ids[0]].workspace_bytes == profile.cost.workspace_bytes
    corrected = ProfileCache(cache).find(op, timed=True, first_differs=False)
    assert corrected is not None
    assert corrected.cost.workspace_bytes == profile.cost.workspace_bytes
    assert [r.bytes for r in corrected.requests.requests] == [r.bytes for r in profile.requests.requests]
    assert any(isinstance(r.placement, ResultStorage) for r in corrected.requests.requests)


@pytest.mark.parametrize("cause", ["times", "memory"])
def test_arena_is_released_before_planning_again(
    cause: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes memory, which together with the arena would break the budget."""
    caplog.set_level(logging.INFO, "outofcore")
    monkeypatch.setattr("outofcore.replanning.is_off", lambda *_: cause == "times")
    usual_bytes, more_bytes = 128 * KIB, 512 * KIB
    step, model, optimizer = make()
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(torch.ones(256, 256),), cache=False)
    step, model, optimizer = make()
    regions: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    original = planning.plans_of_step

    def plans_of_step(*args: Any, **kwargs: Any) -> Any:
        alive.extend(region() is not None for region in regions)
        return original(*args, **kwargs)

    monkeypatch.setattr(planning, "plans_of_step", plans_of_step)
    budget = smallest + MIB
    with outofcore.compile(step, model, optimizer, budget=budget, policy="offload-all", cache=False) as compiled:
        monkeypatch.setattr(compiled._session.planner.backend, "reserve", lambda _: more_bytes + MIB)
        scratch_sizes = [usual_bytes] * 2 + [usual_bytes if cause == "times" else more_bytes] * 4
        expected = train(make()[0], scratch_sizes)
        results = train(compiled, scratch_sizes[:1])
        assert compiled._session.steps.arena is not None
        regions.append(weakref.ref(compiled._session.steps.arena.region))
        results += train(compiled, scratch_sizes[1:])
        assert results == expected
    assert any("planned again" in r.getMessage() for r in caplog.records)
    assert alive == [False]


@pytest.mark.parametrize("budget", ["smallest", "all"])
def test_plan_refused_by_the_validator_does_not_run(
    budget: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The refused plans are the first plan or the in-core plan, and a plan made again."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("outofcore.replanning.is_off", lambda *_: True)
    plans, in_core = planning.plans_of_step, planning.plan_in_core
    broken_plans: list[planning.Planned] = []

    def break_program(planned: planning.Planned) -> planning.Planned:
        broken_plans.append(planned)
        return replace(planned, program=replace(planned.program, instructions=planned.program.instructions[1:]))

    def plans_of_step(*args: Any, **kwargs: Any) -> Iterator[planning.Planned]:
        candidates = list(plans(*args, **kwargs))
        yield break_program(candidates[0])
        yield from candidates

    monkeypatch.setattr(planning, "plans_of_step", plans_of_step)
    monkeypatch.setattr(
        planning, "plan_in_core", lambda *args: break_program(plan) if (plan := in_core(*args)) else None
    )
    step, model, optimizer = make()
    expected = train(step, [128 * KIB] * 6)
    step, model, optimizer = make()
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(torch.ones(256, 256),), split="off")
    count = smallest if budget == "smallest" else 64 * MIB
    with outofcore.compile(step, model, optimizer, budget=count, policy="window") as compiled:
        assert train(compiled, [128 * KIB] * 6) == expected
    assert len(broken_plans) == 2
    assert len([r for r in caplog.records if "bug in outofcore" in r.getMessage()]) == 2
    assert len(list(tmp_path.glob("outofcore-fault-*.zip"))) == 2


def test_step_is_planned_again_within_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, outputs outside of the arena leave less room for it at some input shapes."""
    monkeypatch.setattr("outofcore.replanning.is_off", lambda *_: True)
    plans, budgets = planning.plans_of_step, []

    def plans_of_step(graph: Any, costs: Any, budget: int, *args: Any, **kwargs: Any) -> Any:
        budgets.append(budget)
        return plans(graph, costs, budget, *args, **kwargs)

    monkeypatch.setattr(planning, "plans_of_step", plans_of_step)
    step, model, optimizer = make()
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=(torch.ones(256, 256),), split="off")
    with outofcore.compile(step, model, optimizer, budget=smallest + 4 * MIB, policy="window") as compiled:
        monkeypatch.setattr(compiled._session.planner.backend, "unavailable_bytes", lambda *_: MIB)
        compiled(torch.ones(256, 256))
        monkeypatch.setattr(compiled._session.planner.backend, "unavailable_bytes", lambda *_: 3 * MIB)
        compiled(torch.ones(128, 256))
        first, second = budgets
        assert first == second + 2 * MIB
        for _ in range(4):
            compiled(torch.ones(256, 256))
        assert budgets == [first, second, first]
