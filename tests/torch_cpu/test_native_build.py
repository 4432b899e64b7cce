"""Building the native allocator: kept, private, and refused in words."""

import ctypes
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from outofcore import compiling
from outofcore.compiling import BuildError, private_folder
from outofcore.execution.arena import Arena, ArenaCounters, Installed, ScopeTable
from outofcore.runtime import native
from outofcore.runtime.native import Native, load_native

pytestmark = pytest.mark.skipif(load_native().library is None, reason=f"no native allocator: {load_native().reason}")


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


def loaded_with(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Native:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return native.load_native.__wrapped__()


def test_the_build_is_kept_and_a_damaged_one_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outofcore" / native.build_key()
    native.build(private_folder(folder))
    built = (folder / "arena.so").read_bytes()
    (folder / "arena.so").write_bytes(b"half a fi")
    assert loaded_with(monkeypatch, tmp_path).library is not None
    assert (folder / "arena.so").read_bytes()[:4] == built[:4] == b"\x7fELF"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    assert loaded_with(monkeypatch, tmp_path).library is not None  # from the cache


def test_a_cache_that_others_may_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outofcore" / native.build_key()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert loaded_with(monkeypatch, tmp_path).library is not None  # built in a temporary folder
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    refused = loaded_with(monkeypatch, tmp_path)
    assert refused.library is None
    assert "somebody else" in refused.reason
    assert "install g++" in refused.reason


def test_codes_and_counters_are_the_same_on_both_sides() -> None:
    source = native.CSRC.joinpath("arena.cpp").read_text(encoding="utf-8")
    (body,) = re.findall(r"enum class Installed : int \{(.*?)\};", source, re.DOTALL)
    codes = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", body)}
    assert codes == {member.name.title().replace("_", ""): member.value for member in Installed}
    library = load_native().library
    assert library is not None
    with Arena(1 << 20) as arena:
        counts = (ctypes.c_int64 * 20)(*[-7] * 20)
        assert library.outofcore_arena_counters(arena.handle, counts, 3) == len(fields(ArenaCounters))
        assert list(counts[3:]) == [-7] * 17  # no more is written than there is room for


def test_no_exception_leaves_the_library() -> None:
    """It would end the process."""
    library = load_native().library
    assert library is not None
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
