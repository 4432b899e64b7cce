from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from outofcore._torch_internals import TESTED_TEXT
from outofcore.cli import torch_checks
from outofcore.cli.app import app
from outofcore.cli.doctor import CheckStatus as CheckResult
from outofcore.cli.doctor import Finding
from outofcore.errors import InputError, StateError, UnitError

# Needs 19 MiB in core and at least 3 MiB out of core, and trains fast.
TINY = ["gpt", "--layers", "2", "--width", "128", "--heads", "2", "--context", "128", "--batch", "4"]
HALF = "10MiB"


def outofcore(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def losses(output: str) -> list[str]:
    return re.findall(r"^step \d+/\d+  loss (\S+)", output, re.MULTILINE)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from outofcore.cli import main\n"
        "sys.argv = ['outofcore', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code in (0, 2), left\n"
        "assert 'torch' not in sys.modules"
    )
    for arguments in (["--help"], ["train", "--help"], ["plan", "--help"], ["train", "gpt", "--budget", "much"]):
        process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr


def test_cli_module_prints_its_version() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "outofcore.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", process.stdout)


def test_train_requires_either_a_budget_or_eager() -> None:
    assert outofcore("train", *TINY).exit_code == 2
    assert outofcore("train", *TINY, "--eager", "--budget", "1GiB").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "gpt", "--budget", "much"], "cannot read 'much' as a byte count"),
        (["train", "gpt", "--budget", "1GiB", "--depth", "3"], "gpt has no option 'depth'"),
        (["train", "lenet", "--budget", "1GiB"], "the zoo has no 'lenet'"),
        (["train", "gpt", "--budget", "1GiB", "--save", __file__], "--save takes a folder"),
        (["train", "resnet18", "--depth", "50", "--eager"], "resnet18 has 18 layers, but --depth is 50"),
        (["train", *TINY, "--budget", "1GiB", "--home", "/no/such/folder"], "/no/such/folder"),
        (["train", *TINY, "--budget", "1GiB", "--policy", "guess"], "there is no policy 'guess'"),
        (["train", *TINY, "--budget", "200KiB"], "The smallest budget that would do is"),
        (["plan", "gpt", "--budget", "much"], "cannot read 'much' as a byte count"),
        (
            ["plan", "gpt", "--device", "xpu"],
            "choose cpu or cuda for a device of this machine, or one of k40c-12gb",
        ),
        (["doctor", "--home", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_error_is_printed_without_a_traceback(arguments: list[str], message: str) -> None:
    result = outofcore(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["plan", "train"])
def test_missing_gpu_is_refused(command: str) -> None:
    result = outofcore(command, *TINY, "--budget", "1GiB", "--device", "cuda")
    assert result.exit_code == 2
    assert "PyTorch sees no CUDA device here" in result.stderr


def test_simulated_device_is_refused_by_train_and_plan_of_a_graph() -> None:
    result = outofcore("train", *TINY, "--budget", "1GiB", "--device", "a100-80gb")
    assert result.exit_code == 2
    assert "'a100-80gb' is no device" in result.stderr
    result = outofcore("plan", "--graph", "step.json", "--device", "a100-80gb")
    assert result.exit_code == 2
    assert "--device" in result.stderr


def test_debug_raises_the_original_error() -> None:
    assert isinstance(outofcore("train", "gpt", "--budget", "much", "--debug").exception, UnitError)
    assert isinstance(outofcore("train", "lenet", "--eager", "--debug").exception, InputError)


def test_eager_training_prints_one_line_per_step() -> None:
    result = outofcore("train", *TINY, "--eager", "--steps", "3")
    assert result.exit_code == 0, result.output
    assert len(losses(result.stdout)) == 3
    assert "median step" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("home", ["disk", "host", "folder", "tiers"])
def test_training_within_a_budget_has_the_losses_of_eager(home: str, tmp_path: Path) -> None:
    location = str(tmp_path) if home in ("folder", "tiers") else home
    picture = tmp_path / "picture.html"
    eager = outofcore("train", *TINY, "--eager", "--steps", "3")
    more = ["--steps", "3", "--home", location, "--picture", str(picture)]
    more += ["--policy", "auto:polish_ops=0"] if home != "disk" else []
    more += ["--host-budget", "2MiB"] if home == "tiers" else []
    result = outofcore("train", *TINY, "--budget", HALF, *more)
    assert result.exit_code == 0, result.output
    assert losses(result.stdout) == losses(eager.stdout)
    steps = re.findall(r"^step .*memory (\S+ \S+)  evicted (\S+ \S+), fetched (\S+ \S+)$", result.stdout, re.MULTILINE)
    assert len(steps) == 3
    assert steps[-1][1] != "0 B"
    assert "predicted" in result.stdout
    page = picture.read_text(encoding="utf-8")
    assert "measured" in page
    assert '"budget":10485760' in page


def plan(*arguments: str) -> dict[str, object]:
    result = outofcore("plan", *TINY, "--json", *arguments)
    assert result.exit_code in (0, 1), result.output
    return {**json.loads(result.stdout), "exit_code": result.exit_code}


def test_logical_workers_resume_from_a_checkpoint(tmp_path: Path) -> None:
    assert outofcore("train", *TINY, "--elastic", "2", "--eager").exit_code == 2
    common = ("train", *TINY, "--budget", "32MiB", "--elastic", "2", "--bits")
    whole = outofcore(*common, "--steps", "2")
    assert whole.exit_code == 0, whole.output
    assert "2 logical workers on 1 process" in whole.output
    first = outofcore(*common, "--steps", "1", "--save", str(tmp_path / "saved"))
    second = outofcore(*common, "--steps", "1", "--resume", str(tmp_path / "saved"))
    bits = [re.findall(r"\((0x\S+)\)", result.output) for result in (first, second, whole)]
    assert bits[0] + bits[1] == bits[2]
    assert len(bits[2]) == 2


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    whole = outofcore("train", *TINY, "--eager", "--steps", "4", "--bits")
    within = ["--budget", HALF, "--policy", "auto:polish_ops=0"]
    first = outofcore("train", *TINY, *within, "--steps", "2", "--bits", "--save", str(tmp_path / "saved"))
    assert first.exit_code == 0, first.output
    bits = re.compile(r"loss \S+ \((0x\S+)\)")
    for options in (within, ["--eager"]):
        second = outofcore("train", *TINY, *options, "--steps", "2", "--bits", "--resume", str(tmp_path / "saved"))
        assert bits.findall(first.output) + bits.findall(second.output) == bits.findall(whole.output)
    assert len(bits.findall(whole.output)) == 4
    mismatched = outofcore(
        "train", "gpt", "--width", "64", "--layers", "2", "--eager", "--resume", str(tmp_path / "saved")
    )
    assert mismatched.exit_code == 2
    assert "has the shape" in mismatched.output


def test_plan_prints_fit_and_predictions_as_json() -> None:
    need = plan()
    smallest, in_core = need["smallest_budget"], need["in_core_budget"]
    assert isinstance(smallest, int)
    assert isinstance(in_core, int)
    assert 0 < smallest < in_core
    assert need["fits"] is None

    whole = plan("--budget", str(in_core))
    assert (whole["fits"], whole["exit_code"]) == (True, 0)
    predicted = whole["predicted"]
    assert isinstance(predicted, dict)
    assert predicted["moved"] == []
    assert predicted["arena_bytes"] <= in_core

    less = plan("--budget", str((smallest + in_core) // 2))
    assert (less["fits"], less["exit_code"]) == (True, 0)
    predicted = less["predicted"]
    assert isinstance(predicted, dict)
    assert predicted["moved"]

    too_small = plan("--budget", str(smallest // 2))
    assert (too_small["fits"], too_small["exit_code"]) == (False, 1)


def test_plan_prints_a_readable_report(tmp_path: Path) -> None:
    picture = tmp_path / "plan.html"
    result = outofcore("plan", *TINY, "--budget", HALF, "--picture", str(picture))
    assert result.exit_code == 0, result.output
    for words in ("nothing moves", "smallest budget", "fits, with copies", "evicted", "activation"):
        assert words in result.stdout
    assert "predicted" in picture.read_text(encoding="utf-8")

    refused = outofcore("plan", *TINY, "--budget", "200KiB")
    assert refused.exit_code == 1
    assert "does not fit" in refused.stdout
    assert "The smallest budget that would do is" in refused.stdout


def test_doctor_prints_every_finding() -> None:
    result = outofcore("doctor")
    assert result.exit_code == 0, result.output
    names = ("PyTorch", "CPU", "memory speed", "native code", "measurements", "disk speed", "disk under load")
    for name in (*names, "direct I/O", "host speed", "GPU"):
        assert re.search(rf"^(ok  |note) {name} +\S", result.stdout, re.MULTILINE), name
    assert f"outofcore is tested with {TESTED_TEXT}" in result.stdout
    for entry_point in ("compile", "budget"):
        assert re.search(
            rf"^ok   {entry_point} on cpu +3 steps within .* losses as in plain PyTorch", result.stdout, re.MULTILINE
        )
    assert result.stdout.endswith("\neverything works\n")


def test_doctor_reports_a_failing_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel\nat this place")

    monkeypatch.setattr("outofcore.compile", fails, raising=False)
    result = outofcore("doctor")
    assert result.exit_code == 1
    assert re.search(r"^FAIL compile on cpu +RuntimeError: no such kernel$", result.stdout, re.MULTILINE)
    assert result.stdout.count("losses as in plain PyTorch") == 1
    assert result.stdout.endswith("\n1 problem: compile on cpu\n")


def lines_of_doctor(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the output of ``doctor`` without the trainings and the measurements of speed."""
    monkeypatch.setattr(torch_checks, "_training_finding", lambda name, *_: Finding(CheckResult.OK, name, "left out"))
    monkeypatch.setattr(torch_checks, "_home_findings", lambda _: [])
    return outofcore("doctor").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_suggests_the_cpu_build_of_pytorch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "index-url" not in lines_of_doctor(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    output = lines_of_doctor(monkeypatch)
    assert re.search(
        r"^note GPU +.*pip install torch --index-url https://download.pytorch.org/whl/cpu$", output, re.MULTILINE
    )
    assert output.endswith("\neverything works\n")


def test_doctor_announces_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compiling now" not in lines_of_doctor(monkeypatch)
    monkeypatch.setattr(torch_checks, "is_built", lambda _: False)
    output = lines_of_doctor(monkeypatch)
    announced = output.index("native code       compiling now, once, for about half a minute ...")
    assert announced < output.index("native code       works")


def test_doctor_names_a_compiler_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: object) -> None:
        raise StateError("native code is missing: it could not be compiled")

    monkeypatch.setattr("shutil.which", lambda _: None)
    output = lines_of_doctor(monkeypatch)
    assert re.search(r"^note C\+\+ compiler +none on PATH .*apt install g\+\+", output, re.MULTILINE)
    assert output.endswith("\neverything works\n")
    monkeypatch.setattr(torch_checks, "load_native", no_library)
    output = lines_of_doctor(monkeypatch)
    assert re.search(r"^FAIL native code +native code is missing", output, re.MULTILINE)
    assert output.endswith("\n1 problem: native code\n")


def test_doctor_notes_an_untested_version_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checks, "is_tested", lambda: False)
    output = lines_of_doctor(monkeypatch)
    assert re.search(rf"^note PyTorch .*is tested with {TESTED_TEXT} and may not work", output, re.MULTILINE)


@pytest.mark.exhaustive
def test_measurements_are_cached_listed_and_cleared(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert outofcore("plan", *TINY, "--no-cache", "--cache", str(cache)).exit_code == 2
    plan("--no-cache")
    assert not cache.exists()
    first = plan("--cache", str(cache))
    kinds = sorted(path.name.partition("-")[0] for path in cache.glob("*.json"))
    assert kinds == ["links", "ops", "parts"]
    # Predicted times are equal because the second call reads all measurements from the cache.
    assert plan("--cache", str(cache)) == first
    assert plan("--no-cache") != first
    assert f"{cache}, 3 files, " in outofcore("doctor", "--cache", str(cache)).stdout
    assert "6 files deleted" in outofcore("doctor", "--cache", str(cache), "--clear-cache").stdout
    assert list(cache.iterdir()) == []
