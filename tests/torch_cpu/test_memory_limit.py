"""Tests of the memory that training and planning take in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from effort import some_of

from outofcore.units import GIB, format_bytes

# About 1.5 GB in core: two activations of 16 MiB for each of 24 layers, with their gradients.
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
# The data of the process so far, and 400 MiB for training.
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (now + (400 << 20),) * 2)
print([float(run(x).detach()).hex() for _ in range(2)])
"""


def run_script(side: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, side], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces limits on data")
def test_only_outofcore_trains_under_a_memory_limit() -> None:
    eager = run_script("eager")
    assert eager.returncode != 0
    assert "memory" in eager.stderr
    ours = run_script("outofcore")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.count("0x") == 2


# A limit of 1.25 GiB of addresses after the imports: memory that is never written counts, too. Measuring takes buffers
# and threads, for each of which the C library reserves 64 MiB of addresses.
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
# A budget within which no bytes move, so that planning takes no time.
_LARGE = ["--device", "h100", "--no-curve", "--budget", "9TiB"]


def run_limited(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(_BUILD)
    (folder / "whisper").mkdir()
    (folder / "whisper" / "config.json").write_text(json.dumps(_WHISPER))
    return subprocess.run(
        [sys.executable, "-c", _CODE, *arguments], capture_output=True, text=True, check=False, cwd=folder
    )


COMMANDS = {
    # 26 billion parameters: 103 GB of weights.
    "simulated": ["plan", *_GPT, "--batch", "4", "--layers", "2", "--width", "32768", *_LARGE],
    "batch": ["plan", *_GPT, "--batch", "1000000", "--layers", "1", "--width", "256", *_LARGE],
    "reported": ["report", *_GPT, "--layers", "2", "--width", "8192", *_LARGE],
    # Ops are measured on separate scratch tensors: 1.6 GB of weights.
    "measured": ["plan", *_GPT, "--batch", "1", "--layers", "8", "--width", "2048", "--optimizer", "sgd"],
    # Tensors that the library creates for a user's meta tensors: 275 GB of inputs.
    "own": ["plan", "mine.py:build", *_LARGE],
    # The search for the largest batch tries 32,768 samples of 30 seconds.
    "configured": ["plan", "whisper", "--device", "h200", "--optimizer", "none"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces limits on addresses")
@pytest.mark.parametrize("name", some_of(COMMANDS, ["simulated"]))
def test_planning_takes_no_memory_for_tensors(name: str, tmp_path: Path) -> None:
    if name == "configured":
        pytest.importorskip("transformers")
    process = run_limited(tmp_path, *COMMANDS[name])
    assert process.returncode == 0, process.stderr
    peak = int(process.stderr.splitlines()[-1])
    assert peak < GIB, format_bytes(peak)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces limits on addresses")
def test_out_of_memory_error_names_no_file(tmp_path: Path) -> None:
    process = run_limited(tmp_path, "plan", "mine.py:real", "--device", "h100")
    assert process.returncode == 2, process.stderr
    assert process.stderr.startswith("error: there is not enough memory")
    assert "Traceback" not in process.stderr
