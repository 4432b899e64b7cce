"""What each operator of the standard computes, in PyTorch's own operators."""

from outofcore.onnx.operators import (  # noqa: F401 - each registers its operators
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
from outofcore.onnx.operators.registry import find as find
