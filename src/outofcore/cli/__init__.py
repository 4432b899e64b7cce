"""The command line: ``outofcore train``, ``plan``, ``validate`` and ``doctor``. It is imported without PyTorch."""

from outofcore.cli.app import main

__all__ = ["main"]
