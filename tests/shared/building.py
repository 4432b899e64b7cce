"""Native code that workers need is built by one of them, and each has a cache of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator

import pytest

from outofcore.capture.reads import load_comparing
from outofcore.compiling import user_cache_folder
from outofcore.errors import StateError
from outofcore.planning.placement import compiled as placement
from outofcore.planning.remat import compiled as chains


@contextlib.contextmanager
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, load: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Build native code in the user's cache, once for all sessions, and go on with a copy that has no measurements.

    Args:
        tmp_path_factory: where the copy is made.
        load: functions that build missing native code; tests that need it report a failed build.
    """
    with _one_at_a_time(tmp_path_factory):
        for each in (*load, chains.load_library, placement.load_library, load_comparing):
            with contextlib.suppress(StateError):
                each()
    cache, built = tmp_path_factory.mktemp("cache"), user_cache_folder()
    (cache / built.name).mkdir()
    for library in built.glob("*-*"):
        with contextlib.suppress(OSError):  # another worker is building there
            shutil.copytree(library, cache / built.name / library.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@contextlib.contextmanager
def _one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one worker builds here the others, which wait for it, then find."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
