"""Estimate the memory and time of a step without training.

``costing`` measures or models costs, ``sweep`` plans for several budgets, and ``reports`` writes pages and traces.
"""
