"""Checkpoints: state streamed to and from safetensors files, never whole in memory."""
