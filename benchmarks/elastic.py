"""Logical workers on 1, 2 and 4 processes: what switching between them takes, and bytes sent against a ring's.

Each training has four workers and a budget that holds everything, or half of that. All end with the same bits, or this
fails. Where there are more processes than cores, their step times say nothing, and are written down all the same.
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
    small: Annotated[bool, typer.Option("--small", help="One tiny model, for a minute.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each training.")] = 8,
    home: Annotated[str, typer.Option(help="As for outofcore.compile.")] = "disk",
    threads: Annotated[int, typer.Option(min=1, help="Of each process.")] = 1,
    save: Annotated[bool, typer.Option("--save", help="Keep the results beside the others.")] = False,
) -> None:
    """Measure."""
    table = Table(
        "training", "budget", "processes", "step", "turns", "all switches", "of a step", "sum", "sent", "a ring sends"
    )
    for name, options in (_SMALL if small else _WORKLOADS).items():
        need = survey(Spec(name, options))
        rows: list[dict[str, Any]] = []
        for share in (1.1,) if small else (1.1, 0.5):
            budget = int(max(share * need["in_core_budget"], 1.1 * need["smallest_budget"]))
            bits: set[str] = set()
            for processes in (1, 2) if small else (1, 2, 4):
                given = {
                    "model": name,
                    "options": options,
                    "workers": _WORKERS,
                    "budget": budget,
                    "home": home,
                    "threads": threads,
                    "steps": steps,
                    "warm_up": min(3, steps - 1),
                }
                found = _measure(processes, given)
                bits.add(found["bits"])
                rows.append({"processes": processes, **given, **found})
                table.add_row(
                    name,
                    format_bytes(budget),
                    str(processes),
                    format_seconds(found["step_seconds"]),
                    " ".join(map(format_seconds, found["turn_seconds"])),
                    format_seconds(found["switch_seconds"]),
                    f"{found['switch_share']:.1%}",
                    format_seconds(found["sum_seconds"]),
                    format_bytes(found["bytes_sent"]),
                    format_bytes(found["ring_bytes"]),
                )
            if len(bits) > 1:
                raise SystemExit(f"{name}: the bits depend on the number of processes")
        if save:
            write_model("elastic", name, {"workers": _WORKERS, "rows": rows}, None)
    console().print(table)


if __name__ == "__main__":
    typer.run(main)
