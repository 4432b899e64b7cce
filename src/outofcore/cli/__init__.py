"""The command line. It is imported without PyTorch; each command imports it on demand."""

from outofcore.cli.app import main

__all__ = ["main"]
