"""Decide when a step of an eager loop ends (``Sign``) and when it is planned (``Loop.end_of_step``).

``Loop`` is the context that ``outofcore.budget`` opens. What is evicted and when copies start is decided in
``paging.cpp``: ``make_room``, ``follow_plan`` and, without a plan, ``copy_ahead``.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import gc
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from outofcore._torch_internals import (
    Feature,
    missing,
    require,
    storage_address,
    without_python_dispatch,
)
from outofcore.background import BackgroundPlanner, PlanJob
from outofcore.capture.provenance import user_line
from outofcore.errors import ArenaError, BudgetError, SpillError, StateError
from outofcore.execution.checks import Check
from outofcore.execution.folders import default_spill_directory
from outofcore.execution.mapped_files import FileMapping, MappedFiles
from outofcore.execution.memory import trim_heap
from outofcore.execution.native import Flavor
from outofcore.execution.spill import SpillFile
from outofcore.follow.addresses import AddressWatch
from outofcore.follow.gpu import Shares, graphs_refused, make_workspaces, shares_of
from outofcore.follow.native import (
    DISPATCH_KEY,
    call,
    error_of,
    has_pieces,
    is_followed,
    load_paging,
    loaded_paging,
    loaded_pagings,
    open_paging,
    trampoline,
)
from outofcore.follow.observed import (
    LINKS,
    Observed,
    PlanMade,
    departure_marks,
    observed_notes,
    read_observed,
)
from outofcore.follow.patches import OptimizerHooks, Overlapping, backward_passes_seen
from outofcore.follow.plan_store import FollowedPlan, PlanStore
from outofcore.follow.recipes import Recipes
from outofcore.follow.recompute_trial import RecomputeTrial
from outofcore.follow.records import StepRecord, read_record, schedule_of
from outofcore.follow.sources import IN_BACKWARD, Sources, places_of
from outofcore.follow.stats import LoopStats, loop_facts
from outofcore.graph import StorageKind
from outofcore.planning import PolicyLike
from outofcore.planning.policy import Auto
from outofcore.progress import Tell, following, silent
from outofcore.report.content import Page, page_content
from outofcore.report.machine import this_machine
from outofcore.report.notebook import ReportPath, facts_html
from outofcore.report.page import write_report
from outofcore.report.trace import Beyond, write_trace
from outofcore.units import KIB, MIB, format_bytes

_log = logging.getLogger("outofcore")

REPORT_PATH = "outofcore-report.html"

# Addresses that a home on a disk may take up; the disk itself is the limit.
_DISK_CAPACITY = 1 << 40
# Models from so many bytes on take long to move to the home, so that progress is shown.
_LONG = 256 * MIB
# By how much the priority of the process that plans is below that of the loop.
_NICENESS = 10
# What a plan leaves free, as a share of the budget: the loop asks now and then for what it did not when recorded.
_SPARE = 0.02
# Bytes of small tensors are rounded up to a multiple of this before planning, so that a few do not change the plan.
_SMALL_STEP = 64 * KIB
_CPU = torch.device("cpu")
# As ``follow_new`` in paging.cpp takes them.
_VERIFIED = {Check.OFF: 0, Check.SAMPLED: 1, Check.FULL: 2}
# As ``follow_adopt`` returns it.
_HAS_ARRAY = 2
_FLAVORS = {"cpu": Flavor.CPU, "cuda": Flavor.CUDA}
# Of the plans that were made, so many are told in reports.
_TOLD_PLANS = 8
_UNINITIALIZED = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
# An op that adds to a gradient, as paging.cpp names it.
_SUMMED = re.compile(IN_BACKWARD + r"parameter (-?\d+)$")
_T = TypeVar("_T")
# By identity.
Optimizers = weakref.WeakValueDictionary[int, torch.optim.Optimizer]
# Of storages, by their numbers.
Names = dict[int, tuple[str, StorageKind]]
_REFUSAL = re.compile(
    r"outofcore: the budget of (?P<budget>\d+) bytes cannot hold (?P<op>.+), which asks for (?P<asked>\d+) bytes "
    r"beside (?P<used>\d+) bytes that it uses and (?P<kept>\d+) bytes that cannot be moved; at least (?P<least>\d+) "
    r"bytes are needed, of which tensors of less than (?P<smallest>\d+) bytes each take (?P<small>\d+), and "
    r"(?P<beside>\d+) lie beside the arena"
)


class Sign(enum.IntEnum):
    """What ends a step of a loop. A loop uses the strongest sign that it has given so far.

    Where a sign comes from several sources, such as the two optimizers of a GAN, each step ends with the same one: the
    first that gave it, until another gives it twice in between.
    """

    CALL = 1  # a call of a model without gradients has ended
    # A backward pass has ended that frees its graph, as in loops that update by hand; its source is the line that calls
    # it. The first one is no sign yet: most loops step an optimizer next. Where gradients are accumulated, the first
    # step of the optimizer takes over.
    BACKWARD = 2
    OPTIMIZER = 3  # an optimizer has stepped


class Loop:
    """A loop of the user's own that runs within a budget: made by ``outofcore.budget``; a context manager.

    A loop without references ends by itself, as soon as no op uses its memory.

    Attributes:
        on_progress: callback ``(stage, done, total)`` for the tensors that ``start()`` moves to the home; None: a bar
            on a terminal, if the models are large.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> run = outofcore.budget("1MiB", model).start()
    >>> loss = model(torch.ones(64, 256)).square().mean()
    >>> loss.backward()
    >>> run.stop()
    >>> run.stats.fetches > 0
    True
    """

    def __init__(
        self,
        limit: int,
        models: Sequence[nn.Module],
        *,
        device: torch.device = _CPU,
        home: str | os.PathLike[str] | None = None,
        host_limit: int | None = None,
        policy: PolicyLike | None = "auto",
        plans: Path | None = None,
        check: Check = Check.SAMPLED,
        beside: bool = False,
    ) -> None:
        require(Feature.BUDGET)
        self._limit = limit
        self._room = limit  # of it, what there is for tensors of 64 KiB and more
        self._models = tuple(models)
        self._device = device  # of a GPU, with its index
        self._on_gpu = device.type == "cuda"
        self._home = home
        self._host_limit = host_limit
        self._check = check
        self._beside = beside  # of compiled steps, none of which runs while this does
        self._paused = False
        self._space: int | None = None
        self._thread: int | None = None
        self._process = os.getpid()
        self._where = ""  # the user's line that has started it
        # Held while something is done with the space: another thread may end the loop.
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._steps = 0
        self._last = LoopStats()
        self._policy = policy
        self._planner: BackgroundPlanner[StepRecord] | None = None
        self._plans = 0
        self._store = PlanStore(plans)
        self._trial: RecomputeTrial | None = None
        self._reruns = 0  # until the last step ended
        self._remade = False  # whether there were any in the step that is being planned
        self._made: list[PlanMade] = []
        # What a report is made of, once the loop is stopped.
        self._happened: tuple[Sequence[int], Sequence[str], Names] | None = None
        self.on_progress: Tell | None = None
        # What ends steps, of these the source that does, and which others have come since.
        self._sign = Sign.CALL
        self._leader: Hashable | None = None
        self._others: set[Hashable] = set()
        self._passes = 0  # backward passes, while no optimizer has stepped
        self._optimizers: Optimizers = weakref.WeakValueDictionary()  # that have stepped in the thread that is followed

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        told = None if error is None else explained(error, self._happened[2] if self._happened else {})
        if told is not None:
            raise told from error

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # As Python ends, what this needs is not there any more; a fork has copies of its parent's loops.
        if _ends() or getattr(self, "_space", None) is None or self._process != os.getpid():
            return
        _log.warning(
            "the loop within %s that was started%s has ended, since nothing refers to it any more: keep what start() "
            "returns, or use outofcore.budget() in a with-statement",
            format_bytes(self._limit),
            self._started_at(),
        )
        self.end(remembered=False)

    def start(self) -> Self:
        """Begin to follow this thread.

        The models' parameters, buffers and gradients move to the home at once, other tensors when an op uses them.

        Raises:
            StateError: a loop is followed already, or a compiled step is open, or the native code cannot be built.
            SpillError: the home cannot be used.
        """
        if self._space is not None:
            raise StateError(f"this loop is followed already; stop() it first: it was started{self._started_at()}")
        library = self._native()
        self._paused = False
        self._steps = self._plans = self._reruns = self._passes = 0
        self._sign, self._process, self._where = Sign.CALL, os.getpid(), user_line()
        self._leader, self._trial, self._planner, self._made = None, None, None, []
        if self._on_gpu:
            make_workspaces(self._device)
        space = self._opened(library)
        try:
            try:
                self._take_turn(library, space)
            except StateError:  # perhaps because of a loop or a compiled step that nobody refers to any more
                gc.collect()
                self._take_turn(library, space)
        except BaseException:
            library.follow_close(space)
            raise
        self._space, self._thread = space, threading.get_ident()
        _started[id(self)] = self
        try:
            self._undo.enter_context(_patches)
            self._watch_calls()
            self._adopt_models()
            if self._on_gpu:  # once the model has left the device
                self._reserve(library, space)
                self._undo.enter_context(graphs_refused())
            trim_heap()
            library.follow_ask_source(_sources.ask)
            library.follow_thread(1)
            if self._policy is not None:
                self._planner = BackgroundPlanner(_NICENESS)
                self._undo.callback(self._planner.close)
                wanted = isinstance(self._policy, Auto) and self._policy.params.recompute_changes > 0
                if wanted and not missing(Feature.RECOMPUTE):
                    self._trial = RecomputeTrial(Recipes(space, _FLAVORS[self._device.type]))
        except BaseException:
            self.end()
            raise
        return self

    def stop(self) -> None:
        """Stop following. Tensors stay valid; those at home are fetched as far as the budget holds them.

        May be called again.

        Raises:
            StateError: another thread than the followed one calls it; there use ``outofcore.stop()``.
        """
        if self._space is None:
            return
        if not self._paused and threading.get_ident() != self._thread:
            raise StateError(
                "a loop is stopped by the thread that started it; call stop() there, or outofcore.stop() from anywhere"
            )
        self.end()

    def end(self, *, remembered: bool = True) -> None:
        """Stop following, in any thread; while an op uses the memory of the loop, when that has ended.

        Args:
            remembered: whether ``stats`` and ``report`` will be read afterwards.
        """
        with self._lock, contextlib.ExitStack() as ending:
            space, self._undo, undo = self._space, contextlib.ExitStack(), self._undo
            if space is None:
                return
            library = self._native()
            ending.callback(library.follow_close, space)
            ending.callback(setattr, self, "_space", None)
            if remembered:
                ending.callback(self._remember)
            if not self._paused and threading.get_ident() == self._thread:
                ending.callback(library.follow_thread, 0)
            ending.enter_context(undo)

    def pause(self) -> None:
        """Follow nothing until ``resume``. Tensors stay where they are, and ops elsewhere see the right bytes."""
        with self._lock:
            if self._space is not None and not self._paused:
                self._native().follow_thread(0)
                call(self._native(), "follow_pause", self._space)
                self._paused = True

    def resume(self) -> None:
        """Follow the calling thread again.

        Raises:
            StateError: another loop is followed.
        """
        with self._lock:
            if self._space is not None and self._paused:
                self._paused, self._thread = False, threading.get_ident()  # so that it can be paused however this ends
                self._take_turn(self._native(), self._space)
                self._native().follow_thread(1)

    def vacate(self) -> None:
        """Bring everything home, and give the arena's memory to the system until it is used again."""
        with self._lock:
            if self._space is not None:
                call(self._native(), "follow_vacate", self._space)

    def release(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Give tensors, by default all of them, memory of their own, as plain PyTorch has it."""
        with self._lock:
            if self._space is not None and tensors is None:
                call(self._native(), "follow_release_all", self._space)
            for tensor in tensors or ():
                if self._space is not None and self._is_ours(tensor):
                    call(self._native(), "follow_release", storage_address(tensor.untyped_storage()))

    def strangers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those tensors of 64 KiB and more that are not in this loop's arena or homes."""
        addresses = [storage_address(tensor.untyped_storage()) for tensor in tensors]
        found: list[torch.Tensor] = []
        begin, count = 0, len(addresses)
        pointers = (ctypes.c_void_p * count)(*addresses)
        while begin < count:
            rest = ctypes.byref(pointers, begin * ctypes.sizeof(ctypes.c_void_p))
            begin += call(self._native(), "follow_strangers", self._space, rest, count - begin)
            if begin < count:
                found.append(tensors[begin])
            begin += 1
        return found

    @property
    def stats(self) -> LoopStats:
        """What has happened so far."""
        with self._lock:
            if self._space is not None:
                self._last = self._read_stats()
            return self._last

    def report(self, path: str | os.PathLike[str] = REPORT_PATH, *, title: str = "") -> Path:
        """Write what the last complete step did as one self-contained HTML page.

        It shows memory over time, measured ops and copies, which ops ran by plan and which on demand, why ops waited,
        what was evicted, and where and why the loop left its plans. A step lasts from one step of an optimizer to the
        next; where nothing is trained, it is a call of the model without gradients, and where there is none either,
        everything since the loop was started. Of a very long step, the first quarter of a million events are shown:
        ops, their storages, copies.

        Args:
            path: the file; its folder is created. By default ``outofcore-report.html`` in the current folder.
            title: the heading; by default "loop".

        Returns:
            the file; a notebook that shows it shows the page.

        Raises:
            StateError: nothing has happened yet.
            InputError: the file cannot be written.
        """
        file, seen, machine = Path(path), self._what_happened(), this_machine()
        notes = [
            *observed_notes(seen, self._made),
            (
                "machine",
                f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory_bytes)} of memory, "
                f"{machine.kernel}",
            ),
            ("versions", f"PyTorch {torch.__version__} with {torch.get_num_threads()} threads"),
        ]
        content = page_content(
            seen.graph,
            seen.plan,
            seen.program,
            [("measured", seen.timeline)],
            Page(title or "loop", self._limit, homes=LINKS, notes=notes),
            Beyond(LINKS, seen.memory, seen.on_demand, departure_marks(seen)),
        )
        write_report(file, content)
        return ReportPath(file)

    def trace(self, path: str | os.PathLike[str], *, beside: str | os.PathLike[str] | None = None) -> None:
        """Write the last complete step, as for ``report``, as a trace that Perfetto and chrome://tracing open.

        Ops are of the category "planned" or "on demand"; where the loop left its plan, there is a mark.

        Args:
            path: the file, compressed if its name ends in ``.gz``; its folder is created.
            beside: a trace that ``torch.profiler`` exported of that step: both are then in the file, on one axis of
                time (to about a millisecond).

        Raises:
            StateError: nothing has happened yet.
            InputError: a file cannot be read or written.
        """
        seen = self._what_happened()
        write_trace(
            Path(path),
            seen.graph,
            seen.program,
            [("measured", seen.timeline)],
            began_ns=seen.began_ns,
            beside=None if beside is None else Path(beside),
            beyond=Beyond(LINKS, seen.memory, seen.on_demand, departure_marks(seen)),
        )

    def _repr_html_(self) -> str:
        state = "stopped" if self._space is None else "followed"
        return facts_html(f"loop within {format_bytes(self._limit)}, {state}", loop_facts(self.stats))

    def __repr__(self) -> str:
        state = "stopped" if self._space is None else "followed"
        return f"<loop within {format_bytes(self._limit)}, {state}: {self.stats!r}>"

    def _opened(self, library: ctypes.CDLL) -> int:
        index, planned = self._device.index or 0, self._policy is not None
        space = call(library, "follow_new", self._limit, index, _VERIFIED[self._check], int(planned))
        try:
            if self._on_gpu:
                call(library, "follow_add_home", space, -1, -1, 1, self._host_capacity())
                return space
            in_memory = self._home == "host"
            if in_memory or self._host_limit is not None:
                file = _memory_file()
                call(library, "follow_add_home", space, file, file, 1, self._host_capacity())
            if not in_memory:
                named = self._home is not None and self._home != "disk"
                spill = SpillFile(Path(self._home) if named and self._home else default_spill_directory())
                try:
                    call(library, "follow_add_home", space, *spill.duplicate(), 0, _DISK_CAPACITY)
                finally:
                    spill.close()
            self._reserve(library, space)
        except BaseException:
            library.follow_close(space)
            raise
        return space

    def _take_turn(self, library: ctypes.CDLL, space: int) -> None:
        """Follow a space; raises ``StateError`` if another loop is followed, or a compiled step is open."""
        if is_followed():
            raise StateError(
                f"a loop is followed already{self._where_other()}, and there is one at a time: end that one with "
                "outofcore.stop(), or by leaving its with-statement"
            )
        open_paging(library, space, self._beside)

    def _where_other(self) -> str:
        # In a frame of its own: those of an error would keep the other loop.
        return next((one._started_at() for one in _alive(_started) if one is not self and one.is_running()), "")

    def _started_at(self) -> str:
        return f" at {self._where}" if self._where else ""

    def is_open(self) -> bool:
        """Return whether the loop was started by a user, in this process, and has not ended."""
        return self._space is not None and not self._beside and self._process == os.getpid()

    def is_running(self) -> bool:
        """Return whether the ops of some thread of this process are followed now."""
        return self._space is not None and not self._paused and self._process == os.getpid()

    def _native(self) -> ctypes.CDLL:
        return load_paging(Flavor.CUDA) if self._on_gpu else load_paging()

    def _planned_by(self) -> str:
        return f"{self._policy!r} on {self._device.type}" if self._on_gpu else repr(self._policy)

    def _host_capacity(self) -> int:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return memory if self._host_limit is None else min(memory, self._host_limit)

    def _reserve(self, library: ctypes.CDLL, space: int) -> None:
        shares = shares_of(self._limit, self._device) if self._on_gpu else Shares(self._limit, 0, 0)
        self._room = shares.room
        if call(library, "follow_reserve", space, shares.arena, shares.spare, shares.segments) == 0:
            raise ArenaError(
                f"{self._device} does not give {format_bytes(shares.arena)} for the arena; lower the budget, or free "
                "what else lies there"
            )

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        ours = tensor.device == self._device if self._on_gpu else tensor.device.type == "cpu"
        return tensor.layout is torch.strided and ours

    def _remember(self) -> None:
        self._last = self._read_stats()
        try:
            self._happened = self._observe()
        except MemoryError as error:
            self._happened = None
            _log.warning("there is no report of the loop: %s", error)

    def _what_happened(self) -> Observed:
        with self._lock:
            happened = self._happened if self._space is None else self._observe()
        seen = None
        if happened is not None:
            policy = self._made[-1].policy if self._made else "on demand"
            seen = read_observed(*happened, self._limit, policy)
        if seen is None or not seen.graph.ops:
            raise StateError(
                "there is nothing to tell yet: no step of the loop is complete, and none of its ops has used a tensor "
                "of 64 KiB or more; call this when a step is done"
            )
        return seen

    def _observe(self) -> tuple[Sequence[int], Sequence[str], Names]:
        library = self._native()
        count = call(library, "follow_observed", self._space, None, 0)
        while True:  # other threads may go on meanwhile
            numbers = (ctypes.c_int64 * count)()
            told = call(library, "follow_observed", self._space, numbers, count)
            if told <= count:
                break
            count = told
        names = library.follow_observed_names(self._space).decode().splitlines()
        return numbers[:told], names, self._names(library)

    def _names(self, library: ctypes.CDLL) -> Names:
        """Return the names of models' and optimizers' storages, by number."""
        found: Names = {}
        elsewhere = _trained_elsewhere()
        named: dict[int, str] = {}  # parameters, by identity

        def note(tensor: object, name: str, kind: StorageKind) -> None:
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, _UNINITIALIZED):
                return
            for part in parts_of(tensor):
                if not self._is_ours(part):
                    continue
                number = library.follow_number(self._space, storage_address(part.untyped_storage()))
                if number >= 0:
                    found.setdefault(number, (name, kind))
            if kind is StorageKind.PARAMETER and id(tensor) not in elsewhere:
                note(tensor.grad, f"gradient of {name}", StorageKind.GRADIENT)

        for prefix, model in self.named_models():
            for name, parameter in model.named_parameters():
                named[id(parameter)] = prefix + name
                note(parameter, prefix + name, StorageKind.PARAMETER)
            for name, buffer in model.named_buffers():
                note(buffer, prefix + name, StorageKind.BUFFER)
        for optimizer in _alive(self._optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for place, parameter in enumerate(parameters):
                name = named.get(id(parameter), f"parameter {place}")
                note(parameter, name, StorageKind.PARAMETER)
                state = optimizer.state.get(parameter)
                for key, value in state.items() if isinstance(state, dict) else ():
                    note(value, f"{key} of {name}", StorageKind.OPTIMIZER_STATE)
        return found

    def named_models(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models, with the prefix of their modules' names."""
        for place, model in enumerate(self._models):
            yield f"models[{place}]." if len(self._models) > 1 else "", model

    def _read_stats(self) -> LoopStats:
        expected = len(fields(LoopStats)) - 2  # steps and plans are counted here
        counts = (ctypes.c_int64 * expected)()
        told = self._native().follow_counters(self._space, counts, expected)
        if told != expected:
            raise StateError(f"the native code has {told} counters, and {expected} are expected: please report it")
        return LoopStats(*counts, steps=self._steps, plans=self._plans)

    def _adopt_models(self) -> None:
        tensors = [tensor for model in self._models for tensor in tensors_of(model)]
        is_long = sum(tensor.nbytes for tensor in tensors if self._is_ours(tensor)) >= _LONG
        with following(self.on_progress, show=None if is_long else False) as tell:
            self.adopt(tensors, tell, len(tensors))

    def adopt(self, tensors: Iterable[torch.Tensor], tell: Tell = silent, count: int = 0) -> None:
        """Move tensors to the home, whoever owns their memory."""
        with self._lock:
            if self._space is not None:
                self._adopt(self._native(), tensors, tell, count)

    def _adopt(self, library: ctypes.CDLL, tensors: Iterable[torch.Tensor], tell: Tell, count: int) -> None:
        mapped = None if self._on_gpu else MappedFiles()
        files: dict[FileMapping, int] = {}
        left = 0
        for done, tensor in enumerate(tensors, 1):
            tell("move the model to its home", done - 1, count)
            if not self._is_ours(tensor):
                continue
            storage = tensor.untyped_storage()
            # What a file of weights was read into belongs to somebody else, who has no use for it any more. What others
            # see stays where they see it.
            if mapped is None or not mapped.is_shared(tensor):
                address = library.follow_memory(storage_address(storage))
                mapping = mapped and mapped.find(address, storage.nbytes())
                number = -1 if mapping is None else self._file_number(library, mapping, files)
                offset = 0 if mapping is None else mapping.offset + address - mapping.begin
                taken = call(library, "follow_adopt", storage_address(storage), number, offset)
                left += storage.nbytes() if taken == _HAS_ARRAY else 0
        if count:
            tell("move the model to its home", count, count)
        if left:
            _log.warning(
                "%s of parameters and buffers stay where they are, beside the budget: a NumPy array was taken of them, "
                "and may still show them; take arrays of clones, as by .detach().clone().numpy()",
                format_bytes(left),
            )

    def _file_number(self, library: ctypes.CDLL, mapping: FileMapping, files: dict[FileMapping, int]) -> int:
        """Return the number by which the native code knows a file; -1 if it cannot be read."""
        if mapping not in files:
            file = mapping.open()
            files[mapping] = -1 if file is None else call(library, "follow_add_file", self._space, file)
        return files[mapping]

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer that is about to step, in some thread."""
        if not self._native().follow_tracked():
            _others_optimizers[id(optimizer)] = optimizer
            return
        _others_optimizers.pop(id(optimizer), None)
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        held += [p for group in optimizer.param_groups for p in group["params"]]
        self.adopt(part for tensor in held for part in parts_of(tensor))

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer that has stepped, in some thread."""
        if not self._native().follow_tracked():
            return
        if self._sign is Sign.BACKWARD:  # the passes until now were parts of this step
            self._steps -= self._passes
        self._note_end(Sign.OPTIMIZER, weakref.ref(optimizer))

    def after_backward(self) -> None:
        """Handle the end of a complete backward pass."""
        if self._sign is Sign.OPTIMIZER or self._beside or not self._is_here():
            return
        self._passes += 1
        if self._passes > 1:
            self._steps += self._passes == 2  # the first one was a step as well
            self._note_end(Sign.BACKWARD, user_line())

    def after_call(self, model: nn.Module) -> None:
        """Handle the end of a call of a model."""
        if self._sign is Sign.CALL and self._is_here() and not torch.is_grad_enabled():
            self._note_end(Sign.CALL, weakref.ref(model))

    def _is_here(self) -> bool:
        return self.is_running() and threading.get_ident() == self._thread

    def _note_end(self, sign: Sign, source: Hashable) -> None:
        """End a step if this sign does (see ``Sign``)."""
        if sign > self._sign:
            self._sign, self._leader = sign, None
            self._others.clear()
        self._steps += 1
        # A step of a compiled one's is a call.
        if not self._beside and self._is_here() and self._ends_step(source):
            self.end_of_step()

    def _watch_calls(self) -> None:
        for model in self._models:
            if not self._beside and not isinstance(model, torch.jit.ScriptModule):
                hook = model.register_forward_hook(_CallHook(self))
                self._undo.callback(_remove, _held(hook))

    def end_of_step(self) -> None:
        """End a step of the loop, and begin to plan it or to follow its plan."""
        with self._lock:
            if self._space is not None:
                try:
                    self._end_step(self._native())
                except MemoryError as error:  # the optimizer has stepped: to plan is not worth an error
                    _log.warning("the step that has ended is not planned: %s", error)

    def _end_step(self, library: ctypes.CDLL) -> None:
        planner = self._planner
        wanted = call(library, "follow_end_of_step", self._space)
        if planner is None:
            return
        reruns = self._read_stats().reruns
        remade, self._reruns = reruns > self._reruns, reruns
        if self._trial is not None:
            self._trial.step_ended()
        if (done := planner.poll()) is not None:
            record, answer = done
            planned = answer.planned
            if planned is None:
                _log.info("no plan of a step of %d ops: %s", record.ops, answer.reason)
            else:
                schedule = schedule_of(record, planned.plan, planned.program)
                plan = FollowedPlan(schedule, planned.plan.policy, planned.timeline.step_seconds)
                self._follow_plan(library, record, plan, answer.seconds)
                self._store.keep(record, self._room, self._planned_by(), plan)
        if wanted and not planner.is_busy:
            self._remade = remade
            self._plan_step(library, planner)

    def _ends_step(self, source: Hashable) -> bool:
        """Return whether this source of the sign ends a step of the loop, always the same of several."""
        leader = self._leader
        gone = leader is None or (isinstance(leader, weakref.ref) and leader() is None)
        if gone or source in self._others:
            self._leader = source
        elif source != leader:
            self._others.add(source)
            return False
        self._others.clear()
        return True

    def _plan_step(self, library: ctypes.CDLL, planner: BackgroundPlanner[StepRecord]) -> None:
        count = call(library, "follow_proposal", self._space, None, 0)
        if count == 0:
            return
        numbers = (ctypes.c_int64 * count)()
        call(library, "follow_proposal", self._space, numbers, count)
        names = library.follow_names(self._space).decode().splitlines()
        record = read_record(numbers[:], names)
        kept = self._store.find(record, self._room, self._planned_by())
        if kept is None and self._policy is not None:
            small = -(-self._read_stats().peak_small_bytes // _SMALL_STEP) * _SMALL_STEP
            budget = int((self._room - small) * (1 - _SPARE))
            planner.start(record, PlanJob(record.graph, record.costs, budget, self._policy))
        elif kept is not None:
            self._follow_plan(library, record, kept, 0.0)

    def _follow_plan(self, library: ctypes.CDLL, record: StepRecord, plan: FollowedPlan, planning: float) -> None:
        numbers = plan.schedule.numbers()
        call(library, "follow_schedule", self._space, record.anchor, (ctypes.c_int64 * len(numbers))(*numbers))
        self._plans += 1
        made = PlanMade(self._steps, record.ops, plan.policy, plan.seconds, planning)
        self._made = [*self._made[1 - _TOLD_PLANS :], made]
        _log.info(
            "a step of %d ops is followed by %s: %.3f s predicted, planned in %.1f s",
            record.ops,
            plan.policy,
            plan.seconds,
            planning,
        )
        if self._trial is not None:
            rate = record.costs.homes[0].bytes_per_s_out
            self._trial.plan_made(plan.seconds, record.costs.compute_seconds, rate, remade=self._remade)


def _memory_file() -> int:
    """Return the descriptor of a new file in host memory; raises ``SpillError`` if the system refuses."""
    try:
        return os.memfd_create("outofcore")
    except OSError as error:
        raise SpillError(
            f"no file can be created in host memory ({error.strerror}); lift the limit on open files (ulimit -n), or "
            "use a disk home"
        ) from error


class _CallHook:
    """Reports each call of a model to a loop while that exists. Copies of it, also pickled ones, do nothing."""

    def __init__(self, loop: Loop | None = None) -> None:
        self._loop = None if loop is None else weakref.ref(loop)

    def __call__(self, model: nn.Module, *_: object) -> None:
        # What is traced, such as the branches of torch.cond, must not break there; it is no call that ends a step.
        if torch.compiler.is_compiling():
            return
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.after_call(model)

    def __reduce__(self) -> tuple[type[_CallHook], tuple[()]]:
        return _CallHook, ()


# Loops that were started, and perhaps stopped since, by their identities.
_started: weakref.WeakValueDictionary[int, Loop] = weakref.WeakValueDictionary()


def _alive(those: weakref.WeakValueDictionary[int, _T]) -> list[_T]:
    """List the objects that still exist, at once: other threads may add objects meanwhile."""
    return [found for reference in those.valuerefs() if (found := reference()) is not None]


# Optimizers that have stepped in threads that no loop follows.
_others_optimizers: Optimizers = weakref.WeakValueDictionary()


def _trained_elsewhere() -> set[int]:
    """Return the ids of parameters that another thread trains.

    PyTorch crashes where one thread reads the gradient of a parameter while another one sets it to None.
    """
    groups = [group for optimizer in _alive(_others_optimizers) for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _running() -> list[Loop]:
    return [loop for loop in _alive(_started) if loop.is_running()]


# The hooks of loops in models. Before a lost loop's ``__del__`` runs, garbage collection clears the weak references of
# what it collects, also the one by which a handle finds what to remove.
_handles: set[RemovableHandle] = set()


def _held(hook: RemovableHandle) -> RemovableHandle:
    _handles.add(hook)
    return hook


def _remove(hook: RemovableHandle) -> None:
    hook.remove()
    _handles.discard(hook)


def _models_running() -> Iterator[tuple[str, nn.Module]]:
    for loop in _running():
        yield from loop.named_models()


_sources = Sources(_models_running)


def stop_loops() -> bool:
    """End all loops of ``outofcore.budget`` that run or are paused, in any thread; return whether there was any."""
    running = [loop for loop in _alive(_started) if loop.is_open()]
    for loop in running:
        loop.end()
    return bool(running)


def _after_backward(complete: bool) -> None:
    for library in loaded_pagings():
        library.follow_leave_thread()  # a loop that has ended in backward
    for loop in _running() if complete else ():
        loop.after_backward()


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for loop in () if torch.compiler.is_compiling() else _running():
        loop.before_optimizer_step(optimizer)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for loop in () if torch.compiler.is_compiling() else _running():
        loop.after_optimizer_step(optimizer)


_optimizer_hooks = OptimizerHooks(_before_optimizer_step, _after_optimizer_step)


@contextlib.contextmanager
def _seen() -> Iterator[None]:
    with (
        _addresses.watching(),
        without_python_dispatch(DISPATCH_KEY),
        backward_passes_seen(_after_backward),
        _optimizer_hooks,
    ):
        yield


_patches = Overlapping(_seen)


def _fix(storage: torch.UntypedStorage, in_others: bool) -> None:
    flavor = _FLAVORS.get(storage.device.type)
    library = None if flavor is None else loaded_paging(flavor)
    if library is not None and not (in_others and library.follow_is_opener()):
        call(library, "follow_fix", storage_address(storage))


@contextlib.contextmanager
def _storage_held(storage: torch.UntypedStorage) -> Iterator[None]:
    flavor = _FLAVORS.get(storage.device.type)
    library = None if flavor is None else loaded_paging(flavor)
    held = library is not None and call(library, "follow_hold", storage_address(storage)) == 1
    try:
        yield
    finally:
        if library is not None and held:
            library.follow_unhold()


_addresses = AddressWatch(_fix, _storage_held, has_pieces, trampoline)


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers and gradients with memory, except gradients that another thread may change."""
    elsewhere = _trained_elsewhere()
    for parameter in model.parameters():
        if not isinstance(parameter, nn.parameter.UninitializedParameter):
            yield from parts_of(parameter)
            if id(parameter) not in elsewhere and parameter.grad is not None:
                yield from parts_of(parameter.grad)
    for buffer in model.buffers():
        if not isinstance(buffer, nn.parameter.UninitializedBuffer):
            yield from parts_of(buffer)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor consists of, such as integers and scales of a quantised one; else itself.

    Tensors that consist of others have no memory, and list them by PyTorch's protocol.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from parts_of(getattr(tensor, name))


def explained(error: BaseException, names: Names | None = None) -> Exception | None:
    """Convert an error of the native code to one of the library's; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    refused = _REFUSAL.search(text)
    if refused is None:
        return error_of(text)
    counts = {name: format_bytes(int(count)) for name, count in refused.groupdict().items() if name != "op"}
    held = f", and {counts['kept']} cannot be moved" if int(refused["kept"]) else ""
    if int(refused["small"]):
        held += f", beside {counts['small']} of tensors below {counts['smallest']}"
    if int(refused["beside"]):
        held += f"; {counts['beside']} are kept for libraries, tensors below {counts['smallest']} and holes"
    named = _named(refused["op"], error.__traceback__, names or {})
    return BudgetError(
        f"the budget of {counts['budget']} cannot hold {named}: beside {counts['used']} that it uses it asks for "
        f"{counts['asked']}{held}. Give a budget of at least {counts['least']}, or smaller batches",
        int(refused["least"]),
    )


def _named(op: str, trace: TracebackType | None, names: Names) -> str:
    """Name an op with its module and the user's line."""
    summed = _SUMMED.search(op)
    if summed is None and IN_BACKWARD in op:
        return op
    module, line = _sources.find(places_of(trace))
    at = f" at {line}" if line else ""
    if summed is not None:
        return op[: summed.start()] + IN_BACKWARD + names.get(int(summed[1]), ("a parameter",))[0] + at
    return op + (f" in {module}" if module else "") + at
