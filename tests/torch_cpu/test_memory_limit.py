"""Under a hard limit on memory plain PyTorch dies and outofcore finishes."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
