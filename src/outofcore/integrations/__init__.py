"""``outofcore.budget`` as a callback for trainers, and metrics for loggers.

Modules named after a framework import it; ``import outofcore`` imports none of them.
"""
