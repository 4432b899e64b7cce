"""Persistent state of a compiled step: saving, loading, and state dicts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from outofcore.checkpoint.loading import Checkpoint
from outofcore.checkpoint.saving import save_checkpoint
from outofcore.errors import InputError, StateError
from outofcore.execution.opening import OpenHome
from outofcore.options import UserStep
from outofcore.session import Session


class StepState:
    """Saves and loads the persistent state of a step. A load that fails half way marks the session torn."""

    def __init__(self, user: UserStep[..., Any], home: OpenHome, session: Session) -> None:
        self._user, self._home, self._session = user, home, session

    def save(self, folder: Path, extra: Any, *, frozen: bool) -> None:
        """Save a checkpoint, together with the processes that share the models."""
        user = self._user
        self._session.spread()
        written = self._session.steps.written_tensors()
        home_tensors, shards = self._home.home_tensors, user.shards
        save_checkpoint(
            folder, user.models, user.optimizers, home_tensors, extra, shards, frozen=frozen, written=written
        )

    def load(self, folder: Path) -> Any:
        """Load a checkpoint in all processes, or in no process if one rejects the files; return its ``extra`` data."""
        user = self._user
        if user.shards is not None and not user.shards.is_sharded:
            self._session.spread()
        with ExitStack[None]() as ends:
            ends.push(self._fail_together)
            checkpoint = Checkpoint(folder)
        with self._forget_plans_if_state_is_lost(), ExitStack[None]() as ends:
            ends.push(self._mark_torn)
            ends.push(self._fail_together)
            checkpoint.load(user.models, user.optimizers, self._home.home_tensors, user.shards)
        self._session.torn = ""
        return checkpoint.extra

    def _fail_together(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise the error of this or another process in all processes that share the models."""
        if self._user.shards is not None:
            self._user.shards.raise_any_error(error, "load the checkpoint")

    def _mark_torn(self, _: object, error: BaseException | None, __: object) -> None:
        """Mark the session torn if a load failed in any process after it may have changed tensors."""
        if error is not None and not isinstance(error, InputError):
            self._session.torn = f"{type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        self._check_whole("step.state_dict()")
        return {
            "models": [model.state_dict() for model in self._user.models],
            "optimizers": [optimizer.state_dict() for optimizer in self._user.optimizers],
            "generator": torch.get_rng_state(),
        }

    def check_counts(self, state: dict[str, Any]) -> None:
        """Raise ``InputError`` if a state has other numbers of models or optimizers than the step."""
        models, optimizers = self._user.models, self._user.optimizers
        if (len(state["models"]), len(state["optimizers"])) != (len(models), len(optimizers)):
            raise InputError(
                f"the state has {len(state['models'])} models and {len(state['optimizers'])} optimizers, but the "
                f"step has {len(models)} and {len(optimizers)}; pass the state_dict() of the same step"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of models, optimizers and PyTorch's generator; raise ``StateError`` for a sharded model."""
        self._check_whole("step.load_state_dict()")
        with self._forget_plans_if_state_is_lost():
            for model, saved in zip(self._user.models, state["models"], strict=True):
                model.load_state_dict(saved)
            for optimizer, saved in zip(self._user.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        torch.set_rng_state(state["generator"])
        self._session.torn = ""

    def _check_whole(self, call: str) -> None:
        """Raise ``StateError``, which names the user's ``call``, if the model is sharded."""
        shards = self._user.shards
        if shards is not None and shards.is_sharded:
            raise StateError(
                f"{call} needs the whole model in one process, but it is sharded over {shards.group.size()}: use "
                "step.save() and step.load(), or close the step first"
            )

    @contextmanager
    def _forget_plans_if_state_is_lost(self) -> Generator[None]:
        """Forget all plans if an optimizer loses its state while the context is active."""
        optimizers = self._user.optimizers
        had_state = [bool(optimizer.state) for optimizer in optimizers]
        yield
        # The plans have no room to create the state again.
        if any(had and not o.state for had, o in zip(had_state, optimizers, strict=True)):
            self._session.forget_plans()
