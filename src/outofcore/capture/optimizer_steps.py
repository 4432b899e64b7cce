"""Record each ``optimizer.step()`` as update ops, and run it on fakes to find the state tensors that it creates."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outofcore._torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    has_global_optimizer_hooks,
)
from outofcore.analysis.chunks import extent
from outofcore.capture.captured import CPU, Call, Ref, StateBinding, Value
from outofcore.capture.device_traits import traits_of
from outofcore.capture.mirror import Mirror, MirroredState
from outofcore.capture.operators import value_text
from outofcore.capture.optimizers import (
    Member,
    OptimizerUpdate,
    Rehearsal,
    StateOwner,
    as_leaf,
    is_torch_optimizer,
    run_shadow,
    updates_independently,
)
from outofcore.capture.patching import capturing_thread, patch_attribute
from outofcore.capture.provenance import Provenance
from outofcore.capture.refusals import higher_order_refusal, refusal
from outofcore.capture.tables import Tables, leaves_in
from outofcore.errors import CaptureError, OutOfCoreError
from outofcore.graph import StorageKind


@dataclass(frozen=True)
class TensorShape:
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of the smallest storage that can hold the tensor."""
        return extent(self.shape, self.stride) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def shape_of(tensor: torch.Tensor | Value) -> TensorShape:
    stride = tensor.stride if isinstance(tensor, Value) else tensor.stride()
    return TensorShape(tensor.dtype, tuple(tensor.shape), stride)


# An optimizer reads its step count only to compute factors, which do not affect its state's layout.
class _StubValues(TorchDispatchMode):
    """A dispatch mode that answers reads of fake tensors' values with arbitrary constants, and skips fused updates."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise higher_order_refusal(func.name(), "")
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            dtype = args[0].dtype
            return True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 2
        if name == "aten::equal":
            return True
        if name.startswith("aten::_fused_") and name.endswith("_"):
            return None
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class StateLayout:
    tensors: dict[str, TensorShape]  # planned state
    order: tuple[str, ...]  # all names, in the order in which the optimizer creates them
    place: int  # index of the parameter among all with state


class StateLayouts:
    """Finds the dtypes, shapes and strides of an optimizer's state, once per parameter layout."""

    def __init__(self, optimizer: Optimizer, device: torch.device = CPU) -> None:
        self._optimizer = optimizer
        self._device = device
        self._layouts: dict[Any, list[StateLayout]] = {}

    def find(
        self,
        members: Sequence[tuple[int, torch.Tensor]],
        grads: Sequence[TensorShape | None],
        ranges: Sequence[TensorShape] | None = None,
    ) -> list[StateLayout]:
        """Return the layout of the optimizer state of each member (group index, parameter).

        State on another device than the step's is left out. ``ranges`` are the shapes to update, by default the
        parameters' shapes. Raises ``CaptureError`` if the optimizer's step fails on fakes or creates unsupported state.
        """
        entries = [self._optimizer.state.get(parameter, {}) for _, parameter in members]
        shapes = ranges or [shape_of(parameter) for _, parameter in members]
        alike = tuple(
            (group, shape, parameter.device, grad, tuple((n, _layout_key(v)) for n, v in entry.items()))
            for (group, parameter), shape, grad, entry in zip(members, shapes, grads, entries, strict=True)
        )
        if alike not in self._layouts:
            self._layouts[alike] = self._rehearse(members, grads, shapes, entries)
        return self._layouts[alike]

    def _rehearse(
        self,
        members: Sequence[tuple[int, torch.Tensor]],
        grads: Sequence[TensorShape | None],
        shapes: Sequence[TensorShape],
        entries: Sequence[dict[str, Any]],
    ) -> list[StateLayout]:
        """Run two optimizer steps on fake tensors, and return the layouts of the resulting state."""
        optimizer = self._optimizer
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _StubValues():
            leaves: list[tuple[int, torch.Tensor]] = []
            for (group, _), grad, shape in zip(members, grads, shapes, strict=True):
                fake = shape.empty(self._device)
                leaves.append((group, as_leaf(fake, grad.empty(self._device) if grad else None)))
            state = [
                {name: self._make_fake(value, mode, parameter, group) for name, value in entry.items()}
                for entry, (group, parameter) in zip(entries, members, strict=True)
            ]
            shadow = optimizer
            places: dict[int, int] = {}
            try:
                # Some optimizers create state at the second step.
                for _ in range(2):
                    shadow = run_shadow(optimizer, leaves, state)
                    state = [dict(shadow.state.get(leaf) or {}) for _, leaf in leaves]
                    for key in shadow.state:
                        places.setdefault(id(key), len(places))
            except OutOfCoreError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"the step of {type(optimizer).__name__} cannot be tried on tensors without contents: {error}; use "
                    "an optimizer of torch.optim, or call its step() once before the training step is compiled"
                ) from error
        self._refuse_hidden_tensors(shadow, [leaf for _, leaf in leaves])
        return [
            StateLayout(self._planned_tensors(entry), tuple(entry), places.get(id(leaf), 0))
            for entry, (_, leaf) in zip(state, leaves, strict=True)
        ]

    def _make_fake(self, value: Any, mode: FakeTensorMode, parameter: torch.Tensor, group: int) -> Any:
        """Create a fake of a state tensor on the device that it has during the step; copy any other value."""
        if isinstance(value, torch.Tensor):
            # Moments move with their parameter, even if only one of the two is on the device now. So does a step count,
            # unless the optimizer keeps it on the CPU.
            settings = self._optimizer.param_groups[group]
            follows = value.ndim > 0 or bool(settings.get("fused") or settings.get("capturable"))
            moves = value.device == self._device or (follows and value.device in (parameter.device, CPU))
            with mode:
                return shape_of(value).empty(self._device if moves else value.device)
        return copy.deepcopy(value)

    def _planned_tensors(self, entries: dict[str, Any]) -> dict[str, TensorShape]:
        """Return the layouts of the state tensors that are on the step's device; refuse nested tensors."""
        tensors: dict[str, TensorShape] = {}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                if not isinstance(name, str):
                    raise self._hidden_state_error(f"under the key {name!r}, which is not text,")
                if value.device == self._device:
                    tensors[name] = shape_of(value)
            elif leaves_in(value):
                raise self._hidden_state_error(f"inside a {type(value).__name__} in its state {name!r}")
        return tensors

    def _refuse_hidden_tensors(self, shadow: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse an optimizer that has stored a tensor outside of the state of its parameters."""
        allowed = {"state", "param_groups", *map(id, parameters)}
        candidates = [
            (f"in its attribute {name!r}", value) for name, value in vars(shadow).items() if name not in allowed
        ]
        for group in shadow.param_groups:
            candidates += [(f"in its setting {name!r}", value) for name, value in group.items() if name != "params"]
        unassigned = [value for key, value in shadow.state.items() if id(key) not in allowed]
        for description, value in (*candidates, ("in its state, but not of one of its parameters", unassigned)):
            if leaves_in(value, FakeTensor):
                raise self._hidden_state_error(description)

    def _hidden_state_error(self, location: str) -> CaptureError:
        return CaptureError(
            f"{type(self._optimizer).__name__} keeps a tensor {location} where its bytes cannot be planned: state must "
            "be in optimizer.state[parameter][name]; keep it there, or use another optimizer"
        )


def _layout_key(value: Any) -> Any:
    return (shape_of(value), value.device) if isinstance(value, torch.Tensor) else type(value)


_PendingMember = tuple[int, MirroredState, int | None]  # group, parameter, value of its gradient


@dataclass
class _PendingUpdate:
    """An update recorded in the trace before its state is known."""

    place: int  # index in ``Tables.ops``
    optimizer: int
    call: int  # number of the ``step`` call
    members: Sequence[_PendingMember]


class StepRecorder:
    """Records update ops in place of ``optimizer.step()`` of the given optimizers during a capture."""

    def __init__(self, optimizers: Sequence[Optimizer], mirror: Mirror, tables: Tables, provenance: Provenance) -> None:
        for optimizer in optimizers:
            check_supported(optimizer)
        self._optimizers = list(optimizers)
        self._tables = tables
        self._provenance = provenance
        self._by_real = mirror.by_real
        self._is_sharded = mirror.sharding is not None
        self._pending: list[_PendingUpdate] = []
        self._calls = 0
        self.bindings: list[StateBinding] = []

    @property
    def has_updates(self) -> bool:
        return bool(self._pending)

    @contextlib.contextmanager
    def replace_steps(self, report_written: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
        """Record each ``optimizer.step()`` in this context; pass all fakes that it may change to ``report_written``."""
        known_ids, is_capturing = {id(optimizer) for optimizer in self._optimizers}, capturing_thread()

        def refuse(optimizer: Optimizer, *_: Any) -> None:
            """Refuse a step of an unknown optimizer, and a call of ``step`` through a saved reference."""
            if not is_capturing():
                return
            name = type(optimizer).__name__
            if id(optimizer) in known_ids:
                raise refusal(
                    f"{name}.step is called through a saved reference",
                    "the capture does not see such a call",
                    "call optimizer.step()",
                )
            raise refusal(
                f"the step uses an optimizer ({name}) that was not given",
                "its state would be neither planned nor updated",
                "add it to the list of optimizers",
            )

        with contextlib.ExitStack() as stack:
            handle = register_optimizer_step_pre_hook(refuse)
            stack.callback(handle.remove)
            for index, optimizer in enumerate(self._optimizers):
                stack.enter_context(patch_attribute(optimizer, "step", self._recording_step(index, report_written)))
            yield

    def _recording_step(self, index: int, report_written: Callable[[list[torch.Tensor]], None]) -> Callable[..., None]:
        """Return a replacement for ``step`` that records the update of optimizer ``index``."""

        def step(closure: Any = None) -> None:
            if closure is not None:
                raise refusal(
                    "optimizer.step is called with a closure",
                    "the number of its calls depends on values",
                    "call loss.backward() and then optimizer.step() without arguments",
                )
            report_written(self._record(index))

        # A scheduler created inside of the step checks this before it wraps the method.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    def _record(self, index: int) -> list[torch.Tensor]:
        """Record the update ops of optimizer ``index``; return the fakes of its parameters and gradients."""
        optimizer = self._optimizers[index]
        self._calls += 1
        members: list[_PendingMember] = [
            (number, state, self._gradient(state))
            for number, group in enumerate(optimizer.param_groups)
            for state in [self._by_real[id(p)] for p in group["params"]]
        ]
        with DisableTorchFunction():
            touched = [t for _, state, _ in members for t in (state.fake, state.fake.grad) if t is not None]
        if not updates_independently(optimizer):
            if any(grad is not None for _, _, grad in members):
                self._append_update(index, members)
            return touched
        # Updates that create state allocate differently, so they are grouped separately.
        small: dict[tuple[int, bool], list[_PendingMember]] = {}
        sizes = traits_of(self._tables.device).update_bytes
        for group, state, grad in members:
            if grad is None:
                continue
            if self._bytes(state) >= sizes.alone:
                self._append_update(index, [(group, state, grad)])
                continue
            key = group, bool(optimizer.state.get(state.real))
            chunk = small.setdefault(key, [])
            if sum(self._bytes(queued) for _, queued, _ in chunk) + self._bytes(state) > sizes.chunk:
                self._append_update(index, chunk)
                chunk = small[key] = []
            chunk.append((group, state, grad))
        for chunk in small.values():
            self._append_update(index, chunk)
        return touched

    def _bytes(self, state: MirroredState) -> int:
        """Return the size of a parameter in bytes, or the size of one process's chunk if it is sharded."""
        traced = state.traced
        return state.real.numel() * state.real.element_size() if traced is None else traced.shard.chunk_bytes

    def _gradient(self, state: MirroredState) -> int | None:
        """Return the value index of a parameter's gradient, or None if it has no gradient; refuse a sparse gradient."""
        with DisableTorchFunction():
            grad = state.fake.grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise refusal(
                f"the gradient of {state.name} is sparse",
                "its size depends on values",
                "create the embedding with sparse=False",
            )
        if state.traced is not None:
            state.traced.sync()
            return state.traced.own_gradient_value(grad)
        storage = self._tables.storages[self._tables.storage_of(grad)]
        if storage.created and storage.kind is StorageKind.ACTIVATION:
            storage.kind, storage.name = StorageKind.GRADIENT, f"{state.name}.grad"
        return self._tables.value_of(grad)

    def _append_update(self, index: int, members: Sequence[_PendingMember]) -> None:
        """Record an update op of optimizer ``index`` for ``members``; ``finish`` adds its state and arguments later."""
        _, source = self._provenance.locate_op()
        place = self._tables.append(
            f"optimizer.{type(self._optimizers[index]).__name__}",
            Call(_placeholder_update, (), {}, ()),
            rerunnable=False,
            random=not is_torch_optimizer(self._optimizers[index]),
            module=members[0][1].name.rpartition(".")[0],
            source=source,
        )
        self._pending.append(_PendingUpdate(place, index, self._calls, members))
        for _, state, _ in members:
            if state.traced is not None:
                state.traced.gather_updated()

    def finish(self) -> None:
        """Find the state tensors of recorded updates, and complete their ops. Call this outside of PyTorch modes."""
        layouts = [StateLayouts(optimizer, self._tables.device) for optimizer in self._optimizers]
        created: list[set[tuple[int, str, int]]] = [set() for _ in self._optimizers]
        values_by_state: dict[tuple[int, int, str], int] = {}
        for pending in self._pending:
            members, values = self._bind_states(pending, layouts[pending.optimizer], values_by_state)
            update = OptimizerUpdate(self._optimizers[pending.optimizer], members, created[pending.optimizer])
            self._complete_op(pending, update, values)

    def _bind_states(
        self, pending: _PendingUpdate, layouts: StateLayouts, values_by_state: dict[tuple[int, int, str], int]
    ) -> tuple[list[Member], list[list[int]]]:
        """Register an update's state tensors; return its members, and the value indices of each member's state."""
        optimizer = self._optimizers[pending.optimizer]
        reals = [(group, state.real) for group, state, _ in pending.members]
        grads = [None if g is None else shape_of(self._tables.values[g]) for _, _, g in pending.members]
        shapes = [shape_of(self._tables.values[state.persistent[1]]) for _, state, _ in pending.members]
        if updates_independently(optimizer):
            rows = zip(reals, grads, shapes, strict=True)
            state_layouts = [layouts.find([real], [grad], [shape])[0] for real, grad, shape in rows]
        else:
            state_layouts = layouts.find(reals, grads, shapes)
        members: list[Member] = []
        values: list[list[int]] = []
        # Parameters that are updated separately were rehearsed separately; the groups define their order.
        places = {
            id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        for (group, state, _), layout in zip(pending.members, state_layouts, strict=True):
            state_values: list[int] = []
            for name, planned in layout.tensors.items():
                key = (pending.optimizer, id(state.real), name)
                real = optimizer.state.get(state.real, {}).get(name)
                # If it still grows, the step is captured again.
                is_real = isinstance(real, torch.Tensor) and not self._is_sharded
                shape = shape_of(real) if is_real else planned
                if key not in values_by_state:
                    values_by_state[key] = self._bind_state(pending.optimizer, state, name, shape)
                state_values.append(values_by_state[key])
            place = places[id(state.real)] if updates_independently(optimizer) else layout.place
            rank = pending.call, place
            members.append(Member(state.real, group, tuple(layout.tensors), rank=rank, order=layout.order))
            values.append(state_values)
        return members, values

    def _bind_state(self, index: int, state: MirroredState, name: str, shape: TensorShape) -> int:
        """Register a storage and a binding for a state tensor of optimizer ``index``; return its value index."""
        optimizer = self._optimizers[index]
        count, traced = shape.bytes, state.traced
        if traced is not None and shape.shape == (traced.shard.count,):
            count = traced.shard.chunks.chunk_elements * shape.dtype.itemsize  # the same in all processes
        storage = self._tables.add_storage(count, StorageKind.OPTIMIZER_STATE, f"{state.name}.{name}")
        value = self._tables.index_of(Value(storage, shape.dtype, shape.shape, shape.stride))
        real = optimizer.state.get(state.real, {}).get(name)
        self.bindings.append(
            StateBinding(
                key=f"optimizer.{index}.state.{state.key}.{name}",
                kind=StorageKind.OPTIMIZER_STATE,
                tensor=real if isinstance(real, torch.Tensor) else None,
                value=value,
                owner=StateOwner(optimizer, state.real, name),
            )
        )
        return value

    def _complete_op(self, pending: _PendingUpdate, update: OptimizerUpdate, states: list[list[int]]) -> None:
        """Complete a recorded update op: set its call, its cost family and the storages that it uses."""
        values = self._tables.values
        params = [state.persistent[1] for _, state, _ in pending.members]
        grads = [None if grad is None else Ref(grad) for _, _, grad in pending.members]
        args = (
            [Ref(value) for value in params],
            grads,
            [[Ref(value) for value in row] for row in states],
        )
        written = [*params, *(value for row in states for value in row)]
        read = [*written, *(grad.value for grad in grads if grad is not None)]
        if not is_torch_optimizer(update.optimizer):
            # An unknown class may add weight decay to the gradient in place.
            written = read
        op, _ = self._tables.ops[pending.place]
        op = replace(
            op,
            reads=tuple(dict.fromkeys(values[value].storage for value in read)),
            mutates=tuple(dict.fromkeys(values[value].storage for value in written)),
            family=family_of_update(op.name, update, args, values),
        )
        self._tables.ops[pending.place] = op, call_of_update(update, args)


# Learning rates may be 0 during warm-up, with the same kernels.
_RATES = ("lr", "initial_lr")
# The arguments of an update: parameters, gradients, and state tensors per parameter.
UpdateArguments = tuple[Sequence[Ref], Sequence[Ref | None], Sequence[Sequence[Ref]]]


def call_of_update(update: OptimizerUpdate, args: UpdateArguments) -> Call:
    rehearsal = Rehearsal(update)
    return Call(update, args, {}, (), rehearsal, rehearsal.run_first if rehearsal.creates_state else None)


def family_of_update(name: str, update: OptimizerUpdate, args: UpdateArguments, values: Sequence[Value]) -> str:
    """Return a text key that is equal for updates of equal cost."""
    texts = ",".join(
        f"{value_text(values[p.value])}:{'-' if g is None else value_text(values[g.value])}:"
        + "+".join(value_text(values[ref.value]) for ref in states)
        for p, g, states in zip(*args, strict=True)
    )
    first = "first; " if update.creates_state() else ""
    more = "" if all(member.is_last for member in update.members) else "others follow; "
    return f"{name}({_settings_text(update)}; {first}{more}{texts})"


def _settings_text(update: OptimizerUpdate) -> str:
    """Format the settings of an update's parameter groups that affect which kernels run."""
    groups = dict.fromkeys(member.group for member in update.members)
    parts: list[str] = []
    for index in groups:
        for name, value in sorted(update.optimizer.param_groups[index].items()):
            if name not in _RATES and (text := _setting_text(value)) is not None:
                parts.append(f"{name}={text}")
    return ",".join(parts)


def _setting_text(value: object) -> str | None:
    """Format one optimizer setting; None for a type that no kernel depends on."""
    match value:
        case None | bool() | str():
            return str(value)
        case int() | float():
            return "0" if value == 0 else "number"
        case (int() | float(), *_):
            return " ".join(str(_setting_text(item)) for item in value)
        case _:
            return None


def _placeholder_update(*_: Any) -> None:
    """Stand for an update until its state is known."""


def check_supported(optimizer: Optimizer) -> None:
    """Raise ``CaptureError`` for an optimizer that cannot be captured, such as LBFGS or one with step hooks."""
    for applies, reason, advice in _UNSUPPORTED:
        if applies(optimizer):
            raise CaptureError(f"the optimizer {type(optimizer).__name__} cannot be used: {reason}; {advice}.")


_UNSUPPORTED: tuple[tuple[Callable[[Any], Any], str, str], ...] = (
    (
        lambda o: isinstance(o, LBFGS),
        "it runs the forward and backward an unknown number of times",
        "use a first-order optimizer",
    ),
    (
        lambda o: isinstance(o, SparseAdam),
        "the sizes of sparse gradients depend on values",
        "use Adam with dense gradients",
    ),
    (
        lambda o: o.defaults.get("differentiable"),
        "its updates are part of an autograd graph",
        "create it with differentiable=False",
    ),
    (
        lambda o: o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks or has_global_optimizer_hooks(),
        "hooks are registered on its step, and an update runs a few parameters at a time",
        "do their work before or after optimizer.step() in the training step",
    ),
    (
        lambda o: "step" in vars(o) and not hasattr(o.step, "_wrapped_by_lr_sched"),
        "its step method has been replaced",
        "pass the optimizer without its wrapper",
    ),
    (
        lambda o: any(isinstance(value, Optimizer | nn.Module) for value in vars(o).values()),
        "it wraps another optimizer or a module",
        "pass the inner optimizer and write the remaining code in the step",
    ),
    (
        lambda o: getattr(o, "grad_scale", None) is not None or getattr(o, "found_inf", None) is not None,
        "a GradScaler is attached to it",
        "use torch.autocast with bfloat16, which needs no scaler",
    ),
)
