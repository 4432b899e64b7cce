"""Choose the tier of tests, the effort of the search, and settings that parallel test processes need."""

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
# Any valid plan proves the same of a step that runs.
BRIEF = replace(QUICK, relaxations=0, slacks=(1.5,))
UNIT = Path(__file__).with_name("unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run everything, with all examples and the planner's full search"
    )


def pytest_configure(config: pytest.Config) -> None:
    register_profiles(exhaustive=config.getoption("--exhaustive"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seed, which a quiet run does not."""
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"random order and numbers: repeat them with --randomly-seed={seed}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out exhaustive tests, and let one of two workers begin with tests that need no native code."""
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    unit = [item for item in items if UNIT in item.path.parents]
    others = [item for item in items if UNIT not in item.path.parents]
    half = min((len(items) + 1) // 2, len(others))
    items[:] = [*others[:half], *unit, *others[half:]]


@pytest.fixture(scope="session", autouse=True)
def _search(request: pytest.FixtureRequest) -> Iterator[None]:
    with search_like(FULL if request.config.getoption("--exhaustive") else BRIEF):
        yield


@pytest.fixture
def full_search() -> Iterator[None]:
    with search_like(FULL):
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_collect() -> None:
    """Exclude imported modules from garbage collection: PyTorch's objects cost 0.3 s per collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind(_one_thread_each: None, _interruptible: None) -> Iterator[None]:
    """Restore the settings of the process that a test changes; fail it where nothing restores them."""
    settings = process_state.settings()
    before = process_state.read(settings)
    yield
    left = process_state.restore(settings, before)
    if left:
        gc.collect()  # ends loops that the test has lost
        left = process_state.restore(settings, before)
    assert not left, f"the test left changed: {'; '.join(left)}"


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell ignores Ctrl-C for what it starts in the background, and tests that are interrupted would not be."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    """Threads of several processes that wait for one another on the same cores would take many times as long."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each would be a process that loads PyTorch
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
