"""Parameters and optimizer state that come from home range by range, where a tensor is larger than there is room."""

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
from cutting import in_parts
from effort import some_of
from exactness import assert_same, check_exact
from torch import nn

import outofcore
from outofcore.capture import Captured, capture_step
from outofcore.graph import StorageKind
from outofcore.profiling.cache import Cache
from outofcore.transforms.split import tiled
from outofcore.units import MIB, PAGE_BYTES


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("verdicts"))


class Words(nn.Module):
    """A table that is looked up and, where it is tied, makes logits as well; its rows are no whole number of pages."""

    def __init__(self, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(1500, 200, **options)
        self.mix = nn.Linear(200, 200)
        self.head = nn.Linear(200, 1500, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.mix(self.table(tokens)))).flatten(0, 1), targets.flatten())


def words(
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


def squares(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that makes what a model returns smaller."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def images() -> Case:
    model = nn.Sequential(nn.Conv2d(8, 96, 3), nn.ReLU(), nn.Conv2d(96, 320, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    return Case(squares(model, optimizer), [model], [optimizer], lambda: (torch.randn(2, 8, 10, 10),))


def written_besides() -> Case:
    """Parameters that are changed by more than an update: clamped, averaged, and taken for a penalty."""
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


def twice_a_step() -> Case:
    """Two updates of each parameter in a step."""
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


def left(*, accumulates: bool = False) -> Case:
    """Gradients that are left to the user, or added to."""
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


def frozen() -> Case:
    """Of the model only the last layer learns."""
    model = nn.Sequential(nn.Embedding(1500, 200), nn.Linear(200, 600), nn.Linear(600, 4))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters())

    return Case(squares(model, optimizer), [model], [optimizer], lambda: (torch.randint(1500, (4, 12)),))


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
    # These go over all parameters at once, or not element by element: they are updated as one.
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adafactor": torch.optim.Adafactor,
}
CASES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(words, make) for name, make in OPTIMIZERS.items()},
    "tied": functools.partial(words, tied=True),
    "padded": functools.partial(words, padding_idx=3),
    "padded_tied": functools.partial(words, padding_idx=1499, tied=True),
    "by_frequency": functools.partial(words, scale_grad_by_freq=True),
    "renormed": functools.partial(words, max_norm=1.0),
    "clipped": functools.partial(words, clip=True, tied=True),
    "images": images,
    "written_besides": written_besides,
    "twice_a_step": twice_a_step,
    "left": left,
    "accumulated": functools.partial(left, accumulates=True),
    "frozen": frozen,
}
APART = {"foreach", "adafactor"}


@pytest.mark.parametrize(("name", "parts"), some_of(itertools.product(CASES, [2, 5]), lambda case: case[1] == 5))
def test_steps_are_exact(name: str, parts: int, verdicts: Cache) -> None:
    seen: list[Captured] = []

    def change(captured: Captured) -> Captured:
        seen.append(in_parts(captured, parts, verdicts))
        return seen[-1]

    check_exact(CASES[name], change)
    for captured in seen:
        check_ranges(captured)
        kinds = {captured.graph.storages[found.whole].kind for found in captured.ranges.values()}
        assert (StorageKind.OPTIMIZER_STATE in kinds) == (name not in {"sgd", "twice_a_step", "frozen", *APART})


def check_ranges(captured: Captured) -> None:
    """What is said of ranges holds: together they are the whole, they begin at pages, and none is small."""
    graph = captured.graph
    wholes: dict[int, list[tuple[int, int]]] = {}
    for storage, found in captured.ranges.items():
        count = graph.storages[storage].bytes
        assert graph.storages[storage].kind is StorageKind.STATE_RANGE
        assert graph.uses[storage]
        assert not graph.uses[found.whole]
        assert found.offset % PAGE_BYTES == 0
        assert count >= 64 << 10
        wholes.setdefault(found.whole, []).append((found.offset, found.offset + count))
    for whole, spans in wholes.items():
        spans.sort()
        assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), graph.storages[whole].bytes]
    assert {s.id for s in graph.storages if s.kind is StorageKind.STATE_RANGE} == captured.ranges.keys()


def test_without_a_home_for_it_state_stays_whole() -> None:
    case = words()
    captured = capture_step(case.step, case.models, case.optimizers, case.batch(), {})
    most = 1 << 18
    found = tiled(captured, most).captured
    assert len({part.whole for part in found.ranges.values()}) == 6  # two tables, two moments of each
    assert not tiled(captured, most, home=0).captured.ranges
    room = 3 * captured.graph.storages[found.ranges[max(found.ranges)].whole].bytes
    some = tiled(captured, most, home=room + MIB).captured
    assert len({part.whole for part in some.ranges.values()}) == 3


# Whole steps, within a budget that no parameter fits.


def small_budget(case: Case) -> int:
    return outofcore.smallest_budget(case.step, case.models, case.optimizers, inputs=case.batch())


def large(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Case:
    """A table of 6 MiB and a layer of 4 MiB."""
    model = nn.Sequential(nn.Embedding(6144, 256), nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 8))
    optimizer = make(model.parameters())

    return Case(squares(model, optimizer), [model], [optimizer], lambda: (torch.randint(6144, (16, 4)),))


def pair(make: Callable[[], Case] = large) -> tuple[Case, Case]:
    torch.manual_seed(0)
    one = make()
    torch.manual_seed(0)
    return one, make()


def assert_alike(ours: Case, plain: Case, when: str) -> None:
    for one, other in zip((*ours.models, *ours.optimizers), (*plain.models, *plain.optimizers), strict=True):
        assert_same(one.state_dict(), other.state_dict(), when)


@pytest.mark.parametrize("name", some_of(["momentum", "adamw", "amsgrad", "radam"], ["adamw"]))
def test_a_parameter_larger_than_the_budget_is_trained(name: str) -> None:
    ours, plain = pair(functools.partial(large, OPTIMIZERS[name]))
    budget = small_budget(ours)
    assert budget < 5 * MIB
    whole = outofcore.smallest_budget(ours.step, ours.models, ours.optimizers, inputs=ours.batch(), split="off")
    assert whole > 20 * MIB
    tokens = [ours.batch() for _ in range(4)]
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget) as step:
        for k, batch in enumerate(tokens):
            assert step(*batch).item() == plain.step(*batch).item()
            # The user sees all of it between two steps.
            assert_alike(ours, plain, f"after step {k}")
        assert step.planned.program.arena_bytes <= budget
    assert_alike(ours, plain, "at the end")


def test_what_the_user_changes_between_steps_counts() -> None:
    ours, plain = pair()
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
            assert_alike(ours, plain, f"after step {k}")


def test_settings_and_births_reach_every_range() -> None:
    """A schedule changes the learning rate, and state that was taken away is made anew, in all ranges alike."""
    ours, plain = pair()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=small_budget(ours)) as step:
        for k in range(5):
            for case in (ours, plain):
                case.optimizers[0].param_groups[0]["lr"] = 1e-3 * (k + 1)
                if k == 3:
                    case.optimizers[0].state.clear()
            batch = ours.batch()
            assert step(*batch).item() == plain.step(*batch).item()
            assert_alike(ours, plain, f"after step {k}")


def test_plans_take_turns() -> None:
    """The same model runs with parameters in ranges, as a whole in the arena, and as plain PyTorch."""
    ours, plain = pair()
    small = small_budget(ours)
    for budget in (small, 64 * MIB, small):
        with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget) as step:
            for _ in range(2):
                batch = ours.batch()
                assert step(*batch).item() == plain.step(*batch).item()
        assert_alike(ours, plain, f"within {budget}")
        batch = ours.batch()
        assert ours.step(*batch).item() == plain.step(*batch).item()


def test_checkpoints_hold_all_of_it(tmp_path: Path) -> None:
    ours, plain = pair()
    budget, batch = small_budget(ours), ours.batch()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=budget) as step:
        step(*batch)
        plain.step(*batch)
        outofcore.save(tmp_path / "there", ours.models[0], ours.optimizers[0])
        for _ in range(2):
            step(*batch)
        outofcore.load(tmp_path / "there", ours.models[0], ours.optimizers[0])
        assert_alike(ours, plain, "as saved")
        assert step(*batch).item() == plain.step(*batch).item()
        assert_alike(ours, plain, "after one more step")


def test_a_word_that_is_not_there_is_refused_and_nothing_is_lost() -> None:
    ours, plain = pair()
    with outofcore.compile(ours.step, ours.models, ours.optimizers, budget=small_budget(ours)) as step:
        batch = ours.batch()
        assert step(*batch).item() == plain.step(*batch).item()
        for wrong in (6144, -1):
            tokens = ours.batch()[0].clone()
            tokens[3, 2] = wrong
            with pytest.raises(IndexError, match="index out of range"):
                step(tokens)
            assert_alike(ours, plain, "after a step that failed")
        batch = ours.batch()
        assert step(*batch).item() == plain.step(*batch).item()
        assert_alike(ours, plain, "after one more step")
