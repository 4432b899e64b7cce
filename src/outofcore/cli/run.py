"""``outofcore run``: run an unmodified script or module as ``python`` does, within a budget.

PyTorch is imported only when the script imports it, since it then reads environment variables that the script may set.
The loop is followed from that moment on.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from outofcore.cli.targets import nearest_beside, split_script
from outofcore.errors import InputError, OutOfCoreError

if TYPE_CHECKING:
    from outofcore.api import CheckName, Loop


@dataclass(frozen=True)
class Launch:
    """What is to be run, and how.

    Attributes:
        target: path of a script, or of a folder or zip file with a ``__main__.py``; or the name of a module.
        arguments: of the script.
        is_module: the target is the name of a module.
        budget: in bytes, or a share such as "70%"; None: what the device can give.
        device: where the script computes; None: a GPU if there is one, else the CPU.
        checked: whether what is evicted unwritten is compared by checksum.
        quiet: print nothing at the end.
        measure: as for ``outofcore.budget``; ``grow`` as well.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    budget: int | str | None = None
    device: str | None = None
    home: str | None = None
    host_budget: int | None = None
    checked: bool = True
    quiet: bool = False
    measure: bool = False
    grow: bool = False


class Launching(BaseException):
    """Carries a launch out of the parser of the command line, whose frames and handlers are no part of the script."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch


def checked(launch: Launch) -> Launch:
    """Return the launch if its script exists; raises ``InputError``."""
    if launch.is_module:
        return launch
    target, found = launch.target, split_script(launch.target)
    path = Path(target)
    if found is not None and found[0].is_file() and not path.exists():
        raise InputError(
            f"run takes a whole script, and {target} is one function of it: leave :{found[1]} out, or plan that step "
            f"by: outofcore plan {target}"
        )
    if not path.exists():
        near = nearest_beside(path)
        meant = f"did you mean {near}? Else " if near else ""
        raise InputError(
            f"there is no file {target}; {meant}give the path of a script, or the name of a module after -m (models of "
            "the zoo are trained by: outofcore train)"
        )
    if path.is_dir() and not any((path / f"__main__.{ending}").is_file() for ending in ("py", "pyc")):
        raise InputError(f"the folder {target} has no __main__.py, which Python would run; name the script in it")
    return launch


def run(launch: Launch) -> NoReturn:
    """Run the script and exit as it does: with its exit status, or by its exception.

    After an interrupt of the script, Python dies of it as it would have.
    """
    process, follower = os.getpid(), _Follower(launch)
    ours: OutOfCoreError | None = None
    try:
        with follower:
            code, module = _prepared(launch)
            exec(code, vars(module))
    except BaseException as error:  # whatever ends a script, Ctrl-C and sys.exit() as well, is told as Python tells it
        if error is not follower.raised and isinstance(error, OutOfCoreError):
            ours = error  # in place of what PyTorch raised, or from the end of the loop
        elif follower.raised is None:
            raise
    raised = follower.raised
    _tell(raised)
    if process == os.getpid():  # and not a child that came back here
        if ours is not None:
            _say(str(ours))
        if not launch.quiet and (follower.began or raised is None):
            _say(follower.summary())
    _leave(raised, failed=ours is not None)


def _tell(raised: BaseException | None) -> None:
    """Print the traceback as Python would, from the script's first frame on."""
    if raised is None or isinstance(raised, SystemExit):
        return
    _flush()
    raised.__traceback__ = _without_ours(raised.__traceback__)
    sys.excepthook(type(raised), raised, raised.__traceback__)


def _leave(raised: BaseException | None, *, failed: bool) -> NoReturn:
    if isinstance(raised, SystemExit):
        told = raised.code
        raise SystemExit(1 if failed and told in (None, 0) else told)
    if isinstance(raised, KeyboardInterrupt):
        # Python dies of the signal after it has cleaned up, if this reaches it; what there is to tell has been told.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    raise SystemExit(1 if raised is not None or failed else 0)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Drop our frames at the beginning, and those of a loader that found no valid code."""
    ours = (__file__, "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def _say(text: str) -> None:
    _flush()
    print(f"outofcore: {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


# ---- as Python runs a script ----------------------------------------------------------------------------------------


def _prepared(launch: Launch) -> tuple[CodeType, ModuleType]:
    """Return the script's code and its module ``__main__``, and set arguments and search path."""
    contained = not launch.is_module and (Path(launch.target).is_dir() or zipfile.is_zipfile(launch.target))
    if launch.is_module:
        found = _module(launch)
    elif contained:
        found = _inside(launch.target)
    else:
        found = _file(launch.target)
    loader = found.loader
    code = None
    if isinstance(loader, importlib.machinery.SourceFileLoader) and not (launch.is_module or contained):
        path = loader.get_filename(found.name)
        code = loader.source_to_code(loader.get_data(path), path)  # and no file of bytecode beside it
    elif loader is not None and hasattr(loader, "get_code"):  # as those of zip files have it, too
        code = loader.get_code(found.name)  # type: ignore[attr-defined]
    if code is None:
        raise ImportError(f"{launch.target} cannot be run: it has no code in Python", name=launch.target)
    spec = found if launch.is_module or contained else None
    main = ModuleType("__main__")
    vars(main).update(
        __builtins__=sys.modules["builtins"],
        __file__=found.origin,
        __cached__=None if spec is None else spec.cached,
        __loader__=loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
    )
    sys.modules["__main__"] = main  # where pickle and multiprocessing look for it
    sys.argv = [found.origin or launch.target if launch.is_module else launch.target, *launch.arguments]
    return code, main


def _file(target: str) -> importlib.machinery.ModuleSpec:
    _put_first(str(Path(target).resolve().parent))
    name = str(Path(target).absolute())
    kind = importlib.machinery.SourcelessFileLoader if name.endswith(".pyc") else importlib.machinery.SourceFileLoader
    return importlib.machinery.ModuleSpec("__main__", kind("__main__", name), origin=name)


def _inside(target: str) -> importlib.machinery.ModuleSpec:
    """Return the spec of a folder or a zip file."""
    name = str(Path(target).absolute())
    _put_first(name)
    found = importlib.machinery.PathFinder.find_spec("__main__", [name])
    if found is None:
        raise ImportError(f"can't find '__main__' module in {target!r}", path=target)
    return found


def _module(launch: Launch) -> importlib.machinery.ModuleSpec:
    _put_first(str(Path.cwd()))
    sys.argv = ["-m", *launch.arguments]  # as it is while a package is imported
    name = launch.target
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        name = f"{name}.__main__"
        found = importlib.util.find_spec(name)
    if found is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return found


def _put_first(folder: str) -> None:
    """Replace the first entry of the search path, where this program was found."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


# ---- within the budget ----------------------------------------------------------------------------------------------


class _Follower:
    """Starts the loop once PyTorch has been imported, and stops it at the end; ``raised`` is what ended the script."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._loop: Loop | None = None
        self.raised: BaseException | None = None
        self._finder: _AfterTorch | None = None

    def __enter__(self) -> None:
        if "torch" in sys.modules:
            self._start()
        else:
            self._finder = _AfterTorch(self._start)
            sys.meta_path.insert(0, self._finder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.raised = error
        if self._finder is not None:
            self._finder.forget()
        if self._loop is not None:
            self._loop.__exit__(kind, error, trace)

    @property
    def began(self) -> bool:
        return self._loop is not None

    def summary(self) -> str:
        if self._loop is None:
            return "nothing ran within the budget: the script did not import torch in its main thread"
        return self._loop.stats.summary

    def _start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        from outofcore.api import budget  # noqa: PLC0415 - it imports torch

        launch = self._launch
        check: CheckName = "sampled" if launch.checked else "off"
        try:
            self._loop = budget(
                launch.budget,
                device=launch.device or _device_here(),
                home=launch.home,
                host_budget=launch.host_budget,
                check=check,
                measure=launch.measure,
                grow=launch.grow,
            ).start()
        except OutOfCoreError as error:  # before any line of the script that could depend on it
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error


def _device_here() -> str:
    """Return this process's GPU, which torchrun numbers, or the CPU where there is none."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return "cpu"
    rank = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{int(rank) % torch.cuda.device_count() if rank.isdigit() else 0}"


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds PyTorch as other finders do, and calls a function once it has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def forget(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        self.forget()
        found = importlib.util.find_spec("torch")
        if found is not None and found.loader is not None:
            found.loader = _ThenCalling(found.loader, self._then)
        return found


class _ThenCalling(importlib.abc.Loader):
    """Loads a module by its own loader, and then calls a function."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()
