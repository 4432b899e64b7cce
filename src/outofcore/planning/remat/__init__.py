"""Rematerialization: numbered contents, chains of runs, and searches for gaps to recompute."""
