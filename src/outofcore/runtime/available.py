"""Compute budgets from shares of a device's available memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from outofcore.errors import InputError
from outofcore.report.machine import available_memory_bytes
from outofcore.units import MIB, format_bytes, parse_bytes, share_of

# The default budget on a CPU, as a share of the available memory. The rest is for Python, libraries, the page cache and
# other programs.
_HOST_SHARE = 0.7
# On a GPU it is all memory but a reserve for the context's growth and later kernels: a share, and a minimum.
_DEVICE_RESERVE_SHARE, _MIN_DEVICE_RESERVE = 0.05, 512 * MIB


def default_budget(available: int, *, on_host: bool) -> int:
    """Return the default budget of a loop, given the available bytes of a host or GPU."""
    if on_host:
        return int(available * _HOST_SHARE)
    return available - max(int(available * _DEVICE_RESERVE_SHARE), _MIN_DEVICE_RESERVE)


def available_bytes(device: torch.device, models: Iterable[nn.Module] = ()) -> int:
    """Return the bytes on a device that a loop of ``models`` can use; raises ``InputError`` if unknown."""
    if device.type == "cpu":
        available = available_memory_bytes()
        if available is None:
            raise InputError("this system does not report how much memory is available; name a budget in bytes")
        return available
    # The models leave the device before a loop reserves its memory.
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return free + cached + sum(storages.values())


def resolve_budget(limit: int | str | None, device: torch.device, models: Iterable[nn.Module] = ()) -> tuple[int, str]:
    """Return ``limit`` in bytes and, for a share of memory, a text that explains the number.

    ``limit`` is bytes, text such as "6GiB", a share of the available memory such as "70%", or None for the default.
    Raises ``UnitError`` for any other ``limit``, ``InputError`` if the available memory is unknown or too small.
    """
    share = share_of(limit)
    if limit is not None and share is None:
        return parse_bytes(limit), ""
    available = available_bytes(device, models)
    on_host = device.type == "cpu"
    budget = default_budget(available, on_host=on_host) if share is None else int(available * share)
    location = "of memory" if on_host else f"on {device}"
    if budget <= 0:
        raise InputError(
            f"only {format_bytes(available)} {location} are available, too little for a budget; end other programs, or "
            "name a budget in bytes"
        )
    return budget, f"{format_bytes(budget)}, of the {format_bytes(available)} {location} that are available"
