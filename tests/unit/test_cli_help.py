"""Tests of help texts, completion, and typical mistakes at the shell, without PyTorch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from outofcore.cli.app import app
from outofcore.cli.completion import MODELS
from outofcore.policies import POLICIES

PROGRAM = typer.main.get_command(app)
assert isinstance(PROGRAM, TyperGroup)
COMMANDS = sorted(PROGRAM.commands)


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_metavars_not_types(command: str) -> None:
    text = help_of(command)
    assert not re.search(r"<\w+", text), "an option has no metavar: name it in cli/commands.py"
    assert "--help " in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_a_valid_example(command: str) -> None:
    last = help_of(command).rstrip().splitlines()[-1].strip()
    program, name, *arguments = shlex.split(last.removeprefix("Example: "))
    assert (last[:9], program, name) == ("Example: ", "outofcore", command)
    assert isinstance(PROGRAM, TyperGroup)
    PROGRAM.commands[command].make_context(command, arguments)


def test_help_of_the_program_lists_all_commands() -> None:
    text = help_of()
    assert "<" not in text
    assert "--install-completion" in text
    for command in COMMANDS:
        assert re.search(rf"^│ {command} +[A-Z]", text, re.MULTILINE), command


def completions(line: str) -> set[str]:
    """Return the words that bash offers at the end of a line, in a process that must not import PyTorch."""
    code = "import sys\nfrom outofcore.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    words = line.split(" ")
    env = {"_OUTOFCORE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert "AssertionError" not in process.stderr
    return set(process.stdout.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("outofcore do", {"doctor"}),
        ("outofcore plan ", set(MODELS)),
        ("outofcore train res", {name for name in MODELS if name.startswith("resnet")}),
        ("outofcore plan my_script", set()),
        ("outofcore train gpt --policy ", set(POLICIES)),
        ("outofcore train gpt --device ", {"cpu", "cuda"}),
        ("outofcore plan gpt --device h100", {"h100-80gb-pcie5"}),
        ("outofcore run --home ", {"disk", "host"}),
    ],
)
def test_completion_offers_words(line: str, words: set[str]) -> None:
    assert completions(line) == words


def test_completion_script_is_shown() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "outofcore", "--show-completion", "bash"], capture_output=True, text=True, check=False
    )
    assert "complete -o default -F _outofcore_completion outofcore" in process.stdout, process.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "gpt", "--budget", "6"], "6GiB"),
        (["plan", "gpt", "--budget", "512"], "512MiB"),
        (["plan", "gpt", "--budget", "1GiB,65535", "--compare"], "65535MiB"),
        (["report", "gpt", "--budget", "99"], "99GiB"),
        (["run", "--budget", "6", "train.py"], "6GiB"),
    ],
)
def test_small_budget_without_a_unit_is_refused(arguments: list[str], meant: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the budget ")
    assert f"did you mean {meant}?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "gpt", "--budget", "6", "GiB"], "--budget 6GiB"),
        (["train", "--budget", "6", "GiB", "gpt"], "--budget 6GiB"),
        (["plan", "gpt", "--budget=1.5", "gb"], "--budget 1.5gb"),
        (["plan", "gpt", "--host-budget", "512", "MiB"], "--host-budget 512MiB"),
        (["run", "--budget", "6", "GiB", "train.py"], "--budget 6GiB"),
        (["pack", "buffers.csv", "--capacity", "1", "M"], "--capacity 1M"),
    ],
)
def test_byte_count_in_two_words_is_refused(arguments: list[str], meant: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert f"write the number and its unit as one word: {meant}" in words


def test_script_arguments_are_not_checked() -> None:
    result = CliRunner().invoke(app, ["run", "--budget", "6GiB", "no_such_script.py", "--budget", "6", "GiB"])
    assert "there is no file no_such_script.py" in result.stderr
