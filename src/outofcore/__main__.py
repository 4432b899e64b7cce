"""Run the command line as ``python -m outofcore``, which torchrun starts."""

from outofcore.cli import main

main()
