"""Models that are never whole in memory: each parameter is allocated and initialised at home.

``build`` runs a model's constructor and moves each parameter home as soon as a module has it; ``materialize`` gives a
model on the meta device its parameters one by one, initialised or read from safetensors files.
"""

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
    storage_bytes,
    storage_key,
    tensor_leaves,
)
from outofcore.analysis import is_large
from outofcore.capture.guard import check_shapes
from outofcore.checkpoint.matching import check_weights
from outofcore.checkpoint.tensor_files import Entry, Weights
from outofcore.errors import InputError, StateError
from outofcore.execution.aliases import Faces
from outofcore.execution.opening import OpenHome
from outofcore.runtime.file_ranges import ReadFile
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.runtime.memory import trim_heap
from outofcore.tensor_data import is_in_host_memory, move_onto, swap, view_like
from outofcore.units import MIB

Built = TypeVar("Built")
Init = Callable[[nn.Module], None]

# How many bytes of faces may be in memory before their pages are let go.
_TOUCHED_BYTES = 16 * MIB


def build(make: Callable[[], Built], *, home: OpenHome) -> Built:
    """Make a model as ``make()`` does, with the same numbers, without its being whole in memory.

    A parameter or buffer of 64 KiB or more moves to the home when a module gets it, mostly before it is
    initialised; what initialises it writes there. One that is mapped from a file, as by ``from_pretrained`` of
    transformers, stays in that file, as with ``materialize(model, weights=...)``. Memory holds no more than the largest
    tensor, what the constructor itself makes besides, and some MiB. A tensor that shares memory with another one (not
    by being the same object) stays in memory until ``make`` has ended.

    Args:
        make: makes modules, for example a class, or a lambda that calls one; what it returns is returned.
        home: where the parameters are to live; then give it to ``compile`` as well.

    Raises:
        SpillError: the home has no room for the model.
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
    with _InitializationMode(home.faces) as mode:
        with _registrations_moved(home.faces):
            built = make()
        mode.drop_caches()
    # What constructors have used and freed would otherwise stay with the process beside its budget.
    trim_heap()
    return built


@contextlib.contextmanager
def _registrations_moved(faces: Faces) -> Iterator[None]:
    """Move home what modules register in this thread: at once if it does not share its storage, else at the end."""
    thread = threading.get_ident()
    # Not the tensors themselves: some are replaced, and their room is for others.
    met: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
    mapped = MappedFiles()

    def registered(module: nn.Module, name: str, tensor: Any) -> None:
        if threading.get_ident() != thread or not isinstance(tensor, torch.Tensor):
            return
        met[id(module), name] = weakref.ref(module)
        if _can_move(tensor) and faces.find(tensor) is None and not shares_storage(tensor):
            mapped.look()
            _move_to_home([tensor], faces, mapped)

    hooks = [
        register_module_parameter_registration_hook(registered),
        register_module_buffer_registration_hook(registered),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[torch.Tensor]] = {}
    late: dict[int, torch.Tensor] = {}
    for (_, name), reference in met.items():
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
        if _can_move(tensor) and faces.find(tensor) is None:
            groups.setdefault(storage_key(tensor), []).append(tensor)
    mapped.look()
    for tensors in groups.values():
        _move_to_home(tensors, faces, mapped)


def materialize(
    model: nn.Module,
    *,
    home: OpenHome,
    weights: str | os.PathLike[str] | None = None,
    init: Init | None = None,
) -> nn.Module:
    """Give every tensor of a model on the meta device memory at its home, and its contents.

    With ``weights``, what the files have in the dtype of the model stays there: the files are read in place, past the
    page cache, as steps need them; no copy is made, and nothing of it is read now. Between steps such a tensor is a
    private mapping of the file, so that whatever is written to it stays in this process, and it moves to the home
    before the next step. So does what a step learns, when that is first called. Leave the files as they are while the
    model is in use. What is read now is small tensors, and those that are stored in another dtype.

    Without ``weights``, each module's own ``reset_parameters`` runs, inner modules before outer ones, as when
    PyTorch's modules are constructed; then ``init`` for each module, as by ``model.apply(init)``. For a model
    that is initialised by these alone, the numbers are those of the model made in memory with the same
    generator. A model whose constructor initialises it otherwise is better made by ``outofcore.build``.

    Args:
        model: made under ``torch.device("meta")``; what is not on that device is left as it is. Its parameters stay
            the same objects, so that an optimizer may exist already; only those of recurrent modules, or others that
            something refers to weakly, are replaced.
        home: where the parameters are to live; then give it to ``compile`` as well.
        weights: a safetensors file, a folder with ``model.safetensors`` or with files and
            ``model.safetensors.index.json``, or such an index. What it has no tensor for is initialised as above; a
            warning names that, and what only the files have.
        init: initialises a module given to it.

    Returns:
        the model.

    Raises:
        InputError: a lazy module has no shapes yet; a tensor is left without contents, or has another shape or kind of
            dtype in the file; the files have no tensor of the model; a file is damaged.
        SpillError: the home has no room.
        StateError: a parameter cannot be given memory, since something holds on to it; or the home is closed.

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
    _fill(model, home.faces, None if weights is None else Weights(Path(weights)), init)
    trim_heap()
    return model


def _fill(model: nn.Module, faces: Faces, files: Weights | None, init: Init | None) -> None:
    """Give the meta tensors of a model memory and contents: see ``materialize``."""
    if files is not None:
        check_weights(model, files)
    in_place = {} if files is None else _kept_in_files(model, files, faces)
    with _InitializationMode(faces) as mode:
        made = allocate(model, faces, in_place)
        mode.restore([made[name] for name in in_place])
        mode.watch([tensor for tensor in made.values() if tensor.numel()])
        held = set() if files is None else {id(made[name]) for name in made.keys() & files.names}
        for module in _inner_first(model, set()):
            if files is None or not _is_held(module, made, held):
                _reset(module)
        if init is not None:
            model.apply(init)
        mode.drop_caches()
    empty = [n for n, t in made.items() if id(t) not in held and mode.unwritten(t)]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        unheld = "the file has none for it, and " if files is not None else ""
        raise InputError(
            f"{empty[0]}{more} is on the meta device, and nothing gives it contents: {unheld}its module has "
            "no reset_parameters(); give init=, or make the model with outofcore.build(), which runs its constructor"
        )
    if files is not None:
        there = {id(made[name]) for name in made.keys() & in_place.keys()}
        wanted = [name for name in sorted(made.keys() & files.names) if id(made[name]) not in there]
        files.load({name: made[name] for name in wanted}, faces)


def _kept_in_files(model: nn.Module, files: Weights, faces: Faces) -> dict[str, tuple[ReadFile, Entry]]:
    """Return by name the meta tensors that stay in the files: large ones with their final layout and dtype.

    Raises ``InputError`` if a file was changed since its header was read.
    """
    if not faces.takes_files:
        return {}
    named = _on_meta(model)
    users: dict[int, set[int]] = {}
    for tensor in named.values():
        users.setdefault(storage_key(tensor), set()).add(id(tensor))
    opened: dict[Path, ReadFile] = {}
    found: dict[str, tuple[ReadFile, Entry]] = {}
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
            found[name] = (opened[file.path], entry)
    return found


def _on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers on the meta device, under each of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if tensor.is_meta}


def allocate(
    model: nn.Module, faces: Faces | None, in_place: Mapping[str, tuple[ReadFile, Entry]] | None = None
) -> dict[str, torch.Tensor]:
    """Give every meta tensor of a model memory with unknown contents; return the tensors under each of their names.

    Parameters stay the same objects, except those with weak references, and share memory where they did. Without
    ``faces`` all get ordinary memory; ``in_place`` are those whose bytes are in files, each alone on its storage.
    Raises ``StateError`` if other references prevent changing a parameter, ``SpillError`` if the home has no room.
    """
    named = _on_meta(model)
    files = {id(named[name]): found for name, found in (in_place or {}).items()}
    bases: dict[int, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}
    for name, tensor in named.items():
        if id(tensor) in done:
            continue
        count = tensor.untyped_storage().nbytes()
        base = bases.get(storage_key(tensor))
        if base is None and faces is not None and id(tensor) in files:
            file, entry = files[id(tensor)]
            base = bases[storage_key(tensor)] = faces.adopt(file, entry.begin, count)
        if base is None:
            large = faces is not None and is_large(count)
            base = faces.birth(count) if faces is not None and large else torch.empty(count, dtype=torch.uint8)
            bases[storage_key(tensor)] = base
        done[id(tensor)] = _give(model, name, tensor, base)
    return {name: done[id(tensor)] for name, tensor in named.items()}


def _give(model: nn.Module, name: str, tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Give a tensor memory; return the same object, or a replacement."""
    if tensor.grad is not None:
        raise StateError(f"{name} cannot be given memory: it has a gradient; materialize the model before it is used")
    real = view_like(tensor, base)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(real).update(vars(tensor))
    if weakref.getweakrefs(tensor):
        # Such a tensor cannot become another one. Recurrent modules refer so to theirs, and see that they are replaced.
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for key in [key for key, found in table.items() if found is tensor]:
                    setattr(module, key, real)
        return real
    try:
        swap(tensor, real)
    except RuntimeError as error:
        raise StateError(
            f"{name} cannot be given memory ({error}); materialize the model before views of its parameters are made"
        ) from error
    return tensor


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield all modules, each once, in the order in which their constructors end."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _is_held(module: nn.Module, made: dict[str, torch.Tensor], held: set[int]) -> bool:
    """Return whether the files have all tensors that a module itself needs."""
    wanted = {id(tensor) for tensor in made.values()}
    return all(id(tensor) in held for tensor in _own_tensors(module) if id(tensor) in wanted)


def _reset(module: nn.Module) -> None:
    """Initialise a module as its constructor would.

    One that only holds others is skipped if it has a public method for that, which would initialise these again. The
    private name is what PyTorch's own modules call in their constructors.
    """
    method = getattr(module, "reset_parameters", None) if _own_tensors(module) else None
    method = method or getattr(module, "_reset_parameters", None)
    if callable(method):
        method()


class _InitializationMode(TorchDispatchMode):
    """Drops cached pages of tensors at home soon after ops have used them, and records which were written.

    Ops run unchanged, so that a generator gives the same numbers. A face is pages of a file mapped into memory: they
    count as the process's own until they are dropped.
    """

    supports_higher_order_operators = True

    def __init__(self, faces: Faces | None) -> None:
        super().__init__()
        self._faces = faces
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
            self._watched.clear()  # the functions that it was given may have written anything
        elif self._watched:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else named.get(argument.name)
                    self._watched.difference_update(map(storage_key, tensor_leaves([value])))
        for tensor in used:
            self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        if self._faces is None or self._faces.find(tensor) is None:
            return
        key = storage_key(tensor)
        if key not in self._touched:
            self._touched[key] = tensor
            self._bytes += tensor.untyped_storage().nbytes()
        if self._bytes > _TOUCHED_BYTES:
            self.drop_caches()

    def drop_caches(self) -> None:
        """Give back the physical memory of all faces that ops have used."""
        if self._faces is not None:
            for key, tensor in self._touched.items():
                if key in self._restored:
                    self._faces.restore(tensor)
                else:
                    self._faces.drop_cache(tensor)
        self._touched.clear()
        self._bytes = 0

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Discard all later writes to these tensors, which show their files."""
        self._restored.update({storage_key(tensor): tensor for tensor in tensors})

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record from now on which of these tensors are written to."""
        self._watched.update(map(storage_key, tensors))

    def unwritten(self, tensor: torch.Tensor) -> bool:
        """Return whether nothing has been written to a tensor's storage since it is watched."""
        return storage_key(tensor) in self._watched


def _can_move(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may live at home: large, dense, on the CPU."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and is_in_host_memory(tensor)
        and is_large(tensor.untyped_storage().nbytes())
    )


def _move_to_home(tensors: Sequence[torch.Tensor], faces: Faces, mapped: MappedFiles) -> None:
    """Move tensors that share one storage to their home; a storage that is mapped from a file is already there."""
    old = storage_bytes(tensors[0])
    face = faces.adopt_mapped(old, mapped)
    if face is None:
        face = faces.birth(old.numel())
        face.copy_(old)
    for tensor in tensors:
        move_onto(tensor, face)
