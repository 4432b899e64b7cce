"""Tests of building the native code, and of the layouts that it shares with Python."""

import ctypes
import os
import re
import subprocess
import sys
import threading
from dataclasses import fields
from enum import Enum
from pathlib import Path

import pytest
import torch
from scripts import TRAINING

from outofcore import compiling
from outofcore.compiling import BuildError, ensure_private_folder
from outofcore.errors import StateError
from outofcore.execution import arena, copying, replay
from outofcore.execution.arena import Arena, ArenaCounters, ScopeTable
from outofcore.execution.cuda import driver, staging
from outofcore.follow import native as follow_native
from outofcore.follow import observed, recipes, space
from outofcore.follow.stats import LoopStats
from outofcore.runtime import file_io, native
from outofcore.runtime.native import load_native, load_unlocked


@pytest.fixture(scope="module")
def library_bytes() -> bytes:
    path = compiling.user_cache_folder() / native.library_file().stem / native.library_file().name
    load_native()
    return path.read_bytes()


def test_build_is_private_and_complete(tmp_path: Path) -> None:
    path = native.build(tmp_path / "built.so")
    assert [p.name for p in tmp_path.iterdir()] == ["built.so"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert native.load_library(path).outofcore_end


def test_missing_compiler_raises_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        native.build(tmp_path / "built.so", compilers=("no-such-compiler",))
    assert list(tmp_path.iterdir()) == []


def test_build_raises_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BuildError, match="no thread for the compiler"):
        native.build(tmp_path / "built.so")
    assert list(tmp_path.iterdir()) == []


def test_failing_compiler_is_quoted_and_leaves_no_files(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'error: out of ideas' >&2\nexit 3\n")
    compiler.chmod(0o755)
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BuildError, match="out of ideas"):
        native.build(folder / "built.so", compilers=(str(compiler),))
    assert list(folder.iterdir()) == []


def load_with(monkeypatch: pytest.MonkeyPatch, cache: Path) -> ctypes.PyDLL:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return native._load_once.__wrapped__(native.Flavor.CPU)


def test_build_is_cached_and_replaced_when_damaged(
    library_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = native.library_file().name
    folder = ensure_private_folder(tmp_path / "outofcore" / native.library_file().stem)
    (folder / name).write_bytes(b"half a fi")
    monkeypatch.setattr(native, "build", lambda path, **_: path.write_bytes(library_bytes))
    assert load_with(monkeypatch, tmp_path).outofcore_end
    assert (folder / name).read_bytes() == library_bytes
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(native, "build", None)
    assert load_with(monkeypatch, tmp_path).outofcore_end  # from the cache


def test_cache_writable_by_others_is_not_trusted(
    library_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outofcore" / native.library_file().stem
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with monkeypatch.context() as patch:
        patch.setattr(native, "build", lambda path, **_: path.write_bytes(library_bytes))
        assert load_with(patch, tmp_path).outofcore_end  # built in a temporary folder
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    with pytest.raises(StateError, match=r"(?s)outofcore-cpu.*others can write to it.*install g\+\+"):
        load_with(monkeypatch, tmp_path)


def test_native_code_is_refused_outside_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.sys, "platform", "darwin")
    with pytest.raises(StateError, match="runs only on Linux, and this is darwin"):
        native._load_once.__wrapped__(native.Flavor.CPU)


REFUSED = f"""
import torch, outofcore
{TRAINING}
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


def test_compile_without_a_compiler_raises_and_keeps_the_model(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", REFUSED]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    compiled, smallest = process.stdout.splitlines()
    assert "native code is missing: outofcore-cpu is not compiled here, and could not be (" in compiled
    assert "no C++ compiler is on PATH" in compiled
    assert compiled.endswith("Install a C++ compiler such as g++, or a wheel of outofcore that was built with one")
    assert "native code is missing" in smallest
    assert not list(tmp_path.rglob("*.so"))


def test_library_name_depends_on_device_and_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is independent of PyTorch's path: a wheel may be used elsewhere."""
    here = native.library_file()
    monkeypatch.setattr(native, "_TORCH", Path("/elsewhere/torch"))
    assert native.library_file() == here
    assert native.library_file(native.Flavor.CUDA) != here
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert native.library_file() != here


def to_snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("k")).upper()


def members_of(kind: type) -> dict[str, tuple[int, int]]:
    """Return offsets and sizes of a struct's fields, or values of an enum or counters with size 0."""
    if issubclass(kind, ctypes.Structure):
        names = [name for base in reversed(kind.__mro__) for name, *_ in vars(base).get("_fields_", ())]
        members = {name: getattr(kind, name) for name in names}
        return {name: (member.offset, member.size) for name, member in members.items()}
    if issubclass(kind, Enum):
        return {member.name: (member.value, 0) for member in kind}
    return {field.name.upper(): (number, 0) for number, field in enumerate(fields(kind))}


SHARED: dict[str, type] = {
    "Action": driver._Action,
    "Adopted": space.AdoptionResult,
    "Answer": arena.Answer,
    "Cache": file_io.Cache,
    "Cause": observed.Cause,
    "Copied": observed.CopyTiming,
    "Copy": copying._Copy,
    "CopyFailure": copying._CopyFailure,
    "Counter": ArenaCounters,
    "Event": observed.LogEvent,
    "Excess": space.Excess,
    "Installed": arena.Installed,
    "Kind": driver._Kind,
    "LoopCounter": LoopStats,
    "Numbers": follow_native.Refusal,
    "Piece": copying._Piece,
    "Queue": copying._Queue,
    "Recompute": recipes.RecomputeMode,
    "ReplayFailure": replay._Failure,
    "Sum": copying._Sum,
    "Posted": staging.Posted,
    "Wait": copying._Wait,
    "Work": copying._Work,
}
# Members that only Python uses.
PYTHON_ONLY = {
    "LoopCounter": {"STEPS", "PLANS", "BUDGET_BYTES", "RESIDENT_BYTES", "FILE_PAGES_BYTES", "OTHER_BYTES"},
    "CopyFailure": {"NONE"},
}


def test_native_code_and_python_agree_on_shared_layouts() -> None:
    native_members: dict[str, dict[str, tuple[int, int]]] = {}
    for line in load_native().outofcore_borders().decode().splitlines():
        kind, name, offset, size = line.split()
        native_members.setdefault(kind, {})[to_snake_case(name) if int(size) == 0 else name] = int(offset), int(size)
    ours = {name: members_of(kind) for name, kind in SHARED.items()}
    for name, python_only in PYTHON_ONLY.items():
        assert python_only <= set(ours[name])
        ours[name] = {member: offset for member, offset in ours[name].items() if member not in python_only}
    native_members["ReplayFailure"].pop("NONE")  # Python reads it only after a failure
    assert native_members.pop("FileIo") == {"MEMORY": (file_io.MEMORY, 0), "BOUNCE": (file_io.BUFFER_BYTES, 0)}
    assert native_members == ours


def test_counters_are_written_up_to_the_given_length() -> None:
    with Arena(1 << 20) as opened:
        counts = (ctypes.c_int64 * 20)(*[-7] * 20)
        assert load_native().outofcore_arena_counters(opened.handle, counts, 3) == len(fields(ArenaCounters))
        assert list(counts[3:]) == [-7] * 17


def test_unlocked_calls_use_the_same_library() -> None:
    unlocked = load_unlocked(native.Flavor.CPU)
    assert isinstance(load_native(), ctypes.PyDLL)
    assert not isinstance(unlocked, ctypes.PyDLL)
    assert unlocked._handle == load_native()._handle
    assert unlocked.outofcore_lane_new.argtypes == load_native().outofcore_lane_new.argtypes


def test_no_exception_leaves_the_library() -> None:
    """An exception would end the process."""
    library = load_native()
    with Arena(1 << 20) as opened:
        table = ScopeTable(opened, [[(4096, 0)]])
        assert library.outofcore_table_surprise_log(table._table, 17) is None
        assert library.outofcore_table_surprises(table._table, None, 0) == 0


@pytest.mark.parametrize(
    ("header", "kind"),
    [("core/CachingDeviceAllocator.h", "DeviceAllocator"), ("cuda/CUDACachingAllocator.h", "CUDAAllocator")],
)
def test_every_virtual_method_of_the_cuda_allocator_is_forwarded(header: str, kind: str) -> None:
    """Newer versions of PyTorch add methods, whose defaults do no work."""
    path = Path(torch.__file__).parent / "include" / "c10" / header
    (theirs,) = re.findall(
        rf"^(?:class|struct) [^;{{]*\b{kind} [^;]*?\{{.*?^\}};", path.read_text(), re.DOTALL | re.MULTILINE
    )
    ours = native.CSRC.joinpath("device_cuda.h").read_text(encoding="utf-8")
    names = set(re.findall(r"\bvirtual\b[^;{(]*?(\w+)\(", theirs))
    assert len(names) > 6
    assert {name for name in names if not re.search(rf"(?<!->)(?<!\.)\b{name}\(", ours)} == set()
