"""Capture: the user's training step becomes one graph of ops on storages, and the calls that run them."""

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
from outofcore.capture.optimizers import OptimizerUpdate, StateOwner, mark_stepped
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
    "mark_stepped",
]
