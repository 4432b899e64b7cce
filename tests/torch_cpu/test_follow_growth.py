"""Tests that the records of a loop do not grow with its steps."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import NamedTuple

import pytest
import torch
from effort import some_of
from loops import LOOPS, adamw

import outofcore
from outofcore.follow.native import load_paging

pytestmark = pytest.mark.usefixtures("one_thread")

# As in history.h.
KEPT_OPS = 1 << 16


LOADED = ("loaded_by_workers", "6MiB", 4)


class Sizes(NamedTuple):
    """Counters of a loop, in the order of ``follow_sizes``."""

    pieces: int
    blocks: int
    placed: int
    parts: int
    finished: int
    outside: int
    ops: int
    storages: int
    uses: int
    home_bytes: int
    frozen_slots: int
    forks: int


def read_sizes(run: outofcore.Loop) -> Sizes:
    gc.collect()
    load_paging().follow_evict_all(run._space)
    counters = (ctypes.c_int64 * len(Sizes._fields))()
    load_paging().follow_sizes(run._space, counters)
    return Sizes(*counters)


@pytest.mark.parametrize(
    ("name", "budget", "rounds"),
    some_of([("lengths_vary", "7MiB", 6), LOADED], [LOADED]),
)
def test_records_of_a_loop_do_not_grow(name: str, budget: str, rounds: int) -> None:
    loop, model_of = LOOPS[name]
    torch.manual_seed(0)
    model = model_of()
    with outofcore.budget(budget, model) as run:
        snapshots: list[Sizes] = []
        for number in range(rounds):
            loop(model, adamw)  # with a new optimizer each time
            model.zero_grad()
            if number in (rounds // 3, rounds - 1):
                snapshots.append(read_sizes(run))
        assert run.stats.evictions > 100
    early, late = snapshots
    changing = {"ops": 0, "storages": 0, "uses": 0}
    assert late._replace(**changing) == early._replace(**changing)
    assert late.finished == late.frozen_slots == late.forks == 0
    assert late.ops <= KEPT_OPS
    assert late.storages <= late.uses <= 24 * KEPT_OPS


def test_home_does_not_grow_while_a_forked_child_lives() -> None:
    """Meanwhile other children come and go, like the workers of a second loader."""
    x = torch.ones(200, 200)
    with outofcore.budget("2MiB", home="host") as run:
        lasting = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(lasting[0], 1)
            os._exit(0)
        snapshots: list[Sizes] = []
        for _ in range(6):
            x.add_(1)
            load_paging().follow_evict_all(run._space)
            brief = os.fork()
            if brief == 0:
                os._exit(0)
            os.waitpid(brief, 0)
            snapshots.append(read_sizes(run))
        os.write(lasting[1], b"!")
        os.waitpid(child, 0)
    for end in lasting:
        os.close(end)
    assert snapshots[-1].home_bytes == snapshots[1].home_bytes
    assert snapshots[-1].forks == 1
    assert x.eq(7).all()


def test_history_of_ops_is_bounded() -> None:
    x = torch.ones(200, 200)
    with outofcore.budget("2MiB", home="host") as run:
        for _ in range(KEPT_OPS // 2):
            x = x.mul(1.0).neg_()
        assert read_sizes(run).ops == KEPT_OPS
        before = read_sizes(run)
        for _ in range(2000):
            x = x.mul(1.0).neg_()
        assert read_sizes(run) == before
