"""For those who configure a trainer and do not write a loop: ``outofcore.budget`` as a callback; and for loggers.

Modules here that are named for a framework need it, and import it with them; ``import outofcore`` never does.
"""
