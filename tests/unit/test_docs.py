"""Tests that the examples, links and maps in the documentation are correct."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from outofcore.cli.app import app
from outofcore.graphfile import read_graph

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = DOCS.parent / "src" / "outofcore"


def example(tmp_path: Path) -> Path:
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / "graph-format.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path / "step.json"
    path.write_text(blocks[0], encoding="utf-8")
    return path


def test_graph_format_example_can_be_planned_and_validated(tmp_path: Path) -> None:
    path, plan = example(tmp_path), tmp_path / "plan.json"
    file = read_graph(path)
    assert len(file.graph.ops) == 4
    assert [home.name for home in file.costs.homes] == ["host", "disk"]
    run = CliRunner()
    planned = run.invoke(app, ["plan", "--graph", str(path), "--budget", "52MiB", "--json", "--save-plan", str(plan)])
    assert planned.exit_code == 0, planned.output
    answer = json.loads(planned.output)
    assert answer["feasible"]
    assert answer["bytes_in"] > 0
    checked = run.invoke(app, ["validate", "--graph", str(path), "--plan", str(plan)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("field", ["feasible", "smallest_budget", "lower_bound_seconds", "plan_seconds", "peak_bytes"])
def test_documented_answer_fields_exist(tmp_path: Path, field: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--graph", str(example(tmp_path)), "--budget", "64MiB", "--json"])
    assert field in json.loads(result.output)
    assert f"`{field}`" in (DOCS / "graph-format.md").read_text(encoding="utf-8")


PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = [
    (page, line)
    for page in PAGES
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("outofcore ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_documented_commands_parse(page: Path, line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    # Raises for an unknown command, flag or choice; does not run the command.
    command.commands[name].make_context(name, arguments)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_lead_to_existing_files_and_headings() -> None:
    root_pages = [DOCS.parent / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    for page in (*PAGES, *root_pages):
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")
        ):
            file = page.parent / target if target else page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{page}: {target}#{anchor}"


def test_site_navigation_names_every_page() -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES[1:]}


def test_source_maps_name_existing_code() -> None:
    maps = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "internals").glob("*.md"))]
    contributing = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    maps.append(contributing.partition("## Where is it decided?")[2].partition("\n## ")[0])
    for path, name in re.findall(r"`([\w/]+\.(?:py|h|cpp))(?:::(\w+))?`", "\n".join(maps)):
        file = next((root / path for root in (SOURCE, DOCS.parent) if (root / path).is_file()), None)
        assert file is not None, path
        defined = rf"^ *(def|class) {name}\b|^{name}\b.* = " if path.endswith(".py") else rf"\b{name}\b"
        assert re.search(defined, file.read_text(encoding="utf-8"), re.MULTILINE), f"{path}::{name}"


def test_contributing_names_every_module_and_package_once() -> None:
    table = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The rooms")[2]
    rooms = [line.split("|")[1] for line in table.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = sorted(name for room in rooms for name in re.findall(r"`([\w/]+(?:/|\.py))`", room))
    paths = [path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    packages = [path for path in (SOURCE / "planning").iterdir() if (path / "__init__.py").is_file()]
    there = [p.name if p.suffix else f"{p.name}/" for p in (*paths, *packages)]
    assert named == sorted({*there, "execution/cuda/"} - {"__init__.py"})
