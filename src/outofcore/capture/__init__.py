"""Capture: the user's training step becomes one graph of ops on storages, and the calls that run them.

A step is captured by ``step.capture_step``, in this order:

1. ``guard`` takes the state of all that the step may touch, and puts it back in the end.
2. ``mirror`` makes fakes of parameters, buffers, gradients and arguments.
3. The step runs once on the fakes: ``substitute`` hands them to the user's code, ``recorder`` writes down every ATen
   operator in ``tables`` (``operators`` describes operators, ``kernel_layouts`` corrects the layouts of results,
   ``provenance`` finds the user's line), and ``optimizer_steps`` takes down each ``optimizer.step()`` as update ops
   (``optimizers``).
4. ``assembly`` reads what the step has left and puts a ``Captured`` together (``captured``).

Then passes give the graph another form, all in ``passes``; the bits stay the same:

    fastest    by_shape → together → reuse                                 where memory is no matter
    leanest    by_shape → recompute_casts → split → reuse → reordered      where it is short

Where single ops need more than there is, ``tiles`` comes before the leanest form: they run in parts, along axes that
``split_rules`` names, and the bits stay the same where the machine says so (``profiling.equality``).

Two passes come before these, each if it is asked for; the bits are then others, and the same in all forms. In
``fusing`` what lies between products becomes one op each, of which ``kernels`` makes kernels with Inductor. Then
``partial_sums`` takes large sums over rows and samples in parts.

Collectives are ops as others are (``collectives``); ``replicas`` writes down those of ``DistributedDataParallel``.

``signature`` tells whether a captured step still fits a call, ``refusals`` how a step is refused, and ``patching``
replaces functions of PyTorch while one thread captures.
"""

from outofcore.capture.captured import (
    Call,
    Captured,
    GradientLeft,
    InputBinding,
    LeafKind,
    OutputLeaf,
    Ref,
    StateBinding,
    Value,
)
from outofcore.capture.optimizers import OptimizerUpdate, StateOwner
from outofcore.capture.step import capture_step

__all__ = [
    "Call",
    "Captured",
    "GradientLeft",
    "InputBinding",
    "LeafKind",
    "OptimizerUpdate",
    "OutputLeaf",
    "Ref",
    "StateBinding",
    "StateOwner",
    "Value",
    "capture_step",
]
