"""What a checkpoint has in addition to models and optimizers, and whether a training may go on from it."""

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
from outofcore.logical_workers.contract import difference
from outofcore.logical_workers.loader import Course, Order, Place

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
    """The part of a checkpoint that only a training with logical workers reads."""

    facts: dict[str, str]
    steps: int
    contexts: dict[str, SavedContext]
    place: _SavedPlace
    order: _SavedOrder | None

    @staticmethod
    def of(facts: dict[str, str], steps: int, contexts: Mapping[int, SavedContext], course: Course) -> SavedTraining:
        """Describe a training; ``contexts`` are of the workers of all processes."""
        order = course.order
        return SavedTraining(
            facts,
            steps,
            {str(worker): context for worker, context in contexts.items()},
            _SavedPlace(course.place.epoch, course.place.step),
            None if order is None else _SavedOrder(order.batch_size, order.length, order.seed, order.shuffle),
        )

    def extra(self, extra: Any) -> dict[str, Any]:
        """Return what to save along, with the user's own ``extra``."""
        return {_KEY: msgspec.to_builtins(self), "extra": extra}

    @staticmethod
    def read(folder: Path) -> tuple[SavedTraining, Any]:
        """Return what a checkpoint has, and the user's own ``extra``; raises ``InputError`` if it has not."""
        extra = outofcore.load(folder)
        if not isinstance(extra, dict) or _KEY not in extra:
            raise InputError(
                f"the checkpoint in {folder} was not saved by an elastic training: outofcore.load() takes its model "
                "and optimizers before outofcore.elastic() is called"
            )
        try:
            saved = msgspec.convert(extra[_KEY], SavedTraining)
            for one in saved.contexts.values():
                Context.restored(one)
        except (msgspec.ValidationError, ValueError) as error:
            raise InputError(f"what the checkpoint in {folder} says of its workers cannot be read: {error}") from error
        return saved, extra.get("extra")

    def check(self, folder: Path, workers: int, own: Mapping[str, str], *, exact: bool) -> None:
        """Refuse a checkpoint of another training; what would only change the bits is logged if not ``exact``."""
        facts, named = dict(self.facts), "logical workers"
        if facts.get(named) != str(workers) or self.contexts.keys() != {str(k) for k in range(workers)}:
            raise InputError(
                f"the checkpoint in {folder} is of {facts.get(named)} logical workers, and this training has "
                f"{workers}: begin it with workers={facts.get(named)}; processes there may be any number"
            )
        # What the workers drew is in their contexts: only how they began depends on the seed.
        facts["seed"] = own["seed"]
        found = difference(facts, own)
        if found is None:
            return
        name, before, now, advice = found
        if exact:
            raise InputError(
                f"{name}: the checkpoint in {folder} has {before}, and this process {now}; {advice}; or load it with "
                "exact=False, and get other bits from here on"
            )
        _log.warning("%s: was %s, is %s; from here on the bits are others than they would have been", name, before, now)

    def restore(self, course: Course, workers: range, count: int) -> None:
        """Bring the workers of a process to where they were; ``count`` is of all workers."""
        own = self.order
        course.place = Place(self.place.epoch, self.place.step)
        course.order = own and Order(count, own.batch_size, own.length, own.seed, own.shuffle)
        course.restore({k: Context.restored(self.contexts[str(k)]) for k in workers})
