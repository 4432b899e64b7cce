"""The layouts of what kernels return, asked of the kernels themselves.

PyTorch computes the shape, strides and dtype of a result on tensors without contents (*fake* tensors) in code of its
own, beside the kernel. The two disagree for many operators on tensors that are not contiguous: a backward pass of
``mse_loss`` gives contiguous gradients for channels-last input, and its fake says channels-last. Which strides a tensor
has decides which kernels run after it, and so the last bits of what they compute. So where an argument is not
contiguous, the kernel runs once, on zeros, and its result is described as it really is.

The kernels of a GPU are not asked: what fakes say is believed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from outofcore._torch_internals import DisableTorchFunction, OpOverload, real_tensors, result_leaves, storage_key
from outofcore.capture.tables import leaves_in, map_leaves

# They take long, and their fakes were compared with their kernels in many layouts.
_TRUSTED = frozenset(
    (
        *("aten::convolution", "aten::convolution_backward", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::mm", "aten::bmm", "aten::addmm"),
        "aten::baddbmm",
    )
)
# Their fakes are wrong for contiguous arguments, too.
_ALWAYS_ASKED = frozenset(
    (
        "aten::mkldnn_rnn_layer_backward",  # in half precision PyTorch 2.11 returns gradients in float32
        *("aten::_embedding_bag", "aten::_embedding_bag_forward_only"),  # sums need no bags of the indices
        "aten::multilabel_margin_loss_forward",  # a loss without dimensions, which its fake says to have one
    )
)


@dataclass(frozen=True)
class Layout:
    """What describes a tensor without contents.

    Attributes:
        elements: how many elements its memory holds.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), count)

    def empty(self) -> torch.Tensor:
        """A tensor in this layout, in memory of its own."""
        memory = torch.empty(self.elements, dtype=self.dtype)
        return memory.as_strided_(self.shape, self.stride, self.offset)


@dataclass
class KernelLayouts:
    """The layouts that kernels on the CPU have returned; each operator is asked once for the same kind of arguments."""

    _known: dict[str, tuple[Layout | None, ...] | None] = field(default_factory=dict)

    def corrected(
        self,
        func: OpOverload,
        family: Callable[[], str],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> Any:
        """What the kernel would return, from what the fake has returned: ``result``, or fakes in other layouts.

        Args:
            func: the operator.
            family: names what calls that return the same layouts have in common.
            call: calls it as the step is to call it.
            args: of the call, as fake tensors; so are ``kwargs``.
        """
        given = leaves_in((args, kwargs))
        flat = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(flat, list | tuple) or not _is_doubtful(func, given, flat):
            return result
        key = f"{type(call).__name__} {family()}"
        if key not in self._known:
            self._known[key] = _asked(call, args, kwargs)
        layouts = self._known[key]
        if layouts is None or len(layouts) != len(flat):
            return result
        told = [
            item if item is None or layout is None or layout == Layout.of(item) else layout.empty()
            for item, layout in zip(flat, layouts, strict=True)
        ]
        return told[0] if isinstance(result, torch.Tensor) else type(flat)(told)


def _is_doubtful(func: OpOverload, given: list[torch.Tensor], results: list[Any] | tuple[Any, ...]) -> bool:
    name = func._schema.name
    if name in _TRUSTED or any(tensor.device.type != "cpu" for tensor in given):
        return False
    if not all(item is None or isinstance(item, torch.Tensor) for item in results):
        return False
    memory = {storage_key(tensor) for tensor in given}
    if any(item is not None and storage_key(item) in memory for item in results):
        return False  # it is an argument, or a view of one
    return name in _ALWAYS_ASKED or any(not _is_plain(tensor) for tensor in given)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of a new tensor of the shape, of dimensions with one element, too."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _asked(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Layout | None, ...] | None:
    """The layouts of what a kernel returns for zeros in place of the arguments; None: it does not run on zeros."""
    if leaves_in((args, kwargs), torch.Generator):
        return None
    fakes = {id(tensor): tensor for tensor in leaves_in((args, kwargs))}
    enabled = torch.is_grad_enabled()
    # torch.get_rng_state is recorded as a part of the step.
    state = torch.default_generator.get_state()
    try:
        with real_tensors(), DisableTorchFunction(), torch.set_grad_enabled(enabled):
            real = {key: _zeros(tensor) for key, tensor in fakes.items()}
            real_args, real_kwargs = map_leaves((args, kwargs), lambda tensor: real[id(tensor)])
            leaves = result_leaves(call(*real_args, **real_kwargs))
            tensors = [*real.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
            memory = Counter(map(storage_key, tensors))
            # Results that share memory would each be given as much as all of them have.
            return tuple(
                Layout.of(leaf) if isinstance(leaf, torch.Tensor) and memory[storage_key(leaf)] == 1 else None
                for leaf in leaves
            )
    except Exception:
        # A factorisation may find its matrix singular; what is wrong with the arguments, its first run will tell.
        return None
    finally:
        torch.default_generator.set_state(state)


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(fake.untyped_storage().nbytes() // fake.dtype.itemsize, dtype=fake.dtype)
    tensor = memory.as_strided(fake.shape, fake.stride(), fake.storage_offset())
    tensor = tensor.conj() if fake.is_conj() else tensor
    return torch.ops.aten._neg_view(tensor) if fake.is_neg() else tensor
