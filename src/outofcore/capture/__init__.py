"""Capture: the user's training step becomes one graph of ops on storages, and the calls that run them.

``step.capture_step`` captures a step in this order:

1. ``guard`` saves all state that the step may touch, and restores it at the end.
2. ``mirror`` makes fakes of parameters, buffers, gradients and arguments.
3. The step runs once on the fakes: ``substitute`` hands them to the user's code, ``recorder`` writes every ATen
   operator into ``tables``, and ``optimizer_steps`` records each ``optimizer.step()`` as update ops (``optimizers``).
   ``operators`` describes operators, ``kernel_layouts`` corrects the layouts of results, ``provenance`` finds lines.
4. ``assembly`` reads how the step ends and builds a ``Captured`` (``captured``).

The package ``transforms`` rewrites the graph afterwards.

``collectives`` and ``replicas`` record collectives and ``DistributedDataParallel``. ``signature`` and
``captures_by_reads`` decide whether a captured step fits a call. ``device_traits`` says how devices differ,
``refusals`` words the errors, and ``patching`` replaces functions of PyTorch meanwhile.
"""

from outofcore.capture.captured import Captured, LeafKind, Ref
from outofcore.capture.optimizers import OptimizerUpdate, StateOwner
from outofcore.capture.step import CaptureOptions, capture_step

__all__ = ["CaptureOptions", "Captured", "LeafKind", "OptimizerUpdate", "Ref", "StateOwner", "capture_step"]
