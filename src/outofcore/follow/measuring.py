"""Measure the needs of a loop in a run that may exceed its budget, and predict step times under smaller budgets."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore import planning
from outofcore.errors import OutOfCoreError
from outofcore.follow.records import StepRecord, read_record
from outofcore.follow.space import Space
from outofcore.graph import StorageKind
from outofcore.planning import QUICK, PolicyLike
from outofcore.units import PAGE_BYTES, format_bytes, round_up

# Fractions of the peak in core for which times are predicted.
FRACTIONS = (0.75, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted step time within a budget."""

    budget: int
    slowdown: float | None  # relative to the step time in core; None if no plan exists, or no step came twice
    fits: bool  # whether every op of the loop fits the budget

    @property
    def text(self) -> str:
        """A few words for people, such as "1.25 times the step time in core (predicted)" or "too small"."""
        if not self.fits:
            return "too small"
        if self.slowdown is None:
            return "runs; its time is not predicted"
        return f"{max(self.slowdown, 1.0):.2f} times the step time in core (predicted)"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The needs of a loop, as measured by ``outofcore.budget(..., measure=True)``.

    Attributes:
        steps: number of measured steps.
        in_core_bytes: peak bytes of all tensors of the loop, evicted ones included: the smallest budget with which no
            tensor moves, and about the peak of plain PyTorch.
        smallest_budget: bytes that hold every op that ran; 0 if no op touched a large tensor.
        op: the op that needs the smallest budget, with its module and the line of your code.
        predicted: times within 3/4, 1/2 and 1/4 of ``in_core_bytes``, of the step that creates the most bytes.

    >>> print(Measurement(3, 4 << 20, 1 << 20, "aten::mm in 0 (Linear)", (Predicted(2 << 20, 1.5, True),)))
    measured 3 steps
      in core          4.00 MiB (4194304 bytes): nothing moves from here on
      smallest budget  1.00 MiB (1048576 bytes), which aten::mm in 0 (Linear) needs
      within 2.00 MiB  1.50 times the step time in core (predicted)
    """

    steps: int
    in_core_bytes: int
    smallest_budget: int
    op: str
    predicted: tuple[Predicted, ...] = ()

    def __str__(self) -> str:
        if not self.smallest_budget:
            return f"measured {self.steps} steps: no op used a tensor of 64 KiB or more"
        rows = [
            ("in core", f"{_exact_bytes(self.in_core_bytes)}: nothing moves from here on"),
            ("smallest budget", f"{_exact_bytes(self.smallest_budget)}, which {self.op} needs"),
            *((f"within {format_bytes(prediction.budget)}", prediction.text) for prediction in self.predicted),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"measured {self.steps} steps", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _exact_bytes(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"


@dataclass(frozen=True)
class LoopNeeds:
    steps: int
    in_core_bytes: int
    smallest_budget: int
    op: str
    rooms: tuple[
        tuple[int, int], ...
    ]  # budgets that are fractions of ``in_core_bytes``, each with its room for tensors
    largest_step: StepRecord | None  # the step that creates the most bytes; None if no step came twice

    def measurement(self, policy: PolicyLike) -> Measurement:
        """Return the measurement, with a predicted time for each budget of ``rooms``. Predictions take seconds."""
        if not self.smallest_budget:
            return Measurement(self.steps, 0, 0, "")
        predicted = tuple(self._predict(budget, room, policy) for budget, room in self.rooms)
        return Measurement(self.steps, self.in_core_bytes, self.smallest_budget, self.op, predicted)

    def _predict(self, budget: int, room: int, policy: PolicyLike) -> Predicted:
        """Predict how much slower a step runs within ``budget``, of which ``room`` bytes are left for tensors."""
        fits = budget >= self.smallest_budget
        if not fits or self.largest_step is None or not self.largest_step.costs.compute_seconds:
            return Predicted(budget, None, fits)
        graph, costs = self.largest_step.graph, self.largest_step.costs
        try:
            planned = planning.plan_step(graph, costs, room, policy, params=QUICK)
        except OutOfCoreError:  # without a plan, ops run on demand
            return Predicted(budget, None, fits)
        return Predicted(budget, planned.timeline.step_seconds / costs.compute_seconds, fits)


class LoopMeasurer:
    """Keeps the step that creates the most bytes, among the steps that the native code proposes for a plan."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._largest: StepRecord | None = None
        self._max_created_bytes = -1

    def on_step_end(self) -> None:
        """Keep the ended step if it creates more bytes than any earlier step."""
        numbers = self._space.read_numbers("follow_proposal")
        if not numbers:
            return
        record = read_record(numbers, self._space.read_names("follow_names"))
        created_bytes = sum(s.bytes for s in record.graph.storages if s.kind is StorageKind.ACTIVATION)
        if created_bytes > self._max_created_bytes:
            self._largest, self._max_created_bytes = record, created_bytes

    def collect_needs(self, step_count: int) -> LoopNeeds:
        """Return the loop's needs so far: peak bytes, smallest budget, and the budgets for predictions."""
        stats = self._space.read_stats(steps=step_count, plans=0)
        device, library_bytes = self._space.device, self._space.library_bytes
        need, op = self._space.largest_need() or (0, "")
        small = round_up(stats.peak_small_bytes, PAGE_BYTES)
        total = max(stats.peak_total_bytes + small, need)
        smallest, in_core = (device.budget_for(room, library_bytes) if need else 0 for room in (need, total))
        budgets = [int(in_core * part) for part in FRACTIONS]
        rooms = tuple((budget, device.room_of(budget, library_bytes) - small) for budget in budgets)
        return LoopNeeds(step_count, in_core, smallest, op, rooms, self._largest)
