"""Tests of steps over host memory with its own budget and a disk behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_cases import Case
from effort import some_of
from steps import CASES, assert_same, budgets_of, visible_tensors
from torch import nn

import outofcore
from outofcore.errors import BudgetError, InputError, SpillError
from outofcore.planning import POLICIES
from outofcore.program import CopyIn, CopyOut
from outofcore.runtime.homes import HostHome
from outofcore.runtime.slots import SlotPiece, Slots
from outofcore.units import GIB, KIB, MIB, PAGE_BYTES
from outofcore.validator import validate

STEPS = 3


def train(
    make: Callable[[], Case], budget: int, host_budget: int, folder: Path, policy: str = "auto"
) -> tuple[list[Any], Case, set[int]]:
    """Return results, the case and the homes copied to; validate every program."""
    torch.manual_seed(1234)
    case = make()
    used: set[int] = set()
    step = outofcore.compile(
        case.step,
        list(case.models),
        list(case.optimizers),
        budget=budget,
        home=folder,
        host_budget=host_budget,
        policy=policy,
    )
    results: list[Any] = []
    for _ in range(STEPS):
        results.append(step(*case.batch(), **case.kwargs))
        planned = step.planned
        validate(step.captured.graph, planned.program, budget, step.costs)
        host, _ = step.homes
        assert host.bytes <= host_budget
        used |= {i.home for i in planned.program.instructions if isinstance(i, CopyOut)}
    step.close()
    return results, case, used


def in_core(make: Callable[[], Case]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    torch.manual_seed(1234)
    case = make()
    results = [case.step(*case.batch(), **case.kwargs) for _ in range(STEPS)]
    return results, dict(visible_tensors(case))


@pytest.mark.parametrize(
    ("name", "of_budget", "share"),
    [
        *some_of([("gpt", 0.0, 0.2)], []),
        ("gpt", 0.1, 0.2),
        *[("optimizer_adamw", of_budget, share) for of_budget in (0.0, 0.5) for share in (0.05, 0.2, 1.5)],
    ],
)
def test_steps_are_exact_at_several_budgets_and_host_budgets(
    name: str, of_budget: float, share: float, tmp_path: Path
) -> None:
    theirs, right = in_core(CASES[name])
    smallest, everything_fits = budgets_of(CASES[name])
    budget = smallest + int(of_budget * (everything_fits - smallest))
    host_budget = max(int(share * everything_fits), 3 * 64 * KIB)
    # "auto" plans longer at the smallest budget.
    policy = "offload-all" if name == "gpt" and not of_budget else "auto:polish_ops=0"
    ours, case, used = train(CASES[name], budget, host_budget, tmp_path, policy)
    assert_same(ours, theirs)
    for key, tensor in visible_tensors(case):
        assert torch.equal(tensor, right[key]), f"{key} differs"
    if name == "gpt":
        assert used == {0, 1}


@pytest.mark.parametrize(
    "policy", sorted(set(POLICIES) - {"auto", "keep-all", "pooch", "profile-guided", "sqrt-checkpoint"})
)
def test_every_policy_is_exact_over_two_homes(policy: str, tmp_path: Path) -> None:
    make = CASES["optimizer_adamw"]
    theirs, right = in_core(make)
    smallest, everything_fits = budgets_of(make)
    ours, case, used = train(make, (smallest + everything_fits) // 2, everything_fits // 5, tmp_path, policy)
    assert_same(ours, theirs)
    assert used
    for key, tensor in visible_tensors(case):
        assert torch.equal(tensor, right[key])


def test_other_shapes_share_the_host_budget(tmp_path: Path) -> None:
    """A program's space in host memory is reused by the next program."""

    def make_step() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, whole: bool) -> torch.Tensor:
            y = model(x) if whole else model[4](x)
            loss = F.mse_loss(y, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, optimizer, step

    model, optimizer, plain = make_step()
    compiled_model, compiled_optimizer, uncompiled = make_step()
    smallest = outofcore.smallest_budget(
        uncompiled, compiled_model, compiled_optimizer, inputs=(torch.rand(64, 256), True), split="off"
    )
    with outofcore.compile(
        uncompiled, compiled_model, compiled_optimizer, budget=smallest, home=tmp_path, host_budget="1200KiB"
    ) as step:
        for number, (rows, whole) in enumerate(
            [(64, True), (64, True), (32, False), (16, True), (64, True), (64, False)]
        ):
            x = torch.rand(rows, 256, generator=torch.Generator().manual_seed(number))
            assert torch.equal(step(x, whole), plain(x, whole))
            for expected, actual in zip(model.parameters(), compiled_model.parameters(), strict=True):
                assert torch.equal(expected, actual)
            assert step.homes[0].bytes <= 1200 * KIB
    for expected, actual in zip(model.parameters(), compiled_model.parameters(), strict=True):
        assert torch.equal(expected, actual)
    for key, entries in optimizer.state_dict()["state"].items():
        for name, tensor in entries.items():
            assert torch.equal(tensor, compiled_optimizer.state_dict()["state"][key][name])


def test_host_budget_below_the_inputs_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    step = outofcore.compile(
        lambda x: model(x).sum().backward(), model, budget="3900KiB", home=tmp_path, host_budget="64KiB"
    )
    with pytest.raises(BudgetError, match=r"inputs and outputs .* 'host'"):
        step(torch.rand(512, 512))


def test_invalid_host_budgets_are_refused() -> None:
    model = nn.Linear(2, 2)
    for host_budget in (0, 100, "many", -5):
        with pytest.raises(InputError):
            outofcore.compile(lambda: None, model, budget="1MiB", host_budget=host_budget)


def test_host_memory_over_its_limit_is_refused_without_a_disk() -> None:
    make = CASES["optimizer_adamw"]
    smallest, _ = budgets_of(make)
    torch.manual_seed(1234)
    case = make()
    step = outofcore.compile(
        case.step,
        list(case.models),
        list(case.optimizers),
        budget=smallest,
        home="host",
        host_budget="150KiB",
        policy="offload-all",
    )
    before = {key: tensor.clone() for key, tensor in visible_tensors(case)}
    with pytest.raises(SpillError, match="limit is 148 KiB"):
        step(*case.batch())
    for key, tensor in visible_tensors(case):
        assert torch.equal(tensor, before[key])


def test_slots_reuse_the_lowest_free_pages() -> None:
    slots = Slots(HostHome(16 * PAGE_BYTES))
    page = PAGE_BYTES
    assert [slots.take(count * page) for count in (4, 3, 2)] == [0, 4 * page, 7 * page]
    slots.free(0, 4 * page)
    assert slots.take(3 * page - 1) == 0  # whole pages
    slots.free(4 * page, 3 * page)
    assert slots.take(4 * page) == 3 * page  # adjacent free slots merge
    slots.free(7 * page, 2 * page)
    assert slots.take(5 * page) == 7 * page  # extends the end
    assert slots.allocated_bytes == slots.home.bytes == slots.end == 12 * page
    with pytest.raises(SpillError, match="limit"):
        slots.take(5 * page)
    assert slots.take(4 * page) == 12 * page


def test_full_home_is_filled_in_pieces() -> None:
    slots = Slots(HostHome(8 * PAGE_BYTES))
    page = PAGE_BYTES
    for at in range(0, 8, 2):
        assert slots.take(2 * page) == at * page
    slots.free(0, 2 * page)
    slots.free(4 * page, 2 * page)
    with pytest.raises(SpillError):
        slots.take(3 * page)
    with pytest.raises(SpillError):
        slots.take_pieces(5 * page)
    assert slots.allocated_bytes == 4 * page
    assert slots.take_pieces(3 * page) == (SlotPiece(0, 2 * page), SlotPiece(4 * page, page))
    assert slots.take_pieces(page) == (SlotPiece(5 * page, page),)
    assert slots.allocated_bytes == 8 * page


def test_link_measurement_uses_no_space_of_the_home(tmp_path: Path) -> None:
    make = CASES["optimizer_adamw"]
    torch.manual_seed(1234)
    case = make()
    smallest, _ = budgets_of(make)
    with outofcore.compile(
        case.step,
        list(case.models),
        list(case.optimizers),
        budget=smallest,
        home=tmp_path,
        cache=False,
        host_budget=GIB,
    ) as step:
        step(*case.batch())
        moved = {i.block for i in step.planned.program.instructions if isinstance(i, CopyIn | CopyOut)}
        bytes_moved = sum(step.planned.program.blocks[block].bytes for block in moved)
        assert sum(home.bytes for home in step.homes) <= bytes_moved < 2 * MIB
