"""Tests of estimates for user steps, and of reports and traces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import outofcore
from outofcore.cli.app import app
from outofcore.cli.subjects import build_user_step
from outofcore.cli.targets import TargetKind, classify_target
from outofcore.errors import InputError, StateError

SCRIPT = """
import torch
from torch import nn
from helper import WIDTH

def build(device="cpu"):
    with torch.device(device):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        x = torch.zeros(64, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step, model, optimizer, x

def on_meta():
    return build("meta")

def three():
    return build()[:3]

def wrong():
    return build()[::-1]

def fails():
    return 1 / 0

number = 3
"""

# The normalisation needs the most memory; it is in a Sequential of PyTorch within a module of the script.
NORMALIZED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Sequential(nn.Identity(), nn.BatchNorm2d(8)))

    def forward(self, x):
        return self.layers(x).sum()  # here

def build():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step, model, optimizer, torch.zeros(4, 8, 32, 32)
"""

Training = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]


def make(device: str = "cpu") -> Training:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 4))
        tied = nn.Linear(4, 4, bias=False)
        tied.weight = nn.Parameter(torch.zeros(4, 4))
        model.extend([tied, nn.Dropout(0.1), tied])
        inputs = torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step, model, optimizer, inputs


def test_meta_model_has_the_estimate_of_a_real_one() -> None:
    step, model, optimizer, inputs = make()
    real = outofcore.estimate(step, model, optimizer, inputs=inputs, device="h100")
    assert real.smallest_budget <= real.lossless_budget <= real.in_core_budget
    assert "H100" in real.machine

    step, model, optimizer, inputs = make("meta")
    before = list(model.parameters())
    empty = outofcore.estimate(step, model, optimizer, inputs=inputs, device="h100")
    assert (empty.graph, empty.costs) == (real.graph, real.costs)
    assert empty == real
    # The user's model is unchanged.
    assert all(now is then and now.is_meta for now, then in zip(model.parameters(), before, strict=True))
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, before))
    assert all(buffer.is_meta for buffer in model.buffers())
    assert not optimizer.state


def test_estimate_has_the_smallest_budget_of_compile() -> None:
    step, model, optimizer, inputs = make()
    before = [parameter.clone() for parameter in model.parameters()]
    estimate = outofcore.estimate(step, model, optimizer, inputs=inputs, budgets=["3MiB"])
    assert estimate.smallest_budget == outofcore.smallest_budget(step, model, optimizer, inputs=inputs)
    assert any(point.budget == 3 << 20 for point in estimate.points)
    assert estimate.machine == ""
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    with pytest.raises(InputError, match="is no device"):
        outofcore.estimate(step, model, optimizer, inputs=inputs, device="abacus")
    with pytest.raises(InputError, match="no policy"):
        outofcore.estimate(step, model, optimizer, inputs=inputs, policy="guess")


def test_compiled_step_is_reported_and_traced(tmp_path: Path) -> None:
    step, model, optimizer, inputs = make()
    smallest = outofcore.smallest_budget(step, model, optimizer, inputs=inputs)
    with outofcore.compile(step, model, optimizer, budget=int(1.1 * smallest)) as compiled:
        with pytest.raises(StateError, match="not called yet"):
            compiled.report(tmp_path / "report.html")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(2):
                compiled(*inputs)
        profiler.export_chrome_trace(str(tmp_path / "profiler.json"))
        compiled.report(tmp_path / "report.html", budgets=0)
        compiled.trace(tmp_path / "trace.json", profiler_trace=tmp_path / "profiler.json")
        seconds = compiled.timeline.step_seconds
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    match = re.search(r'type="application/json">(.*?)</script>', page)
    assert match is not None
    content = json.loads(match.group(1))
    assert [timeline["name"] for timeline in content["timelines"]] == ["measured", "predicted"]
    assert content["title"] == "train_step"
    assert content["timelines"][0]["seconds"] == seconds
    assert any(storage["name"] == "4.weight" for storage in content["storages"])
    assert [name for name, text in content["notes"] if torch.__version__ in text] == ["versions"]

    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    theirs = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::convolution_backward"]
    ours = [
        e for e in events if e.get("cat") == "compute" and e["args"].get("op", "").startswith("aten.convolution_ba")
    ]
    assert theirs, sorted({e["name"] for e in events if e.get("cat") == "cpu_op"})
    # PyTorch's last op belongs to the traced step: both clocks agree to a tenth of a second.
    last = max(e["ts"] for e in theirs)
    assert min(e["ts"] for e in ours) - 1e5 < last < max(e["ts"] + e["dur"] for e in ours) + 1e5


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "helper.py").write_text("WIDTH = 256\n", encoding="utf-8")
    return path


def test_plan_names_module_and_line_of_the_largest_op(tmp_path: Path) -> None:
    path = tmp_path / "normalized.py"
    path.write_text(NORMALIZED, encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", f"{path}:build", "--budget", "100KiB", "--device", "h100", "--no-curve"])
    assert result.exit_code == 1
    line = 1 + NORMALIZED.splitlines().index("        return self.layers(x).sum()  # here")
    op = r"native_batch_norm(_backward)? in layers\.0\.1 \(BatchNorm2d\)"
    assert re.search(
        rf"The op that needs the most is {op} at {path}:{line}\. While it runs it needs$", result.stdout, re.MULTILINE
    )


def test_plan_reads_the_step_of_a_script(script: Path) -> None:
    run = CliRunner()
    result = run.invoke(app, ["plan", f"{script}:build", "--json"])
    assert result.exit_code == 0, result.output
    here = json.loads(result.stdout)
    assert "526,336 parameters, inputs 64×256" in here["workload"]
    assert here["smallest_budget"] <= here["lossless_budget"] <= here["in_core_budget"]
    assert len(here["points"]) >= 2
    empty = run.invoke(app, ["plan", f"{script}:on_meta", "--json", "--no-curve"])
    assert empty.exit_code == 0, empty.output
    meta = json.loads(empty.stdout)
    assert (meta["smallest_budget"], meta["in_core_budget"]) == (here["smallest_budget"], here["in_core_budget"])
    far = run.invoke(app, ["plan", f"{script}:on_meta", "--device", "h100", "--budget", "100KiB", "--no-curve"])
    assert far.exit_code == 1
    assert "does not fit" in far.stdout
    assert "SIMULATED" in far.stdout


def test_report_runs_the_step_of_a_script(script: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["report", f"{script}:build", "--budget", "2MiB", "--steps", "2", "-o", str(page), "--no-curve"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.stdout
    assert '"name":"measured"' in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no function 'missing'"),
        ("number", "has no function 'number'"),
        ("three", "returned 3 values; it must return four values"),
        ("wrong", "must be the step, a function, not Tensor"),
        ("fails", "ZeroDivisionError"),
    ],
)
def test_error_in_a_script_is_one_message(script: Path, name: str, message: str) -> None:
    result = CliRunner().invoke(app, ["plan", f"{script}:{name}"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_target_names_a_file_and_a_function(tmp_path: Path) -> None:
    assert classify_target("folder/my.py:build") is TargetKind.SCRIPT
    assert classify_target("resnet50") is TargetKind.ZOO
    with pytest.raises(InputError, match="there is no file"):
        build_user_step(str(tmp_path / "nowhere.py:build"))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(InputError, match="nothing_of_that_name"):
        build_user_step(str(tmp_path / "broken.py:build"))
