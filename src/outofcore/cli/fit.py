"""Whether a model described by its configuration fits a device, its speed there, and helpful changes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter

from outofcore import planning
from outofcore.cli.answer import Printer
from outofcore.cli.configs import (
    ConfiguredStep,
    ModelConfig,
    Training,
    Unit,
    configured_step,
    parameter_dtype,
    sequence_length,
    size_text,
)
from outofcore.costs import Costs
from outofcore.errors import BudgetError, CaptureError, InputError, OutOfCoreError, is_out_of_memory
from outofcore.estimation.costing import estimate_step
from outofcore.estimation.repeating import KEPT_BLOCKS, CostedStep, are_equal_steps, deepen_step
from outofcore.graph import StepGraph, StorageKind
from outofcore.planning import PolicyLike, SearchParams
from outofcore.presets import Device, device
from outofcore.progress import ProgressCallback, ignore_progress, show_progress
from outofcore.report import columns, step_report
from outofcore.units import format_bytes, format_seconds

# The answer must come within seconds, so few candidates are placed and further tuning is off. Training plans with more
# effort.
QUICK_SEARCH = SearchParams(further=0, placed=2, polish_ops=0)
# The number of pieces of logits and loss in the change that splits them.
_PIECES = 8


@dataclass(frozen=True)
class Axis:
    """The size that a search maximises: samples per batch, or tokens per sequence."""

    field: str  # of ``Training``
    unit_name: str
    stride: int  # sizes are multiples of this
    max_strides: int  # the search limit, in strides
    is_models: bool = False  # whether that limit is the model's own
    min_size: int = 1  # the smallest size

    def training_at(self, training: Training, strides: int) -> Training:
        """Return the training options with this size set to a number of strides."""
        return replace(training, **{self.field: max(strides * self.stride, self.min_size)})


BATCH_AXIS = Axis("batch", "samples", 1, 1 << 16)


def sequence_axis(model_config: ModelConfig) -> Axis:
    """Return the axis for a search over sequence lengths."""
    max_tokens = model_config.sequence_limit or 1 << 24
    stride = 64 if max_tokens >= 4 * 64 else 1
    return Axis(
        "sequence", "tokens", stride, max(max_tokens // stride, 1), model_config.sequence_limit is not None, min_size=2
    )


@dataclass(frozen=True)
class Need:
    smallest_budget: int  # bytes
    in_core_budget: int  # the smallest budget in bytes at which all tensors stay resident
    compute_seconds: float | None  # of all ops, each run once; None without a device
    bound_seconds: float | None  # lower bound of any plan; None without a device, or if the step does not fit


@dataclass(frozen=True)
class Largest:
    size: int  # tokens of a sequence, or samples of a batch; 0: not even the smallest size fits
    step: int  # sizes are multiples of this
    limit: bool  # whether the model's own limit or the search limit was reached
    smallest_budget: int  # in bytes, for this size
    next_smallest_budget: int | None  # for the next size; None with ``limit``
    placed: bool  # whether an offload-all plan for this size was placed on the device
    certainty: str  # how the size was found, for people
    in_core: int | None = None  # about the size up to which all tensors stay resident; None: unknown


@dataclass(frozen=True)
class Change:
    """A change of options that may save memory, such as LoRA, and the needs of the changed step."""

    what: str  # for people
    flag: str  # the command-line option, if any
    need: Need


@dataclass(frozen=True)
class PlanFigures:
    budget: int  # bytes
    fits: bool
    seconds: float | None = None  # None without a plan or a device
    items_per_s: float | None = None  # tokens, images or seconds of audio per second
    bytes_out: int = 0
    bytes_in: int = 0
    bound_seconds: float | None = None  # lower bound of any plan
    reason: str = ""  # why the step does not fit


@dataclass(frozen=True)
class Fit:
    """The answer of ``outofcore plan`` for a ``config.json``, in bytes and seconds."""

    title: str
    unit: Unit
    items: float
    parameters: int
    trained: int
    device: Device | None
    need: Need
    plans: tuple[PlanFigures, ...]
    longest: Largest | None  # sequence; None without a memory size, or if the model has no sequence
    batch: Largest | None  # None without a memory size
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    warning: str = ""
    took_seconds: float = field(default=0.0, compare=False)

    @property
    def fits(self) -> bool:
        return all(plan.fits for plan in self.plans)


class Captures:
    """Captures steps of one model configuration with costs for a device, once for each ``Training``.

    A step is derived from a capture with only ``KEPT_BLOCKS`` blocks of equal layers. The first such step is checked
    against a capture with one block less. If they differ, or ``derives_steps`` is False, all layers are captured.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        target_device: Device,
        tell: ProgressCallback = ignore_progress,
        *,
        repeats: bool | None = None,
    ) -> None:
        self._model_config, self._device, self._tell = model_config, target_device, tell
        self._steps: dict[Training, CostedStep] = {}
        self._shallow_steps: dict[Training, CostedStep] = {}  # the same steps with few blocks
        self._smallest: dict[Training, int] = {}
        self._placed: dict[tuple[Training, int], bool] = {}
        # Whether equal layers are derived from a few; None: unknown yet.
        self._repeats = repeats

    @property
    def derives_steps(self) -> bool:
        return bool(self._repeats)

    def capture(self, training: Training) -> tuple[StepGraph, Costs]:
        """Return the graph and costs of a step; raise ``InputError`` or ``CaptureError`` if it cannot be captured."""
        if training not in self._steps:
            self._steps[training] = self._derive_step(training) or self._capture_step(training)[1]
        step = self._steps[training]
        return step.graph, step.costs

    def smallest_budget(self, training: Training) -> int:
        if training not in self._smallest:
            self._smallest[training] = planning.smallest_budget(*self.capture(training))
        return self._smallest[training]

    def has_plan(self, training: Training, memory: int) -> bool:
        """Return whether the policy "offload-all" finds a plan for the step within ``memory`` bytes."""
        if (training, memory) not in self._placed:
            graph, costs = self.capture(training)
            memory_left = memory
            if training in self._shallow_steps:  # a derived step: plan the captured one, with less memory
                shallow = self._shallow_steps[training]
                memory_left -= self.smallest_budget(training) - planning.smallest_budget(shallow.graph, shallow.costs)
                graph, costs = shallow.graph, shallow.costs
            self._placed[training, memory] = False
            with contextlib.suppress(BudgetError):
                planning.plan_step(graph, costs, memory_left, "offload-all")
                self._placed[training, memory] = True
        return self._placed[training, memory]

    def record_fit(self, training: Training, memory: int) -> None:
        self._placed[training, memory] = True

    def _derive_step(self, training: Training) -> CostedStep | None:
        """Derive the whole model's step from a capture with fewer layers; None if that is impossible."""
        if self._repeats is False:
            return None
        try:
            step, shallow = self._capture_step(replace(training, blocks=KEPT_BLOCKS))
            if not step.stacks:
                self._repeats = False
                return shallow  # it has all layers
            deep = deepen_step(shallow, step.stacks)
            if deep is not None and self._repeats is None:
                _, shallower = self._capture_step(replace(training, blocks=KEPT_BLOCKS - 1))
                expected = deepen_step(shallow, step.stacks, KEPT_BLOCKS - 1)
                deep = deep if expected is not None and are_equal_steps(expected, shallower) else None
            if deep is not None:
                self._shallow_steps[training] = shallow
        except (InputError, CaptureError):
            deep = None  # its code needs all layers, or the whole model fails too, with a better message
        if self._repeats is None:
            self._repeats = deep is not None
        return deep

    def _capture_step(self, training: Training) -> tuple[ConfiguredStep, CostedStep]:
        step = configured_step(self._model_config, training)
        try:
            return step, estimate_step(step.user, step.inputs, self._device, self._tell)
        except CaptureError as error:
            model = self._model_config.model_class.__name__
            raise CaptureError(
                f"{self._model_config.path}: {model} cannot be captured as one graph: {error} "
                "outofcore.budget(...) can train it, but it cannot be planned ahead."
            ) from error
        except OutOfCoreError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Errors of transformers mostly come from the configuration.
            model, text = self._model_config.model_class.__name__, " ".join(str(error).split())[:400]
            raise InputError(
                f"{self._model_config.path}: a step of {model} fails: {type(error).__name__}: {text}; correct "
                "the file if its fields contradict each other; if the model needs other inputs, write a function that "
                "builds your step, and give it as my_script.py:build"
            ) from error


def fit(
    model_config: ModelConfig,
    training: Training,
    target_device: Device | None,
    budgets: tuple[int, ...],
    policy: PolicyLike,
    tell: ProgressCallback,
    printer: Printer | None = None,
) -> Fit:
    """Compute memory needs, plans, the largest inputs that fit, and the effects of memory-saving changes."""
    start = perf_counter()
    captures = Captures(model_config, target_device or device("a100-80gb"), tell)
    # With the length set, equal steps have equal keys and are captured once.
    training = replace(training, sequence=training.sequence or sequence_length(model_config, training))
    step = configured_step(model_config, training)
    if printer is not None:
        printer(size_text(step, training))
    graph, costs = captures.capture(training)
    if not graph.ops:
        raise InputError(
            f"{model_config.path}: a step of {model_config.model_class.__name__} has no ops; "
            "check the sizes in the file"
        )
    memory = None if target_device is None else target_device.memory_bytes
    need = _step_need(graph, costs, memory)
    budgets_to_plan = (*budgets, *([] if memory is None else [memory]))
    bounds = {} if memory is None or need.bound_seconds is None else {memory: need.bound_seconds}
    plans = tuple(
        _plan_figures(graph, costs, budget, policy, step.items, target_device, bounds)
        for budget in dict.fromkeys(budgets_to_plan)
    )
    for plan in plans:
        if plan.fits:
            captures.record_fit(training, plan.budget)
    longest = batch = None
    limit = memory if memory is not None else (min(budgets) if budgets else None)
    if limit is not None:
        tell("search for the largest that fits", 0, 2)
        if step.sequence is not None:
            longest = _SizeSearch(captures, training, sequence_axis(model_config), limit).find(step.sequence, need)
        tell("search for the largest that fits", 1, 2)
        batch = _SizeSearch(captures, training, BATCH_AXIS, limit).find(training.batch, need)
        tell("search for the largest that fits", 2, 2)
    changes = _predict_changes(captures, model_config, training, memory, tell)
    if target_device is None:
        need = replace(need, compute_seconds=None, bound_seconds=None)
    return Fit(
        title=step.title,
        unit=step.unit,
        items=step.items,
        parameters=step.parameters,
        trained=step.trained,
        device=target_device,
        need=need,
        plans=plans,
        longest=longest,
        batch=batch,
        changes=tuple(sorted(changes, key=partial(_benefit_key, limit))),
        notes=step.notes,
        warning=step.warning,
        took_seconds=perf_counter() - start,
    )


def _step_need(graph: StepGraph, costs: Costs, memory: int | None) -> Need:
    """Return a step's memory needs, and its times if ``memory``, the bytes of its device, is given."""
    smallest = planning.smallest_budget(graph, costs)
    whole = planning.in_core_budget(graph, costs)
    bound = None
    if memory is not None and memory >= smallest:
        bound = costs.compute_seconds if whole <= memory else _lower_bound(graph, costs, memory)
    return Need(smallest, whole, costs.compute_seconds if memory is not None else None, bound)


def _lower_bound(graph: StepGraph, costs: Costs, budget: int) -> float:
    return max(planning.lower_bound_seconds(graph, costs, budget) or 0.0, costs.compute_seconds)


def _plan_figures(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    policy: PolicyLike,
    items: float,
    target_device: Device | None,
    bounds_by_budget: dict[int, float],
) -> PlanFigures:
    """Plan a step within a budget; return the plan's time and copies, or the reason why no plan fits."""
    try:
        planned = planning.plan_step(graph, costs, budget, policy, params=QUICK_SEARCH)
        if target_device is None:
            return PlanFigures(budget, True)
        bound = bounds_by_budget.get(budget) or _lower_bound(graph, costs, budget)
    except BudgetError as error:
        return PlanFigures(budget, False, reason=str(error))
    seconds = planned.timeline.step_seconds
    report = step_report(graph, planned.plan, planned.program, planned.timeline, budget)
    rate = items / seconds if seconds else None
    return PlanFigures(budget, True, seconds, rate, report.bytes_out, report.bytes_in, min(bound, seconds))


# The largest size that fits


class _SizeSearch:
    """Searches for the longest sequence, or the largest batch, that fits a memory size."""

    def __init__(self, captures: Captures, training: Training, axis: Axis, memory: int) -> None:
        self._captures, self._training, self._axis, self._memory = captures, training, axis, memory

    def _smallest_budget(self, count: int) -> int:
        return self._captures.smallest_budget(self._axis.training_at(self._training, count))

    def find(self, current_size: int, current_need: Need) -> Largest:
        """Find the largest size that fits, starting from the size and the needs of the user's own step."""
        axis, memory = self._axis, self._memory
        size = _search_count(
            self._smallest_budget, {current_size / axis.stride: current_need.smallest_budget}, memory, axis.max_strides
        )
        method = "derived from equal layers" if self._captures.derives_steps else "captured whole"
        if not size:
            min_budget, reason = self._smallest_budget(1), f"the smallest size was {method} and does not fit"
            return Largest(0, axis.stride, False, min_budget, min_budget, False, reason)
        placed = self._captures.has_plan(axis.training_at(self._training, size), memory)
        largest = Largest(size * axis.stride, axis.stride, False, self._smallest_budget(size), None, placed, "")
        if size == axis.max_strides:
            reason = "the model's own limit" if axis.is_models else "the search limit"
            return replace(largest, limit=True, certainty=f"{reason}, which fits the device")
        planned = "with a plan" if placed else "without a plan"
        certainty = f"{method}, {planned}; the next size does not fit"
        in_core = self._largest_in_core(current_size / axis.stride, current_need, size)
        in_core = None if in_core is None else in_core * axis.stride
        return replace(
            largest, next_smallest_budget=self._smallest_budget(size + 1), certainty=certainty, in_core=in_core
        )

    def _largest_in_core(self, current_count: float, current_need: Need, size: int) -> int | None:
        """Estimate the largest size that fits without evictions, in strides of the search; None if unknown."""
        if current_need.in_core_budget > self._memory and current_count <= 1:
            return 0
        largest_need = planning.in_core_budget(*self._captures.capture(self._axis.training_at(self._training, size)))
        if largest_need <= self._memory:
            return size
        points = {current_count: current_need.in_core_budget, float(size): largest_need}
        crossing = _interpolate_count(points, self._memory) if current_count != size else None
        return None if crossing is None else max(min(int(crossing), size), 0)


def _search_count(bytes_at: Callable[[int], int], known_bytes: dict[float, int], memory: int, max_count: int) -> int:
    """Return the largest count up to ``max_count`` that needs at most ``memory`` bytes; 0 if 1 needs more."""
    points = dict(known_bytes)

    def fits(count: int) -> bool:
        if count not in points:
            points[count] = bytes_at(count)
        return points[count] <= memory

    low, high = 0, max_count + 1
    for tries in range(64):
        if high - low <= 1:
            break
        # Every fourth guess bisects, in case needs are not linear.
        guess = _interpolate_count(points, memory) if tries % 4 < 3 else None
        count = (low + high) // 2 if guess is None else int(guess)
        count = min(max(count, low + 1), high - 1)
        if fits(count):
            low = count
        else:
            high = count
        # If the line is right, the neighbouring count closes the interval.
        if guess is not None and high - low > 1 and abs(guess - count) <= 1 and len(points) > 2:
            neighbour = count + 1 if low == count else count - 1
            if fits(neighbour):
                low = neighbour
            else:
                high = neighbour
    return low


def _interpolate_count(points: dict[float, int], memory: int) -> float | None:
    """Estimate the count that needs ``memory`` bytes from a line through two points; None without a rising line."""
    points = points if len(points) > 1 else {0.0: 0, **points}
    if len(points) < 2:
        return None
    near = sorted(points, key=lambda count: abs(points[count] - memory))[:2]
    rise = (points[near[1]] - points[near[0]]) / (near[1] - near[0])
    return None if rise <= 0 else near[0] + (memory - points[near[0]]) / rise


# Helpful changes


def _predict_changes(
    captures: Captures, model_config: ModelConfig, training: Training, memory: int | None, tell: ProgressCallback
) -> list[Change]:
    """Return how much memory and time the step needs after each single change that may save memory."""
    graph, costs = captures.capture(training)
    changes: list[Change] = []
    pieces = _with_split_loss(model_config, training, graph)
    if pieces is not None:
        changes.append(Change(f"logits and loss in {_PIECES} pieces", "", _step_need(pieces, costs, memory)))
    candidates: list[tuple[str, str, Training]] = []
    if training.trains:
        if not training.checkpointing:
            candidates.append(("gradient checkpointing", "--checkpointing", replace(training, checkpointing=True)))
        if training.lora is None:
            candidates.append(("LoRA of rank 16", "--lora 16", replace(training, lora=16)))
    if parameter_dtype(model_config, training).itemsize == 4:
        candidates.append(("parameters in bfloat16", "--dtype bf16", replace(training, dtype="bf16")))
    for number, (name, flag, changed_training) in enumerate(candidates):
        tell("try helpful changes", number, len(candidates))
        try:
            changed, changed_costs = captures.capture(changed_training)
        except (InputError, CaptureError, ModuleNotFoundError):
            continue  # e.g. a model without checkpointing, or no peft
        changes.append(Change(name, flag, _step_need(changed, changed_costs, memory)))
    tell("try helpful changes", len(candidates), len(candidates))
    return changes


def _with_split_loss(model_config: ModelConfig, training: Training, graph: StepGraph) -> StepGraph | None:
    """Return the graph with smaller logits, as if the loss were computed in pieces; None without logits."""
    vocabulary, length = getattr(model_config.text_config, "vocab_size", None), training.sequence
    if not isinstance(vocabulary, int) or not model_config.reads_tokens:
        return None
    input_bytes = [s.bytes for s in graph.storages if s.kind is StorageKind.INPUT]
    tokens = training.batch * length if length else max((count // 8 for count in input_bytes), default=0)
    # A language model may compute no loss for the last token of each sample.
    lengths = {tokens, tokens - training.batch}
    loss_sizes = {count * vocabulary * item for count in lengths for item in (2, 4) if count > 0}
    pieces = [s for s in graph.storages if s.kind is StorageKind.ACTIVATION and s.bytes in loss_sizes]
    if not pieces:
        return None
    smaller = {s.id: replace(s, bytes=s.bytes // _PIECES) for s in pieces}
    return replace(graph, storages=tuple(smaller.get(s.id, s) for s in graph.storages))


def _benefit_key(memory: int | None, change: Change) -> tuple[float, float]:
    """Return a sort key: changes with a step that fits come first, by time, then the others, by memory."""
    need = change.need
    if memory is None or need.bound_seconds is None:
        return (float("inf"), need.smallest_budget if memory is not None else need.in_core_budget)
    return (need.bound_seconds, need.in_core_budget)


# Output


def json_content(result: Fit) -> dict[str, object]:
    return {
        "model": result.title,
        "unit": result.unit.value,
        "items_per_step": result.items,
        "parameters": result.parameters,
        "trained_parameters": result.trained,
        "device": None if result.device is None else result.device.key,
        "device_bytes": None if result.device is None else result.device.memory_bytes,
        "simulated": None if result.device is None else result.device.describe(),
        **asdict(result.need),
        "fits": result.fits if result.plans else None,
        "plans": [asdict(plan) for plan in result.plans],
        "longest_sequence": None if result.longest is None else asdict(result.longest),
        "largest_batch": None if result.batch is None else asdict(result.batch),
        "changes": [asdict(change) for change in result.changes],
        "notes": [*([result.warning] if result.warning else []), *result.notes],
        "took_seconds": result.took_seconds,
    }


def answer_text(result: Fit) -> str:
    need = result.need
    rows = [
        ("smallest budget", f"{format_bytes(need.smallest_budget)} ({need.smallest_budget} bytes)"),
        ("nothing moves", f"from {format_bytes(need.in_core_budget)} ({need.in_core_budget} bytes) on"),
    ]
    if need.compute_seconds is not None:
        rows.append(
            ("ops alone", f"{format_seconds(need.compute_seconds)} per step{_rate_text(result, need.compute_seconds)}")
        )
    for plan in result.plans:
        rows.append((f"within {format_bytes(plan.budget)}", _plan_text(result, plan)))
    if result.longest is not None:
        rows.append(("longest sequence", _largest_size_text(result.longest, "tokens")))
    if result.batch is not None:
        rows.append(("largest batch", _largest_size_text(result.batch, "samples")))
    parts = [result.title, *([result.warning] if result.warning else [])]
    if result.device is not None:
        parts.append(f"SIMULATED: {result.device.describe()}")
    parts.append("\n".join(f"  {name:<18} {value}" for name, value in rows))
    if result.changes:
        head = (
            "change",
            "smallest",
            "nothing moves",
            *(("best step",) if result.device else ()),
            "option",
        )
        table = [head, *(_change_row(result, change) for change in result.changes)]
        parts.append(columns(table))
    parts += [f"note: {note}" for note in result.notes]
    if result.device is None:
        parts.append("note: step times need a device; name one, such as --device rtx4090-24gb")
    return "\n".join(parts)


def _rate_text(result: Fit, seconds: float) -> str:
    return f", {result.items / seconds:,.0f} {result.unit.value} per second" if seconds and result.items else ""


def _plan_text(result: Fit, plan: PlanFigures) -> str:
    if not plan.fits:
        missing = result.need.smallest_budget - plan.budget
        return f"does not fit: needs {format_bytes(missing)} more" if missing > 0 else "no plan was found"
    if plan.seconds is None:
        return "fits"
    verdict = "fits, with copies" if plan.bytes_in or plan.bytes_out else "fits, and nothing moves"
    bound = plan.bound_seconds or 0.0
    bound_text = "" if plan.seconds <= 1.01 * bound else f"; any plan takes at least {format_seconds(bound)}"
    return f"{verdict}: {format_seconds(plan.seconds)} per step{_rate_text(result, plan.seconds)}{bound_text}"


def _largest_size_text(largest: Largest, unit: str) -> str:
    if not largest.size:
        return f"none fits: {largest.certainty}"
    in_core_text = "" if largest.in_core is None else f"; nothing moves up to about {largest.in_core}"
    in_core_text = "; copies at any size" if largest.in_core == 0 else in_core_text
    return f"{largest.size} {unit}{in_core_text} ({largest.certainty})"


def _change_row(result: Fit, change: Change) -> tuple[str, ...]:
    need = change.need
    times: tuple[str, ...] = ()
    if result.device is not None:
        bound = need.bound_seconds
        times = ("does not fit",) if bound is None else (f"{format_seconds(bound)}{_rate_text(result, bound)}",)
    return (
        change.what,
        format_bytes(need.smallest_budget),
        format_bytes(need.in_core_budget),
        *times,
        change.flag or "-",
    )


def answer(
    model_config: ModelConfig,
    training: Training,
    *,
    target_device: Device | None,
    budgets: tuple[int, ...],
    policy: PolicyLike,
    as_json: bool,
    printer: Printer = print,
) -> bool:
    """Print a configured model's memory needs and plans; return whether every budget has a plan."""
    with show_progress(ignore_progress if as_json else None) as tell:
        result = fit(model_config, training, target_device, budgets, policy, tell, None if as_json else printer)
    printer(json.dumps(json_content(result), indent=2) if as_json else answer_text(result))
    return result.fits
