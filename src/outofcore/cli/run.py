"""``outofcore run``: run an unmodified script or module as ``python`` does, within a budget."""

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

from outofcore.cli.targets import nearest_sibling, split_script
from outofcore.errors import InputError, OutOfCoreError

if TYPE_CHECKING:
    from outofcore.api import CheckName, Loop


@dataclass(frozen=True)
class Launch:
    target: str  # path of a script, of a folder or zip file with a __main__.py, or name of a module
    arguments: tuple[str, ...]
    is_module: bool
    budget: int | str | None = None  # bytes, or a share such as "70%"; None: the default share
    device: str | None = None  # None: a GPU if there is one, else the CPU
    home: str | None = None
    host_budget: int | None = None
    checked: bool = True  # compare clean evicted tensors by checksum
    quiet: bool = False
    measure: bool = False
    grow: bool = False


class LaunchRequest(BaseException):
    """Raised to run a script outside the command-line parser, which would catch the script's errors."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch


def check_launch(launch: Launch) -> Launch:
    """Return the launch; raise ``InputError`` with advice if Python could not run its script."""
    if launch.is_module:
        return launch
    target, script = launch.target, split_script(launch.target)
    path = Path(target)
    if script is not None and script[0].is_file() and not path.exists():
        raise InputError(
            f"run takes a whole script, but {target} is one of its functions: leave :{script[1]} out, or plan it "
            f"with: outofcore plan {target}"
        )
    if not path.exists():
        suggestion = nearest_sibling(path)
        hint = f"did you mean {suggestion}? Otherwise " if suggestion else ""
        raise InputError(
            f"there is no file {target}; {hint}give the path of a script, or the name of a module after -m (to train a "
            "model of the zoo, use: outofcore train)"
        )
    if path.is_dir() and not any((path / f"__main__.{ending}").is_file() for ending in ("py", "pyc")):
        raise InputError(f"the folder {target} has no __main__.py for Python to run; name the script in it")
    return launch


def run(launch: Launch) -> NoReturn:
    """Run the script and exit as it does: with its exit status, or by its exception."""
    process, loop_starter = os.getpid(), _LoopStarter(launch)
    outofcore_error: OutOfCoreError | None = None
    try:
        with loop_starter:
            code, module = _prepare_main(launch)
            exec(code, vars(module))
    except BaseException as error:  # Ctrl-C and sys.exit() too end a script as they would in Python
        if error is not loop_starter.raised and isinstance(error, OutOfCoreError):
            outofcore_error = error  # it replaces an error of PyTorch, or comes from the end of the loop
        elif loop_starter.raised is None:
            raise
    raised = loop_starter.raised
    _print_traceback(raised)
    if process == os.getpid():  # a child of the script may return here, too
        if outofcore_error is not None:
            _print_line(str(outofcore_error))
        if not launch.quiet and (loop_starter.has_begun or raised is None):
            _print_line(loop_starter.summary())
    _exit(raised, failed=outofcore_error is not None)


def _print_traceback(raised: BaseException | None) -> None:
    """Print the script's traceback as Python would, without frames of outofcore; skip ``SystemExit``."""
    if raised is None or isinstance(raised, SystemExit):
        return
    _flush()
    raised.__traceback__ = _strip_own_frames(raised.__traceback__)
    sys.excepthook(type(raised), raised, raised.__traceback__)


def _exit(raised: BaseException | None, *, failed: bool) -> NoReturn:
    """Exit as Python does after the exception ``raised``, but never with status 0 if outofcore ``failed``."""
    if isinstance(raised, SystemExit):
        code = raised.code
        raise SystemExit(1 if failed and code in (None, 0) else code)
    if isinstance(raised, KeyboardInterrupt):
        # Python cleans up and then dies of the signal, if this reaches it. The traceback has been printed already.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    raise SystemExit(1 if raised is not None or failed else 0)


def _strip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    own_files = (__file__, "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own_files):
        trace = trace.tb_next
    return trace


def _print_line(text: str) -> None:
    _flush()
    print(f"outofcore: {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


# ---- Running a script as Python does ---------------------------------------------------------------------------------


def _prepare_main(launch: Launch) -> tuple[CodeType, ModuleType]:
    """Return the code to run and its new ``__main__`` module. Set ``sys.argv`` and ``sys.path`` as Python does."""
    is_container = not launch.is_module and (Path(launch.target).is_dir() or zipfile.is_zipfile(launch.target))
    if launch.is_module:
        module_spec = _module_spec(launch)
    elif is_container:
        module_spec = _container_spec(launch.target)
    else:
        module_spec = _script_spec(launch.target)
    loader = module_spec.loader
    code = None
    if isinstance(loader, importlib.machinery.SourceFileLoader) and not (launch.is_module or is_container):
        path = loader.get_filename(module_spec.name)
        code = loader.source_to_code(loader.get_data(path), path)  # writes no bytecode file
    elif loader is not None and hasattr(loader, "get_code"):  # loaders of zip files have it, too
        code = loader.get_code(module_spec.name)  # type: ignore[attr-defined]
    if code is None:
        raise ImportError(
            f"{launch.target} cannot be run: it contains no Python code; name a script or a module", name=launch.target
        )
    spec = module_spec if launch.is_module or is_container else None
    main = ModuleType("__main__")
    vars(main).update(
        __builtins__=sys.modules["builtins"],
        __file__=module_spec.origin,
        __cached__=None if spec is None else spec.cached,
        __loader__=loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
    )
    sys.modules["__main__"] = main  # where pickle and multiprocessing look for it
    sys.argv = [module_spec.origin or launch.target if launch.is_module else launch.target, *launch.arguments]
    return code, main


def _script_spec(target: str) -> importlib.machinery.ModuleSpec:
    _set_first_search_folder(str(Path(target).resolve().parent))
    name = str(Path(target).absolute())
    kind = importlib.machinery.SourcelessFileLoader if name.endswith(".pyc") else importlib.machinery.SourceFileLoader
    return importlib.machinery.ModuleSpec("__main__", kind("__main__", name), origin=name)


def _container_spec(target: str) -> importlib.machinery.ModuleSpec:
    name = str(Path(target).absolute())
    _set_first_search_folder(name)
    module_spec = importlib.machinery.PathFinder.find_spec("__main__", [name])
    if module_spec is None:
        raise ImportError(f"can't find '__main__' module in {target!r}", path=target)
    return module_spec


def _module_spec(launch: Launch) -> importlib.machinery.ModuleSpec:
    """Find the module, or a package's ``__main__``, as ``python -m`` does; set ``sys.argv`` and ``sys.path``."""
    _set_first_search_folder(str(Path.cwd()))
    sys.argv = ["-m", *launch.arguments]  # the value that Python has while it imports a package
    name = launch.target
    module_spec = importlib.util.find_spec(name)
    if module_spec is not None and module_spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        module_spec = importlib.util.find_spec(name)
    if module_spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return module_spec


def _set_first_search_folder(folder: str) -> None:
    """Replace the first entry of ``sys.path``, the folder of this program, with the given folder."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


# ---- The loop within the budget --------------------------------------------------------------------------------------


class _LoopStarter:
    """A context manager that starts the budget once the script imports PyTorch, and stops it at the end."""

    # Importing PyTorch earlier would read environment variables that the script may still set.

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._loop: Loop | None = None
        self.raised: BaseException | None = None  # the exception that ended the script
        self._finder: _TorchFinder | None = None

    def __enter__(self) -> None:
        if "torch" in sys.modules:
            self._start_loop()
        else:
            self._finder = _TorchFinder(self._start_loop)
            sys.meta_path.insert(0, self._finder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.raised = error
        if self._finder is not None:
            self._finder.uninstall()
        if self._loop is not None:
            self._loop.__exit__(kind, error, trace)

    @property
    def has_begun(self) -> bool:
        return self._loop is not None

    def summary(self) -> str:
        if self._loop is None:
            return "the budget had no effect: the script did not import torch in its main thread"
        return self._loop.stats.summary

    def _start_loop(self) -> None:
        """Start ``budget()`` if this is the main thread; exit with status 2 if it fails."""
        if threading.current_thread() is not threading.main_thread():
            return
        from outofcore.api import budget  # noqa: PLC0415 - it imports torch

        launch = self._launch
        check: CheckName = "sampled" if launch.checked else "off"
        try:
            self._loop = budget(
                launch.budget,
                device=launch.device or _local_device(),
                home=launch.home,
                host_budget=launch.host_budget,
                check=check,
                measure=launch.measure,
                grow=launch.grow,
            ).start()
        except OutOfCoreError as error:  # no line of the script that depends on the budget has run
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error


def _local_device() -> str:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return "cpu"
    rank = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{int(rank) % torch.cuda.device_count() if rank.isdigit() else 0}"


class _TorchFinder(importlib.abc.MetaPathFinder):
    """An import hook that calls a function once PyTorch has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def uninstall(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that imports torch and then calls the function; None for other modules."""
        if fullname != "torch":
            return None
        self.uninstall()
        torch_spec = importlib.util.find_spec("torch")
        if torch_spec is not None and torch_spec.loader is not None:
            torch_spec.loader = _CallbackLoader(torch_spec.loader, self._then)
        return torch_spec


class _CallbackLoader(importlib.abc.Loader):
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
