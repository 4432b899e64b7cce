"""Fork the processes of a scenario (see ``gloo_process.py``) from one that has loaded PyTorch.

    python launching.py SCRIPT SCENARIO PROCESSES FOLDER

Each process runs SCRIPT with SCENARIO, RANK, PROCESSES and FOLDER/store, and prints to FOLDER/output-RANK.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path


def run_together(script: Path, scenario: str, processes: int, folder: Path) -> list[tuple[int, str]]:
    """Return the exit status and the output of each process of a scenario."""
    command = [sys.executable, __file__, str(script), scenario, str(processes), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        try:
            statuses = parent.communicate(timeout=180)[0].split()
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
    outputs = [(folder / f"output-{rank}").read_text(encoding="utf-8") for rank in range(processes)]
    return [(int(status), output) for status, output in zip(statuses, outputs, strict=True)]


def _fork_rank(script: str, scenario: str, rank: int, processes: int, folder: Path) -> int:
    if child := os.fork():
        return child
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    sys.argv = [script, scenario, str(rank), str(processes), str(folder / "store")]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _fork_all(script: str, scenario: str, processes: int, folder: Path) -> None:
    # Import once, before the fork.
    import torch._dynamo  # noqa: PLC0415
    import torch.distributed._functional_collectives  # noqa: PLC0415
    import torch.nn.parallel  # noqa: F401, PLC0415

    import outofcore  # noqa: F401, PLC0415

    sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
    from effort import search_like  # noqa: PLC0415
    from short_measurements import measure_briefly  # noqa: PLC0415

    from outofcore.planning import QUICK  # noqa: PLC0415

    gc.collect()
    gc.freeze()
    with search_like(QUICK), measure_briefly():
        ranks = [_fork_rank(script, scenario, rank, processes, folder) for rank in range(processes)]
    for rank in ranks:
        print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))


if __name__ == "__main__":
    _fork_all(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
