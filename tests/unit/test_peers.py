"""What the benchmark of peers concludes from its measurements, and how it draws them."""

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
    told = {"to_eager": 1.0, "first_step_s": 1.0, "same_losses": tool != "compile"}
    steps = {"seconds": [100.0, seconds, 3 * seconds, seconds]}  # a first one, and three of which the machine slows one
    return {"tool": tool, "name": name, "peak": peak * MIB, "seconds": seconds, "warm_up": 1, "steps": steps, **told}


ROWS = [
    row("eager", "eager", 1000, 2.0),
    row("checkpoint", "checkpoint", 500, 3.0),
    row("compile", "compile", 450, 1.0),
    row("sequential", "sequential", 150, 9.0),
    row("outofcore", "ours, high", 900, 1.5),
    row("outofcore", "ours, middle", 500, 1.2),
    row("outofcore", "ours, low", 200, 4.0),
]


def test_a_verdict_rests_on_the_run_next_below_the_peak(peers: Any) -> None:
    found = {verdict["peer"]: verdict for verdict in peers.verdicts(ROWS)}
    assert (found["eager"]["ours"], found["eager"]["ratio"], found["eager"]["faster"]) == ("ours, high", 0.75, True)
    assert (found["checkpoint"]["ours"], found["checkpoint"]["faster"]) == ("ours, middle", True)
    assert (found["compile"]["ours"], found["compile"]["ratio"], found["compile"]["faster"]) == ("ours, low", 4, False)


def test_a_ratio_is_the_median_of_those_of_the_rounds(peers: Any) -> None:
    ours = row("outofcore", "ours", 1, 0) | {"warm_up": 2, "steps": {"seconds": [9.0, 9.0, 1.0, 6.0, 1.0]}}
    other = row("eager", "eager", 1, 0) | {"warm_up": 1, "steps": {"seconds": [9.0, 2.0, 10.0, 3.0]}}
    assert peers.ratio_of(ours, other) == 0.5  # of 0.5, 0.6 and a third


def test_a_verdict_tells_of_half_of_the_peak(peers: Any) -> None:
    found = {verdict["peer"]: verdict for verdict in peers.verdicts(ROWS)}
    assert (found["eager"]["at_half"], found["eager"]["ratio_at_half"]) == ("ours, middle", 0.6)
    assert (found["compile"]["at_half"], found["compile"]["ratio_at_half"]) == ("ours, low", 4.0)
    assert (found["sequential"]["at_half"], found["sequential"]["ratio_at_half"]) == (None, None)


def test_without_a_run_below_a_peak_nothing_is_claimed(peers: Any) -> None:
    last = peers.verdicts(ROWS)[-1]
    assert (last["peer"], last["ours"], last["ratio"], last["faster"]) == ("sequential", None, None, False)
    assert peers.below_all_peers(ROWS) == []
    assert peers.below_all_peers([r for r in ROWS if r["tool"] != "sequential"]) == ["ours, low"]


def test_budgets_keep_below_every_peak_that_a_peer_reached(peers: Any) -> None:
    peaks = [3000, 600, 590, 90, -5]
    chosen = peers.choose_budgets(100, 1000, peaks, (1.6, 2, 4))
    # 600 is served by 590, as is a part of 625; 3000 by what holds everything; below 100 nothing runs.
    assert chosen == [1000, 590, 500, 250, 100]
    assert all(any(peak / 1.08 <= budget <= peak for budget in chosen) for peak in (600, 590))


def test_the_table_says_what_is_not_won_and_what_is_missing(peers: Any) -> None:
    rows = [*ROWS, row("outofcore-inductor", "ours, compiled", 400, 0.8)]
    assert peers.verdicts(rows) == peers.verdicts(ROWS)  # neither a peer, nor what keeps eager's numbers
    assert peers.below_all_peers(rows) == peers.below_all_peers(ROWS)
    found = {
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
    text = peers.markdown({"gpt": found})
    assert "At 2 of the 4 peaks" in text
    assert "- not at that of compile: 4.00 times its step, with other losses than eager PyTorch's\n" in text
    assert "| compile | 1.00 s | 1.00 | 450 MiB | 1.00 s | no | 4.00 | 0.80 |\n" in text
    assert "With Inductor's kernels it is faster at 3 of 4.\n" in text
    assert "- not at that of sequential: no run stayed below it" in text
    assert "- compile, budget 0.5: compile, budget 0.5: no compiler\n" in text
    assert "No run of outofcore has a peak below that of every peer." in text
    # What was not run is not judged.
    compiled = [one for one in rows if one["tool"] != "outofcore"]
    text = peers.markdown({"gpt": {**found, "rows": compiled, "verdicts": peers.verdicts(compiled)}})
    assert "outofcore is faster at that peak" not in text
    assert "No run of outofcore" not in text
    assert "With Inductor's kernels it is faster at 3 of 4.\n" in text


def test_the_picture_has_a_point_for_each_process(curves: Any) -> None:
    def panel(title: str, factor: float) -> Any:
        plain = curves.Curve("a & b", (curves.Point(900 * MIB, 2.0 * factor, "plain <x>"),))
        ours = curves.Curve("ours", (curves.Point(0, 9.0, "low"), curves.Point(800 * MIB, 1.0, "high")), strong=True)
        return curves.Panel(title, "what it is", (plain, curves.Curve("nothing", ()), ours))

    panels = [panel("one", 1), panel("two", 0.5), panel("three", 4)]
    text = curves.draw("Time against memory", panels)
    assert text == curves.draw("Time against memory", panels)
    root = ET.fromstring(text)
    told = [title.text for title in root.iter(f"{SVG}title")][1:]
    assert len(told) == 9
    assert "plain <x>: 2.00 s a step, peak 900 MiB" in told
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
    for scaled in (points, (points[0], curves.Point(400 * MIB, 4.0, "fast"))):  # logarithmic, and not
        root = ET.fromstring(curves.draw("t", [curves.Panel("p", "", (curves.Curve("c", scaled),))]))
        at = {}
        for point in root.iter(f"{SVG}circle"):
            title = point.find(f"{SVG}title")
            if title is not None:
                at[(title.text or "").partition(":")[0]] = (float(point.get("cx", 0)), float(point.get("cy", 0)))
        assert at["slow"][0] < at["fast"][0]
        assert at["slow"][1] < at["fast"][1]
