"""Attributes replaced for a while and put back exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` and leave no trace afterwards.

    What is looked at is ``owner.__dict__``: a method of a class is put back as the descriptor that it
    was, and an attribute that the owner only inherited is deleted again.
    """
    own = vars(owner)
    existed, old = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, old)
        else:
            delattr(owner, name)
