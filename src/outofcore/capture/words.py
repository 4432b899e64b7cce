"""Addresses of words in memory that change whenever a value that a step has read does.

Comparing words is faster than looking up thousands of values: a dict's version stands for all its items. The offsets
are valid for 64-bit CPython with the global interpreter lock. Dict versions are used up to Python 3.12, since in 3.13
setting an attribute leaves them unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import torch
from torch import nn


class EntryKind(IntEnum):
    """The kind of value that an entry compares. The numbers equal ``EntryKind`` in reads.cpp."""

    ITEM = 0  # of a dict
    ATTRIBUTE = 1  # of an object
    CELL = 2  # of a closure
    LIST = 3  # all items of a list
    SIZE = 4  # of a dict
    TYPE = 5  # of an object
    CALL = 6  # the result of a function


_WORD = 8  # bytes
# Offsets in an object: its type, a dict's size and version, a cell's contents, a set's number of items.
_TYPE, _SIZE, _VERSION, _CONTENTS, _COUNT = _WORD, 2 * _WORD, 3 * _WORD, 2 * _WORD, 3 * _WORD
# The offset of an object's ``__dict__`` if its type has this flag (Py_TPFLAGS_MANAGED_DICT).
_MANAGED, _IS_MANAGED = -3 * _WORD, 1 << 4
_IS_SUPPORTED = sys.implementation.name == "cpython" and object.__basicsize__ == 2 * _WORD
_HAS_VERSIONS = sys.version_info < (3, 13)


def word_at(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def word_address(kind: EntryKind, owner: Any, key: Any) -> int | None:
    """Return the address of 8 bytes that change whenever an entry's value does; None if there are no such bytes."""
    if not _IS_SUPPORTED:
        return None
    # The address is valid while ``owner`` lives. The word may also change while the value stays the same.
    match kind:
        case EntryKind.ITEM if _HAS_VERSIONS:
            return id(owner) + _VERSION
        case EntryKind.SIZE:
            return id(owner) + _SIZE
        case EntryKind.TYPE:
            return id(owner) + _TYPE
        case EntryKind.CELL:
            return id(owner) + _CONTENTS
        case EntryKind.CALL if type(owner) is set and not owner:
            return id(owner) + _COUNT
        case EntryKind.ATTRIBUTE if key == "__dict__":
            type_ = type(owner)
            address = id(owner) + (_MANAGED if type_.__flags__ & _IS_MANAGED else type_.__dictoffset__)
            return address if word_at(address) == id(vars(owner)) else None
        case EntryKind.ATTRIBUTE if type(owner) in (torch.Tensor, nn.Parameter):
            offset = _hooks_offset(key)
            return None if offset is None else id(owner) + offset
        case _:
            return None


@functools.cache
def _hooks_offset(name: str) -> int | None:
    """Return the byte offset of the hook dict ``name`` in a tensor object, or None if it is not found."""
    probe, hooks = torch.zeros((), device="cpu", requires_grad=True), OrderedDict[int, Any]()
    try:
        setattr(probe, name, hooks)
    except (AttributeError, RuntimeError, TypeError):
        return None
    size = torch.Tensor.__basicsize__
    offsets = [offset for offset in range(0, size, _WORD) if word_at(id(probe) + offset) == id(hooks)]
    return offsets[0] if len(offsets) == 1 else None
