"""Models larger than memory: each parameter is allocated and initialized at its home."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from outofcore._torch_internals import (
    HigherOrderOperator,
    TorchDispatchMode,
    shares_storage,
    storage_key,
    tensor_leaves,
    view_storage_bytes,
)
from outofcore.analysis import is_large
from outofcore.capture.guard import check_shapes
from outofcore.checkpoint.matching import check_weights
from outofcore.checkpoint.tensor_files import Entry, Weights
from outofcore.errors import InputError, StateError
from outofcore.execution.aliases import HomeTensors
from outofcore.execution.opening import OpenHome
from outofcore.runtime.file_ranges import ReadFile
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.runtime.memory import trim_heap
from outofcore.tensor_data import is_in_host_memory, rebase_tensor, swap, view_like
from outofcore.units import MIB

Built = TypeVar("Built")
Init = Callable[[nn.Module], None]

# The most bytes of tensors at home that may be in memory before their pages are dropped.
_MAX_TOUCHED_BYTES = 16 * MIB


def build(make: Callable[[], Built], *, home: OpenHome) -> Built:
    """Build a model with ``make()`` at a home, without holding it whole in memory.

    A parameter or buffer of 64 KiB or more moves to the home when a module registers it, usually before it is
    initialized; one mapped from a file (as by ``from_pretrained`` of transformers) stays there. Memory holds the
    largest tensor, temporary tensors of the constructor, and some MiB. Tensors that share memory move when ``make`` has
    ended. The values are the same as without ``build``.

    Args:
        make: makes modules, for example a class; its result is returned.
        home: where the parameters are stored; pass it to ``compile`` as well.

    Raises:
        SpillError: the home is too small for the model.
        InputError: a parameter is still on the meta device (see ``materialize``).
        StateError: the home is closed.

    >>> import torch
    >>> import outofcore
    >>> with outofcore.open_home("host") as home:
    ...     model = outofcore.build(lambda: torch.nn.Linear(256, 256), home=home)
    ...     model(torch.ones(1, 256)).shape
    torch.Size([1, 256])
    """
    home.check_open()
    with _InitializationMode(home.home_tensors) as mode:
        with _registrations_moving_home(home.home_tensors):
            built = make()
        mode.drop_caches()
    # Memory freed by constructors would otherwise stay allocated outside the budget.
    trim_heap()
    return built


@contextlib.contextmanager
def _registrations_moving_home(home_tensors: HomeTensors) -> Iterator[None]:
    """Move large tensors home when modules register them, or at the end of the context if they share memory."""
    thread = threading.get_ident()
    # Not the tensors: some are replaced, and references would keep their memory.
    modules: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
    mapped = MappedFiles()

    def move_home(module: nn.Module, name: str, tensor: Any) -> None:
        if threading.get_ident() != thread or not isinstance(tensor, torch.Tensor):
            return
        modules[id(module), name] = weakref.ref(module)
        if _can_move(tensor) and home_tensors.find(tensor) is None and not shares_storage(tensor):
            mapped.refresh()
            _move_to_home([tensor], home_tensors, mapped)

    hooks = [
        register_module_parameter_registration_hook(move_home),
        register_module_buffer_registration_hook(move_home),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[torch.Tensor]] = {}
    late: dict[int, torch.Tensor] = {}
    for (_, name), reference in modules.items():
        module = reference()
        if module is not None:
            tensor = module._parameters.get(name, module._buffers.get(name))
            if tensor is not None and tensor.is_meta:
                raise InputError(
                    f"{name} of a {type(module).__name__} is on the meta device, which has no bytes; build the model "
                    "without torch.device('meta'), or give the model made there to outofcore.materialize()"
                )
            if tensor is not None:
                late[id(tensor)] = tensor
    for tensor in late.values():
        if _can_move(tensor) and home_tensors.find(tensor) is None:
            groups.setdefault(storage_key(tensor), []).append(tensor)
    mapped.refresh()
    for tensors in groups.values():
        _move_to_home(tensors, home_tensors, mapped)


def materialize(
    model: nn.Module,
    *,
    home: OpenHome,
    weights: str | os.PathLike[str] | None = None,
    init: Init | None = None,
) -> nn.Module:
    """Allocate the meta tensors of a model at a home, initialize or load them, and return the model.

    With ``weights``, steps read tensors in the model's dtype in place from the files, without a copy. Only small
    tensors and tensors of another dtype are read now. Do not change the files while the model is in use.

    Without ``weights``, each module's ``reset_parameters`` runs, inner modules first, and then ``init`` for each
    module. The values are those of the same model made in memory with the same generator. Use ``outofcore.build`` if
    the constructor initializes the model in another way.

    Args:
        model: made under ``torch.device("meta")``. Its parameters stay the same objects, except parameters with weak
            references (recurrent modules).
        home: where the parameters are stored; pass it to ``compile`` as well.
        weights: a safetensors file, an index (``model.safetensors.index.json``), or a folder with either. Tensors not
            in the files are initialized as above, with a warning.
        init: initializes the module passed to it.

    Raises:
        InputError: a lazy module has no shapes; a tensor has no contents, or another shape or kind of dtype in the
            files; the files have no tensor of the model; a file is corrupt.
        SpillError: the home is full.
        StateError: another object refers to a parameter, which prevents its allocation; or the home is closed.

    >>> import torch
    >>> import outofcore
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(256, 256)
    >>> with outofcore.open_home("host") as home:
    ...     outofcore.materialize(model, home=home).weight.device
    device(type='cpu')
    """
    home.check_open()
    for path, module in model.named_modules():
        check_shapes(path, module)
    _fill(model, home.home_tensors, None if weights is None else Weights(Path(weights)), init)
    trim_heap()
    return model


def _fill(model: nn.Module, home_tensors: HomeTensors, files: Weights | None, init: Init | None) -> None:
    """Allocate the meta tensors of a model and initialize or load them; raise ``InputError`` if one stays empty."""
    if files is not None:
        check_weights(model, files)
    in_place = {} if files is None else _find_in_files(model, files, home_tensors)
    with _InitializationMode(home_tensors) as mode:
        tensors = allocate(model, home_tensors, in_place)
        mode.restore([tensors[name] for name in in_place])
        mode.watch([tensor for tensor in tensors.values() if tensor.numel()])
        in_files = set() if files is None else {id(tensors[name]) for name in tensors.keys() & files.names}
        for module in _inner_first(model, set()):
            if files is None or not _is_in_files(module, tensors, in_files):
                _reset(module)
        if init is not None:
            model.apply(init)
        mode.drop_caches()
    empty = [n for n, t in tensors.items() if id(t) not in in_files and mode.is_unwritten(t)]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        absence = "the file does not have it, and " if files is not None else ""
        raise InputError(
            f"{empty[0]}{more} is on the meta device and cannot be initialized: {absence}its module has no "
            "reset_parameters(); pass init=, or make the model with outofcore.build(), which runs its constructor"
        )
    if files is not None:
        placed = {id(tensors[name]) for name in tensors.keys() & in_place.keys()}
        names = [name for name in sorted(tensors.keys() & files.names) if id(tensors[name]) not in placed]
        files.load({name: tensors[name] for name in names}, home_tensors)


def _find_in_files(model: nn.Module, files: Weights, home_tensors: HomeTensors) -> dict[str, tuple[ReadFile, Entry]]:
    """Find meta tensors that can use a file's bytes as their memory; return the file and entry of each, by name.

    Raises ``InputError`` if a file was changed since its header was read.
    """
    if not home_tensors.takes_files:
        return {}
    named = _meta_tensors(model)
    users: dict[int, set[int]] = {}
    for tensor in named.values():
        users.setdefault(storage_key(tensor), set()).add(id(tensor))
    opened: dict[Path, ReadFile] = {}
    entries: dict[str, tuple[ReadFile, Entry]] = {}
    for name in sorted(named.keys() & files.names):
        tensor, (file, entry) = named[name], files.find(name)
        count = tensor.untyped_storage().nbytes()
        if (
            users[storage_key(tensor)] == {id(tensor)}
            and tensor.dtype == entry.dtype
            and tensor.is_contiguous()
            and count == entry.end - entry.begin
            and is_large(count)
            and entry.begin % tensor.element_size() == 0
        ):
            if file.path not in opened:
                opened[file.path] = ReadFile(file.path, file.stamp)
            entries[name] = (opened[file.path], entry)
    return entries


def _meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if tensor.is_meta}


def allocate(
    model: nn.Module, home_tensors: HomeTensors | None, in_place: Mapping[str, tuple[ReadFile, Entry]] | None = None
) -> dict[str, torch.Tensor]:
    """Allocate memory for each meta tensor of a model; return the tensors by name.

    Tensors in ``in_place`` use the bytes of their file as memory. Others are uninitialized, large ones at home if there
    are ``home_tensors``. Parameters stay the same objects unless they have weak references; shared memory stays shared.
    Raises ``StateError`` if a reference prevents the change of a parameter, ``SpillError`` if the home is full.
    """
    named = _meta_tensors(model)
    files = {id(named[name]): source for name, source in (in_place or {}).items()}
    bases: dict[int, torch.Tensor] = {}
    allocated: dict[int, torch.Tensor] = {}
    for name, tensor in named.items():
        if id(tensor) in allocated:
            continue
        count = tensor.untyped_storage().nbytes()
        base = bases.get(storage_key(tensor))
        if base is None and home_tensors is not None and id(tensor) in files:
            file, entry = files[id(tensor)]
            base = bases[storage_key(tensor)] = home_tensors.adopt(file, entry.begin, count)
        if base is None:
            large = home_tensors is not None and is_large(count)
            base = (
                home_tensors.allocate(count)
                if home_tensors is not None and large
                else torch.empty(count, dtype=torch.uint8)
            )
            bases[storage_key(tensor)] = base
        allocated[id(tensor)] = _allocate_tensor(model, name, tensor, base)
    return {name: allocated[id(tensor)] for name, tensor in named.items()}


def _allocate_tensor(model: nn.Module, name: str, tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Give a meta tensor the memory of ``base``; return the tensor, or a replacement if it has weak references."""
    if tensor.grad is not None:
        raise StateError(f"{name} cannot be allocated: it has a gradient; materialize the model before it is used")
    real = view_like(tensor, base)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(real).update(vars(tensor))
    if weakref.getweakrefs(tensor):
        # Such a tensor cannot be swapped. Recurrent modules have weak references, and update them on assignment.
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for key in [key for key, member in table.items() if member is tensor]:
                    setattr(module, key, real)
        return real
    try:
        swap(tensor, real)
    except RuntimeError as error:
        raise StateError(
            f"{name} cannot be allocated ({error}); materialize the model before views of its parameters are made"
        ) from error
    return tensor


def _inner_first(module: nn.Module, visited: set[int]) -> Iterator[nn.Module]:
    """Yield a module and its inner modules, inner modules first, except modules in ``visited``."""
    if id(module) in visited:
        return
    visited.add(id(module))
    for child in module.children():
        yield from _inner_first(child, visited)
    yield module


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _is_in_files(module: nn.Module, tensors: dict[str, torch.Tensor], in_files: set[int]) -> bool:
    """Return whether the files contain all tensors of a module itself, without its inner modules."""
    ids = {id(tensor) for tensor in tensors.values()}
    return all(id(tensor) in in_files for tensor in _own_tensors(module) if id(tensor) in ids)


def _reset(module: nn.Module) -> None:
    """Initialize a module by ``reset_parameters`` or by the private method that its constructor uses."""
    # Of a module without own tensors, the public method would initialize inner modules again.
    method = getattr(module, "reset_parameters", None) if _own_tensors(module) else None
    method = method or getattr(module, "_reset_parameters", None)
    if callable(method):
        method()


class _InitializationMode(TorchDispatchMode):
    """A dispatch mode that frees memory of initialized tensors, and records which tensors were written.

    Tensors at a home are mapped files, which count as memory of the process until their pages are dropped.
    """

    supports_higher_order_operators = True

    def __init__(self, home_tensors: HomeTensors | None) -> None:
        super().__init__()
        self._home_tensors = home_tensors
        self._touched: dict[int, torch.Tensor] = {}
        self._bytes = 0
        self._watched: set[int] = set()
        self._restored: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        used = tensor_leaves([*args, *named.values()])
        if isinstance(func, HigherOrderOperator):
            self._watched.clear()  # its functions may have written any tensor
        elif self._watched:
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[index] if index < len(args) else named.get(argument.name)
                    self._watched.difference_update(map(storage_key, tensor_leaves([value])))
        for tensor in used:
            self._record_use(tensor)
        return out

    def _record_use(self, tensor: torch.Tensor) -> None:
        """Record that an op used a home tensor; drop cached pages when the used home tensors exceed 16 MiB in total."""
        if self._home_tensors is None or self._home_tensors.find(tensor) is None:
            return
        key = storage_key(tensor)
        if key not in self._touched:
            self._touched[key] = tensor
            self._bytes += tensor.untyped_storage().nbytes()
        if self._bytes > _MAX_TOUCHED_BYTES:
            self.drop_caches()

    def drop_caches(self) -> None:
        """Release the memory that caches used home tensors; undo writes to tensors that have their values in files."""
        if self._home_tensors is not None:
            for key, tensor in self._touched.items():
                if key in self._restored:
                    self._home_tensors.restore(tensor)
                else:
                    self._home_tensors.drop_cache(tensor)
        self._touched.clear()
        self._bytes = 0

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Discard all later writes to these tensors, which have their values in files."""
        self._restored.update({storage_key(tensor): tensor for tensor in tensors})

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record writes to these tensors from now on."""
        self._watched.update(map(storage_key, tensors))

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._watched


def _can_move(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can move to a home: it is large, dense, and on the CPU."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and is_in_host_memory(tensor)
        and is_large(tensor.untyped_storage().nbytes())
    )


def _move_to_home(tensors: Sequence[torch.Tensor], home_tensors: HomeTensors, mapped: MappedFiles) -> None:
    """Move the tensors of one storage to the home; if a file backs the storage, the file becomes their home."""
    old = view_storage_bytes(tensors[0])
    home_tensor = home_tensors.adopt_mapped(old, mapped)
    if home_tensor is None:
        home_tensor = home_tensors.allocate(old.numel())
        home_tensor.copy_(old)
    for tensor in tensors:
        rebase_tensor(tensor, home_tensor)
