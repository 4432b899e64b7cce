"""Tests of an executed notebook: displayed results, progress, and loops across cells."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import outofcore

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

CELLS = [
    """
import torch, outofcore
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(64, 256)
def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
train_step.__name__ = "<b>mine</b>"
""",
    "outofcore.estimate(train_step, model, optimizer, inputs=(x,), device='h100')",
    "step = outofcore.compile(train_step, model, optimizer, budget='1200KiB', cache=False)\nstep",
    "step(x)\nstep",
    "step.stats",
    "step.report('report.html', budgets=0)",
    "step.close()\nrun = outofcore.budget('1MiB', model).start()\ntrain_step(x)\nrun",
    "run.stop()\nrun.stats",
    "from outofcore import progress\nprogress.ignore_progress('a', 1, 2)\n"
    "with progress.show_progress() as show:\n    show('<i>', 1, 4)",
    # A cell that runs twice, one that loses its loop, and one that fails.
    *["run = outofcore.budget('1MiB', model).start()\ntrain_step(x).item()"] * 2,
    "outofcore.stop()",
    "loops = [outofcore.budget('1MiB', model).start()]\nloops.append(loops)\ntrain_step(x)\ndel loops",
    "run = outofcore.budget('1MiB', model).start()\ntrain_step(x).item()",
    "1 / 0",
    "outofcore.stop(), outofcore.stop(), train_step(x).isfinite().item()",
]
FAILS = (10, 14)


class ParsedHtml(HTMLParser):
    """The tags and table cells of an HTML output."""

    VOID = frozenset({"progress"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag in {"td", "th", "caption"}:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"td", "th", "caption"}:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[dict[str, Any]]]:
    messages: list[dict[str, Any]] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            messages.append(msg)
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    for number in FAILS:
        notebook.cells[number].metadata["tags"] = ["raises-exception"]
    folder = tmp_path_factory.mktemp("notebook")
    kernel = manager.KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "k"))
    Client(notebook, km=kernel, timeout=3000, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells], messages


def html_result(outputs: list[Any]) -> str:
    (result,) = [output for output in outputs if output.output_type == "execute_result"]
    assert "text/plain" in result.data  # for front ends without HTML
    return result.data["text/html"]


def test_results_are_short_tables(outputs: tuple[list[Any], list[dict[str, Any]]]) -> None:
    tables = {number: html_result(outputs[0][number]) for number in (1, 2, 3, 4, 6, 7)}
    for text in tables.values():
        parsed = ParsedHtml(text)
        assert {tag for tag, _ in parsed.tags} <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
        assert len(parsed.cells) < 80
        # The notebook's theme sets the colours.
        assert not re.search(r"#[0-9a-f]{3}|rgb|black|white|https?:", text)
    cells = {number: ParsedHtml(text).cells for number, text in tables.items()}
    assert cells[1][0].startswith("SIMULATED: ")
    assert {"smallest budget", "budget", "policy", "auto"} <= set(cells[1])
    assert cells[2] == ["<b>mine</b> within 1.17 MiB", "plans", "0, policy auto"]
    assert cells[3][:3] == ["<b>mine</b> within 1.17 MiB", "plans", "1, policy auto"]
    assert cells[4][:2] == ["last step", "step"]
    assert cells[3][3:] == cells[4][1:]
    assert cells[6][0] == "loop within 1.00 MiB, running"
    assert cells[7][:3] == ["loop", "steps", "1"]


def test_report_is_shown_as_its_page_in_a_frame(outputs: tuple[list[Any], list[dict[str, Any]]]) -> None:
    ((tag, frame),) = ParsedHtml(html_result(outputs[0][5])).tags
    assert tag == "iframe"
    assert frame["sandbox"] == "allow-scripts"
    page = frame["srcdoc"] or ""
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")
    assert "\\u003cb>mine\\u003c/b>" in page


def test_progress_is_shown_and_removed(outputs: tuple[list[Any], list[dict[str, Any]]]) -> None:
    cell_outputs, messages = outputs
    drawn = [
        message["content"]["data"]["text/html"]
        for message in messages
        if message["msg_type"] in {"display_data", "update_display_data"}
    ]
    assert any("capture" in text for text in drawn)  # of the step's first call
    (bar,) = [text for text in drawn if html.escape("<i>") in text]
    assert '<progress value="1" max="4"></progress>' in bar
    for number in (3, 8):
        (line,) = [output for output in cell_outputs[number] if output.output_type == "display_data"]
        assert line.data == {"text/plain": "", "text/html": ""}
    assert not [output for output in cell_outputs[8] if output.output_type == "stream"]


def test_loop_is_ended_without_its_handle(outputs: tuple[list[Any], list[dict[str, Any]]]) -> None:
    cell_outputs = outputs[0]
    (error,) = cell_outputs[10]
    assert error.ename == "StateError"
    # The file name is the kernel's name for the previous cell.
    assert re.search(r"running already at \S+:1\b.*outofcore\.stop\(\)", error.evalue)
    results = {number: cell_outputs[number][-1].data["text/plain"] for number in (11, 13, 15)}
    assert results[11] == "True"
    assert float(results[13]) > 0  # the lost loop has ended
    assert cell_outputs[14][0].ename == "ZeroDivisionError"
    assert results[15] == "(True, False, True)"


def test_report_is_an_ordinary_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    with outofcore.budget("1MiB", model) as run:
        model(torch.ones(64, 256)).sum().backward()
        path = run.report(tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    assert hash(path) == hash(tmp_path / "report.html")
    assert path.parent._repr_html_() is None  # type: ignore[attr-defined]
    path.unlink()
    assert path._repr_html_() is None  # type: ignore[attr-defined]
