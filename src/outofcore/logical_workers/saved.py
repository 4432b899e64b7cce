"""The part of a checkpoint that describes logical workers, and whether a training may resume it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import outofcore
from outofcore.errors import InputError
from outofcore.logical_workers.contexts import Context, SavedContext
from outofcore.logical_workers.contract import first_difference
from outofcore.logical_workers.loader import DataPosition, SampleOrder, WorkerProgress

_log = logging.getLogger("outofcore")

_KEY = "elastic"


class _SavedPlace(Struct):
    epoch: int
    step: int


class _SavedOrder(Struct):
    batch_size: int
    length: int
    seed: int
    shuffle: bool


class SavedTraining(Struct):
    """The part of a checkpoint for logical workers: facts, steps, random states, and the position in the data."""

    facts: dict[str, str]
    steps: int
    contexts: dict[str, SavedContext]
    place: _SavedPlace
    order: _SavedOrder | None

    @staticmethod
    def of(
        facts: dict[str, str], steps: int, contexts: Mapping[int, SavedContext], progress: WorkerProgress
    ) -> SavedTraining:
        order = progress.order
        return SavedTraining(
            facts,
            steps,
            {str(worker): context for worker, context in contexts.items()},
            _SavedPlace(progress.place.epoch, progress.place.step),
            None if order is None else _SavedOrder(order.batch_size, order.length, order.seed, order.shuffle),
        )

    def extra(self, extra: Any) -> dict[str, Any]:
        """Return the value to save as the checkpoint's ``extra``: this part and the user's own."""
        return {_KEY: msgspec.to_builtins(self), "extra": extra}

    @staticmethod
    def read(folder: Path) -> tuple[SavedTraining, Any]:
        """Read this part and the user's ``extra`` from a checkpoint; raise ``InputError`` if they cannot be read."""
        extra = outofcore.load(folder)
        if not isinstance(extra, dict) or _KEY not in extra:
            raise InputError(
                f"the checkpoint in {folder} was not saved by an elastic training: load its model and optimizers with "
                "outofcore.load() before you call outofcore.elastic()"
            )
        try:
            saved = msgspec.convert(extra[_KEY], SavedTraining)
            for context in saved.contexts.values():
                Context.from_saved(context)
        except (msgspec.ValidationError, ValueError) as error:
            raise InputError(
                f"the logical workers of the checkpoint in {folder} cannot be read: {error}; load another checkpoint"
            ) from error
        return saved, extra.get("extra")

    def check_compatible(self, folder: Path, workers: int, current_facts: Mapping[str, str], *, exact: bool) -> None:
        """Raise ``InputError`` if the number of workers or, with ``exact``, a fact that decides the bits differs."""
        facts, key = dict(self.facts), "logical workers"
        if facts.get(key) != str(workers) or self.contexts.keys() != {str(k) for k in range(workers)}:
            raise InputError(
                f"the checkpoint in {folder} has {facts.get(key)} logical workers, but this training has "
                f"{workers}: start it with workers={facts.get(key)}, on any number of processes"
            )
        # The seed decides only the first contexts, and saved contexts replace them.
        facts["seed"] = current_facts["seed"]
        mismatch = first_difference(facts, current_facts)
        if mismatch is None:
            return
        name, before, now, advice = mismatch
        if exact:
            raise InputError(
                f"{name}: the checkpoint in {folder} has {before}, but this process has {now}; {advice}; or load "
                "it with exact=False, which changes the bits of later steps"
            )
        _log.warning("%s was %s and is now %s; the bits of later steps change", name, before, now)

    def restore(self, progress: WorkerProgress, workers: range, worker_count: int) -> None:
        """Restore the saved position in the data, and the random states of ``workers``, in ``progress``."""
        saved_order = self.order
        progress.place = DataPosition(self.place.epoch, self.place.step)
        progress.order = saved_order and SampleOrder(
            worker_count, saved_order.batch_size, saved_order.length, saved_order.seed, saved_order.shuffle
        )
        progress.restore({k: Context.from_saved(self.contexts[str(k)]) for k in workers})
