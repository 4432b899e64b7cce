"""Choose the tier of tests, the planner's search, and settings for parallel test processes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import process_state
import pytest
from effort import register_profiles, search_like

from outofcore.planning.parameters import QUICK, SearchParams

FULL = SearchParams()
# Tests that run a step need a valid plan, not a good one.
BRIEF = replace(QUICK, relaxations=0, slacks=(1.5,))
UNIT = Path(__file__).with_name("unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run everything, with all examples and the planner's full search"
    )


def pytest_configure(config: pytest.Config) -> None:
    register_profiles(exhaustive=config.getoption("--exhaustive"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"random order and numbers: repeat them with --randomly-seed={seed}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests, and start one of two workers on tests without native code."""
    if not config.getoption("--exhaustive"):
        deselected = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    unit = [item for item in items if UNIT in item.path.parents]
    native = [item for item in items if UNIT not in item.path.parents]
    half = min((len(items) + 1) // 2, len(native))
    items[:] = [*native[:half], *unit, *native[half:]]


@pytest.fixture(scope="session", autouse=True)
def _search(request: pytest.FixtureRequest) -> Iterator[None]:
    with search_like(FULL if request.config.getoption("--exhaustive") else BRIEF):
        yield


@pytest.fixture
def full_search() -> Iterator[None]:
    with search_like(FULL):
        yield


@pytest.fixture(scope="module", autouse=True)
def _freeze_imported_objects() -> None:
    """Exclude imported modules from garbage collection: PyTorch's objects cost 0.3 s per collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restore_process_settings(_one_thread_each: None, _accept_interrupts: None) -> Iterator[None]:
    """Restore process settings that a test changed; fail it if one cannot be restored."""
    settings = process_state.settings()
    before = process_state.read(settings)
    yield
    unrestored = process_state.restore(settings, before)
    if unrestored:
        gc.collect()  # closes loops that the test no longer refers to
        unrestored = process_state.restore(settings, before)
    assert not unrestored, f"the test left changed: {'; '.join(unrestored)}"


@pytest.fixture(scope="session", autouse=True)
def _accept_interrupts() -> None:
    """Accept Ctrl-C again: a shell makes background processes ignore it, and tests of interrupts would fail."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    """Limit threads: processes that wait for one another on the same cores are many times slower."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each would be a process that loads PyTorch
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
