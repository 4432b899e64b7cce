"""The training that ``outofcore.elastic`` returns: its steps, its data, who has which workers, and what lasts."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

import outofcore
from outofcore.errors import BudgetError, CaptureError, InputError, SpillError, StateError
from outofcore.graph import StorageKind
from outofcore.logical_workers.assignment import evenly, runs, shares
from outofcore.logical_workers.contexts import Context, SavedContext, generators_kept
from outofcore.logical_workers.contract import check_all_alike, kernel_facts, model_facts
from outofcore.logical_workers.gradients import Gradients, Tensors
from outofcore.logical_workers.loader import Course, Loader, Place, Samples, arguments, checked_order
from outofcore.logical_workers.ordered_sum import OrderedSum
from outofcore.logical_workers.processes import Meeting, Processes
from outofcore.logical_workers.saved import SavedTraining
from outofcore.logical_workers.stats import ElasticStats
from outofcore.logical_workers.turns import Turns

_log = logging.getLogger("outofcore")

# Of how many of the last steps the median time of a turn is taken.
_TIMED = 9


class Elastic:
    """A training with logical workers, of which some fall to this process: made by ``outofcore.elastic``.

    Called with ``{logical worker: batch}`` for each of ``workers``, it runs one step. A batch that is a tuple or list
    is given to the user's step as its arguments, a dict by name, and all else as the only argument. Between calls the
    model and the optimizers can be read, saved and evaluated as in plain PyTorch; gradients are cleared after each
    update. All processes have the same model at any time. A context manager: it closes the training.

    Attributes:
        step: the compiled step, for its reports: of a worker's turn or, after a call, of the update.
        steps: how many updates there were so far, those before a checkpoint included.

    Raises:
        InputError: processes differ in what has to be the same everywhere, or there are more than workers.
        StateError: the processes do not find together.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(8, 8)
    >>> def train_step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with outofcore.elastic(train_step, model, optimizer, workers=2, budget="1MiB") as run:
    ...     losses = run({worker: torch.ones(4, 8) for worker in run.workers})
    >>> run
    <outofcore elastic training: workers 0 to 1 of 2 in process 0 of 1, 1 steps>
    """

    def __init__(
        self,
        compiled: outofcore.Step[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        workers: int,
        seed: int,
        gpu: torch.device | None,
        processes: Processes,
    ) -> None:
        self.step = compiled
        self._count, self._gpu, self._processes = workers, gpu, processes
        self.steps = 0
        own = (p for model in models for p in model.parameters())
        others = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        parameters = list({id(p): p for p in chain(own, others)}.values())
        self._gradients = Gradients(parameters, compiled.home)
        self._may_add = True  # whether a turn may add its gradients to those of the one before
        self._timed: deque[float] = deque(maxlen=_TIMED)
        self._stats: ElasticStats | None = None
        self._facts = kernel_facts(workers, seed, gpu)
        if processes.count > 1:
            check_all_alike(processes.gather(self._facts | model_facts(models, optimizers, compiled.home)))
        self._ranges = evenly(workers, processes.count)
        self._sum = OrderedSum(processes)
        self._course = Course(gpu, {k: Context.beginning(seed, k, gpu) for k in self.workers})

    def __repr__(self) -> str:
        processes = self._processes
        return (
            f"<outofcore elastic training: workers {self.workers.start} to {self.workers.stop - 1} of {self._count} in "
            f"process {processes.rank} of {processes.count}, {self.steps} steps>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give model and optimizers memory of their own again, and leave the processes. May be called again."""
        self._gradients.kept.clear()
        self.step.close()
        self._processes.close()

    @property
    def workers(self) -> range:
        """The logical workers of this process."""
        return self._ranges[self._processes.rank]

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._processes.rank

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return self._processes.count

    @property
    def place(self) -> Place:
        """How far ``loader`` has used the data."""
        return self._course.place

    @property
    def stats(self) -> ElasticStats:
        """What the last step did in this process.

        Raises:
            StateError: there was none.
        """
        if self._stats is None:
            raise StateError("no step has been made yet: run(batches) makes one")
        return self._stats

    # A step

    def __call__(self, batches: Mapping[int, Any]) -> dict[int, Any]:
        """Run one step: a turn of each worker of this process, the sum over all processes, one update.

        Gradients are summed in the order of the workers and then divided by their number, once: with a loss that is a
        mean over a batch, this is the gradient of the mean over all batches, as with DDP.

        Args:
            batches: for each of ``workers`` its batch, and for no other.

        Returns:
            For each of ``workers`` what the user's step returns.

        Raises:
            InputError: a batch is missing, or is of a worker of another process; or a parameter has a gradient already.
                Nothing has been changed.
            StateError: another process has failed, has ended or does not answer. The model is as before the step.
            CaptureError, BudgetError, SpillError: as a compiled step. The model is as before the step.
            TransferError: a copy failed. The note on the error tells how the model is.
        """
        started, sent = time.perf_counter(), self._processes.bytes_sent
        turns = Turns()
        with contextlib.ExitStack() as undo:
            with self._processes.together("this step") as meeting:
                self._check_batches(batches)
                undo.callback(self._take_back, turns)
                with generators_kept(self._gpu):
                    losses, contexts = self._take_turns(batches, turns)
                self.step.prepare(True)
                meeting.steps, meeting.digest = self.steps, self._digest(turns)
                waited = time.perf_counter()
            self._check_alike(meeting)
            self._sum_gradients(turns)
            turns.share(self._processes)
            undo.pop_all()
        summed = time.perf_counter()
        self.step(True)
        self.steps += 1
        self._course.end_step(batches, contexts)
        self._timed.append(statistics.median(turns.seconds))
        now, size = time.perf_counter(), self._gradients.bytes
        self._stats = ElasticStats(
            seconds=now - started,
            turn_seconds=tuple(turns.seconds),
            switch_seconds=turns.switch_seconds,
            sum_seconds=summed - waited,
            update_seconds=now - summed,
            gradient_bytes=size,
            bytes_sent=self._processes.bytes_sent - sent,
            least_bytes=2 * (self.processes - 1) * size // self.processes,
        )
        return losses

    def _check_batches(self, batches: Mapping[int, Any]) -> None:
        given, wanted = set(batches), set(self.workers)
        if given != wanted:
            missing, strange = sorted(wanted - given), sorted(given - wanted, key=str)
            what = [f"none for worker {worker}" for worker in missing]
            what += [f"one for {worker!r}, which is not a worker of this process" for worker in strange]
            raise InputError(
                f"this process has the workers {list(self.workers)} and was given {', '.join(what)}; give a dict from "
                "each of run.workers to its batch, such as run.loader() yields"
            )
        if self._gradients.present():
            raise InputError(
                "parameters have gradients that no worker's turn has left, and they would be added to those of one "
                "process alone: clear them before (optimizer.zero_grad())"
            )

    def _take_turns(self, batches: Mapping[int, Any], turns: Turns) -> tuple[dict[int, Any], dict[int, Context]]:
        calls = {worker: arguments(batches[worker]) for worker in self.workers}
        begin = self._course.contexts_before(batches)
        for args, kwargs in calls.values():
            turns.note(self.step.prepare(False, *args, **kwargs))
        turns.begin()
        losses: dict[int, Any] = {}
        contexts: dict[int, Context] = {}
        mark = time.perf_counter()
        for number, (worker, (args, kwargs)) in enumerate(calls.items()):
            if number:
                if not self._adds_up(args, kwargs):
                    self._keep_gradients(number - 1, turns)
                turns.put_back()
            begin[worker].enter(self._gpu)
            began = time.perf_counter()
            turns.switch_seconds += began - mark
            losses[worker] = self.step(False, *args, **kwargs)
            mark = time.perf_counter()
            turns.seconds.append(mark - began)
            contexts[worker] = Context.now(self._gpu)
            if worker == 0:
                turns.leave()
        self._gradients.note_layout()
        turns.switch_seconds += time.perf_counter() - mark
        return losses, contexts

    def _adds_up(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the next turn may add its gradients to those in ``.grad``, as in plain PyTorch.

        It may at process 0, which has the first of all workers, if each gradient is added once: a step that goes
        backward twice would add in another order than where its worker is the first of a process. It also needs a plan,
        which may not fit the budget.
        """
        if self.rank > 0 or not self._may_add:
            return False
        try:
            captured: Any = self.step.prepare(False, *args, **kwargs)
        except (CaptureError, BudgetError, SpillError) as error:
            _log.info("gradients are put aside after each turn and added there: %s", error)
            self._may_add = False
            return False
        added = Counter(storage for op in captured.graph.ops for storage in op.mutates)
        found = [b for b in captured.states if b.kind is StorageKind.GRADIENT]
        self._may_add = not captured.gradients_left and all(
            added[captured.values[binding.value].storage] == 1 for binding in found
        )
        return self._may_add

    def _keep_gradients(self, number: int, turns: Turns) -> None:
        """Keep the gradients of a turn at home. At process 0 these are the first of all workers, and are added up."""
        before = self._gradients.layout
        if number and self._gradients.note_layout() is not before:
            raise StateError("the workers of one step leave gradients of different parameters, which cannot be summed")
        place = 0 if self.rank == 0 else number
        self._gradients.keep(place, add=place in turns.kept)
        if place not in turns.kept:
            turns.kept.append(place)

    def _digest(self, turns: Turns) -> int:
        """Return a number that differs where the gradients or the buffers of a step do."""
        layout = self._gradients.layout
        return crc32(repr((layout and layout.digest, turns.keys)).encode())

    def _check_alike(self, meeting: Meeting) -> None:
        others = [(rank, steps) for rank, (steps, _) in enumerate(meeting.told) if steps != meeting.steps]
        if others:
            raise StateError(
                f"process {others[0][0]} is at step {others[0][1]}, and this one at {meeting.steps}: an update failed; "
                "start all processes again and go on from the last checkpoint"
            )
        if any(digest != meeting.digest for _, digest in meeting.told):
            raise StateError(
                "the workers leave gradients of different parameters, or write different buffers, which cannot be "
                "summed: let the step do the same for every worker"
            )

    def _sum_gradients(self, turns: Turns) -> None:
        layout = self._gradients.note_layout()
        if self._count > 1:
            target, kept = self._gradients.tensors(), self._gradients.kept
            own: list[Tensors] = [*[kept[place] for place in turns.kept], target]
            self._sum(own, target, layout, self._count)

    def _take_back(self, turns: Turns) -> None:
        self._gradients.clear()
        turns.put_back()

    # Data

    def loader(
        self,
        dataset: Samples,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Loader:
        """Batches for the workers of this process: iterated over, the rest of an epoch from ``place`` on.

        The samples of each worker's batches are those that ``torch.utils.data.DistributedSampler`` gives to one of
        as many replicas, with ``drop_last=True``. A batch counts as used once ``run`` has been called with it, or the
        next is asked for. There is one place in the data, of which all loaders of a training know.

        Args:
            dataset: with ``__len__`` and ``__getitem__``. Random augmentation may use the generators of Python, NumPy
                and PyTorch: they are those of the worker.
            batch_size: samples of one worker's batch.
            seed: of the shuffling; one epoch's is this plus its number.
            shuffle: whether samples come in another order in each epoch.
            collate: makes a batch of a list of samples; by default ``torch.utils.data.default_collate``.

        Returns:
            The loader; its ``epoch`` counts the epochs used up, its length is that of a whole epoch.

        Raises:
            InputError: the dataset cannot be used so, or is gone through in another order than until now.
        """
        course = self._course
        order = checked_order(dataset, self._count, batch_size, seed, shuffle)
        if course.order is not None and order != course.order and course.place != Place():
            raise InputError(
                f"the training is in the middle of data that it goes through otherwise: {course.order}, and now "
                f"{order}; go on with what it began with"
            )
        course.order = order
        return Loader(course, dataset, order, collate)

    # Who has which workers

    def balance(self) -> range:
        """Distribute the workers again by the measured times of their turns, so that the slowest process ends soonest.

        All processes call it at the same time, between steps; the bits stay the same. Batches that ``loader`` has
        handed out and no step has used are drawn again.

        Returns:
            The workers of this process from now on.

        Raises:
            StateError: no step has been made yet, or another process does not answer.
        """
        if not self._timed:
            raise StateError("nothing is known yet of how long turns take: make a step first")
        told = self._processes.gather((statistics.median(self._timed), self._saved_contexts()))
        self._ranges = runs(shares(self._count, [seconds for seconds, _ in told]))
        everyone = {worker: context for _, contexts in told for worker, context in contexts.items()}
        self._course.restore({k: Context.restored(everyone[k]) for k in self.workers})
        self._gradients.kept.clear()
        _log.info("the workers are shared as %s", ", ".join(f"{len(one)}" for one in self._ranges))
        return self.workers

    def _saved_contexts(self) -> dict[int, SavedContext]:
        return {worker: context.saved() for worker, context in self._course.contexts.items()}

    # What lasts

    def save(self, folder: str | Path, extra: Any = None, *, frozen: bool = True) -> None:
        """Save the training; all processes must call it, and process 0 writes.

        An existing checkpoint in the folder counts until the new one is complete, however a save ends. It holds models,
        optimizers, the random generators of every worker and of process 0, and the place in the data; any number of
        processes can load it. ``outofcore.load`` reads its models and optimizers as well.

        Args:
            folder: as for ``Step.save``. Every process that will load it must see it.
            extra: plain data of yours, such as a scheduler's state dict; that of process 0 counts.
            frozen: False leaves out parameters that do not require gradients, as for ``Step.save``.

        Raises:
            StateError: something cannot be saved, or another process failed.
            TransferError: the system refuses a write; the previous checkpoint is still complete.
        """
        contexts = dict(chain(*(told.items() for told in self._processes.gather(self._saved_contexts()))))
        saved = SavedTraining.of(self._facts, self.steps, contexts, self._course)
        with self._processes.together("this save"):
            if self.rank == 0:
                self.step.save(folder, extra=saved.extra(extra), frozen=frozen)

    def load(self, folder: str | Path, *, exact: bool = True) -> Any:
        """Continue from a checkpoint, with the current number of processes; all of them must call it.

        Args:
            folder: that ``save`` was given.
            exact: refuse what would change the bits: another number of threads, another release of
                PyTorch, other kernels. False: only log it.

        Returns:
            What was saved as ``extra``; tuples come back as lists.

        Raises:
            InputError: there is no such checkpoint, or not of such a training; nothing has been changed.
            TransferError: a file cannot be read or is damaged; the step refuses to go on.
            StateError: another process could not load it.
        """
        with self._processes.together("this load"):
            saved, extra = SavedTraining.read(Path(folder))
            saved.check(Path(folder), self._count, self._facts, exact=exact)
        with self._processes.together("this load"):
            self.step.load(folder)
        self._gradients.clear()
        self.steps = saved.steps
        saved.restore(self._course, self.workers, self._count)
        return extra
