"""Record every ATen operator that a step runs on fake tensors, and its changes of random generators.

Activation checkpointing saves and restores the generator's state. Generators do not advance during a capture, so the
saved state is a token. Ops save and restore the real state when the step runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from outofcore._torch_internals import (
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    make_finished_work,
    result_leaves,
)
from outofcore.capture import collectives, operators
from outofcore.capture.captured import CPU, Call, Ref
from outofcore.capture.device_traits import default_generator, traits_of
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.capture.operators import MaskedSum, wrap_exact
from outofcore.capture.patching import patch_attribute
from outofcore.capture.provenance import Provenance, join
from outofcore.capture.reads import Reads
from outofcore.capture.refusals import (
    higher_order_refusal,
    refusal,
    translate_error,
    undeclared_tensor_refusal,
    value_dependent_gradient_refusal,
    zero_gradient_refusal,
)
from outofcore.capture.substitute import Substitute
from outofcore.capture.tables import Tables, covers, describe, leaves_in, map_leaves
from outofcore.capture.value_checks import ValueCheck, running_check
from outofcore.errors import CaptureError
from outofcore.graph import StorageKind
from outofcore.units import KIB

# Tensors made from Python data become constants of the step up to this number of elements.
MAX_BAKED_ELEMENTS = 64
# Results on other devices than the step's stay there. Larger ones are probably mistakes.
MAX_FOREIGN_BYTES = 64 * KIB

_LIFTS = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"})
_DEVICE = torch.ops.prim.device.default
_NO_TENSOR_EFFECT = frozenset({"prim", "profiler"})
# Autograd nodes that may use another formula for tensors without contents, and an operator that occurs only in it.
_BY_VALUES = {"ProdBackward0": "aten::cumprod", "ProdBackward1": "aten::cumprod", "CumprodBackward0": "aten::prod"}
# Refused operators by prefix: message, reason and advice.
_REFUSED = {
    ("aten::_amp_", "aten::_fused_adagrad", "aten::_fused_adam", "aten::_fused_sgd"): (
        "the step calls {name}",
        "it takes many tensors at once and cannot be split",
        "leave it to optimizer.step()",
    ),
}


class OpRecorder(TorchDispatchMode):
    """A dispatch mode that records each operator that runs on fake tensors as an op on storages."""

    # Otherwise PyTorch raises an error before ``__torch_dispatch__`` is called.
    supports_higher_order_operators = True

    def __init__(
        self, tables: Tables, provenance: Provenance, user: Substitute, layouts: KernelLayouts | None, reads: Reads
    ) -> None:
        super().__init__()
        self._tables, self._provenance, self._device = tables, provenance, tables.device
        self._may_check = traits_of(tables.device).is_synchronous
        self._user, self._known = user, user.known
        self._layouts, self._reads = layouts, reads
        self._weights: dict[int, int | None] = {}  # mask of ignored targets, by storage of a loss's weights

    def is_fake(self, item: object) -> bool:
        """Return whether a tensor has no value that the user's code may read."""
        return isinstance(item, FakeTensor) and item not in self._known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd reads it several times per tensor
        # PyTorch's code below this point reads no user values.
        self._reads.pause()
        try:
            with DisableTorchFunction():
                return self._dispatch(func, args, kwargs or {})
        except CaptureError as error:
            raise self._provenance.add_location(error) from error.__cause__
        finally:
            self._reads.resume()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operator by its kind: record it, run it, return its known value, or refuse it."""
        if isinstance(func, HigherOrderOperator):
            raise higher_order_refusal(func.name(), self._provenance.locate_op()[0])
        if func.namespace in _NO_TENSOR_EFFECT:
            return self._run(func, args, kwargs)
        name = func._schema.name
        if name.startswith(collectives.NAMESPACES):
            return self._dispatch_collective(func, self._user.swap(args), self._user.swap(kwargs))
        if operators.traits(func).reads_values:
            results = self._known.results(func, args, kwargs)
            if results is not None:
                return results
        if name == "aten::_local_scalar_dense" and self._may_check and args[0].dtype is torch.bool:
            check = running_check(self._user.current_function())
            if check is not None:
                return self._record_check(args[0], check)
        if name in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._record_constant(func, args, kwargs)
        if name == "aten::_efficientzerotensor":
            raise zero_gradient_refusal()
        for beginnings, (message, reason, advice) in _REFUSED.items():
            if name.startswith(beginnings):
                raise refusal(message.format(func=func, name=name), reason, advice)
        if name.startswith("aten::_foreach_"):
            return self._record_foreach(func, args, kwargs)
        return self.record(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fakes, and raise ``CaptureError`` for errors that only fakes cause."""
        try:
            return func(*args, **kwargs)
        except Exception as error:
            translation = translate_error(error, self._user.current_function() or str(func))
            if translation is None:
                raise
            raise translation from error

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors, record it as an op unless it only creates views, and return its result."""
        node = current_autograd_node()
        tables = self._tables
        named = operators.arguments_by_name(func, args, kwargs)
        if node is not None and _depends_on_values(node.name(), func, args):
            raise value_dependent_gradient_refusal(node.name().partition("Backward")[0].lower())
        written = operators.written_arguments(func, named)
        arguments = [(argument, tensor) for argument, item in named.items() for tensor in leaves_in(item)]
        for _, tensor in arguments:
            self._check_tensor(tensor)
        # Recorded before the call, because in-place views such as t_() change their argument's metadata.
        before = [(argument, tables.value_of(tensor)) for argument, tensor in arguments]
        refs = {id(tensor): Ref(value) for (_, tensor), (_, value) in zip(arguments, before, strict=True)}
        call_args, call_kwargs = map_leaves((args, kwargs), lambda tensor: refs[id(tensor)])
        call_func, name = wrap_exact(func, self._user.current_autocast()), str(func)

        def family() -> str:
            return operators.family_text(name, call_args, call_kwargs, tables.values)

        try:
            result = operators.fake_result(func, named, partial(self._run, func, args, kwargs))
        except CaptureError as error:
            if not isinstance(error.__cause__, DynamicOutputShapeException):
                raise
            return self._store_constants(self._known.results(func, args, kwargs), error)
        if self._layouts is not None:
            result = self._layouts.correct(func, family, call_func, args, kwargs, result)
        self._check_unresized(func, [tensor for _, tensor in arguments], [value for _, value in before])

        module, source = self._provenance.locate_op()
        leaves = result_leaves(result)
        creates, results = self._register_results(func, leaves, module)
        changed = [tensor for argument, tensor in arguments if argument in written]
        overwritten = operators.traits(func).overwritten
        renewed = [tensor for argument, tensor in arguments if argument in written & overwritten]
        self._known.record(func, args, kwargs, leaves, changed, renewed)
        mutates = [] if operators.traits(func).reshapes else [value for name, value in before if name in written]
        # Operators without results and writes exist to raise errors, such as the checks of torch.linalg.
        if not creates and not mutates and func._schema.returns:
            return result

        reads, discards = self._accesses(func, before, written)
        ignored = self._ignored_targets(func, before, creates)
        if ignored is not None:
            call_func, call_args = MaskedSum(), (*call_args, Ref(ignored))
            reads = _without_duplicates((*reads, tables.values[ignored].storage))
        tables.append(
            name,
            Call(call_func, call_args, call_kwargs, results),
            reads=reads,
            mutates=_without_duplicates(tables.values[value].storage for value in mutates),
            creates=creates,
            rerunnable=not any(isinstance(item, torch.Generator) for item in named.values()),
            random=operators.is_random(func, named),
            family=family(),
            module=module,
            source=source,
            discards=discards,
        )
        return result

    def _register_results(
        self, func: OpOverload, leaves: list[Any], module: str
    ) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """Register an operator's new storages; return them, and the value index of each result (None for a view)."""
        tables = self._tables
        creates: list[int] = []
        results: list[int | None] = []
        for tensor in leaves:
            value = None
            if isinstance(tensor, torch.Tensor):
                self._check_tensor(tensor)
                if tables.find_storage(tensor) is None:
                    creates.append(self._create(func, tensor, module))
                if tables.storage_of(tensor) in creates:
                    value = tables.value_of(tensor)
            results.append(value)
        return tuple(creates), tuple(results)

    def _ignored_targets(
        self, func: OpOverload, arguments: list[tuple[str, int]], creates: tuple[int, ...]
    ) -> int | None:
        """If an op sums the weights of ``cross_entropy``, return the value index of its mask of ignored targets."""
        if "cross_entropy" not in self._user.current_function():
            return None
        storages = [self._tables.values[index].storage for _, index in arguments]
        match func._schema.name:
            case "aten::gather":
                self._weights |= dict.fromkeys(creates)
            case "aten::masked_fill_" if storages[0] in self._weights:
                self._weights[storages[0]] = arguments[1][1]
            case "aten::sum":
                return self._weights.pop(storages[0], None)
            case _:
                pass
        return None

    def _accesses(
        self, func: OpOverload, arguments: list[tuple[str, int]], written: frozenset[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the storages that an op reads, and the subset that it reads only to update statistics."""
        tables, traits = self._tables, operators.traits(func)
        overwritten, statistics = traits.overwritten & written, traits.statistics & written
        accesses = [(argument, tables.values[index]) for argument, index in arguments]
        reads = _without_duplicates(
            value.storage
            for argument, value in accesses
            if not (argument in overwritten and covers(value, tables.storages[value.storage].bytes))
        )
        looked_at = {value.storage for argument, value in accesses if argument not in statistics}
        of_statistics = (value.storage for argument, value in accesses if argument in statistics)
        return reads, _without_duplicates(storage for storage in of_statistics if storage not in looked_at)

    def _create(self, func: OpOverload, tensor: torch.Tensor, module: str) -> int:
        """Register a new tensor's storage and return its number; refuse a large tensor on another device."""
        short = func._schema.name.partition("::")[2]
        storage = self._tables.add(tensor, StorageKind.ACTIVATION, " ".join(filter(None, (module, short))))
        count = self._tables.storages[storage].bytes
        if tensor.device != self._device and count > MAX_FOREIGN_BYTES:
            raise refusal(
                f"{func} makes a tensor of {count} bytes on {tensor.device}",
                f"the step runs on {self._device}",
                f"create it with device={str(self._device)!r}, or before the step",
                is_loop=False,
            )
        return storage

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is not fake, or that is sparse or quantised."""
        if not isinstance(tensor, FakeTensor):
            raise undeclared_tensor_refusal(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise refusal(
                f"the step makes a {tensor.layout if tensor.layout is not torch.strided else 'quantised'} tensor",
                "its bytes alone do not define its values",
                "use dense tensors",
            )

    def _check_unresized(self, func: OpOverload, tensors: list[torch.Tensor], values: list[int]) -> None:
        """Refuse an operator that has resized the memory of an argument."""
        for tensor, value in zip(tensors, values, strict=True):
            storage = self._tables.find_storage(tensor)
            if storage is None or storage != self._tables.values[value].storage:
                continue
            if tensor.untyped_storage().nbytes() != self._tables.storages[storage].bytes:
                raise refusal(
                    f"{func} changes the size of a tensor's memory",
                    "a storage has one size for the whole step",
                    "create a new tensor, or pass out= a tensor of the right size",
                )

    def _record_foreach(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a ``_foreach_`` operator as a separate op for each tensor, and return its results."""
        split = operators.split_arguments(func, operators.arguments_by_name(func, args, kwargs))
        if func._schema.name.endswith("_") and "Tensor scalars" in str(func._schema):
            raise refusal(
                f"the step calls {func}",
                "its scalars are a tensor, which cannot be divided into one op per tensor",
                "pass the scalars as a list of numbers",
            )
        names = operators.traits(func).names
        gathered: list[Any] = []
        for index in range(len(args[0])):
            tensor_args = tuple(
                [item[index]] if name in split else item for name, item in zip(names, args, strict=False)
            )
            tensor_kwargs = {name: [item[index]] if name in split else item for name, item in kwargs.items()}
            results = self.record(func, tensor_args, tensor_kwargs)
            if isinstance(results, list | tuple):
                gathered.extend(results)
        return gathered if func._schema.returns else None

    def _dispatch_collective(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a collective and return its result. For ``wait_tensor``, return its argument unchanged."""
        if func._schema.name == "_c10d_functional::wait_tensor":
            return args[0]
        request = collectives.read_request(func, args, kwargs)
        target, source = request.target, request.source
        # The user's code may wait for the returned handle, so it is that of finished work.
        result: Any = (args[0], make_finished_work()) if func.namespace == "c10d" else self._run(func, args, kwargs)
        in_place = request.kind in (collectives.CollectiveKind.ALL_REDUCE, collectives.CollectiveKind.BROADCAST)
        returned = result
        if target is None and in_place:
            memory_format = {"memory_format": torch.contiguous_format}
            target = returned = self.record(torch.ops.aten.clone.default, (source,), memory_format)
        elif target is None:
            options = {"dtype": result.dtype, "device": result.device}
            empty = torch.ops.aten.empty.memory_format
            target = returned = self.record(empty, (list(result.shape),), options)
        elif isinstance(result, torch.Tensor):
            returned = target
        tensors = (target,) if in_place else (target, source)
        for tensor in tensors:
            self._check_tensor(tensor)
            if not tensor.is_contiguous():
                raise refusal(
                    f"the collective {request.kind.value} is given a tensor that is not contiguous",
                    "a collective sends bytes in memory order",
                    "make the tensor contiguous before, by tensor = tensor.contiguous()",
                )
        self._record_collective(request, tensors)
        return returned

    def _record_collective(self, request: collectives.CollectiveRequest, tensors: tuple[torch.Tensor, ...]) -> None:
        """Record a collective as an op on ``tensors``: the result and, unless it works in place, the source."""
        tables = self._tables
        self._known.forget(tensors[:1])
        values = [tables.value_of(tensor) for tensor in tensors]
        storages = [tables.values[value].storage for value in values]
        # All processes run the same graph, so a broadcast reads and writes its tensor in each.
        overwrites = len(tensors) == 2 and covers(tables.values[values[0]], tables.storages[storages[0]].bytes)
        count = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        call = collectives.Collective(
            request.kind, request.group, count, tensors[0].dtype, request.reduction, request.root
        )
        module, source = self._provenance.locate_op()
        refs = tuple(Ref(value) for value in values)
        tables.append(
            f"dist.{request.kind.value}",
            Call(call, refs, {}, ()),
            reads=_without_duplicates(storages[1:] if overwrites else storages),
            mutates=(storages[0],),
            rerunnable=False,
            communicates=True,
            family=str(call),
            module=module,
            source=source,
        )

    def _record_constant(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a small tensor of Python data as a constant, and an op that copies it; return the copy."""
        real: torch.Tensor = args[0]
        if real.numel() > MAX_BAKED_ELEMENTS:
            raise refusal(
                f"the step makes a tensor of {real.numel()} elements from Python data",
                f"the data would be frozen into the step; at most {MAX_BAKED_ELEMENTS} elements may be constant",
                "create it before the step and pass it as an argument, or register it as a buffer",
            )
        tables = self._tables
        module, source = self._provenance.locate_op()
        fake = self._run(func, args, kwargs)
        self._known.record_value(fake, real)
        constant = tables.add_constant(real, join(module, "constant"))
        value = tables.index_of(describe(real, constant, tables.device))
        created = tables.add(fake, StorageKind.ACTIVATION, " ".join(filter(None, (module, "constant"))))
        clone = torch.ops.aten.clone.default
        tables.append(
            str(clone),
            Call(clone, (Ref(value),), {}, (tables.value_of(fake),)),
            reads=(constant,),
            creates=(created,),
            family=operators.family_text(str(clone), (Ref(value),), {}, tables.values),
            module=module,
            source=source,
        )
        return fake

    def _record_check(self, tensor: torch.Tensor, check: ValueCheck) -> bool:
        """Record an op that repeats ``check`` on ``tensor`` in each call; return the truth value that passes it."""
        module, source = self._provenance.locate_op()
        value = self._tables.value_of(tensor)
        call = Call(check, (Ref(value),), {}, ())
        reads = (self._tables.values[value].storage,)
        self._tables.append("check", call, reads=reads, family=f"check {check}", module=module, source=source)
        return check.passes

    def _store_constants(self, results: Any, error: CaptureError) -> Any:
        """Record known results as constants and return their fakes. Raise ``error`` for unknown or large results."""
        tensors = leaves_in(results)
        if not tensors or any(tensor.numel() > MAX_BAKED_ELEMENTS for tensor in tensors):
            raise error
        return map_leaves(results, lambda real: self._record_constant(torch.ops.aten.lift_fresh.default, (real,), {}))

    def record_effect(self, name: str, func: Callable[..., None], rehearse: Callable[..., None]) -> None:
        """Record an op that changes a random generator. ``rehearse`` replaces ``func`` when ops are measured."""
        module, source = self._provenance.locate_op()
        call = Call(func, (), {}, (), rehearse)
        self._tables.append(name, call, rerunnable=False, random=True, family=name, module=module, source=source)


def _depends_on_values(node: str, func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether ``func`` occurs only in a gradient formula that autograd chooses by tensor values."""
    # For real numbers, the formulas of cumprod's backward are bit-identical since PyTorch 2.13.
    is_complex = node == "CumprodBackward0" and any(tensor.is_complex() for tensor in leaves_in(args))
    return is_complex or _BY_VALUES.get(node) == func._schema.name


def _without_duplicates(items: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(items))


class GeneratorState:
    """A token for a random generator's state at one point of the step, returned by ``get_rng_state``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state: torch.Tensor | None = None

    def save(self) -> None:
        self._state = default_generator(self._device).get_state()

    def restore(self) -> None:
        if self._state is not None:
            default_generator(self._device).set_state(self._state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(
            f"the step computes with the state of a random generator (.{name})",
            "there is no state to read while the step is captured",
            "only pass it to set_rng_state",
        )


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    generator = default_generator(device)
    return (generator,) if generator is torch.default_generator else (generator, torch.default_generator)


def _do_nothing() -> None:
    """Replace a change of a generator while an op is measured."""


def _cuda_device(device: int | str | torch.device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


@contextlib.contextmanager
def record_generators(recorder: OpRecorder) -> Iterator[None]:
    """Record each save, restore and seeding of PyTorch's default random generators as an op; refuse ``torch.seed``."""

    def record(action: str, device: torch.device, apply: Callable[[], None]) -> None:
        recorder.record_effect(f"generator.{action}.{device.type}", apply, _do_nothing)

    def save_state(device: torch.device) -> GeneratorState:
        slot = GeneratorState(device)
        record("save", device, slot.save)
        return slot

    def restore_state(state: Any, device: torch.device) -> None:
        """Record the restore of a state that the step has saved; refuse any other state."""
        if not isinstance(state, GeneratorState):
            raise refusal(
                "the step sets a random generator to a state from outside",
                "the same numbers would be drawn in every step",
                "call torch.set_rng_state before the step",
            )
        record("restore", device, state.restore)

    def recording_seeder(seeder: Callable[[int], Any]) -> Callable[[int], torch.Generator]:
        """Return a replacement for a PyTorch function that seeds generators; it records the seeding as an op."""

        def record_seed(seed: int) -> torch.Generator:
            number = int(seed)

            def apply() -> None:
                seeder(number)

            recorder.record_effect("generator.seed", apply, _do_nothing)
            return torch.default_generator

        return record_seed

    def fresh_seed() -> int:
        raise refusal(
            "the step calls torch.seed()", "the seed is unknown during the capture", "call torch.seed() before the step"
        )

    seed_all, seed_cuda, seed_all_cuda = map(
        recording_seeder, (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all)
    )
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(patch_attribute(module, "get_rng_state", lambda: save_state(CPU)))
            stack.enter_context(
                patch_attribute(module, "set_rng_state", lambda new_state: restore_state(new_state, CPU))
            )
            stack.enter_context(patch_attribute(module, "manual_seed", seed_all))
            stack.enter_context(patch_attribute(module, "seed", fresh_seed))
        for module in (torch.cuda, torch.cuda.random):
            stack.enter_context(
                patch_attribute(module, "get_rng_state", lambda device="cuda": save_state(_cuda_device(device)))
            )
            stack.enter_context(
                patch_attribute(
                    module,
                    "set_rng_state",
                    lambda new_state, device="cuda": restore_state(new_state, _cuda_device(device)),
                )
            )
            stack.enter_context(patch_attribute(module, "manual_seed", seed_cuda))
            stack.enter_context(patch_attribute(module, "manual_seed_all", seed_all_cuda))
        yield
