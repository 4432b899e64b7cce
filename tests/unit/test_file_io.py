"""Bytes between memory and a file, natively: as plain copies have it, whatever the system's calls do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from native_checks import built, said

SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_bytes_move_as_plain_copies_have_it(is_in_memory: bool, tmp_path: Path) -> None:
    if is_in_memory and not SHARED_MEMORY.is_dir():
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if is_in_memory else tmp_path) as folder:
        assert said(built("file_io", tmp_path), folder) == "ok"
