"""The operators of ONNX, implemented with PyTorch."""

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
