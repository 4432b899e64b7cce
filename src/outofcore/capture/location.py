"""Which line of the user's own code is running."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_PACKAGE = str(Path(__file__).parent.parent) + "/"
_EXAMPLES = _PACKAGE + "zoo/"
_STANDARD = tuple(
    {str(Path(sysconfig.get_path(name))) + "/" for name in ("stdlib", "platstdlib")}
    | {str(Path(functools.__file__).parent) + "/"}
)


@functools.lru_cache(maxsize=4096)
def is_users_file(name: str) -> bool:
    """Whether a code object's file is neither part of PyTorch, of the standard library nor of outofcore.

    Third-party packages count as the user's: a model may well come from one.
    """
    if name.startswith(("<frozen", "<string>", "<__array_function__")):
        return False
    if name.startswith(_EXAMPLES):
        return True
    if name.startswith((_TORCH, _PACKAGE)):
        return False
    return not (name.startswith(_STANDARD) and "site-packages" not in name and "dist-packages" not in name)


def user_line() -> str:
    """The innermost ``file:line`` of user code on this thread's stack; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def called_from(file_suffix: str) -> bool:
    """Whether a frame on this thread's stack is of a file whose name ends so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file_suffix):
            return True
        frame = frame.f_back
    return False
