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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._C._autograd import _get_sequence_nr
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
    "TENSOR_MODULE",
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
    "autograd_sequence_number",
    "below_autograd",
    "current_autograd_node",
    "global_optimizer_hooks",
    "has_python_kernel",
    "is_compiled",
    "keystr",
    "let_device_idle",
    "mark_stepped",
    "memory_of",
    "negative_view",
    "node_sequence_number",
    "plain_optimizer_step",
    "precision_of",
    "real_tensors",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "result_leaves",
    "saved_tensors_of",
    "sdp_backends_enabled",
    "set_activation_memory_budget",
    "shares_storage",
    "storage_address",
    "storage_bytes",
    "storage_key",
    "tensor_at",
    "tensor_impl",
    "tensor_leaves",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_unflatten",
    "without_compiled_code",
    "without_hooks",
    "without_modes",
]

# Where Python code enters the autograd engine: (module, attribute), all bound to one function.
BACKWARD_ENTRY_POINTS: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
)

# The list of tensor types that utilities such as clip_grad_norm_ allow into their foreach path.
FOREACH_TENSOR_TYPES: list[type] = _foreach_utils._foreach_supported_types


# The module of the methods of tensors that are written in Python.
TENSOR_MODULE = "torch._tensor"


# Where fake tensors report an operator that refused its arguments.
FAKE_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


# What uninitialised parameters and buffers of lazy modules have in common.
UninitializedTensorMixin: Any = parameter.UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]


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
    torch._functorch.config.activation_memory_budget = share  # type: ignore[attr-defined]


def let_device_idle(cycles: int) -> None:
    """Keep the current stream of the current CUDA device busy with nothing for so many cycles of its clock."""
    torch.cuda._sleep(cycles)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor in host memory, writable."""
    array: Any = tensor.numpy()
    return memoryview(array)


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
