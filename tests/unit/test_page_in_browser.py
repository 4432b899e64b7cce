"""Tests of the report page in Chromium. Skipped without Chromium or Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from examples import GRAPH, INSIGHT, MIB, PLAN, PROGRAM, TIMELINE

from outofcore.report.content import Page, page_content
from outofcore.report.page import write_report, write_sweep

api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLAIN = "document.getElementById('chart').toDataURL()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    # A browser has no sandbox for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=program, args=arguments)
        except api.Error as error:
            reason = (
                f"no Chromium can be started ({str(error).splitlines()[0]}); install one, such as Debian's chromium"
            )
            pytest.skip(reason)
        yield started
        started.close()


@contextmanager
def open_page(browser: Any, path: Path) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert complaints == []
    page.close()


@pytest.fixture
def report(browser: Any, tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "report.html"
    timelines = [("measured", TIMELINE), ("predicted", TIMELINE)]
    notes = [("machine", "a test's")]
    write_report(
        path,
        page_content(GRAPH, PLAN, PROGRAM, timelines, Page("by hand", 7 * MIB, INSIGHT, notes=notes)),
    )
    with open_page(browser, path) as page:
        yield page


def test_sweep_has_a_line_for_each_policy(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    lines = {"auto": [(MIB, 3.0), (4 * MIB, 2.0)], "window": [(2 * MIB, 4.0), (4 * MIB, 2.0)], "never": []}
    write_sweep(path, lines, title="</script>a sweep", floor=1.5)
    with open_page(browser, path) as page:
        assert page.title() == "</script>a sweep"
        assert page.locator("#legend li").all_inner_texts() == ["auto", "window"]
        assert page.locator("#curve path").count() == 2
        assert page.locator("#curve circle").count() == 4
        assert page.locator("#curve circle title").first.text_content() == "1.00 MiB: 3.00 s, auto"
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_page_opens_and_draws(report: Any) -> None:
    assert report.title() == "by hand"
    assert "13.0 s a step" in report.inner_text("#summary")
    assert "7.00 MiB" in report.inner_text("#summary")
    assert report.inner_text("#verdict") == "The link is the limit."
    colours = report.evaluate(
        """() => {
            const chart = document.getElementById("chart");
            const data = chart.getContext("2d").getImageData(0, 0, chart.width, chart.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
            return [...seen];
        }"""
    )
    # An activation, a parameter, ops, a wait and the budget.
    assert {"230,159,0", "0,114,178", "74,81,96", "214,40,57", "196,0,0"} <= set(colours)
    assert report.locator("#curve circle").count() == 3
    assert "a link twice as fast saves 3.00 s" in report.inner_text("#helps")
    assert "a test's" in report.inner_text("#notes")


def test_storages_are_filtered(report: Any) -> None:
    rows = report.locator("#rows tr")
    assert rows.count() == 4
    report.fill("#find", "CONV1")
    assert rows.count() == 2
    report.select_option("#kind", "parameter")
    assert rows.all_inner_texts()[0].startswith("conv1.weight")
    assert rows.count() == 1
    report.select_option("#kind", "")
    report.fill("#find", "")
    report.select_option("#fate", "offloaded")
    assert rows.count() == 1
    assert "1 of 4 storages" in report.inner_text("#count")


def test_click_shows_a_storage(report: Any) -> None:
    before = report.evaluate(PLAIN)
    report.click("#rows tr >> text=conv1 convolution output")
    detail = report.inner_text("#detail")
    assert "conv1 convolution output" in detail
    assert (
        "is evicted after relu in conv2 (4.00 s), and fetched before convolution_backward in conv1 (9.00 s)" in detail
    )
    assert "net.py:3" in detail
    report.wait_for_function(f"before => {PLAIN} !== before", arg=before)  # the page marks its ops and copies
    # HTML in a name is shown as text.
    report.click("#rows tr >> text=conv2")
    assert "</script><b>" in report.inner_text("#detail h3")


def test_click_in_the_chart_shows_a_storage(report: Any) -> None:
    box = report.locator("#chart").bounding_box()
    lane = box["y"] + box["height"] - 26 - 26 * 1.5  # copies in
    at = box["x"] + 92 + (box["width"] - 102) * 8 / 13
    report.mouse.click(at, lane)
    assert "conv1 convolution output" in report.inner_text("#detail")
    assert "copies in: copy-in of conv1 convolution output · 2.00 s from 7.00 s on" in report.inner_text("#reading")


def test_keyboard_navigates_the_chart(report: Any) -> None:
    report.focus("#chart")
    report.keyboard.press("ArrowRight")
    assert "ops: convolution in conv1" in report.inner_text("#reading")
    report.keyboard.press("ArrowRight")
    assert "relu in conv2" in report.inner_text("#reading")
    report.keyboard.press("Enter")
    assert "conv2" in report.inner_text("#detail h3")
    report.keyboard.press("n")
    assert "waits for copy-in of conv1 convolution output" in report.inner_text("#reading")
    drawn = report.get_attribute("#chart", "data-drawn")
    report.keyboard.press("0")
    report.wait_for_function(f"document.getElementById('chart').dataset.drawn !== '{drawn}'")
    report.focus("#rows tr:first-child button")
    report.keyboard.press("Enter")
    assert report.get_attribute("#rows tr:first-child", "aria-selected") == "true"


def test_wait_is_shown_in_the_chart(report: Any) -> None:
    waits = report.locator("#waits button")
    assert waits.count() == 2
    waits.first.click()
    assert "4.00 s: convolution_backward in conv1 waits for" in report.inner_text("#reading")
    assert "conv1 convolution output" in report.inner_text("#detail")


def test_button_switches_the_timeline(report: Any) -> None:
    predicted = report.locator("#which button >> text=predicted")
    predicted.click()
    assert predicted.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_in_both_colour_schemes(report: Any, scheme: str) -> None:
    report.emulate_media(color_scheme=scheme)
    report.set_viewport_size({"width": 360, "height": 740})
    assert report.evaluate("document.documentElement.scrollWidth") <= 360
    paper, ink = report.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light, dark = (sum(map(int, c[4:-1].split(", "))) for c in (paper, ink))
    assert (light > dark) is (scheme == "light")
    # Touch targets are large enough.
    assert (
        report.evaluate("Math.min(...[...document.querySelectorAll('.choice button')].map(b => b.offsetHeight))") >= 36
    )
