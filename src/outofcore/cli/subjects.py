"""Steps that the command line names: a zoo model, an ONNX file, or the user's ``my_script.py:build``."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outofcore import zoo
from outofcore.cli.answer import Subject
from outofcore.cli.completion import MODELS
from outofcore.cli.targets import (
    BUILDER_TEXT,
    TargetKind,
    classify_target,
    functions_in,
    functions_text,
    nearest,
    split_script,
)
from outofcore.errors import InputError, OutOfCoreError, is_out_of_memory
from outofcore.estimation.costing import AssumedSharding, LocalMachine, cost_step, open_target
from outofcore.graphfile import GraphFile
from outofcore.options import UserStep
from outofcore.planning import smallest_budget
from outofcore.presets import Device
from outofcore.profiling.groups import GroupCost
from outofcore.progress import ignore_progress, show_progress
from outofcore.step_variants import Split
from outofcore.units import GIB, format_bytes

# Assumed cost of collectives on a typical network: latency in seconds, and bytes per second.
_DEFAULT_NETWORK = GroupCost(50e-6, 1.0 * GIB)


def _group_cost(machine: LocalMachine | Device, between: int | None) -> GroupCost:
    """Return an assumed cost of collectives, at ``between`` bytes per second or a default rate for the device."""
    default_rate = machine.in_bytes_per_s if isinstance(machine, Device) else _DEFAULT_NETWORK.bytes_per_s
    return replace(_DEFAULT_NETWORK, bytes_per_s=default_rate if between is None else float(between))


def find_workload(model: str, options: Mapping[str, Any]) -> zoo.Workload:
    """Return a model of the zoo by its name, such as "resnet50"; raise ``InputError`` for invalid names and options."""
    match = re.fullmatch(r"resnet(\d+)", model)
    normalized = re.sub(r"[-_ ]", "", model.lower())
    if match is None and re.fullmatch(r"resnet\d+", normalized):
        raise InputError(f"the zoo has no {model!r}; did you mean {normalized}?")
    if match is None and model not in zoo.names():
        if Path(model).is_dir():
            raise InputError(
                f"the zoo has no {model!r}, and the folder {model} has no config.json; add one, or name a model"
            )
        suggestion = nearest(model, MODELS)
        raise InputError(
            f"the zoo has no {model!r}{f'; did you mean {suggestion}?' if suggestion else '.'} Its models are "
            f"{', '.join(MODELS)}. To plan another model, give its config.json, or your own function as "
            "my_script.py:build"
        )
    if match is None:
        return zoo.workload(model, **options)
    depth = int(match.group(1))
    if options.get("depth") not in (None, depth):
        raise InputError(f"{model} has {depth} layers, but --depth is {options['depth']}; leave --depth out")
    return zoo.workload("resnet", **{**options, "depth": depth})


@dataclass(frozen=True)
class PlainStep:
    """A step to plan, with a title and its positional arguments, ``inputs``; planning uses only their shapes."""

    user: UserStep[..., Any]
    inputs: tuple[Any, ...]
    title: str


def build_user_step(target: str) -> PlainStep:
    """Call the user's function, named as "file.py:function", and return its step; raise ``InputError`` on failure."""
    script = split_script(target)
    if script is None:
        raise InputError(f"{target!r} names no function in a file; write it as my_script.py:build")
    path, name = script
    module = _load_script(path)
    function = getattr(module, name, None)
    if not callable(function):
        suggestion = nearest(name, functions_in(path, include_all=True))
        hint = f"did you mean {path}:{suggestion}? " if suggestion else ""
        raise InputError(f"{path} has no function {name!r}; {hint}{functions_text(path)}. Name {BUILDER_TEXT}")
    try:
        signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"{target} has arguments without defaults ({error}); give them defaults, so that it can be called without "
            "any"
        ) from error
    except ValueError:  # a class or function of an extension may have no signature
        pass
    return _step_from_result(target, _call_user_code(target, function))


def _load_script(path: Path) -> ModuleType:
    """Import a script as a module, with its folder on ``sys.path``; raise ``InputError`` if it is missing or fails."""
    if not path.is_file():
        classify_target(str(path))  # raises an error with a suggestion
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; give one with {BUILDER_TEXT}")
    module = importlib.util.module_from_spec(spec)
    # As for a script in Python: modules in its folder can be imported, and so can the script itself.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    _call_user_code(str(path), partial(spec.loader.exec_module, module))
    return module


def _call_user_code(target: str, function: Callable[[], Any]) -> Any:
    """Call the user's code; raise ``InputError`` with advice if it fails or calls ``sys.exit``."""
    try:
        return function()
    except OutOfCoreError:
        raise
    except SystemExit as error:
        raise InputError(
            f"{target} ended this process by sys.exit({'' if error.code is None else error.code!r}) before it built a "
            "step; move the script's own work under: if __name__ == '__main__'"
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{target} failed: {type(error).__name__}: {error}; run the file by itself, or use --debug, to see the "
            "traceback"
        ) from error


def _step_from_result(target: str, built: object) -> PlainStep:
    """Check the tuple (step, model, optimizer, inputs) that the user's function returned; return it as a step."""
    if not isinstance(built, tuple | list) or len(built) != 4:
        actual = f"{len(built)} values" if isinstance(built, tuple | list) else f"a {type(built).__name__}"
        raise InputError(f"{target} returned {actual}; it must return four values: step, model, optimizer, inputs")
    step, model, optimizer, inputs = built
    if not callable(step):
        raise InputError(
            f"{target}: the first value that it returns must be the step, a function, not {type(step).__name__}"
        )
    # A single tensor counts as the only input.
    inputs_tuple = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    models = list(model) if isinstance(model, list | tuple) else [model]
    optimizers = [] if optimizer is None else optimizer
    optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not all(isinstance(module, torch.nn.Module) for module in models):
        kinds = ", ".join(type(module).__name__ for module in models)
        raise InputError(f"{target}: the second value that it returns must be a model or a list of models, not {kinds}")
    count = sum(p.numel() for p in {id(p): p for module in models for p in module.parameters()}.values())
    leaves = ["×".join(map(str, leaf.shape)) or "scalar" for leaf in inputs_tuple if isinstance(leaf, torch.Tensor)]
    shapes = f"inputs {', '.join(leaves)}" if leaves else "no inputs"
    return PlainStep(UserStep(step, models, optimizers), inputs_tuple, f"{target}: {count:,} parameters, {shapes}")


def plain_step(work: zoo.Workload) -> PlainStep:
    """Build a zoo model's step for planning, with a meta model and uninitialised inputs."""
    network = work.skeleton()
    optimizer = work.optimizer(network)
    user = UserStep(work.make_step(network, optimizer), [network], [optimizer])
    return PlainStep(user, work.empty_batch(), work.describe())


def find_step(
    model: str, options: Mapping[str, Any], dims: Sequence[str] = (), arrays: Sequence[str] = ()
) -> PlainStep:
    """Build the step of a command's target: an ONNX file, a function of a script, or a model of the zoo."""
    kind = classify_target(model)
    if kind is TargetKind.ONNX:
        from outofcore.cli.onnx_models import forward_step  # noqa: PLC0415 - few plan such files

        forward = forward_step(model, dims, arrays)
        return PlainStep(UserStep(forward, [forward.model], []), forward.inputs, forward.title)
    if dims or arrays:
        raise InputError("--dim and --input are for ONNX files; leave them out")
    if kind is TargetKind.CONFIG:
        raise InputError(f"{model} is a model's configuration; only the command plan takes it")
    return build_user_step(model) if kind is TargetKind.SCRIPT else plain_step(find_workload(model, options))


def subject_of(
    plain: PlainStep,
    *,
    device: str = "cpu",
    home: str | None = None,
    quiet: bool = True,
    cache: bool | Path = True,
    host_budget: int | None = None,
    ranks: int | None = None,  # the number of processes that shard the model; the plan is for one of them
    between: int | None = None,  # bytes per second that each of them sends
) -> Subject:
    """Return a step with its costs: measured, or estimated if ``device`` is a simulated one, such as "h100"."""
    title, simulation = plain.title, ""
    with (
        show_progress(ignore_progress if quiet else None) as tell,
        open_target(device, home, host_budget, cache) as machine,
    ):
        sharing = None if ranks is None else AssumedSharding(ranks, _group_cost(machine, between))
        costed_step = cost_step(plain.user, plain.inputs, {}, machine, tell=tell, sharing=sharing, split=Split.EXACT)
    if isinstance(machine, Device):
        simulation = machine.describe()
    elif machine.backend.driver is not None:
        outside_bytes = format_bytes(
            machine.backend.unavailable_bytes(smallest_budget(costed_step.graph, costed_step.costs), 0, 0)
        )
        title += (
            f", on {machine.backend.device} (bytes of the arena; a budget needs at least {outside_bytes} in addition)"
        )
    if sharing is not None:
        graph = costed_step.graph
        persistent = format_bytes(sum(graph.storages[storage].bytes for storage in graph.persistent))
        rate = format_bytes(int(sharing.cost.bytes_per_s))
        title += (
            f", sharded over {ranks} processes that each send {rate}/s (assumed); each has {persistent} of persistent "
            "state and its own batch"
        )
    parts = None if costed_step.parts is None else GraphFile.of(*costed_step.parts)
    return Subject(title, GraphFile.of(costed_step.graph, costed_step.costs), simulation, parts)
