"""Somebody else's loop, run within a byte budget while it runs: ``outofcore.budget``.

``paging.cpp`` sees every op below autograd and keeps its storages in an arena, on ``extents.h`` (stretches of
addresses), ``homes.h`` (where storages lie that are away) and ``history.h`` (what the loop did before, and so what it
needs next). ``native.py`` builds and loads it; ``loop.py`` is the context in which a loop runs, ``addresses.py``
notices who takes the address of a tensor, and ``stats.py`` tells what happened.

What differs between devices is in ``device_cpu.h`` and ``device_cuda.h``, of which one is compiled into each of two
libraries. On a GPU ``streams.h`` says who waits for which work, ``pinned.h`` is the home,
and ``gpu.py`` what is asked of PyTorch.

``record.h`` writes down each step, and knows where in such a record the loop is. ``records.py`` makes a graph of one,
``outofcore.background`` plans it in another process, ``plan_store.py`` keeps plans for the next one, and
``observed.h`` and ``observed.py`` tell what happened in the last step. ``calls.py`` follows the calls of a compiled
step whose inputs come in many sizes.

Autograd need not keep what can be made again: ``lineage.h`` knows how the bytes of a storage came about, ``recipes.h``
makes them again, ``recipes.py`` puts a recipe where autograd has saved a tensor, ``remaking.py`` says for which
tensors that pays, and ``recompute_trial.py`` whether it does at all.
"""

from __future__ import annotations
