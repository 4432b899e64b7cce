"""Builds fail_nth.cpp, which makes calls of the system fail, and has programs started with it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from outofcore.compiling import compile_library, private_folder, user_cache_folder

SOURCE = Path(__file__).with_name("fail_nth.cpp")


def environment() -> dict[str, str]:
    """Return the environment of a program in which calls are made to fail, with one thread and one heap."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    # Not beside the native code of the package, which it knows by its folder.
    library = private_folder(user_cache_folder().with_name("outofcore-tests")) / f"fail-nth-{key}.so"
    if not library.exists():
        compile_library({SOURCE: ("-fno-builtin",)}, library, link_flags=["-ldl"])
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "FAIL_NTH": str(library),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
