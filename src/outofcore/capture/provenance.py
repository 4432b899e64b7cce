"""Find the module and the user's line of an op or a refusal, in forward and backward passes."""

from __future__ import annotations

import contextlib
import dis
import functools
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from outofcore._torch_internals import autograd_sequence_number, current_autograd_node, node_sequence_number
from outofcore.capture.patching import patch_attribute
from outofcore.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent) + "/"
_PACKAGE = str(Path(__file__).parent.parent) + "/"
_EXAMPLES = _PACKAGE + "zoo/"
_INSTALLED = ("/site-packages/", "/dist-packages/")
_SCRIPTS = str(Path(sysconfig.get_path("scripts"))) + "/"
_GENERATED = "<eval_with_key>"  # code of torch.fx
_MODULE_CALL = nn.Module.__call__.__code__
_BEGINS_BACKWARD = ("backward", "grad")  # of torch.autograd
_STANDARD = tuple(
    {str(Path(sysconfig.get_path(name))) + "/" for name in ("stdlib", "platstdlib")}
    | {str(Path(functools.__file__).parent) + "/"}
)


@functools.lru_cache(maxsize=4096)
def is_user_file(name: str) -> bool:
    """Return whether a file belongs to the user or an installed package, not to PyTorch, outofcore or Python itself."""
    if name.startswith(("<frozen", "<string>", "<__array_function__", _GENERATED)):
        return False
    if name.startswith(_EXAMPLES):
        return True
    if name.startswith((_TORCH, _PACKAGE)):
        return False
    return not name.startswith(_STANDARD) or any(part in name for part in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module != "__main__" and bool(file) and not _is_project_file(file)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> str:
    """Return ``file:line`` of the innermost user code on this thread's stack, or an empty string."""
    return next((_line(frame) for frame in _frames() if is_user_file(frame.f_code.co_filename)), "")


def graph_node(file: str, line: int) -> str:
    """Return the ``torch.fx`` node that a line of generated code computes, or an empty string."""
    return linecache.getline(file, line).partition(" = ")[0].strip() if file.startswith(_GENERATED) else ""


def _current_graph_node() -> str:
    """Return the ``torch.fx`` node that the innermost module runs, or an empty string."""
    for frame in _frames():
        node = graph_node(frame.f_code.co_filename, frame.f_lineno)
        if node or frame.f_code is _MODULE_CALL:
            return node
    return ""


def caller_line() -> str:
    """Return ``file:line`` of the innermost code outside of installed packages, or else ``user_line()``."""
    lines = (_line(frame) for frame in _frames() if _is_project_file(frame.f_code.co_filename))
    return next(lines, "") or user_line()


def backward_line() -> str:
    """Return ``file:line`` of the user's hook or ``Function`` that autograd is running, or an empty string."""
    for frame in _frames():
        if frame.f_code.co_filename.startswith(_TORCH) and frame.f_code.co_name in _BEGINS_BACKWARD:
            return ""
        if is_user_file(frame.f_code.co_filename):
            return _line(frame)
    return ""


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_project_file(name: str) -> bool:
    return is_user_file(name) and not name.startswith(_SCRIPTS) and not any(part in name for part in _INSTALLED)


def user_stacklevel() -> int:
    """Return the ``stacklevel`` with which ``warnings.warn`` names the innermost user code."""
    for level, frame in enumerate(_frames()):
        if is_user_file(frame.f_code.co_filename):
            return level
    return 2


def called_from(*file_suffixes: str) -> bool:
    return any(frame.f_code.co_filename.endswith(file_suffixes) for frame in _frames())


def innermost_code_in(package: str) -> CodeType | None:
    """Return the code of the innermost running function of ``package``; None if a user's function is deeper."""
    for frame in _frames():
        code = frame.f_code
        if package in code.co_filename:
            return code
        if is_user_file(code.co_filename):
            break
    return None


def running_transform() -> str:
    """Return the name of the outermost running ``torch.func`` transform, or an empty string."""
    names = [
        frame.f_code.co_qualname.partition(".")[0].lstrip("_")
        for frame in _frames()
        if "/torch/_functorch/" in frame.f_code.co_filename
    ]
    return next((f"torch.func.{name}" for name in reversed(names) if name in torch.func.__all__), "")


def user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback with only the frames of the user's code; None if no frame is left."""
    if traceback is None:
        return None
    inner = user_frames(traceback.tb_next)
    if not is_user_file(traceback.tb_frame.f_code.co_filename):
        return inner
    return TracebackType(inner, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def assignment_line(name: str, functions: Iterable[Any]) -> str:
    """Return ``file:line`` where functions first assign ``name``; without an assignment, where they use it."""
    first_use = ""
    for code in [code for function in functions for code in codes_of(function)]:
        for instruction in dis.get_instructions(code):
            line = instruction.positions.lineno if instruction.positions else None
            if instruction.argval == name and line is not None and is_user_file(code.co_filename):
                if instruction.opname.startswith("STORE"):
                    return f"{code.co_filename}:{line}"
                first_use = first_use or f"{code.co_filename}:{line}"
    return first_use


def definition_line(function: Any) -> str:
    """Return ``file:line`` where a function begins; empty if it is not Python code of the user."""
    code = next(codes_of(function), None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code and is_user_file(code.co_filename) else ""


def codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function and of all functions nested in it."""
    code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes_of(constant)


def find_name_on_stack(tensor: torch.Tensor) -> str:
    """Return the name of a tensor in the running functions, such as ``average.n_averaged``; empty if unknown."""
    path = ""
    for frame in _frames():
        if frame.f_code.co_filename.startswith(_PACKAGE):
            continue
        module_globals = frame.f_globals
        named = [(name, module_globals[name]) for name in frame.f_code.co_names if name in module_globals]
        for name, value in (*frame.f_locals.items(), *named):
            if value is tensor:
                return path or name
            if isinstance(value, nn.Module) and (not path or name != "self"):
                member = next((k for k, t in (*value.named_parameters(), *value.named_buffers()) if t is tensor), "")
                if member:
                    path = f"{type(value).__name__ if name == 'self' else name}.{member}"
    return path


def module_paths(models: Sequence[nn.Module]) -> dict[int, str]:
    """Map ids of modules to their paths in ``named_modules``, with a prefix if there are several models."""
    paths: dict[int, str] = {}
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            paths.setdefault(id(module), join(prefix(index, len(models)), path))
    return paths


def module_classes(models: Sequence[nn.Module]) -> dict[str, str]:
    paths = module_paths(models)
    return {paths[id(module)]: type(module).__name__ for model in models for module in model.modules()}


def prefix(index: int, count: int) -> str:
    return "" if count == 1 else f"model{index}"


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


# Each autograd node has a sequence number from the thread's counter. The op dispatched next after a node's creation is
# the op that the node differentiates, so the number identifies the module and line of a backward op.
class Provenance:
    """Finds the module and the user's line of each op, also in the backward pass."""

    def __init__(self, models: Sequence[nn.Module], parameter_names: dict[int, str]) -> None:
        self._paths = module_paths(models)
        self._parameters = parameter_names
        self._running: list[str] = []
        self._origin: dict[int, tuple[str, str]] = {}
        self._outside_backward = [0]

    @contextlib.contextmanager
    def track_modules(self) -> Iterator[None]:
        """Track which modules run, by patching ``nn.Module.__call__``."""
        original = nn.Module.__call__
        paths, running = self._paths, self._running

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            running.append(path)
            try:
                return original(module, *args, **kwargs)
            finally:
                running.pop()

        with patch_attribute(nn.Module, "__call__", call):
            yield

    @contextlib.contextmanager
    def enter_backward(self) -> Iterator[None]:
        """Mark the context as a backward pass, so that modules that run inside it count as recomputed."""
        self._outside_backward.append(len(self._running))
        try:
            yield
        finally:
            self._outside_backward.pop()

    def locate_op(self) -> tuple[str, str]:
        """Return the module path and the user's ``file:line`` of the op that is running now."""
        node = current_autograd_node()
        if node is not None and len(self._running) == self._outside_backward[-1]:
            return self._origin_of_node(node)
        origin = (join(self._running[-1], _current_graph_node()), user_line()) if self._running else ("", caller_line())
        self._origin.setdefault(autograd_sequence_number() - 1, origin)
        return origin

    def _origin_of_node(self, node: Any) -> tuple[str, str]:
        """Return module path and ``file:line`` of the forward op that an autograd node differentiates."""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            owner = self._parameters.get(id(variable), "").rpartition(".")[0]
            return owner, caller_line()
        return self._origin.get(node_sequence_number(node)) or ("", caller_line())

    def add_location(self, error: CaptureError) -> CaptureError:
        """Add the forward op's module and line to an error of the backward pass; return any other error unchanged."""
        node = current_autograd_node()
        if node is None or len(self._running) != self._outside_backward[-1]:
            return error
        module, source = self._origin_of_node(node)
        source = backward_line() or source
        text = str(error).removeprefix(f"{error.location}: ")
        if module and f" {module}: " not in text:
            text = f"in the backward pass of {module}: {text}"
        error.args, error.location = (f"{source}: {text}" if source else text,), source
        return error
