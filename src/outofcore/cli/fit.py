"""Whether a model that is known by its configuration fits a device, how fast it is there, and what would help.

The step is captured without weights. Of layers that are alike a few are captured, and the others are made of those
(``estimation.repeating``); where layers do not match, all of them are captured. So a step of any size takes a second or
less, and the largest that fits is searched for with the deep step itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter

from outofcore import planning
from outofcore.cli.answer import Say
from outofcore.cli.configs import (
    ConfiguredStep,
    ModelConfig,
    Training,
    Unit,
    at_once,
    configured_step,
    dtype_of,
    length_of,
)
from outofcore.costs import Costs
from outofcore.errors import BudgetError, CaptureError, InputError, OutOfCoreError, is_out_of_memory
from outofcore.estimation.costing import estimated_step
from outofcore.estimation.repeating import KEPT, Step, deepened, same_step
from outofcore.graph import StepGraph, StorageKind
from outofcore.planning import PolicyLike, SearchParams
from outofcore.presets import Device, device
from outofcore.progress import Tell, following, silent
from outofcore.report import columns, step_report
from outofcore.units import format_bytes, format_seconds

# An answer is wanted within seconds, so candidates are not tuned further, and few are placed. Training plans again,
# with more effort.
SWIFT = SearchParams(further=0, placed=2, polish_ops=0)
# Into how many pieces logits and loss are cut where that is asked about.
_PIECES = 8


@dataclass(frozen=True)
class Axis:
    """A size of a step that may be chosen.

    Attributes:
        field: of ``Training``.
        what: it counts.
        stride: sizes are multiples of this.
        most: the largest that is looked at, in strides.
        is_models: whether that is the model's own limit.
        least: no size is smaller.
    """

    field: str
    what: str
    stride: int
    most: int
    is_models: bool = False
    least: int = 1

    def sized(self, training: Training, count: int) -> Training:
        """Return a way of training at so many strides."""
        return replace(training, **{self.field: max(count * self.stride, self.least)})


SAMPLES = Axis("batch", "samples", 1, 1 << 16)


def tokens_of(found: ModelConfig) -> Axis:
    """Return the lengths of a model's sequences: multiples of 64, which kernels like, unless it has few positions."""
    most = found.sequence_limit or 1 << 24
    stride = 64 if most >= 4 * 64 else 1
    return Axis("sequence", "tokens", stride, max(most // stride, 1), found.sequence_limit is not None, least=2)


@dataclass(frozen=True)
class Need:
    """What a step needs.

    Attributes:
        smallest_budget: bytes that can hold it, whatever moves.
        in_core_budget: bytes from which on nothing needs to move, as plain training would have it.
        compute_seconds: all ops once; None without a device.
        bound_seconds: no plan for the device's memory is quicker; None without a device, or where it does not fit.
    """

    smallest_budget: int
    in_core_budget: int
    compute_seconds: float | None
    bound_seconds: float | None


@dataclass(frozen=True)
class Largest:
    """The largest size of a step that fits a device.

    Attributes:
        size: tokens of a sequence, or samples of a batch; 0: not even the least fits.
        step: sizes are multiples of this.
        limit: it is the model's own limit, or the largest that was looked at: the device holds more.
        smallest_budget: of the step of this size, captured whole.
        next_smallest_budget: that of the next size; None where ``limit``.
        placed: whether a plan for this size, with everything leaving that may leave, was placed on the device.
        certainty: how sure this is, in words.
        in_core: about how large it may be until something needs to move; None where that is not known.
    """

    size: int
    step: int
    limit: bool
    smallest_budget: int
    next_smallest_budget: int | None
    placed: bool
    certainty: str
    in_core: int | None = None


@dataclass(frozen=True)
class Change:
    """What the step would need if something were done otherwise.

    Attributes:
        what: in words.
        flag: of the command line that does so; "" where there is none.
        need: of the changed step.
    """

    what: str
    flag: str
    need: Need


@dataclass(frozen=True)
class Planned:
    """A plan for a budget, as far as it is told.

    Attributes:
        budget: bytes.
        fits: whether there is a plan.
        seconds: of a step; None where there is no plan, or no device.
        items_per_s: tokens, images or seconds of audio a second.
        bytes_out, bytes_in: copied in a step.
        bound_seconds: no plan is quicker.
        reason: why it does not fit.
    """

    budget: int
    fits: bool
    seconds: float | None = None
    items_per_s: float | None = None
    bytes_out: int = 0
    bytes_in: int = 0
    bound_seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Fit:
    """All that is said of a configuration. Bytes and seconds throughout."""

    title: str
    unit: Unit
    items: float
    parameters: int
    trained: int
    device: Device | None
    need: Need
    plans: tuple[Planned, ...]
    longest: Largest | None
    batch: Largest | None
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    warning: str = ""
    took_seconds: float = field(default=0.0, compare=False)

    @property
    def fits(self) -> bool:
        """Whether all that was asked about fits."""
        return all(plan.fits for plan in self.plans)


class Captures:
    """Steps of one configuration, made once for each way of training, with costs of the device ``where``.

    The first is made of a few blocks of layers, and captured with one less. If that is not what follows from the few,
    this and all others are captured with all of their layers; so they are if ``repeats`` is False.
    """

    def __init__(self, found: ModelConfig, where: Device, tell: Tell = silent, *, repeats: bool | None = None) -> None:
        self._found, self._where, self._tell = found, where, tell
        self._known: dict[Training, Step] = {}
        self._few: dict[Training, Step] = {}  # the same steps, of few blocks
        self._smallest: dict[Training, int] = {}
        self._placed: dict[tuple[Training, int], bool] = {}
        # Whether layers that are alike are made of a few; None: not known yet.
        self._repeats = repeats

    @property
    def repeats(self) -> bool:
        """Whether steps were made of layers that are alike."""
        return bool(self._repeats)

    def of(self, training: Training) -> tuple[StepGraph, Costs]:
        """A step with its costs; raises as ``fit`` does."""
        if training not in self._known:
            self._known[training] = self._repeated(training) or self._captured(training)[1]
        step = self._known[training]
        return step.graph, step.costs

    def smallest(self, training: Training) -> int:
        """The smallest budget of a step; raises as ``fit`` does."""
        if training not in self._smallest:
            self._smallest[training] = planning.smallest_budget(*self.of(training))
        return self._smallest[training]

    def placed(self, training: Training, memory: int) -> bool:
        """Whether a plan in which everything leaves between two uses lies within a memory.

        Of layers that are alike a few are planned for, within the memory that the constants and small tensors of the
        others leave.
        """
        if (training, memory) not in self._placed:
            graph, costs = self.of(training)
            room = memory
            if training in self._few:
                few = self._few[training]
                room -= self.smallest(training) - planning.smallest_budget(few.graph, few.costs)
                graph, costs = few.graph, few.costs
            self._placed[training, memory] = False
            with contextlib.suppress(BudgetError):
                planning.plan_step(graph, costs, room, "offload-all")
                self._placed[training, memory] = True
        return self._placed[training, memory]

    def fitted(self, training: Training, memory: int) -> None:
        """Take it that there is a plan for a step within a memory: one was made."""
        self._placed[training, memory] = True

    def _repeated(self, training: Training) -> Step | None:
        """Return a step made of a few of its layers that are alike; None where that is not so, or cannot be told."""
        if self._repeats is False:
            return None
        try:
            step, shallow = self._captured(replace(training, blocks=KEPT))
            if not step.stacks:
                self._repeats = False
                return shallow  # nothing was left out
            deep = deepened(shallow, step.stacks)
            if deep is not None and self._repeats is None:
                _, shallower = self._captured(replace(training, blocks=KEPT - 1))
                expected = deepened(shallow, step.stacks, KEPT - 1)
                deep = deep if expected is not None and same_step(expected, shallower) else None
            if deep is not None:
                self._few[training] = shallow
        except (InputError, CaptureError):
            deep = None  # its code counts on all of its layers; or the whole model fails as well, and says why
        if self._repeats is None:
            self._repeats = deep is not None
        return deep

    def _captured(self, training: Training) -> tuple[ConfiguredStep, Step]:
        """Return the step as configured, and as captured."""
        step = configured_step(self._found, training)
        try:
            return step, estimated_step(step.user, step.inputs, self._where, self._tell)
        except CaptureError as error:
            raise CaptureError(
                f"{self._found.path}: {self._found.kind.__name__} cannot be captured as one graph: {error} It can be "
                "trained as it is within outofcore.budget(...), but not planned for ahead."
            ) from error
        except OutOfCoreError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # What transformers makes of its inputs is its own affair, and mostly that of the configuration.
            raise InputError(
                f"{self._found.path}: a step of {self._found.kind.__name__} fails: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:400]}; its fields contradict each other, or the model wants other "
                "inputs: then write a function that builds your step, and give it as my_script.py:build"
            ) from error


def fit(
    found: ModelConfig,
    training: Training,
    card: Device | None,
    budgets: tuple[int, ...],
    policy: PolicyLike,
    tell: Tell,
    say: Say | None = None,
) -> Fit:
    """Answer for a configuration; without a ``card`` only bytes are told.

    What is known before anything is captured goes to ``say`` at once.

    Raises:
        InputError: an option does not go with the model.
        CaptureError: the step cannot become one graph.
    """
    start = perf_counter()
    captures = Captures(found, card or device("a100-80gb"), tell)
    # A length that was left open is known from here on, so that nothing is captured twice.
    training = replace(training, sequence=training.sequence or length_of(found, training))
    step = configured_step(found, training)
    if say is not None:
        say(at_once(step, training))
    graph, costs = captures.of(training)
    if not graph.ops:
        raise InputError(f"{found.path}: nothing is computed in a step of {found.kind.__name__}")
    memory = None if card is None else card.memory_bytes
    need = _need(graph, costs, memory)
    wanted = (*budgets, *([] if memory is None else [memory]))
    bounds = {} if memory is None or need.bound_seconds is None else {memory: need.bound_seconds}
    plans = tuple(_planned(graph, costs, budget, policy, step.items, card, bounds) for budget in dict.fromkeys(wanted))
    for plan in plans:
        if plan.fits:
            captures.fitted(training, plan.budget)
    longest = batch = None
    limit = memory if memory is not None else (min(budgets) if budgets else None)
    if limit is not None:
        tell("search for the largest that fits", 0, 2)
        if step.sequence is not None:
            longest = _Largest(captures, training, tokens_of(found), limit).found(step.sequence, need)
        tell("search for the largest that fits", 1, 2)
        batch = _Largest(captures, training, SAMPLES, limit).found(training.batch, need)
        tell("search for the largest that fits", 2, 2)
    changes = _changes(captures, found, training, memory, tell)
    if card is None:
        need = replace(need, compute_seconds=None, bound_seconds=None)
    return Fit(
        title=step.title,
        unit=step.unit,
        items=step.items,
        parameters=step.parameters,
        trained=step.trained,
        device=card,
        need=need,
        plans=plans,
        longest=longest,
        batch=batch,
        changes=tuple(sorted(changes, key=partial(_rank, need, limit))),
        notes=step.notes,
        warning=step.warning,
        took_seconds=perf_counter() - start,
    )


def _need(graph: StepGraph, costs: Costs, memory: int | None) -> Need:
    smallest = planning.smallest_budget(graph, costs)
    whole = planning.in_core_budget(graph, costs)
    bound = None
    if memory is not None and memory >= smallest:
        bound = costs.compute_seconds if whole <= memory else _bound(graph, costs, memory)
    return Need(smallest, whole, costs.compute_seconds if memory is not None else None, bound)


def _bound(graph: StepGraph, costs: Costs, budget: int) -> float:
    """Seconds that no plan beats."""
    return max(planning.lower_bound_seconds(graph, costs, budget) or 0.0, costs.compute_seconds)


def _planned(
    graph: StepGraph,
    costs: Costs,
    budget: int,
    policy: PolicyLike,
    items: float,
    card: Device | None,
    bounds: dict[int, float],
) -> Planned:
    try:
        planned = planning.plan_step(graph, costs, budget, policy, params=SWIFT)
        if card is None:
            return Planned(budget, True)
        bound = bounds.get(budget) or _bound(graph, costs, budget)
    except BudgetError as error:
        return Planned(budget, False, reason=str(error))
    seconds = planned.timeline.step_seconds
    report = step_report(graph, planned.plan, planned.program, planned.timeline, budget)
    rate = items / seconds if seconds else None
    return Planned(budget, True, seconds, rate, report.bytes_out, report.bytes_in, min(bound, seconds))


# The largest that fits


class _Largest:
    """The search for the longest sequence, or the largest batch, that fits a memory; in strides of the axis."""

    def __init__(self, captures: Captures, training: Training, axis: Axis, memory: int) -> None:
        self._captures, self._training, self._axis, self._memory = captures, training, axis, memory

    def _smallest(self, count: int) -> int:
        return self._captures.smallest(self._axis.sized(self._training, count))

    def found(self, now: int, need: Need) -> Largest:
        """Return the largest size, given one, with what the step needs there."""
        axis, memory = self._axis, self._memory
        size = _search(self._smallest, {now / axis.stride: need.smallest_budget}, memory, axis.most)
        how = "worked out from layers that are alike" if self._captures.repeats else "captured whole"
        if not size:
            least, why = self._smallest(1), f"the least size was {how}, and does not fit"
            return Largest(0, axis.stride, False, least, least, False, why)
        placed = self._captures.placed(axis.sized(self._training, size), memory)
        largest = Largest(size * axis.stride, axis.stride, False, self._smallest(size), None, placed, "")
        if size == axis.most:
            why = (
                "which is all that the model has positions for"
                if axis.is_models
                else "and nothing larger was looked at"
            )
            return replace(largest, limit=True, certainty=f"the device holds this, {why}")
        planned = "planned for" if placed else "not planned for"
        told = f"{how}, and {planned}; the next size, likewise, does not fit"
        in_core = self._in_core(now / axis.stride, need, size)
        in_core = None if in_core is None else in_core * axis.stride
        return replace(largest, next_smallest_budget=self._smallest(size + 1), certainty=told, in_core=in_core)

    def _in_core(self, now: float, need: Need, size: int) -> int | None:
        """Return about the size up to which nothing needs to move, by a straight line through two that are known."""
        if need.in_core_budget > self._memory and now <= 1:
            return 0
        above = planning.in_core_budget(*self._captures.of(self._axis.sized(self._training, size)))
        if above <= self._memory:
            return size
        known = {now: need.in_core_budget, float(size): above}
        where = _where(known, self._memory) if now != size else None
        return None if where is None else max(min(int(where), size), 0)


def _search(need: Callable[[int], int], known: dict[float, int], memory: int, most: int) -> int:
    """The largest count up to ``most`` whose need is within a memory; 0: none.

    Needs rise with the count, nearly as straight lines: the next count is where the line through the last two, or
    through one and nothing, meets the memory; halves of the interval where that does not close in.
    """
    points = dict(known)

    def fits(count: int) -> bool:
        if count not in points:
            points[count] = need(count)
        return points[count] <= memory

    low, high = 0, most + 1
    for tries in range(64):
        if high - low <= 1:
            break
        # Every fourth time the interval is halved, in case needs are no line.
        guess = _where(points, memory) if tries % 4 < 3 else None
        count = (low + high) // 2 if guess is None else int(guess)
        count = min(max(count, low + 1), high - 1)
        if fits(count):
            low = count
        else:
            high = count
        # If the line is right, the count beside closes the interval.
        if guess is not None and high - low > 1 and abs(guess - count) <= 1 and len(points) > 2:
            beside = count + 1 if low == count else count - 1
            if fits(beside):
                low = beside
            else:
                high = beside
    return low


def _where(points: dict[float, int], memory: int) -> float | None:
    """Where the line through the two points nearest to the memory meets it; None: it does not rise.

    Of a single point, the line from nothing to it.
    """
    points = points if len(points) > 1 else {0.0: 0, **points}
    if len(points) < 2:
        return None
    near = sorted(points, key=lambda count: abs(points[count] - memory))[:2]
    rise = (points[near[1]] - points[near[0]]) / (near[1] - near[0])
    return None if rise <= 0 else near[0] + (memory - points[near[0]]) / rise


# What would help


def _changes(
    captures: Captures, found: ModelConfig, training: Training, memory: int | None, tell: Tell
) -> list[Change]:
    graph, costs = captures.of(training)
    changes: list[Change] = []
    pieces = _in_pieces(found, training, graph)
    if pieces is not None:
        changes.append(Change(f"logits and loss in {_PIECES} pieces", "", _need(pieces, costs, memory)))
    wanted: list[tuple[str, str, Training]] = []
    if training.trains:
        if not training.checkpointing:
            wanted.append(("gradient checkpointing", "--checkpointing", replace(training, checkpointing=True)))
        if training.lora is None:
            wanted.append(("LoRA of rank 16", "--lora 16", replace(training, lora=16)))
    if dtype_of(found, training).itemsize == 4:
        wanted.append(("parameters in bfloat16", "--dtype bf16", replace(training, dtype="bf16")))
    for number, (what, flag, other) in enumerate(wanted):
        tell("try what would help", number, len(wanted))
        try:
            changed, its_costs = captures.of(other)
        except (InputError, CaptureError, ModuleNotFoundError):
            continue  # a model without checkpointing, no peft: then it is no help
        changes.append(Change(what, flag, _need(changed, its_costs, memory)))
    tell("try what would help", len(wanted), len(wanted))
    return changes


def _in_pieces(found: ModelConfig, training: Training, graph: StepGraph) -> StepGraph | None:
    """The step with what has a number for each token and each word of the vocabulary cut down; None: there is nothing.

    As a loss that is computed for some tokens at a time would have it: of logits, their copies and gradients only a
    piece is there.
    """
    words, length = getattr(found.text, "vocab_size", None), training.sequence
    if not isinstance(words, int) or not found.reads_tokens:
        return None
    counts = [s.bytes for s in graph.storages if s.kind is StorageKind.INPUT]
    tokens = training.batch * length if length else max((count // 8 for count in counts), default=0)
    # A language model may leave out the last token of each sample.
    lengths = {tokens, tokens - training.batch}
    whole = {count * words * item for count in lengths for item in (2, 4) if count > 0}
    cut = [s for s in graph.storages if s.kind is StorageKind.ACTIVATION and s.bytes in whole]
    if not cut:
        return None
    smaller = {s.id: replace(s, bytes=s.bytes // _PIECES) for s in cut}
    return replace(graph, storages=tuple(smaller.get(s.id, s) for s in graph.storages))


def _rank(now: Need, memory: int | None, change: Change) -> tuple[float, float]:
    """The best first: what makes it fit, then what makes it quick, then what takes the fewest bytes."""
    need = change.need
    if memory is None or need.bound_seconds is None:
        return (float("inf"), need.smallest_budget if memory is not None else need.in_core_budget)
    return (need.bound_seconds, need.in_core_budget)


# What is said


def content_of(found: Fit) -> dict[str, object]:
    """An answer as JSON: bytes and seconds throughout, null where nothing is known."""
    return {
        "model": found.title,
        "unit": found.unit.value,
        "items_per_step": found.items,
        "parameters": found.parameters,
        "trained_parameters": found.trained,
        "device": None if found.device is None else found.device.key,
        "device_bytes": None if found.device is None else found.device.memory_bytes,
        "simulated": None if found.device is None else found.device.describe(),
        **asdict(found.need),
        "fits": found.fits if found.plans else None,
        "plans": [asdict(plan) for plan in found.plans],
        "longest_sequence": None if found.longest is None else asdict(found.longest),
        "largest_batch": None if found.batch is None else asdict(found.batch),
        "changes": [asdict(change) for change in found.changes],
        "notes": [*([found.warning] if found.warning else []), *found.notes],
        "took_seconds": found.took_seconds,
    }


def text_of(found: Fit) -> str:
    """An answer for people."""
    need = found.need
    rows = [
        ("smallest budget", f"{format_bytes(need.smallest_budget)} ({need.smallest_budget} bytes)"),
        ("nothing moves", f"from {format_bytes(need.in_core_budget)} ({need.in_core_budget} bytes) on"),
    ]
    if need.compute_seconds is not None:
        rows.append(("ops alone", f"{format_seconds(need.compute_seconds)} a step{_rate(found, need.compute_seconds)}"))
    for plan in found.plans:
        rows.append((f"within {format_bytes(plan.budget)}", _plan_text(found, plan)))
    if found.longest is not None:
        rows.append(("longest sequence", _largest_text(found.longest, "tokens")))
    if found.batch is not None:
        rows.append(("largest batch", _largest_text(found.batch, "samples")))
    parts = [found.title, *([found.warning] if found.warning else [])]
    if found.device is not None:
        parts.append(f"SIMULATED: {found.device.describe()}")
    parts.append("\n".join(f"  {name:<18} {value}" for name, value in rows))
    if found.changes:
        head = (
            "what would change it",
            "smallest",
            "nothing moves",
            *(("step, at best",) if found.device else ()),
            "by",
        )
        table = [head, *(_change_row(found, change) for change in found.changes)]
        parts.append(columns(table))
    parts += [f"note: {note}" for note in found.notes]
    if found.device is None:
        parts.append("note: no times are told without a device: name one with --gpu, such as --gpu rtx4090-24gb")
    return "\n".join(parts)


def _rate(found: Fit, seconds: float) -> str:
    return f", {found.items / seconds:,.0f} {found.unit.value} a second" if seconds and found.items else ""


def _plan_text(found: Fit, plan: Planned) -> str:
    if not plan.fits:
        lacking = found.need.smallest_budget - plan.budget
        return f"does not fit: {format_bytes(lacking)} are lacking" if lacking > 0 else "no plan was found"
    if plan.seconds is None:
        return "fits"
    how = "fits, with copies" if plan.bytes_in or plan.bytes_out else "fits, and nothing moves"
    bound = plan.bound_seconds or 0.0
    off = "" if plan.seconds <= 1.01 * bound else f"; no plan is quicker than {format_seconds(bound)}"
    return f"{how}: {format_seconds(plan.seconds)} a step{_rate(found, plan.seconds)}{off}"


def _largest_text(found: Largest, what: str) -> str:
    if not found.size:
        return f"none fits: {found.certainty}"
    core = "" if found.in_core is None else f"; nothing moves up to about {found.in_core}"
    core = "; something moves at any size" if found.in_core == 0 else core
    return f"{found.size} {what}{core} ({found.certainty})"


def _change_row(found: Fit, change: Change) -> tuple[str, ...]:
    need = change.need
    times: tuple[str, ...] = ()
    if found.device is not None:
        bound = need.bound_seconds
        times = ("does not fit",) if bound is None else (f"{format_seconds(bound)}{_rate(found, bound)}",)
    return (
        change.what,
        format_bytes(need.smallest_budget),
        format_bytes(need.in_core_budget),
        *times,
        change.flag or "-",
    )


def answer(
    found: ModelConfig,
    training: Training,
    *,
    card: Device | None,
    budgets: tuple[int, ...],
    policy: PolicyLike,
    as_json: bool,
    say: Say = print,
) -> bool:
    """Say what there is to say of a configuration; False: something that was asked about does not fit."""
    with following(silent if as_json else None) as tell:
        known = fit(found, training, card, budgets, policy, tell, None if as_json else say)
    say(json.dumps(content_of(known), indent=2) if as_json else text_of(known))
    return known.fits
