"""``outofcore.budget`` as a callback for trainers, and metrics for loggers."""
