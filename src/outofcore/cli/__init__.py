"""The command line: ``outofcore train``, ``plan``, ``pack`` and ``doctor``. Importing it does not import PyTorch."""

from outofcore.cli.app import main

__all__ = ["main"]
