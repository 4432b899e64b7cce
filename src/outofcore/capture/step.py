"""Capture a training step as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import (
    FAKE_LOGGER,
    FakeTensorMode,
    Feature,
    override_fake_check,
    require,
    tree_flatten,
)
from outofcore.capture.assembly import StepEnding, assemble, check_inputs, read_ending
from outofcore.capture.captured import CPU, Captured, Value
from outofcore.capture.guard import Guard, check_modules
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.capture.mirror import Mirror
from outofcore.capture.optimizer_steps import StepRecorder
from outofcore.capture.patching import CAPTURE_LOCK, patch_attribute
from outofcore.capture.provenance import Provenance, module_classes, user_frames
from outofcore.capture.reads import Reads
from outofcore.capture.recorder import OpRecorder, record_generators
from outofcore.capture.refusals import suggest_loop, translate_error
from outofcore.capture.replicas import Replicas, check_supported
from outofcore.capture.sharding import Sharding, delay_gathers
from outofcore.capture.shards import Shards
from outofcore.capture.substitute import Substitute, average_counts, run_uncompiled
from outofcore.capture.tables import Tables
from outofcore.errors import CaptureError


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture: sharded parameters, gradient orders and corrections of layouts."""

    shards: Shards | None = None  # sharded parameters
    # Gradient order of the first capture (``ReplicaEnd.order``), by ``DistributedDataParallel`` id. If it is missing,
    # the step runs twice.
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    # Runs CPU kernels to correct the layouts of results. Without it no kernel runs and no memory is allocated, but the
    # captured step may differ from eager PyTorch in the last bits.
    layouts: KernelLayouts | None = None


def capture_step(
    step: Callable[..., Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
    gradients: Mapping[int, Value | None] | None = None,
    options: CaptureOptions | None = None,
) -> Captured:
    """Capture a call of a step, including backward pass and optimizer update, as one graph of ATen ops.

    The step runs on tensors without contents. The user's models, optimizers, gradients, arguments and random
    generators are unchanged afterwards, even on errors. Captures in several threads take turns.

    Args:
        step: may use models, optimizers and plain Python values from outside; any other tensor must be an argument.
        models: all modules whose parameters or buffers the step uses.
        optimizers: all optimizers that the step uses.
        device: where the step will run with its parameters, buffers and arguments, by default the device of the model.
        gradients: assumed gradients before the step, by parameter id (None for no gradient), to plan but not to run.

    Raises:
        InputError: a module has no shapes yet or is not initialised, or an argument or wrapper is unsuitable.
        CaptureError: the step reads a tensor's value, uses an undeclared tensor, or does not fit into one graph.
        VersionError: this PyTorch lacks a private name on which captures rely.
    """
    require(Feature.COMPILE)
    with CAPTURE_LOCK:
        check_modules(models)
        call, options = _StepCall(step, models, optimizers, args, kwargs), options or CaptureOptions()
        try:
            check_supported(models)
            captured, unknown = _capture_once(call, device, gradients or {}, options)
            if unknown:
                orders = {id(end.model): end.order for end in captured.replicas if end.is_reduced}
                options = replace(options, orders={**orders, **options.orders})
                captured, _ = _capture_once(call, device, gradients or {}, options)
            return captured
        except CaptureError as error:
            devices = {device or CPU, *(tensor.device for tensor in call.tensors())}
            # Frames inside of the capture are no use to the user.
            raise suggest_loop(error, devices).with_traceback(user_frames(error.__traceback__)) from None


def steady_state_gradients(captured: Captured) -> dict[int, Value | None]:
    """Return the ``gradients`` argument with which ``capture_step`` captures the steady-state step."""
    states = captured.states
    leftover = {
        states[leftover.parameter].tensor: captured.values[leftover.value] for leftover in captured.gradients_left
    }
    gradients: dict[int, Value | None] = {
        id(p): value for p, value in leftover.items() if p is not None and p.grad is None
    }
    cleared = [states[place].tensor for place in captured.gradients_cleared]
    return gradients | {id(p): None for p in cleared if p is not None and p.grad is not None}


@dataclass(frozen=True)
class _StepCall:
    step: Callable[..., Any]
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(
            (tensor for model in self.models for tensor in chain(model.parameters(), model.buffers())),
            (parameter for o in self.optimizers for group in o.param_groups for parameter in group["params"]),
            (leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, torch.Tensor)),
        )


def _capture_once(
    call: _StepCall, device: torch.device | None, gradients: Mapping[int, Value | None], options: CaptureOptions
) -> tuple[Captured, bool]:
    """Capture a step; also return whether the order of gradients was unknown, which requires a second capture."""
    models, optimizers, shards = call.models, call.optimizers, options.shards
    guard = Guard(call.step, models, optimizers)
    counts = average_counts(models)
    if device is None:
        device = next((tensor.device for tensor in call.tensors()), CPU)
    tables, reads = Tables(device, module_classes=module_classes(models)), Reads()
    mode = FakeTensorMode()
    with guard:
        mirror = Mirror(mode, tables, gradients, None if shards is None else Sharding(shards, mode, tables))
        mirror.add_states(models, optimizers)
        args, kwargs = mirror.add_arguments(call.args, call.kwargs)
        provenance = Provenance(models, mirror.names)
        steps = StepRecorder(optimizers, mirror, tables, provenance)
        substitute = Substitute(mirror.fakes, mirror.real_tensors(), device, counts)
        recorder = OpRecorder(tables, provenance, substitute, options.layouts, reads)
        replicas = Replicas(models, mirror.fakes, options.orders)
        with (
            # Errors of the step are raised; the fakes would also print them.
            patch_attribute(FAKE_LOGGER, "disabled", True),
            substitute.cover_entry_points(provenance),
            record_generators(recorder),
            steps.replace_steps(substitute.known.forget),
            provenance.track_modules(),
            override_fake_check(recorder.is_fake),
            run_uncompiled(models),
            replicas.replace_forward(),
        ):
            result = _trace(partial(call.step, *args, **kwargs), substitute, mode, recorder, reads)

        def run(func: Any, *operands: torch.Tensor) -> torch.Tensor:
            with mode, recorder, torch.no_grad():
                return func(*operands)

        ending = read_ending(result, mirror, tables, guard, run)
        del result
        effects = guard.check(tables.source_of)
        substitute.known.check()
    check_inputs(mirror, tables)
    _check_learning(optimizers, steps, ending, mirror, tables)
    steps.finish()
    captured = delay_gathers(assemble(tables, mirror, steps.bindings, ending))
    captured = replace(captured, replicas=replicas.ends(), reads=reads, effects=effects)
    return captured, replicas.lacks_order()


def _trace(
    step: Callable[[], Any], substitute: Substitute, mode: FakeTensorMode, recorder: OpRecorder, reads: Reads
) -> Any:
    """Run the step on fake tensors; raise the first ``CaptureError``, even if the step's code has caught it."""
    try:
        # On a GPU autograd would use another thread, with its own node numbers and without the user's lines on its
        # stack. The ops and their order are the same.
        with torch.autograd.set_multithreading_enabled(mode=False), substitute, mode, recorder, reads.record():
            result = step()
    except CaptureError:
        raise
    except Exception as error:
        # The user's code may have caught a refusal and raised something of its own.
        if substitute.first_refusal is not None:
            raise substitute.first_refusal from error
        translation = translate_error(error, "")
        if translation is not None:
            raise translation from error
        raise
    if substitute.first_refusal is not None:
        raise substitute.first_refusal
    return result


def _check_learning(
    optimizers: Sequence[Optimizer], steps: StepRecorder, ending: StepEnding, mirror: Mirror, tables: Tables
) -> None:
    """Raise ``CaptureError`` if a step with optimizers neither updates a parameter nor leaves a gradient."""
    written = {storage for op, _ in tables.ops for storage in op.mutates}
    added_to = any(tables.values[gradient.value].storage in written for gradient in mirror.gradients.values())
    if optimizers and not steps.has_updates and not ending.gradients and not added_to:
        raise CaptureError(
            "optimizers were given, but the step neither updates a parameter nor leaves a gradient: the model "
            "would not learn; call loss.backward() and optimizer.step() inside the step, or pass no optimizer",
            is_loop=False,
        )
