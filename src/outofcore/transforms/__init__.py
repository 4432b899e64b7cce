"""Transforms that rewrite a captured step before it is planned.

Each takes a ``Captured`` and returns one, so the planner, validator and engines see ordinary ops and storages.
``passes`` and ``split`` keep every bit; ``split`` relies on exactness checks (``profiling.equality``). ``fusing``
(kernels compiled by Inductor) and ``partial_sums`` are optional, run first and change bits.

    rewrite_for_speed           drop_shape_only_arguments → join_updates → reuse
    rewrite_for_lowest_memory   drop_shape_only_arguments → recompute_casts → split_convolutions → reuse → hoist
"""
