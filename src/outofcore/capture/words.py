"""Addresses of words in memory that change whenever a value that a captured step has read does.

Comparing words at known addresses is faster than looking up thousands of values before each call: the version of a dict
stands for all its items, its size for the set of its keys.

The memory layouts are those of CPython on 64 bits with the global interpreter lock. Versions of dicts are used up to
Python 3.12; in 3.13, setting an attribute does not change the version. The place of a tensor's hooks is found with a
probe: a tensor that is given a known dict of hooks.
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


class Kind(IntEnum):
    """What an entry compares; equals ``Kind`` in reads.cpp."""

    ITEM = 0  # of a dict
    ATTRIBUTE = 1  # of an object
    CELL = 2  # of a closure
    LIST = 3  # all items of a list
    SIZE = 4  # of a dict
    TYPE = 5  # of an object
    CALL = 6  # whatever a function compares


_WORD = 8  # bytes
# Offsets in an object: its type; then of a dict size and version, of a cell its contents, of a set its number of items.
_TYPE, _SIZE, _VERSION, _CONTENTS, _COUNT = _WORD, 2 * _WORD, 3 * _WORD, 2 * _WORD, 3 * _WORD
# The offset of an object's ``__dict__`` if its type has this flag (Py_TPFLAGS_MANAGED_DICT).
_MANAGED, _IS_MANAGED = -3 * _WORD, 1 << 4
_IS_KNOWN = sys.implementation.name == "cpython" and object.__basicsize__ == 2 * _WORD
_HAS_VERSIONS = sys.version_info < (3, 13)


def word_at(address: int) -> int:
    """Return the word at an address, as a signed number."""
    return ctypes.c_int64.from_address(address).value


def word_of(kind: Kind, owner: Any, key: Any) -> int | None:
    """Return the address of a word that changes whenever the value of an entry does; None if there is none.

    The address is valid as long as ``owner`` lives. The word may also change while the value stays the same.
    """
    if not _IS_KNOWN:
        return None
    match kind:
        case Kind.ITEM if _HAS_VERSIONS:
            return id(owner) + _VERSION
        case Kind.SIZE:
            return id(owner) + _SIZE
        case Kind.TYPE:
            return id(owner) + _TYPE
        case Kind.CELL:
            return id(owner) + _CONTENTS
        case Kind.CALL if type(owner) is set and not owner:
            return id(owner) + _COUNT
        case Kind.ATTRIBUTE if key == "__dict__":
            of = type(owner)
            address = id(owner) + (_MANAGED if of.__flags__ & _IS_MANAGED else of.__dictoffset__)
            return address if word_at(address) == id(vars(owner)) else None
        case Kind.ATTRIBUTE if type(owner) in (torch.Tensor, nn.Parameter):
            place = _place_in_tensor(key)
            return None if place is None else id(owner) + place
        case _:
            return None


@functools.cache
def _place_in_tensor(name: str) -> int | None:
    """Find the offset of a tensor's dict of hooks with a probe; None if it was not found."""
    probe, hooks = torch.zeros((), device="cpu", requires_grad=True), OrderedDict[int, Any]()
    try:
        setattr(probe, name, hooks)
    except (AttributeError, RuntimeError, TypeError):
        return None
    size = torch.Tensor.__basicsize__
    found = [place for place in range(0, size, _WORD) if word_at(id(probe) + place) == id(hooks)]
    return found[0] if len(found) == 1 else None
