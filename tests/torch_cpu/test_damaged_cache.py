"""Tests of damaged cache files: steps are measured again and train."""

from __future__ import annotations

import copy
import functools
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import captured_small_step, small_step

import outofcore
from outofcore.planning.placement.requests import ResultStorage, Scratch
from outofcore.profiling import links
from outofcore.profiling.cache import Cache
from outofcore.profiling.links import LinkReport, Rates, load_or_measure_link
from outofcore.profiling.ops import ProfileCache, profile_ops
from outofcore.runtime.homes import HostHome
from outofcore.units import GIB, MIB

NUMBERS = (-1, 0, 0.5, 1e308, -1e308, 10**19, 10**400, float("nan"), float("inf"))
WRONG = (*NUMBERS, None, True, "x", "", "\ud800", [], [[]], {})
STEP = functools.cache(captured_small_step)


@pytest.fixture
def _fixed_link(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(1e9, 1e9)
    report = LinkReport("host", GIB, 1e-4, rates, rates, rates, 1.0, 1.0, 1.0)
    monkeypatch.setattr(links, "measure_link", lambda home, **_: report)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = Cache(tmp_path_factory.mktemp("whole"))
    profile_ops(STEP(), cache=cache)
    load_or_measure_link(HostHome(GIB), cache, buffer_bytes=MIB)
    return {path.name: path.read_text() for path in cache.files() if path.suffix == ".json"}


def find_spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each value in plain data."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from find_spots(value[key])


def check(cache: Cache) -> None:
    """Check that cached measurements are plausible and that new entries can be read back."""
    step = STEP()
    profiles = ProfileCache(cache)
    for op, call in zip(step.graph.ops, step.calls, strict=True):
        profile = profiles.find(
            op, timed=True, first_differs=call.rehearse_first is not None, result_count=len(call.results)
        )
        if profile is None:
            continue
        assert 0 <= profile.cost.seconds <= 1e6
        for requests in (profile.requests, profile.first_requests):
            for request in requests.requests if requests else ():
                assert 0 <= request.bytes < 1 << 60
                if isinstance(request.placement, Scratch):
                    assert request.placement.offset + request.bytes <= profile.cost.workspace_bytes
                if isinstance(request.placement, ResultStorage):
                    assert request.placement.key < len(call.results)
    home = load_or_measure_link(HostHome(GIB), cache, buffer_bytes=MIB).home
    assert min(home.bytes_per_s_in, home.bytes_per_s_out, home.latency_s) > 0
    assert max(home.bytes_per_s_in, home.bytes_per_s_out, home.latency_s) < 1e16
    assert 0 <= home.contention <= 1
    shelf = cache.shelf("ops", {})
    shelf.write({"new": 1})
    assert shelf.read()["new"] == 1


@pytest.mark.usefixtures("_fixed_link")
def test_truncated_files_are_measured_again(
    tmp_path: Path, intact: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for number, share in enumerate((0.0, 0.01, 0.3, 0.7, 0.99)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in intact.items():
            (folder / name).write_text(text[: int(len(text) * share)])
        with caplog.at_level(logging.WARNING, "outofcore.profiling"):
            check(Cache(folder))
        assert caplog.text.count("measuring again") >= 2
        caplog.clear()


@pytest.mark.usefixtures("_fixed_link")
@pytest.mark.parametrize("seed", range(3))
def test_random_wrong_values_give_valid_measurements(tmp_path: Path, intact: dict[str, str], seed: int) -> None:
    rng = random.Random(seed)
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in intact.items():
            content = copy.deepcopy(json.loads(text))
            places = list(find_spots(content))
            for _ in range(rng.choice((1, 1, 3, 30))):
                holder, key = rng.choice(places)
                holder[key] = copy.deepcopy(rng.choice(WRONG))
            (folder / name).write_text(json.dumps(content), "utf-8")
        check(Cache(folder))


@pytest.mark.usefixtures("_fixed_link")
def test_wrong_value_of_a_link_is_measured_again(tmp_path: Path, intact: dict[str, str]) -> None:
    (name,) = (name for name in intact if name.startswith("links"))
    for number in range(len(list(find_spots(json.loads(intact[name]))))):
        for wrong in WRONG:
            content = json.loads(intact[name])
            holder, key = list(find_spots(content))[number]
            holder[key] = wrong
            (tmp_path / name).write_text(json.dumps(content), "utf-8")
            home = load_or_measure_link(HostHome(GIB), Cache(tmp_path), buffer_bytes=MIB).home
            assert min(home.bytes_per_s_in, home.bytes_per_s_out, home.latency_s) > 0


@pytest.mark.parametrize("wrong", [1e308, 10**400, "x", -1, [], "\ud800"])
def test_step_trains_when_all_measurements_are_damaged(tmp_path: Path, intact: dict[str, str], wrong: object) -> None:
    for name, text in intact.items():
        content = json.loads(text)
        for entry in content["entries"].values():
            entry.update(dict.fromkeys(entry, wrong))
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    plain, *_ = small_step()
    losses = [plain(torch.ones(8, 32)) for _ in range(2)]
    step, model, optimizer = small_step()
    with outofcore.compile(step, model, optimizer, budget="64MiB", cache=tmp_path) as compiled:
        assert [torch.equal(compiled(torch.ones(8, 32)), loss) for loss in losses] == [True, True]
    # All ops were measured again and stored.
    for path in Cache(tmp_path).files():
        if path.name in intact and path.name.startswith("ops"):
            assert all(0 < entry["seconds"] < 1e3 for entry in json.loads(path.read_text())["entries"].values())


def test_requests_for_missing_results_or_scratch_are_ignored(tmp_path: Path) -> None:
    cache, step = Cache(tmp_path), STEP()
    profile_ops(step, cache=cache)
    (path,) = (path for path in cache.files() if path.suffix == ".json")
    content = json.loads(path.read_text())
    for entry in content["entries"].values():
        entry["requests"]["list"] = [[64, "result", 7], [64, "scratch", 1 << 30]]
    path.write_text(json.dumps(content))
    profiles = ProfileCache(cache)
    for op, call in zip(step.graph.ops, step.calls, strict=True):
        assert profiles.find(op, timed=True, first_differs=False, result_count=len(call.results)) is None
