"""Count the host instructions of an in-core step, of plain PyTorch and of outofcore.

    python instructions.py [--stub FOLDER]

A small GPT with autocast and AdamW. Valgrind counts, so the load of the machine does not matter; the kernels of the
stub compute nothing. Run it with the Python that has PyTorch's CUDA build. Prints one table row per mode; four minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from build import OUT, build, environment

MODES = ("plain", "on demand", "planned")
WARM_UP, STEPS = 8, 2


def take_steps(mode: str) -> None:
    from unittest import mock

    import torch
    from foreground_planning import ForegroundPlanner

    import outofcore
    from outofcore.follow import loop_planner
    from outofcore.zoo import workload

    work = workload("gpt", batch=2, layers=4, width=256, context=64, amp=True)
    torch.manual_seed(0)
    model = work.build().cuda()
    batch = tuple(tensor.cuda() for tensor in next(work.batches()))
    step: Callable[..., Any] = work.make_step(model, work.optimizer(model))
    options: dict[str, Any] = {} if mode == "planned" else {"policy": None}
    at_once = mock.patch.object(loop_planner, "BackgroundPlanner", ForegroundPlanner)
    followed = nullcontext() if mode == "plain" else outofcore.budget("2GiB", model, cache=False, **options)
    with at_once, followed as run:
        for _ in range(WARM_UP):
            step(*batch)
        before = (run.stats.ops, run.stats.planned_ops) if run is not None else (0, 0)
        _count("on")
        for _ in range(STEPS):
            step(*batch)
        _count("off")
        after = (run.stats.ops, run.stats.planned_ops) if run is not None else (0, 0)
    ops, planned = ((b - a) // STEPS for a, b in zip(before, after, strict=True))
    print("" if run is None else f"{ops} ops, {planned} of them planned")


def _count(switch: str) -> None:
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["callgrind_control", "-i", switch, str(os.getpid())]
    subprocess.run(command, env=alone, check=True, stdout=subprocess.DEVNULL)


def instructions(mode: str, stub: Path) -> tuple[int, str]:
    settings = {"quiet": 1, "numbers": 0, "kernel_us": 0, "tflops": 100000, "h2d_gbs": 50, "d2h_gbs": 50}
    env = environment(stub, **settings) | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(stub / "cache")}
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}", "-q"]
        command = [*valgrind, sys.executable, __file__, "--stub", str(stub), "--way", mode]
        output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        total = re.search(r"^totals: (\d+)", counts.read_text(encoding="utf-8"), re.MULTILINE)
    if total is None:
        raise RuntimeError(f"valgrind printed no total for {mode}")
    return int(total[1]) // STEPS, output.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stub", type=Path, default=OUT, help="folder in which the stub is built")
    parser.add_argument("--way", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        take_steps(arguments.way)
        return
    stub = build(arguments.stub)
    plain = 0
    for mode in MODES:
        count, output = instructions(mode, stub)
        plain = plain or count
        print(f"{mode:<10} {count / 1e6:6.2f} million, {count / plain:.2f} of plain; {output}", flush=True)


if __name__ == "__main__":
    main()
