"""Every private name of PyTorch that outofcore leans on, under a public name of ours.

A new release of PyTorch that moves or drops one of them breaks this file alone.
Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._compile import _disable_dynamo as not_compiled
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
from torch.autograd import forward_ad
from torch.library import _impls as _library_impls
from torch.nn import parameter
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

__all__ = [
    "BACKWARD_ENTRY_POINTS",
    "FAKE_LOGGER",
    "FOREACH_TENSOR_TYPES",
    "FUNCTIONAL_COLLECTIVES",
    "PARALLEL_SETTINGS",
    "TENSOR_MODULE",
    "TRANSFORM_ENTRY_POINTS",
    "CompilerMissingError",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "MetadataMismatchError",
    "OpOverload",
    "OpOverloadPacket",
    "SavedTensor",
    "TorchDispatchMode",
    "TreeSpec",
    "UninitializedTensorMixin",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "answering_what_is_fake",
    "at_the_end_of_backward",
    "autograd_sequence_number",
    "below_autograd",
    "bucket_assignment",
    "compile_traced",
    "current_autograd_node",
    "finished_work",
    "force_strides",
    "gather_into",
    "global_optimizer_hooks",
    "group_named",
    "has_python_kernel",
    "has_rebuilt_buckets",
    "is_compiled",
    "is_differentiating_forward",
    "is_wrapper",
    "issuing",
    "keystr",
    "let_device_idle",
    "mark_buckets_rebuilt",
    "mark_stepped",
    "memory_of",
    "negative_view",
    "node_sequence_number",
    "not_compiled",
    "parallel_buffers",
    "parallel_limits",
    "parallel_parameters",
    "plain_optimizer_step",
    "precision_of",
    "real_tensors",
    "reduction_named",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "result_leaves",
    "saved_tensors_of",
    "scatter_reduced",
    "sdp_backends_enabled",
    "set_activation_memory_budget",
    "shares_storage",
    "storage_address",
    "storage_bytes",
    "storage_key",
    "tensor_at",
    "tensor_impl",
    "tensor_leaves",
    "tensors_returned",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_unflatten",
    "unboxed_group",
    "without_compiled_code",
    "without_hooks",
    "without_modes",
    "without_new_versions",
]

# Where Python code enters the autograd engine: (module, attribute), all bound to one function.
BACKWARD_ENTRY_POINTS: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
)

# Where transforms of ``torch.func`` wrap the tensors they are given: (module, attribute).
TRANSFORM_ENTRY_POINTS: tuple[tuple[Any, str], ...] = (
    (eager_transforms, "_wrap_for_grad"),
    (functorch_vmap, "_add_batch_dim"),
)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a transform of ``torch.func``, or a batched gradient, has wrapped another tensor in this one."""
    return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)


def is_differentiating_forward() -> bool:
    """Whether forward-mode differentiation is on: of ``torch.func.jvp`` and what rests on it, or of the user's own."""
    return forward_ad._current_level >= 0


# The list of tensor types that utilities such as clip_grad_norm_ allow into their foreach path.
FOREACH_TENSOR_TYPES: list[type] = _foreach_utils._foreach_supported_types


# The module of the methods of tensors that are written in Python.
TENSOR_MODULE = "torch._tensor"


# Where fake tensors report an operator that refused its arguments.
FAKE_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


# What uninitialised parameters and buffers of lazy modules have in common.
UninitializedTensorMixin: Any = parameter.UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def answering_what_is_fake(is_fake: Callable[[object], bool]) -> Iterator[None]:
    """Let ``is_fake`` answer code that asks whether something is a ``torch._subclasses.FakeTensor``.

    Other libraries than PyTorch, that is, which look the class up where they ask: some go another way for tensors
    without contents than for others.
    """
    kind = FakeTensor

    class Asked(type):
        def __instancecheck__(cls, item: object) -> bool:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            return isinstance(item, kind) if asking.partition(".")[0] == "torch" else is_fake(item)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, kind)

    module: Any = torch._subclasses
    module.FakeTensor = Asked("FakeTensor", (), {})
    try:
        yield
    finally:
        module.FakeTensor = kind


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of the storage of a tensor, unique while the storage lives."""
    return tensor.untyped_storage()._cdata


def storage_address(storage: torch.UntypedStorage) -> int:
    """Where PyTorch's own object for a storage lies in memory; native code may be given it."""
    return storage._cdata


def has_python_kernel(name: str, overload: str) -> bool:
    """Whether an operator, such as "mylib::mul", runs Python code on the CPU."""
    namespace, _, op = name.partition("::")
    full = f"{namespace}/{op}.{overload}" if overload else f"{namespace}/{op}"
    return any(f"{full}/{key}" in _library_impls for key in ("CPU", "CompositeExplicitAutograd"))


def autograd_sequence_number() -> int:
    """One more than the number of the autograd node made last in this thread."""
    return _get_sequence_nr()


def current_autograd_node() -> Any | None:
    """The node that the autograd engine is running in this thread, or None outside of backward."""
    return torch._C._current_autograd_node()


def node_sequence_number(node: Any) -> int:
    """The number that an autograd node got when it was made."""
    return node._sequence_nr()


def plain_optimizer_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The ``step`` of an optimizer class without the wrapper that runs hooks and profiling."""
    step: Any = kind.step
    if getattr(step, "hooked", False):
        return getattr(step, "__wrapped__", step)
    return step


def global_optimizer_hooks() -> bool:
    """Whether hooks are registered that run around the step of every optimizer."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def without_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes that, put into the ``__dict__`` of a copied optimizer, leave it without step hooks."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return {name: type(optimizer.__dict__[name])() for name in names if name in optimizer.__dict__}


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Do the bookkeeping of ``optimizer.step()`` that learning-rate schedulers look at; to be called once a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def sdp_backends_enabled() -> tuple[bool, ...]:
    """Which implementations of scaled dot-product attention may be chosen."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops as autograd runs them after it has done its own part, with autocast off: as they were recorded."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


def issuing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """What calls an op with these arguments, again and again, with as little in between as there can be."""
    return functools.partial(func._op if isinstance(func, OpOverload) else func, *args, **kwargs)


# What torch.linalg raises; type checkers do not know the name.
LinAlgError: type[Exception] = vars(torch.linalg)["LinAlgError"]


def operator_name(func: Callable[..., Any]) -> tuple[str, str] | None:
    """The name of one of PyTorch's own operators, such as ("aten::add", "Tensor"); None: it is something else."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    return func._schema.name, func._schema.overload_name


def replayable() -> bool:
    """Whether no mode of Python's sees the ops of this thread."""
    return torch._C._len_torch_dispatch_stack() == 0


def tensors_returned(func: Callable[..., Any]) -> int:
    """How many tensors an op of PyTorch's returns; 0 where it may return anything else."""
    returns = func._schema.returns if isinstance(func, OpOverload) else ()
    return len(returns) if all(str(each.type) == "Tensor" for each in returns) else 0


def result_leaves(result: Any) -> list[Any]:
    """What an op returned, nested lists and tuples flattened in order; None where it left a tensor undefined."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in result_leaves(item)]
    return [result]


def tensor_leaves(result: Any) -> list[torch.Tensor]:
    """The tensors among ``result_leaves``."""
    return [leaf for leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of a tensor, as a uint8 tensor on that storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def precision_of(backend: Any, op: str) -> str | None:
    """What ``torch.backends`` says of the precision of an op in float32, such as of "matmul"; None: nothing.

    The older ``allow_tf32`` and ``torch.get_float32_matmul_precision`` raise where somebody has set this one.
    """
    return getattr(getattr(backend, op, None), "fp32_precision", None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a call of this module runs code of torch.compile, be it wrapped or compiled in place."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


@contextlib.contextmanager
def without_compiled_code() -> Iterator[None]:
    """Run functions and modules that torch.compile has wrapped as they were written."""
    # Nothing can have been compiled where this is not loaded, and to load it takes seconds.
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run ops on tensors as they are, past all modes of this thread."""
    with DisableTorchFunction(), _disable_current_modes():
        yield


def set_activation_memory_budget(share: float) -> None:
    """Let torch.compile keep no more than this share of the activations for backward."""
    import torch._functorch.config  # noqa: PLC0415 - slow, and not there before somebody asks for it

    torch._functorch.config.activation_memory_budget = share  # type: ignore[attr-defined]


def let_device_idle(cycles: int) -> None:
    """Keep the current stream of the current CUDA device busy with nothing for so many cycles of its clock."""
    torch.cuda._sleep(cycles)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor in host memory, writable."""
    array: Any = tensor.numpy()
    return memoryview(array)


def is_aligned(tensor: torch.Tensor, bytes_: int) -> bool:
    """Whether the address of a tensor on the CPU is a multiple of so many bytes, or none is to be had.

    Nobody is told that the address was looked at. Where ops are recorded, what runs them later has tensors of its own.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or isinstance(tensor, FakeTensor):
        return True
    return torch._C.TensorBase.data_ptr(tensor) % bytes_ == 0


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same bytes that reads as their negative."""
    return torch._neg_view(tensor)  # pyright: ignore[reportPrivateImportUsage]


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether another tensor than this one has the same storage."""
    # The tensor, and the object that asks.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def tensor_impl(tensor: torch.Tensor) -> int:
    """Where PyTorch's own object for a tensor lies in memory; native code may be given it."""
    return tensor._cdata


def tensor_at(address: int) -> torch.Tensor:
    """The tensor of an ``at::Tensor`` that native code made with ``new``, and that is deleted here."""
    # The function of this name for one tensor alone does not delete it.
    native: Any = torch._C
    (tensor,) = native._aoti.alloc_tensors_by_stealing_from_void_ptrs([_new_capsule(address, None, None)])
    return tensor


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that an autograd node has saved for backward, without hooks.

    Attributes:
        tensor: as it was saved; it may have been changed since.
    """

    tensor: torch.Tensor
    _raw: Any
    _node: Any
    _attribute: str

    def is_unchanged(self) -> bool:
        """Whether PyTorch would still take it."""
        try:
            getattr(self._node, self._attribute)
        except RuntimeError:
            return False
        return True

    def replace(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """Let the node hold in its place what ``pack`` returns, and get it back by ``unpack``."""
        self._raw.register_hooks(pack, unpack)


def saved_tensors_of(node: Any | None) -> Iterator[SavedTensor]:
    """What an autograd node has saved, but for what has hooks or was freed."""
    for saved, unpacked in _names_of_saved(type(node)):
        held = getattr(node, saved)
        every = held if isinstance(held, tuple | list) else (held,)
        # To look at one of a list is to unpack all.
        if any(raw.unpack_hook is not None for raw in every):
            continue
        for raw in every:
            tensor = raw.data
            if tensor is not None:
                yield SavedTensor(tensor, raw, node, unpacked)


@functools.lru_cache(maxsize=1024)
def _names_of_saved(kind: type) -> tuple[tuple[str, str], ...]:
    """Of a type of nodes, the attributes with what it saved, and the ones with the same unpacked."""
    names = dir(kind)
    found: list[tuple[str, str]] = []
    for name in names:
        if name.startswith("_raw_saved_"):
            unpacked = name.removeprefix("_raw")
            found.append((name, unpacked if unpacked in names else unpacked.removeprefix("_")))
    return tuple(found)


# Of a PyTorch that was built without collectives there is less; nothing here is then called.
_dist: Any = torch.distributed
_distributed_extension: Any = getattr(torch._C, "_distributed_c10d", None)
# The functional collectives: what ``torch.distributed`` calls them, and whether they write to their argument.
FUNCTIONAL_COLLECTIVES = {
    "_c10d_functional::all_reduce": ("all_reduce", False),
    "_c10d_functional::all_reduce_": ("all_reduce", True),
    "_c10d_functional::broadcast": ("broadcast", False),
    "_c10d_functional::broadcast_": ("broadcast", True),
    "_c10d_functional::all_gather_into_tensor": ("all_gather_into_tensor", False),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather_into_tensor", False),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter_tensor", False),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter_tensor", False),
}


def gather_into(result: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
    """``all_gather_into_tensor``, by the name that it has in this release."""
    getattr(_dist, "all_gather_single", _dist.all_gather_into_tensor)(result, tensor, group=group)


def scatter_reduced(result: torch.Tensor, tensor: torch.Tensor, reduction: Any, group: Any) -> None:
    """``reduce_scatter_tensor``, by the name that it has in this release."""
    getattr(_dist, "reduce_scatter_single", _dist.reduce_scatter_tensor)(result, tensor, reduction, group)


def group_named(name: Any) -> Any:
    """The process group that a functional collective names, or is given."""
    return _dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def unboxed_group(boxed: Any) -> Any:
    """The process group among the arguments of an operator of a collective."""
    return _dist.ProcessGroup.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else boxed


def finished_work() -> Any:
    """What an operator of a collective returns beside its result, of work that is done."""
    return _distributed_extension.FakeWork().boxed()


def reduction_named(reduction: Any) -> Any:
    """The name of a plain reduction, such as "sum", for the reduction, and the other way round; None: there is none."""
    names = {name.lower(): getattr(_dist.ReduceOp.RedOpType, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}
    if isinstance(reduction, str):
        return names.get(reduction)
    boxed: Any = reduction
    kind = boxed.op() if isinstance(reduction, torch.ScriptObject) else reduction
    return next((name for name, one in names.items() if kind in (one, int(one))), None)


def parallel_parameters(model: Any) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """The parameters whose gradients a ``DistributedDataParallel`` reduces, and whether each has a sparse gradient."""
    parameters, sparse = model._build_params_for_reducer()
    return list(parameters), list(sparse)


def parallel_buffers(model: Any) -> list[torch.Tensor]:
    """The buffers that a ``DistributedDataParallel`` broadcasts before a forward pass."""
    model._assign_modules_buffers()
    return list(model.modules_buffers)


def parallel_limits(model: Any) -> tuple[list[int], list[int]]:
    """The most bytes of each bucket of a ``DistributedDataParallel``: at first, and once it has rebuilt them."""
    own: list[int] = list(getattr(model, "bucket_bytes_cap_list", ()))
    if own:
        return own, own
    first = _dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap
    return [sys.maxsize], [first, model.bucket_bytes_cap]


def bucket_assignment(
    parameters: list[torch.nn.Parameter], limits: list[int], order: list[int] | None = None
) -> list[list[int]]:
    """Which parameters ``DistributedDataParallel`` puts together, by their numbers.

    Args:
        parameters: in the order given, or in that of ``order``.
        limits: the most bytes of each bucket.
        order: the numbers of the parameters, in the order in which gradients come.
    """
    taken = parameters if order is None else [parameters[index] for index in order]
    return _dist._compute_bucket_assignment_by_size(taken, limits, [False] * len(parameters), order or [])[0]


# Settings of a ``DistributedDataParallel`` under which it does not reduce gradients as it does by default: how the
# setting is told, what it is called in the module, and what it is by default.
PARALLEL_SETTINGS = (
    ("find_unused_parameters=True", "find_unused_parameters", False),
    ("static_graph=True", "static_graph", False),
    ("mixed_precision", "mixed_precision", None),
    ("a communication hook", "_comm_hooks", []),
    ("delay_all_reduce_named_params", "_delay_all_reduce_params", []),
    ("a Join context", "_join_config.enable", False),
    ("the Python reducer", "_use_python_reducer", False),
    ("skip_all_reduce_unused_params", "skip_all_reduce_unused_params", False),
)


def has_rebuilt_buckets(model: Any) -> bool:
    """Whether a ``DistributedDataParallel`` has put its buckets together anew, as it does after its first step."""
    return bool(getattr(model, "_has_rebuilt_buckets", False))


def mark_buckets_rebuilt(model: Any) -> None:
    """Note in a ``DistributedDataParallel`` that its buckets are those of its second step and later ones."""
    model._has_rebuilt_buckets = True


def at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Have the backward pass that runs now call something when it ends."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def without_new_versions(tensors: Any) -> contextlib.AbstractContextManager[None]:
    """In this context changes of tensors in place do not count for what autograd has saved."""
    autograd: Any = torch.autograd
    return autograd._unsafe_preserve_version_counter(tuple(tensors))


class CompilerMissingError(Exception):
    """There is nothing to compile with: for the CPU no C++ compiler, for a GPU no Triton."""


# All that Inductor may choose, and what it reads from the environment: fixed, so that a kernel is the same in every
# process. Those that a release does not have are left out.
_KERNEL_OPTIONS: dict[str, Any] = {
    "alignment_asserts": False,
    "allow_buffer_reuse": True,
    "benchmark_combo_kernel": False,
    "benchmark_fusion": False,
    "benchmark_kernel": False,
    "combo_kernels": False,
    "comment_origin": False,
    "coordinate_descent_tuning": False,
    "cpp.dynamic_threads": False,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_kernel_profile": False,
    "cpp.enable_loop_tail_vec": True,
    "cpp.enable_tiling_heuristics": True,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.min_chunk_size": 512,
    "cpp.simdlen": None,
    "cpp_wrapper": False,
    "deterministic": True,
    "emulate_precision_casts": False,
    "force_disable_caches": False,
    "freezing": False,
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
    "inplace_buffers": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "memory_planning": False,
    "nan_asserts": False,
    "profiler_mark_wrapper_call": False,
    "size_asserts": False,
    "triton.cudagraphs": False,
    "use_fast_math": False,
}


def compile_traced(
    function: Callable[..., tuple[torch.Tensor, ...]],
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]],
    threads: int,
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """What a function computes, compiled by Inductor for tensors of these shapes and strides.

    Args:
        function: of operators that write nothing in place, but that its last ones may copy into its arguments.
        layouts: of its arguments: shape, strides, dtype and device.
        threads: on how many the loops of a kernel for the CPU run.

    Returns:
        a function that takes the arguments as a list, which it empties.

    Raises:
        CompilerMissingError: there is no compiler.
        Exception: Inductor cannot compile it.
    """
    # To import this takes seconds, which those who compile nothing need not wait for.
    from torch._guards import TracingContext, tracing  # noqa: PLC0415
    from torch._inductor import config, exc  # noqa: PLC0415
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415

    settings: Any = config
    known = settings.get_config_copy() if hasattr(settings, "get_config_copy") else settings.shallow_copy_dict()
    options = {name: value for name, value in _KERNEL_OPTIONS.items() if name in known} | {"cpp.threads": threads}
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without which nothing is kept, although all sizes are numbers
    with (
        without_modes(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        settings.patch(options),
    ):
        _check_compiler({device.type for *_, device in layouts}, exc)
        with mode:
            given = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in layouts
            ]
            graph = make_fx(function, decomposition_table=select_decomp_table())(*given)
        node = next(iter(reversed(graph.graph.nodes)))
        node.meta["user_visible_output_idxs"] = list(range(len(node.args[0])))
        with V.set_fake_mode(mode), tracing(TracingContext(mode)):
            compiled: Any = compile_fx_inner(graph, given, is_inference=True)
    return compiled


def _check_compiler(devices: set[str], exceptions: Any) -> None:
    if "cpu" in devices:
        from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415

        try:
            get_cpp_compiler()
        except exceptions.InvalidCxxCompiler as error:
            raise CompilerMissingError("no C++ compiler is there; install g++ or clang++") from error
    if devices - {"cpu"}:
        from torch.utils._triton import has_triton  # noqa: PLC0415

        if not has_triton():
            raise CompilerMissingError("Triton is not installed, or does not know this GPU")


def force_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor laid out in other strides, as Inductor understands it in a function that is traced."""
    return torch.ops.prims.inductor_force_stride_order.default(tensor, strides)
