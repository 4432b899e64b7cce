"""Weights that no op of the step writes cost no copy out, and whatever the user does to them between steps counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from faulty import fail_at
from safetensors.torch import save_file
from torch import nn

import outofcore
from outofcore.analysis import is_large
from outofcore.costs import Costs
from outofcore.errors import SpillError, TransferError
from outofcore.execution.aliases import Place
from outofcore.graph import StepGraph, StorageKind
from outofcore.policies import Decision, Plan, Residency, gaps_of
from outofcore.program import CopyIn, CopyOut
from outofcore.runtime.checksums import checksum
from outofcore.runtime.file_ranges import FIRST_RANGE
from outofcore.units import KIB

WIDTH, DEPTH = 160, 6
_WEIGHT = WIDTH * WIDTH * 4


class Adapted(nn.Module):
    """A frozen linear layer with what is learnt beside it, as in LoRA (Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) * 0.05)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


@dataclass
class Side:
    """A model with what trains it, in plain PyTorch or compiled."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    step: Callable[[torch.Tensor], torch.Tensor]
    kept: dict[str, Any]

    def layer(self, number: int) -> Any:
        return self.model[number % DEPTH]


def made(model: nn.Sequential | None = None) -> Side:
    if model is None:
        torch.manual_seed(3)
        model = nn.Sequential(*[Adapted() for _ in range(DEPTH)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Side(model, optimizer, step, {})


def batch(number: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))


def values(number: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number)) * 0.1


def half_stays(graph: StepGraph, costs: Costs, room: int) -> Plan:
    """All leaves within the step; of the frozen weights every other one is on the device when it ends."""
    decisions = []
    staying = [s for s in sorted(graph.frozen) if is_large(graph.storages[s].bytes)][::2]
    for storage in graph.storages:
        for gap in gaps_of(graph, storage.id) if is_large(storage.bytes) else ():
            cyclic, arriving = gap.end >= len(graph.ops), gap.start < 0
            if gap.end > gap.start + 1 and not arriving and not (cyclic and storage.id in staying):
                home = storage.id % len(costs.homes) if storage.id in graph.frozen else 0
                decisions.append(Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end, home))
    return Plan("half stays", room, tuple(decisions))


def compiled(
    home: str | outofcore.OpenHome, host_budget: str | None = None, ours: Side | None = None, policy: Any = half_stays
) -> tuple[Side, Any]:
    """A step of which some frozen weights stay in the arena from step to step, and leave it within."""
    ours = ours or made()
    step = outofcore.compile(
        ours.step,
        ours.model,
        ours.optimizer,
        budget="700KiB",
        home=home,
        host_budget=host_budget,
        policy=policy,
        dynamic=False,
        cache=False,
    )
    ours.step = step
    return ours, step


def from_file(folder: Path, home: outofcore.OpenHome) -> Side:
    """The same model, with its weights where a file has them."""
    save_file(made().model.state_dict(), folder / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*[Adapted() for _ in range(DEPTH)])
    outofcore.materialize(model, home=home, weights=folder)
    return made(model)


def program_of(step: Any) -> Any:
    session = step._session
    assert session.steps.runner is not None
    return session.steps.runner.program, session.steps.runner.captured.graph


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    home = request.param
    if home == "file":
        with outofcore.open_home("disk") as opened:
            ours, step = compiled(opened, ours=from_file(tmp_path, opened))
            before = (tmp_path / "model.safetensors").read_bytes()
            with step:
                yield made(), ours
            assert (tmp_path / "model.safetensors").read_bytes() == before
        return
    ours, step = compiled("disk" if home == "tiers" else home, "4MiB" if home == "tiers" else None)
    with step:
        yield made(), ours


def train(pair: Any, steps: range) -> None:
    for number in steps:
        theirs, ours = (side.step(batch(number)) for side in pair)
        assert torch.equal(theirs, ours), number


def assert_alike(pair: Any) -> None:
    theirs, ours = pair
    for (name, one), other in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("pair", ["disk", "tiers"], indirect=True)
def test_frozen_weights_are_never_copied_out(pair: Any) -> None:
    train(pair, range(3))
    program, graph = program_of(pair[1].step)
    frozen = {s.id for s in graph.storages if s.kind is StorageKind.PARAMETER and s.bytes == _WEIGHT}
    assert len(frozen) == DEPTH and frozen <= graph.frozen
    out = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut)}
    into = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyIn)}
    assert not out & frozen
    assert program.clean, "no weight stays and leaves within the step: the budget shows nothing"
    assert set(program.clean) <= frozen & into
    assert_alike(pair)


# What a user may do to a frozen weight between two steps. Each changes bytes, or where they are.


def _add(side: Side, number: int) -> None:
    with torch.no_grad():
        side.layer(number).base.weight.add_(0.01)


def _copy(side: Side, number: int) -> None:
    with torch.no_grad():
        side.layer(number).base.weight.copy_(values(number))


def _data(side: Side, number: int) -> None:
    side.layer(number).base.weight.data.mul_(0.5)


def _numpy(side: Side, number: int) -> None:
    side.layer(number).base.weight.detach().numpy()[3, 5] = number / 100


def _sign(side: Side, number: int) -> None:
    side.layer(number).base.weight.data.neg_()


def _permute(side: Side, number: int) -> None:
    weight = side.layer(number).base.weight.data
    weight.copy_(weight.flip(0).clone())


def _alias(side: Side, number: int) -> None:
    known = side.kept.setdefault("aliases", [layer.base.weight.data.view(-1) for layer in side.model])
    known[number % DEPTH][: WIDTH + 1].fill_(number / 1000)


def _put(side: Side, number: int) -> None:
    side.layer(number).base.weight.data = values(number)


def _load(side: Side, number: int) -> None:
    side.model.load_state_dict({f"{number % DEPTH}.base.weight": values(number)}, strict=False)


def _assign(side: Side, number: int) -> None:
    side.model.load_state_dict({f"{number % DEPTH}.base.weight": values(number)}, strict=False, assign=True)
    side.layer(number).base.weight.requires_grad_(False)


def _swap(side: Side, number: int) -> None:
    one, other = side.layer(number).base, side.layer(number + 1).base
    one.weight.data, other.weight.data = other.weight.data.clone(), one.weight.data.clone()


def _swap_modules(side: Side, number: int) -> None:
    one, other = side.layer(number), side.layer(number + 2)
    one.base, other.base = other.base, one.base


def _merge(side: Side, number: int) -> None:
    """As PEFT merges an adapter into a weight, and takes it out again at the next call."""
    layer, merged = side.layer(0), side.kept.pop("merged", None)
    if merged is None:
        side.kept["merged"] = (layer.up @ layer.down).detach().clone()
        layer.base.weight.data += side.kept["merged"]
    else:
        layer.base.weight.data -= merged


def _thaw(side: Side, number: int) -> None:
    weight = side.layer(number).base.weight
    weight.requires_grad_(not weight.requires_grad)
    weight.grad = None


WAYS = (
    *(_add, _copy, _data, _numpy, _sign, _permute, _alias, _put, _load, _assign, _swap, _swap_modules, _merge),
    *(_thaw, _thaw),
)


@pytest.mark.parametrize("pair", some_of(["disk", "tiers", "file"], ["disk", "file"]), indirect=True)
def test_whatever_the_user_does_to_a_frozen_weight_counts(pair: Any) -> None:
    train(pair, range(2))
    for number, act in enumerate(WAYS):
        for side in pair:
            act(side, number % 3 if act is not _thaw else 1)
        assert_alike(pair)
        train(pair, range(10 * number, 10 * number + 2))
        assert_alike(pair)
        pair[1].step._session.keeper.check()


@pytest.mark.parametrize(
    ("pair", "seed"), some_of([("disk", 0), ("tiers", 0), ("file", 0), ("file", 1)], [("file", 1)]), indirect=["pair"]
)
def test_whatever_the_user_does_counts_wherever_the_weight_is(pair: Any, seed: int) -> None:
    """As above, where another plan takes the arena now and then, as it does when times were measured."""
    draw = random.Random(seed)
    train(pair, range(2))
    for number, act in enumerate(WAYS + WAYS):
        if draw.random() < 0.5:
            pair[1].step._session.steps.leave_arena()
            pair[1].step._session.keeper.check()
        for side in pair:
            act(side, number % 3 if act is not _thaw else 1)
        train(pair, range(10 * number, 10 * number + 1 + draw.randrange(2)))
        assert_alike(pair)
        pair[1].step._session.keeper.check()


def at_home_and_in_the_arena(pair: Any) -> Any:
    """Have a weight changed where its file shows it, brought into the arena, and changed there as well."""
    train(pair, range(2))
    ours = pair[1].step._session
    ours.steps.leave_arena()
    state = ours.keeper._by_tensor["model.2.base.weight"]
    assert ours.keeper.slots[state.home].is_in_file(state.slot)
    for side in pair:
        _add(side, 2)
    train(pair, range(2, 3))
    assert state.place is Place.ARENA and state.slot >= FIRST_RANGE
    for side in pair:
        _copy(side, 2)
    return state


@pytest.mark.parametrize("pair", ["file"], indirect=True)
@pytest.mark.parametrize("leaves", [False, True])
def test_a_weight_that_was_moved_from_its_file_is_written_elsewhere(pair: Any, leaves: bool) -> None:
    state = at_home_and_in_the_arena(pair)
    if leaves:
        pair[1].step._session.steps.leave_arena()
        assert_alike(pair)
    train(pair, range(3, 5))
    assert_alike(pair)
    pair[1].step._session.keeper.check()
    assert state.slot < FIRST_RANGE


@pytest.mark.parametrize("pair", ["file"], indirect=True)
@pytest.mark.parametrize("error", [SpillError("no room"), TransferError("the disk is gone")], ids=str)
def test_a_copy_that_could_not_be_made_is_made_by_the_next_call(
    pair: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home_and_in_the_arena(pair)
    slots = pair[1].step._session.keeper.slots[-1]

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((slots, "take") if isinstance(error, SpillError) else (slots.home, "write")), refuse)
        with pytest.raises(type(error)):
            pair[1].step(batch(3))
    assert_alike(pair)
    train(pair, range(3, 5))
    assert_alike(pair)
    pair[1].step._session.keeper.check()


@pytest.mark.parametrize("pair", ["disk"], indirect=True)
def test_a_copy_that_was_written_in_part_counts_no_more(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(pair, range(2))
    session = pair[1].step._session
    home, weight = session.keeper.slots[-1].home, pair[1].model[2].base.weight
    assert session.keeper._by_tensor["model.2.base.weight"].mark is not None
    write, before = home.write, weight.detach().clone()

    def tear(offset: int, source: memoryview) -> None:
        write(offset, memoryview(bytearray(len(source))))
        raise TransferError("the disk is gone")

    weight.data.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(home, "write", tear)
        with pytest.raises(TransferError):
            pair[1].step(batch(3))
    weight.data.copy_(before)
    train(pair, range(3, 5))
    assert_alike(pair)
    session.keeper.check()


@pytest.mark.parametrize("pair", ["file"], indirect=True)
def test_a_weight_for_which_no_home_has_room_leaves_the_arena(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = at_home_and_in_the_arena(pair)
    session = pair[1].step._session

    def refuse(*_: object) -> None:
        raise SpillError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(session.keeper.slots[-1], "take", refuse)
        session.steps.leave_arena()
    assert state.place is Place.OWN
    session.keeper.check()
    assert_alike(pair)
    train(pair, range(3, 5))
    assert_alike(pair)


@pytest.mark.parametrize("pair", ["host", "file"], indirect=True)
def test_each_layer_is_looked_at(pair: Any) -> None:
    """One bit of one weight, wherever it is kept."""
    train(pair, range(2))
    for number in range(DEPTH):
        for side in pair:
            layer = side.layer(number)
            layer.base.weight.data.view(torch.int32)[number, -1 - number] ^= 1 << 20
        train(pair, range(number, number + 1))
    assert_alike(pair)


@pytest.mark.parametrize("pair", ["disk", "file"], indirect=True)
def test_a_failed_step_leaves_frozen_weights_as_they_were(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(pair, range(2))
    ours = pair[1]
    with monkeypatch.context() as patch:
        fail_at(patch, ours.step, "read", 3, TransferError("the disk is gone"))
        with pytest.raises(TransferError, match="the disk is gone"):
            ours.step(batch(50))
    assert_alike(pair)
    train(pair, range(3, 5))
    assert_alike(pair)


def test_what_is_at_home_leaves_the_arena_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, step = compiled("disk")
    theirs = made()
    written: list[int] = []

    def train_and_leave(number: int) -> None:
        assert torch.equal(ours.step(batch(number)), theirs.step(batch(number)))
        for side in (ours, theirs):
            side.layer(1).base.weight.data[0, 0] = number
        frozen = [s for s in step._session.keeper._states.values() if s.bytes == _WEIGHT]
        assert any(s.place is Place.ARENA for s in frozen)
        step._session.steps.leave_arena()
        assert all(s.place is Place.HOME for s in frozen)
        step._session.keeper.check()

    with step:
        train_and_leave(0)
        home = step._session.keeper.slots[0].home
        write = home.write
        monkeypatch.setattr(home, "write", lambda at, data: (written.append(len(data)), write(at, data)))
        for number in range(1, 3):
            train_and_leave(number)  # from here on each has been at home before
            assert len([count for count in written if count >= _WEIGHT]) <= number
    assert_alike((theirs, ours))


def test_a_fingerprint_sees_bits_places_and_lengths() -> None:
    data = bytearray(torch.randint(0, 256, (8 * KIB + 13,), dtype=torch.uint8).numpy().tobytes())
    known = checksum(memoryview(data))
    assert known == checksum(memoryview(bytearray(data)))
    found = {known}
    # Native code takes 64 bytes at a time, and the rest in words: each of the last bytes counts.
    positions = {*range(0, len(data), 97), *range(len(data) - 80, len(data))}
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        found.add(checksum(memoryview(changed)))
    swapped = bytearray(data[64:128] + data[:64] + data[128:])
    found |= {checksum(memoryview(swapped)), checksum(memoryview(data)[:-1])}
    found |= {checksum(memoryview(bytearray(count))) for count in range(200)}
    assert len(found) == 1 + len(positions) + 2 + 200
