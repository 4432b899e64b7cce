"""The state that a logical worker has of its own: random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from outofcore.checkpoint.contents import SavedGenerators


class SavedContext(Struct):
    """A context as JSON: PyTorch's states are hexadecimal text."""

    plain: SavedGenerators
    torch: str
    device: str | None


@dataclass(frozen=True)
class Context:
    """The states of all generators of one logical worker; ``device`` is that of the step's GPU, None on the CPU."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def beginning(seed: int, worker: int, device: torch.device) -> Context:
        """Return the context of a worker that has not drawn anything yet.

        The seeds are independent of each other, by ``numpy.random.SeedSequence``.
        """
        numbers = [int(n) for n in np.random.SeedSequence([seed, worker]).generate_state(4, np.uint64)]
        numpy = np.random.RandomState(numbers[1] % 2**32).get_state(legacy=False)
        on_cpu = torch.Generator().manual_seed(numbers[2] >> 1).get_state()
        on_device = None
        if device.type != "cpu":
            on_device = torch.Generator(device).manual_seed(numbers[3] >> 1).get_state()
        return Context(random.Random(numbers[0]).getstate(), dict(numpy), on_cpu, on_device)

    @staticmethod
    def now(device: torch.device) -> Context:
        """Save the current states."""
        on_device = None if device.type == "cpu" else torch.cuda.get_rng_state(device)
        numpy: Any = np.random.get_state(legacy=False)
        return Context(random.getstate(), numpy, torch.get_rng_state(), on_device)

    def enter(self, device: torch.device) -> None:
        """Restore the states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None and device.type != "cpu":
            torch.cuda.set_rng_state(self.device, device)

    def plain(self) -> dict[str, Any]:
        """Convert to JSON."""
        state = self.numpy["state"]
        version, numbers, gauss = self.python
        return {
            "plain": {
                "python": {"version": version, "state": list(numbers), "gauss": gauss},
                "numpy": {
                    "kind": self.numpy["bit_generator"],
                    "key": [int(number) for number in state["key"]],
                    "position": int(state["pos"]),
                    "has_gauss": int(self.numpy["has_gauss"]),
                    "gauss": float(self.numpy["gauss"]),
                },
            },
            "torch": _hex(self.torch),
            "device": None if self.device is None else _hex(self.device),
        }

    @staticmethod
    def restored(saved: SavedContext) -> Context:
        """Convert from JSON; raises ``ValueError`` if text is not hexadecimal."""
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
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators at the end."""
    before = Context.now(device)
    try:
        yield
    finally:
        before.enter(device)


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
