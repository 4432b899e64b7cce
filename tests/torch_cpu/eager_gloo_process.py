"""One of two processes that train together over gloo, eagerly and within budgets, and compare their results.

python eager_gloo_process.py VIEW RANK 2 STORE: VIEW is 1 if gradients are views of DDP's buckets; STORE is a new file.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from loops import Language, loss_of, sentences, tensors_in

import outofcore
from outofcore.follow.native import load_paging


def train(rank: int, view: bool) -> list[Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Language(), gradient_as_bucket_view=view, bucket_cap_mb=1)
    optimizer, results = torch.optim.AdamW(model.parameters(), 1e-3), []
    for number, (ids, labels) in enumerate(sentences(3)):
        half = slice(4 * rank, 4 * rank + 4)
        if number == 1:  # accumulate gradients without an exchange
            with model.no_sync():
                loss_of(model, ids[half], labels[half]).backward()
            continue
        loss = loss_of(model, ids[half], labels[half])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        results.append(mean.item())
    return [*results, *(t.clone() for t in (*model.state_dict().values(), *tensors_in(optimizer)))]


def train_within(budget: int, rank: int, view: bool, *, stress: bool = False) -> tuple[list[Any], outofcore.LoopStats]:
    with outofcore.budget(budget) as run:
        load_paging().follow_stress(run._space, int(stress))
        return train(rank, view), run.stats


def request_during_collective(rank: int) -> None:
    """Check that a request waits for the collective that uses the tensors to evict."""
    with outofcore.budget(4 << 20, home="host", policy=None):
        summed = torch.full((640, 1024), float(rank))
        if rank == 1:
            time.sleep(0.5)  # meanwhile the other rank requests memory
        work = dist.all_reduce(summed, async_op=True)
        requested = torch.full((512, 1024), 3.0)
        assert work is not None
        work.wait()
        assert summed.eq(1).all()
        assert requested.eq(3).all()


def collective_on_tensor_at_home(rank: int) -> None:
    """Check that a tensor at home stays there while another thread's collective uses it."""
    with outofcore.budget(4 << 20, home="host", policy=None) as run:
        rows, works = torch.full((2, 100_000), float(rank)), []
        load_paging().follow_evict_all(run._space)
        thread = threading.Thread(target=lambda: works.append(dist.all_reduce(rows[0], async_op=True)))
        if rank == 1:
            time.sleep(0.5)  # meanwhile the other rank uses the second row
        thread.start()
        thread.join()
        rows[1] += 5
        works[0].wait()
        assert rows[0].eq(1).all()
        assert rows[1].eq(rank + 5).all()


def collective_between_loops(rank: int) -> None:
    """Check that a tensor of an ended loop does not move to the next loop while a collective uses it."""
    first, second = nn.Module(), nn.Module()
    summed = torch.full((100_000,), float(rank))
    second.register_buffer("summed", summed)
    first.register_buffer("summed", summed)
    first.register_buffer("other", torch.zeros(100_000))  # keeps the addresses of the first loop valid
    with outofcore.budget(4 << 20, first, home="host", policy=None):
        pass
    if rank == 1:
        time.sleep(0.5)  # meanwhile the other rank opens the next loop
    work = dist.all_reduce(summed, async_op=True)
    with outofcore.budget(4 << 20, second, home="host", policy=None):
        assert work is not None
        work.wait()
        assert summed.eq(1).all()


def main() -> None:
    view, rank, store = sys.argv[1] == "1", int(sys.argv[2]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    theirs = train(rank, view)
    roomy, stats = train_within(1 << 30, rank, view)
    peak = stats.peak_bytes
    runs = [(roomy, 1 << 30)]
    for share, stress in ((0.3, False), (0.5, True)):
        ours, stats = train_within(int(share * peak), rank, view, stress=stress)
        assert stats.evictions > 0
        assert stats.peak_bytes <= share * peak
        runs.append((ours, int(share * peak)))
    for ours, budget in runs:
        for number, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
            same = actual.equal(expected) if isinstance(expected, torch.Tensor) else actual == expected
            assert same, f"rank {rank}, {budget} bytes: value {number} differs"
    request_during_collective(rank)
    collective_on_tensor_at_home(rank)
    collective_between_loops(rank)
    dist.destroy_process_group()
    print("same")


if __name__ == "__main__":
    main()
