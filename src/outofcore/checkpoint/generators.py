"""The states of the random generators that a training loop draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from outofcore.errors import InputError
from outofcore.jsonfile import Node

_CPU, _CUDA = "generator.cpu", "generator.cuda."


def generator_tensors() -> list[tuple[str, torch.Tensor]]:
    """The states of PyTorch's default generators: that of the CPU, and of CUDA where it is in use."""
    found = [(_CPU, torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [(f"{_CUDA}{index}", state) for index, state in enumerate(torch.cuda.get_rng_state_all())]
    return found


def restore_generators(tensors: dict[str, torch.Tensor]) -> None:
    """Set PyTorch's generators; those of CUDA devices that are not here are left out."""
    if _CPU in tensors:
        torch.set_rng_state(tensors[_CPU])
    for name, state in tensors.items():
        if name.startswith(_CUDA) and int(name.removeprefix(_CUDA)) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name.removeprefix(_CUDA)))


def plain_generators() -> dict[str, Any]:
    """The states of the generators of Python's ``random`` and of ``numpy.random``, for JSON."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "state": list(numbers), "gauss": gauss},
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": [int(number) for number in legacy["state"]["key"]],
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
    }


def restore_plain_generators(node: Node) -> None:
    """Set the generators of Python's ``random`` and of ``numpy.random``.

    Raises:
        InputError: the states are not such as this version of Python or numpy has.
    """
    python, numpy = node.at("python"), node.at("numpy")
    gauss = python.at("gauss").value
    numbers = tuple(item.whole() for item in python.at("state").items())
    key = np.array([item.count() for item in numpy.at("key").items()], dtype=np.uint32)
    rest = (numpy.at("position").count(), numpy.at("has_gauss").count(), numpy.at("gauss").number())
    try:
        random.setstate((python.at("version").whole(), numbers, None if gauss is None else python.at("gauss").number()))
        np.random.set_state((numpy.at("kind").text(), key, *rest))
    except (ValueError, TypeError) as error:
        raise InputError(f"{node.file}: the states of the random generators cannot be restored ({error})") from error
