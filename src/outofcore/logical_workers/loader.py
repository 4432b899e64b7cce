"""The batches of every logical worker, in an order that does not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from outofcore.errors import InputError
from outofcore.logical_workers.contexts import Context, preserve_generators


class Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples, as of a ``DistributedSampler`` with one replica per worker and ``drop_last=True``."""

    workers: int
    batch_size: int  # of one worker
    length: int
    seed: int  # the number of the epoch is added to it
    shuffle: bool

    def __str__(self) -> str:
        shuffled = f"shuffled by seed {self.seed}" if self.shuffle else "not shuffled"
        return f"{self.length} samples in batches of {self.batch_size}, {shuffled}"

    @property
    def steps(self) -> int:
        """The number of full steps in an epoch; samples that do not fill a last step are left out."""
        return self.length // (self.workers * self.batch_size)

    def epoch_order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def sample_numbers(self, order: torch.Tensor, step: int, worker: int) -> list[int]:
        """Return the numbers of a worker's samples in a step of an epoch with this ``order``."""
        step_samples = self.workers * self.batch_size
        return order[step * step_samples : (step + 1) * step_samples][worker :: self.workers].tolist()


@dataclass(frozen=True)
class DataPosition:
    """A position in the data: an epoch, and the number of its steps that are done."""

    epoch: int = 0
    step: int = 0

    def after(self, order: SampleOrder) -> DataPosition:
        if self.step + 1 >= order.steps:
            return DataPosition(self.epoch + 1, 0)
        return replace(self, step=self.step + 1)


class WorkerProgress:
    """The workers of one process: their random generators, and their position in the data."""

    def __init__(self, gpu: torch.device | None, contexts: dict[int, Context]) -> None:
        self._gpu = gpu
        self.contexts = contexts  # after the last step of each worker
        self.order: SampleOrder | None = None  # None without a loader
        self.place = DataPosition()
        self._drawn: tuple[dict[int, Any], dict[int, Context]] | None = (
            None  # the last batches, and contexts after them
        )

    def draw_batches(self, batch_of: Callable[[int], Any]) -> dict[int, Any]:
        """Return a batch for each worker, made with the worker's own random generators."""
        batches: dict[int, Any] = {}
        drawn: dict[int, Context] = {}
        with preserve_generators(self._gpu):
            for worker, context in self.contexts.items():
                context.apply(self._gpu)
                batches[worker] = batch_of(worker)
                drawn[worker] = Context.capture(self._gpu)
        self._drawn = batches, drawn
        return batches

    def contexts_before(self, batches: object) -> dict[int, Context]:
        """Return the random states with which each worker begins a step on the batches."""
        return self._drawn[1] if self._drawn is not None and batches is self._drawn[0] else self.contexts

    def end_step(self, batches: object, contexts: dict[int, Context]) -> None:
        """Set the random states after a step; advance the position if the step's batches were drawn here."""
        if self._drawn is not None and batches is self._drawn[0] and self.order is not None:
            self.place = self.place.after(self.order)
        self.restore(contexts)

    def skip(self, batches: object) -> None:
        """Count the last drawn batches as used, unless a step has used them."""
        if self._drawn is not None and batches is self._drawn[0]:
            self.end_step(batches, self._drawn[1])

    def restore(self, contexts: dict[int, Context]) -> None:
        """Replace the random states, and discard batches that no step has used."""
        self.contexts, self._drawn = contexts, None


class Loader:
    """Yields the batches for the rest of an epoch, step by step; made by ``run.loader``.

    Each item is ``{logical worker: batch}`` for the workers of this process. Samples are read one step at a time, with
    the random generators of their worker, so that augmentation does not depend on the process. ``order`` is the order
    of the samples.
    """

    def __init__(
        self, progress: WorkerProgress, dataset: Samples, order: SampleOrder, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._progress = progress
        self._dataset = dataset
        self.order = order
        self._collate: Callable[[list[Any]], Any] = collate or default_collate

    @property
    def epoch(self) -> int:
        """The number of completed epochs, which is the number of the current epoch."""
        return self._progress.place.epoch

    def __len__(self) -> int:
        return self.order.steps

    def __iter__(self) -> Iterator[dict[int, Any]]:
        progress, epoch = self._progress, self._progress.place.epoch
        order = self.order.epoch_order(epoch)
        while progress.place.epoch == epoch:
            step = progress.place.step

            def batch_of(worker: int, step: int = step) -> Any:
                return self._collate(
                    [self._dataset[number] for number in self.order.sample_numbers(order, step, worker)]
                )

            batches = progress.draw_batches(batch_of)
            yield batches
            progress.skip(batches)


def make_order(dataset: Any, workers: int, batch_size: int, seed: int, shuffle: bool) -> SampleOrder:
    """Return the order of a dataset's samples; raise ``InputError`` for an unsuitable dataset."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"a dataset needs __len__ and __getitem__, but {type(dataset).__name__} lacks one of them; call run() with "
            "your own batches instead: a dict from each of run.workers to its batch"
        )
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    order = SampleOrder(workers, batch_size, len(dataset), seed, shuffle)
    if not order.steps:
        raise InputError(
            f"{order.length} samples are too few for one batch of {batch_size} for each of {workers} workers; use a "
            "smaller batch_size, or more samples"
        )
    return order


def step_arguments(batch: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Split a batch (a tuple, a list, a dict by name, or a single value) into positional and named arguments."""
    if isinstance(batch, tuple | list):
        return batch, {}
    if isinstance(batch, dict) and all(isinstance(name, str) for name in batch):
        return (), batch
    return (batch,), {}
