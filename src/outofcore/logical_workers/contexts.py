"""The state of a logical worker: random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta, Struct

_Count = Annotated[int, Meta(ge=0, le=2**62)]


class _Python(Struct):
    version: int
    state: list[int]
    gauss: float | None


class _Numpy(Struct):
    kind: str
    key: list[Annotated[int, Meta(ge=0, lt=2**32)]]
    position: _Count
    has_gauss: _Count
    gauss: float


class _Plain(Struct):
    python: _Python
    numpy: _Numpy


class SavedContext(Struct):
    """The random states of a worker in a checkpoint; PyTorch's states are hexadecimal text."""

    plain: _Plain
    torch: str
    device: str | None


@dataclass(frozen=True)
class Context:
    """The states of all random generators of one logical worker."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    gpu: torch.Tensor | None  # of the step's GPU; None on the CPU

    @staticmethod
    def initial(seed: int, worker: int, gpu: torch.device | None) -> Context:
        """Return the initial random states of a worker, derived from the seed and the worker's number."""
        numbers = [int(n) for n in np.random.SeedSequence([seed, worker]).generate_state(4, np.uint64)]
        numpy = np.random.RandomState(numbers[1] % 2**32).get_state(legacy=False)
        on_cpu = torch.Generator().manual_seed(numbers[2] >> 1).get_state()
        on_gpu = None if gpu is None else torch.Generator(gpu).manual_seed(numbers[3] >> 1).get_state()
        return Context(random.Random(numbers[0]).getstate(), dict(numpy), on_cpu, on_gpu)

    @staticmethod
    def capture(gpu: torch.device | None) -> Context:
        on_gpu = None if gpu is None else torch.cuda.get_rng_state(gpu)
        numpy: Any = np.random.get_state(legacy=False)
        return Context(random.getstate(), numpy, torch.get_rng_state(), on_gpu)

    def apply(self, gpu: torch.device | None) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.gpu is not None and gpu is not None:
            torch.cuda.set_rng_state(self.gpu, gpu)

    def to_saved(self) -> SavedContext:
        state = self.numpy["state"]
        version, numbers, gauss = self.python
        numpy = _Numpy(
            self.numpy["bit_generator"],
            [int(number) for number in state["key"]],
            int(state["pos"]),
            int(self.numpy["has_gauss"]),
            float(self.numpy["gauss"]),
        )
        on_gpu = None if self.gpu is None else _hex(self.gpu)
        return SavedContext(_Plain(_Python(version, list(numbers), gauss), numpy), _hex(self.torch), on_gpu)

    @staticmethod
    def from_saved(saved: SavedContext) -> Context:
        python, numpy = saved.plain.python, saved.plain.numpy
        return Context(
            (python.version, tuple(python.state), python.gauss),
            {
                "bit_generator": numpy.kind,
                "state": {"key": np.array(numpy.key, dtype=np.uint32), "pos": numpy.position},
                "has_gauss": numpy.has_gauss,
                "gauss": numpy.gauss,
            },
            _bytes(saved.torch),
            None if saved.device is None else _bytes(saved.device),
        )


@contextlib.contextmanager
def preserve_generators(gpu: torch.device | None) -> Iterator[None]:
    before = Context.capture(gpu)
    try:
        yield
    finally:
        before.apply(gpu)


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
