"""Memory of the process: what it takes to train under a limit and to plan for large models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outofcore.units import GIB, format_bytes

# Data of about 1.5 GB in core: activations of 24 layers of 16 MiB, twice over, with their gradients.
SCRIPT = """
import resource, sys
import torch, torch.nn.functional as F
import outofcore
from outofcore.execution.native import load_native

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(24) for m in (torch.nn.Linear(512, 512), torch.nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(8192, 512)

def step(x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

load_native()
run = step if sys.argv[1] == "eager" else outofcore.compile(step, model, optimizer, budget="160MiB")
# What the process has by now, and 400 MiB for the training.
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (now + (400 << 20),) * 2)
print([float(run(x).detach()).hex() for _ in range(3)])
"""


def run(side: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, side], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits on data are enforced by Linux alone")
def test_eager_dies_and_outofcore_finishes() -> None:
    eager = run("eager")
    assert eager.returncode != 0
    assert "memory" in eager.stderr
    ours = run("outofcore")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("0x") == 3


_CODE = """
import sys
from outofcore.cli import main
from outofcore.report.machine import peak_memory_bytes
try:
    main()
finally:
    print(peak_memory_bytes(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        # 1.6 billion parameters: 6.4 GB with nothing but the weights.
        ["plan", "--layers", "2", "--width", "8192", "--device", "h100", "--no-curve"],
        ["report", "--layers", "2", "--width", "8192", "--device", "h100", "--budget", "60GiB", "--no-curve"],
        # Ops are measured, each on scratch tensors of its own: 1.4 GB of weights.
        ["plan", "--layers", "28", "--width", "1024", "--optimizer", "sgd"],
    ],
    ids=["simulated", "reported", "measured"],
)
def test_a_large_model_is_planned_for_in_little_memory(arguments: list[str], tmp_path: Path) -> None:
    command, *rest = arguments
    model = [command, "gpt", "--batch", "1", "--context", "256", "--no-cache", *rest]
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *model], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.splitlines()[-1])
    assert peak < GIB, format_bytes(peak)
