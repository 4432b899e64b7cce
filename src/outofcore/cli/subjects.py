"""Steps that the command line names: a model of the zoo, an ONNX file, or the user's own ``my_script.py:build``."""

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
from outofcore.cli.targets import BUILDS, Kind, functions_in, functions_text, kind_of, nearest, split_script
from outofcore.errors import InputError, OutOfCoreError, is_out_of_memory
from outofcore.estimation.costing import LocalMachine, Sharing, costed, opened_place
from outofcore.graphfile import GraphFile
from outofcore.options import UserStep
from outofcore.planning import smallest_budget
from outofcore.presets import Device
from outofcore.profiling.groups import GroupCost
from outofcore.progress import following, silent
from outofcore.step_variants import Split
from outofcore.units import GIB, format_bytes

# Of collectives among processes on a usual network: seconds before the first byte goes out, bytes a second. Assumed.
_USUAL_NETWORK = GroupCost(50e-6, 1.0 * GIB)


def _link_between(where: LocalMachine | Device, between: int | None) -> GroupCost:
    """Return the cost of collectives among processes that need not exist."""
    usual = where.in_bytes_per_s if isinstance(where, Device) else _USUAL_NETWORK.bytes_per_s
    return replace(_USUAL_NETWORK, bytes_per_s=usual if between is None else float(between))


def find_workload(model: str, options: Mapping[str, Any]) -> zoo.Workload:
    """Find a workload by name, where a resnet may carry its depth: "resnet50".

    Raises ``InputError`` if there is no such workload, or an option does not fit it.
    """
    named = re.fullmatch(r"resnet(\d+)", model)
    plainly = re.sub(r"[-_ ]", "", model.lower())
    if named is None and re.fullmatch(r"resnet\d+", plainly):
        raise InputError(f"the zoo has no {model!r}; did you mean {plainly}?")
    if named is None and model not in zoo.names():
        if Path(model).is_dir():
            raise InputError(f"the zoo has no {model!r}, and the folder {model} has no config.json")
        near = nearest(model, MODELS)
        raise InputError(
            f"the zoo has no {model!r}{f'; did you mean {near}?' if near else '.'} Its models are {', '.join(MODELS)}. "
            "To plan another model, give its config.json, or your own function as my_script.py:build"
        )
    if named is None:
        return zoo.workload(model, **options)
    depth = int(named.group(1))
    if options.get("depth") not in (None, depth):
        raise InputError(f"{model} has {depth} layers, and --depth says {options['depth']}; give one of the two")
    return zoo.workload("resnet", **{**options, "depth": depth})


@dataclass(frozen=True)
class PlainStep:
    """A step to be planned; of ``inputs``, its positional arguments, only the shapes matter."""

    user: UserStep[..., Any]
    inputs: tuple[Any, ...]
    title: str


def build(target: str) -> PlainStep:
    """Run the user's function "folder/file.py:function"; raises ``InputError`` if that fails."""
    found = split_script(target)
    if found is None:
        raise InputError(f"{target!r} names no function in a file; write for example my_script.py:build")
    path, name = found
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest(name, functions_in(path, all_of_them=True))
        meant = f"did you mean {path}:{near}? " if near else ""
        raise InputError(f"{path} has no function {name!r}; {meant}{functions_text(path)}. Name {BUILDS}")
    try:
        signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"{target} must take no arguments, and has some without defaults ({error}); give them defaults"
        ) from error
    except ValueError:  # a class or a function of an extension, which does not say
        pass
    return _checked(target, _run_users(target, function))


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        kind_of(str(path))  # says what may have been meant
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file; give one with {BUILDS}")
    module = importlib.util.module_from_spec(spec)
    # As Python itself does for a script: what lies beside it can be imported, and it finds itself.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    _run_users(str(path), partial(spec.loader.exec_module, module))
    return module


def _run_users(target: str, function: Callable[[], Any]) -> Any:
    """Run the user's code, and convert its exceptions to one message."""
    try:
        return function()
    except OutOfCoreError:
        raise
    except SystemExit as error:
        raise InputError(
            f"{target} ended this process by sys.exit({'' if error.code is None else error.code!r}) before there was a "
            "step; put what a script does by itself under: if __name__ == '__main__'"
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{target} failed: {type(error).__name__}: {error}; run the file by itself, or use --debug, to see where"
        ) from error


def _checked(target: str, built: object) -> PlainStep:
    if not isinstance(built, tuple | list) or len(built) != 4:
        what = f"{len(built)} things" if isinstance(built, tuple | list) else f"a {type(built).__name__}"
        raise InputError(f"{target} returned {what}; it must return four: step, model, optimizer, inputs")
    step, model, optimizer, inputs = built
    if not callable(step):
        raise InputError(f"{target}: the first that it returns must be the step, a function, not {type(step).__name__}")
    # A single tensor is taken for what it is meant to be.
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    models = list(model) if isinstance(model, list | tuple) else [model]
    optimizers = [] if optimizer is None else optimizer
    optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not all(isinstance(one, torch.nn.Module) for one in models):
        kinds = ", ".join(type(one).__name__ for one in models)
        raise InputError(f"{target}: the second that it returns must be a model or a list of models, not {kinds}")
    count = sum(p.numel() for p in {id(p): p for one in models for p in one.parameters()}.values())
    leaves = ["×".join(map(str, leaf.shape)) or "scalar" for leaf in given if isinstance(leaf, torch.Tensor)]
    shapes = f"inputs {', '.join(leaves)}" if leaves else "no inputs"
    return PlainStep(UserStep(step, models, optimizers), given, f"{target}: {count:,} parameters, {shapes}")


def plain_step(work: zoo.Workload) -> PlainStep:
    """Return the step of a workload with a meta model and unwritten inputs: for planning, of any size."""
    network = work.skeleton()
    optimizer = work.optimizer(network)
    user = UserStep(work.make_step(network, optimizer), [network], [optimizer])
    return PlainStep(user, work.empty_batch(), work.describe())


def find_step(
    model: str, options: Mapping[str, Any], dims: Sequence[str] = (), arrays: Sequence[str] = ()
) -> PlainStep:
    """Find the step to plan: "folder/file.py:function", "file.onnx", or a model of the zoo with its options.

    ``dims`` and ``arrays`` are for an ONNX file; see ``onnx_models.forward_step``.
    """
    kind = kind_of(model)
    if kind is Kind.ONNX:
        from outofcore.cli.onnx_models import forward_step  # noqa: PLC0415 - few plan such files

        found = forward_step(model, dims, arrays)
        return PlainStep(UserStep(found, [found.model], []), found.inputs, found.title)
    if dims or arrays:
        raise InputError("--dim and --input are for ONNX files")
    if kind is Kind.CONFIG:
        raise InputError(f"{model} is a model's configuration, which only plan takes")
    return build(model) if kind is Kind.SCRIPT else plain_step(find_workload(model, options))


def subject_of(
    plain: PlainStep,
    *,
    device: str = "cpu",
    home: str | None = None,
    quiet: bool = True,
    cache: bool | Path = True,
    host_budget: int | None = None,
    ranks: int | None = None,
    between: int | None = None,
) -> Subject:
    """Measure the costs of a step, or estimate them for a device that is not here.

    ``device`` may name a preset, which is simulated, and for which ``home``, ``cache`` and ``host_budget`` are ignored.
    ``ranks`` is how many processes share the model, ``between`` the bytes a second that each of them sends.
    """
    title, simulation = plain.title, ""
    with following(silent if quiet else None) as tell, opened_place(device, home, host_budget, cache) as where:
        sharing = None if ranks is None else Sharing(ranks, _link_between(where, between))
        found = costed(plain.user, plain.inputs, {}, where, tell=tell, sharing=sharing, split=Split.EXACT)
    if isinstance(where, Device):
        simulation = where.describe()
    elif where.backend.driver is not None:
        beside = format_bytes(where.backend.beside(smallest_budget(found.graph, found.costs), 0, 0))
        title += f", on {where.backend.device} (bytes of the arena; of a budget, {beside} or more lie beside it)"
    if sharing is not None:
        graph = found.graph
        lasting = format_bytes(sum(graph.storages[storage].bytes for storage in graph.persistent))
        rate = format_bytes(int(sharing.cost.bytes_per_s))
        title += (
            f", spread over {ranks} processes that each send {rate}/s (assumed); each has {lasting} from step to step, "
            "and a batch of its own"
        )
    parts = None if found.parts is None else GraphFile.of(*found.parts)
    return Subject(title, GraphFile.of(found.graph, found.costs), simulation, parts)
