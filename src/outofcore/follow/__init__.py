"""Run an eager loop within a byte budget: ``outofcore.budget``.

``loop.py`` is the entry; docs/internals/eager-loop.md follows one op through Python and the native code.
"""

from __future__ import annotations
