"""What each operator of the standard computes, in PyTorch's own operators."""

# Each module registers its operators when it is imported.
from outofcore.onnx.operators import (
    attention,
    control,
    elementwise,
    indexing,
    networks,
    quantization,
    recurrent,
    reductions,
    resizing,
    shapes,
)
from outofcore.onnx.operators.registry import Call, Operator, find, names

__all__ = [
    "Call",
    "Operator",
    "attention",
    "control",
    "elementwise",
    "find",
    "indexing",
    "names",
    "networks",
    "quantization",
    "recurrent",
    "reductions",
    "resizing",
    "shapes",
]
