"""Tests of faults in or around a step: a clear error, and a model that is unchanged or marked torn."""

from __future__ import annotations

import copy
import gc
import os
import resource
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_model import (
    FaultError,
    Sides,
    assert_same,
    assert_training_continues,
    batch,
    build_sides,
    contents,
    fail_at,
    misplace,
    smallest_budget,
    two_homes,
)
from torch import nn

import outofcore
from outofcore.capture.optimizers import BoundUpdate
from outofcore.costs import Home
from outofcore.errors import InputError, SpillError, StateError, TransferError
from outofcore.graph import StorageKind
from outofcore.program import CopyIn, CopyOut
from outofcore.runtime.checks import Check
from outofcore.runtime.checksums import checksum, sampled_checksum
from outofcore.runtime.file_io import ByteStore
from outofcore.runtime.homes import DiskHome, HostHome, enable_checks
from outofcore.units import GIB, KIB, MIB, PAGE_BYTES


@pytest.fixture(scope="module")
def smallest() -> int:
    return smallest_budget()


@pytest.fixture(params=["offload-all", "auto:polish_ops=0"])
def trainings(request: pytest.FixtureRequest, smallest: int, tmp_path: Path) -> Iterator[tuple[Sides, Any]]:
    with two_homes(request.param, smallest, tmp_path) as both:
        yield both


def test_index_error_leaves_the_model_unchanged(trainings: Any) -> None:
    plain, ours = trainings
    before = contents(ours[0], ours[1])
    generator = torch.get_rng_state()
    with pytest.raises(Exception, match="index out of range") as caught:
        ours[2](batch(9) + 1000)
    assert any("as they were before" in note for note in caught.value.__notes__)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same(contents(ours[0], ours[1]), before)
    assert_training_continues(plain, ours)


@pytest.mark.parametrize("room", [1.0, 1.5, 20.0])
def test_failed_step_drops_gradients_left_on_the_device(smallest: int, tmp_path: Path, room: float) -> None:
    def renewing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(ids) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    (model, optimizer, _), (plain_model, plain_optimizer, _) = build_sides(), build_sides()
    plain = renewing(plain_model, plain_optimizer)
    options: dict[str, Any] = {"budget": int(smallest * room), "home": tmp_path, "policy": "auto:polish_ops=0"}
    with outofcore.compile(renewing(model, optimizer), model, optimizer, **options) as ours:
        for k in range(3):
            torch.manual_seed(k)
            theirs = plain(batch(k))
            torch.manual_seed(k)
            assert torch.equal(ours(batch(k)), theirs)
        before = contents(model, optimizer)
        gradient = model[1].weight.grad
        assert gradient is not None
        expected = gradient.clone()
        with pytest.raises(Exception, match="index out of range") as caught:
            ours(batch(9) + 1000)
        assert any("as they were before" in note for note in caught.value.__notes__)
        assert_same(contents(model, optimizer), before)
        assert torch.equal(gradient, expected)
        staying = {ours.captured.graph.storages[s].name for s in ours.planned.program.staying}
        assert room < 20 or len(staying) == len(list(model.parameters()))
        for (name, parameter), plain_parameter in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            if f"{name}.grad" in staying and parameter is not model[1].weight:
                assert parameter.grad is None
            elif parameter is not model[1].weight:
                assert torch.equal(parameter.grad, plain_parameter.grad)
        torch.manual_seed(3)
        theirs = plain(batch(3))
        torch.manual_seed(3)
        assert torch.equal(ours(batch(3)), theirs)
        for parameter, plain_parameter in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(parameter.grad, plain_parameter.grad)
    assert_same(contents(model, optimizer), contents(plain_model, plain_optimizer))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_failing_copy_undoes_or_tears_the_step(trainings: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = trainings
    step = ours[2]
    before, generator = contents(ours[0], ours[1]), torch.get_rng_state()
    copies = [i for i in step.planned.program.instructions if isinstance(i, CopyIn if kind == "read" else CopyOut)]
    undone = 0
    for number in range(1, len(copies) + 1):
        with monkeypatch.context() as patch:
            fail_at(patch, step, kind, number, TransferError("the disk is gone"))
            try:
                step(batch(9))
            except TransferError as error:
                assert "the disk is gone" in str(error)
                if any("as they were before" in note for note in error.__notes__):
                    undone += 1
                    assert_same(contents(ours[0], ours[1]), before)
                    assert torch.equal(torch.get_rng_state(), generator)  # dropout draws before some of these copies
                    continue
                with pytest.raises(StateError, match=r"part old and part new .* the disk is gone"):
                    step(batch(9))
                break
            else:
                break  # homes make fewer copies, and the caller makes the others
    assert undone or step.policy.name != "offload-all"
    step.close()
    for tensor in ours[0].state_dict().values():
        assert torch.isfinite(tensor).all()  # it stays readable
    if not step._session.torn:
        return
    with pytest.raises(StateError, match="closed"):
        step(batch(2))


def test_exception_in_an_optimizer_leaves_a_whole_model(trainings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in plain PyTorch, earlier updates are applied and later ones are not."""
    plain, ours = trainings
    model, optimizer, step = ours
    before = contents(model, optimizer)
    calls: list[int] = []
    plain_call = BoundUpdate.__call__

    def fails(self: BoundUpdate, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise FaultError("half way")
        plain_call(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(BoundUpdate, "__call__", fails)
        with pytest.raises(FaultError, match="half way") as caught:
            step(batch(9))
    assert len(calls) == 2
    assert any("as it would in plain PyTorch" in note for note in caught.value.__notes__)
    now = contents(model, optimizer)
    assert not all(torch.equal(now[name], value) for name, value in before.items())
    # Plain PyTorch computes the same from the same state.
    plain[0].load_state_dict(model.state_dict())
    plain[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.manual_seed(3)
    expected = plain[2](batch(3))
    torch.manual_seed(3)
    assert torch.equal(step(batch(3)), expected)
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


@pytest.mark.parametrize("kind", ["op", "copy"])
def test_failed_step_is_freed_without_close(
    kind: str, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, train = build_sides()
    step: Any = outofcore.compile(train, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all")
    step(batch(0))
    session = weakref.ref(step._session)
    with monkeypatch.context() as patch:
        if kind != "op":
            fail_at(patch, step, "read", 5, TransferError("the disk is gone"))
        with pytest.raises(Exception, match=r"the disk is gone|index out of range"):
            step(batch(9) + (1000 if kind == "op" else 0))
    del step
    gc.collect()
    assert session() is None
    # A budget needs PyTorch's allocator for itself.
    with outofcore.budget("1GiB", model):
        pass


def test_exception_in_the_user_step_leaves_the_model_unchanged(smallest: int, tmp_path: Path) -> None:
    model, optimizer, plain = build_sides()
    before = contents(model, optimizer)

    def step(ids: torch.Tensor) -> torch.Tensor:
        plain(ids)
        raise FaultError("the user's own")

    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        with pytest.raises(FaultError, match="own"):
            ours(batch(0))
        assert_same(contents(model, optimizer), before)


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_damaged_slot_is_detected(check: str, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = build_sides()
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all", check=check
    ) as ours:
        ours(batch(0))
        before = contents(model, optimizer)
        storages = ours.captured.graph.storages
        with monkeypatch.context() as patch:
            misplace(patch, ours, lambda c, writes: not writes and storages[c.storage].kind is StorageKind.ACTIVATION)
            with pytest.raises(TransferError, match="checksum differs") as caught:
                ours(batch(1))
        assert any("as they were before" in note for note in caught.value.__notes__)
        assert_same(contents(model, optimizer), before)


def test_step_is_torn_when_undo_data_is_damaged(smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = build_sides()
    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        ours(batch(0))
        with monkeypatch.context() as patch:
            misplace(patch, ours, lambda _, writes: writes)
            with pytest.raises(TransferError, match="checksum differs") as caught:
                ours(batch(1))
        assert any("could not be undone: the 64.0 KiB" in note for note in caught.value.__notes__)
        with pytest.raises(StateError, match="part old and part new"):
            ours(batch(1))


@pytest.mark.parametrize("check", [Check.SAMPLED, Check.FULL])
def test_read_from_a_home_detects_damage(check: Check, tmp_path: Path) -> None:
    home, target = enable_checks(DiskHome(tmp_path), check), memoryview(bytearray(3 * MIB))
    offset = home.reserve(3 * MIB)
    home.write(offset, memoryview(os.urandom(3 * MIB)))
    home.read(offset, target)
    ByteStore.write(home, offset + 3 * MIB - PAGE_BYTES, memoryview(os.urandom(PAGE_BYTES)))
    with pytest.raises(TransferError, match="checksum differs"):
        home.read(offset, target)
    home.start()
    home.read(offset, target)


def test_full_check_reads_back_from_disk(tmp_path: Path) -> None:
    home = enable_checks(DiskHome(tmp_path), Check.FULL)
    source = memoryview(bytearray(os.urandom(3 * MIB)))
    offset = home.reserve(3 * MIB)
    home.write(offset, source)
    home.check_last_write(offset)
    ByteStore.write(home, offset + 2 * MIB, memoryview(os.urandom(PAGE_BYTES)))
    with pytest.raises(TransferError, match="checksum"):
        home.check_last_write(offset)
    home.start()
    home.check_last_write(offset)


def test_truncated_spill_file_is_detected(smallest: int, tmp_path: Path) -> None:
    model, optimizer, step = build_sides()
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all", check="off"
    ) as ours:
        ours(batch(0))
        (home,) = ours.homes
        os.ftruncate(home._file._descriptor, 0)
        with pytest.raises(TransferError, match="was cut off"):
            ours(batch(1))
        os.posix_fallocate(home._file._descriptor, 0, home.bytes)  # else closing would read past the end


def test_sampled_checksum_covers_both_ends_and_full_covers_every_page() -> None:
    memory = bytearray(os.urandom(40 * PAGE_BYTES))
    for at in (0, 40 * PAGE_BYTES - 1):
        changed = bytearray(memory)
        changed[at] ^= 1
        assert sampled_checksum(memoryview(changed), 0) != sampled_checksum(memoryview(memory), 0)
    for at in range(0, len(memory), PAGE_BYTES):
        changed = bytearray(memory)
        changed[at + 17] ^= 1
        assert checksum(memoryview(changed)) != checksum(memoryview(memory))
    host = HostHome(MIB)
    assert enable_checks(host, Check.SAMPLED).sums is None
    assert (sums := enable_checks(host, Check.FULL).sums) is not None
    assert sums.full


def test_unknown_check_is_refused() -> None:
    with pytest.raises(InputError, match="sampled, full"):
        outofcore.compile(lambda: None, nn.Linear(1, 1), budget="1MiB", check="some")


def test_full_disk_is_refused_before_any_change(smallest: int, tmp_path: Path) -> None:
    plain, (model, optimizer, step) = build_sides(), build_sides()
    before = contents(model, optimizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
            ours._session.planner.links = (Home("disk", None, 1e9, 1e9),)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400 * KIB, hard))
            torch.manual_seed(1)
            with pytest.raises(SpillError, match="lift the limit"):
                ours(batch(0))
            assert_same(contents(model, optimizer), before)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            torch.manual_seed(1)
            first = ours(batch(0))
            torch.manual_seed(1)
            assert torch.equal(first, plain[2](batch(0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


def test_exhausted_host_memory_is_refused_before_any_change(
    smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, (model, optimizer, step) = build_sides(), build_sides()
    before = contents(model, optimizer)
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all", host_budget=MIB
    ) as ours:
        with monkeypatch.context() as patch:
            original = HostHome.check

            def check_without_memory(self: HostHome, count: int) -> None:
                if self is ours.homes[0]:
                    patch.setattr("outofcore.runtime.homes.available_memory_bytes", lambda: 8 * KIB)
                original(self, count)

            patch.setattr(HostHome, "check", check_without_memory)
            with pytest.raises(SpillError, match=r"host memory, and the system has 8.00 KiB available"):
                ours(batch(0))
        assert_same(contents(model, optimizer), before)
        torch.manual_seed(1)
        first = ours(batch(0))
        torch.manual_seed(1)
        assert torch.equal(first, plain[2](batch(0)))


def test_home_stays_usable_when_the_system_refuses_memory() -> None:
    home = HostHome(4 * GIB)
    home.ensure(MIB)
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * KIB
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + GIB, hard))
    try:
        with pytest.raises(SpillError, match=r"does not give 2.00 GiB more of host memory .*Cannot allocate"):
            home.ensure(2 * GIB + MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    home.write(0, memoryview(bytes(MIB)))
    assert home.bytes == MIB
