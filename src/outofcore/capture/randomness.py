"""Saves, restores and seeds of the default generators inside a step, as ops of the graph.

Activation checkpointing keeps the generator's state before a forward and sets it again before the
same forward runs once more in backward. While a step is captured no generator moves, so what is
handed out is a token; when the step runs, the ops do what the calls would have done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outofcore.capture.patching import patched
from outofcore.capture.recorder import Recorder
from outofcore.capture.refusals import refusal


class GeneratorState:
    """The state of a default generator at one place of the step: what ``get_rng_state`` returns in a capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state: torch.Tensor | None = None

    def save(self) -> None:
        """Take the generator's state as it is now."""
        self._state = _generator(self._device).get_state()

    def restore(self) -> None:
        """Set the generator to the state saved last in this step."""
        if self._state is not None:
            _generator(self._device).set_state(self._state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(
            f"the step computes with the state of a random generator (.{name})",
            "there is no state to read while the step is captured",
            "only hand it to set_rng_state",
        )


class _Seed:
    """Seeds a default generator."""

    def __init__(self, seed: int, seeder: Callable[[int], Any]) -> None:
        self._seed = seed
        self._seeder = seeder

    def apply(self) -> None:
        self._seeder(self._seed)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def generators_on(device: torch.device) -> tuple[torch.Generator, ...]:
    """The default generators that a step on a device may draw from: its own, and that of the CPU."""
    own = _generator(device)
    return (own,) if own is torch.default_generator else (own, torch.default_generator)


def _nothing() -> None:
    """Stands in for a change of a generator where an op is only measured."""


def _cuda_device(device: int | str | torch.device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


@contextlib.contextmanager
def recorded_generators(recorder: Recorder) -> Iterator[None]:
    """Record every save, restore and seed of a default generator."""

    def get(device: torch.device) -> GeneratorState:
        slot = GeneratorState(device)
        recorder.effect(f"generator.save.{device.type}", slot.save, _nothing)
        return slot

    def put(state: Any, device: torch.device) -> None:
        if not isinstance(state, GeneratorState):
            raise refusal(
                "the step sets a random generator to a state from outside",
                "the same numbers would be drawn in every step",
                "call torch.set_rng_state before the step",
            )
        recorder.effect(f"generator.restore.{device.type}", state.restore, _nothing)

    def seed(seeder: Callable[[int], Any]) -> Callable[[int], torch.Generator]:
        def seeded(seed: int) -> torch.Generator:
            recorder.effect("generator.seed", _Seed(int(seed), seeder).apply, _nothing)
            return torch.default_generator

        return seeded

    def fresh_seed() -> int:
        raise refusal("the step calls torch.seed()", "the seed is unknown while the step is captured", "seed before it")

    cpu = torch.device("cpu")
    seed_all, seed_cuda, seed_all_cuda = map(
        seed, (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all)
    )
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(patched(module, "get_rng_state", lambda: get(cpu)))
            stack.enter_context(patched(module, "set_rng_state", lambda new_state: put(new_state, cpu)))
            stack.enter_context(patched(module, "manual_seed", seed_all))
            stack.enter_context(patched(module, "seed", fresh_seed))
        for module in (torch.cuda, torch.cuda.random):
            stack.enter_context(patched(module, "get_rng_state", lambda device="cuda": get(_cuda_device(device))))
            stack.enter_context(
                patched(module, "set_rng_state", lambda new_state, device="cuda": put(new_state, _cuda_device(device)))
            )
            stack.enter_context(patched(module, "manual_seed", seed_cuda))
            stack.enter_context(patched(module, "manual_seed_all", seed_all_cuda))
        yield
