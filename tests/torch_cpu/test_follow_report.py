"""Tests of reports and traces of eager loops."""

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
from foreground_planning import WITHOUT_RECOMPUTATION, ForegroundPlanner, reader_with_fixed_costs
from loops import BATCH, LENGTH, Language, adamw, loss_of, sentences
from torch import nn

import outofcore
from outofcore.errors import InputError, StateError
from outofcore.follow import loop_planner as module
from outofcore.units import MIB

pytestmark = pytest.mark.usefixtures("one_thread")

# Half of the loop's peak without evictions.
BUDGET = 13 * MIB


@pytest.fixture(autouse=True)
def _plan_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BackgroundPlanner", ForegroundPlanner)
    monkeypatch.setattr(module, "read_record", reader_with_fixed_costs())


def run_steps(
    steps: int, between: Callable[[int, nn.Module], object] = lambda i, m: None, **options: Any
) -> Iterator[tuple[outofcore.Loop, outofcore.LoopStats]]:
    torch.manual_seed(0)
    model = Language()
    with outofcore.budget(BUDGET, model, **{"cache": False, "policy": WITHOUT_RECOMPUTATION, **options}) as run:
        optimizer = adamw(model)
        for i, (ids, targets) in enumerate(sentences(steps)):
            optimizer.zero_grad()
            loss_of(model, ids, targets).backward()
            optimizer.step()
            yield run, run.stats
            between(i, model)


def content_of(path: Path) -> dict[str, Any]:
    page = path.read_text(encoding="utf-8")
    match = re.search(r'<script id="content" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match.group(1))


def test_page_of_each_step_agrees_with_the_stats(tmp_path: Path) -> None:
    before, reported = None, {"out": 0, "in": 0}
    for step, (run, stats) in enumerate(run_steps(6)):
        content = content_of(run.report(tmp_path / "deep" / "report.html", title="mine"))
        assert (content["title"], content["budget"]) == ("mine", BUDGET)
        (timeline,) = content["timelines"]
        assert 0 < timeline["peak"] <= BUDGET
        assert timeline["peak"] == max(map(sum, zip(*timeline["memory"]["held"].values(), strict=True)))
        assert timeline["peak"] <= stats.peak_bytes
        # A copy that ends between a step and its stats counts for the next step.
        for direction, counted in (("out", stats.written_bytes), ("in", stats.fetched_bytes)):
            moved = sum(entry[f"bytes_{direction}"] for entry in content["moved"])
            reported[direction] += moved
            assert moved > 0
            assert counted - 2 * MIB <= reported[direction] <= counted
        # Each op appears once, and the categories add up to the step's time.
        modes = Counter(instruction[2] for instruction in content["instructions"] if instruction[0] == 0)
        assert sum(modes.values()) == len(content["ops"]) > 250
        assert sum(timeline["spent"].values()) == pytest.approx(timeline["seconds"], rel=0.02)
        assert all(0 <= a <= b <= timeline["seconds"] * 1e6 + 1 for a, b in _intervals(timeline))
        # Ops run by plan from the fourth step on; the notes count planned ops and ops on demand.
        notes = content["notes"]
        if step < 3:
            assert set(modes) == {2}
            assert content["policy"] == "on demand"
        else:
            planned = stats.planned_ops - (before.planned_ops if before else 0)
            assert modes[0] == planned > 0.9 * len(content["ops"])
            assert ["ops", f"{modes[0]} by plan, {modes[2]} on demand"] in notes
            assert content["policy"] != "on demand"
            assert any(name == "plan" and "predicted by" in text for name, text in notes)
        assert notes[0][1].startswith(f"step {step + 1} of the loop: ")
        before = stats


def _intervals(timeline: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(timeline["starts"], timeline["ends"], strict=True))


def test_storages_have_parameter_names_and_kinds(tmp_path: Path) -> None:
    *_, (run, _) = run_steps(3)
    storages = {s["name"]: s for s in content_of(run.report(tmp_path / "report.html"))["storages"]}
    weight = storages["blocks.0.project.weight"]
    assert (weight["kind"], weight["bytes"]) == ("parameter", 4 * 128 * 3 * 128)
    assert storages["exp_avg of blocks.0.project.weight"]["kind"] == "optimizer state"
    assert storages["gradient of blocks.0.project.weight"]["kind"] == "gradient"
    assert "offloaded" in {s["fate"] for s in storages.values()}


def test_departure_from_the_plan_is_reported_with_its_reason(tmp_path: Path) -> None:
    ids = torch.randint(0, 1024, (BATCH, LENGTH))

    def evaluate(i: int, model: nn.Module) -> None:
        if i == 5:
            with torch.no_grad():
                model(ids)

    *_, (run, _) = run_steps(7, evaluate)
    content = content_of(run.report(tmp_path / "report.html"))
    notes = [text for name, text in content["notes"] if name.startswith("step 7, op ")]
    # The evaluation matches the planned forward pass, then departs from the plan; then the step begins.
    (note,) = [text for text in notes if "ran on demand" in text]
    assert re.match(r"aten::\S+ ran where aten::\S+ was planned; \d+ ops? ran on demand, then the plan resumed", note)

    run.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    marks = [e["args"]["why"] for e in events if e["ph"] == "i"]
    assert note in marks
    ops = Counter(e["cat"] for e in events if e["ph"] == "X")
    assert ops["planned"] > 250
    assert 0 < ops["on demand"] < 20


def test_trace_counts_match_the_page(tmp_path: Path) -> None:
    *_, (run, _) = run_steps(3)
    content = content_of(run.report(tmp_path / "report.html"))
    run.trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    counts = Counter(e["cat"] for e in events if e["ph"] == "X")
    assert counts["on demand"] == len(content["ops"])
    assert counts["copy-in"] == sum(moved["copies_in"] for moved in content["moved"])
    assert counts["copy-out"] == sum(moved["copies_out"] for moved in content["moved"])
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == content["timelines"][0]["peak"]


def test_trace_shares_the_time_axis_of_the_profiler(tmp_path: Path) -> None:
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
    run.trace(ours, profiler_trace=theirs)
    events = json.loads(ours.read_text())["traceEvents"]
    first = min(e["ts"] for e in events if e.get("cat") == "on demand")
    profiled = [e["ts"] for e in events if e.get("name") in ("aten::addmm", "aten::linear")]
    assert abs(first - min(profiled)) < 1e6  # more than 50 years if the origins differed


def test_profilers_see_all_ops_of_a_loop() -> None:
    """The loop disables observers in its thread while it is the only observer."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        with torch.profiler.record_function("mine"):
            model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()

    def count_ops(steps: int, **options: Any) -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
            for _ in range(steps):
                step()
                profiler.step()
        return {e.key: e.count for e in profiler.key_averages() if not e.key.startswith(("ProfilerStep", "outofcore"))}

    step()
    plain = count_ops(1)
    assert {"mine", "aten::addmm", "AddmmBackward0"} <= set(plain)
    counts, thread_counts = [], []
    with outofcore.budget("4MiB", model):
        step()
        counts += [count_ops(1), count_ops(1)]
        step()
        counts.append(count_ops(3, schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)))
        thread = threading.Thread(target=lambda: thread_counts.append(count_ops(1)))
        thread.start()
        thread.join()
    counts.append(count_ops(1))
    assert [{key: count.get(key) for key in plain} for count in counts + thread_counts] == [plain] * 5


def test_observers_are_enabled_when_a_loop_ends_in_backward() -> None:
    """Backward restores the state at its start, in which observers were disabled."""
    run = outofcore.budget("4MiB", nn.Linear(256, 256)).start()
    x = torch.ones(64, 256, requires_grad=True)
    x.register_hook(lambda grad: run.end())
    (x * 2).sum().backward()
    torch.ones(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(1)
    assert "aten::ones" in {e.key for e in profiler.key_averages()}


def test_report_without_steps_covers_all_ops_so_far(tmp_path: Path) -> None:
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


def test_report_of_inference_covers_the_last_call(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with outofcore.budget("4MiB", model) as run, torch.no_grad():
        for _ in range(3):
            model(torch.ones(64, 256))
    content = content_of(run.report(tmp_path / "report.html"))
    assert content["notes"][0][0] == "step"
    assert [name for name, *_ in content["ops"]].count("addmm") == 1


def test_report_of_an_unstarted_loop_is_refused(tmp_path: Path) -> None:
    run = outofcore.budget("4MiB", nn.Linear(8, 8))
    with pytest.raises(StateError, match="nothing to report yet"):
        run.report(tmp_path / "report.html")


def test_stopped_loop_reports_its_last_complete_step(tmp_path: Path) -> None:
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


def test_progress_counts_moved_parameters() -> None:
    model, calls = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), []
    run = outofcore.budget("4MiB", model)
    run.on_progress = lambda stage, moved, total: calls.append((stage, moved, total))
    with run:
        pass
    assert calls == [("move the model to its home", moved, 4) for moved in range(5)]
