"""Somebody else's loop, run within a byte budget while it runs: ``outofcore.budget``.

``paging.cpp`` sees every op below autograd and keeps its storages in an arena, on ``extents.h`` (stretches of
addresses), ``homes.h`` (where storages lie that are away) and ``history.h`` (what the loop did before, and so what it
needs next). ``native.py`` builds and loads it; ``loop.py`` is the context in which a loop runs, ``addresses.py``
notices who takes the address of a tensor, and ``stats.py`` tells what happened.

Autograd need not keep what can be made again: ``lineage.h`` knows how the bytes of a storage came about, ``recipes.h``
makes them again, ``recipes.py`` puts a recipe where autograd has saved a tensor, and ``remaking.py`` says for which
tensors that pays.
"""

from __future__ import annotations
