"""Kernels compiled in processes of their own, for Inductor's cache, while this process compiles others.

Most of what a kernel takes is the compiler of C++, and the rest is Python, which does one thing at a time. So helpers,
each a fresh interpreter, compile recipes from the last one on, as this process does from the first one on. What they
have compiled lies in Inductor's cache on the disk, where this process finds it. They are a matter of time alone: one
that cannot start, or fails, leaves its recipes to this process, and whoever compiles a recipe gets the same kernel.

Limits: kernels for the CPU. Inductor compiles those for a GPU in processes of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch

from outofcore._torch_internals import OpOverload

if TYPE_CHECKING:
    from outofcore.capture.kernels import Recipe

# A helper imports PyTorch and its compiler first, which takes as long as two or three kernels do.
_EACH = 4
_MOST = 8


class _Pickler(pickle.Pickler):
    """Writes operators down by their names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, OpOverload):
            return _operator, (obj._schema.name, obj._overloadname)
        return NotImplemented


def _operator(name: str, overload: str) -> OpOverload:
    namespace, _, name = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def packed(recipes: Sequence[Recipe], threads: int) -> bytes:
    """Recipes, and all else that a helper has to know, as bytes."""
    settings = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    target = BytesIO()
    _Pickler(target).dump((tuple(recipes), threads, settings))
    return target.getvalue()


@contextlib.contextmanager
def compiling_ahead(recipes: Sequence[Recipe], threads: int, cores: int | None = None) -> Iterator[int]:
    """Have helpers compile recipes, from the last one on, until the block ends; gives how many helpers there are.

    Args:
        recipes: that the block compiles, from the first one on.
        threads: on how many the loops of a kernel run.
        cores: that may be used; None: those that this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    own = [recipe for recipe in recipes if recipe.device.type == "cpu"]
    count = min(cores - 1, len(own) // _EACH, _MOST)
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for first in range(count):
            share = own[len(own) - 1 - first :: -count]
            with contextlib.suppress(OSError, pickle.PicklingError):
                helpers.append(_started(packed(share, threads)))
        yield len(helpers)
    finally:
        for helper in helpers:
            helper.kill()
        for helper in helpers:
            helper.wait()


def _started(work: bytes) -> subprocess.Popen[bytes]:
    # By a file: a pipe would hold this process until the helper has come so far as to read it.
    with tempfile.TemporaryFile() as given:
        given.write(work)
        given.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def serve() -> None:
    """Compile what comes in by standard input: what a helper does."""
    # What writes down recipes does not start helpers that compile them, so neither imports the other at once.
    from outofcore.capture.kernels import compiled  # noqa: PLC0415

    recipes, threads, (dtype, deterministic) = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    for recipe in recipes:
        # The process that asked for it compiles it as well, and tells of the error.
        with contextlib.suppress(Exception):
            compiled(recipe, threads)
