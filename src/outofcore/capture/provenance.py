"""Which module, and which line of the user's code, an op comes from, in forward and in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from outofcore._torch_internals import autograd_sequence_number, current_autograd_node, node_sequence_number
from outofcore.capture.location import user_line
from outofcore.capture.patching import patched


def module_paths(models: Sequence[nn.Module]) -> dict[int, str]:
    """The path of each module, by its id: as ``named_modules`` gives it, under a prefix if the models are several."""
    paths: dict[int, str] = {}
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            paths.setdefault(id(module), join(prefix(index, len(models)), path))
    return paths


def prefix(index: int, count: int) -> str:
    """What the names in a model begin with: nothing for a single model."""
    return "" if count == 1 else f"model{index}"


def join(*parts: str) -> str:
    """A dotted path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


class Provenance:
    """Follows the modules that run, and the autograd nodes that their ops make.

    A node of the autograd graph carries a number that is drawn from a counter of the thread. The op
    dispatched next after a node was made is the op that the node differentiates, so the module and
    line of a backward op are those found under its node's number.
    """

    def __init__(self, models: Sequence[nn.Module], parameter_names: dict[int, str]) -> None:
        """``parameter_names`` gives the name of a parameter by the id of its fake."""
        self._paths = module_paths(models)
        self._parameters = parameter_names
        self._running: list[str] = []
        self._origin: dict[int, tuple[str, str]] = {}
        self._outside_backward = [0]

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """See every module that is called."""
        original = nn.Module.__call__
        paths, running = self._paths, self._running

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            running.append(path)
            try:
                return original(module, *args, **kwargs)
            finally:
                running.pop()

        with patched(nn.Module, "__call__", call):
            yield

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Tell apart what autograd runs from modules that run again inside of it, as checkpointing does."""
        self._outside_backward.append(len(self._running))
        try:
            yield
        finally:
            self._outside_backward.pop()

    def here(self) -> tuple[str, str]:
        """The module path and the user's ``file:line`` of the op being dispatched."""
        node = current_autograd_node()
        if node is not None and len(self._running) == self._outside_backward[-1]:
            return self._of_node(node)
        origin = (self._running[-1] if self._running else "", user_line())
        self._origin.setdefault(autograd_sequence_number() - 1, origin)
        return origin

    def _of_node(self, node: Any) -> tuple[str, str]:
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            owner = self._parameters.get(id(variable), "").rpartition(".")[0]
            return owner, user_line()
        origin = self._origin.get(node_sequence_number(node))
        return origin if origin is not None else ("", user_line())
