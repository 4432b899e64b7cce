"""Tests of cached profiles: ops and groups are measured once and loaded afterwards."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import captured_small_step, small_step

import outofcore
from outofcore._torch_internals import precision_of
from outofcore.costs import OpCost
from outofcore.graph import Op, StepGraph
from outofcore.planning.placement.requests import Request, Requests, ResultStorage, Scratch, Unplanned
from outofcore.profiling import groups
from outofcore.profiling import ops as module
from outofcore.profiling import ops as profiling_ops
from outofcore.profiling.cache import Cache
from outofcore.profiling.groups import GroupCost
from outofcore.profiling.ops import (
    OpProfile,
    ProfileCache,
    is_cacheable,
    machine_facts,
    op_shelf,
    profile_ops,
    update_cached_profiles,
)


@pytest.fixture
def measured_ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that were measured, not loaded from the cache."""
    names: list[str] = []
    original = profiling_ops._OpBench._record

    def record(self: Any, op: Op, func: Callable[..., object], *args: Any) -> Requests:
        names.append(op.name)
        return original(self, op, func, *args)

    monkeypatch.setattr(profiling_ops._OpBench, "_record", record)
    return names


def test_second_profile_is_loaded_from_the_cache(tmp_path: Path, measured_ops: list[str]) -> None:
    first = profile_ops(captured_small_step(), cache=Cache(tmp_path))
    assert measured_ops
    measured_ops.clear()
    assert profile_ops(captured_small_step(), cache=Cache(tmp_path)) == first
    assert measured_ops == []
    # For another model, only the ops that are not cached are measured.
    profile_ops(captured_small_step(width=48), cache=Cache(tmp_path))
    assert 0 < len(measured_ops) < len(first)


def test_ops_measured_on_a_busy_machine_are_measured_again(
    tmp_path: Path, measured_ops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    was_busy, now = [True], [1e9]
    monkeypatch.setattr(module, "was_busy", lambda _: was_busy[0])
    monkeypatch.setattr(module, "time", lambda: now[0])

    def measure() -> tuple[list[OpCost], bool]:
        measured_ops.clear()
        all_costs = [profile.cost for profile in profile_ops(captured_small_step(), cache=Cache(tmp_path))]
        return [cost for cost in all_costs if cost.seconds], bool(measured_ops)

    fastest, measured = measure()
    assert {cost.busy for cost in fastest} == {1}
    for count in (2, 3, 4):
        costs, measured = measure()
        assert measured
        assert {cost.busy for cost in costs} == {count}
        # While the machine is busy, the shortest time is the best estimate.
        assert all(cost.seconds <= before.seconds for cost, before in zip(costs, fastest, strict=True))
        fastest = costs
    assert measure() == (fastest, False)
    now[0] += 90_000
    assert measure()[1]
    now[0] += 90_000
    was_busy[0] = False
    costs, measured = measure()
    assert measured
    assert {cost.busy for cost in costs} == {0}
    assert measure() == (costs, False)


def test_group_measured_on_a_busy_machine_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    seconds, busy = iter(range(1, 9)), [True, True, False]
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(groups, "_measure", lambda *_: GroupCost(float(next(seconds)), 1.0))
    monkeypatch.setattr(groups, "was_busy", lambda *_, **__: busy.pop(0))
    monkeypatch.setattr(groups, "this_machine", lambda: SimpleNamespace(cores=4))
    costs = [groups.group_cost(group, torch.device("cpu"), Cache(tmp_path)) for _ in range(4)]
    assert [(cost.latency_s, cost.busy) for cost in costs] == [(1, 1), (2, 2), (3, 0), (3, 0)]
    # With fewer cores, the processes delay each other.
    monkeypatch.setattr(groups, "this_machine", lambda: SimpleNamespace(cores=3))
    assert groups.group_cost(group, torch.device("cpu"), None).busy == 0


def test_every_op_is_measured_without_a_cache(measured_ops: list[str]) -> None:
    profile_ops(captured_small_step())
    count = len(measured_ops)
    profile_ops(captured_small_step())
    assert len(measured_ops) == 2 * count


def test_untimed_profile_serves_only_untimed_requests(tmp_path: Path, measured_ops: list[str]) -> None:
    untimed = profile_ops(captured_small_step(), measure_time=False, cache=Cache(tmp_path))
    count = len(measured_ops)
    assert profile_ops(captured_small_step(), measure_time=False, cache=Cache(tmp_path)) == untimed
    assert len(measured_ops) == count
    full = profile_ops(captured_small_step(), cache=Cache(tmp_path))
    assert len(measured_ops) == 2 * count
    assert sum(profile.cost.seconds for profile in full) > 0
    assert [p.requests for p in full] == [p.requests for p in untimed]
    assert profile_ops(captured_small_step(), measure_time=False, cache=Cache(tmp_path)) == full


def test_shelf_depends_on_settings_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    usual = op_shelf(cache).path
    assert op_shelf(cache).path == usual
    torch.use_deterministic_algorithms(True)
    try:
        assert op_shelf(cache).path != usual
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in (("get_num_threads", lambda: 77), ("__version__", "9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, value)
            assert op_shelf(cache).path != usual
    monkeypatch.setattr(module, "this_machine", lambda: replace(original(), cpu="8086"))
    assert op_shelf(cache).path != usual
    assert machine_facts()["cpu"] == "8086"


original = module.this_machine


def test_ops_without_a_lasting_identity_are_not_cached() -> None:
    op = Op(0, "aten.mm.default", (), (), (), family="aten.mm.default(float32[2,2]{2,1})")
    assert is_cacheable(op)
    assert is_cacheable(replace(op, name="optimizer.AdamW"))
    assert not is_cacheable(replace(op, name="optimizer.MyAdamW", random=True))
    assert not is_cacheable(replace(op, name="mine.mm.default"))
    assert not is_cacheable(replace(op, family=""))
    assert not is_cacheable(replace(op, family="aten.mm.default(<object at 0x7f00>)"))


PLACEMENTS = st.one_of(
    st.builds(ResultStorage, st.integers(0, 9)), st.builds(Scratch, st.integers(0, 1 << 40)), st.just(Unplanned())
)
REQUESTS = st.lists(st.builds(Request, st.integers(0, 1 << 40), PLACEMENTS), max_size=4).map(
    lambda items: Requests(
        tuple(items), max((r.placement.offset + r.bytes for r in items if isinstance(r.placement, Scratch)), default=0)
    )
)
PROFILES = st.builds(
    lambda seconds, more, requests, first: OpProfile(
        OpCost(seconds, more + max(requests.workspace_bytes, first.workspace_bytes if first else 0)), requests, first
    ),
    st.floats(0, 1e6),
    st.integers(0, 1 << 40),
    REQUESTS,
    st.none() | REQUESTS,
)


@settings(max_examples=examples(60), deadline=None)
@given(PROFILES)
def test_profiles_survive_serialization(profile: OpProfile) -> None:
    decoded = msgspec.json.decode(
        msgspec.json.encode(module._CachedProfile.of(profile, timed=True)), type=module._CachedProfile
    )
    assert decoded.profile() == profile
    assert decoded.seconds == profile.cost.seconds


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {},
        {"seconds": -1.0},
        {"seconds": "much"},
        {"workspace_bytes": -1},
        {"requests": None},
        {"requests": {"bytes": 0, "list": [[5]]}},
        {"requests": {"bytes": 0, "list": [[5, "nowhere", 1]]}},
        {"requests": {"bytes": 0, "list": [[5, "result"]]}},
        {"requests": {"bytes": 0, "list": [[-5, "elsewhere"]]}},
    ],
)
def test_damaged_entry_is_measured_again(
    tmp_path: Path, wrong: object, measured_ops: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    first = profile_ops(captured_small_step(), cache=cache)
    shelf, before = op_shelf(cache), len(measured_ops)
    key, value = next(iter(shelf.read().items()))
    usual = {k: v for k, v in value.items() if wrong != {}}
    shelf.write({key: {**usual, **wrong} if isinstance(wrong, dict) else wrong})
    with caplog.at_level(logging.WARNING, "outofcore.profiling"):
        second = profile_ops(captured_small_step(), cache=cache)
    assert "again, because its cached measurement cannot be used" in caplog.text
    assert 1 <= len(measured_ops) - before <= 2  # an optimizer update also has a first run
    assert [p.requests for p in second] == [p.requests for p in first]
    measured_ops.clear()
    assert profile_ops(captured_small_step(), cache=cache) == second
    assert measured_ops == []


def test_measured_steps_replace_times_of_single_ops(tmp_path: Path) -> None:
    family = "aten.mm.default(…)"
    graph = StepGraph((), tuple(Op(i, "aten.mm.default", (0,), (), (), family=family) for i in range(3)))
    profiles = [OpProfile(OpCost(s, w), Requests((), w)) for s, w in ((1.0, 0), (5.0, 4096), (2.0, 64))]
    cache = Cache(tmp_path)
    update_cached_profiles(cache, graph, profiles)
    profile = ProfileCache(cache).find(graph.ops[0], timed=True, first_differs=False)
    assert profile == OpProfile(OpCost(2.0, 4096), Requests((), 4096))
    update_cached_profiles(cache, graph, [OpProfile(OpCost(9.0), Requests((), 0))] * 3, only=[])
    assert ProfileCache(cache).find(graph.ops[0], timed=True, first_differs=False) == profile


def test_same_step_in_another_process_uses_the_cache(tmp_path: Path) -> None:
    code = (
        "import sys, torch, outofcore\n"
        "from outofcore import busy\n"
        "from outofcore.profiling import links, ops\n"
        "busy._delayed_seconds, links.read_disk = lambda _: 0.0, lambda _: None\n"
        "measured = []\n"
        "time, link = ops._OpBench._time, links.measure_link\n"
        "ops._OpBench._time = lambda self, op, *rest: measured.append(op.name) or time(self, op, *rest)\n"
        "links.measure_link = lambda home, **kw: measured.append('link') or link(home, **kw)\n"
        "model = torch.nn.Linear(32, 32)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "def step(x):\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "with outofcore.compile(step, model, optimizer, budget='64MiB', cache=sys.argv[1]) as compiled:\n"
        "    compiled(torch.ones(8, 32))\n"
        "print(len(measured))\n"
    )
    counts = [
        int(subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert counts[0] > 1
    assert counts[1] == 0


def test_file_as_cache_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    step, model, optimizer = small_step()
    with pytest.raises(outofcore.errors.InputError, match="not a folder"):
        outofcore.compile(step, model, optimizer, budget="64MiB", cache=tmp_path / "file")


@pytest.fixture
def _restore_precision() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_restore_precision")
def test_new_precision_setting_changes_the_shelf(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    op_shelf(cache).write({"entry": {"seconds": 1.0}})
    assert "entry" in op_shelf(cache).read()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    assert precision_of(torch.backends.mkldnn, "matmul") == "bf16"
    # With this setting, PyTorch's older getter raises.
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert "entry" not in op_shelf(cache).read()
