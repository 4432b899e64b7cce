"""Tests of the conclusions and charts of the peer benchmark."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_peers")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_curves")


def row(tool: str, name: str, peak: int, seconds: float) -> dict[str, Any]:
    fields = {"to_eager": 1.0, "first_step_s": 1.0, "same_losses": tool != "compile"}
    steps = {"seconds": [100.0, seconds, 3 * seconds, seconds]}  # a first step, and three with one outlier
    return {"tool": tool, "name": name, "peak": peak * MIB, "seconds": seconds, "warm_up": 1, "steps": steps, **fields}


ROWS = [
    row("eager", "eager", 1000, 2.0),
    row("checkpoint", "checkpoint", 500, 3.0),
    row("compile", "compile", 450, 1.0),
    row("sequential", "sequential", 150, 9.0),
    row("outofcore", "ours, high", 900, 1.5),
    row("outofcore", "ours, middle", 500, 1.2),
    row("outofcore", "ours, low", 200, 4.0),
]


def test_verdict_uses_the_run_next_below_the_peak(peers: Any) -> None:
    verdicts = {verdict["peer"]: verdict for verdict in peers.verdicts(ROWS)}
    assert (verdicts["eager"]["ours"], verdicts["eager"]["ratio"], verdicts["eager"]["faster"]) == (
        "ours, high",
        0.75,
        True,
    )
    assert (verdicts["checkpoint"]["ours"], verdicts["checkpoint"]["faster"]) == ("ours, middle", True)
    assert (verdicts["compile"]["ours"], verdicts["compile"]["ratio"], verdicts["compile"]["faster"]) == (
        "ours, low",
        4,
        False,
    )


def test_ratio_is_the_median_over_rounds(peers: Any) -> None:
    ours = row("outofcore", "ours", 1, 0) | {"warm_up": 2, "steps": {"seconds": [9.0, 9.0, 1.0, 6.0, 1.0]}}
    peer = row("eager", "eager", 1, 0) | {"warm_up": 1, "steps": {"seconds": [9.0, 2.0, 10.0, 3.0]}}
    assert peers.ratio_of(ours, peer) == 0.5  # of 0.5, 0.6 and a third


def test_verdict_includes_half_of_the_peak(peers: Any) -> None:
    verdicts = {verdict["peer"]: verdict for verdict in peers.verdicts(ROWS)}
    assert (verdicts["eager"]["at_half"], verdicts["eager"]["ratio_at_half"]) == ("ours, middle", 0.6)
    assert (verdicts["compile"]["at_half"], verdicts["compile"]["ratio_at_half"]) == ("ours, low", 4.0)
    assert (verdicts["sequential"]["at_half"], verdicts["sequential"]["ratio_at_half"]) == (None, None)


def test_peak_without_a_lower_run_has_no_ratio(peers: Any) -> None:
    last = peers.verdicts(ROWS)[-1]
    assert (last["peer"], last["ours"], last["ratio"], last["faster"]) == ("sequential", None, None, False)
    assert peers.below_all_peers(ROWS) == []
    assert peers.below_all_peers([r for r in ROWS if r["tool"] != "sequential"]) == ["ours, low"]


def test_budgets_are_below_every_peak_of_a_peer(peers: Any) -> None:
    peaks = [3000, 600, 590, 90, -5]
    chosen = peers.choose_budgets(100, 1000, peaks, (1.6, 2, 4))
    # 590 serves the peaks of 600 and of 625; the in-core budget serves 3000; 100 is the smallest that runs.
    assert chosen == [1000, 590, 500, 250, 100]
    assert all(any(peak / 1.08 <= budget <= peak for budget in chosen) for peak in (600, 590))


def test_table_lists_losses_and_missing_runs(peers: Any) -> None:
    rows = [*ROWS, row("outofcore-inductor", "ours, compiled", 400, 0.8)]
    assert peers.verdicts(rows) == peers.verdicts(ROWS)  # it is no peer, and does not have the numbers of eager PyTorch
    assert peers.below_all_peers(rows) == peers.below_all_peers(ROWS)
    verdicts = {
        "rows": rows,
        "verdicts": peers.verdicts(rows),
        "verdicts_compiled": peers.verdicts(rows, peers.COMPILED),
        "below_all_peers": [],
        "missing": {"compile, budget 0.5": "compile, budget 0.5: no compiler\nat all"},
        "losses_identical": True,
        "machine": {"cores": 2, "cpu": "a", "python": "3"},
        "workload": "gpt: small",
        "date": "today",
        "threads": 2,
        "versions": {"torch": "2"},
        "rounds": 3,
        "command": "python benchmarks/peers.py",
    }
    text = peers.markdown({"gpt": verdicts})
    assert "At 2 of the 4 peaks" in text
    assert "- not at that of compile: 4.00 times its step, with other losses than eager PyTorch's\n" in text
    assert "| compile | 1.00 s | 1.00 | 450 MiB | 1.00 s | no | 4.00 | 0.80 |\n" in text
    assert "With Inductor's kernels it is faster at 3 of 4.\n" in text
    assert "- not at that of sequential: no run stayed below it" in text
    assert "- compile, budget 0.5: compile, budget 0.5: no compiler\n" in text
    assert "No run of outofcore has a peak below that of every peer." in text
    # A peer that was not run is not judged.
    compiled = [entry for entry in rows if entry["tool"] != "outofcore"]
    text = peers.markdown({"gpt": {**verdicts, "rows": compiled, "verdicts": peers.verdicts(compiled)}})
    assert "outofcore is faster at that peak" not in text
    assert "No run of outofcore" not in text
    assert "With Inductor's kernels it is faster at 3 of 4.\n" in text


def test_chart_has_a_point_for_each_process(curves: Any) -> None:
    def panel(title: str, factor: float) -> Any:
        plain = curves.Curve("a & b", (curves.Point(900 * MIB, 2.0 * factor, "plain <x>"),))
        ours = curves.Curve("ours", (curves.Point(0, 9.0, "low"), curves.Point(800 * MIB, 1.0, "high")), strong=True)
        return curves.Panel(title, "a subtitle", (plain, curves.Curve("nothing", ()), ours))

    panels = [panel("one", 1), panel("two", 0.5), panel("three", 4)]
    text = curves.draw("Time against memory", panels)
    assert text == curves.draw("Time against memory", panels)
    root = ET.fromstring(text)
    titles = [title.text for title in root.iter(f"{SVG}title")][1:]
    assert len(titles) == 9
    assert "plain <x>: 2.00 s a step, peak 900 MiB" in titles
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert "a & b" in words
    assert "nothing" not in words  # a tool without a point is not in the legend
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    width, height = (float(root.get(key, 0)) for key in ("width", "height"))
    for point in root.iter(f"{SVG}circle"):
        assert 0 < float(point.get("cx", 0)) < width
        assert 0 < float(point.get("cy", 0)) < height


def test_slower_is_higher_and_more_memory_further_right(curves: Any) -> None:
    points = (curves.Point(100 * MIB, 8.0, "slow"), curves.Point(400 * MIB, 1.0, "fast"))
    for scaled in (points, (points[0], curves.Point(400 * MIB, 4.0, "fast"))):  # logarithmic and linear
        root = ET.fromstring(curves.draw("t", [curves.Panel("p", "", (curves.Curve("c", scaled),))]))
        at = {}
        for point in root.iter(f"{SVG}circle"):
            title = point.find(f"{SVG}title")
            if title is not None:
                at[(title.text or "").partition(":")[0]] = (float(point.get("cx", 0)), float(point.get("cy", 0)))
        assert at["slow"][0] < at["fast"][0]
        assert at["slow"][1] < at["fast"][1]
