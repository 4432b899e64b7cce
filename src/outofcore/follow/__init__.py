"""Run an eager loop within a byte budget: ``outofcore.budget``. See docs/internals/eager-loop.md, then ``loop.py``."""

from __future__ import annotations
