"""Estimate the memory and time of a step without training: costs, plans and reports."""
