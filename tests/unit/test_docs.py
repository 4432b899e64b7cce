"""The examples in the documentation are real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outofcore.cli.app import app
from outofcore.graphfile import read_graph

DOCS = Path(__file__).parents[2] / "docs"


def example(tmp_path: Path) -> Path:
    found = re.findall(r"```json\n(.*?)```", (DOCS / "graph-format.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1
    path = tmp_path / "step.json"
    path.write_text(found[0], encoding="utf-8")
    return path


def test_the_graph_of_the_format_can_be_planned_and_checked(tmp_path: Path) -> None:
    path, plan = example(tmp_path), tmp_path / "plan.json"
    file = read_graph(path)
    assert len(file.graph.ops) == 4
    assert [home.name for home in file.costs.homes] == ["host", "disk"]
    run = CliRunner()
    told = run.invoke(app, ["plan", "--graph", str(path), "--budget", "52MiB", "--json", "--save-plan", str(plan)])
    assert told.exit_code == 0, told.output
    answer = json.loads(told.output)
    assert answer["feasible"]
    assert answer["bytes_in"] > 0
    checked = run.invoke(app, ["validate", "--graph", str(path), "--plan", str(plan)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("field", ["feasible", "smallest_budget", "lower_bound_seconds", "plan_seconds", "peak_bytes"])
def test_the_fields_of_the_answer_are_there(tmp_path: Path, field: str) -> None:
    told = CliRunner().invoke(app, ["plan", "--graph", str(example(tmp_path)), "--budget", "64MiB", "--json"])
    assert field in json.loads(told.output)
    assert f"`{field}`" in (DOCS / "graph-format.md").read_text(encoding="utf-8")
