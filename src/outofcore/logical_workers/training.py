"""The training that ``outofcore.elastic`` returns: steps, data, assignment of workers, checkpoints."""

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
from outofcore.logical_workers.assignment import even_ranges, shares, worker_ranges
from outofcore.logical_workers.contexts import Context, SavedContext, preserve_generators
from outofcore.logical_workers.contract import check_facts_match, kernel_facts, model_facts
from outofcore.logical_workers.gradients import Gradients, TensorRows
from outofcore.logical_workers.loader import DataPosition, Loader, Samples, WorkerProgress, make_order, step_arguments
from outofcore.logical_workers.ordered_sum import OrderedSum
from outofcore.logical_workers.processes import StepComparison, WorkerProcesses
from outofcore.logical_workers.saved import SavedTraining
from outofcore.logical_workers.stats import ElasticStats
from outofcore.logical_workers.turns import Turns

_log = logging.getLogger("outofcore")

# The number of recent steps for the median time of a turn.
_TIMED_STEPS = 9


class Elastic:
    """A training with logical workers, some of which run in this process; made by ``outofcore.elastic``.

    A call with ``{logical worker: batch}`` for each of ``workers`` runs one step. A batch that is a tuple or list is
    passed to the user's step as positional arguments, a dict by name, and any other value as the only argument. Between
    calls the model and the optimizers can be read, saved and evaluated as in plain PyTorch; gradients are cleared after
    each update. All processes always have the same model. As a context manager, it closes the training.

    Attributes:
        step: the compiled step, for its reports: of a worker's turn or, after a call, of the update.
        steps: number of updates so far, including those before a checkpoint.

    Raises:
        InputError: processes differ in a fact that must be equal, or there are more processes than workers.
        StateError: the processes do not find each other.

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
        processes: WorkerProcesses,
    ) -> None:
        self.step = compiled
        self._worker_count, self._gpu, self._processes = workers, gpu, processes
        self.steps = 0
        model_parameters = (p for model in models for p in model.parameters())
        optimizer_parameters = (
            p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        )
        parameters = list({id(p): p for p in chain(model_parameters, optimizer_parameters)}.values())
        self._gradients = Gradients(parameters, compiled.home)
        self._accumulates = True  # whether a turn may add to the gradients of the previous turn
        self._timed: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._stats: ElasticStats | None = None
        self._facts = kernel_facts(workers, seed, gpu)
        if processes.count > 1:
            check_facts_match(processes.gather(self._facts | model_facts(models, optimizers, compiled.home)))
        self._ranges = even_ranges(workers, processes.count)
        self._sum = OrderedSum(processes)
        self._progress = WorkerProgress(gpu, {k: Context.initial(seed, k, gpu) for k in self.workers})

    def __repr__(self) -> str:
        processes = self._processes
        return (
            f"<outofcore elastic training: workers {self.workers.start} to {self.workers.stop - 1} of "
            f"{self._worker_count} in process {processes.rank} of {processes.count}, {self.steps} steps>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give model and optimizers their own memory, and leave the processes. May be called repeatedly."""
        self._gradients.stored.clear()
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
        """The number of processes."""
        return self._processes.count

    @property
    def place(self) -> DataPosition:
        """The position of ``loader`` in the data."""
        return self._progress.place

    @property
    def stats(self) -> ElasticStats:
        """Statistics of the last step in this process.

        Raises:
            StateError: there was no step.
        """
        if self._stats is None:
            raise StateError("no step has been made yet; make one with run(batches)")
        return self._stats

    # A step

    def __call__(self, batches: Mapping[int, Any]) -> dict[int, Any]:
        """Run one step: a turn of each worker of this process, the sum over all processes, one update.

        Gradients are summed in the order of the workers and then divided once by their number. With a loss that is a
        mean over a batch, this is the gradient of the mean over all batches, as with DDP.

        Args:
            batches: a batch for each of ``workers``, and for no other.

        Returns:
            The result of the user's step for each of ``workers``.

        Raises:
            InputError: a batch is missing, or is of a worker of another process; or a parameter already has a gradient.
                The state is unchanged.
            StateError: another process has failed, has ended or does not answer. The model is as before the step.
            CaptureError, BudgetError, SpillError: as a compiled step. The model is as before the step.
            TransferError: a copy failed. The note on the error describes the state of the model.
        """
        started, sent = time.perf_counter(), self._processes.bytes_sent
        turns = Turns()
        with contextlib.ExitStack() as undo:
            with self._processes.synchronized("this step") as comparison:
                self._check_batches(batches)
                undo.callback(self._undo_turns, turns)
                with preserve_generators(self._gpu):
                    losses, contexts = self._take_turns(batches, turns)
                self.step.prepare(True)
                comparison.steps, comparison.digest = self.steps, self._digest(turns)
                waited = time.perf_counter()
            self._check_comparison(comparison)
            self._sum_gradients(turns)
            turns.broadcast(self._processes)
            undo.pop_all()
        summed = time.perf_counter()
        self.step(True)
        self.steps += 1
        self._progress.end_step(batches, contexts)
        self._timed.append(statistics.median(turns.seconds))
        now, gradient_bytes = time.perf_counter(), self._gradients.bytes
        self._stats = ElasticStats(
            seconds=now - started,
            turn_seconds=tuple(turns.seconds),
            switch_seconds=turns.switch_seconds,
            sum_seconds=summed - waited,
            update_seconds=now - summed,
            gradient_bytes=gradient_bytes,
            bytes_sent=self._processes.bytes_sent - sent,
            least_bytes=2 * (self.processes - 1) * gradient_bytes // self.processes,
        )
        return losses

    def _check_batches(self, batches: Mapping[int, Any]) -> None:
        """Raise ``InputError`` if a batch is missing or unexpected, or if parameters already have gradients."""
        given_workers, own_workers = set(batches), set(self.workers)
        if given_workers != own_workers:
            missing, foreign = sorted(own_workers - given_workers), sorted(given_workers - own_workers, key=str)
            problems = [f"no batch for worker {worker}" for worker in missing]
            problems += [f"a batch for {worker!r}, which is not a worker of this process" for worker in foreign]
            raise InputError(
                f"this process has the workers {list(self.workers)}, but got {', '.join(problems)}; pass a dict from "
                "each of run.workers to its batch, such as run.loader() yields"
            )
        if self._gradients.current():
            raise InputError(
                "parameters already have gradients, which would count in one process only; clear them first with "
                "optimizer.zero_grad()"
            )

    def _take_turns(self, batches: Mapping[int, Any], turns: Turns) -> tuple[dict[int, Any], dict[int, Context]]:
        """Run a turn of each worker; return the results and the random states after the turns, by worker."""
        calls = {worker: step_arguments(batches[worker]) for worker in self.workers}
        first_contexts = self._progress.contexts_before(batches)
        for args, kwargs in calls.values():
            turns.find_buffers(self.step.prepare(False, *args, **kwargs))
        turns.save_initial()
        losses: dict[int, Any] = {}
        contexts: dict[int, Context] = {}
        idle_since = time.perf_counter()
        for number, (worker, (args, kwargs)) in enumerate(calls.items()):
            if number:
                if not self._can_accumulate(args, kwargs):
                    self._store_gradients(number - 1, turns)
                turns.restore_buffers()
            first_contexts[worker].apply(self._gpu)
            began = time.perf_counter()
            turns.switch_seconds += began - idle_since
            losses[worker] = self.step(False, *args, **kwargs)
            idle_since = time.perf_counter()
            turns.seconds.append(idle_since - began)
            contexts[worker] = Context.capture(self._gpu)
            if worker == 0:
                turns.save_after_worker_0()
        self._gradients.update_layout()
        turns.switch_seconds += time.perf_counter() - idle_since
        return losses, contexts

    def _can_accumulate(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the next turn may add its gradients to ``.grad`` without a change of the sum's bits."""
        # Only on process 0, and if one op adds to each gradient: otherwise sums depend on the number of processes.
        if self.rank > 0 or not self._accumulates:
            return False
        try:
            captured: Any = self.step.prepare(False, *args, **kwargs)
        except (CaptureError, BudgetError, SpillError) as error:
            _log.info("gradients are stored at home after each turn and summed there: %s", error)
            self._accumulates = False
            return False
        added = Counter(storage for op in captured.graph.ops for storage in op.mutates)
        gradients = [b for b in captured.states if b.kind is StorageKind.GRADIENT]
        self._accumulates = not captured.gradients_left and all(
            added[captured.values[binding.value].storage] == 1 for binding in gradients
        )
        return self._accumulates

    def _store_gradients(self, number: int, turns: Turns) -> None:
        """Move the gradients of a turn to the home; raise ``StateError`` if workers train different parameters."""
        before = self._gradients.layout
        if number and self._gradients.update_layout() is not before:
            raise StateError(
                "the workers of one step have gradients of different parameters, which cannot be summed: make the step "
                "use the same parameters for every worker"
            )
        turn = 0 if self.rank == 0 else number  # process 0 adds them up, since its workers are the first
        self._gradients.store(turn, add=turn in turns.stored)
        if turn not in turns.stored:
            turns.stored.append(turn)

    def _digest(self, turns: Turns) -> int:
        """Return a checksum of the gradients' layout and the written buffers, which all processes must share."""
        layout = self._gradients.layout
        return crc32(repr((layout and layout.digest, turns.keys)).encode())

    def _check_comparison(self, comparison: StepComparison) -> None:
        """Raise ``StateError`` if processes are at different steps, or have different gradients or buffers."""
        different = [(rank, steps) for rank, (steps, _) in enumerate(comparison.by_rank) if steps != comparison.steps]
        if different:
            raise StateError(
                f"process {different[0][0]} is at step {different[0][1]}, and this one at {comparison.steps}: an "
                "update failed; restart all processes from the last checkpoint"
            )
        if any(digest != comparison.digest for _, digest in comparison.by_rank):
            raise StateError(
                "the workers have gradients of different parameters, or write different buffers, which cannot be "
                "summed: make the step do the same for every worker"
            )

    def _sum_gradients(self, turns: Turns) -> None:
        layout = self._gradients.update_layout()
        if self._worker_count > 1:
            target, stored = self._gradients.tensors(), self._gradients.stored
            process_gradients: list[TensorRows] = [*[stored[place] for place in turns.stored], target]
            self._sum(process_gradients, target, layout, self._worker_count)

    def _undo_turns(self, turns: Turns) -> None:
        self._gradients.clear()
        turns.restore_buffers()

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
        """Return a loader of batches for the workers of this process, from their current position in the data.

        Each worker gets the samples of a replica of ``torch.utils.data.DistributedSampler`` with one replica per worker
        and ``drop_last=True``. A batch counts as used once ``run`` has been called with it, or the next one is
        requested. All loaders of a training share one position in the data.

        Args:
            dataset: with ``__len__`` and ``__getitem__``. Random augmentation may use the generators of Python, NumPy
                and PyTorch, which have the worker's states.
            batch_size: samples of one worker's batch.
            seed: of the shuffling; the number of the epoch is added to it.
            shuffle: whether each epoch has another order.
            collate: makes a batch from a list of samples; by default ``torch.utils.data.default_collate``.

        Returns:
            The loader; its ``epoch`` counts completed epochs, its length is that of a whole epoch.

        Raises:
            InputError: the dataset is unsuitable, or the training is in the middle of data in another order.
        """
        progress = self._progress
        order = make_order(dataset, self._worker_count, batch_size, seed, shuffle)
        if progress.order is not None and order != progress.order and progress.place != DataPosition():
            raise InputError(
                f"the training is in the middle of an epoch of {progress.order}, but this loader has {order}; finish "
                "the epoch with the same dataset, batch size and order"
            )
        progress.order = order
        return Loader(progress, dataset, order, collate)

    # Assignment of workers

    def balance(self) -> range:
        """Reassign the workers by the measured times of their turns, so that the slowest process ends soonest.

        All processes must call it, between steps; the bits stay the same. Batches that ``loader`` has yielded and no
        step has used are drawn again.

        Returns:
            The workers of this process from now on.

        Raises:
            StateError: there was no step, or another process does not answer.
        """
        if not self._timed:
            raise StateError("there are no measured times of turns yet; make a step first")
        reports = self._processes.gather((statistics.median(self._timed), self._saved_contexts()))
        self._ranges = worker_ranges(shares(self._worker_count, [seconds for seconds, _ in reports]))
        all_contexts = {worker: context for _, contexts in reports for worker, context in contexts.items()}
        self._progress.restore({k: Context.from_saved(all_contexts[k]) for k in self.workers})
        self._gradients.stored.clear()
        _log.info("workers per process: %s", ", ".join(f"{len(worker_range)}" for worker_range in self._ranges))
        return self.workers

    def _saved_contexts(self) -> dict[int, SavedContext]:
        return {worker: context.to_saved() for worker, context in self._progress.contexts.items()}

    # Checkpoints

    def save(self, folder: str | Path, extra: Any = None, *, frozen: bool = True) -> None:
        """Save the training; all processes must call it, and process 0 writes.

        An existing checkpoint in the folder stays valid until the new one is complete, however a save ends. It contains
        models, optimizers, the random generators of every worker and of process 0, and the position in the data; any
        number of processes can load it. ``outofcore.load`` also reads its models and optimizers.

        Args:
            folder: as for ``Step.save``. Every process that will load it must have access to it.
            extra: your own plain data, such as a scheduler's state dict; process 0's value is saved.
            frozen: False leaves out parameters that do not require gradients, as for ``Step.save``.

        Raises:
            StateError: a value cannot be saved, or another process failed.
            TransferError: the system refuses a write; the previous checkpoint is still complete.
        """
        contexts = dict(
            chain(*(saved_contexts.items() for saved_contexts in self._processes.gather(self._saved_contexts())))
        )
        saved = SavedTraining.of(self._facts, self.steps, contexts, self._progress)
        with self._processes.synchronized("this save"):
            if self.rank == 0:
                self.step.save(folder, extra=saved.extra(extra), frozen=frozen)

    def load(self, folder: str | Path, *, exact: bool = True) -> Any:
        """Continue from a checkpoint, with the current number of processes; all of them must call it.

        Args:
            folder: as given to ``save``.
            exact: refuse facts that would change the bits: another number of threads, another release of PyTorch, other
                kernels. False: only log them.

        Returns:
            The value saved as ``extra``; tuples become lists.

        Raises:
            InputError: there is no such checkpoint, or it is of another training; the state is unchanged.
            TransferError: a file cannot be read or is damaged; the step refuses to go on.
            StateError: another process could not load it.
        """
        with self._processes.synchronized("this load"):
            saved, extra = SavedTraining.read(Path(folder))
            saved.check_compatible(Path(folder), self._worker_count, self._facts, exact=exact)
        with self._processes.synchronized("this load"):
            self.step.load(folder)
        self._gradients.clear()
        self.steps = saved.steps
        saved.restore(self._progress, self.workers, self._worker_count)
        return extra
