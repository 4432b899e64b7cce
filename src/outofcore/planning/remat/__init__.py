"""What to recompute (rematerialization): numbered contents, chains of runs, and searches over them."""
