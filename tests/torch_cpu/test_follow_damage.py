"""Tests of a loop's home: damaged bytes, and bytes changed without an op."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import outofcore
from outofcore.errors import TransferError
from outofcore.follow.native import load_paging
from outofcore.units import PAGE_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = "3MiB"
DEPTH = 12  # a third of the layers fits in the budget


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(DEPTH)])


def batch(seed: int = 1) -> Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))


def steps(model: nn.Module) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for number in range(100):
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def home_file(folder: Path) -> Path:
    """Return the unnamed file in ``folder`` that this process has open."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # the descriptor that lists them
            continue
        if target.startswith(str(folder)):
            return link
    raise AssertionError(f"there is no file in {folder}")


def damage(file: Path, *, in_bits: bool = False) -> None:
    """Change the third page of every sixteen on disk: in all bytes, or in one bit."""
    with file.open("r+b", buffering=0) as home:
        for page in range(3, os.fstat(home.fileno()).st_size // PAGE_BYTES, 16):
            home.seek(page * PAGE_BYTES)
            content = bytearray(home.read(PAGE_BYTES))
            content[:] = content[:-1] + bytes([content[-1] ^ 4]) if in_bits else bytes(byte ^ 85 for byte in content)
            home.seek(page * PAGE_BYTES)
            home.write(content)
        os.fsync(home.fileno())


@pytest.mark.parametrize("policy", ["auto", None])
@pytest.mark.parametrize("check", ["sampled", "full"])
def test_damage_on_the_disk_is_an_error(check: outofcore.api.CheckName, policy: str | None, tmp_path: Path) -> None:
    model = net()
    with (
        pytest.raises(TransferError, match="of the disk home are not what was written there: the checksum differs"),
        outofcore.budget(BUDGET, model, home=tmp_path, check=check, policy=policy),
    ):
        training = steps(model)
        for _ in range(6):
            next(training)
        damage(home_file(tmp_path), in_bits=check == "full")
        next(training)


def test_damage_on_the_disk_is_detected_when_tensors_are_released(tmp_path: Path) -> None:
    model = net()
    with outofcore.budget(BUDGET, model, home=tmp_path) as run, torch.no_grad():
        model(batch())
        model(batch())
        damage(home_file(tmp_path))
        with pytest.raises(TransferError, match="the checksum differs"):
            run.release()


def test_damage_on_the_disk_is_not_detected_without_checks(tmp_path: Path) -> None:
    model, expected = net(), net()(batch())
    with outofcore.budget(BUDGET, model, home=tmp_path, check="off"), torch.no_grad():
        model(batch())
        damage(home_file(tmp_path))
        assert not torch.equal(model(batch()), expected)


def memory_of(tensor: Tensor) -> int:
    """Return the current address of a tensor without registering it with the library."""
    return int(load_paging().follow_memory(tensor.untyped_storage()._cdata))


@pytest.mark.parametrize("address_of", [Tensor.data_ptr, memory_of])
@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("check", ["sampled", "full"])
def test_write_without_an_op_to_an_evicted_tensor_is_not_damage(
    check: outofcore.api.CheckName, home: str, address_of: Callable[[Tensor], int], tmp_path: Path
) -> None:
    ours, plain = net(), net()
    home_option = tmp_path if home == "disk" else home
    with outofcore.budget(BUDGET, ours, home=home_option, check=check):
        for number, (loss, expected) in enumerate(zip(steps(ours), steps(plain), strict=True)):
            assert torch.equal(loss, expected)
            if number >= 3:
                for our_weight, plain_weight in zip(ours.parameters(), plain.parameters(), strict=True):
                    ctypes.memset(address_of(our_weight), 0, our_weight.nbytes // 4)
                    ctypes.memset(plain_weight.data_ptr(), 0, plain_weight.nbytes // 4)
            if number == 6:
                break


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_update_in_a_pause_is_not_damage(check: outofcore.api.CheckName, tmp_path: Path) -> None:
    ours, plain = net(), net()
    with outofcore.budget(BUDGET, ours, home=tmp_path, check=check) as run, torch.no_grad():
        for _ in range(3):
            assert torch.equal(ours(batch()), plain(batch()))
            run.pause()
            for model in (ours, plain):
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            run.resume()
