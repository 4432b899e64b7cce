"""ONNX files as PyTorch modules: ``outofcore.onnx.load``. Needs the package ``onnx``: ``pip install outofcore[onnx]``."""

from outofcore.onnx.loading import load
from outofcore.onnx.model import OnnxModel

__all__ = ["OnnxModel", "load"]
