"""No test reads or changes the measurements that the user keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outofcore.execution.native import load_native


@pytest.fixture(scope="session", autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    load_native()  # built once for all sessions
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
