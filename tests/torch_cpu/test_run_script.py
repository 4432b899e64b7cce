"""Tests of ``outofcore run``: unmodified scripts behave as with ``python``, within a budget."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from effort import some_of

BUDGET = "4MiB"
TRAINING = """
import os, sys
assert "torch" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
import torch
from torch import nn

class Net(nn.Sequential):
    pass

def train(steps=3):
    torch.manual_seed(0)
    model = Net(*[nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        loss = model(torch.randn(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
    return model
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def run_with_budget(folder: Path, *arguments: str, budget: str = BUDGET) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "outofcore.cli", "run", "--budget", budget, *arguments)


def write(folder: Path, text: str, name: str = "script.py") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")


def test_script_runs_as_with_python(tmp_path: Path) -> None:
    write(tmp_path, "value = 5\n", "beside.py")
    write(
        tmp_path,
        TRAINING
        + """
import pickle, beside
def done():
    print("done", torch.get_num_threads())
if __name__ == "__main__":
    import atexit
    atexit.register(done)
    print(sys.argv, sys.path[0], __file__, __spec__, __package__, beside.value, "annotations" in globals())
    print(sys.modules["__main__"].Net is Net, __name__, torch.__spec__.name, type(torch.__loader__).__name__)
    model = train()
    again = pickle.loads(pickle.dumps(model))
    print(type(again) is Net, all(a.equal(b) for a, b in zip(model.parameters(), again.parameters())))
""",
    )
    arguments = ("script.py", "--lr", "3", "-m", "--budget", "--help", "--", "-x")
    theirs, ours = python(tmp_path, *arguments), run_with_budget(tmp_path, *arguments)
    assert theirs.returncode == 0, theirs.stderr
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
    assert re.match(r"outofcore: 3 steps, peak 3\.9\d MiB of 4\.00 MiB, evicted ", ours.stderr)
    assert ours.stderr.count("\n") == 1
    quiet = run_with_budget(tmp_path, "--quiet", *arguments)
    assert (quiet.stdout, quiet.stderr) == (theirs.stdout, "")


@pytest.mark.exhaustive
def test_module_runs_as_with_python(tmp_path: Path) -> None:
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, TRAINING, "package/parts.py")
    body = "\nprint(sys.argv, sys.path[0], __file__, __spec__.name, __package__, __name__)\ntrain(1)\n"
    write(tmp_path, "import sys\nfrom .parts import train" + body, "package/__main__.py")
    write(tmp_path, "import sys\nfrom package.parts import train" + body, "package/other.py")
    for target in ("package", "package.other"):
        theirs, ours = python(tmp_path, "-m", target, "-m", "1"), run_with_budget(tmp_path, "-m", target, "-m", "1")
        assert theirs.returncode == 0, theirs.stderr
        assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
        assert "outofcore: 1 step, peak" in ours.stderr


def test_folders_and_zip_files_run_as_with_python(tmp_path: Path) -> None:
    text = "import sys, beside\nprint(sys.argv, sys.path[0], __file__, __package__, __name__, beside.value)\n"
    write(tmp_path, text, "app/__main__.py")
    write(tmp_path, "value = 5\n", "app/beside.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as packed:
        packed.write(tmp_path / "app/__main__.py", "__main__.py")
        packed.write(tmp_path / "app/beside.py", "beside.py")
    for target in ("app", "app.zip"):
        theirs, ours = python(tmp_path, target, "1"), run_with_budget(tmp_path, target, "1")
        assert theirs.returncode == 0, theirs.stderr
        assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
        assert "did not import torch" in ours.stderr


ENDINGS = {
    "number": "sys.exit(7)",
    "text": "sys.exit('over')",
    "exception": "1 / 0",
    "while handling": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "os.kill(os.getpid(), 15)",
    "at once": "os._exit(3)",
    "hook": "sys.excepthook = lambda kind, error, trace: print('hook', kind, trace.tb_lineno)\n1 / 0",
}


@pytest.mark.parametrize("name", some_of(ENDINGS, ["interrupt", "hook"]))
def test_script_ends_as_with_python(name: str, tmp_path: Path) -> None:
    text = f"import os, sys\nimport torch\nprint('begun', flush=True)\n{ENDINGS[name]}\n"
    write(tmp_path, text.replace("import torch", "pass"))  # the import must not change how the script ends
    theirs = python(tmp_path, "script.py")
    write(tmp_path, text)
    ours = run_with_budget(tmp_path, "--quiet", "script.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)


def test_syntax_error_is_reported_as_with_python(tmp_path: Path) -> None:
    write(tmp_path, "import sys\nif:\n")
    theirs, ours = python(tmp_path, "script.py"), run_with_budget(tmp_path, "--quiet", "script.py")
    assert (ours.returncode, ours.stderr) == (1, theirs.stderr)


def test_too_small_budget_names_the_line_of_the_script(tmp_path: Path) -> None:
    write(tmp_path, "import torch\nx = torch.ones(1 << 21)\n")
    result = run_with_budget(tmp_path, "script.py")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):\n  File")
    assert "cli/run.py" not in result.stderr
    message = f"outofcore: the budget of 4.00 MiB is too small: aten::ones at {tmp_path / 'script.py'}:2 needs 8.00 MiB"
    assert message in result.stderr
    assert "Use a budget of at least 8.00 MiB" in result.stderr


def test_invalid_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, "print('begun')\nimport torch\nprint('not reached')\n")
    for arguments, message, begun in (
        (("nothing.py",), "there is no file nothing.py", False),
        (("--budget", "much", "script.py"), "cannot read 'much' as a byte count", False),
        (("--home", "/no/such/folder", "script.py"), "/no/such/folder", True),
    ):
        result = run_with_budget(tmp_path, *arguments)
        assert result.returncode == 2
        assert result.stdout == ("begun\n" if begun else "")
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert "Traceback" not in result.stderr
    result = run_with_budget(tmp_path, "-m", "nothing_of_that_name")
    assert result.returncode == 1
    assert result.stderr == "ModuleNotFoundError: No module named 'nothing_of_that_name'\n"


WORKERS = (
    TRAINING
    + """
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.manual_seed(1)
    rows, model = TensorDataset(torch.randn(32, 256)), Net(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for context in ("fork", "spawn"):
        for (x,) in DataLoader(rows, 16, num_workers=1, multiprocessing_context=context):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(double, (21,)), pool.apply(name))
"""
).replace("def train(", "def double(x):\n    return 2 * x\n\ndef name():\n    return __name__\n\ndef train(")


@pytest.mark.exhaustive
def test_worker_processes_of_a_script_run_as_with_python(tmp_path: Path) -> None:
    write(tmp_path, WORKERS.replace('assert "torch" not in sys.modules', ""))
    theirs, ours = python(tmp_path, "script.py"), run_with_budget(tmp_path, "script.py", budget="1MiB")
    assert theirs.returncode == 0, theirs.stderr
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
    assert ours.stderr.count("outofcore: ") == 1


@pytest.mark.parametrize("number", some_of([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_script_ends_by_the_signal_sent_to_it(number: signal.Signals, tmp_path: Path) -> None:
    write(
        tmp_path,
        TRAINING.replace("print(loss.item().hex())", "print(loss.item().hex(), flush=True)") + "train(1000000)\n",
    )
    # Unattended test runs may ignore SIGINT, and child processes inherit that.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import outofcore.cli as c; c.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", "--budget", BUDGET, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    os.kill(process.pid, number)
    try:
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == -number
    if number == signal.SIGINT:
        assert "\nKeyboardInterrupt\n" in stderr
        assert stderr.splitlines()[-1].startswith("outofcore: loop of ")
    else:
        assert stderr == ""


LENGTHS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (256, 256, 256, 2048):
    loss = model(torch.ones(rows, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def test_measure_option_prints_a_sufficient_smallest_budget(tmp_path: Path) -> None:
    write(tmp_path, LENGTHS)
    theirs, ours = python(tmp_path, "script.py"), run_with_budget(tmp_path, "--measure", "script.py")
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
    measured = re.fullmatch(
        r"outofcore: measured 4 steps\n  in core +\S+ MiB \((\d+) bytes\): .*\n"
        r"  smallest budget +\S+ MiB \((\d+) bytes\), which (.*) needs\n(?:  within .*\n){3}outofcore: 4 steps, .*\n",
        ours.stderr,
    )
    assert measured, ours.stderr
    in_core, smallest = int(measured[1]), int(measured[2])
    assert smallest < in_core
    assert str(tmp_path / "script.py") in measured[3]
    within_budget = run_with_budget(tmp_path, "script.py", budget=str(smallest))
    assert (within_budget.returncode, within_budget.stdout) == (0, theirs.stdout), within_budget.stderr


def test_grow_option_lets_the_run_exceed_its_budget(tmp_path: Path) -> None:
    write(tmp_path, LENGTHS)
    theirs, ours = python(tmp_path, "script.py"), run_with_budget(tmp_path, "--grow", "script.py", budget="2MiB")
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
    assert re.search(r"the budget of 2\.00 MiB was exceeded \d+ times", ours.stderr)
    assert re.search(r"outofcore: 4 steps, peak \S+ MiB of 2\.00 MiB, exceeded by \d+ ops, ", ours.stderr)


def test_default_and_relative_budgets_are_printed(tmp_path: Path) -> None:
    write(tmp_path, LENGTHS)
    theirs = python(tmp_path, "script.py")
    for budget in ((), ("--budget", "5%")):
        ours = python(tmp_path, "-m", "outofcore.cli", "run", *budget, "script.py")
        assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
        assert re.match(r"outofcore: budget \S+ .iB, of the \S+ .iB of memory that are available\n", ours.stderr)
