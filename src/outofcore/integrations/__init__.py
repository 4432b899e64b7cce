"""``outofcore.budget`` as a callback for trainers, and metrics for loggers.

Modules here that are named for a framework need it, and import it with them; ``import outofcore`` never does.
"""
