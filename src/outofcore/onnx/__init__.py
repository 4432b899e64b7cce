"""ONNX files as PyTorch modules: ``outofcore.onnx.load``. It needs ``pip install outofcore[onnx]``."""

from outofcore.onnx.loading import load
from outofcore.onnx.model import OnnxModel

__all__ = ["OnnxModel", "load"]
