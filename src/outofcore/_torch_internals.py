"""Wrap every private name of PyTorch that outofcore uses; ``require`` refuses a release that lacks some."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import logging
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from outofcore.analysis.chunks import extent
from outofcore.errors import VersionError

# The oldest and the newest PyTorch release that the tests run with.
TESTED = ((2, 11), (2, 15))
TESTED_TEXT = " to ".join(f"{major}.{minor}" for major, minor in TESTED)

_log = logging.getLogger("outofcore")


class Feature(enum.Enum):
    """A library feature that needs private names of PyTorch."""

    COMPILE = "outofcore.compile"  # also capturing a step to plan or estimate it
    BUDGET = "outofcore.budget"  # also outofcore.run
    RECOMPUTE = "recomputation in a loop under outofcore.budget"
    KERNELS = 'kernels="inductor"'
    PARALLEL = "DistributedDataParallel in outofcore.compile"
    COLLECTIVES = "collectives in outofcore.compile"
    TRANSFORMS = "torch.func in outofcore.compile"
    HIGHER_ORDER = "higher-order operators such as torch.cond within outofcore.budget"


_missing: dict[Feature, list[str]] = {}


class _Substitute(type):
    """The metaclass of placeholders for missing private names; calling a placeholder raises ``VersionError``."""

    refusal: VersionError

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise cls.refusal


def _import_private(name: str, *features: Feature, default: Any = None) -> Any:
    """Import a private PyTorch object that ``features`` need; return ``default`` if this PyTorch lacks it.

    Without a default, the result is a placeholder that raises ``VersionError`` when it is called.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        for feature in features:
            _missing.setdefault(feature, []).append(name)
        # An exception type, so that it works in an "except" clause; it never matches.
        refusal = _version_error(features[0].value if features else "this", [name])
        return _Substitute("Missing", (Exception,), {"refusal": refusal}) if default is None else default


def _always_false(_: object) -> bool:
    return False


def _version_error(subject: str, names: Sequence[str]) -> VersionError:
    return VersionError(
        f"{subject} cannot work with PyTorch {torch.__version__}: it has no {', '.join(names)}; "
        f"install a tested PyTorch version ({TESTED_TEXT}) or a newer outofcore"
    )


def missing(feature: Feature) -> tuple[str, ...]:
    """Return the private names that a feature needs and that this PyTorch lacks."""
    if feature is Feature.KERNELS:
        _compiler()
    return tuple(_missing.get(feature, ()))


def require(feature: Feature) -> None:
    """Raise ``VersionError`` if a feature lacks a private name; warn once if this PyTorch is untested."""
    _warn_of_untested(torch.__version__)
    if names := missing(feature):
        raise _version_error(feature.value, names)


def is_tested(version: str = torch.__version__) -> bool:
    release = re.match(r"(\d+)\.(\d+)", version)
    return release is not None and TESTED[0] <= (int(release[1]), int(release[2])) <= TESTED[1]


@functools.cache
def _warn_of_untested(version: str) -> None:
    if not is_tested(version):
        _log.warning("PyTorch %s: outofcore is tested with %s; results and budgets may be wrong", version, TESTED_TEXT)


if TYPE_CHECKING:
    from torch._C import DisableTorchFunction
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
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
else:
    DisableTorchFunction = _import_private("torch._C.DisableTorchFunction", Feature.COMPILE, Feature.RECOMPUTE)
    HigherOrderOperator = _import_private("torch._ops.HigherOrderOperator")
    OpOverload = _import_private("torch._ops.OpOverload", Feature.COMPILE)
    OpOverloadPacket = _import_private("torch._ops.OpOverloadPacket", Feature.COMPILE)
    DataDependentOutputException = _import_private("torch._subclasses.fake_tensor.DataDependentOutputException")
    DynamicOutputShapeException = _import_private("torch._subclasses.fake_tensor.DynamicOutputShapeException")
    FakeTensor = _import_private("torch._subclasses.fake_tensor.FakeTensor", Feature.COMPILE)
    FakeTensorMode = _import_private("torch._subclasses.fake_tensor.FakeTensorMode", Feature.COMPILE)
    MetadataMismatchError = _import_private("torch._subclasses.fake_tensor.MetadataMismatchError")
    UnsupportedFakeTensorException = _import_private("torch._subclasses.fake_tensor.UnsupportedFakeTensorException")
    UnsupportedMutationAliasingException = _import_private(
        "torch._subclasses.fake_tensor.UnsupportedMutationAliasingException"
    )
    UnsupportedOperatorException = _import_private("torch._subclasses.fake_tensor.UnsupportedOperatorException")
    TorchDispatchMode = _import_private("torch.utils._python_dispatch.TorchDispatchMode", Feature.COMPILE)
    keystr = _import_private("torch.utils._pytree.keystr", Feature.COMPILE)
    tree_flatten = _import_private("torch.utils._pytree.tree_flatten", Feature.COMPILE, Feature.BUDGET)
    tree_flatten_with_path = _import_private("torch.utils._pytree.tree_flatten_with_path", Feature.COMPILE)
    tree_unflatten = _import_private("torch.utils._pytree.tree_unflatten", Feature.COMPILE, Feature.BUDGET)

_dist: Any = torch.distributed

# Entry points of the autograd engine for Python code: (module, attribute), all bound to one function.
BACKWARD_ENTRY_POINTS: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
)
for _module, _name in BACKWARD_ENTRY_POINTS:
    _import_private(f"{_module.__name__}.{_name}", Feature.COMPILE)

# Functions with which ``torch.func`` transforms wrap their arguments: (module, attribute).
TRANSFORM_ENTRY_POINTS: tuple[tuple[Any, str], ...] = tuple(
    (_import_private(module), name)
    for module, name in (
        ("torch._functorch.eager_transforms", "_wrap_for_grad"),
        ("torch._functorch.vmap", "_add_batch_dim"),
    )
    if _import_private(f"{module}.{name}", Feature.TRANSFORMS, default=_always_false) is not _always_false
)
_is_wrapped: Any = _import_private(
    "torch._C._functorch.is_functorch_wrapped_tensor", Feature.TRANSFORMS, default=_always_false
)
_is_batched: Any = _import_private(
    "torch._C._functorch.is_legacy_batchedtensor", Feature.TRANSFORMS, default=_always_false
)
_import_private("torch.autograd.forward_ad._current_level", Feature.TRANSFORMS)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps another for a ``torch.func`` transform or a batched gradient."""
    return _is_wrapped(tensor) or _is_batched(tensor)


def is_differentiating_forward() -> bool:
    """Return whether forward-mode differentiation (``torch.autograd.forward_ad``) is active."""
    return getattr(forward_ad, "_current_level", -1) >= 0


# The tensor types for which utilities such as clip_grad_norm_ use foreach kernels.
FOREACH_TENSOR_TYPES: list[type] = _import_private(
    "torch.utils._foreach_utils._foreach_supported_types", Feature.COMPILE, default=[]
)


# The module with the tensor methods that are written in Python.
TENSOR_MODULE = "torch._tensor"


# Fake tensors log operators that reject their arguments here.
FAKE_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


# A decorator: torch.compile does not trace the function.
not_compiled: Any = _import_private("torch._compile._disable_dynamo", default=torch.compiler.disable)

# Run ops on real tensors while fake tensors are traced.
real_tensors: Any = _import_private("torch._subclasses.fake_tensor.unset_fake_temporarily", Feature.COMPILE)


_fakes: Any = _import_private("torch._subclasses", Feature.COMPILE)
_import_private("torch._subclasses.FakeTensor", Feature.COMPILE)


@contextlib.contextmanager
def override_fake_check(is_fake: Callable[[object], bool]) -> Iterator[None]:
    """Make ``isinstance(x, FakeTensor)`` return ``is_fake(x)``, except in PyTorch's own modules."""
    kind = FakeTensor

    class Asked(type):
        def __instancecheck__(cls, item: object) -> bool:
            asking_module = sys._getframe(1).f_globals.get("__name__", "")
            return isinstance(item, kind) if asking_module.partition(".")[0] == "torch" else is_fake(item)

        def __subclasscheck__(cls, candidate: type) -> bool:
            return issubclass(candidate, kind)

    module: Any = _fakes
    module.FakeTensor = Asked("FakeTensor", (), {})
    try:
        yield
    finally:
        module.FakeTensor = kind


# The address of PyTorch's C++ object of a storage or tensor.
_import_private("torch.UntypedStorage._cdata", Feature.COMPILE, Feature.BUDGET)
_import_private("torch.Tensor._cdata", Feature.RECOMPUTE)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is unique while the tensor's storage exists."""
    return tensor.untyped_storage()._cdata


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's C++ object, for native code."""
    return storage._cdata


_library_impls: set[str] = _import_private("torch.library._impls", Feature.BUDGET)


def has_python_kernel(name: str, overload: str) -> bool:
    """Return whether an operator such as "mylib::mul" has a CPU kernel written in Python."""
    namespace, _, op = name.partition("::")
    full = f"{namespace}/{op}.{overload}" if overload else f"{namespace}/{op}"
    return any(f"{full}/{key}" in _library_impls for key in ("CPU", "CompositeExplicitAutograd"))


# One more than the sequence number of the newest autograd node of this thread.
autograd_sequence_number: Callable[[], int] = _import_private("torch._C._autograd._get_sequence_nr", Feature.COMPILE)

# The node that the autograd engine runs in this thread; None outside of backward.
current_autograd_node: Callable[[], Any | None] = _import_private("torch._C._current_autograd_node", Feature.COMPILE)


def node_sequence_number(node: Any) -> int:
    return node._sequence_nr()


def plain_optimizer_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` of an optimizer class without its wrapper for hooks and profiling."""
    step: Any = kind.step
    if getattr(step, "hooked", False):
        return getattr(step, "__wrapped__", step)
    return step


_GLOBAL_HOOKS: tuple[Any, ...] = tuple(
    _import_private(f"torch.optim.optimizer._global_optimizer_{when}_hooks", Feature.COMPILE)
    for when in ("pre", "post")
)


# Ids of outofcore's hooks, which do not change a step.
OWN_OPTIMIZER_HOOKS: set[int] = set()


def has_global_optimizer_hooks() -> bool:
    """Return whether hooks of other libraries run around the step of every optimizer."""
    return any(not OWN_OPTIMIZER_HOOKS.issuperset(hooks) for hooks in _GLOBAL_HOOKS)


def empty_step_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return attributes without step hooks, to put into the ``__dict__`` of a copied optimizer."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return {name: type(optimizer.__dict__[name])() for name in names if name in optimizer.__dict__}


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Record for learning-rate schedulers that ``optimizer.step()`` has run; call it once a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


_ATTENTION_FLAGS: tuple[Any, ...] = tuple(
    _import_private(f"torch._C._get_{kind}_sdp_enabled", Feature.COMPILE)
    for kind in ("flash", "mem_efficient", "math", "cudnn")
)


def sdp_backends_enabled() -> tuple[bool, ...]:
    """Return whether each backend of scaled dot-product attention is enabled, in a fixed order."""
    return tuple(flag() for flag in _ATTENTION_FLAGS)


_count_function_modes: Any = _import_private("torch._C._len_torch_function_stack", Feature.COMPILE)
_function_mode_at: Any = _import_private("torch._C._get_function_stack_at", Feature.COMPILE)


def function_modes() -> tuple[Any, ...]:
    """Return the active function modes, outermost first, including the default device."""
    return tuple([_function_mode_at(place) for place in range(_count_function_modes())])


_below_autograd: Any = _import_private("torch._C._AutoDispatchBelowAutograd", Feature.COMPILE)
_without_autocast: Any = _import_private("torch._C._DisableAutocast", Feature.COMPILE, Feature.KERNELS)
_modes_of_this_thread: Any = _import_private("torch._C._len_torch_dispatch_stack", Feature.COMPILE)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops below autograd and without autocast, as during capture."""
    with torch.no_grad(), _below_autograd(), _without_autocast():
        yield


def bind_op(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that calls an op with these arguments at minimal overhead."""
    return functools.partial(func._op if isinstance(func, OpOverload) else func, *args, **kwargs)


# Looked up by name since type stubs lack it.
LinAlgError: type[Exception] = vars(torch.linalg)["LinAlgError"]


def operator_name(func: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the name of an ATen operator, such as ("aten::add", "Tensor"); None for other functions."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    return func._schema.name, func._schema.overload_name


def has_no_dispatch_modes() -> bool:
    return _modes_of_this_thread() == 0


def count_returned_tensors(func: Callable[..., Any]) -> int:
    """Return the number of tensors that an op returns; 0 if it may return other types."""
    returns = func._schema.returns if isinstance(func, OpOverload) else ()
    return len(returns) if all(str(returned.type) == "Tensor" for returned in returns) else 0


def result_leaves(result: Any) -> list[Any]:
    """Flatten an op's result in order; an undefined tensor is None."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in result_leaves(item)]
    return [result]


def tensor_leaves(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]


def view_storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View all bytes of a tensor's storage as a uint8 tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def precision_of(backend: Any, op: str) -> str | None:
    """Return the float32 precision that ``torch.backends`` sets for ops such as "matmul"; None if unset."""
    # Where it is set, the older allow_tf32 and torch.get_float32_matmul_precision raise.
    return getattr(getattr(backend, op, None), "fp32_precision", None)


_import_private("torch.nn.Module._compiled_call_impl", Feature.COMPILE)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile has wrapped or compiled a module."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


@contextlib.contextmanager
def without_compiled_code() -> Iterator[None]:
    """Run functions and modules compiled by torch.compile as eager code."""
    # Loading Dynamo takes seconds, and without it no code can be compiled.
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_without_dispatch_modes: Any = _import_private("torch.utils._python_dispatch._disable_current_modes", Feature.COMPILE)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run code without the active function modes and dispatch modes."""
    with DisableTorchFunction(), _without_dispatch_modes():
        yield


def let_device_idle(cycles: int) -> None:
    """Block the current CUDA stream for this many clock cycles."""
    torch.cuda._sleep(cycles)


def cublas_workspaces() -> tuple[int, int]:
    """Return the bytes of a cuBLAS and of a cuBLASLt workspace; their usual sizes if they cannot be read."""
    names = ("_ZN2at4cuda22getChosenWorkspaceSizeEv", "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        functions = [getattr(library, name) for name in names]
    except (OSError, AttributeError):
        return 32 << 20, 1 << 20  # the usual sizes
    for function in functions:
        function.restype = ctypes.c_size_t
    return int(functions[0]()), int(functions[1]())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous uint8 tensor in host memory."""
    array: Any = tensor.numpy()
    return memoryview(array)


_address: Any = _import_private("torch._C.TensorBase.data_ptr", default=torch.Tensor.data_ptr)


def is_aligned(tensor: torch.Tensor, bytes_: int) -> bool:
    """Return whether the address of a CPU tensor is a multiple of ``bytes_``; always True during a capture."""
    # The address is read without modes: recorded ops later run with other tensors.
    if _modes_of_this_thread() > 0 or isinstance(tensor, FakeTensor):
        return True
    return _address(tensor) % bytes_ == 0


# Functions that export a tensor as a DLPack capsule.
DLPACK_EXPORTERS: tuple[Any, ...] = tuple(
    _import_private(f"torch._C.{name}") for name in ("_to_dlpack", "_to_dlpack_versioned")
)

# The file writer of ``torch.save``.
FILE_WRITER: Any = _import_private("torch._C.PyTorchFileWriter")

# Returns a view that reads as the negative of a tensor.
negative_view: Callable[[torch.Tensor], torch.Tensor] = _import_private("torch._neg_view")


_uses_of_storage: Any = _import_private("torch._C._storage_Use_Count", Feature.COMPILE)


def shares_storage(tensor: torch.Tensor) -> bool:
    """Return whether more tensor objects than this one refer to its storage."""
    # The tensor and the temporary storage object count as two.
    return _uses_of_storage(tensor.untyped_storage()._cdata) > 2


def tensor_impl(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's C++ object, for native code."""
    return tensor._cdata


_steal_tensors: Any = _import_private("torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs", Feature.RECOMPUTE)


def tensor_at(address: int) -> torch.Tensor:
    """Return the tensor of an ``at::Tensor*`` that native code made with ``new``, and delete the pointer."""
    # The variant for a single tensor does not delete it.
    (tensor,) = _steal_tensors([_new_capsule(address, None, None)])
    return tensor


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that an autograd node saved for backward, without hooks; it may have been modified since."""

    tensor: torch.Tensor
    _raw: Any
    _node: Any
    _attribute: str

    def is_unchanged(self) -> bool:
        """Return whether PyTorch would still accept the tensor in backward."""
        try:
            getattr(self._node, self._attribute)
        except RuntimeError:
            return False
        return True

    def replace(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """Make the node save ``pack(tensor)`` instead; backward restores the tensor by calling ``unpack``."""
        self._raw.register_hooks(pack, unpack)


for _name in ("data", "register_hooks", "unpack_hook"):
    _import_private(f"torch._C._autograd.SavedTensor.{_name}", Feature.RECOMPUTE)


def saved_tensors_of(node: Any | None) -> Iterator[SavedTensor]:
    """Yield the tensors that an autograd node saved, except freed tensors and tensors with saved-tensor hooks."""
    for saved, unpacked in _names_of_saved(type(node)):
        value = getattr(node, saved)
        raws = value if isinstance(value, tuple | list) else (value,)
        # Reading one tensor of a list unpacks all of them.
        if any(raw.unpack_hook is not None for raw in raws):
            continue
        for raw in raws:
            tensor = raw.data
            if tensor is not None:
                yield SavedTensor(tensor, raw, node, unpacked)


@functools.lru_cache(maxsize=1024)
def _names_of_saved(node_type: type) -> tuple[tuple[str, str], ...]:
    """Return the attribute names (``_raw_saved_x``, ``_saved_x``) of each saved tensor of a node type."""
    names = dir(node_type)
    attributes: list[tuple[str, str]] = []
    for name in names:
        if name.startswith("_raw_saved_"):
            unpacked = name.removeprefix("_raw")
            attributes.append((name, unpacked if unpacked in names else unpacked.removeprefix("_")))
    return tuple(attributes)


# A PyTorch built without collectives has none of these names, and they are then unused.
def _import_collective(name: str, *features: Feature) -> Any:
    return _import_private(name, *features) if _dist.is_available() else None


_resolve_group: Any = _import_collective(
    "torch.distributed.distributed_c10d._resolve_process_group", Feature.COLLECTIVES
)
_fake_work: Any = _import_collective("torch._C._distributed_c10d.FakeWork", Feature.COLLECTIVES)
# Functional collectives: their name in ``torch.distributed``, and whether they write to their argument.
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
    getattr(_dist, "all_gather_single", _dist.all_gather_into_tensor)(result, tensor, group=group)


def reduce_scatter_into(result: torch.Tensor, tensor: torch.Tensor, reduction: Any, group: Any) -> None:
    getattr(_dist, "reduce_scatter_single", _dist.reduce_scatter_tensor)(result, tensor, reduction, group)


def resolve_group(name: Any) -> Any:
    """Return the process group of a functional collective, given as a name or an object."""
    return _resolve_group(name) if isinstance(name, str) else name


def unbox_group(boxed: Any) -> Any:
    return _dist.ProcessGroup.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else boxed


def make_finished_work() -> Any:
    return _fake_work().boxed()


def convert_reduction(reduction: Any) -> Any:
    """Convert a ``ReduceOp`` to its name, such as "sum", or a name to a ``ReduceOp``; None if it is unknown."""
    names = {name.lower(): getattr(_dist.ReduceOp.RedOpType, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}
    if isinstance(reduction, str):
        return names.get(reduction)
    boxed: Any = reduction
    kind = boxed.op() if isinstance(reduction, torch.ScriptObject) else reduction
    return next((name for name, reduction_type in names.items() if kind in (reduction_type, int(reduction_type))), None)


for _name in ("_build_params_for_reducer", "_assign_modules_buffers"):
    _import_collective(f"torch.nn.parallel.DistributedDataParallel.{_name}", Feature.PARALLEL)
_first_bucket_bytes: Any = _import_collective("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", Feature.PARALLEL)
_buckets_by_size: Any = _import_collective("torch.distributed._compute_bucket_assignment_by_size", Feature.PARALLEL)


def parallel_parameters(model: Any) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """Return the parameters that a ``DistributedDataParallel`` reduces, and whether each is sparse."""
    parameters, sparse = model._build_params_for_reducer()
    return list(parameters), list(sparse)


def parallel_buffers(model: Any) -> list[torch.Tensor]:
    """Return the buffers that a ``DistributedDataParallel`` broadcasts."""
    model._assign_modules_buffers()
    return list(model.modules_buffers)


def bucket_limits(model: Any) -> tuple[list[int], list[int]]:
    """Return DDP's bucket limits in bytes: for the first step, and for later steps with rebuilt buckets."""
    limits: list[int] = list(getattr(model, "bucket_bytes_cap_list", ()))
    if limits:
        return limits, limits
    first = _first_bucket_bytes if model.bucket_bytes_cap_default else model.bucket_bytes_cap
    return [sys.maxsize], [first, model.bucket_bytes_cap]


def bucket_assignment(
    parameters: list[torch.nn.Parameter], limits: list[int], order: list[int] | None = None
) -> list[list[int]]:
    """Return the parameter indices of each DDP bucket; ``order``: parameter indices, by first ready gradient."""
    ordered = parameters if order is None else [parameters[index] for index in order]
    return _buckets_by_size(ordered, limits, [False] * len(parameters), order or [])[0]


# ``DistributedDataParallel`` settings that change how it reduces gradients: the text for messages, the module's
# attribute, and the default value.
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
    return bool(getattr(model, "_has_rebuilt_buckets", False))


def mark_buckets_rebuilt(model: Any) -> None:
    model._has_rebuilt_buckets = True


_engine: Any = _import_private("torch.autograd.Variable._execution_engine", Feature.PARALLEL)


def call_after_backward(call: Callable[[], None]) -> None:
    _engine.queue_callback(call)


_same_versions: Any = _import_private("torch.autograd._unsafe_preserve_version_counter", Feature.PARALLEL)


_operators: Any = _import_private("torch._ops", Feature.HIGHER_ORDER)
_keyset: Any = _import_private("torch._ops._compute_keyset", Feature.HIGHER_ORDER)
_dispatch_key: Any = _import_private("torch._C._parse_dispatch_key", Feature.HIGHER_ORDER)


@contextlib.contextmanager
def without_dispatch_key(name: str) -> Iterator[None]:
    """Make higher-order operators, such as ``torch.cond``, ignore the dispatch key ``name``.

    A kernel that a key has for all operators does not handle them. In an unsuitable PyTorch, this only logs a warning.
    """
    if names := missing(Feature.HIGHER_ORDER):
        _log.warning("this PyTorch has no %s, so %s do not work", ", ".join(names), Feature.HIGHER_ORDER.value)
        yield
        return
    key, plain = _dispatch_key(name), _keyset

    @functools.wraps(plain)
    def compute_keyset(args: Any, kwargs: Any, keys: Any) -> Any:
        return plain(args, kwargs, keys.remove(key))

    _operators._compute_keyset = compute_keyset
    try:
        yield
    finally:
        _operators._compute_keyset = plain


def without_version_bumps(tensors: Any) -> contextlib.AbstractContextManager[None]:
    """Hide in-place changes of tensors from autograd's version check."""
    return _same_versions(tuple(tensors))


class CompilerMissingError(Exception):
    """No C++ compiler for the CPU was found, or no working Triton for the GPU."""


# All choices of Inductor, including those that it reads from the environment, are fixed so that each process gets the
# same kernel. Options that a release lacks are left out.
_KERNEL_OPTIONS: dict[str, Any] = {
    "alignment_asserts": False,
    "allow_buffer_reuse": True,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "benchmark_combo_kernel": False,
    "benchmark_fusion": False,
    "benchmark_kernel": False,
    "bundled_autotune_remote_cache": False,
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
    "dynamic_scale_rblock": False,
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
    "online_softmax": True,
    "profiler_mark_wrapper_call": False,
    "size_asserts": False,
    "split_reductions": True,
    "triton.autotune_pointwise": False,
    "triton.cooperative_reductions": False,
    "triton.cudagraphs": False,
    "triton.enable_pdl": False,
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_autotune_split_size": False,
    "triton.multi_kernel": 0,
    "triton.persistent_reductions": True,
    "use_fast_math": False,
}


@functools.cache
def _compiler() -> dict[str, Any]:
    """Import the parts of Inductor that compile kernels, and return them by name."""
    names = (
        "torch._guards.TracingContext",
        "torch._guards.tracing",
        "torch._inductor.config",
        "torch._inductor.exc",
        "torch._inductor.compile_fx.compile_fx_inner",
        "torch._inductor.cpp_builder.get_cpp_compiler",
        "torch._inductor.decomposition.select_decomp_table",
        "torch._inductor.virtualized.V",
        "torch.fx.experimental.proxy_tensor.make_fx",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.utils._triton.has_triton",
        "torch.utils._triton.has_triton_package",
        "torch.utils._triton.triton_backend",
    )
    return {name.rpartition(".")[2]: _import_private(name, Feature.KERNELS) for name in names}


def compile_traced(
    function: Callable[..., tuple[torch.Tensor, ...]],
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]],
    threads: int,
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a function with Inductor for arguments of the given layouts.

    A layout is (shape, strides, offset, dtype, device). The function must not write in place, except that its last
    operators may copy into its arguments. The result takes the arguments as a list and empties it. Raises
    ``CompilerMissingError``, and passes on errors of Inductor.
    """
    compiler = _compiler()
    settings: Any = compiler["config"]
    available = settings.get_config_copy() if hasattr(settings, "get_config_copy") else settings.shallow_copy_dict()
    devices = {device.type for *_, device in layouts}
    requested = _KERNEL_OPTIONS | {"cpp.threads": threads}
    if devices != {"cpu"}:
        requested["compile_threads"] = 1  # kernels are compiled one at a time: a process pool would not help
    options = {name: value for name, value in requested.items() if name in available}
    # Inductor caches kernels only with a shape environment, even if all sizes are static.
    mode = FakeTensorMode(shape_env=compiler["ShapeEnv"]())
    with (
        without_modes(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        _without_autocast(),
        settings.patch(options),
    ):
        _check_compiler(devices, compiler)
        with mode:
            arguments = [_empty_at_offset(*layout) for layout in layouts]
            graph = compiler["make_fx"](function, decomposition_table=compiler["select_decomp_table"]())(*arguments)
        node = next(iter(reversed(graph.graph.nodes)))
        node.meta["user_visible_output_idxs"] = list(range(len(node.args[0])))
        with compiler["V"].set_fake_mode(mode), compiler["tracing"](compiler["TracingContext"](mode)):
            compiled: Any = compiler["compile_fx_inner"](graph, arguments, is_inference=True)
    return compiled


def _empty_at_offset(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor at an offset in its storage, since GPU kernels copy arguments of another alignment."""
    return torch.empty(offset + extent(shape, stride), dtype=dtype, device=device).as_strided(shape, stride, offset)


def _check_compiler(devices: set[str], compiler: dict[str, Any]) -> None:
    """Raise ``CompilerMissingError`` if Inductor lacks a working compiler for a device."""
    if "cpu" in devices:
        try:
            compiler["get_cpp_compiler"]()
        except compiler["exc"].InvalidCxxCompiler as error:
            raise CompilerMissingError("no C++ compiler was found; install g++ or clang++") from error
    if devices - {"cpu"}:
        _check_triton(compiler)


def _check_triton(compiler: dict[str, Any]) -> None:
    """Raise ``CompilerMissingError`` if Triton is missing, cannot start or does not support the GPU."""
    if not compiler["has_triton_package"]():
        raise CompilerMissingError("Triton is not installed; install the package triton")
    if not compiler["has_triton"]():
        raise CompilerMissingError("Triton does not support this GPU; it needs compute capability 7.0 or higher")
    try:
        compiler["triton_backend"]()  # compiles the launcher that calls the driver
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CompilerMissingError(
            f"Triton does not start: {type(error).__name__}: {reason}. It needs a C compiler and Python's headers "
            "(packages gcc and python3-dev on Debian)"
        ) from error


def force_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the given strides, by an operator that Inductor can trace."""
    return torch.ops.prims.inductor_force_stride_order.default(tensor, strides)
