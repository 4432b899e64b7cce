"""Correct the layouts of results where PyTorch's fake tensors differ from its CPU kernels.

They may disagree when an argument is not contiguous: the backward of ``mse_loss`` returns a contiguous gradient for a
channels-last input, but its fake is channels-last. Strides decide which kernels run next, and so the last bits of
results. During capture, such an operator therefore runs once on zeros. On a GPU the capture trusts the fakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from outofcore._torch_internals import (
    DisableTorchFunction,
    OpOverload,
    negative_view,
    real_tensors,
    result_leaves,
    storage_key,
)
from outofcore.capture.device_traits import traits_of
from outofcore.capture.tables import leaves_in, map_leaves

# Slow kernels that matched their fakes in every layout that was tested.
_TRUSTED = frozenset(
    (
        *("aten::convolution", "aten::convolution_backward", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::mm", "aten::bmm", "aten::addmm"),
        "aten::baddbmm",
    )
)
# Operators with wrong fakes even for contiguous arguments.
_ALWAYS_RUN = frozenset(
    (
        "aten::mkldnn_rnn_layer_backward",  # with bfloat16 inputs, PyTorch 2.11 returns float32 gradients
        *("aten::_embedding_bag", "aten::_embedding_bag_forward_only"),  # mode "sum" returns an empty offset2bag
        "aten::multilabel_margin_loss_forward",  # the loss has no dimensions, the fake has one
    )
)


@dataclass(frozen=True)
class TensorLayout:
    """Dtype, shape and strides of a tensor, and the size of its storage in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLayout:
        count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        return TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), count)

    def allocate(self) -> torch.Tensor:
        return torch.empty(self.elements, dtype=self.dtype).as_strided_(self.shape, self.stride, self.offset)


@dataclass
class KernelLayouts:
    """A cache of the layouts of CPU kernels' results, by operator and argument layouts."""

    _layouts: dict[str, tuple[TensorLayout | None, ...] | None] = field(default_factory=dict)

    def correct(
        self,
        func: OpOverload,
        family: Callable[[], str],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> Any:
        """Return ``result`` with the layouts that the real kernel gives; unchanged if the kernel cannot be run."""
        arguments = leaves_in((args, kwargs))
        results = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(results, list | tuple) or not _may_differ(func, arguments, results):
            return result
        key = f"{type(call).__name__} {family()}"
        if key not in self._layouts:
            self._layouts[key] = _run_on_zeros(call, args, kwargs)
        layouts = self._layouts[key]
        if layouts is None or len(layouts) != len(results):
            return result
        corrected = [
            item if item is None or layout is None or layout == TensorLayout.of(item) else layout.allocate()
            for item, layout in zip(results, layouts, strict=True)
        ]
        return corrected[0] if isinstance(result, torch.Tensor) else type(results)(corrected)


def _may_differ(func: OpOverload, arguments: list[torch.Tensor], results: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether fake results may have wrong layouts that a run of the real kernel can correct."""
    name = func._schema.name
    if name in _TRUSTED or not all(traits_of(tensor.device).computes_in_capture for tensor in arguments):
        return False
    if not all(item is None or isinstance(item, torch.Tensor) for item in results):
        return False
    storages = {storage_key(tensor) for tensor in arguments}
    if any(item is not None and storage_key(item) in storages for item in results):
        return False  # the result is an argument or a view of one
    # Other kernels may be written in Python. They would be captured here, where PyTorch's functions are patched.
    return func.namespace == "aten" and (name in _ALWAYS_RUN or not all(map(has_default_strides, arguments)))


def has_default_strides(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the strides of a newly allocated tensor of its shape."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _run_on_zeros(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TensorLayout | None, ...] | None:
    """Run a kernel on zeros, and return the layouts of its results; None if it cannot run."""
    if leaves_in((args, kwargs), torch.Generator):
        return None
    fakes = {id(tensor): tensor for tensor in leaves_in((args, kwargs))}
    enabled = torch.is_grad_enabled()
    # The capture would record torch.get_rng_state.
    state = torch.default_generator.get_state()
    try:
        with real_tensors(), DisableTorchFunction(), torch.set_grad_enabled(enabled):
            zeros = {key: _make_zeros(tensor) for key, tensor in fakes.items()}
            real_args, real_kwargs = map_leaves((args, kwargs), lambda tensor: zeros[id(tensor)])
            results = result_leaves(call(*real_args, **real_kwargs))
            tensors = [*zeros.values(), *(item for item in results if isinstance(item, torch.Tensor))]
            owners = Counter(map(storage_key, tensors))
            # Results that share a storage keep their fakes, since separate layouts would count it repeatedly.
            return tuple(
                TensorLayout.of(item) if isinstance(item, torch.Tensor) and owners[storage_key(item)] == 1 else None
                for item in results
            )
    except Exception:
        # Some operators refuse zeros. If the real arguments are invalid too, the step itself will raise.
        return None
    finally:
        torch.default_generator.set_state(state)


def _make_zeros(fake: torch.Tensor) -> torch.Tensor:
    storage = torch.zeros(fake.untyped_storage().nbytes() // fake.dtype.itemsize, dtype=fake.dtype)
    tensor = storage.as_strided(fake.shape, fake.stride(), fake.storage_offset())
    tensor = tensor.conj() if fake.is_conj() else tensor
    return negative_view(tensor) if fake.is_neg() else tensor
