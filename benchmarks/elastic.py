"""Measure elastic training with 4 logical workers on 1, 2 and 4 processes: switch times and bytes sent.

All must end with the same bits. With more processes than cores, step times are recorded but not meaningful.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import Spec, console, survey, write_model
from rich.table import Table

from outofcore.units import format_bytes, format_seconds

_WORKERS = 4
_WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet": {"depth": 18, "batch": 8, "size": 128},
    "gpt": {"batch": 2, "params": "25M", "context": 256},
}
_SMALL: dict[str, dict[str, Any]] = {"gpt": {"batch": 2, "layers": 1, "width": 64, "heads": 2, "context": 32}}
_WORKER = Path(__file__).with_name("_elastic_worker.py")


def _measure(processes: int, options: dict[str, Any]) -> dict[str, Any]:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
            *(str(_WORKER), json.dumps(options)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in run.stdout.splitlines() if "RESULT " in line)
    return json.loads(line[line.index("RESULT ") + len("RESULT ") :])


def main(
    small: Annotated[bool, typer.Option("--small", help="Run one tiny model, for about a minute.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps per training.")] = 8,
    home: Annotated[str, typer.Option(help="Home, as for outofcore.compile.")] = "disk",
    threads: Annotated[int, typer.Option(min=1, help="Threads per process.")] = 1,
    save: Annotated[bool, typer.Option("--save", help="Write the results to benchmarks/results.")] = False,
) -> None:
    """Measure elastic training and print a table."""
    table = Table(
        "workload", "budget", "processes", "step", "turns", "switches", "share of step", "sum", "sent", "sent by a ring"
    )
    for name, options in (_SMALL if small else _WORKLOADS).items():
        need = survey(Spec(name, options))
        rows: list[dict[str, Any]] = []
        for share in (1.1,) if small else (1.1, 0.5):
            budget = int(max(share * need["in_core_budget"], 1.1 * need["smallest_budget"]))
            bits: set[str] = set()
            for processes in (1, 2) if small else (1, 2, 4):
                settings = {
                    "model": name,
                    "options": options,
                    "workers": _WORKERS,
                    "budget": budget,
                    "home": home,
                    "threads": threads,
                    "steps": steps,
                    "warm_up": min(3, steps - 1),
                }
                result = _measure(processes, settings)
                bits.add(result["bits"])
                rows.append({"processes": processes, **settings, **result})
                table.add_row(
                    name,
                    format_bytes(budget),
                    str(processes),
                    format_seconds(result["step_seconds"]),
                    " ".join(map(format_seconds, result["turn_seconds"])),
                    format_seconds(result["switch_seconds"]),
                    f"{result['switch_share']:.1%}",
                    format_seconds(result["sum_seconds"]),
                    format_bytes(result["bytes_sent"]),
                    format_bytes(result["ring_bytes"]),
                )
            if len(bits) > 1:
                raise SystemExit(f"{name}: weights differ between numbers of processes; they must be equal bit for bit")
        if save:
            write_model("elastic", name, {"workers": _WORKERS, "rows": rows}, None)
    console().print(table)


if __name__ == "__main__":
    typer.run(main)
