"""The user's own step on the command line: ``my_script.py:build``."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outofcore.errors import InputError, OutOfCoreError

_TARGET = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_EXAMPLE = "a function that returns (step, model, optimizer, inputs)"


@dataclass(frozen=True)
class Script:
    """What the user's function has built.

    Attributes:
        step: the training step.
        model: the module, or a list of them.
        optimizer: the optimizer, a list of them, or None.
        inputs: the positional arguments of the step.
        title: one line for people.
    """

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    inputs: tuple[Any, ...]
    title: str


def is_script(target: str) -> bool:
    """Whether a target on the command line is the user's own code: "folder/file.py:function"."""
    return _TARGET.fullmatch(target) is not None


def build(target: str) -> Script:
    """Run the user's function.

    Args:
        target: "folder/file.py:function".

    Raises:
        InputError: there is no such file or function, it fails, or what it returns cannot be used.
    """
    found = _TARGET.fullmatch(target)
    if found is None:
        raise InputError(f"{target!r} names no function in a file; write for example my_script.py:build")
    path, name = Path(found["file"]), found["name"]
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{path} has no function {name!r}; give it one, {_EXAMPLE}")
    try:
        built = function()
    except OutOfCoreError:
        raise
    except Exception as error:
        raise InputError(
            f"{target} failed: {type(error).__name__}: {error}; run the file by itself, or use --debug, to see where"
        ) from error
    return _checked(target, built)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of a Python file with {_EXAMPLE}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file; give one with {_EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    # As Python itself does for a script: what lies beside it can be imported, and it finds itself.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"{path} failed: {type(error).__name__}: {error}; run it by itself, or use --debug, to see where"
        ) from error
    return module


def _checked(target: str, built: object) -> Script:
    if not isinstance(built, tuple | list) or len(built) != 4:
        what = f"{len(built)} things" if isinstance(built, tuple | list) else f"a {type(built).__name__}"
        raise InputError(f"{target} returned {what}; it must return four: step, model, optimizer, inputs")
    step, model, optimizer, inputs = built
    if not callable(step):
        raise InputError(f"{target}: the first that it returns must be the step, a function, not {type(step).__name__}")
    # A single tensor is taken for what it is meant to be.
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    models = model if isinstance(model, list | tuple) else [model]
    if not all(isinstance(one, torch.nn.Module) for one in models):
        kinds = ", ".join(type(one).__name__ for one in models)
        raise InputError(f"{target}: the second that it returns must be a model or a list of models, not {kinds}")
    count = sum(p.numel() for p in {id(p): p for one in models for p in one.parameters()}.values())
    return Script(step, model, optimizer, given, f"{target}: {count:,} parameters, {_inputs_text(given)}")


def _inputs_text(inputs: tuple[Any, ...]) -> str:
    leaves = [tuple(leaf.shape) for leaf in inputs if isinstance(leaf, torch.Tensor)]
    return "inputs " + ", ".join("×".join(map(str, shape)) or "scalar" for shape in leaves) if leaves else "no inputs"
