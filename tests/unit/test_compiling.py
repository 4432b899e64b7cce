"""Tests of native code that is compiled on first use."""

from __future__ import annotations

import ctypes
import io
from pathlib import Path

import pytest

from outofcore.compiling import is_built, load_built


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise OSError(f"{path} is missing")
    return ctypes.CDLL(None)


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
def test_terminal_announces_a_build_once(
    stream: type[io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = stream()
    monkeypatch.setattr("sys.stderr", shown)
    before_build: list[str] = []

    def build(path: Path) -> None:
        before_build.append(shown.getvalue())
        path.write_bytes(b"")

    library = tmp_path / "wheel" / "library-1.so"
    assert not is_built(library)
    for _ in range(2):
        load_built("library.cpp", library, build, load)
    assert is_built(library)
    assert len(before_build) == 1
    announced = "outofcore: compiling library.cpp, up to half a minute or so, only once ...\n"
    assert before_build[0] == shown.getvalue() == (announced if stream is _Terminal else "")
