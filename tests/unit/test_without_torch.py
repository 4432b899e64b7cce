"""Planning from files, validating and placing where PyTorch is not installed: every import of it fails here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outofcore
from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile, write_graph

# Run before anything else: a finder that knows PyTorch only to refuse it.
_BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BLOCK + code, *arguments], capture_output=True, text=True, check=False
    )


def outofcore_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("sys.argv[0] = 'outofcore'\nfrom outofcore.cli import main\nmain()", *arguments)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Two layers, forward and backward; 9 MiB in core, 5 MiB at the least."""
    mib = 1 << 20
    storages = [Storage(i, mib, StorageKind.PARAMETER, f"weight {i}") for i in range(2)]
    storages += [Storage(2 + i, 2 * mib, StorageKind.ACTIVATION, f"activation {i}") for i in range(3)]
    ops = (
        Op(0, "forward", (0,), (), (2,)),
        Op(1, "forward", (1, 2), (), (3,)),
        Op(2, "backward", (3,), (1,), (4,)),
        Op(3, "backward", (2, 4), (0,), ()),
    )
    path = tmp_path / "graph.json"
    costs = Costs(tuple(OpCost(0.01) for _ in ops), (Home("disk", None, 1e9, 1e9, 0.0, 0.5, 0.1),))
    write_graph(path, GraphFile.of(StepGraph(tuple(storages), ops), costs))
    return path


def test_the_torch_that_is_here_is_out_of_reach() -> None:
    done = run("import torch")
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr


def test_plan_and_validate(graph: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = outofcore_command("plan", "--graph", str(graph), "--budget", "6MiB", "--save-plan", str(plan), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["feasible"]
    assert answer["peak_bytes"] <= 6 << 20
    done = outofcore_command("validate", "--graph", str(graph), "--plan", str(plan))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("valid: ")
    page = tmp_path / "report.html"
    done = outofcore_command("report", "--graph", str(graph), "--budget", "6MiB", "-o", str(page), "--no-curve")
    assert done.returncode == 0, done.stderr
    assert '"name":"predicted"' in page.read_text(encoding="utf-8")
    done = outofcore_command("plan", "--graph", str(graph), "--compare")
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr


def test_pack(tmp_path: Path) -> None:
    file = tmp_path / "rectangles.csv"
    file.write_text("id,lower,upper,size\na,0,4,8\nb,2,6,4\nc,4,8,8\n", encoding="utf-8")
    done = outofcore_command("pack", str(file), "--capacity", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("id,lower,upper,size,offset\n")


def test_the_kept_measurements_can_be_cleared(tmp_path: Path) -> None:
    done = outofcore_command("doctor", "--cache", str(tmp_path), "--clear-cache")
    assert done.returncode == 0, done.stderr
    assert "0 files deleted" in done.stdout


def test_doctor_says_how_to_install_pytorch() -> None:
    done = outofcore_command("doctor")
    assert done.returncode == 1
    assert "ok   CPU " in done.stdout
    assert re.search(r"^FAIL PyTorch +not installed; install it with: pip install torch, or", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\n1 problem: PyTorch\n")
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [("train", "gpt", "--budget", "1GiB"), ("plan", "gpt")])
def test_what_needs_pytorch_says_so(arguments: tuple[str, ...]) -> None:
    done = outofcore_command(*arguments)
    assert done.returncode == 2
    assert "needs PyTorch" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_library_is_imported_and_compile_says_what_is_missing() -> None:
    done = run(
        "import outofcore\n"
        "assert 'compile' in dir(outofcore)\n"
        "from outofcore import planning, validator, graphfile\n"
        "try: outofcore.compile\n"
        "except ImportError as error: print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("outofcore.compile needs PyTorch")
    assert "pip install torch" in done.stdout
    done = run("from outofcore import compile")
    assert "outofcore.compile needs PyTorch" in done.stderr


def test_names_that_are_not_there_are_told_as_such() -> None:
    with pytest.raises(AttributeError, match="'compyle'"):
        outofcore.compyle  # noqa: B018
    assert set(outofcore.__all__) <= set(dir(outofcore))
