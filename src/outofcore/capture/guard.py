"""Restore the user's modules, optimizers and variables after a capture, and refuse leftover tensors."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from outofcore.capture.effects import Effect, PositionSource, ReachableState, SavedContainer, contains_fake, effect_of
from outofcore.capture.provenance import assignment_line, definition_line, join, module_paths, prefix
from outofcore.capture.tables import leaves_in
from outofcore.errors import CaptureError, InputError


def step_functions(step: Any) -> Iterator[FunctionType]:
    """Yield a step's Python function, then the function that it wraps, and so on."""
    while step is not None:
        if isinstance(step, partial | functools.partialmethod):
            step = step.func
            continue
        function = getattr(step, "__func__", step)
        if not isinstance(function, FunctionType):
            function = vars(type(step)).get("__call__")
        if not isinstance(function, FunctionType):
            return
        yield function
        step = getattr(function, "__wrapped__", None)


def check_modules(models: Sequence[nn.Module], *, is_captured: bool = True) -> None:
    """Refuse uninitialised modules; for a captured step, also lazy and TorchScript modules."""
    for index, model in enumerate(models):
        for path, module in _modules_of(model, prefix(index, len(models)), set()):
            if all(isinstance(vars(module).get(name), dict) for name in _MODULE_TABLES):
                if is_captured:
                    check_shapes(path, module)
                continue
            label = f"{path or 'the model'} ({type(module).__name__})"
            if not isinstance(module, torch.jit.ScriptModule) and not any(
                name in vars(module) for name in _MODULE_TABLES
            ):
                raise InputError(f"{label} is not initialised: its __init__ must call super().__init__() first")
            if is_captured and isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{label} is TorchScript: its parameters and operators are invisible to Python; use the module "
                    "that torch.jit.script or torch.jit.trace was called on, or run the unchanged loop within "
                    "outofcore.budget",
                    is_loop=False,
                )
            if is_captured:
                raise CaptureError(
                    f"{label} does not store its parameters, buffers and submodules as torch.nn.Module does: the "
                    "capture would miss changes to them; store them in the dicts _parameters, _buffers and _modules"
                )


def check_shapes(path: str, module: nn.Module) -> None:
    """Raise ``InputError`` if a lazy module has parameters or buffers without a shape."""
    tensors = chain(module._parameters.values(), module._buffers.values())
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
        raise InputError(
            f"{path or 'the model'} ({type(module).__name__}) has no shapes yet: a lazy module gets them in its first "
            "forward pass; run one on a sample batch first, as in 'with torch.no_grad(): model(batch)', then create "
            "the optimizer as usual"
        )


def _modules_of(module: nn.Module, path: str, visited: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of a module and all of its submodules, without repeats."""
    if id(module) in visited:
        return
    visited.add(id(module))
    yield path, module
    for name, child in (vars(module).get("_modules") or {}).items():
        if child is not None:
            yield from _modules_of(child, join(path, name), visited)


_PLAIN = (int, float, bool, str)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class Guard:
    """A context that saves the Python state that a step may change, and restores it at its end."""

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._step = step
        self._paths = module_paths(models)
        self._modules = list({id(module): module for model in models for module in model.modules()}.values())
        self._attributes = [
            SavedContainer.of(self._paths[id(m)] or type(m).__name__, m.__dict__) for m in self._modules
        ]
        self._tables = [[SavedContainer.of(name, m.__dict__[name]) for name in _MODULE_TABLES] for m in self._modules]
        self._optimizers = list(optimizers)
        self._groups = [[SavedContainer.of("", group) for group in optimizer.param_groups] for optimizer in optimizers]
        self._optimizer_containers = [
            SavedContainer.of("", container) for o in optimizers for container in (o.param_groups, o.state)
        ]
        self._optimizer_containers += [
            SavedContainer.of("", state) for o in optimizers for state in o.state.values() if isinstance(state, dict)
        ]
        self._optimizer_attributes = [SavedContainer.of(type(o).__name__, vars(o)) for o in optimizers]
        outside = ReachableState()
        outside.skip([group for o in optimizers for group in o.param_groups])
        outside.skip([container for o in optimizers for container in (o.param_groups, o.state)])
        outside.reach([(getattr(step, "__qualname__", type(step).__name__), step)])
        for saved in (*self._attributes, *self._optimizer_attributes):
            outside.reach(
                [(f"{saved.label}.{name}", v) for name, v in saved.before.items() if name not in _MODULE_TABLES]
            )
        outside.reach([(type(model).__name__, type(model)) for model in self._modules])
        self._variables, self._containers, self._sources = outside.variables, outside.containers, outside.sources

    def __enter__(self) -> Guard:
        torch.clear_autocast_cache()
        self._generator = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()
        return self

    def __exit__(self, *error: object) -> None:
        torch.clear_autocast_cache()
        torch.default_generator.set_state(self._generator)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for variable in self._variables:
            if variable.read() is not variable.before:
                variable.write(variable.before)
        all_saved = (
            self._attributes,
            *self._tables,
            self._optimizer_attributes,
            self._containers,
            *self._groups,
            self._optimizer_containers,
        )
        for container in chain.from_iterable(all_saved):
            container.restore()
        for source in self._sources:
            source.restore()

    def rebound_buffers(self) -> list[tuple[str, torch.Tensor, Any]]:
        """Return (path, old tensor, new object) of each buffer that the step has replaced."""
        rebound: list[tuple[str, torch.Tensor, Any]] = []
        for module, (_, buffers, _) in zip(self._modules, self._tables, strict=True):
            for name, old in buffers.before.items():
                new = module._buffers.get(name)
                if new is not old:
                    rebound.append((join(self._paths[id(module)], name), old, new))
        return rebound

    def check(self, source_line_of: Callable[[torch.Tensor], str]) -> tuple[Effect, ...]:
        """Return functions that repeat the step's changes; raise ``CaptureError`` if a change cannot be repeated."""
        self._source = source_line_of
        effects = [
            effect
            for module, container, tables in zip(self._modules, self._attributes, self._tables, strict=True)
            for effect in self._check_module(module, container, tables)
        ]
        for container in (*self._optimizer_attributes, *self._containers):
            effect = effect_of(container)
            if effect is not None:
                for name, new in _items_of(container.live):
                    self._check_leftover(container.label if name is None else f"{container.label}.{name}", new)
                effects.append(effect)
        for variable in self._variables:
            new = variable.read()
            if new is not variable.before:
                self._check_leftover(variable.label, new)
                effects.append(partial(variable.write, new))
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            if len(optimizer.param_groups) != len(groups):
                raise self._refusal(
                    f"the step adds a parameter group to {type(optimizer).__name__}: each call would add another one; "
                    "add it before the step",
                    "add_param_group",
                )
            for group, container in zip(optimizer.param_groups, groups, strict=True):
                before = container.before
                if group.keys() != before.keys() or not all(
                    _is_same_setting(group[key], before[key]) for key in before
                ):
                    raise self._refusal(
                        f"the step changes the settings of {type(optimizer).__name__}: the change would happen once, "
                        "not in each step; change them, or call the scheduler, after the step",
                        "param_groups",
                    )
        if random.getstate() != self._python or not _is_same_numpy_state(self._numpy, _numpy_state()):
            raise self._refusal(
                "the step draws random numbers from Python or NumPy: they would be frozen into the step; draw them "
                "before the step and pass them as arguments, or use torch's generator",
                "random",
            )
        for moved in filter(PositionSource.has_moved, self._sources):
            lost = "; the capture has advanced it and cannot rewind it" if moved.write is None else ""
            raise self._refusal(
                f"the step takes numbers or items from {moved.label}: they would be frozen into the step; take them "
                f"before the step and pass them as arguments{lost}",
                moved.label.rpartition(".")[2],
            )
        return tuple(effects)

    def _check_module(
        self, module: nn.Module, container: SavedContainer, tables: list[SavedContainer]
    ) -> tuple[Effect, ...]:
        """Return functions that repeat a module's attribute changes; refuse replaced parameters and submodules."""
        parameters, buffers, children = tables
        if parameters.has_changed() or children.has_changed():
            both = [(t.live, t.before, name) for t in (parameters, children) for name in (*t.before, *t.live)]
            name = next((name for live, before, name in both if live.get(name) is not before.get(name)), "")
            raise self._refusal(
                f"the step replaces a parameter or a submodule of {container.label}: the graph would go on using the "
                "old one; replace it before the step, or change a parameter in place, under torch.no_grad()",
                name,
                module,
            )
        if buffers.live.keys() != buffers.before.keys():
            raise self._refusal(
                f"the step adds or removes a buffer of {container.label}: the next call would start with other ones; "
                "register or delete it before the step",
                "register_buffer",
                module,
            )
        recomputed = {
            getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in module._forward_pre_hooks.values()
        }
        # Hooks such as weight normalisation set these attributes before each forward pass.
        for name, new in container.live.items():
            if name not in recomputed and container.before.get(name, container) is not new:
                self._check_leftover(f"{container.label}.{name}", new, module)
        effect = effect_of(container, recomputed)
        return () if effect is None else (effect,)

    def _check_leftover(self, label: str, new: Any, module: nn.Module | None = None) -> None:
        """Raise ``CaptureError`` if a value that the step has stored under ``label`` contains a fake tensor."""
        if not contains_fake(new):
            return
        source_line = next((line for tensor in leaves_in(new) if (line := self._source(tensor))), "")
        raise self._refusal(
            f"the step stores a tensor in {label}: it would be out of date after the next step; register it as a "
            "buffer of the model, or return it from the step",
            label.rpartition(".")[2],
            module,
            source_line,
        )

    def _refusal(self, text: str, name: str, module: nn.Module | None = None, source_line: str = "") -> CaptureError:
        """Return an error located where code sets ``name``, else at ``source_line``, else where the step begins."""
        functions = list(step_functions(self._step))
        if module is not None:
            functions += [value for kind in type(module).__mro__ for value in vars(kind).values()]
        location = assignment_line(name, functions) or source_line or definition_line(next(iter(functions), None))
        return CaptureError(f"{location}: {text}" if location else text, location)


def _items_of(container: Any) -> list[tuple[Any, Any]]:
    return list(dict.items(container)) if isinstance(container, dict) else [(None, item) for item in container]


def _is_same_setting(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and isinstance(first, (*_PLAIN, tuple)) and first == second)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _is_same_numpy_state(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return True
    return first[0] == second[0] and bool((first[1] == second[1]).all()) and first[2:] == second[2:]
