"""Compile CPU kernels in helper processes while this process compiles others.

Helpers start with the last recipe and this process with the first; they share Inductor's cache on disk. If a helper
fails, this process compiles its recipes. Inductor compiles GPU kernels in its own processes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from outofcore.capture.helpers import pack_work, receive_work
from outofcore.child_processes import start_process

if TYPE_CHECKING:
    from outofcore.transforms.kernels import Recipe

# Importing PyTorch and Inductor takes a helper as long as compiling two or three kernels.
_RECIPES_PER_HELPER = 4
_MAX_HELPERS = 8


@contextlib.contextmanager
def compile_ahead(recipes: Sequence[Recipe], threads: int, cores: int | None = None) -> Iterator[int]:
    """Compile CPU kernels in helper processes while the block runs; yield the number of processes."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    cpu_recipes = [recipe for recipe in recipes if recipe.device.type == "cpu"]
    count = min(cores - 1, len(cpu_recipes) // _RECIPES_PER_HELPER, _MAX_HELPERS)
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for first in range(count):
            # The last recipes first, because the caller begins with the first ones.
            share = cpu_recipes[len(cpu_recipes) - 1 - first :: -count]
            with contextlib.suppress(OSError, pickle.PicklingError):
                helpers.append(start_process(f"{__name__}:serve", pack_work(tuple(share), threads)))
        yield len(helpers)
    finally:
        for helper in helpers:
            helper.kill()
        for helper in helpers:
            helper.wait()


def serve() -> None:
    """Compile the kernel recipes from standard input: the main function of a helper process."""
    # `kernels` imports this module.
    from outofcore.transforms.kernels import compile_recipe  # noqa: PLC0415

    for recipe in receive_work():
        # The parent process compiles the recipe, too, and reports the error.
        with contextlib.suppress(Exception):
            compile_recipe(recipe, torch.get_num_threads())
