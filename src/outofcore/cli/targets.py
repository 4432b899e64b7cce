"""Classify the targets of the command line, by text and by existing files. Runs no user code."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from outofcore.errors import InputError

_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_WEIGHTS = frozenset({".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".h5", ".npz", ".npy"})
BUILDER_TEXT = "a function that takes no arguments and returns (step, model, optimizer, inputs)"
_KINDS = (
    "a model of the zoo, such as resnet50; a function of a script, as my_script.py:build; an ONNX file; "
    "or a model's config.json"
)


class TargetKind(Enum):
    ZOO = "a model of the zoo"
    SCRIPT = "a function of a script"
    ONNX = "an ONNX file"
    CONFIG = "a model's configuration"


def classify_target(target: str) -> TargetKind:
    """Return the kind of a target, such as a script; raise ``InputError`` with advice if the target is invalid."""
    path = Path(target)
    if not target.strip():
        raise InputError(f"the name is empty; give {_KINDS}")
    if split_script(target) is not None:
        return TargetKind.SCRIPT
    if path.suffix == ".py" or target.rpartition(":")[0].endswith(".py"):
        raise InputError(_script_message(target))
    if path.suffix in (".onnx", ".json"):
        if not path.exists():
            raise InputError(_missing_message(path))
        return TargetKind.ONNX if path.suffix == ".onnx" else TargetKind.CONFIG
    # A folder that happens to have the name of a zoo model is not a configuration.
    if path.is_dir() and ((path / "config.json").is_file() or path.name != target):
        return TargetKind.CONFIG
    if path.is_file():
        raise InputError(_unsupported_message(path))
    script = Path(f"{target.partition(':')[0]}.py")
    if ":" in target and script.is_file():
        raise InputError(f"{target}: write {script}:{target.partition(':')[2]}, with the suffix .py")
    if ":" in target or "/" in target or "\\" in target or path.suffix:
        raise InputError(_missing_message(path))
    return TargetKind.ZOO


def split_script(target: str) -> tuple[Path, str] | None:
    """Split "folder/file.py:function" into path and name; None for any other text."""
    match = _FUNCTION.fullmatch(target)
    return None if match is None else (Path(match["file"]), match["name"])


def check_kind(target: str, allowed_kinds: Iterable[TargetKind], command: str, advice: str) -> TargetKind:
    """Return the kind of a target; raise ``InputError`` with advice if the command does not take that kind."""
    allowed = tuple(allowed_kinds)
    is_script = Path(target).suffix == ".py" and Path(target).is_file()
    kind = TargetKind.SCRIPT if is_script and TargetKind.SCRIPT not in allowed else classify_target(target)
    if kind not in allowed:
        names = " or ".join(allowed_kind.value for allowed_kind in allowed)
        actual = "a script" if is_script else kind.value
        raise InputError(f"{command} takes {names}, but {target} is {actual}; {advice}")
    return kind


def _script_message(target: str) -> str:
    """Return an error message for a target that names a script, but no function of it, such as "train.py"."""
    text, _, name = target.rpartition(":")
    path = Path(text if text.endswith(".py") else target)
    if not path.is_file():
        return _missing_message(path)
    is_named = text.endswith(".py") and name
    problem = f"{name!r} is not the name of a function" if is_named else f"{path} names a script but no function of it"
    function = next(iter(functions_in(path)), "build")
    return (
        f"{problem}; write {path}:{function}, where {function} is {BUILDER_TEXT}. {functions_text(path)}. "
        f"To run the whole script within a budget, use: outofcore run --budget 6GiB {path}"
    )


def functions_in(path: Path, *, include_all: bool = False) -> list[str]:
    """Return the names of a script's public functions, by default only of functions that need no arguments."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InputError(f"{path}{line} is not valid Python: {getattr(error, 'msg', error)}; correct it") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    named = [
        node.name
        for node in functions
        if not node.name.startswith("_") and (include_all or not _requires_arguments(node.args))
    ]
    return sorted(dict.fromkeys(named), key=lambda name: name != "build")


def _requires_arguments(arguments: ast.arguments) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional > 0 or any(default is None for default in arguments.kw_defaults)


def functions_text(path: Path) -> str:
    names = functions_in(path)
    if not names:
        return f"{path} has no function without arguments"
    listed, remaining = names[:8], len(names[8:])
    return f"Functions of {path} without arguments: {', '.join(listed)}{f' and {remaining} more' if remaining else ''}"


def _missing_message(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        is_hub_name = str(path).count("/") == 1 and not path.suffix and not str(path).startswith((".", "/"))
        hint = " (outofcore downloads no models: for a model on a hub, give its config.json)" if is_hub_name else ""
        return f"there is no file or folder {path}, and no folder {folder}{hint}; give {_KINDS}"
    suggestion = nearest_sibling(path)
    if path.suffix == ".py" and not suggestion:
        return f"there is no file {path} in {Path.cwd()}; give the path of your script"
    return f"there is no file or folder {path}; {f'did you mean {suggestion}?' if suggestion else f'give {_KINDS}'}"


def _unsupported_message(path: Path) -> str:
    if path.name.endswith(".json.gz"):
        return f"{path} looks like a graph file; give it as --graph {path}"
    if path.suffix in _WEIGHTS:
        return (
            f"{path} contains weights but no description of a step; give the model's config.json, "
            "or a function of a script, as my_script.py:build"
        )
    return f"{path} is not a file that describes a step; give {_KINDS}"


def nearest_sibling(path: Path) -> Path | None:
    try:
        name = nearest(path.name, (entry.name for entry in path.parent.iterdir()))
    except OSError:
        return None
    return path.parent / name if name else None


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is most similar to a name, ignoring case; "" if all are too different."""
    lowered = {original.lower(): original for original in choices}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[matches[0]] if matches else ""
