"""A native build shared by all test workers, and a private cache for each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator

import pytest

from outofcore.capture.reads import load_compare_library
from outofcore.compiling import user_cache_folder
from outofcore.errors import StateError
from outofcore.planning.placement import compiled as placement
from outofcore.planning.remat import compiled as chains


@contextlib.contextmanager
def private_cache(tmp_path_factory: pytest.TempPathFactory, load: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Build native code once in the user's cache, and use a copy without measurements as the cache."""
    with _build_lock(tmp_path_factory):
        for build in (*load, chains.load_library, placement.load_library, load_compare_library):
            with contextlib.suppress(StateError):  # tests that need the code report a failed build
                build()
    cache, user_cache = tmp_path_factory.mktemp("cache"), user_cache_folder()
    (cache / user_cache.name).mkdir()
    for library in user_cache.glob("*-*"):
        with contextlib.suppress(OSError):  # another worker is building there
            shutil.copytree(library, cache / user_cache.name / library.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@contextlib.contextmanager
def _build_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
