"""Tests of the subjects that commands accept, and of the errors for all others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outofcore import zoo
from outofcore.cli.app import app
from outofcore.cli.completion import MODELS
from outofcore.cli.subjects import find_workload

SCRIPT = """
import torch
raise_if_run = 1 / 0

def needs(model, x): ...
def build(): ...
def build_large(layers=4): ...
def _private(): ...
"""
LOUD = """
import os, sys
import torch
print("from the script")
os.write(1, b"from native code\\n")

def build():
    print("from the function")
    model = torch.nn.Linear(64, 64)
    def step(x):
        print("from the step")
        return model(x).sum()
    return step, model, None, torch.zeros(8, 64)

def wants(x):
    return x

def leaves():
    sys.exit(3)
"""


def outofcore(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "alone.py").write_text("x = 1")
    (tmp_path / "broken.py").write_text("\n\ndef f(:")
    (tmp_path / "bytes.py").write_bytes(b"\xff\x00")
    (tmp_path / "graph.json").write_text('{"format": "outofcore-graph/1", "storages": []}')
    (tmp_path / "adapter.json").write_text('{"peft_type": "LORA"}')
    for name in ("w.safetensors", "notes.txt", "empty.json", "empty.onnx", "g.json.gz"):
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (
            "mine.py",
            "names a script but no function of it; write mine.py:build, where build is a function that takes no "
            "arguments and returns (step, model, optimizer, inputs)",
        ),
        ("mine.py", "Functions of mine.py without arguments: build, build_large. To run the whole script"),
        ("mine.py:", "write mine.py:build"),
        ("mine.py:2x", "'2x' is not the name of a function; write mine.py:build"),
        ("mine:build", "write mine.py:build"),
        ("alone.py", "alone.py has no function without arguments"),
        ("broken.py", "broken.py, line 3 is not valid Python"),
        ("bytes.py", "bytes.py is not valid Python"),
        ("min.py", "did you mean mine.py?"),
        ("nowhere/mine.py:build", "no folder nowhere"),
        ("loud.py:biuld", "did you mean loud.py:build?"),
        ("loud.py:wants", "has arguments without defaults (missing a required argument: 'x')"),
        ("loud.py:leaves", "by sys.exit(3)"),
        ("ResNet-50", "did you mean resnet50?"),
        ("resnt50", "the zoo has no 'resnt50'; did you mean resnet50? Its models are resnet18, "),
        ("vgg61", "did you mean vgg16?"),
        ("lenet", "the zoo has no 'lenet'"),
        ("", "the name is empty"),
        ("someone/a-model", "outofcore downloads no models"),
        ("w.safetensors", "contains weights"),
        ("notes.txt", "is not a file that describes a step"),
        ("g.json.gz", "give it as --graph g.json.gz"),
        ("graph.json", "give it as --graph graph.json"),
        ("adapter.json", "it describes an adapter"),
        ("empty.json", "is not JSON"),
        ("none.json", "there is no file or folder none.json"),
        ("empty.onnx", "it is empty"),
        ("none.onnx", "there is no file or folder none.onnx"),
        ("bare", "the folder bare has no config.json"),
        ("./bare", "the folder bare has no config.json"),
    ],
)
def test_plan_refuses_unusable_subjects_with_advice(subject: str, message: str) -> None:
    pytest.importorskip("transformers" if "json" in message or "adapter" in message else "torch")
    pytest.importorskip("onnx" if subject == "empty.onnx" else "torch")
    result = outofcore("plan", subject)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1 or subject.startswith("loud")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "mine.py:build"], "train takes a model of the zoo, but mine.py:build is a function of a script"),
        (["train", "mine.py"], "mine.py is a script; to train your own script, use: outofcore run --budget"),
        (["train", "loud.py:build"], "use: outofcore run --budget 6GiB loud.py"),
        (["train", "gtp"], "did you mean gpt?"),
        (["report", "mine.py"], "write mine.py:build"),
        (["report", "empty.onnx"], "report takes a model of the zoo or a function of a script"),
        (["report", "graph.json", "--steps", "0"], "only the command plan takes it"),
        (["run", "mine.py:build"], "leave :build out"),
        (["run", "gpt"], "outofcore train"),
        (["run", "min.py"], "did you mean mine.py?"),
        (["run", "bare"], "has no __main__.py"),
    ],
)
def test_other_commands_refuse_subjects_of_the_wrong_kind(arguments: list[str], message: str) -> None:
    command, subject, *more = arguments
    result = outofcore(command, "--budget", "1GiB", subject, *more)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize("subject", [["loud.py:build"], ["--graph", "step.json"]])
def test_zoo_options_are_refused_for_other_subjects(subject: list[str]) -> None:
    for option in (["--layers", "3"], ["--optimizer", "sgd"], ["--batch", "4"]):
        result = outofcore("plan", *subject, *option)
        assert result.exit_code == 2
        assert "only models of the zoo take this option" in " ".join(result.stderr.replace("│", " ").split())


def test_completion_covers_the_models_of_the_zoo() -> None:
    completed_names = {find_workload(name, {"batch": 1}).name for name in MODELS}
    assert completed_names == set(zoo.names())


@pytest.mark.parametrize("sizes", [["--batch", "1000000000000000000"], ["--width", "1000000000", "--heads", "2"]])
def test_impossible_sizes_give_a_one_line_error(sizes: list[str]) -> None:
    result = outofcore("plan", "gpt", "--layers", "1", "--device", "h100", *sizes)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: there is not enough memory for this command (Storage size")
    assert len(result.stderr.splitlines()) == 1


def test_standard_output_has_only_the_json() -> None:
    arguments = ["plan", "loud.py:build", "--budget", "1MiB", "--json", "--no-curve", "--device", "h100"]
    run = subprocess.run([sys.executable, "-m", "outofcore", *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["feasible"]
    for text in ("from the script", "from native code", "from the function", "from the step"):
        assert text in run.stderr
