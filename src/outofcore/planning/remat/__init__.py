"""What to compute again (rematerialization): numbered contents, chains of runs, and the search over them."""
