"""Gives a model that was made on the meta device its parameters, one by one, at home."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from outofcore._torch_internals import storage_key
from outofcore.analysis import is_large
from outofcore.birth.nursery import Nursery
from outofcore.checkpoint.weights import Weights
from outofcore.errors import InputError, StateError
from outofcore.execution.aliases import Faces
from outofcore.execution.memory import trim_heap
from outofcore.execution.opened import OpenHome

Init = Callable[[nn.Module], None]


def materialize(
    model: nn.Module,
    *,
    home: OpenHome,
    weights: str | os.PathLike[str] | None = None,
    init: Init | None = None,
) -> nn.Module:
    """Give every tensor of a model on the meta device memory at its home, and its contents.

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
            ``model.safetensors.index.json``, or such an index. What it has no tensor for is initialised as above.
        init: initialises a module given to it.

    Returns:
        the model.

    Raises:
        InputError: a tensor is left without contents, or has another shape in the file.
        SpillError: the home has no room.
        StateError: a parameter cannot be given memory, since something holds on to it; or the home is closed.
    """
    home.check_open()
    files = None if weights is None else Weights(Path(weights))
    with Nursery(home.faces) as nursery:
        made = realise(model, home.faces)
        nursery.watch([tensor for tensor in made.values() if tensor.numel()])
        held = set() if files is None else {id(made[name]) for name in made.keys() & files.names}
        for module in _inner_first(model, set()):
            if files is None or not _is_held(module, made, held):
                _reset(module)
        if init is not None:
            model.apply(init)
        nursery.rest()
    empty = [n for n, t in made.items() if id(t) not in held and nursery.unwritten(t)]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        unheld = "the file has none for it, and " if files is not None else ""
        raise InputError(
            f"{empty[0]}{more} is on the meta device, and nothing gives it contents: {unheld}its module has "
            "no reset_parameters(); give init=, or make the model with outofcore.build(), which runs its constructor"
        )
    if files is not None:
        files.load({name: made[name] for name in sorted(made.keys() & files.names)}, home.faces)
    trim_heap()
    return model


def realise(model: nn.Module, faces: Faces | None) -> dict[str, torch.Tensor]:
    """Give every tensor of a model that is on the meta device memory, contents unknown.

    Args:
        model: its parameters stay the same objects but for those that something refers to weakly, and share
            memory where they did.
        faces: of the home for large ones; None: all get ordinary memory.

    Returns:
        the tensors by name, under each of their names.

    Raises:
        StateError: something holds on to a parameter, so that it cannot be changed.
        SpillError: the home has no room.
    """
    named = {
        name: tensor
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        if tensor.is_meta
    }
    bases: dict[int, torch.Tensor] = {}
    done: dict[int, torch.Tensor] = {}
    for name, tensor in named.items():
        if id(tensor) in done:
            continue
        count = tensor.untyped_storage().nbytes()
        base = bases.get(storage_key(tensor))
        if base is None:
            large = faces is not None and is_large(count)
            base = faces.birth(count) if faces is not None and large else torch.empty(count, dtype=torch.uint8)
            bases[storage_key(tensor)] = base
        done[id(tensor)] = _give(model, name, tensor, base)
    return {name: done[id(tensor)] for name, tensor in named.items()}


def _give(model: nn.Module, name: str, tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Give a tensor memory; the same object with it, or another in its place."""
    if tensor.grad is not None:
        raise StateError(f"{name} cannot be given memory: it has a gradient; materialise the model before it is used")
    real = torch.empty(0, dtype=tensor.dtype)
    real.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
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
        torch.utils.swap_tensors(tensor, real)
    except RuntimeError as error:
        raise StateError(
            f"{name} cannot be given memory ({error}); materialise the model before views of its parameters are made"
        ) from error
    return tensor


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """All modules, each once, in the order in which their constructors end."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _is_held(module: nn.Module, made: dict[str, torch.Tensor], held: set[int]) -> bool:
    """Whether the files have all tensors that a module itself has to be given."""
    wanted = {id(tensor) for tensor in made.values()}
    return all(id(tensor) in held for tensor in _own_tensors(module) if id(tensor) in wanted)


def _reset(module: nn.Module) -> None:
    """Initialise a module as its constructor would.

    One that only holds others is left alone if it has a public method for that: it would initialise these again. The
    private name is what PyTorch's own modules call in their constructors.
    """
    method = getattr(module, "reset_parameters", None) if _own_tensors(module) else None
    method = method or getattr(module, "_reset_parameters", None)
    if callable(method):
        method()
