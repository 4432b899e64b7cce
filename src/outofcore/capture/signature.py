"""Compute a cheap key that decides whether a captured step still fits a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from outofcore._torch_internals import function_modes, sdp_backends_enabled, tree_flatten
from outofcore.capture.captured import CPU
from outofcore.capture.mirror import check_argument, is_plain_leaf, leaf_names
from outofcore.capture.provenance import join, prefix
from outofcore.capture.replicas import parallel_models, phase

_TRAINING, _REQUIRES_GRAD, _GRAD = attrgetter("training"), attrgetter("requires_grad"), attrgetter("grad")
# Each step reads the numbers among the optimizer settings. If one of these is 0, there is less state, or updates use
# less memory.
_ZERO_SAVES = ("momentum", "weight_decay")


class Signature(NamedTuple):
    """All facts that a capture depends on, except tensor values. Equal signatures can share a capture."""

    leaves: tuple[Any, ...]  # of the arguments: metadata of tensors, values of constants
    spec: Any
    structure: int  # a number for the current modules, parameters and buffers
    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    without_grad: tuple[bool, ...]
    grad_strides: tuple[tuple[int, ...] | None, ...]  # kernels depend on them
    settings: tuple[Any, ...]  # of the optimizers, if they affect state or kernels
    surroundings: tuple[Any, ...]  # modes of PyTorch
    phases: tuple[Any, ...]  # of wrappers that work differently in some steps
    capture: int = 0  # distinguishes captures that differ only in the Python values that they have read


def differs_only_in_sizes(new: Signature, known: Iterable[Signature]) -> bool:
    """Return whether a signature has new tensor sizes, but the argument structure and dtypes of a known one."""

    def parts(signature: Signature) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        tensors = [leaf for leaf in signature.leaves if isinstance(leaf, tuple) and isinstance(leaf[0], torch.Size)]
        # A number argument, such as a length, may change along with a tensor's size.
        remaining = tuple([type(leaf) if leaf not in tensors else leaf[2:] for leaf in signature.leaves])
        return tuple([leaf[0] for leaf in tensors]), remaining

    sizes, remaining = parts(new)
    known_parts = [parts(entry) for entry in known if entry.spec == new.spec]
    return any(known_part == remaining for _, known_part in known_parts) and all(
        known_part != sizes for known_part, _ in known_parts
    )


class Signer:
    """Computes the signatures of a step's calls."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device = CPU,
    ) -> None:
        self._device = device
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._structures: dict[tuple[int, ...], int] = {}
        self._kept_alive: list[Any] = []
        self._list_state()

    def _list_state(self) -> None:
        """List the current modules, parameters and buffers, and give this combination a number."""
        modules: dict[int, tuple[str, nn.Module]] = {}
        parameters: dict[int, tuple[str, nn.Parameter]] = {}
        buffers: list[torch.Tensor] = []
        for index, model in enumerate(self._models):
            start = prefix(index, len(self._models)) or "model"
            for path, module in model.named_modules():
                modules.setdefault(id(module), (join(start, path), module))
            for path, parameter in model.named_parameters():
                parameters.setdefault(id(parameter), (join(start, path), parameter))
            buffers.extend(model.buffers())
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameters.setdefault(id(parameter), (f"a parameter of optimizer {index}", parameter))
        self._module_names = [name for name, _ in modules.values()]
        self._modules = [module for _, module in modules.values()]
        self._parameter_names = [name for name, _ in parameters.values()]
        self._parameters = [parameter for _, parameter in parameters.values()]
        self._state_numbers = {id(t): k for k, t in enumerate(dict.fromkeys((*self._parameters, *buffers)))}
        tables = [table for m in self._modules for table in (m._parameters, m._buffers, m._modules)]
        self._filled: list[dict[str, Any]] = [table for table in tables if table]
        self._empty: list[dict[str, Any]] = [table for table in tables if not table]
        self._parallel = parallel_models(self._models)
        self._averages = [module for module in self._modules if isinstance(module, AveragedModel)]
        self._groups: list[list[Any]] = [group["params"] for o in self._optimizers for group in o.param_groups]
        # These objects must live, so that their ids are not reused.
        self._kept_alive.append((list(self._modules), list(self._parameters), buffers))
        self._current = self._ids()
        self._number = self._structures.setdefault(self._current, len(self._structures))

    def _ids(self) -> tuple[int, ...]:
        values = chain.from_iterable([table.values() for table in self._filled])
        return tuple(map(id, chain(values, chain.from_iterable(self._groups))))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Return the signature of a call; raise ``CaptureError`` or ``InputError`` for invalid arguments."""
        if any(self._empty) or self._ids() != self._current or self._groups_changed():
            self._list_state()
        leaves, spec = tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not self._is_plain(leaf):
                check_argument(leaf_names(args, kwargs)[index], leaf, self._device)
        parameters = self._parameters
        gradients = list(map(_GRAD, parameters))
        return Signature(
            tuple([self._facts_of_leaf(leaf) for leaf in leaves]),
            spec if _is_hashable(spec) else repr(spec),
            self._number,
            tuple(map(_TRAINING, self._modules)),
            tuple(map(_REQUIRES_GRAD, parameters)),
            tuple(map(is_, gradients, repeat(None))),
            tuple(map(_strides, gradients)),
            tuple([_settings(group) for optimizer in self._optimizers for group in optimizer.param_groups]),
            tuple([read() for read in _SURROUNDINGS.values()]),
            (*self._started_averages(), *self._phases()),
        )

    def _phases(self) -> list[tuple[str, Any]]:
        """Return (name, value) of the ``DistributedDataParallel`` settings that may change between steps."""
        names = ("reduction of gradients", "broadcast of buffers", "first buckets")
        phases = ((k, phase(model)) for k, model in enumerate(self._parallel))
        return [
            (f"{name} of replica {k}", (bool, v)) for k, values in phases for name, v in zip(names, values, strict=True)
        ]

    def _started_averages(self) -> list[tuple[str, Any]]:
        """Return for each ``AveragedModel`` whether it has averaged a model. It copies the first one."""
        counts = [module.n_averaged for module in self._averages]
        return [(f"n_averaged > 0 of average {k}", (bool, bool(count > 0))) for k, count in enumerate(counts)]

    def _groups_changed(self) -> bool:
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return len(groups) != len(self._groups) or any(
            new is not old for new, old in zip(groups, self._groups, strict=True)
        )

    def _is_plain(self, leaf: torch.Tensor) -> bool:
        """Return whether a tensor argument is certainly valid, by cheap checks."""
        if id(leaf) in self._state_numbers:
            return True
        plain = leaf.__class__ is torch.Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
        return plain and not leaf.is_conj() and not leaf.is_neg() and leaf.data_ptr() != 0

    def _facts_of_leaf(self, leaf: Any) -> Any:
        """Return the facts of an argument that belong to a signature, such as a shape or a constant's value."""
        if isinstance(leaf, torch.Tensor):
            return (
                leaf.shape,
                leaf.stride(),
                leaf.dtype,
                leaf.device,
                leaf.requires_grad,
                self._state_numbers.get(id(leaf), -1),
            )
        if is_plain_leaf(leaf):
            return leaf.__class__, leaf if leaf == leaf else "nan"  # noqa: PLR0124 - only nan differs from itself
        return leaf.__class__

    def describe_change(
        self, old: Signature, new: Signature, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> str:
        """Describe the first four differences between the signatures of two calls."""
        changes: list[str] = []
        if old.spec != new.spec or len(old.leaves) != len(new.leaves):
            changes.append("the structure of the arguments changed")
        else:
            names = leaf_names(args, kwargs or {})
            for index, (before, after) in enumerate(zip(old.leaves, new.leaves, strict=True)):
                if before != after:
                    name = names[index] if index < len(names) else str(index)
                    changes.append(f"argument {name} {_leaf_change(before, after)}")
        if old.structure != new.structure:
            changes.append("modules, parameters or buffers have been added, removed or replaced")
        else:
            for field, words in _FLAGS.items():
                flagged = self._module_names if field == "training" else self._parameter_names
                changes += _flag_changes(flagged, getattr(old, field), getattr(new, field), words)
            changes += _stride_changes(self._parameter_names, old.grad_strides, new.grad_strides)
        if old.settings != new.settings:
            changes.append("the settings of an optimizer changed")
        for name, before, after in zip(_SURROUNDINGS, old.surroundings, new.surroundings, strict=True):
            if before != after:
                changes.append(f"{name} changed from {before} to {after}")
        if old.phases != new.phases:
            changes += _phase_changes(old.phases, new.phases)
        if old.capture != new.capture and not changes:
            changes.append("the values that the step reads match those of an earlier call")
        if len(changes) > 4:
            changes = [*changes[:4], f"and {len(changes) - 4} more"]
        return ", ".join(changes) or "nothing"


# Texts for a flag of a module or parameter that became false, and true.
_FLAGS = {
    "training": ("switched to eval", "switched to train"),
    "requires_grad": ("is now frozen", "is now trained"),
    "without_grad": ("now has a .grad", "now has no .grad"),
}
_SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "gradients enabled": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast on the CPU": partial(torch.is_autocast_enabled, "cpu"),
    "autocast on CUDA": partial(torch.is_autocast_enabled, "cuda"),
    "the autocast dtype on the CPU": partial(torch.get_autocast_dtype, "cpu"),
    "the autocast dtype on CUDA": partial(torch.get_autocast_dtype, "cuda"),
    "the default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the attention kernels allowed": sdp_backends_enabled,
    "the modes that functions of PyTorch run in": lambda: tuple(
        [(type(mode).__qualname__, str(getattr(mode, "device", ""))) for mode in function_modes()]
    ),
    "the fast path of attention": torch.backends.mha.get_fastpath_enabled,
}


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    flags = [(k, v) for k, v in group.items() if v is None or v.__class__ is bool or v.__class__ is str]
    return (*flags, *[bool(group[name]) for name in _ZERO_SAVES if name in group])


def _is_hashable(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True


def _leaf_change(before: Any, after: Any) -> str:
    """Describe how one argument's facts differ between two signatures."""
    if not (isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after) == 6):
        return f"changed from {_format_leaf(before)} to {_format_leaf(after)}"
    names = ("shape", "strides", "dtype", "device", "requires_grad", "identity")
    for name, old, new in zip(names, before, after, strict=True):
        if old != new:
            if name == "identity":
                return "became another parameter or buffer of the model"
            show = tuple if name in {"shape", "strides"} else str
            return f"changed {name} {show(old)} -> {show(new)}"
    return "is the same"


def _format_leaf(leaf: Any) -> str:
    if isinstance(leaf, tuple) and len(leaf) == 2:
        return repr(leaf[1])
    return "a tensor" if isinstance(leaf, tuple) else leaf.__name__


def _flag_changes(names: list[str], old: Sequence[bool], new: Sequence[bool], words: tuple[str, str]) -> list[str]:
    changed = [f"{n} {words[b]}" for n, a, b in zip(names, old, new, strict=True) if a != b]
    return [changed[0] + (f" (and {len(changed) - 1} more)" if changed[1:] else "")] if changed else []


def _strides(gradient: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if gradient is None or gradient.layout is not torch.strided else gradient.stride()


def _stride_changes(names: list[str], old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    changed = [
        f"{name}.grad changed strides {before} -> {after}"
        for name, before, after in zip(names, old, new, strict=True)
        if before != after and before is not None and after is not None
    ]
    return [changed[0] + (f" (and {len(changed) - 1} more)" if changed[1:] else "")] if changed else []


def _phase_changes(old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
    """Describe each difference of two sequences of (name, value) pairs."""
    before, after = dict(old), dict(new)
    none = type(None)
    return [
        f"{name} changed from {_format_leaf(before.get(name, none))} to {_format_leaf(after.get(name, none))}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
