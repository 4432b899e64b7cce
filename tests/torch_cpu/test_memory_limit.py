"""Memory of the process: what it takes to train under a limit and to plan for large models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from effort import some_of

from outofcore.units import GIB, format_bytes

# Data of about 1.5 GB in core: activations of 24 layers of 16 MiB, twice over, with their gradients.
SCRIPT = """
import resource, sys
import torch, torch.nn.functional as F
import outofcore
from outofcore.runtime.native import load_native
from outofcore.planning import QUICK
from outofcore.policies import Auto

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(24) for m in (torch.nn.Linear(128, 128), torch.nn.SiLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(32768, 128)

def step(x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

load_native()
run = step if sys.argv[1] == "eager" else outofcore.compile(step, model, optimizer, budget="160MiB", policy=Auto(QUICK))
# What the process has by now, and 400 MiB for the training.
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (now + (400 << 20),) * 2)
print([float(run(x).detach()).hex() for _ in range(2)])
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
    assert ours.stdout.count("0x") == 2


# 1.25 GiB more than there is when all is imported, of addresses as well: what nobody writes to counts, too. Measuring
# takes buffers and threads, for each of which the C library sets 64 MiB of addresses aside.
_CODE = """
import contextlib, resource, sys
from outofcore.cli import main
from outofcore.report.machine import peak_memory_bytes
import outofcore.cli.subjects, outofcore.cli.onnx_models
with contextlib.suppress(ImportError):
    from transformers.models.auto import modeling_auto
    import outofcore.cli.fit
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) for line in status if line.startswith("VmSize")) << 10
resource.setrlimit(resource.RLIMIT_AS, (now + (5 << 28),) * 2)
before = peak_memory_bytes()
try:
    main()
finally:
    print(peak_memory_bytes() - before, file=sys.stderr)
"""
_BUILD = """
import torch
def build():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(65536, 65536) for _ in range(8)))
        x = torch.empty(1 << 20, 65536)
    optimizer = torch.optim.Adam(model.parameters())
    def step(x):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step, model, optimizer, x
def real():
    return None, None, None, torch.zeros(1 << 36)
"""
_WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 384,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "vocab_size": 51865,
    "num_mel_bins": 80,
}
_GPT = ["gpt", "--context", "64", "--no-cache"]
# So much that nothing moves, and planning takes no time.
_LARGE = ["--device", "h100", "--no-curve", "--budget", "9TiB"]


def limited(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(_BUILD)
    (folder / "whisper").mkdir()
    (folder / "whisper" / "config.json").write_text(json.dumps(_WHISPER))
    return subprocess.run(
        [sys.executable, "-c", _CODE, *arguments], capture_output=True, text=True, check=False, cwd=folder
    )


COMMANDS = {
    # 26 billion parameters: 103 GB with nothing but the weights.
    "simulated": ["plan", *_GPT, "--batch", "4", "--layers", "2", "--width", "32768", *_LARGE],
    "batch": ["plan", *_GPT, "--batch", "1000000", "--layers", "1", "--width", "256", *_LARGE],
    "reported": ["report", *_GPT, "--layers", "2", "--width", "8192", *_LARGE],
    # Ops are measured, each on scratch tensors of its own: 1.6 GB of weights.
    "measured": ["plan", *_GPT, "--batch", "1", "--layers", "8", "--width", "2048", "--optimizer", "sgd"],
    # What the library makes beside a user's own tensors on the device meta: 275 GB of inputs.
    "own": ["plan", "mine.py:build", *_LARGE],
    # The search for the largest batch tries 32,768 samples of 30 seconds.
    "configured": ["plan", "whisper", "--device", "h200", "--optimizer", "none"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits on addresses are enforced by Linux alone")
@pytest.mark.parametrize("name", some_of(COMMANDS, ["simulated"]))
def test_planning_takes_no_memory_for_tensors(name: str, tmp_path: Path) -> None:
    if name == "configured":
        pytest.importorskip("transformers")
    done = limited(tmp_path, *COMMANDS[name])
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.splitlines()[-1])
    assert peak < GIB, format_bytes(peak)


@pytest.mark.skipif(sys.platform != "linux", reason="limits on addresses are enforced by Linux alone")
def test_an_out_of_memory_blames_no_file(tmp_path: Path) -> None:
    done = limited(tmp_path, "plan", "mine.py:real", "--device", "h100")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: there is not enough memory")
    assert "Traceback" not in done.stderr
