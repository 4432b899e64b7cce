"""Lazy modules (``nn.LazyLinear`` and the like) whose first forward pass is that of the step.

They learn their shapes while the step is captured, and what they draw for their parameters becomes ops of the step.
So the first step initialises them with the random numbers with which plain PyTorch would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from outofcore._torch_internals import Feature, UninitializedTensorMixin, require, without_modes
from outofcore.capture.patching import patched

_HOOKS = ("_initialize_hook", "_load_hook")
_PLAIN = (int, float, bool, str, tuple)


@dataclass
class _Given:
    """A tensor that gets its shape in the step."""

    tensor: Any
    kind: type
    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


def lazy_modules(models: Sequence[nn.Module]) -> list[Any]:
    """The modules that have yet to learn their shapes."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [m for m in modules if isinstance(m, LazyModuleMixin) and m.has_uninitialized_params()]  # type: ignore[misc]


class LazyInitialisation:
    """What the capture of a step has found out of lazy modules; nothing has been changed until ``apply``."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._modules = lazy_modules(models)
        if self._modules:
            require(Feature.LAZY_MODULES)
        self._kinds = [type(module) for module in self._modules]
        self._before = [dict(vars(module)) for module in self._modules]
        self._after: list[tuple[type, dict[str, Any]]] = []
        self._given: list[_Given] = []
        self._handles: list[tuple[Any, dict[str, Any]]] = []

    def __bool__(self) -> bool:
        """Whether the step initialises anything."""
        return bool(self._given)

    @contextmanager
    def learning(self, mirror: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Give tensors memory as they learn their shapes, and hand them to ``mirror``."""
        if not self._modules:
            yield
            return
        materialize = UninitializedTensorMixin.materialize

        def learned(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
            with without_modes():
                kind, own = type(tensor), tensor.data
                materialize(tensor, shape, device, dtype)
                self._given.append(_Given(tensor, kind, tuple(tensor.shape), own.device, own.dtype))
                mirror(tensor)

        with patched(UninitializedTensorMixin, "materialize", learned):
            yield
        for module, before in zip(self._modules, self._before, strict=True):
            now = vars(module).items()
            changed = {k: v for k, v in now if isinstance(v, _PLAIN) and v is not before.get(k)}
            self._after.append((type(module), changed))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the modules initialised for a while, if they are not."""
        there = not any(is_lazy(given.tensor) for given in self._given)
        self.apply()
        try:
            yield
        finally:
            if not there:
                self.undo()

    def apply(self) -> None:
        """Do to the modules what their first forward pass does, but for the contents of their tensors."""
        for given in self._given:
            if is_lazy(given.tensor):
                given.tensor.materialize(given.shape)
        for module, (kind, changed) in zip(self._modules, self._after, strict=True):
            if kind is type(module):
                continue
            kept = {name: vars(module)[name] for name in _HOOKS if name in vars(module)}
            tables = {name: dict(vars(module)[name]) for name in ("_forward_pre_hooks", "_load_state_dict_pre_hooks")}
            self._handles.append((module, tables | kept))
            for name, handle in kept.items():
                handle.remove()
                delattr(module, name)
            vars(module).update(changed)
            module.__class__ = kind

    def undo(self) -> None:
        """Have the modules as they were before the step."""
        for given in self._given:
            if not is_lazy(given.tensor):
                with torch.no_grad():
                    given.tensor.data = torch.empty(0, device=given.device, dtype=given.dtype)
                given.tensor.__class__ = given.kind
        for module, tables in self._handles:
            for name, value in tables.items():
                if isinstance(value, dict):
                    vars(module)[name].update(value)
                else:
                    vars(module)[name] = value
        self._handles.clear()
        for module, kind, before in zip(self._modules, self._kinds, self._before, strict=True):
            module.__class__ = kind
            for name, value in before.items():
                if isinstance(value, _PLAIN):
                    vars(module)[name] = value
