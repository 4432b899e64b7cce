"""For those who configure a trainer and do not write a loop: ``outofcore.budget`` as a callback.

Each module here needs a framework, which is imported with it and never by ``import outofcore``.
"""
