"""Tests of eager loops with weights mapped from files, which are their homes."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import outofcore
from outofcore.errors import TransferError
from outofcore.runtime.mapped_files import MappedFiles

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, DEPTH = 256, 12
BUDGET = "1MiB"
WEIGHTS = DEPTH * WIDTH * WIDTH * 4


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)])


def from_safetensors(path: Path, model: nn.Module) -> dict[str, Tensor]:
    save_file(model.state_dict(), path)
    return load_file(path)


def from_torch(path: Path, model: nn.Module) -> dict[str, Tensor]:
    torch.save(model.state_dict(), path)
    return torch.load(path, mmap=True)


@pytest.fixture(params=[from_safetensors, from_torch])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], tuple[nn.Sequential, nn.Sequential, Path]]:
    """Return a function that makes a model, the same model with mapped weights, and their file."""

    def make_models() -> tuple[nn.Sequential, nn.Sequential, Path]:
        torch.manual_seed(0)
        plain, path = net(), tmp_path / "weights"
        state = request.param(path, plain)
        with torch.device("meta"):
            mapped = net()
        mapped.load_state_dict(state, assign=True)
        return plain, mapped, path

    return make_models


Load = Callable[[], tuple[nn.Sequential, nn.Sequential, Path]]


def batch() -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


@pytest.mark.parametrize("check", ["sampled", "full", "off"])
def test_file_is_the_home_of_mapped_weights(load: Load, check: outofcore.api.CheckName) -> None:
    plain, mapped, path = load()
    before, addresses, expected = path.read_bytes(), [w.data_ptr() for w in weights(mapped)], plain(batch())
    with outofcore.budget(BUDGET, mapped, check=check) as run, torch.no_grad():
        for _ in range(4):
            assert torch.equal(mapped(batch()), expected)
        assert run.stats.file_bytes == WEIGHTS
    stats = run.stats
    assert stats.written_bytes == stats.peak_home_bytes == stats.unseen_writes == 0
    assert stats.fetched_bytes >= 3 * (WEIGHTS - (1 << 20))
    assert [w.data_ptr() for w in weights(mapped)] == addresses
    assert torch.equal(mapped(batch()), plain(batch()))
    assert path.read_bytes() == before


def test_writes_to_mapped_weights_are_kept_and_leave_the_file(load: Load) -> None:
    plain, mapped, path = load()
    before = path.read_bytes()

    def write(model: nn.Sequential) -> None:
        tensors = weights(model)
        with torch.no_grad():
            tensors[1].add_(1)
            tensors[2].data[0, 0] = 7
            tensors[3].copy_(tensors[4])
        tensors[5].detach().numpy()[3] = 2

    with torch.no_grad():
        weights(mapped)[0].mul_(2)
        weights(plain)[0].mul_(2)
        for _ in range(2):
            with outofcore.budget(BUDGET, mapped) as run:
                assert torch.equal(mapped(batch()), plain(batch()))
                write(mapped)
                write(plain)
                for _ in range(3):
                    assert torch.equal(mapped(batch()), plain(batch()))
            assert 0 < run.stats.file_bytes <= WEIGHTS * (DEPTH - 4) // DEPTH
            for ours, theirs in zip(weights(mapped), weights(plain), strict=True):
                assert torch.equal(ours, theirs)
    assert path.read_bytes() == before


def test_unseen_write_to_a_mapped_weight_counts(load: Load) -> None:
    plain, mapped, _ = load()
    target = weights(mapped)[7]
    address = target.data_ptr()
    with outofcore.budget(BUDGET, mapped) as run, torch.no_grad():
        mapped(batch())
        ctypes.memset(address, 0, target.nbytes)  # while it is evicted
        weights(plain)[7].zero_()
        for _ in range(3):
            assert torch.equal(mapped(batch()), plain(batch()))
    # It shares pages with two neighbours.
    assert WEIGHTS - 3 * target.nbytes <= run.stats.file_bytes <= WEIGHTS - target.nbytes
    assert not target.any()


def test_unseen_write_to_the_end_of_a_mapped_weight_counts(load: Load) -> None:
    plain, mapped, _ = load()
    target = weights(mapped)[7]
    address = target.data_ptr() + target.nbytes - target.itemsize
    with outofcore.budget(BUDGET, mapped), torch.no_grad():
        mapped(batch())
        ctypes.memset(address, 0, target.itemsize)  # while it is evicted
        weights(plain)[7][-1, -1] = 0
        for _ in range(2):
            assert torch.equal(mapped(batch()), plain(batch()))


def test_only_trained_weights_are_written(load: Load) -> None:
    plain, mapped, _ = load()

    def train(model: nn.Sequential) -> list[Tensor]:
        model.requires_grad_(False)
        weight = model[-1][0].weight.requires_grad_(True)  # its bias may share a page with a weight that is not trained
        optimizer = torch.optim.AdamW([weight], 1e-2)
        for _ in range(4):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    theirs = train(plain)
    with outofcore.budget("1.5MiB", mapped) as run:
        ours = train(mapped)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert run.stats.file_bytes >= WEIGHTS * (DEPTH - 1) // DEPTH
    assert run.stats.peak_home_bytes < WEIGHTS / 2


def test_changed_file_is_an_error(load: Load) -> None:
    _, mapped, path = load()
    with pytest.raises(TransferError, match=r"/weights was changed while weights"):  # noqa: SIM117
        with outofcore.budget(BUDGET, mapped), torch.no_grad():
            mapped(batch())
            with path.open("ab") as file:
                file.write(b"more")
            mapped(batch())


def test_renamed_file_stays_a_home_and_missing_file_is_copied(load: Load, tmp_path: Path) -> None:
    plain, mapped, path = load()
    expected = plain(batch())
    path.rename(tmp_path / "elsewhere")
    path.write_bytes(b"something else")
    for bytes_in_file in (WEIGHTS, 0):
        with outofcore.budget(BUDGET, mapped) as run, torch.no_grad():
            assert torch.equal(mapped(batch()), expected)
        assert run.stats.file_bytes == bytes_in_file
        (tmp_path / "elsewhere").unlink()
        (tmp_path / "elsewhere").write_bytes(b"something else")


def test_forked_child_sees_mapped_weights(load: Load) -> None:
    plain, mapped, _ = load()
    with outofcore.budget(BUDGET, mapped), torch.no_grad():
        mapped(batch())
        child = os.fork()
        if child == 0:
            same = all(torch.equal(a, b) for a, b in zip(weights(mapped), weights(plain), strict=True))
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_calls_without_gradients_are_steps(load: Load) -> None:
    plain, mapped, _ = load()
    with outofcore.budget(BUDGET, mapped) as run:
        with torch.no_grad():
            for _ in range(3):
                mapped(batch())
        assert run.stats.steps == 3
        copied = copy.deepcopy(mapped)
        pickled = pickle.loads(pickle.dumps(mapped))
        with torch.no_grad():
            assert torch.equal(copied(batch()), plain(batch()))
            assert torch.equal(pickled(batch()), plain(batch()))
        assert run.stats.steps == 3
        mapped(batch())
        assert run.stats.steps == 3
        mapped(batch()).sum().backward()
        torch.optim.SGD(mapped.parameters()).step()
        assert run.stats.steps == 4
        with torch.no_grad():
            mapped(batch())
        assert run.stats.steps == 4
    torch.save(mapped, io.BytesIO())
    assert not mapped._forward_hooks


def test_run_calls_a_model_within_a_budget(load: Load) -> None:
    plain, mapped, path = load()
    before = path.read_bytes()
    with torch.no_grad():
        expected = plain(batch())
    result = outofcore.run(mapped, batch(), budget=BUDGET)
    assert torch.equal(result, expected)
    assert not result.requires_grad
    result.add_(1)
    assert torch.equal(outofcore.run(nn.Identity(), {"a": [expected]}, budget=BUDGET)["a"][0], expected)
    assert path.read_bytes() == before
    with pytest.raises(
        outofcore.BudgetError, match=r"too small: aten::addmm in 0\.0 \(Linear\) at .*test_follow_files"
    ):
        outofcore.run(mapped, batch(), budget="200KiB")
    with outofcore.budget(BUDGET), pytest.raises(outofcore.StateError, match="running already"):
        outofcore.run(mapped, batch(), budget=BUDGET)


def test_weights_are_prefetched_in_the_first_call(load: Load) -> None:
    _, mapped, _ = load()
    with outofcore.budget(BUDGET, mapped) as run, torch.no_grad():
        mapped(batch())
        assert run.stats.fetches_ahead > 0


def test_mapped_file_is_found_by_address(tmp_path: Path) -> None:
    path = tmp_path / "odd name\n\\"
    path.write_bytes(bytes(range(256)) * 64)
    mapped = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=16384)
    mapped_file = MappedFiles().find(mapped.data_ptr() + 5000, 3000)
    assert mapped_file is not None
    assert (mapped_file.path, mapped_file.inode) == (str(path), path.stat().st_ino)
    assert MappedFiles().find(mapped.data_ptr() + 5000, 1 << 30) is None
    assert MappedFiles().find(torch.empty(4096).data_ptr(), 4) is None
    assert MappedFiles().find(1, 1) is None
