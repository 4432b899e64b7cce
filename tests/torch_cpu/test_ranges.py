"""Tests of parameters and optimizer state that are fetched in ranges because they exceed the budget."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_cases import Case
from effort import some_of
from exactness import assert_same, check_exact
from split_steps import split_all
from torch import nn

import outofcore
from outofcore.capture import Captured, capture_step
from outofcore.graph import StorageKind
from outofcore.profiling.cache import Cache
from outofcore.transforms.split import split_step
from outofcore.units import MIB, PAGE_BYTES


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("verdicts"))


class Words(nn.Module):
    """A model with an embedding, optionally tied to its head, whose rows are not whole pages."""

    def __init__(self, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(1500, 200, **options)
        self.mix = nn.Linear(200, 200)
        self.head = nn.Linear(200, 1500, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.mix(self.table(tokens)))).flatten(0, 1), targets.flatten())


def make_words(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *, clip: bool = False, **options: Any
) -> Case:
    model = Words(**options)
    optimizer = make(model.parameters())

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer], lambda: (torch.randint(1500, (4, 12)), torch.randint(1500, (4, 12))))


def make_squares_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_images() -> Case:
    model = nn.Sequential(nn.Conv2d(8, 96, 3), nn.ReLU(), nn.Conv2d(96, 320, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    return Case(make_squares_step(model, optimizer), [model], [optimizer], lambda: (torch.randn(2, 8, 10, 10),))


def make_modified() -> Case:
    """Make a step that also clamps, averages and penalises its parameters."""
    model = nn.Linear(300, 400)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + model.weight.abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight.clamp_(-0.05, 0.05)
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)
        return loss

    return Case(step, [model, average], [optimizer], lambda: (torch.randn(8, 300),))


def make_two_updates() -> Case:
    model = nn.Linear(300, 400)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for _ in range(2):
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses[1]

    return Case(step, [model], [optimizer], lambda: (torch.randn(8, 300),))


def make_kept_gradients(*, accumulates: bool = False) -> Case:
    """Make a step that leaves its gradients to the user or accumulates them."""
    model = nn.Linear(300, 400)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        if not accumulates:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Case(step, [model], [optimizer], lambda: (torch.randn(8, 300),))


def make_frozen() -> Case:
    model = nn.Sequential(nn.Embedding(1500, 200), nn.Linear(200, 600), nn.Linear(600, 4))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters())

    return Case(make_squares_step(model, optimizer), [model], [optimizer], lambda: (torch.randint(1500, (4, 12)),))


SGD = functools.partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": SGD,
    "momentum": functools.partial(SGD, momentum=0.9, weight_decay=0.01),
    "adamw": torch.optim.AdamW,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.01),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    # These update all parameters at once or not elementwise, so their updates stay whole.
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adafactor": torch.optim.Adafactor,
}
CASES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(make_words, make) for name, make in OPTIMIZERS.items()},
    "tied": functools.partial(make_words, tied=True),
    "padded": functools.partial(make_words, padding_idx=3),
    "padded_tied": functools.partial(make_words, padding_idx=1499, tied=True),
    "by_frequency": functools.partial(make_words, scale_grad_by_freq=True),
    "renormed": functools.partial(make_words, max_norm=1.0),
    "clipped": functools.partial(make_words, clip=True, tied=True),
    "images": make_images,
    "modified": make_modified,
    "twice_a_step": make_two_updates,
    "kept_gradients": make_kept_gradients,
    "accumulated": functools.partial(make_kept_gradients, accumulates=True),
    "frozen": make_frozen,
}
UNSPLIT = {"foreach", "adafactor"}


@pytest.mark.parametrize(("name", "factor"), some_of(itertools.product(CASES, [2, 5]), lambda case: case[1] == 5))
def test_split_steps_are_exact(name: str, factor: int, verdicts: Cache) -> None:
    split_steps: list[Captured] = []

    def change(captured: Captured) -> Captured:
        split_steps.append(split_all(captured, factor, verdicts))
        return split_steps[-1]

    check_exact(CASES[name], change)
    for captured in split_steps:
        check_ranges(captured)
        kinds = {captured.graph.storages[part.whole].kind for part in captured.ranges.values()}
        assert (StorageKind.OPTIMIZER_STATE in kinds) == (name not in {"sgd", "twice_a_step", "frozen", *UNSPLIT})


def check_ranges(captured: Captured) -> None:
    """Check that ranges cover their tensors, begin at pages and are large."""
    graph = captured.graph
    wholes: dict[int, list[tuple[int, int]]] = {}
    for storage, part in captured.ranges.items():
        count = graph.storages[storage].bytes
        assert graph.storages[storage].kind is StorageKind.STATE_RANGE
        assert graph.uses[storage]
        assert not graph.uses[part.whole]
        assert part.offset % PAGE_BYTES == 0
        assert count >= 64 << 10
        wholes.setdefault(part.whole, []).append((part.offset, part.offset + count))
    for whole, spans in wholes.items():
        spans.sort()
        assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), graph.storages[whole].bytes]
    assert {s.id for s in graph.storages if s.kind is StorageKind.STATE_RANGE} == captured.ranges.keys()


def test_state_stays_whole_without_room_at_home() -> None:
    case = make_words()
    captured = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    max_bytes = 1 << 18
    split_captured = split_step(captured, max_bytes).captured
    assert len({part.whole for part in split_captured.ranges.values()}) == 6  # two tables, two moments of each
    assert not split_step(captured, max_bytes, home=0).captured.ranges
    room = 3 * captured.graph.storages[split_captured.ranges[max(split_captured.ranges)].whole].bytes
    partly_split = split_step(captured, max_bytes, home=room + MIB).captured
    assert len({part.whole for part in partly_split.ranges.values()}) == 3


# Complete steps within a budget smaller than any large parameter.


def small_budget(case: Case) -> int:
    return outofcore.smallest_budget(case.step, case.models, case.optimizers, inputs=case.batch())


def make_large(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Case:
    """Return a case with a table of 6 MiB and a layer of 4 MiB."""
    model = nn.Sequential(nn.Embedding(6144, 256), nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 8))
    optimizer = make(model.parameters())

    return Case(make_squares_step(model, optimizer), [model], [optimizer], lambda: (torch.randint(6144, (16, 4)),))


def make_pair(make: Callable[[], Case] = make_large) -> tuple[Case, Case]:
    torch.manual_seed(0)
    first = make()
    torch.manual_seed(0)
    return first, make()


def assert_equal_state(ours: Case, plain: Case, when: str) -> None:
    for actual, expected in zip((*ours.models, *ours.optimizers), (*plain.models, *plain.optimizers), strict=True):
        assert_same(actual.state_dict(), expected.state_dict(), when)


@pytest.mark.parametrize("name", some_of(["momentum", "adamw", "amsgrad", "radam"], ["adamw"]))
def test_parameter_larger_than_the_budget_is_trained(name: str) -> None:
    ours, plain = make_pair(functools.partial(make_large, OPTIMIZERS[name]))
    budget = small_budget(ours)
    assert budget < 5 * MIB
    unsplit_budget = outofcore.smallest_budget(
        ours.step, ours.models, ours.optimizers, inputs=ours.batch(), split="off"
    )
    assert unsplit_budget > 20 * MIB
    tokens = [ours.batch() for _ in range(4)]
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget) as step:
        for k, batch in enumerate(tokens):
            assert step(*batch).item() == plain.step(*batch).item()
            # The whole state is visible between steps.
            assert_equal_state(ours, plain, f"after step {k}")
        assert step.planned.program.arena_bytes <= budget
    assert_equal_state(ours, plain, "at the end")


def test_user_changes_between_steps_take_effect() -> None:
    ours, plain = make_pair()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=small_budget(ours)) as step:
        for k in range(6):
            for case in (ours, plain):
                optimizer, table = case.optimizers[0], next(case.models[0].parameters())
                with torch.no_grad():
                    match k:
                        case 1:
                            table[5000:].mul_(2)
                        case 2:
                            table.data = table.detach() + 1
                        case 3:
                            optimizer.state[table]["exp_avg"].zero_()
                        case 4:
                            optimizer.state[table]["exp_avg_sq"] = torch.ones_like(table)
                        case 5:
                            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                        case _:
                            pass
            batch = ours.batch()
            assert step(*batch).item() == plain.step(*batch).item()
            assert_equal_state(ours, plain, f"after step {k}")


def test_learning_rate_and_new_state_reach_every_range() -> None:
    """A schedule changes the learning rate, and the optimizer creates its cleared state again."""
    ours, plain = make_pair()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=small_budget(ours)) as step:
        for k in range(5):
            for case in (ours, plain):
                case.optimizers[0].param_groups[0]["lr"] = 1e-3 * (k + 1)
                if k == 3:
                    case.optimizers[0].state.clear()
            batch = ours.batch()
            assert step(*batch).item() == plain.step(*batch).item()
            assert_equal_state(ours, plain, f"after step {k}")


def test_plans_with_and_without_ranges_can_alternate() -> None:
    """One model runs with parameters in ranges, whole in the arena, and in plain PyTorch."""
    ours, plain = make_pair()
    small = small_budget(ours)
    for budget in (small, 64 * MIB, small):
        with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget) as step:
            for _ in range(2):
                batch = ours.batch()
                assert step(*batch).item() == plain.step(*batch).item()
        assert_equal_state(ours, plain, f"within {budget}")
        batch = ours.batch()
        assert ours.step(*batch).item() == plain.step(*batch).item()


def test_checkpoint_holds_all_ranges(tmp_path: Path) -> None:
    ours, plain = make_pair()
    budget, batch = small_budget(ours), ours.batch()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget) as step:
        step(*batch)
        plain.step(*batch)
        outofcore.save(tmp_path / "there", ours.models[0], ours.optimizers[0])
        for _ in range(2):
            step(*batch)
        outofcore.load(tmp_path / "there", ours.models[0], ours.optimizers[0])
        assert_equal_state(ours, plain, "as saved")
        assert step(*batch).item() == plain.step(*batch).item()
        assert_equal_state(ours, plain, "after one more step")


def test_step_with_an_invalid_token_fails_without_changes() -> None:
    ours, plain = make_pair()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=small_budget(ours)) as step:
        batch = ours.batch()
        assert step(*batch).item() == plain.step(*batch).item()
        for wrong in (6144, -1):
            tokens = ours.batch()[0].clone()
            tokens[3, 2] = wrong
            with pytest.raises(IndexError, match="index out of range"):
                step(tokens)
            assert_equal_state(ours, plain, "after a step that failed")
        batch = ours.batch()
        assert step(*batch).item() == plain.step(*batch).item()
        assert_equal_state(ours, plain, "after one more step")
