"""What a step offers beside running: saving and loading the state that it works on."""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore.checkpoint.loading import Checkpoint
from outofcore.checkpoint.saving import save_checkpoint
from outofcore.errors import InputError, StateError
from outofcore.execution.opened import OpenHome
from outofcore.execution.state import StateKeeper

_log = logging.getLogger("outofcore")


class Lasting(ABC):
    """Models and optimizers between the calls of a step; what a step itself has to do is left open.

    Attributes:
        home: where what is not on the device lives; for ``compile(…, home=step.home)`` of another step over the
            same model.
    """

    home: OpenHome
    _keeper: StateKeeper
    _models: list[nn.Module]
    _optimizers: list[Optimizer]
    _torn: str  # why the model is part old and part new; empty: it is not
    _closed: bool
    _process: int  # that compiled the step

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """Keep the step from running meanwhile."""

    @abstractmethod
    def _forget_plans(self) -> None:
        """Capture and plan anew at the next call."""

    @abstractmethod
    def close(self) -> None:
        """Give everything its own memory again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refresh(self) -> None:
        """See what the user has put in place of what was shown."""
        changed = self._keeper.refresh()
        if changed is None:
            self._start_anew()
        elif changed:
            _log.info("taken over what was put in place of %s", ", ".join(changed))

    def _start_anew(self) -> None:
        """Forget all captures, because tensors are tied otherwise than they were."""
        _log.info("all that was captured is forgotten: tensors share memory otherwise than before")
        self._forget_plans()

    def save(self, folder: str | os.PathLike[str], extra: Any = None) -> None:
        """Save models, optimizers, gradients and random generators, streamed through a buffer of some MiB.

        A checkpoint that is in the folder counts until this one is whole on the disk: however a save ends,
        one of the two can be loaded. Between, the disk holds both.

        Args:
            folder: made if it does not exist. It gets safetensors files and ``checkpoint.json``, which names them.
            extra: plain data of yours (numbers, text, lists, dicts), such as an epoch or a scheduler's state dict.

        Raises:
            StateError: the step is closed or failed half way, or something cannot be saved.
            TransferError: the system refuses; the message says where and why.
        """
        with self._alone():
            self._check_usable()
            save_checkpoint(Path(folder), self._models, self._optimizers, self.home.faces, extra)

    def load(self, folder: str | os.PathLike[str]) -> Any:
        """Load a checkpoint; training then goes on, bit for bit, as it did after it was saved.

        A step that failed half way can be used again.

        Returns:
            what was saved as ``extra``; tuples come back as lists.

        Raises:
            InputError: there is no such checkpoint, or not of these models and optimizers; nothing has been changed.
            TransferError: a file cannot be read or is not as it was saved; the step refuses to go on.
            StateError: the step is closed.
        """
        with self._alone():
            self._check_usable_but_for_tears()
            checkpoint = Checkpoint(Path(folder))
            with self._state_made_anew():
                try:
                    checkpoint.load(self._models, self._optimizers, self.home.faces)
                except InputError:
                    raise
                except BaseException as error:
                    self._torn = f"{type(error).__name__}: {error}"
                    raise
            self._torn = ""
            return checkpoint.extra

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of models and optimizers, and the state of PyTorch's generator, as they are now.

        As in plain PyTorch their tensors are those of the model: clone what is to stay as it is. What lives on a disk
        is read from there as it is looked at; ``save`` needs less memory.

        Raises:
            StateError: the step is closed or failed half way.
        """
        with self._alone():
            self._check_usable()
            return {
                "models": [model.state_dict() for model in self._models],
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "generator": torch.get_rng_state(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; a step that failed half way can be used again.

        Raises:
            InputError: it is of other models or optimizers.
            StateError: the step is closed.
        """
        models, optimizers = state["models"], state["optimizers"]
        if (len(models), len(optimizers)) != (len(self._models), len(self._optimizers)):
            raise InputError(
                f"the state is of {len(models)} models and {len(optimizers)} optimizers, and the step has "
                f"{len(self._models)} and {len(self._optimizers)}"
            )
        with self._alone():
            self._check_usable_but_for_tears()
            with self._state_made_anew():
                for model, own in zip(self._models, models, strict=True):
                    model.load_state_dict(own)
                for optimizer, own in zip(self._optimizers, optimizers, strict=True):
                    optimizer.load_state_dict(own)
            torch.set_rng_state(state["generator"])
            self._torn = ""

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"this step belongs to process {self._process}, of which this one ({os.getpid()}) is a fork: its copy "
                "threads are not here; call it there, or compile a step in this process"
            )
        if self._closed:
            raise StateError("this step is closed; compile it again to go on")
        if self._torn:
            raise StateError(
                "an earlier call of this step failed half way, so that the model is part old and part new "
                f"({self._torn}); load a checkpoint with step.load(), or into the model and compile the step again"
            )

    def _check_usable_but_for_tears(self) -> None:
        torn, self._torn = self._torn, ""
        try:
            self._check_usable()
        finally:
            self._torn = torn

    @contextlib.contextmanager
    def _state_made_anew(self) -> Iterator[None]:
        """See whether optimizers lose their state: memory to make it is planned for the first step alone."""
        had = [bool(optimizer.state) for optimizer in self._optimizers]
        yield
        if any(before and not o.state for before, o in zip(had, self._optimizers, strict=True)):
            self._forget_plans()
