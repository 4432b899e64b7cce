"""What each operator of the standard computes, in PyTorch's own operators."""

# Each module registers its operators when it is imported.
from outofcore.onnx.operators import (
    attention as attention,
    control as control,
    elementwise as elementwise,
    indexing as indexing,
    networks as networks,
    quantization as quantization,
    recurrent as recurrent,
    reductions as reductions,
    resizing as resizing,
    shapes as shapes,
)
