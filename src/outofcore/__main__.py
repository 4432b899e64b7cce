"""``python -m outofcore``: the command line, as torchrun starts it."""

from outofcore.cli import main

main()
