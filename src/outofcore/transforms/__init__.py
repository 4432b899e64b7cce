"""Transforms: what rewrites a captured step into another step before it is planned.

Each takes a ``Captured`` from ``capture`` and returns one, so planner, validator and engines see ordinary ops and
storages. ``passes`` keep every bit:

    fastest    by_shape → together → reuse                                 where memory is plentiful
    leanest    by_shape → recompute_casts → split → reuse → reordered      where memory is short

``split`` splits ops that need more memory than there is, along axes on which they do not mix. The bits stay the same
where ``profiling.equality`` confirms it.

Two optional transforms come first and do change bits: ``fusing`` turns the ops between products into kernels
(``kernels``, compiled in parallel by ``compiled_ahead``), and ``partial_sums`` splits large sums.
"""
