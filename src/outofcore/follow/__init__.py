"""Run somebody else's loop within a byte budget: ``outofcore.budget``.

``paging.cpp`` sees every op below autograd and keeps its storages in an arena. It is one translation unit of headers,
each built on the one before: ``space.h`` (blocks and the space), ``thread_roles.h``, ``blocks.h`` (in and out),
``room.h`` (``make_room`` decides what is evicted), ``allocator.h``, ``storages.h``, ``operators.h``, ``ahead.h``
(``follow_plan`` and ``copy_ahead`` decide when copies start), ``saved.h``, ``ops.h`` and ``steps.h``.
docs/internals/eager-loop.md follows one op through it. It uses ``extents.h`` (stretches of addresses), ``homes.h``
(homes of evicted storages) and ``history.h`` (what the loop did before, and so what it needs next). ``native.py``
builds and loads it, ``space.py`` calls it.

``loop.py`` is the context in which a loop runs: ``step_ends.py`` finds where its steps end, ``loop_planner.py`` plans
them. ``running.py`` has the loops of the process, and what PyTorch reports to them; ``addresses.py`` notices who takes
the address of a tensor, ``stats.py`` has the counters, and ``calls.py`` follows single calls of a compiled step.

``device_cpu.h`` and ``device_cuda.h`` hold the differences between devices; each is compiled into a library of its own.
On a GPU ``streams.h`` orders work and ``pinned.h`` is the home. ``devices.py`` holds the differences in Python, and
``gpu.py`` prepares PyTorch for a GPU.

``record.h`` records each step and finds the loop's position in a record. ``records.py`` makes a graph of one,
``outofcore.background`` plans it in another process, ``loop_plans.py`` keeps plans for later processes, and
``observed.h`` and ``observed.py`` report the last step.

For recomputation ``lineage.h`` knows how a storage was computed, ``recipes.h`` computes it again, ``recipes.py``
replaces a saved tensor by its recipe, ``remaking.py`` chooses the tensors, and ``recompute_trial.py`` tries it.
"""

from __future__ import annotations
