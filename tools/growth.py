"""Check that eager loops keep to their budget over thousands of steps, by the kernel's counters.

    python tools/growth.py                          # all loops, 10,000 steps each: hours
    python tools/growth.py --steps 500 --loop plain

Each loop of ``tests/shared/loops.py`` runs in its own process within half of its unconstrained peak. Prints a line of
JSON per loop; exits with status 1 if resident memory exceeds the budget by more than 80 MB, or grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

from loops import LOOPS, adamw  # noqa: E402 - in tests/shared

import outofcore  # noqa: E402
from outofcore.units import KIB  # noqa: E402

# Allowed above the budget: tensors below 64 KiB, libraries' caches for shapes, windows of homes.
ALLOWED = 80 * 10**6
# Allowed growth in the second half of the steps.
DRIFT = 8 * 10**6


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise ValueError(f"/proc/self/status has no field {field}")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def budget_of(name: str) -> int:
    """Return half of a loop's unconstrained peak, or the bytes of its largest op."""
    loop, model_of = LOOPS[name]

    def peak(limit: int) -> int:
        torch.manual_seed(0)
        model = model_of()
        with outofcore.budget(limit, model) as run:
            loop(model, adamw)
            return run.stats.peak_bytes

    half = peak(1 << 30) // 2
    for _ in range(8):
        try:
            peak(half)
            break
        except outofcore.BudgetError as error:
            half = max(half, error.smallest_budget or 0) * 9 // 8
    return half


def measure_loop(name: str, budget: int, steps: int) -> dict[str, Any]:
    loop, model_of = LOOPS[name]
    with outofcore.budget("2MiB"):
        # The first step of an optimizer loads PyTorch's compiler, which takes 60 MB.
        tiny = nn.Linear(8, 8)
        optimizer = adamw(tiny)
        tiny(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    del tiny, optimizer
    gc.collect()
    reset_peak()
    idle = status_bytes("VmRSS")
    of_files = status_bytes("RssFile")
    torch.manual_seed(0)
    model = model_of()
    steps_done = 0
    peaks: list[int] = []
    anonymous: list[int] = []
    with outofcore.budget(budget, model) as run:
        while steps_done < steps:
            before = run.stats.steps
            loop(model, adamw)
            steps_done += max(run.stats.steps - before, 1)
            peaks.append(status_bytes("VmHWM") - idle)
            anonymous.append(status_bytes("RssAnon"))
            reset_peak()
        stats = run.stats
    middle = len(peaks) // 2
    drift = max(peaks[middle:]) - max(peaks[:middle] or peaks)
    return {
        "loop": name,
        "steps": steps_done,
        "budget": budget,
        "idle": idle,
        "of_files": status_bytes("RssFile") - of_files,
        "above_idle": max(peaks),
        "over_budget": max(peaks) - budget,
        "drift": drift,
        "anonymous_at_end": anonymous[-1],
        "anonymous_in_the_middle": anonymous[middle],
        "arena_peak": stats.peak_bytes,
        "outside_peak": stats.peak_outside_bytes,
        "home_peak": stats.peak_home_bytes,
        "within": max(peaks) <= budget + ALLOWED and drift <= DRIFT,
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--loop", choices=[*LOOPS], action="append", help="loop to run; repeatable (default: all)")
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--budget", type=int, help="budget in bytes of one loop, which then runs in this process")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.budget is not None:
        result = measure_loop(options.loop[0], options.budget, options.steps)
        print(json.dumps(result), flush=True)
        return 0 if result["within"] else 1
    failed = 0
    for name in options.loop or LOOPS:
        command = [sys.executable, __file__, "--loop", name, "--steps", str(options.steps)]
        failed |= subprocess.run([*command, "--budget", str(budget_of(name))], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
