"""The command line: ``train``, ``plan``, ``validate``, ``pack`` and ``doctor``. It is imported without PyTorch."""

from outofcore.cli.app import main

__all__ = ["main"]
