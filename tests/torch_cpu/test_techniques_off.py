"""Tests that steps and loops are exact with each technique of the planner and the runtime switched off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ablate import TECHNIQUES
from capture_cases import Case
from effort import some_of
from following import train_loop
from loops import LOOPS
from steps import CASES, assert_same, smallest_of, visible_tensors
from torch.utils import _pytree as pytree

import outofcore
from outofcore.policies import Auto, SearchParams
from outofcore.validator import validate

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
NAMES = ("gpt", "gan", "resnet")

# Search parameters and options of ``compile`` that switch each technique off.
PLANNER: dict[str, dict[str, Any]] = {
    **{name: fields for name, fields in TECHNIQUES.items() if fields},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "replay": {"replay": False},
    "split": {"split": "off"},
    "checks": {"check": "off"},
    "sampling of checks": {"check": "full"},
    "kept measurements": {"cache": False},
    "search": {"policy": "offload-all"},
}
TECHNIQUES_OFF = [*PLANNER, *OPTIONS]
IN_EACH_CHANGE = {("gan", "replay"), ("gan", "checks")}


def results_of(case: Case, step: Callable[..., Any], check: Callable[[], None] = lambda: None) -> list[Any]:
    """Return the detached results of some steps; call ``check`` after each."""
    results: list[Any] = []
    for _ in range(STEPS):
        result = step(*case.batch(), **case.kwargs)
        results.append(pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, result))
        check()
    return results


@functools.cache
def plain(name: str) -> tuple[list[Any], dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(1234)
    case = CASES[name]()
    return results_of(case, case.step), dict(visible_tensors(case)), torch.get_rng_state()


@functools.cache
def smallest(name: str, split: str) -> int:
    return smallest_of(CASES[name], "off" if split == "off" else "exact")


@pytest.mark.parametrize(
    ("name", "technique"),
    some_of([(name, technique) for name in NAMES for technique in TECHNIQUES_OFF], IN_EACH_CHANGE),
)
def test_step_is_exact_without_one_technique(name: str, technique: str) -> None:
    options: dict[str, Any] = {"policy": Auto(SearchParams(**PLANNER.get(technique, {})))}
    options |= OPTIONS.get(technique, {})
    results, state, generator = plain(name)
    in_full = smallest(name, options.get("split", "exact"))
    for share in (1.0, 1.5):
        budget = int(share * in_full)
        torch.manual_seed(1234)
        case = CASES[name]()
        with outofcore.compile(case.step, case.models, case.optimizers, budget=budget, **options) as step:

            def check(step: Any = step, budget: int = budget) -> None:
                validate(step.captured.graph, step.planned.program, budget, step.costs)
                assert step.planned.program.arena_bytes <= budget

            assert_same(results_of(case, step, check), results)
            # Without splits, 1.5 times the GAN's smallest budget holds all its storages.
            assert step.stats.bytes_in > 0 or (name, technique, share) == ("gan", "split", 1.5)
        assert torch.equal(torch.get_rng_state(), generator)
        ours = dict(visible_tensors(case))
        assert [key for key, tensor in state.items() if not torch.equal(ours[key], tensor)] == []


LOOP_OPTIONS: dict[str, dict[str, Any]] = {
    "plans": {"policy": None},
    "recomputation": {"policy": Auto(SearchParams(recompute_changes=0))},
    "search": {"policy": "offload-all"},
    "disk": {"home": "host"},
}


@pytest.mark.parametrize("technique", some_of(LOOP_OPTIONS, ["plans"]))
def test_loop_is_exact_without_one_technique(technique: str) -> None:
    loop = LOOPS["checkpointed"]
    theirs, _ = train_loop(*loop)
    roomy, stats = train_loop(*loop, budget=1 << 30)
    assert roomy.differs_from(theirs) == ""
    assert stats is not None
    ours, stats = train_loop(*loop, budget=int(0.4 * stats.peak_bytes), **LOOP_OPTIONS[technique])
    assert ours.differs_from(theirs) == ""
    assert stats is not None
    assert stats.evictions > 0
