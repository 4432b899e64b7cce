"""Transforms that rewrite a captured step (``Captured``) before it is planned.

``passes`` and ``split`` keep every bit, ``split`` by exactness checks. ``fusing`` and ``partial_sums`` are optional,
run first and change bits.

  rewrite_for_speed          drop_shape_only_arguments → join_updates → reuse_arguments
  rewrite_for_lowest_memory  drop_shape_only_arguments → recompute_casts → split_convolutions → reuse_arguments → hoist
"""
