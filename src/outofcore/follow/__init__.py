"""Run an eager loop within a byte budget: ``outofcore.budget``.

``loop.py`` has the context in which a loop runs. ``step_ends.py`` detects where its steps end, ``loop_planner.py``
plans them, and ``space.py`` calls the native code (``runtime/csrc/follow``), which decides what is evicted.
``running.py`` receives PyTorch's reports for all loops. ``devices.py`` has the differences between CPU and GPU.

docs/internals/eager-loop.md follows one op through the native code, and names the files of every part.
"""

from __future__ import annotations
