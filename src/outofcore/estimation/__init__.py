"""What a step needs and how long it takes, without training it.

``costing`` finds out what its ops and links cost; it alone needs PyTorch. ``sweep`` plans and simulates the step for
several budgets, and says what holds it back. ``reports`` writes that as a page and as a trace.
"""
