"""Everything that needs a GPU, in one command and without a network: the tests on it, then the benchmarks; 9 minutes.

Each part is a process with a time limit of its own. What is known is written after each part, so that whatever happens
later leaves it. Exit status: 0 all passed, 1 something did not, 2 there is nothing to check here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gpu-check.json"
# Packages for a machine that has PyTorch and no network; see `make gpu-site`.
SITE = ROOT / ".gpu-site"
TESTS_S, BENCHMARKS_S, SPARE_S = 200, 310, 20
_PROBE = """
import importlib, json, sys
missing = []
for name in ("numpy", "highspy", "msgspec", "typer", "rich", "pytest", "torch"):
    try:
        importlib.import_module(name)
    except ImportError:
        missing.append(name)
found = {"missing": missing, "python": sys.version.split()[0]}
if "torch" not in missing:
    import torch
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"], found["device_bytes"] = properties.name, properties.total_memory
print(json.dumps(found))
"""


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), *([str(SITE)] if SITE.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    # cuBLAS is deterministic with a workspace of fixed size only.
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**os.environ, **settings}


def _run(command: list[str], limit: float) -> dict[str, Any]:
    """Run one part: its exit status (None: stopped at the limit), its seconds and the end of what it said."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    status: int | None
    try:
        output, _ = process.communicate(timeout=limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=SPARE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        status = None
    print(output, flush=True)
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "output": output[-20_000:]}


def main() -> int:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], env=_environment(), text=True, capture_output=True, check=False
    )
    if probe.returncode:
        print(f"gpu-check: {sys.executable} cannot look around: {probe.stderr.strip()[-2000:]}", file=sys.stderr)
        return 2
    facts = json.loads(probe.stdout.splitlines()[-1])
    if facts["missing"]:
        print(
            f"gpu-check: {', '.join(facts['missing'])} cannot be imported by {sys.executable}; install them, or run "
            "`make gpu-site` where there is a network and bring the folder .gpu-site along",
            file=sys.stderr,
        )
        return 2
    if "device" not in facts:
        print(
            f"gpu-check: PyTorch {facts['torch']} sees no CUDA device on this machine; nothing has been checked. Run "
            "it where nvidia-smi shows a GPU and torch.cuda.is_available() is True",
            file=sys.stderr,
        )
        return 2
    print(f"gpu-check: {facts['device']}, PyTorch {facts['torch']}, CUDA {facts['cuda']}", flush=True)
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    parts = {
        "tests": ([sys.executable, "-m", "pytest", "-q", "--color=no", "-m", "cuda", "--durations=10"], TESTS_S),
        "benchmarks": ([sys.executable, "benchmarks/gpu.py", "--seconds", str(BENCHMARKS_S - SPARE_S)], BENCHMARKS_S),
    }
    parts["tests"][0].append("tests/cuda")
    for name, (command, limit) in parts.items():
        report[name] = _run(command, limit)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    passed = all(report[name]["status"] == 0 for name in parts)
    print(f"gpu-check: {'passed' if passed else 'failed'}; {RESULT}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
