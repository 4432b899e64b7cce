"""Building the native allocator: kept, private, and refused in words."""

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from outofcore import compiling
from outofcore.compiling import BuildError, private_folder
from outofcore.errors import StateError
from outofcore.execution.arena import Arena, ArenaCounters, Installed, ScopeTable
from outofcore.runtime import native
from outofcore.runtime.native import Flavor, load_native


def test_a_build_is_private_and_complete(tmp_path: Path) -> None:
    path = native.build(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["arena.so"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert native.load_library(path).outofcore_end


def test_no_compiler_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        native.build(tmp_path, compilers=("no-such-compiler",))
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'error: out of ideas' >&2\nexit 3\n")
    compiler.chmod(0o755)
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BuildError, match="out of ideas"):
        native.build(folder, compilers=(str(compiler),))
    assert list(folder.iterdir()) == []


def loaded_with(monkeypatch: pytest.MonkeyPatch, cache: Path) -> ctypes.PyDLL:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return native._loaded.__wrapped__(Flavor.CPU)


def test_the_build_is_kept_and_a_damaged_one_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outofcore" / native.build_key()
    native.build(private_folder(folder))
    built = (folder / "arena.so").read_bytes()
    (folder / "arena.so").write_bytes(b"half a fi")
    assert loaded_with(monkeypatch, tmp_path).outofcore_end
    assert (folder / "arena.so").read_bytes()[:4] == built[:4] == b"\x7fELF"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    assert loaded_with(monkeypatch, tmp_path).outofcore_end  # from the cache


def test_a_cache_that_others_may_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outofcore" / native.build_key()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert loaded_with(monkeypatch, tmp_path).outofcore_end  # built in a temporary folder
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    with pytest.raises(StateError, match=r"native code is missing.*somebody else.*install g\+\+"):
        loaded_with(monkeypatch, tmp_path)


def test_native_code_is_for_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.sys, "platform", "darwin")
    with pytest.raises(StateError, match="written for Linux, and this is darwin"):
        native._loaded.__wrapped__(Flavor.CPU)


REFUSED = """
import torch, outofcore
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
before = [(p, p.data_ptr(), p.clone()) for p in model.parameters()]
for call in (
    lambda: outofcore.compile(step, model, optimizer, budget="8MiB"),
    lambda: outofcore.smallest_budget(step, model, optimizer, inputs=(torch.ones(8, 64),)),
):
    try:
        call()
    except outofcore.StateError as error:
        print(error)
for now, (parameter, address, value) in zip(model.parameters(), before, strict=True):
    assert now is parameter and now.data_ptr() == address and torch.equal(now, value) and now.grad is None
assert not optimizer.state
step(torch.ones(8, 64))
"""


def test_compile_refuses_without_a_compiler_and_leaves_the_model(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled, smallest = done.stdout.splitlines()
    assert "native code is missing: it is built on first use, and could not be (" in compiled
    assert "no C++ compiler is on PATH" in compiled
    assert compiled.endswith("Install a C++ compiler such as g++")
    assert "native code is missing" in smallest
    assert not list(tmp_path.rglob("*.so"))


def test_codes_and_counters_are_the_same_on_both_sides() -> None:
    source = native.CSRC.joinpath("arena.cpp").read_text(encoding="utf-8")
    (body,) = re.findall(r"enum class Installed : int \{(.*?)\};", source, re.DOTALL)
    codes = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", body)}
    assert codes == {member.name.title().replace("_", ""): member.value for member in Installed}
    library = load_native()
    with Arena(1 << 20) as arena:
        counts = (ctypes.c_int64 * 20)(*[-7] * 20)
        assert library.outofcore_arena_counters(arena.handle, counts, 3) == len(fields(ArenaCounters))
        assert list(counts[3:]) == [-7] * 17  # no more is written than there is room for


def test_no_exception_leaves_the_library() -> None:
    """It would end the process."""
    library = load_native()
    with Arena(1 << 20) as arena:
        table = ScopeTable(arena, [[(4096, 0)]])
        assert library.outofcore_table_surprise_log(table._table, 17) is None
        assert library.outofcore_table_surprises(table._table, None, 0) == 0


@pytest.mark.parametrize(
    ("header", "kind"),
    [("core/CachingDeviceAllocator.h", "DeviceAllocator"), ("cuda/CUDACachingAllocator.h", "CUDAAllocator")],
)
def test_all_that_the_allocator_of_cuda_is_asked_for_is_handed_on(header: str, kind: str) -> None:
    """Newer versions of PyTorch bring methods that do nothing where they are not handed on."""
    path = Path(torch.__file__).parent / "include" / "c10" / header
    (theirs,) = re.findall(
        rf"^(?:class|struct) [^;{{]*\b{kind} [^;]*?\{{.*?^\}};", path.read_text(), re.DOTALL | re.MULTILINE
    )
    ours = native.CSRC.joinpath("device_cuda.h").read_text(encoding="utf-8")
    names = set(re.findall(r"\bvirtual\b[^;{(]*?(\w+)\(", theirs))
    assert len(names) > 6
    assert {name for name in names if not re.search(rf"(?<!->)(?<!\.)\b{name}\(", ours)} == set()
