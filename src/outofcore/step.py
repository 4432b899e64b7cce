"""A compiled step: captured, profiled and planned at its first call, and run within its budget at each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import tree_flatten
from outofcore.analysis import LARGE_BYTES, is_large, live_bytes, placed_bytes
from outofcore.capture import Captured, capture_step
from outofcore.capture.signature import Signature, Signer
from outofcore.capture.whole import fastest, leanest
from outofcore.costs import Costs, Home
from outofcore.errors import SpillError, StateError
from outofcore.execution.arena import Arena
from outofcore.execution.cpu import CpuEngine
from outofcore.execution.homes import HomeStore
from outofcore.execution.slots import Slots
from outofcore.execution.state import StateKeeper
from outofcore.planning import Planned
from outofcore.profiling.cache import Cache
from outofcore.profiling.kept import OpProfile
from outofcore.profiling.links import known_link
from outofcore.profiling.ops import profile_ops
from outofcore.program import CopyIn, CopyOut, Timeline
from outofcore.replan import Entry, Planner
from outofcore.units import MIB, format_bytes

_log = logging.getLogger("outofcore")

_RESERVE_SHARE = 64  # off-plan requests may take a 64th of the budget


@dataclass(frozen=True)
class StepStats:
    """What the last call of a step did.

    Attributes:
        seconds: of the step, its own waits for copies included.
        compute_seconds: of which ops ran.
        bytes_out: moved from the arena to the home.
        bytes_in: moved from the home to the arena.
        off_plan: requests of 64 KiB and more that no address was planned for, since compilation.
        predicted_seconds: what the simulator foretold.
    """

    seconds: float
    compute_seconds: float
    bytes_out: int
    bytes_in: int
    off_plan: int
    predicted_seconds: float


class Step:
    """A training step that runs within a byte budget: made by ``outofcore.compile``, called like the step given.

    Between calls the model, its gradients and the optimizers can be read, changed, saved and evaluated
    as in plain PyTorch. One step runs at a time; a step is not to be called from several threads at once.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        budget: int,
        home: HomeStore,
        policy: str,
        cache: Cache | None = None,
    ) -> None:
        self._step = step
        self._models = list(models)
        self._optimizers = list(optimizers)
        self.budget = budget
        self.policy = policy
        self._home = home
        self._slots = Slots(home)
        self._keeper = StateKeeper(self._slots)
        self._cache = cache
        self._planner = Planner(budget, policy, self._keeper, home, cache)
        self._engine = CpuEngine(home)
        self._signer = Signer(step, self._models, self._optimizers)
        self._entries: dict[Signature, Entry] = {}
        self._active: Entry | None = None
        self._signature: Signature | None = None
        self._arena: Arena | None = None
        self._link: Home | None = None
        self._off_plan = 0  # requests counted in arenas that are gone
        self._torn = ""
        self._closed = False
        self._stats: StepStats | None = None
        self._timeline: Timeline | None = None
        self._running = threading.Lock()
        self.on_progress: Callable[[str, int, int], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one training step and return what the user's step returns, in memory of its own.

        The first call with inputs of given shapes captures, profiles and plans the step.

        Raises:
            CaptureError: the step cannot become one graph.
            BudgetError: the budget cannot hold it.
            SpillError: the home cannot hold what must leave.
            StateError: the step is closed, or an earlier call failed half way.
            TransferError: a copy failed in mid-step; the step refuses to go on.
        """
        self._check_usable()
        if not self._running.acquire(blocking=False):
            raise StateError("this step is running already; call it from one thread at a time")
        try:
            return self._call(args, kwargs)
        finally:
            self._running.release()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self._signer(args, kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        entry = self._entries.get(signature)
        if entry is None:
            if self._signature is not None:
                _log.info("capturing again: %s", self._signer.describe_change(self._signature, signature))
            entry = self._build(args, kwargs)
            self._entries[signature] = entry
        elif entry is not self._active and self._signature is not None:
            _log.info("known plan: %s", self._signer.describe_change(self._signature, signature))
        if entry is not self._active:
            self._activate(entry)
        self._signature = signature
        changed = self._keeper.refresh()
        if changed:
            _log.info("taken over what was put in place of %s", ", ".join(changed))
        try:
            result, timeline = entry.runner.run(self._engine, leaves)
        except BaseException as error:
            self._torn = f"{type(error).__name__}: {error}"
            raise
        self._timeline = timeline
        self._stats = None
        again = self._planner.after(entry, timeline)
        if again is not None:
            try:
                self._check_spill(again.captured, again.planned)
            except SpillError as error:
                # The plan that ran goes on running.
                _log.warning("the new plan is not taken: %s", error)
            else:
                self._entries[signature] = again
        return result

    def _check_usable(self) -> None:
        if self._closed:
            raise StateError("this step is closed; compile it again to go on")
        if self._torn:
            raise StateError(
                "an earlier call of this step failed half way, so that the model is part old and part new "
                f"({self._torn}); load a checkpoint into the model and compile the step again"
            )

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(stage, done, total)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Capture, profile and plan; nothing of the user's is changed."""
        self._tell("capture", 0, 1)
        traced = capture_step(self._step, self._models, self._optimizers, args, kwargs)
        self._tell("capture", 1, 1)
        if self._active is not None:
            # The device is to be profiled on alone.
            self._active.runner.leave()
            self._active = None
        self._release_arena()
        entry = self._in_core(fastest(traced)) or self._out_of_core(leanest(traced))
        self._check_spill(entry.captured, entry.planned)
        self._tell("plan", 1, 1)
        _log.info(
            "planned %d ops in %s of %s by %s: %s predicted, %s of them ops",
            len(entry.captured.graph.ops),
            format_bytes(entry.planned.program.arena_bytes),
            format_bytes(self.budget),
            entry.planned.plan.policy,
            f"{entry.planned.timeline.step_seconds:.3f} s",
            f"{entry.costs.compute_seconds:.3f} s",
        )
        return entry

    def _in_core(self, captured: Captured) -> Entry | None:
        """Planned so that nothing moves, if the budget holds that."""
        if self.policy == "offload-all" or live_bytes(captured.graph) > self.budget:
            return None
        profiles, costs = self._measured(captured)
        return self._planner.plan_in_core(captured, costs, profiles)

    def _out_of_core(self, captured: Captured) -> Entry:
        profiles, costs = self._measured(captured)
        return self._planner.plan(captured, costs, profiles, _describer(captured))

    def _measured(self, captured: Captured) -> tuple[tuple[OpProfile, ...], Costs]:
        profiles = profile_ops(
            captured, advance=lambda done, total: self._tell("profile", done, total), cache=self._cache
        )
        if self._link is None:
            self._tell("measure the home", 0, 1)
            size = min(64 * MIB, max(self.budget // 8, MIB))
            self._link = known_link(self._home, self._cache, buffer_bytes=size).home
        self._tell("plan", 0, 1)
        return profiles, Costs(tuple(profile.cost for profile in profiles), (self._link,))

    def _check_spill(self, captured: Captured, planned: Planned) -> None:
        blocks = planned.program.blocks
        moved = {blocks[i.block].storage for i in planned.program.instructions if isinstance(i, CopyOut | CopyIn)}
        sizes = [s.bytes for s in captured.graph.storages if s.id in moved and is_large(s.bytes)]
        self._slots.check(sum(placed_bytes(size) for size in sizes))

    def _activate(self, entry: Entry) -> None:
        if self._active is not None:
            self._active.runner.leave()
            self._active = None
        needed = entry.planned.program.arena_bytes
        if self._arena is None or self._arena.bytes < needed:
            self._release_arena()
            self._arena = Arena(needed, reserve=max(self.budget // _RESERVE_SHARE, LARGE_BYTES))
        entry.runner.enter(self._arena, self._slots)
        self._active = entry

    def _release_arena(self) -> None:
        if self._arena is not None:
            self._off_plan += self._arena.counters().large
            self._arena.close()
            self._arena = None

    def synchronize(self) -> None:
        """Return when everything of the last call is done. (On the CPU it is when the call returns.)"""
        self._check_usable()

    def close(self) -> None:
        """Give the model and the optimizers memory of their own again, as plain PyTorch has it, and free the rest."""
        if self._closed:
            return
        self._closed = True
        self._engine.close()
        if self._active is not None:
            self._keeper.give_back()
            self._active = None
        else:
            self._keeper.give_back()
        self._entries.clear()
        self._release_arena()
        self._home.close()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def planned(self) -> Planned:
        """The plan of the last call, with its program and the simulated timeline.

        Raises:
            StateError: the step was not called yet.
        """
        if self._active is None:
            raise StateError("the step was not called yet: it is planned at its first call")
        return self._active.planned

    @property
    def captured(self) -> Captured:
        """The capture that the last call ran.

        Raises:
            StateError: the step was not called yet.
        """
        if self._active is None:
            raise StateError("the step was not called yet: it is captured at its first call")
        return self._active.captured

    @property
    def costs(self) -> Costs:
        """The costs that the last call was planned with.

        Raises:
            StateError: the step was not called yet.
        """
        if self._active is None:
            raise StateError("the step was not called yet: it is profiled at its first call")
        return self._active.costs

    @property
    def timeline(self) -> Timeline:
        """When each instruction of the last call ran.

        Raises:
            StateError: the step was not called yet.
        """
        if self._timeline is None:
            raise StateError("the step was not called yet")
        return self._timeline

    @property
    def stats(self) -> StepStats:
        """What the last call did.

        Raises:
            StateError: the step was not called yet.
        """
        if self._stats is None:
            self._stats = self._measure()
        return self._stats

    def _measure(self) -> StepStats:
        timeline, planned = self.timeline, self.planned
        program = planned.program
        ported = set(self.captured.graph.outputs) | {
            self.captured.values[b.value].storage for b in self.captured.inputs
        }
        compute = 0.0
        moved = {CopyOut: 0, CopyIn: 0}
        for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
            if isinstance(instruction, CopyOut | CopyIn):
                block = program.blocks[instruction.block]
                if block.storage not in ported:
                    moved[type(instruction)] += block.bytes
            else:
                compute += end - start
        counters = self._arena.counters() if self._arena is not None else None
        return StepStats(
            timeline.step_seconds,
            compute,
            moved[CopyOut],
            moved[CopyIn],
            self._off_plan + (counters.large if counters else 0),
            planned.timeline.step_seconds,
        )


def _describer(captured: Captured) -> Callable[[int], str]:
    shapes = {}
    for value in captured.values:
        shapes.setdefault(value.storage, (value.shape, value.dtype))

    def describe(storage: int) -> str:
        name = captured.graph.storages[storage].name or f"storage {storage}"
        shape, dtype = shapes.get(storage, ((), None))
        return f"{name} {tuple(shape)} {str(dtype).removeprefix('torch.')}"

    return describe
