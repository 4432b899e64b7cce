"""Search PyTorch for operators that write arguments that their schemas do not mark as written.

Runs PyTorch's databases of modules and operators, forward and backward, and direct calls of further operators. A
dispatch mode compares the bytes of all unmarked arguments before and after each call. Add its findings to
``runtime/csrc/follow/silent_writes.h``.

    python tests/torch_cpu/silent_writes.py
    python tests/torch_cpu/silent_writes.py --every 40 --start 3

Needs its own process: PyTorch's databases change global settings. Prints one line of JSON. Operators that need a GPU or
several processes do not run here.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import itertools
import json
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from databases import copy_tensors
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Case = Callable[[], Any]
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the strided tensors on the CPU; other tensors have no storage."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.device.type == "cpu" and leaf.layout is torch.strided]


def bytes_of(tensor: Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


class SilentWriteMode(TorchDispatchMode):
    """A mode that finds silent writes; ``silent`` maps operators to changed arguments that are not marked."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        named_arguments = [
            *zip(arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in arguments if a.name in kwargs),
        ]
        marked: set[int] = set()
        unmarked: list[tuple[str, Tensor]] = []
        for argument, value in named_arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value):
                if written:
                    marked.add(tensor.untyped_storage()._cdata)
                else:
                    unmarked.append((argument.name, tensor))
        before = [(n, t, bytes_of(t)) for n, t in unmarked if t.untyped_storage()._cdata not in marked]
        silent = self.silent[func._schema.name]
        try:
            return func(*args, **kwargs)
        finally:
            silent.update(argument for argument, tensor, then in before if bytes_of(tensor) != then)


def backward(out: Any) -> None:
    losses = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])


def modules(info: Any, training: bool) -> Iterator[Case]:
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
    for sample in info.module_inputs_func(info, **options):

        def case(sample: Any = sample) -> None:
            module = info.module_cls(*copy.deepcopy(sample.constructor_input.args), **sample.constructor_input.kwargs)
            module.train(training)
            for _ in range(2):
                args, kwargs = copy_tensors((sample.forward_input.args, sample.forward_input.kwargs))
                backward(module(*args, **kwargs))

        yield case


def operators(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for sample in info.sample_inputs("cpu", dtype, requires_grad=grad):
        yield lambda sample=sample: backward(info(sample.input, *sample.args, **sample.kwargs))


def database_entries() -> Iterator[Callable[[], Iterator[Case]]]:
    """Yield a function that makes the cases of each database entry with one dtype or mode."""
    for info in op_db:
        for dtype in DTYPES:
            if dtype in info.supported_dtypes("cpu"):
                yield functools.partial(operators, info, dtype)
    for info, training in itertools.product(module_db, (True, False)):
        yield functools.partial(modules, info, training)


def quantized_tensor(*shape: int) -> Tensor:
    image = torch.quantize_per_tensor(torch.randn(shape) * 3, 0.05, 64, torch.quint8)
    return image.contiguous(memory_format=torch.channels_last)


def quantized_sum(name: str) -> None:
    torch.backends.quantized.engine = "onednn"
    weight = torch.quantize_per_tensor(torch.randn(8, 8, 3, 3), 0.05, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(weight, torch.zeros(8), [1, 1], [1, 1], [1, 1], 1)
    getattr(torch.ops.quantized, name)(quantized_tensor(1, 8, 6, 6), quantized_tensor(1, 8, 6, 6), packed, 0.05, 64)


def linear_sum() -> None:
    x, weight = torch.randint(0, 255, (4, 16), dtype=torch.uint8), torch.randint(-9, 9, (8, 16), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, list(x.shape))
    scales, zeros = torch.full((8,), 0.01), torch.zeros(8, dtype=torch.int32)
    post_op_arguments = (torch.zeros(8), 1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], "")
    torch.ops.onednn.qlinear_pointwise.binary(x, 0.02, 10, packed, scales, zeros, torch.randn(4, 8), *post_op_arguments)


def batch_norm(name: str, *arguments: Any) -> None:
    x, weight, bias = torch.randn(4, 8, 3), torch.ones(8), torch.zeros(8)
    getattr(torch.ops.aten, name)(x, weight, bias, torch.zeros(8), torch.ones(8), *arguments)


def moving_average_observer() -> None:
    on, numbers = torch.ones(1, dtype=torch.int64), [torch.zeros(1), torch.ones(1), torch.ones(1)]
    zero = torch.zeros(1, dtype=torch.int32)
    torch.ops.aten._fused_moving_avg_obs_fq_helper(torch.randn(4, 4), on, on, *numbers, zero, 0.1, 0, 255, 0)


def fused_update(name: str) -> None:
    def lists(count: int) -> list[list[Tensor]]:
        return [[torch.rand(9), torch.rand(5)] for _ in range(count)]

    steps, found_inf = [torch.ones(()), torch.ones(())], torch.zeros(())
    if name == "sgd":
        options = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False}
        torch.ops.aten._fused_sgd_(*lists(3), **options, maximize=False, is_first_step=False, found_inf=found_inf)
    elif name == "adagrad":
        options = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
        torch.ops.aten._fused_adagrad_(*lists(3), steps, **options, found_inf=found_inf)
    else:
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": True}
        operator = getattr(torch.ops.aten, f"_fused_{name}_")
        operator(*lists(5), steps, **options, maximize=False, grad_scale=torch.ones(()), found_inf=found_inf)


def gradient_scaling() -> None:
    found_inf, scale = torch.zeros(1), torch.full((1,), 8.0)
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_([torch.rand(4), torch.rand(5)], found_inf, 1 / scale)
    torch.ops.aten._amp_update_scale_(scale, torch.zeros(1, dtype=torch.int32), found_inf, 2.0, 0.5, 2)


def sobol() -> None:
    torch.quasirandom.SobolEngine(3, scramble=True).draw(4)
    engine = torch.quasirandom.SobolEngine(3)
    engine.fast_forward(3).draw(2)


def embeddings() -> None:
    words, table = torch.tensor([1, 2, 2, 0]), torch.randn(5, 3) * 4
    torch.ops.aten.embedding_renorm_(table, words, 1.0, 2.0)
    for mode in ("sum", "mean", "max"):
        weight = table.clone().requires_grad_()
        backward(nn.functional.embedding_bag(words, weight, torch.tensor([0, 2]), mode=mode, sparse=False))


def recurrent(kind: type[nn.Module]) -> None:
    model = kind(5, 6, num_layers=2, bidirectional=True)
    for _ in range(2):
        backward(model(torch.randn(4, 3, 5, requires_grad=True)))
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 3, 5))


def convolution_sum(name: str, *arguments: Any) -> None:
    x, addend, weight = (
        torch.randn(s).contiguous(memory_format=torch.channels_last) for s in ((1, 8, 6, 6),) * 2 + ((8, 8, 3, 3),)
    )
    operator = getattr(torch.ops.mkldnn, name).binary
    first = (addend, x) if name.endswith("_") else (x, addend)
    operator(*first, weight, None, [1, 1], [1, 1], [1, 1], 1, "add", *arguments)


def accumulate_gradient() -> None:
    with torch.no_grad():
        torch.ops.inductor.accumulate_grad_(torch.rand(4), torch.rand(4), torch.rand(4))


DIRECT: tuple[Case, ...] = (
    lambda: batch_norm("native_batch_norm", True, 0.1, 1e-5),
    lambda: batch_norm("native_batch_norm", False, 0.1, 1e-5),
    lambda: batch_norm("_native_batch_norm_legit", True, 0.1, 1e-5),
    lambda: batch_norm("_native_batch_norm_legit_functional", True, 0.1, 1e-5),
    lambda: batch_norm("_batch_norm_with_update", 0.1, 1e-5),
    lambda: batch_norm("_batch_norm_no_update", 0.1, 1e-5),
    lambda: torch.ops.aten.batch_norm_update_stats(torch.randn(4, 8, 3), torch.zeros(8), torch.ones(8), 0.1),
    lambda: torch.instance_norm(
        torch.randn(4, 8, 3), None, None, torch.zeros(8), torch.ones(8), True, 0.1, 1e-5, False
    ),
    lambda: torch.ops.quantized.relu6(quantized_tensor(1, 8, 6, 6), True),
    lambda: torch.ops.quantized.relu6(quantized_tensor(1, 8, 6, 6), False),
    lambda: torch.ops.quantized.leaky_relu(quantized_tensor(1, 8, 6, 6), 0.1, True, 0.05, 64),
    lambda: torch.ops.quantized.hardswish(quantized_tensor(1, 8, 6, 6), 0.05, 64),
    lambda: torch.ops.quantized.threshold(quantized_tensor(1, 8, 6, 6), 0.1, 0.2),
    lambda: quantized_sum("conv2d_add"),
    lambda: quantized_sum("conv2d_add_relu"),
    linear_sum,
    lambda: convolution_sum("_convolution_pointwise", None, None, [], None),
    lambda: convolution_sum("_convolution_pointwise_", 1.0, None, [], None),
    lambda: torch.ops.mkldnn._linear_pointwise.binary(*(torch.randn(4, 4) for _ in range(3)), None, "add"),
    accumulate_gradient,
    lambda: nn.functional.rrelu(torch.randn(9), training=True),
    lambda: torch.ops.aten.rrelu_with_noise(torch.randn(9), torch.zeros(9), 0.1, 0.3, True),
    lambda: torch.ops.aten._index_put_impl_(torch.randn(9), [torch.tensor([1, 2])], torch.randn(2), True),
    lambda: torch.randn(9).set_(torch.randn(4).untyped_storage()),
    lambda: nn.functional.ctc_loss(
        torch.randn(9, 2, 5).log_softmax(2), torch.randint(1, 5, (2, 3)), torch.tensor([9, 8]), torch.tensor([3, 2])
    ),
    *(lambda name=name: fused_update(name) for name in ("sgd", "adagrad", "adam", "adamw")),
    *(lambda kind=kind: recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    moving_average_observer,
    gradient_scaling,
    sobol,
    embeddings,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="Run every N-th entry of the databases.")
    parser.add_argument("--start", type=int, default=0, help="Index of the first entry.")
    parser.add_argument("--verbose", action="store_true", help="Print the errors of refused cases.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    listed = list(itertools.islice(database_entries(), options.start, None, options.every))
    ran, refused, comparing = 0, 0, SilentWriteMode()
    for cases in [lambda: iter(DIRECT), *listed]:
        torch.manual_seed(0)
        try:
            for case in cases():
                try:
                    with comparing:
                        case()
                    ran += 1
                except Exception:
                    refused += 1
                    if options.verbose:
                        traceback.print_exc(limit=-1)
        except Exception:  # the database has no samples for this
            refused += 1
    silent = {name: sorted(names) for name, names in sorted(comparing.silent.items()) if names}
    print(json.dumps({"ran": ran, "refused": refused, "operators": sorted(comparing.silent), "silent": silent}))


if __name__ == "__main__":
    main()
