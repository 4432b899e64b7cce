"""Capture a training step as one graph of ops on storages.

``step.capture_step`` saves all state (``guard``), makes fakes of tensors (``mirror``), and runs the step once on them.
``substitute`` passes the fakes to the user's code, ``recorder`` writes ATen operators into ``tables``, and
``optimizer_steps`` records optimizer updates. ``assembly`` then builds a ``Captured``.

``signature`` and ``captures_by_reads`` decide whether a captured step fits a call. ``transforms`` rewrites the graph.
"""

from outofcore.capture.captured import Captured, LeafKind, Ref
from outofcore.capture.optimizers import OptimizerUpdate, StateOwner
from outofcore.capture.step import CaptureOptions, capture_step

__all__ = ["CaptureOptions", "Captured", "LeafKind", "OptimizerUpdate", "Ref", "StateOwner", "capture_step"]
