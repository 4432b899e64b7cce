"""Elastic training in stages, each by a number of processes that torchelastic (torchrun) starts.

``python -c "import stages; stages.drive(folder, stages)"``. The processes are forked from one that has loaded PyTorch,
which takes half of the time.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from short_measurements import measure_briefly
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import outofcore
from outofcore.checkpoint import saving
from outofcore.planning import QUICK

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from effort import search_like

WORKERS, BATCH = 4, 4


def model_of(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 160),
        nn.BatchNorm1d(160),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(160, 160),
        nn.ReLU(),
        nn.Linear(160, 4),
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return model, optimizer, train_step


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        torch.manual_seed(1)
        self._x, self._y = torch.randn(50, 64), torch.randint(0, 4, (50,))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index] + 0.1 * torch.randn(64), self._y[index]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    sha256 = hashlib.sha256()
    states = [optimizer.state[p][name] for p in model.parameters() for name in sorted(optimizer.state[p])]
    for tensor in (*model.state_dict().values(), *states):
        if tensor is not None:
            sha256.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def stage(name: str, last: int, kill: str) -> None:
    """Train in each process from the last checkpoint to step ``last`` for two optimizers, and write digests.

    Args:
        name: the output folder.
        last: the last step.
        kill: "step:RANK" or "save:RANK": that rank kills itself in the first attempt, while other ranks wait for its
            gradients or before it writes the index of a checkpoint.
    """
    torch.set_num_threads(1)
    with search_like(QUICK), measure_briefly():
        _stage(Path(name), last, kill)


def _stage(folder: Path, last: int, kill: str) -> None:
    moment, _, victim = kill.partition(":")
    for kind in ("sgd", "adamw"):
        model, optimizer, train_step = model_of(kind)
        with outofcore.elastic(
            train_step, model, optimizer, workers=WORKERS, budget="1200KiB", home=folder, timeout=60
        ) as run:
            if (folder / kind / saving.INDEX).exists():
                assert run.load(folder / kind) == {"kind": kind}
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            dying = moment if first and victim == str(run.rank) and kind == "adamw" else ""
            while run.steps < last:
                for batches in run.loader(Noisy(), batch_size=BATCH, seed=7):
                    if dying == "step" and run.steps == last - 1:
                        die(folder, dying)
                    run(batches)
                    if dying == "save" and run.steps == last:
                        saving.commit_index = lambda *_: die(folder, "save")
                    run.save(folder / kind, extra={"kind": kind})
                    if run.steps == last:
                        break
            (folder / f"{kind}-{run.steps}-{run.rank}.bits").write_text(digest(model, optimizer))


def die(folder: Path, moment: str) -> None:
    (folder / f"died-{moment}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def drive(folder: str, stages: Sequence[tuple[int, int, str]]) -> None:
    """Run stages one after the other; each is a number of processes and the arguments of ``stage``."""
    multiprocessing.set_forkserver_preload(["stages", "torch._dynamo"])
    for processes, last, kill in stages:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"{processes}-{last}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=1 if kill else 0,
            monitor_interval=0.1,
            start_method="forkserver",
        )
        elastic_launch(config, stage)(folder, last, kill)
