"""Properties of ATen operators that their schemas and fakes leave out or get wrong.

Dtype, strides and memory of a result decide which kernels run after it, so a captured step is exact only if fakes are
right. The corrections were found by comparing real and fake results with torch 2.13. docs/internals/add-an-operator.md
lists all tables of operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import DisableTorchFunction, OpOverload, real_tensors
from outofcore.capture.captured import CPU, Call, Ref, Value
from outofcore.capture.device_traits import have_same_type
from outofcore.capture.kernel_layouts import has_default_strides
from outofcore.capture.tables import map_leaves

# Operators that overwrite all of their first argument without reading it. Another argument that aliases the first is
# still read.
_OVERWRITES = frozenset(
    (
        *("aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"),
        *("aten::random_", "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_"),
        *("aten::_foreach_zero_", "aten::_foreach_copy_"),
    )
)
# Arguments that operators write in place although the schema omits it, and the flag that turns this on (empty:
# always on).
_STATISTICS = ("running_mean", "running_var")
_HIDDEN_WRITES = {
    "aten::native_batch_norm": (_STATISTICS, "training"),
    "aten::cudnn_batch_norm": (_STATISTICS, "training"),
    "aten::miopen_batch_norm": (_STATISTICS, "training"),
    "aten::batch_norm_gather_stats": (_STATISTICS, ""),
    "aten::batch_norm_gather_stats_with_counts": (_STATISTICS, ""),
    "aten::batch_norm_update_stats": (_STATISTICS, ""),
    "aten::mkldnn_rnn_layer_backward": (("workspace",), ""),
    "aten::_cudnn_rnn_backward": (("reserve",), ""),
}
# Operators that update statistics without using them in other results.
_UPDATES_STATISTICS = frozenset(
    (
        *("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"),
        *("aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats"),
        *("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"),
    )
)
_SPLIT_TYPES = frozenset({"List[Tensor]", "List[number]", "List[float]"})


@dataclass(frozen=True)
class OperatorTraits:
    """Properties of an operator; arguments are identified by name."""

    names: tuple[str, ...]  # of all arguments in order, keyword-only ones included
    written: frozenset[str]
    overwritten: frozenset[str]  # arguments that are written completely, if at all, and not read
    hidden: frozenset[str]  # arguments that are written although the schema omits it, if ``flag`` is set or empty
    flag: str
    statistics: frozenset[str]  # arguments with old contents that affect no other result
    random: bool
    reshapes: bool  # it changes the metadata of its first argument
    reads_values: bool  # it returns plain numbers or truth values, and no tensor


@functools.lru_cache(maxsize=4096)
def traits(func: OpOverload) -> OperatorTraits:
    """Return the properties of an operator, from its schema and the tables of this module."""
    arguments, name = func._schema.arguments, func._schema.name
    names = tuple(a.name for a in arguments)
    hidden, flag = _HIDDEN_WRITES.get(name, ((), ""))
    return OperatorTraits(
        names=names,
        written=frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        overwritten=frozenset([a.name for a in arguments if a.is_out] + [*names[:1]] * (name in _OVERWRITES)),
        hidden=frozenset(hidden),
        flag=flag,
        statistics=frozenset(_STATISTICS if name in _UPDATES_STATISTICS else ()),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        reshapes=torch.Tag.inplace_view in func.tags,
        reads_values=bool(func._schema.returns) and not any("Tensor" in str(r.type) for r in func._schema.returns),
    )


Arguments = dict[str, Any]


def arguments_by_name(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return dict(zip(traits(func).names, args, strict=False)) | kwargs


def arrange_arguments(func: OpOverload, call: Call, arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from ``arguments``, arranged as in ``call``."""
    args = tuple([arguments[name] for name in traits(func).names[: len(call.args)]])
    return args, {name: arguments[name] for name in call.kwargs}


def written_arguments(func: OpOverload, arguments: Arguments) -> frozenset[str]:
    facts = traits(func)
    return facts.written if facts.flag and not arguments.get(facts.flag) else facts.written | facts.hidden


def is_random(func: OpOverload, arguments: Arguments) -> bool:
    """Return whether this call uses a random generator. Attention without dropout does not use one."""
    facts = traits(func)
    return facts.random and not ("dropout_p" in facts.names and arguments.get("dropout_p", 0.0) == 0.0)


def split_arguments(func: OpOverload, arguments: Arguments) -> frozenset[str]:
    """Return the names of a ``_foreach_`` operator's arguments that are lists with one entry per tensor."""
    lists = [a.name for a in func._schema.arguments if isinstance(arguments.get(a.name), list | tuple)]
    typed = {a.name for a in func._schema.arguments if str(a.type) in _SPLIT_TYPES}
    length = len(arguments[traits(func).names[0]])
    return frozenset(name for name in lists if name in typed and len(arguments[name]) == length)


def family_text(name: str, args: Any, kwargs: dict[str, Any], values: list[Value]) -> str:
    """Return a text key of operator, tensor metadata and constants, which is equal for calls of equal cost."""
    items = [_argument_text(item, values) for item in args]
    items += [f"{key}={_argument_text(item, values)}" for key, item in sorted(kwargs.items())]
    return f"{name}({', '.join(items)})"


def _argument_text(item: Any, values: list[Value]) -> str:
    """Format an argument as text; calls of an operator with equal argument texts have equal costs."""
    if isinstance(item, Ref):
        return value_text(values[item.value])
    if isinstance(item, list | tuple):
        return "[" + ",".join(_argument_text(part, values) for part in item) + "]"
    if isinstance(item, torch.Generator):
        return "generator"
    return repr(item)


def value_text(value: Value) -> str:
    """Format dtype, shape and strides, as in ``float32[2,3]{3,1}``; add ``*`` if conjugate and ``-`` if negated."""
    dtype = str(value.dtype).removeprefix("torch.")
    shape, stride = ",".join(map(str, value.shape)), ",".join(map(str, value.stride))
    return f"{dtype}[{shape}]{{{stride}}}{'*' * value.conjugate}{'-' * value.negated}"


def fake_result(func: OpOverload, arguments: Arguments, run: Callable[[], Any]) -> Any:
    """Return fake results with the metadata of the real kernel's results; ``run`` computes uncorrected results."""
    built = _build_result(func, arguments)
    return _repair_result(func, arguments, run()) if built is None else built


Repair = Callable[[Arguments, list[Any]], list[Any]]


def _repair_result(func: OpOverload, arguments: Arguments, result: Any) -> Any:
    """Correct fake results to match the real kernel; results that the output mask leaves out become None."""
    tensors = [item for item in arguments.values() if isinstance(item, torch.Tensor)]
    if not tensors:
        return result
    repairs = _REPAIRS if have_same_type(tensors[0].device, CPU) else _CUDA_REPAIRS
    repair = repairs.get(func._schema.name)
    # The kernel leaves masked results undefined, even where the fake returns them.
    mask = arguments.get(_mask_argument(func), ())
    if repair is None and all(mask):
        return result
    results: list[Any] = [result] if isinstance(result, torch.Tensor) else list(result)
    if repair is not None:
        results = repair(arguments, results)
    for index, is_selected in enumerate(mask):
        if not is_selected and not isinstance(results[index], list):
            results[index] = None
    return results[0] if isinstance(result, torch.Tensor) else type(result)(results)


@functools.lru_cache(maxsize=4096)
def _mask_argument(func: OpOverload) -> str:
    """Return the name of the operator's bool-list argument that selects results, or an empty string."""
    returns = func._schema.returns
    if len(returns) < 2 or any(item.alias_info is not None for item in returns):
        return ""
    masks = [a.name for a in func._schema.arguments if a.name.endswith("mask") and str(a.type) == "List[bool]"]
    return masks[0] if len(masks) == 1 else ""


def _build_result(func: OpOverload, arguments: Arguments) -> torch.Tensor | tuple[torch.Tensor | None, ...] | None:
    """Build fake results for an operator with a slow or wrong fake kernel; None for all other operators."""
    if func._schema.name == "aten::_conj" and not isinstance(arguments["self"], torch.Tensor):
        # The kernel turns a number into a tensor and returns its lazy conjugate. The fake omits the conjugate.
        return torch.empty((), dtype=torch.complex128).conj()
    if func._schema.name == "aten::_grouped_mm" and arguments["self"].dtype != torch.bfloat16:
        return _grouped_mm_result(arguments)
    if func._schema.name == "aten::_ctc_loss":
        frames, batch, _ = arguments["log_probs"].shape
        width = 2 * _longest_target(arguments["targets"], arguments["target_lengths"]) + 1
        return arguments["log_probs"].new_empty((batch,)), arguments["log_probs"].new_empty((batch, frames, width))
    if func._schema.name in ("aten::native_batch_norm", "aten::native_batch_norm_backward"):
        return _batch_norm_result(arguments)
    return None


def _batch_norm_result(arguments: Arguments) -> tuple[torch.Tensor | None, ...] | None:
    """Build fake results of batch normalization or its backward; None for unsupported arguments."""
    # The fakes are decomposed into dozens of ops, which takes fifty times as long.
    data, tensors = arguments["input"], [item for item in arguments.values() if isinstance(item, torch.Tensor)]
    channels = data.shape[1:2]
    if not arguments.get("training", arguments.get("train")) or data.dtype not in (torch.float32, torch.float64):
        return None
    if not all(t.dtype == data.dtype and t.shape in (data.shape, channels) for t in tensors) or not data.numel():
        return None
    if not all(map(has_default_strides, tensors)):
        return None
    shapes = zip((data.shape, channels, channels), arguments.get("output_mask", (True, True, True)), strict=True)
    return tuple(data.new_empty(shape) if is_selected else None for shape, is_selected in shapes)


def _longest_target(targets: torch.Tensor, lengths: Sequence[int] | torch.Tensor) -> int:
    """Return the length of the longest target, or the largest possible length if ``lengths`` is a tensor."""
    if isinstance(lengths, torch.Tensor):
        return targets.shape[1] if targets.ndim == 2 else targets.numel()
    return max(lengths, default=0)


def _grouped_mm_result(arguments: Arguments) -> torch.Tensor:
    """Build the fake result of ``_grouped_mm``; raise ``RuntimeError`` for arguments that do not fit together."""
    # See ``create_grouped_gemm_output_tensor`` of ATen/native/GroupedMMUtils.h; the fake accepts bfloat16 only.
    left, right, offsets = arguments["self"], arguments["mat2"], arguments.get("offs")
    if left.dtype != right.dtype or left.shape[-1] != right.shape[-2]:
        raise RuntimeError(
            f"_grouped_mm cannot multiply {left.dtype} of shape {tuple(left.shape)} with {right.dtype} of shape "
            f"{tuple(right.shape)}; pass factors of one dtype, with equal inner dimensions"
        )
    if (offsets is None) != (left.ndim == right.ndim == 3):
        verb = "needs" if offsets is None else "takes no"
        raise RuntimeError(
            f"_grouped_mm {verb} offs for factors of {left.ndim} and {right.ndim} dimensions: pass offs, unless both "
            "have three dimensions"
        )
    groups = [*([] if offsets is None else offsets.shape), *left.shape[:-2], *right.shape[:-2]]
    if len(set(groups)) > 1:
        raise RuntimeError(
            f"_grouped_mm was given {' and '.join(map(str, groups))} groups; pass offsets and factors for the "
            "same number of groups"
        )
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim:
        shape.insert(0, groups[0])
    dtype = arguments.get("out_dtype") or left.dtype
    # PyTorch with CUDA aligns each row to 16 bytes.
    alignment = 16 // dtype.itemsize if torch.version.cuda else 1
    row = -(-shape[-1] // alignment) * alignment
    stride = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=left.device)


def wrap_exact(func: OpOverload, autocast: tuple[str, torch.dtype] | None) -> Callable[..., Any]:
    """Return a function that repeats an operator exactly; ``func`` itself if it needs no wrapper."""
    # Some kernels check whether gradients are enabled, others call operators that autocast changes. No tensor of a
    # replay requires a gradient, so enabling them creates no autograd graph.
    if func._schema.name == "aten::mkldnn_rnn_layer" and torch.is_grad_enabled():
        return CallInContext(func, torch.enable_grad)
    if func._schema.name == "aten::_trilinear" and autocast is not None:
        return CallInContext(func, functools.partial(torch.autocast, *autocast))
    if func is torch.ops.aten._ctc_loss.Tensor:
        return CtcLoss(func)
    return func


@dataclass(frozen=True)
class CallInContext:
    func: OpOverload
    enter: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.enter():
            return self.func(*args, **kwargs)


# The kernel makes log alpha as wide as the batch's longest target (ATen/native/LossCTC.cpp), but a captured step needs
# a fixed shape. The backward pass does not read the padding.
@dataclass(frozen=True)
class CtcLoss:
    """The CTC loss with lengths in tensors, and log alpha padded to the longest possible target."""

    func: OpOverload

    def __call__(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: torch.Tensor,
        *positional: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, alpha = self.func(log_probs, targets, input_lengths, *positional, **named)
        batch, frames, width = alpha.shape
        longest = _longest_target(targets, positional[0] if positional else named["target_lengths"])
        padded = alpha.new_full((batch, frames, 2 * longest + 1), -math.inf)
        padded[..., :width] = alpha
        return loss, padded


# ``cross_entropy`` with weights and label smoothing adds target weights this way (ATen/native/LossNLL.cpp). Under a
# dispatch mode it adds zeros for ignored targets instead, which may round differently.
@dataclass(frozen=True)
class MaskedSum:
    """The sum of the elements that a mask does not ignore."""

    def __call__(self, values: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return values.masked_select(~ignored).sum()


def _empty_with_layout(tensor: torch.Tensor, dtype: torch.dtype, stride: tuple[int, ...]) -> torch.Tensor:
    if tensor.dtype == dtype and tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)


def _make_statistics_float32(arguments: Arguments, results: list[Any]) -> list[Any]:
    """Make the saved statistics of mixed-precision batch normalization float32."""
    parameters = (arguments.get(name) for name in ("weight", "bias", "running_mean", "running_var"))
    if arguments["input"].dtype in (torch.bfloat16, torch.float16) and any(
        parameter is not None and parameter.dtype == torch.float32 for parameter in parameters
    ):
        results[1:3] = [_empty_with_layout(saved, torch.float32, saved.stride()) for saved in results[1:3]]
    return results


def _enlarge_results(count: Callable[[Arguments], int], *indices: int) -> Repair:
    """Return a function that enlarges the storages of results at ``indices`` to ``count(arguments)`` elements."""

    def repair(arguments: Arguments, results: list[Any]) -> list[Any]:
        for index in indices:
            item = results[index]
            if count(arguments) > item.numel() > 0:
                results[index] = torch.empty(count(arguments), dtype=item.dtype, device=item.device).resize_(item.shape)
        return results

    return repair


def _loss_elements(arguments: Arguments) -> int:
    """Return the number of values that a loss's kernel reduces, or 0 without a reduction."""
    if arguments.get("reduction", 1) == 0:
        return 0
    target = arguments["target"]
    return int(torch.broadcast_shapes(arguments["self"].shape, target.shape).numel())


def _correct_lstm_workspace(arguments: Arguments, results: list[Any]) -> list[Any]:
    """Correct the size of an LSTM's workspace by running the mkldnn kernel once on zeros."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    enabled = torch.is_grad_enabled()
    with real_tensors(), DisableTorchFunction(), torch.set_grad_enabled(enabled):
        real = torch.ops.aten.mkldnn_rnn_layer.default(**map_leaves(arguments, zeros))
    workspace = real[3] if len(real) > 3 else None
    results[3] = None if workspace is None else torch.empty(workspace.numel(), dtype=workspace.dtype)
    return results


def _correct_cudnn_buffers(arguments: Arguments, results: list[Any]) -> list[Any]:
    """Correct the sizes of cuDNN's reserve and weight buffers by running the kernel on zeros, if there is a GPU."""
    if not torch.cuda.is_available():
        return results
    device = arguments["input"].device

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    with real_tensors(), DisableTorchFunction(), torch.no_grad():
        real = torch.ops.aten._cudnn_rnn.default(**map_leaves(arguments, zeros))
    results[3] = torch.empty(real[3].shape, dtype=real[3].dtype, device=device)
    if results[4] is None and real[4] is not None:
        results[4] = torch.empty(real[4].shape, dtype=real[4].dtype, device=device)
    return results


def _correct_generator_device(arguments: Arguments, results: list[Any]) -> list[Any]:
    """Correct the device of the generator state that efficient attention returns for its backward pass."""
    # Outside of CUDA graphs it is the CPU if there is dropout, else it depends on PyTorch's version. See
    # ``_efficient_attention_forward`` of ATen/native/transformers/cuda/attention.cu.
    device = (
        torch.device("cpu") if arguments.get("dropout_p") else _seed_device_without_dropout(arguments["query"].device)
    )
    results[2:4] = [torch.empty((), dtype=torch.int64, device=device) for _ in results[2:4]]
    return results


@functools.lru_cache(maxsize=16)
def _seed_device_without_dropout(device: torch.device) -> torch.device:
    """Return the device where efficient attention without dropout creates its random seed."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    with real_tensors(), DisableTorchFunction(), torch.no_grad():
        ones = torch.ones(1, 1, 8, 8, device=device)
        results = torch.ops.aten._scaled_dot_product_efficient_attention.default(ones, ones, ones, None, True)
    return results[2].device  # type: ignore[no-any-return]


_REPAIRS: dict[str, Repair] = {
    "aten::native_batch_norm": _make_statistics_float32,
    "aten::mse_loss": _enlarge_results(_loss_elements, 0),
    "aten::smooth_l1_loss": _enlarge_results(_loss_elements, 0),
    "aten::soft_margin_loss": _enlarge_results(_loss_elements, 0),
    "aten::binary_cross_entropy": _enlarge_results(_loss_elements, 0),
    "aten::col2im": _enlarge_results(lambda arguments: arguments["self"].numel(), 0),
    "aten::mkldnn_rnn_layer": _correct_lstm_workspace,
}

_CUDA_REPAIRS: dict[str, Repair] = {
    "aten::_scaled_dot_product_efficient_attention": _correct_generator_device,
    "aten::_cudnn_rnn": _correct_cudnn_buffers,
}
