"""Build fail_nth.cpp, which makes system calls fail, and the environment that preloads it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from outofcore.compiling import compile_library, ensure_private_folder, user_cache_folder

SOURCE = Path(__file__).with_name("fail_nth.cpp")


def environment() -> dict[str, str]:
    """Return the environment of a program with failing calls, one thread and one heap."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    # In another folder than the package's native code, which the library recognizes by its folder.
    library = ensure_private_folder(user_cache_folder().with_name("outofcore-tests")) / f"fail-nth-{key}.so"
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
