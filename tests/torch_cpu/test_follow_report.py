"""Reports and traces of followed loops: on demand and by plan, in the loop and after it."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import MOVES, PlannedAtOnce, reader_with_fixed_costs
from loops import BATCH, LENGTH, Language, adamw, loss_of, sentences
from torch import nn

import outofcore
from outofcore.errors import InputError, StateError
from outofcore.follow import loop_planner as module
from outofcore.units import MIB

pytestmark = pytest.mark.usefixtures("one_thread")

# Half of what the loop has in use where everything fits.
BUDGET = 13 * MIB


@pytest.fixture(autouse=True)
def _planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", PlannedAtOnce)
    monkeypatch.setattr(module, "read_record", reader_with_fixed_costs())


def each_step(
    steps: int, between: Callable[[int, nn.Module], object] = lambda i, m: None, **options: Any
) -> Iterator[tuple[outofcore.Loop, outofcore.LoopStats]]:
    """After each step the loop, and its stats."""
    torch.manual_seed(0)
    model = Language()
    with outofcore.budget(BUDGET, model, **{"cache": False, "policy": MOVES, **options}) as run:
        optimizer = adamw(model)
        for i, (ids, wanted) in enumerate(sentences(steps)):
            optimizer.zero_grad()
            loss_of(model, ids, wanted).backward()
            optimizer.step()
            yield run, run.stats
            between(i, model)


def content_of(path: Path) -> dict[str, Any]:
    page = path.read_text(encoding="utf-8")
    shown = re.search(r'<script id="content" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert shown is not None
    return json.loads(shown.group(1))


def test_a_page_for_each_step_agrees_with_the_stats(tmp_path: Path) -> None:
    before, told = None, {"out": 0, "in": 0}
    for step, (run, stats) in enumerate(each_step(6)):
        content = content_of(run.report(tmp_path / "deep" / "report.html", title="mine"))
        assert (content["title"], content["budget"]) == ("mine", BUDGET)
        (timeline,) = content["timelines"]
        assert 0 < timeline["peak"] <= BUDGET
        assert timeline["peak"] == max(map(sum, zip(*timeline["memory"]["held"].values(), strict=True)))
        assert timeline["peak"] <= stats.peak_bytes
        # A copy that ends between a step and the reading of the stats is the next step's.
        for way, counted in (("out", stats.written_bytes), ("in", stats.fetched_bytes)):
            moved = sum(each[f"bytes_{way}"] for each in content["moved"])
            told[way] += moved
            assert moved > 0
            assert counted - 2 * MIB <= told[way] <= counted
        # Each op is there once, and the parts of the time add up.
        how = Counter(one[2] for one in content["instructions"] if one[0] == 0)
        assert sum(how.values()) == len(content["ops"]) > 250
        assert sum(timeline["spent"].values()) == pytest.approx(timeline["seconds"], rel=0.02)
        assert all(0 <= a <= b <= timeline["seconds"] * 1e6 + 1 for a, b in _times(timeline))
        # What ran by plan is told from what did not: the plan was there after the third step.
        notes = content["notes"]
        if step < 3:
            assert set(how) == {2}
            assert content["policy"] == "on demand"
        else:
            planned = stats.planned_ops - (before.planned_ops if before else 0)
            assert how[0] == planned > 0.9 * len(content["ops"])
            assert ["ops", f"{how[0]} by plan, {how[2]} on demand"] in notes
            assert content["policy"] != "on demand"
            assert any(name == "plan" and "predicted by" in text for name, text in notes)
        assert notes[0][1].startswith(f"step {step + 1} of the loop: ")
        before = stats


def _times(timeline: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(timeline["starts"], timeline["ends"], strict=True))


def test_storages_have_the_names_that_the_user_gave(tmp_path: Path) -> None:
    *_, (run, _) = each_step(3)
    storages = {s["name"]: s for s in content_of(run.report(tmp_path / "report.html"))["storages"]}
    weight = storages["blocks.0.project.weight"]
    assert (weight["kind"], weight["bytes"]) == ("parameter", 4 * 128 * 3 * 128)
    assert storages["exp_avg of blocks.0.project.weight"]["kind"] == "optimizer state"
    assert storages["gradient of blocks.0.project.weight"]["kind"] == "gradient"
    assert "offloaded" in {s["fate"] for s in storages.values()}


def test_a_departure_is_told_with_its_reason(tmp_path: Path) -> None:
    ids = torch.randint(0, 1024, (BATCH, LENGTH))

    def evaluate(i: int, model: nn.Module) -> None:
        if i == 5:
            with torch.no_grad():
                model(ids)

    *_, (run, _) = each_step(7, evaluate)
    content = content_of(run.report(tmp_path / "report.html"))
    told = [text for name, text in content["notes"] if name.startswith("step 7, op ")]
    # The evaluation runs as the forward pass that is planned, and goes on otherwise; then the step begins.
    (left,) = [text for text in told if "ran on demand" in text]
    assert re.match(r"aten::\S+ ran where aten::\S+ was planned; \d+ ops? ran on demand, then the plan resumed", left)

    run.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    marks = [e["args"]["why"] for e in events if e["ph"] == "i"]
    assert left in marks
    ops = Counter(e["cat"] for e in events if e["ph"] == "X")
    assert ops["planned"] > 250
    assert 0 < ops["on demand"] < 20


def test_the_trace_has_what_the_page_has(tmp_path: Path) -> None:
    *_, (run, _) = each_step(3)
    content = content_of(run.report(tmp_path / "report.html"))
    run.trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    counts = Counter(e["cat"] for e in events if e["ph"] == "X")
    assert counts["on demand"] == len(content["ops"])
    assert counts["copy-in"] == sum(moved["copies_in"] for moved in content["moved"])
    assert counts["copy-out"] == sum(moved["copies_out"] for moved in content["moved"])
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == content["timelines"][0]["peak"]


def test_a_trace_lies_on_the_axis_of_the_profiler(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "profiler.json", tmp_path / "both.json"
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters())
    with outofcore.budget("4MiB", model) as run:
        for step in range(2):
            if step == 1:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.start()
            model(torch.ones(64, 256)).square().mean().backward()
            optimizer.step()
        profiler.stop()
    profiler.export_chrome_trace(str(theirs))
    run.trace(ours, beside=theirs)
    events = json.loads(ours.read_text())["traceEvents"]
    first = min(e["ts"] for e in events if e.get("cat") == "on demand")
    profiled = [e["ts"] for e in events if e.get("name") in ("aten::addmm", "aten::linear")]
    assert abs(first - min(profiled)) < 1e6  # 50 years and more, were the origin not theirs


def test_profilers_see_all_ops_of_a_loop() -> None:
    """Observers are disabled in the loop's thread while there are no others than the loop's."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        with torch.profiler.record_function("mine"):
            model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()

    def seen(steps: int, **options: Any) -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
            for _ in range(steps):
                step()
                profiler.step()
        return {e.key: e.count for e in profiler.key_averages() if not e.key.startswith(("ProfilerStep", "outofcore"))}

    step()
    plain = seen(1)
    assert {"mine", "aten::addmm", "AddmmBackward0"} <= set(plain)
    found, elsewhere = [], []
    with outofcore.budget("4MiB", model):
        step()
        found += [seen(1), seen(1)]
        step()
        found.append(seen(3, schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)))
        thread = threading.Thread(target=lambda: elsewhere.append(seen(1)))
        thread.start()
        thread.join()
    found.append(seen(1))
    assert [{key: each.get(key) for key in plain} for each in found + elsewhere] == [plain] * 5


def test_observers_are_enabled_when_a_loop_ends_in_backward() -> None:
    """When backward ends, it restores the state in which it began: observers were disabled."""
    run = outofcore.budget("4MiB", nn.Linear(256, 256)).start()
    x = torch.ones(64, 256, requires_grad=True)
    x.register_hook(lambda grad: run.end())
    (x * 2).sum().backward()
    torch.ones(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(1)
    assert "aten::ones" in {e.key for e in profiler.key_averages()}


def test_what_happened_so_far_where_there_are_no_steps(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with outofcore.budget("4MiB", model) as run:
        with pytest.raises(StateError, match="nothing to report yet"):
            run.report(tmp_path / "report.html")
        with pytest.raises(StateError, match="nothing to report yet"):
            run.trace(tmp_path / "trace.json")
        assert not list(tmp_path.iterdir())
        for _ in range(3):
            model(torch.ones(64, 256))
        inside = content_of(run.report(tmp_path / "report.html"))
    after = content_of(run.report(tmp_path / "report.html"))
    for content in (inside, after):
        assert content["notes"][0][0] == "so far"
        assert [name for name, *_ in content["ops"]].count("addmm") == 3
    with pytest.raises(InputError, match="cannot write the report"):
        run.report(tmp_path)


def test_the_last_call_is_told_where_nothing_is_trained(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with outofcore.budget("4MiB", model) as run, torch.no_grad():
        for _ in range(3):
            model(torch.ones(64, 256))
    content = content_of(run.report(tmp_path / "report.html"))
    assert content["notes"][0][0] == "step"
    assert [name for name, *_ in content["ops"]].count("addmm") == 1


def test_a_loop_that_never_started_has_nothing_to_tell(tmp_path: Path) -> None:
    run = outofcore.budget("4MiB", nn.Linear(8, 8))
    with pytest.raises(StateError, match="nothing to report yet"):
        run.report(tmp_path / "report.html")


def test_a_loop_that_was_stopped_half_way_tells_its_last_whole_step(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters())
    run = outofcore.budget("4MiB", model).start()
    for _ in range(2):
        model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()
    inside = content_of(run.report(tmp_path / "report.html"))
    with torch.no_grad():
        model(torch.ones(64, 256))
    run.stop()
    after = content_of(run.report(tmp_path / "report.html"))
    assert inside["ops"] == after["ops"]
    assert inside["timelines"] == after["timelines"]
    assert after["notes"][0][1].startswith("step 2 of the loop")


def test_progress_tells_how_much_of_the_model_has_moved() -> None:
    model, told = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), []
    run = outofcore.budget("4MiB", model)
    run.on_progress = lambda stage, done, total: told.append((stage, done, total))
    with run:
        pass
    assert told == [("move the model to its home", done, 4) for done in range(5)]
