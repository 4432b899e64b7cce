"""Tests of the home on a disk: its one unnamed file, and errors of file systems."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from home_helpers import (
    count_descriptors,
    file_size_limit,
    fill_with_noise,
    open_files_in,
    refuse_direct_io,
    resident_bytes_at,
)

import outofcore
from outofcore.errors import SpillError, TransferError
from outofcore.execution.arena import Arena
from outofcore.execution.opening import OpenHome
from outofcore.runtime import folders, spill
from outofcore.runtime.folders import default_spill_directory, file_system_of, in_memory
from outofcore.runtime.homes import DiskHome, HostHome
from outofcore.runtime.spill import SpillFile
from outofcore.units import MIB, PAGE_BYTES

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(64 * MIB) as opened:
        yield opened


def test_direct_io_is_used_on_a_disk(tmp_path: Path) -> None:
    if in_memory(tmp_path):
        pytest.skip("the temporary folder is not on a disk")
    file = SpillFile(tmp_path)
    if not file.direct:
        pytest.skip("this file system refuses direct I/O")
    flags = Path(f"/proc/self/fdinfo/{file.locate(0, 1).descriptor}").read_text().split("flags:")[1].split()[0]
    assert int(flags, 8) & os.O_DIRECT
    file.close()


def test_file_is_unnamed_and_private_to_the_user(tmp_path: Path) -> None:
    home = DiskHome(tmp_path)
    assert open_files_in(tmp_path) == []  # created when first needed
    home.ensure(3 * MIB)
    assert list(tmp_path.iterdir()) == []
    for status in open_files_in(tmp_path):
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert status.st_blocks * 512 >= 3 * MIB  # allocated, not sparse
    assert open_files_in(tmp_path)
    home.close()
    assert open_files_in(tmp_path) == []


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill.os, "O_TMPFILE", os.O_DIRECTORY | os.O_RDWR)  # EISDIR, as on older kernels


def test_named_file_is_unlinked_at_once_without_o_tmpfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    without_unnamed_files(monkeypatch)
    home = DiskHome(tmp_path)
    home.ensure(MIB)
    assert list(tmp_path.iterdir()) == []
    assert [stat.S_IMODE(status.st_mode) for status in open_files_in(tmp_path)][:1] == [0o600]
    expected = fill_with_noise(arena.memory(0, MIB), 3)
    home.write(0, arena.memory(0, MIB))
    assert bytes(home.tensor_of(0, MIB).numpy()) == expected
    home.close()


@pytest.mark.parametrize("unnamed", [True, False])
def test_killed_process_leaves_no_file_behind(tmp_path: Path, unnamed: bool) -> None:
    free = shutil.disk_usage(tmp_path).free
    script = (
        "import os, sys\n"
        "from outofcore.runtime import spill\n"
        "from outofcore.runtime.homes import DiskHome\n"
        f"{'' if unnamed else 'spill.os.O_TMPFILE = os.O_DIRECTORY | os.O_RDWR'}\n"
        "home = DiskHome(sys.argv[1])\n"
        "home.ensure(1 << 30)\n"
        "home_tensor = home.tensor_of(0, 1 << 20)\n"
        "home_tensor.fill_(1)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert shutil.disk_usage(tmp_path).free > free - (1 << 29)


def test_faces_use_no_descriptors(tmp_path: Path) -> None:
    home = DiskHome(tmp_path)
    home.ensure(MIB)
    before = count_descriptors()
    home_tensors = [home.tensor_of(offset, PAGE_BYTES) for offset in range(0, MIB, PAGE_BYTES)]
    assert count_descriptors() == before
    del home_tensors
    home.close()


def test_drop_cache_frees_physical_memory(tmp_path: Path) -> None:
    home = DiskHome(tmp_path)
    home.ensure(32 * MIB)
    home_tensor = home.tensor_of(0, 32 * MIB)
    home_tensor.fill_(3)
    touched = resident_bytes_at(home_tensor.data_ptr())
    home.drop_cache(home_tensor)
    assert touched >= 30 * MIB
    assert resident_bytes_at(home_tensor.data_ptr()) == 0
    assert bool((home_tensor == 3).all())
    home.close()


def test_unusable_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpillError, match="does not exist; create it"):
        DiskHome(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpillError, match="not a directory"):
        DiskHome(str(tmp_path / "file"))
    home = DiskHome(tmp_path)
    with pytest.raises(SpillError, match="are free there; make room"):
        home.ensure(1 << 60)
    with pytest.raises(SpillError, match="are free there"):
        home.check(1 << 60)
    assert home.bytes == 0
    monkeypatch.setattr(spill.os, "access", lambda *_: False)
    with pytest.raises(SpillError, match="cannot be written to"):
        DiskHome(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpillError, match="cannot be written to"):
        DiskHome(tmp_path)


def test_read_only_file_system_is_refused() -> None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if "ro" in fields[5].split(",") and Path(fields[4]).is_dir():
            with pytest.raises(SpillError, match="cannot be written to"):
                SpillFile(Path(fields[4]))
            return
    pytest.skip("no read-only file system is mounted")


def test_homes_enforce_their_limits(tmp_path: Path) -> None:
    home = DiskHome(tmp_path, limit=MIB)
    assert home.capacity == MIB
    home.ensure(MIB)
    with pytest.raises(SpillError, match=r"needs 1\.00 MiB on disk, and its limit is 1\.00 MiB"):
        home.ensure(MIB + 1)
    home.close()
    host = HostHome(MIB)
    with pytest.raises(SpillError, match="limit"):
        host.reserve(MIB + 1)
    with pytest.raises(SpillError, match="available"):
        HostHome(1 << 46).ensure(1 << 46)


def test_refused_growth_leaves_the_file_unchanged(tmp_path: Path, arena: Arena) -> None:
    home = DiskHome(tmp_path)
    home.ensure(MIB)
    expected = fill_with_noise(arena.memory(0, MIB), 1)
    home.write(0, arena.memory(0, MIB))
    with file_size_limit(2 * MIB), pytest.raises(SpillError, match=r"lift the limit"):
        home.ensure(4 * MIB)
    assert home.bytes == MIB
    home.read(0, arena.memory(MIB, MIB))
    assert bytes(arena.memory(MIB, MIB)) == expected
    home.ensure(4 * MIB)
    home.close()


@pytest.mark.parametrize("direct", [True, False])
def test_failed_write_names_offset_path_and_reason(
    tmp_path: Path, arena: Arena, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        refuse_direct_io(monkeypatch)
    home = DiskHome(tmp_path)
    home.ensure(8 * MIB)
    with file_size_limit(2 * MIB), pytest.raises(TransferError) as caught:
        home.write(MIB, arena.memory(0, 4 * MIB))
    assert caught.value.errno == errno.EFBIG
    for part in ("could not write 3.00 MiB", f"byte {2 * MIB}", str(tmp_path), "File too large", "ulimit"):
        assert part in str(caught.value)
    home.write(MIB, arena.memory(0, 4 * MIB))
    home.close()


def test_full_disk_and_io_error_give_different_messages(tmp_path: Path, arena: Arena) -> None:
    home = DiskHome(tmp_path)
    home.ensure(MIB)
    with replace_file(home, "/dev/full"), pytest.raises(TransferError, match="No space left on device; make room"):
        home.write(0, arena.memory(0, MIB))
    with (
        replace_file(home, "/proc/self/mem"),  # its first pages cannot be read
        pytest.raises(TransferError, match=r"could not read 1\.00 MiB at byte 0 .*Input/output error; check that"),
    ):
        home.read(0, arena.memory(0, MIB))
    assert isinstance(TransferError("x"), OSError)
    home.close()


@contextmanager
def replace_file(home: DiskHome, path: str) -> Iterator[None]:
    descriptor, replacement = home.locate(0, PAGE_BYTES).descriptor, os.open(path, os.O_RDWR)
    original = os.dup(descriptor)
    os.dup2(replacement, descriptor)
    try:
        yield
    finally:
        os.dup2(original, descriptor)
        os.close(original)
        os.close(replacement)


def test_read_past_the_end_of_the_file_is_reported(tmp_path: Path, arena: Arena) -> None:
    home = DiskHome(tmp_path)
    home.ensure(MIB)
    os.ftruncate(home.locate(0, MIB).descriptor, MIB // 2)
    with pytest.raises(TransferError, match=r"could not read 512 KiB at byte 524288 .* the file ends there"):
        home.read(0, arena.memory(0, MIB))
    assert "the system wrote nothing" in str(home.transfer_error(0, MIB, -1, writes=True))
    home.close()


@pytest.mark.skipif(not SHARED_MEMORY.is_dir() or not in_memory(SHARED_MEMORY), reason="no tmpfs at /dev/shm")
def test_spill_directory_in_memory_works_with_a_warning(arena: Arena) -> None:
    with pytest.warns(UserWarning, match="kept in memory"):
        home = DiskHome(SHARED_MEMORY)
    home.ensure(MIB)
    expected = fill_with_noise(arena.memory(0, MIB), 5)
    home.write(0, arena.memory(0, MIB))
    home.read(0, arena.memory(MIB, MIB))
    assert bytes(arena.memory(MIB, MIB)) == expected == bytes(home.tensor_of(0, MIB).numpy())
    home.close()


# The default directory of the file.


def test_default_directory_is_the_first_candidate_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    temporary.mkdir()
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(folders, "in_memory", lambda _: False)
    assert default_spill_directory() == temporary
    monkeypatch.setattr(folders, "in_memory", lambda path: path == temporary)
    assert default_spill_directory() == cache / "outofcore"
    assert stat.S_IMODE((cache / "outofcore").stat().st_mode) == 0o700
    monkeypatch.setattr(folders, "in_memory", lambda path: path != Path("/var/tmp"))
    assert default_spill_directory() == Path("/var/tmp")
    monkeypatch.setattr(folders, "in_memory", lambda _: True)
    with pytest.warns(UserWarning, match="kept in memory"):
        assert default_spill_directory() == temporary


def test_cache_folder_ignores_a_relative_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders.user_cache_folder() == tmp_path / "outofcore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert folders.user_cache_folder() == Path("/home/someone/.cache/outofcore")


def test_file_system_type_is_recognised() -> None:
    assert file_system_of(Path("/proc")) == "proc"
    assert not in_memory(Path("/proc"))


@pytest.mark.parametrize("policy", ["auto", "offload-all"])
def test_full_home_raises_spill_error_and_keeps_the_model(policy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(64, 512)
    budget = outofcore.smallest_budget(step, model, optimizer, inputs=(x,), split="off")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    home = OpenHome([DiskHome(tmp_path, limit=8 * MIB)], stays_open=False)
    with outofcore.compile(step, model, optimizer, budget=budget, home=home, policy=policy) as compiled:
        with pytest.raises(
            SpillError, match=r"the step needs 1\d\.\d+ MiB on disk, and its limit is 8.00 MiB"
        ) as caught:
            compiled(x)
        assert "policy" not in str(caught.value)
        assert any("as they were before" in note for note in caught.value.__notes__)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
