"""Tests of frozen weights: never copied out, and user changes between steps take effect."""

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
from failing_model import fail_at
from safetensors.torch import save_file
from torch import nn

import outofcore
from outofcore.analysis import is_large
from outofcore.costs import Costs
from outofcore.errors import SpillError, TransferError
from outofcore.execution.aliases import StatePlace
from outofcore.graph import StepGraph, StorageKind
from outofcore.policies import Decision, Plan, Residency, gaps_of
from outofcore.program import CopyIn, CopyOut
from outofcore.runtime.checksums import checksum
from outofcore.runtime.file_ranges import FIRST_RANGE
from outofcore.units import KIB

WIDTH, DEPTH = 160, 6
_WEIGHT = WIDTH * WIDTH * 4


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter, as in LoRA (Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) * 0.05)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


@dataclass
class Side:
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    step: Callable[[torch.Tensor], torch.Tensor]
    saved: dict[str, Any]

    def layer(self, number: int) -> Any:
        return self.model[number % DEPTH]


def make_side(model: nn.Sequential | None = None) -> Side:
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


def random_weight(number: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number)) * 0.1


def keep_half_resident(graph: StepGraph, costs: Costs, room: int) -> Plan:
    """Offload all large storages within the step; keep every other frozen weight resident at its end."""
    decisions = []
    resident = [s for s in sorted(graph.frozen) if is_large(graph.storages[s].bytes)][::2]
    for storage in graph.storages:
        for gap in gaps_of(graph, storage.id) if is_large(storage.bytes) else ():
            cyclic, arriving = gap.end >= len(graph.ops), gap.start < 0
            if gap.end > gap.start + 1 and not arriving and not (cyclic and storage.id in resident):
                home = storage.id % len(costs.homes) if storage.id in graph.frozen else 0
                decisions.append(Decision(gap, Residency.OFFLOAD, gap.start + 1, gap.end, home))
    return Plan("half resident", room, tuple(decisions))


def compile_side(
    home: str | outofcore.OpenHome,
    host_budget: str | None = None,
    ours: Side | None = None,
    policy: Any = keep_half_resident,
) -> tuple[Side, Any]:
    """Compile a step in which some frozen weights are resident between steps and evicted within."""
    ours = ours or make_side()
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


def make_side_from_file(folder: Path, home: outofcore.OpenHome) -> Side:
    """Make the same model with its weights in a file that serves as their home."""
    save_file(make_side().model.state_dict(), folder / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*[Adapted() for _ in range(DEPTH)])
    outofcore.materialize(model, home=home, weights=folder)
    return make_side(model)


def program_and_graph(step: Any) -> Any:
    session = step._session
    assert session.steps.runner is not None
    return session.steps.runner.program, session.steps.runner.captured.graph


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    home = request.param
    if home == "file":
        with outofcore.open_home("disk") as disk:
            ours, step = compile_side(disk, ours=make_side_from_file(tmp_path, disk))
            before = (tmp_path / "model.safetensors").read_bytes()
            with step:
                yield make_side(), ours
            assert (tmp_path / "model.safetensors").read_bytes() == before
        return
    ours, step = compile_side("disk" if home == "tiers" else home, "4MiB" if home == "tiers" else None)
    with step:
        yield make_side(), ours


def train(pair: Any, steps: range) -> None:
    for number in steps:
        theirs, ours = (side.step(batch(number)) for side in pair)
        assert torch.equal(theirs, ours), number


def assert_equal_parameters(pair: Any) -> None:
    theirs, ours = pair
    for (name, expected), actual in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(expected, actual), name


@pytest.mark.parametrize("pair", ["disk", "tiers"], indirect=True)
def test_frozen_weights_are_never_copied_out(pair: Any) -> None:
    train(pair, range(3))
    program, graph = program_and_graph(pair[1].step)
    frozen = {s.id for s in graph.storages if s.kind is StorageKind.PARAMETER and s.bytes == _WEIGHT}
    assert len(frozen) == DEPTH and frozen <= graph.frozen
    copied_out = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyOut)}
    copied_in = {program.blocks[i.block].storage for i in program.instructions if isinstance(i, CopyIn)}
    assert not copied_out & frozen
    assert program.clean, "no frozen weight is both resident between steps and evicted within: choose another budget"
    assert set(program.clean) <= frozen & copied_in
    assert_equal_parameters(pair)


# User changes of a frozen weight between steps. Each changes its bytes or its memory.


def _add(side: Side, number: int) -> None:
    with torch.no_grad():
        side.layer(number).base.weight.add_(0.01)


def _copy(side: Side, number: int) -> None:
    with torch.no_grad():
        side.layer(number).base.weight.copy_(random_weight(number))


def _scale_data(side: Side, number: int) -> None:
    side.layer(number).base.weight.data.mul_(0.5)


def _write_numpy(side: Side, number: int) -> None:
    side.layer(number).base.weight.detach().numpy()[3, 5] = number / 100


def _negate(side: Side, number: int) -> None:
    side.layer(number).base.weight.data.neg_()


def _permute(side: Side, number: int) -> None:
    weight = side.layer(number).base.weight.data
    weight.copy_(weight.flip(0).clone())


def _write_alias(side: Side, number: int) -> None:
    aliases = side.saved.setdefault("aliases", [layer.base.weight.data.view(-1) for layer in side.model])
    aliases[number % DEPTH][: WIDTH + 1].fill_(number / 1000)


def _set_data(side: Side, number: int) -> None:
    side.layer(number).base.weight.data = random_weight(number)


def _load(side: Side, number: int) -> None:
    side.model.load_state_dict({f"{number % DEPTH}.base.weight": random_weight(number)}, strict=False)


def _assign(side: Side, number: int) -> None:
    side.model.load_state_dict({f"{number % DEPTH}.base.weight": random_weight(number)}, strict=False, assign=True)
    side.layer(number).base.weight.requires_grad_(False)


def _swap(side: Side, number: int) -> None:
    layer, next_layer = side.layer(number).base, side.layer(number + 1).base
    layer.weight.data, next_layer.weight.data = next_layer.weight.data.clone(), layer.weight.data.clone()


def _swap_modules(side: Side, number: int) -> None:
    layer, next_layer = side.layer(number), side.layer(number + 2)
    layer.base, next_layer.base = next_layer.base, layer.base


def _merge(side: Side, number: int) -> None:
    """Merge an adapter into a weight as PEFT does, or unmerge it at the next call."""
    layer, merged = side.layer(0), side.saved.pop("merged", None)
    if merged is None:
        side.saved["merged"] = (layer.up @ layer.down).detach().clone()
        layer.base.weight.data += side.saved["merged"]
    else:
        layer.base.weight.data -= merged


def _thaw(side: Side, number: int) -> None:
    weight = side.layer(number).base.weight
    weight.requires_grad_(not weight.requires_grad)
    weight.grad = None


CHANGES = (
    *(
        _add,
        _copy,
        _scale_data,
        _write_numpy,
        _negate,
        _permute,
        _write_alias,
        _set_data,
        _load,
        _assign,
        _swap,
        _swap_modules,
        _merge,
    ),
    *(_thaw, _thaw),
)


@pytest.mark.parametrize("pair", some_of(["disk", "tiers", "file"], ["disk", "file"]), indirect=True)
def test_user_changes_of_frozen_weights_take_effect(pair: Any) -> None:
    train(pair, range(2))
    for number, act in enumerate(CHANGES):
        for side in pair:
            act(side, number % 3 if act is not _thaw else 1)
        assert_equal_parameters(pair)
        train(pair, range(10 * number, 10 * number + 2))
        assert_equal_parameters(pair)
        pair[1].step._session.keeper.check_invariants()


@pytest.mark.parametrize(
    ("pair", "seed"), some_of([("disk", 0), ("tiers", 0), ("file", 0), ("file", 1)], [("file", 1)]), indirect=["pair"]
)
def test_user_changes_take_effect_at_home_and_in_the_arena(pair: Any, seed: int) -> None:
    """As above, but the weights sometimes leave the arena, as for a new plan."""
    draw = random.Random(seed)
    train(pair, range(2))
    for number, act in enumerate(CHANGES + CHANGES):
        if draw.random() < 0.5:
            pair[1].step._session.steps.leave_arena()
            pair[1].step._session.keeper.check_invariants()
        for side in pair:
            act(side, number % 3 if act is not _thaw else 1)
        train(pair, range(10 * number, 10 * number + 1 + draw.randrange(2)))
        assert_equal_parameters(pair)
        pair[1].step._session.keeper.check_invariants()


def change_at_home_and_in_arena(pair: Any) -> Any:
    """Change a weight in its file mapping, fetch it into the arena, and change it there."""
    train(pair, range(2))
    ours = pair[1].step._session
    ours.steps.leave_arena()
    state = ours.keeper._by_tensor["model.2.base.weight"]
    assert ours.keeper.slots[state.home].is_in_file(state.slot)
    for side in pair:
        _add(side, 2)
    train(pair, range(2, 3))
    assert state.place is StatePlace.ARENA and state.slot >= FIRST_RANGE
    for side in pair:
        _copy(side, 2)
    return state


@pytest.mark.parametrize("pair", ["file"], indirect=True)
@pytest.mark.parametrize("leaves_arena", [False, True])
def test_changed_weight_is_written_outside_its_file(pair: Any, leaves_arena: bool) -> None:
    state = change_at_home_and_in_arena(pair)
    if leaves_arena:
        pair[1].step._session.steps.leave_arena()
        assert_equal_parameters(pair)
    train(pair, range(3, 5))
    assert_equal_parameters(pair)
    pair[1].step._session.keeper.check_invariants()
    assert state.slot < FIRST_RANGE


@pytest.mark.parametrize("pair", ["file"], indirect=True)
@pytest.mark.parametrize("error", [SpillError("no room"), TransferError("the disk is gone")], ids=str)
def test_failed_copy_is_repeated_by_the_next_call(pair: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    change_at_home_and_in_arena(pair)
    slots = pair[1].step._session.keeper.slots[-1]

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((slots, "take") if isinstance(error, SpillError) else (slots.home, "write")), refuse)
        with pytest.raises(type(error)):
            pair[1].step(batch(3))
    assert_equal_parameters(pair)
    train(pair, range(3, 5))
    assert_equal_parameters(pair)
    pair[1].step._session.keeper.check_invariants()


@pytest.mark.parametrize("pair", ["disk"], indirect=True)
def test_torn_copy_does_not_count_as_clean(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(pair, range(2))
    session = pair[1].step._session
    home, weight = session.keeper.slots[-1].home, pair[1].model[2].base.weight
    assert session.keeper._by_tensor["model.2.base.weight"].home_fingerprint is not None
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
    assert_equal_parameters(pair)
    session.keeper.check_invariants()


@pytest.mark.parametrize("pair", ["file"], indirect=True)
def test_weight_leaves_the_arena_when_no_home_has_room(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = change_at_home_and_in_arena(pair)
    session = pair[1].step._session

    def refuse(*_: object) -> None:
        raise SpillError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(session.keeper.slots[-1], "take", refuse)
        session.steps.leave_arena()
    assert state.place is StatePlace.OWN
    session.keeper.check_invariants()
    assert_equal_parameters(pair)
    train(pair, range(3, 5))
    assert_equal_parameters(pair)


@pytest.mark.parametrize("pair", ["host", "file"], indirect=True)
def test_single_bit_change_of_each_layer_takes_effect(pair: Any) -> None:
    train(pair, range(2))
    for number in range(DEPTH):
        for side in pair:
            layer = side.layer(number)
            layer.base.weight.data.view(torch.int32)[number, -1 - number] ^= 1 << 20
        train(pair, range(number, number + 1))
    assert_equal_parameters(pair)


@pytest.mark.parametrize("pair", ["disk", "file"], indirect=True)
def test_failed_step_leaves_frozen_weights_unchanged(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(pair, range(2))
    ours = pair[1]
    with monkeypatch.context() as patch:
        fail_at(patch, ours.step, "read", 3, TransferError("the disk is gone"))
        with pytest.raises(TransferError, match="the disk is gone"):
            ours.step(batch(50))
    assert_equal_parameters(pair)
    train(pair, range(3, 5))
    assert_equal_parameters(pair)


def test_clean_weights_leave_the_arena_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, step = compile_side("disk")
    theirs = make_side()
    written_sizes: list[int] = []

    def train_and_leave(number: int) -> None:
        assert torch.equal(ours.step(batch(number)), theirs.step(batch(number)))
        for side in (ours, theirs):
            side.layer(1).base.weight.data[0, 0] = number
        frozen = [s for s in step._session.keeper._states.values() if s.bytes == _WEIGHT]
        assert any(s.place is StatePlace.ARENA for s in frozen)
        step._session.steps.leave_arena()
        assert all(s.place is StatePlace.HOME for s in frozen)
        step._session.keeper.check_invariants()

    with step:
        train_and_leave(0)
        home = step._session.keeper.slots[0].home
        write = home.write
        monkeypatch.setattr(home, "write", lambda at, data: (written_sizes.append(len(data)), write(at, data)))
        for number in range(1, 3):
            train_and_leave(number)  # from here on each weight has a copy at home
            assert len([count for count in written_sizes if count >= _WEIGHT]) <= number
    assert_equal_parameters((theirs, ours))


def test_checksum_depends_on_bits_positions_and_length() -> None:
    data = bytearray(torch.randint(0, 256, (8 * KIB + 13,), dtype=torch.uint8).numpy().tobytes())
    original = checksum(memoryview(data))
    assert original == checksum(memoryview(bytearray(data)))
    checksums = {original}
    # Native code reads blocks of 64 bytes, then words: change each of the last bytes.
    positions = {*range(0, len(data), 97), *range(len(data) - 80, len(data))}
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        checksums.add(checksum(memoryview(changed)))
    swapped = bytearray(data[64:128] + data[:64] + data[128:])
    checksums |= {checksum(memoryview(swapped)), checksum(memoryview(data)[:-1])}
    checksums |= {checksum(memoryview(bytearray(count))) for count in range(200)}
    assert len(checksums) == 1 + len(positions) + 2 + 200
