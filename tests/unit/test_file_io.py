"""Tests of native file I/O, compared with plain copies."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from native_checks import built, said

SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_native_io_moves_the_same_bytes_as_plain_copies(is_in_memory: bool, tmp_path: Path) -> None:
    if is_in_memory and not SHARED_MEMORY.is_dir():
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if is_in_memory else tmp_path) as folder:
        assert said(built("file_io", tmp_path), folder) == "ok"
