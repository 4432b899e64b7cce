"""Optimizer state as the user's optimizers have it, beside what was last shown to them."""

from __future__ import annotations

from itertools import repeat
from operator import is_, is_not
from typing import Any

import torch
from torch.optim import Optimizer

from outofcore.capture.captured import Captured, StateBinding
from outofcore.capture.optimizers import StateOwner
from outofcore.execution.state import StateKeeper

_NOTHING: dict[str, Any] = {}


class Owned:
    """Looks at all optimizer state of a capture at once, parameter by parameter, as it is done before every step."""

    def __init__(self, captured: Captured) -> None:
        together: dict[tuple[int, int], list[tuple[StateBinding, StateOwner]]] = {}
        for binding in captured.states:
            owner = binding.owner
            if isinstance(owner, StateOwner):
                together.setdefault((id(owner.optimizer), id(owner.parameter)), []).append((binding, owner))
        self._parameters: list[tuple[Optimizer, torch.Tensor, tuple[str, ...]]] = [
            (pairs[0][1].optimizer, pairs[0][1].parameter, tuple([owner.name for _, owner in pairs]))
            for pairs in together.values()
        ]
        self._pairs = [pair for pairs in together.values() for pair in pairs]
        self._bindings = [binding for binding, _ in self._pairs]

    def _live(self) -> list[torch.Tensor | None]:
        live: list[torch.Tensor | None] = []
        for optimizer, parameter, names in self._parameters:
            live += map(optimizer.state.get(parameter, _NOTHING).get, names)
        return live

    def any_gone(self) -> bool:
        """Whether an optimizer lacks state that a step has."""
        return not all(map(is_not, self._live(), repeat(None)))

    def replaced(self, keeper: StateKeeper) -> list[tuple[StateBinding, StateOwner, torch.Tensor | None]]:
        """Where optimizers have another tensor than the one that is shown, or None: with what they have."""
        live, shown = self._live(), list(map(keeper.tensor, self._bindings))
        if all(map(is_, live, shown)):
            return []
        triples = zip(self._pairs, live, shown, strict=True)
        return [(binding, owner, one) for (binding, owner), one, other in triples if one is not other]
