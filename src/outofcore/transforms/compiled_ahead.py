"""Compile kernels in helper processes, for Inductor's cache, while this process compiles others.

A kernel's time goes to the C++ compiler and to Python, which runs one thread at a time. So helpers compile recipes from
the last one on, and this process from the first one on; Inductor's cache on disk joins the two. A helper that fails
leaves its recipes to this process, which gets the same kernels.

Limits: kernels for the CPU. Inductor compiles those for a GPU in processes of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from outofcore.capture.helpers import packed, received
from outofcore.child_processes import start_process

if TYPE_CHECKING:
    from outofcore.transforms.kernels import Recipe

# A helper imports PyTorch and its compiler first, which takes as long as two or three kernels do.
_EACH = 4
_MOST = 8


@contextlib.contextmanager
def compiling_ahead(recipes: Sequence[Recipe], threads: int, cores: int | None = None) -> Iterator[int]:
    """Have helpers compile recipes from the last one on until the block ends; yields the number of helpers.

    The block compiles the same recipes from the first one on. ``cores`` defaults to those that this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    own = [recipe for recipe in recipes if recipe.device.type == "cpu"]
    count = min(cores - 1, len(own) // _EACH, _MOST)
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for first in range(count):
            share = own[len(own) - 1 - first :: -count]
            with contextlib.suppress(OSError, pickle.PicklingError):
                helpers.append(start_process(f"{__name__}:serve", packed(tuple(share), threads)))
        yield len(helpers)
    finally:
        for helper in helpers:
            helper.kill()
        for helper in helpers:
            helper.wait()


def serve() -> None:
    """Compile the recipes that come in by standard input: the main function of a helper."""
    # What writes down recipes does not start helpers that compile them, so neither imports the other at once.
    from outofcore.transforms.kernels import compiled  # noqa: PLC0415

    for recipe in received():
        # The process that asked for it compiles it as well, and tells of the error.
        with contextlib.suppress(Exception):
            compiled(recipe, torch.get_num_threads())
