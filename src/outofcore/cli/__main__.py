"""``python -m outofcore.cli``."""

from outofcore.cli import main

main()
