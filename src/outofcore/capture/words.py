"""Which word in memory tells that something which a captured step has read is unchanged.

A step may have read thousands of values. To look each of them up before each call takes longer than to compare words
at addresses that are known: the version of a dict stands for all its items, its size for which items there are.

The layouts are those of CPython for 64 bits with its global lock. Dicts have versions that each change increases until
Python 3.12: in 3.13 what is set as an attribute does not. Where a tensor has its hooks is found by trial.
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
    """What an entry compares: as ``Kind`` in reads.cpp."""

    ITEM = 0  # of a dict
    ATTRIBUTE = 1  # of an object
    CELL = 2  # of a closure
    LIST = 3  # all items of a list
    SIZE = 4  # of a dict
    TYPE = 5  # of an object
    CALL = 6  # whatever a function compares


_WORD = 8
# Where objects have their type, dicts their size and their version, cells their contents, and sets how many items.
_TYPE, _SIZE, _VERSION, _CONTENTS, _COUNT = 8, 16, 24, 16, 24
# Where objects have their ``__dict__``, if their type has this flag (Py_TPFLAGS_MANAGED_DICT).
_MANAGED, _IS_MANAGED = -24, 1 << 4
_IS_KNOWN = sys.implementation.name == "cpython" and object.__basicsize__ == 2 * _WORD
_HAS_VERSIONS = sys.version_info < (3, 13)


def word_at(address: int) -> int:
    """The word at an address, as a signed number."""
    return ctypes.c_int64.from_address(address).value


def word_of(kind: Kind, owner: Any, key: Any) -> int | None:
    """The address of a word that changes whenever what is compared does; None: there is none.

    It is valid as long as ``owner`` lives. That it changes does not mean that what is compared does.
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
    """Where a tensor has a dict of its hooks; None: that cannot be found out."""
    probe, hooks = torch.zeros((), device="cpu", requires_grad=True), OrderedDict[int, Any]()
    try:
        setattr(probe, name, hooks)
    except (AttributeError, RuntimeError, TypeError):
        return None
    size = torch.Tensor.__basicsize__
    found = [place for place in range(0, size, _WORD) if word_at(id(probe) + place) == id(hooks)]
    return found[0] if len(found) == 1 else None
