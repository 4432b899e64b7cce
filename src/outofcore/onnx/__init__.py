"""Load ONNX files as PyTorch modules; needs ``pip install outofcore[onnx]``."""

from outofcore.onnx.loading import load
from outofcore.onnx.model import OnnxModel

__all__ = ["OnnxModel", "load"]
