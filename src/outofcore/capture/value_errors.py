"""Operators that raise for some values of their arguments: an index out of range, a singular matrix.

An update must not move before such an op, or an error would leave a partly updated model. The tables come from
PyTorch's operator database (torch 2.13, CPU, forward and backward) with bad indices, infinities and NaN, and from the
checks in kernels. Any custom operator may raise.
"""

from __future__ import annotations

from typing import Any

from outofcore._torch_internals import OpOverload, tree_flatten
from outofcore.capture.captured import Call, Captured, Ref
from outofcore.capture.operators import arguments_by_name
from outofcore.capture.value_checks import ValueCheck

_OWN = frozenset({"aten", "prims", "prim"})
# These check indices. Indices that passed an earlier op's check pass again, for example in that op's backward pass.
_BY_INDEX = frozenset(
    (
        *("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl", "index_select", "index_add"),
        *("index_copy", "index_fill", "index_reduce", "gather", "scatter", "scatter_add", "scatter_reduce", "take"),
        *("put", "embedding", "embedding_renorm", "_embedding_bag", "_embedding_bag_forward_only"),
        *("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward"),
        *("max_unpool2d", "max_unpool3d", "repeat_interleave", "segment_reduce", "_ctc_loss", "bincount"),
        *("linalg_lu_solve", "linalg_ldl_solve", "lu_unpack"),
    )
)
_BY_VALUE = frozenset(
    (
        *("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_eigvals", "linalg_eigvals"),
        *("linalg_lstsq", "linalg_pinv", "cholesky", "multinomial", "bernoulli", "binomial", "poisson", "normal"),
        *("binary_cross_entropy", "histc", "histogram", "_histogramdd_bin_edges", "masked_scatter"),
        *("fake_quantize_per_channel_affine_cachemask", "quantize_per_channel"),
        *("_assert_async", "_functional_assert_async", "_assert_scalar", "_functional_assert_scalar"),
    )
)
# These raise for a divisor of 0 if all arguments are integers.
_OF_INTEGERS = frozenset({"div", "floor_divide", "remainder", "fmod"})


def ops_that_may_raise(captured: Captured) -> frozenset[int]:
    """Return the ids of ops that may raise an error that depends on the values of their arguments."""
    checked: set[int] = set()  # storages that were indices of an earlier op
    op_ids: set[int] = set()
    for op, call in zip(captured.graph.ops, captured.calls, strict=True):
        func = getattr(call.func, "run", call.func)  # unwrap an op that writes its result over an argument
        func = getattr(func, "func", func)  # unwrap an operator from ``operators.wrap_exact``
        if isinstance(func, ValueCheck):
            op_ids.add(op.id)
        elif isinstance(func, OpOverload):
            space, _, name = func._schema.name.partition("::")
            name = name.removesuffix("_")
            if (
                space not in _OWN
                or name in _BY_VALUE
                or arguments_by_name(func, call.args, call.kwargs).get("check_errors")
            ):
                op_ids.add(op.id)
            elif name in _BY_INDEX:
                indices = _integers(captured, call)
                if not checked.issuperset(indices):
                    op_ids.add(op.id)
                checked |= indices
            elif name in _OF_INTEGERS and _integers(captured, call).issuperset(op.reads):
                op_ids.add(op.id)
        checked.difference_update(op.mutates)
    return frozenset(op_ids)


def _integers(captured: Captured, call: Call) -> set[int]:
    """Return the storages of a call's integer and boolean tensor arguments."""
    leaves: list[Any] = tree_flatten((call.args, call.kwargs))[0]
    values = [captured.values[leaf.value] for leaf in leaves if isinstance(leaf, Ref)]
    return {value.storage for value in values if not value.dtype.is_floating_point and not value.dtype.is_complex}
