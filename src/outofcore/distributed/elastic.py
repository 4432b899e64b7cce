"""Training with logical workers: any number of processes gives the same bits as any other.

Logical workers whose contexts take turns on one device are the idea of EasyScale (Li et al., "EasyScale: Elastic
training with consistent accuracy and improved utilization on GPUs", SC '23, sections 3 and 4). A step of N workers is,
to the last bit, this loop in plain PyTorch, with each worker's own random generators::

    for k in range(N):
        step(*batches[k])          # gradients add up in .grad, in the order of the workers
    for p in parameters: p.grad /= N
    optimizer.step()

Buffers are as in ``DistributedDataParallel`` with ``broadcast_buffers=True``: every worker begins a step with those
that worker 0 has left in the step before. So a model has the same statistics whichever process evaluates or saves it,
and the size of a checkpoint does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from outofcore.capture import Captured
from outofcore.capture.patching import patched
from outofcore.capture.refusals import refusal
from outofcore.checkpoint.loading import Checkpoint
from outofcore.distributed.assignment import evenly, runs, shares
from outofcore.distributed.contexts import Context, SavedContext, generators_kept
from outofcore.distributed.contract import check_all_alike, difference, kernel_facts, model_facts
from outofcore.distributed.gradients import Layout, Tensors, keep
from outofcore.distributed.loader import Loader, Order, Place, Samples, arguments, checked_order
from outofcore.distributed.ordered_sum import OrderedSum
from outofcore.distributed.processes import Processes
from outofcore.errors import BudgetError, CaptureError, InputError, SpillError, StateError
from outofcore.graph import StorageKind
from outofcore.step import Step

_log = logging.getLogger("outofcore")

# Of how many of the last steps the median time of a turn is taken.
_TIMED = 9
_KEY = "elastic"
# Wrappers that exchange gradients by themselves, by the names of their classes.
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})


class _SavedPlace(Struct):
    epoch: int
    step: int


class _SavedOrder(Struct):
    batch_size: int
    length: int
    seed: int
    shuffle: bool


class _Saved(Struct):
    """What a checkpoint has in addition to model and optimizers."""

    facts: dict[str, str]
    steps: int
    contexts: dict[str, SavedContext]
    place: _SavedPlace
    order: _SavedOrder | None


@dataclass(frozen=True)
class ElasticStats:
    """What the last step did in this process.

    Attributes:
        seconds: of all of it.
        turn_seconds: of each worker's forward and backward pass.
        switch_seconds: between turns: generators, buffers and gradients change places.
        sum_seconds: waiting for other processes, and the sum of all gradients.
        update_seconds: of the optimizers.
        gradient_bytes: of one worker.
        bytes_sent: by this process.
        least_bytes: that each process sends in a ring all-reduce of the gradients, on average.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(8, 8)
    >>> def train_step(x):
    ...     model(x).square().mean().backward()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with outofcore.elastic(train_step, model, optimizer, workers=2, budget="1MiB") as run:
    ...     losses = run({0: torch.ones(4, 8), 1: torch.zeros(4, 8)})
    >>> len(run.stats.turn_seconds), run.stats.gradient_bytes, run.stats.bytes_sent
    (2, 288, 0)
    """

    seconds: float
    turn_seconds: tuple[float, ...]
    switch_seconds: float
    sum_seconds: float
    update_seconds: float
    gradient_bytes: int
    bytes_sent: int
    least_bytes: int


def phases(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    update: Callable[[], object] | None,
) -> Callable[..., Any]:
    """Combine the two compiled functions: a worker's turn, and, if the argument is true, the update.

    As one step they share an arena, so that little moves between them. A turn that adds to the gradients of the one
    before is a capture of its own.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise refusal(
            "the step updates the parameters",
            "the gradients of the other workers are not there yet: outofcore.elastic() calls the optimizer once they "
            "are summed",
            "end the step after loss.backward(); what is to happen before the update, such as clipping, is a function "
            "for outofcore.elastic(..., update=...)",
        )

    @functools.wraps(step, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def phase(updates: bool, /, *args: Any, **kwargs: Any) -> Any:
        if not updates:
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers:
                    stack.enter_context(patched(optimizer, "step", refuse))
                return step(*args, **kwargs)
        if update is not None:
            update()
        else:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for model in models:
            model.zero_grad(set_to_none=True)
        return None

    return phase


class Elastic:
    """A training with logical workers, of which some fall to this process: made by ``outofcore.elastic``.

    Called with ``{logical worker: batch}`` for each of ``workers``, it runs one step. A batch that is a tuple or list
    is given to the user's step as its arguments, a dict by name, and all else as the only argument. Between calls the
    model and the optimizers can be read, saved and evaluated as in plain PyTorch; gradients are cleared after each
    update. All processes have the same model at any time. A context manager: it closes the training.

    Attributes:
        step: the compiled step, for its reports: of a worker's turn or, after a call, of the update.
        steps: how many updates there were so far, those before a checkpoint included.
        place: how far ``loader`` has used the data.

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
        compiled: Step[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        workers: int,
        seed: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.step = compiled
        self._count, self._device = workers, device
        self.steps = 0
        self.place = Place()
        self._order: Order | None = None
        own = (p for model in models for p in model.parameters())
        others = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        self._parameters = list({id(p): p for p in chain(own, others)}.values())
        self._layout: Layout | None = None
        self._kept: dict[int, Tensors] = {}  # room for gradients of earlier workers, by the number of their turn
        self._may_add = True  # whether a turn may add its gradients to those of the one before
        self._handed: dict[int, Any] | None = None  # the batches that the loader gave last
        self._drawn: dict[int, Context] | None = None  # the workers' generators after that
        self._timed: deque[float] = deque(maxlen=_TIMED)
        self._stats: ElasticStats | None = None
        self._processes = Processes(timeout)
        try:
            self._facts = kernel_facts(workers, seed, device)
            if self._processes.count > 1:
                facts = self._facts | model_facts(models, optimizers, compiled.home.faces.drop_cache)
                check_all_alike(self._processes.gather(facts))
            self._ranges = evenly(workers, self._processes.count)
            self._sum = OrderedSum(self._processes)
        except BaseException:
            self._processes.close()
            raise
        self._contexts = {k: Context.beginning(seed, k, device) for k in self.workers}

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
        self._kept.clear()
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
        turn = _Turns()
        try:
            self._check_batches(batches)
            with generators_kept(self._device):
                losses, contexts = self._take_turns(batches, turn)
            self.step.prepare(True)
            error = None
        except BaseException as raised:
            losses, contexts, error = {}, {}, raised
        waited = time.perf_counter()
        try:
            self._agree(
                error, "this step", self.steps, crc32(repr((self._layout and self._layout.digest, turn.keys)).encode())
            )
            if error is None:
                self._sum_gradients(turn)
                self._share_buffers(turn)
        except BaseException as another:
            self._take_back(turn)
            if error is None:
                raise
            error.add_note(str(another))
        if error is not None:
            self._take_back(turn)
            raise error
        summed = time.perf_counter()
        self.step(True)
        self._contexts = contexts
        self.steps += 1
        if self._handed is not None and batches is self._handed:
            self._advance()
        self._handed = self._drawn = None
        self._timed.append(statistics.median(turn.seconds))
        self._tell(turn, started, waited, summed, sent)
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
        if self._gradients():
            raise InputError(
                "parameters have gradients that no worker's turn has left, and they would be added to those of one "
                "process alone: clear them before (optimizer.zero_grad())"
            )

    def _take_turns(self, batches: Mapping[int, Any], turn: _Turns) -> tuple[dict[int, Any], dict[int, Context]]:
        calls = {worker: arguments(batches[worker]) for worker in self.workers}
        begin = self._drawn if self._drawn is not None and batches is self._handed else self._contexts
        for args, kwargs in calls.values():
            turn.note(self.step.prepare(False, *args, **kwargs))
        turn.begin = [buffer.detach().clone() for buffer in turn.buffers]
        losses: dict[int, Any] = {}
        contexts: dict[int, Context] = {}
        mark = time.perf_counter()
        for number, (worker, (args, kwargs)) in enumerate(calls.items()):
            if number:
                if not self._adds_up(args, kwargs):
                    self._keep_gradients(number - 1, turn)
                turn.put_back()
            begin[worker].enter(self._device)
            began = time.perf_counter()
            turn.switch += began - mark
            losses[worker] = self.step(False, *args, **kwargs)
            mark = time.perf_counter()
            turn.seconds.append(mark - began)
            contexts[worker] = Context.now(self._device)
            if worker == 0:
                turn.left = [buffer.detach().clone() for buffer in turn.buffers]
        self._note_layout()
        turn.switch += time.perf_counter() - mark
        return losses, contexts

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _note_layout(self) -> Layout:
        gradients = self._gradients()
        if self._layout is None or not self._layout.is_of(gradients):
            self._layout = Layout(gradients)
            self._kept.clear()
        return self._layout

    def _adds_up(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the next turn may add its gradients to those in ``.grad``, as in plain PyTorch.

        It may at process 0, which has the first of all workers, if each gradient is added once: a step that goes
        backward twice would add in another order than where its worker is the first of a process. It also needs a plan,
        which may not fit the budget.
        """
        if self.rank > 0 or not self._may_add:
            return False
        try:
            captured = self.step.prepare(False, *args, **kwargs)
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

    def _keep_gradients(self, number: int, turn: _Turns) -> None:
        """Save the gradients of a turn. At process 0 these are the first of all workers, and are added up."""
        before, layout = self._layout, self._note_layout()
        if number and layout is not before:
            raise StateError("the workers of one step leave gradients of different parameters, which cannot be summed")
        place = 0 if self.rank == 0 else number
        if place not in self._kept:
            self._kept[place] = layout.new(self.step.home.faces)
        own = Tensors(self._gradients(), self.step.home.faces)
        keep(own, self._kept[place], layout, add=place in turn.kept)
        if place not in turn.kept:
            turn.kept.append(place)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _agree(self, error: BaseException | None, what: str, steps: int = 0, digest: int = 0) -> None:
        """Return if every process has come as far; raise ``StateError`` if one differs in step or layouts."""
        told = self._processes.gather_numbers([int(error is None), steps, digest])
        failed = [rank for rank, (well, _, _) in enumerate(told) if not well]
        if error is not None:
            return
        if failed:
            raise StateError(f"process {failed[0]} failed in {what}, and says why; this one has changed nothing in it")
        others = [rank for rank, (_, other, _) in enumerate(told) if other != steps]
        if others:
            raise StateError(
                f"process {others[0]} is at step {told[others[0]][1]}, and this one at {steps}: an update failed; "
                "start all processes again and go on from the last checkpoint"
            )
        if any(other != digest for _, _, other in told):
            raise StateError(
                "the workers leave gradients of different parameters, or write different buffers, which cannot be "
                "summed: let the step do the same for every worker"
            )

    def _sum_gradients(self, turn: _Turns) -> None:
        layout = self._note_layout()
        if self._count == 1:
            return
        target = Tensors(self._gradients(), self.step.home.faces)
        self._sum([*[self._kept[place] for place in turn.kept], target], target, layout, self._count)

    def _share_buffers(self, turn: _Turns) -> None:
        """Give all processes the buffers that worker 0 has left."""
        if not turn.buffers:
            return
        if self._processes.count > 1:
            left = turn.left or turn.begin
            row = torch.cat([buffer.cpu().contiguous().view(-1).view(torch.uint8) for buffer in left])
            self._processes.share(row)
            at, turn.left = 0, []
            for buffer in left:
                count = buffer.numel() * buffer.element_size()
                turn.left.append(row[at : at + count].clone().view(buffer.dtype).view(buffer.shape))
                at += count
        turn.put(turn.left)

    def _take_back(self, turn: _Turns) -> None:
        self._clear()
        turn.put_back()

    def _tell(self, turn: _Turns, started: float, waited: float, summed: float, sent: int) -> None:
        now = time.perf_counter()
        count = self._processes.count
        size = 0 if self._layout is None else self._layout.bytes
        self._stats = ElasticStats(
            seconds=now - started,
            turn_seconds=tuple(turn.seconds),
            switch_seconds=turn.switch,
            sum_seconds=summed - waited,
            update_seconds=now - summed,
            gradient_bytes=size,
            bytes_sent=self._processes.bytes_sent - sent,
            least_bytes=2 * (count - 1) * size // count,
        )

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
        order = checked_order(dataset, self._count, batch_size, seed, shuffle)
        if self._order is not None and order != self._order and self.place != Place():
            raise InputError(
                f"the training is in the middle of data that it goes through otherwise: {_in_words(self._order)}, and "
                f"now {_in_words(order)}; go on with what it began with"
            )
        self._order = order
        return Loader(self, dataset, order, collate)

    def draw(self, batch_of: Callable[[int], Any]) -> dict[int, Any]:
        """Make a batch for each worker of this process with the worker's own generators; for ``loader``."""
        batches: dict[int, Any] = {}
        drawn: dict[int, Context] = {}
        with generators_kept(self._device):
            for worker in self.workers:
                self._contexts[worker].enter(self._device)
                batches[worker] = batch_of(worker)
                drawn[worker] = Context.now(self._device)
        self._handed, self._drawn = batches, drawn
        return batches

    def used(self, batches: dict[int, Any]) -> None:
        """Record that batches have been used, unless a step has done so; for ``loader``."""
        if batches is self._handed and self._drawn is not None:
            self._contexts = self._drawn
            self._advance()
            self._handed = self._drawn = None

    def _advance(self) -> None:
        if self._order is not None:
            self.place = self.place.after(self._order)

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
        told = self._processes.gather((statistics.median(self._timed), self._plain_contexts()))
        self._ranges = runs(shares(self._count, [seconds for seconds, _ in told]))
        self._take_contexts({worker: one for _, contexts in told for worker, one in contexts.items()})
        self._kept.clear()
        _log.info("the workers are shared as %s", ", ".join(f"{len(one)}" for one in self._ranges))
        return self.workers

    def _plain_contexts(self) -> dict[str, Any]:
        return {str(worker): context.plain() for worker, context in self._contexts.items()}

    def _take_contexts(self, plain: dict[str, Any]) -> None:
        saved = {k: msgspec.convert(plain[str(k)], SavedContext) for k in self.workers}
        self._contexts = {k: Context.restored(one) for k, one in saved.items()}
        self._handed = self._drawn = None

    # What lasts

    def save(self, folder: str | Path, extra: Any = None) -> None:
        """Save the training; all processes must call it, and process 0 writes.

        An existing checkpoint in the folder counts until the new one is complete, however a save ends. It holds models,
        optimizers, the random generators of every worker and of process 0, and the place in the data; any number of
        processes can load it. ``outofcore.load`` reads its models and optimizers as well.

        Args:
            folder: as for ``Step.save``. Every process that will load it must see it.
            extra: plain data of yours, such as a scheduler's state dict; that of process 0 counts.

        Raises:
            StateError: something cannot be saved, or another process failed.
            TransferError: the system refuses a write; the previous checkpoint is still complete.
        """
        contexts = [one for told in self._processes.gather(self._plain_contexts()) for one in told.items()]
        order = self._order
        saved = {
            "facts": self._facts,
            "steps": self.steps,
            "contexts": dict(contexts),
            "place": {"epoch": self.place.epoch, "step": self.place.step},
            "order": None
            if order is None
            else {
                "batch_size": order.batch_size,
                "length": order.length,
                "seed": order.seed,
                "shuffle": order.shuffle,
            },
        }
        with self._together("this save"):
            if self.rank == 0:
                self.step.save(folder, extra={_KEY: saved, "extra": extra})

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
        with self._together("this load"):
            saved, extra = self._saved(Path(folder))
            self._check_contract(Path(folder), saved, exact)
        with self._together("this load"):
            self.step.load(folder)
        self._clear()
        self.steps, self.place = saved.steps, Place(saved.place.epoch, saved.place.step)
        own = saved.order
        self._order = own and Order(self._count, own.batch_size, own.length, own.seed, own.shuffle)
        self._contexts = {k: Context.restored(saved.contexts[str(k)]) for k in self.workers}
        self._handed = self._drawn = None
        return extra

    def _saved(self, folder: Path) -> tuple[_Saved, Any]:
        extra = Checkpoint(folder).extra
        if not isinstance(extra, dict) or _KEY not in extra:
            raise InputError(
                f"the checkpoint in {folder} was not saved by an elastic training: outofcore.load() takes its model "
                "and optimizers before outofcore.elastic() is called"
            )
        try:
            saved = msgspec.convert(extra[_KEY], _Saved)
            for one in saved.contexts.values():
                Context.restored(one)
        except (msgspec.ValidationError, ValueError) as error:
            raise InputError(f"what the checkpoint in {folder} says of its workers cannot be read: {error}") from error
        return saved, extra.get("extra")

    def _check_contract(self, folder: Path, saved: _Saved, exact: bool) -> None:
        facts, workers = dict(saved.facts), "logical workers"
        if facts.get(workers) != str(self._count) or saved.contexts.keys() != {str(k) for k in range(self._count)}:
            raise InputError(
                f"the checkpoint in {folder} is of {facts.get(workers)} logical workers, and this training has "
                f"{self._count}: begin it with workers={facts.get(workers)}; processes there may be any number"
            )
        # What the workers drew is in their contexts: only how they began depends on the seed.
        facts["seed"] = self._facts["seed"]
        found = difference(facts, self._facts)
        if found is None:
            return
        name, before, now, advice = found
        if exact:
            raise InputError(
                f"{name}: the checkpoint in {folder} has {before}, and this process {now}; {advice}; or load it with "
                "exact=False, and get other bits from here on"
            )
        _log.warning("%s: was %s, is %s; from here on the bits are others than they would have been", name, before, now)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Raise errors from inside in this process, and a ``StateError`` about them in all others."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(StateError):
                self._agree(error, what)
            raise
        self._agree(None, what)


class _Turns:
    """The turns of one step.

    Attributes:
        buffers: of the model that a turn writes.
        keys: their names.
        kept: the turns whose gradients have been saved.
        begin: values of the buffers when the step began.
        left: their values after the turn of worker 0; empty where that is another process's.
        seconds: of each turn.
        switch: seconds between them.
    """

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.keys: list[str] = []
        self.kept: list[int] = []
        self.begin: list[torch.Tensor] = []
        self.left: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.switch = 0.0

    def note(self, captured: Captured) -> None:
        """Find the buffers that a turn writes."""
        written = {storage for op in captured.graph.ops for storage in op.mutates}
        known = {id(buffer) for buffer in self.buffers}
        for binding in captured.states:
            storage = captured.values[binding.value].storage
            tensor = binding.tensor if binding.kind is StorageKind.BUFFER and storage in written else None
            if tensor is not None and id(tensor) not in known:
                self.buffers.append(tensor)
                self.keys.append(binding.key)

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Set the buffers."""
        with torch.no_grad():
            for buffer, value in zip(self.buffers, values, strict=True):
                buffer.copy_(value)

    def put_back(self) -> None:
        """Reset the buffers to the beginning of the step."""
        if self.begin:
            self.put(self.begin)


def check_models(models: Sequence[nn.Module]) -> None:
    """Refuse models that exchange gradients themselves."""
    for model in models:
        for path, module in model.named_modules():
            kind, where = type(module).__name__, f"the module {path}" if path else "the model"
            if kind in _WRAPPERS or hasattr(module, "_get_fsdp_state"):
                raise InputError(
                    f"{where} is wrapped in {kind}, which exchanges gradients in an order of its own; give "
                    "outofcore.elastic() the model itself (model.module): it takes the wrapper's place"
                )


def _in_words(order: Order) -> str:
    shuffled = f"shuffled by seed {order.seed}" if order.shuffle else "not shuffled"
    return f"{order.length} samples in batches of {order.batch_size}, {shuffled}"
