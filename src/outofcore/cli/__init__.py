"""The command line, which is imported without PyTorch: a command imports what it needs."""

from outofcore.cli.app import main

__all__ = ["main"]
