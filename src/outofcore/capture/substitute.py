"""Run a step that names the user's real tensors on their fakes."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from outofcore._torch_internals import (
    FOREACH_TENSOR_TYPES,
    TRANSFORM_ENTRY_POINTS,
    FakeTensor,
    HigherOrderOperator,
    has_no_dispatch_modes,
    is_compiled,
    is_wrapper,
    without_compiled_code,
    without_modes,
)
from outofcore.capture.device_traits import traits_of
from outofcore.capture.engine_calls import wrap_engine_calls
from outofcore.capture.known import KnownValues
from outofcore.capture.patching import capturing_thread, class_method, patch_attribute
from outofcore.capture.provenance import Provenance, called_from
from outofcore.capture.refusals import (
    grad_scaler_refusal,
    higher_order_refusal,
    refusal,
    translate_error,
    undeclared_tensor_refusal,
    value_read_refusal,
)
from outofcore.capture.tables import map_leaves
from outofcore.errors import CaptureError

# Reads of a tensor's value for which fake tensors would return nonsense instead of raising an error.
_READS = frozenset({"numpy", "__array__", "__repr__", "__format__", "data_ptr"})
# Functions that expose the bytes of a tensor, or change them without operators.
_EXPOSES_BYTES = frozenset(
    (
        *("__dlpack__", "__reduce_ex__", "__deepcopy__", "share_memory_", "apply_", "map_", "map2_"),
        *("const_data_ptr", "_const_data_ptr", "mutable_data_ptr", "__cuda_array_interface__"),
    )
)
# The same for storages.
_STORAGE_READS = (
    *("data_ptr", "tolist", "__getitem__", "__setitem__", "copy_", "fill_", "cpu", "cuda", "to", "clone", "pin_memory"),
    *("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "_write_file", "byteswap"),
    *("__reduce_ex__", "__deepcopy__", "resize_"),
)
# Functions that read only metadata of a tensor.
_METADATA = frozenset(
    (
        *("__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "element_size"),
        *("stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *("get_device", "is_pinned"),
    )
)
_ADDITIONS = frozenset({"__iadd__", "add_"})
_COMPARISONS = {"__eq__": operator.eq, "eq": operator.eq, "__gt__": operator.gt, "gt": operator.gt}
# Python functions that create a tensor from data.
_FACTORIES = frozenset({"tensor", "as_tensor", "asarray"})


# Files that create tensors without contents.
_FAKE_SOURCES = ("torch/_subclasses/fake_tensor.py", "torch/_subclasses/meta_utils.py", "outofcore/capture/recorder.py")


class Substitute(TorchFunctionMode):
    """The outermost function mode, which passes fakes to PyTorch functions in place of the user's tensors."""

    def __init__(
        self,
        fakes: dict[int, torch.Tensor],
        reals: Iterable[torch.Tensor],
        device: torch.device,
        counts: Mapping[int, int],
    ) -> None:
        super().__init__()
        self._counts = dict(counts)  # counts that the step may compare with zero, by id (see ``average_counts``)
        self._fakes = fakes  # by the id of the real tensor
        self._reals = list(reals)  # kept alive so that their ids are not reused
        self._device = device
        self._functions: list[tuple[str, tuple[str, torch.dtype] | None]] = []
        self._module: Callable[[], str] = str  # returns the path of the running module
        self.first_refusal: CaptureError | None = None  # the user's code may swallow it
        self.known = KnownValues()  # values that the step may read

    def current_function(self) -> str:
        return self._functions[-1][0] if self._functions else ""

    def current_autocast(self) -> tuple[str, torch.dtype] | None:
        """Return autocast's device type and dtype at the user's call of a PyTorch function; None if it was off."""
        # PyTorch turns autocast off before it dispatches an operator.
        return self._functions[-1][1] if self._functions else None

    def swap(self, tree: Any) -> Any:
        """Return ``tree`` with fakes in place of real tensors; raise ``CaptureError`` for undeclared tensors."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            # Wrappers contain fakes, see ``cover_entry_points``.
            is_fake = isinstance(tensor, FakeTensor) or is_wrapper(tensor)
            replacement = tensor if is_fake else self._fakes.get(id(tensor))
            if replacement is None:
                raise undeclared_tensor_refusal(tensor)
            return replacement

        return map_leaves(tree, fake)

    def _swap_arguments(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*self.swap(args), **self.swap(kwargs))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if isinstance(func, HigherOrderOperator) and func.name() != "custom_function_call":
            # Many of them trace their functions to prepare gradients, so this check comes first.
            raise self._record_refusal(higher_order_refusal(func.name(), self._module()))
        if args and id(args[0]) in self._counts:
            answer = self._track_average_count(name, args)
            if answer is not None:
                return answer
        try:
            if name in _READS:
                return self._read_value(func, name, args, kwargs or {})
            if name in _EXPOSES_BYTES:
                raise value_read_refusal(name)
            if name in _FACTORIES:
                _refuse_array(args, kwargs or {})
            try:
                new_args, new_kwargs = self.swap(args), self.swap(kwargs or {})
            except CaptureError:
                if name not in _METADATA:
                    raise
                new_args, new_kwargs = args, kwargs or {}
            if name == "ctc_loss" and traits_of(self._device).computes_in_capture:
                new_args, new_kwargs = _convert_lengths(new_args, new_kwargs)
            self._functions.append((name, _autocast_now(self._device.type)))
            try:
                return func(*new_args, **new_kwargs)
            finally:
                self._functions.pop()
        except CaptureError as error:
            raise self._record_refusal(error) from error.__cause__
        except Exception as error:
            answer = translate_error(error, name)
            if answer is None:
                raise
            raise self._record_refusal(answer) from error

    def _read_value(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func`` on a tensor with a known value. Refuse to read any other value."""
        value = None if name == "data_ptr" or args[0].requires_grad else self.known.value(args[0])
        if value is None:
            raise value_read_refusal(name)
        with without_modes():
            result = func(value, *args[1:], **kwargs)
        return result if isinstance(result, str) else self.known.lend(args[0], result)

    def _track_average_count(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Update the tracked ``n_averaged`` count; if ``name`` compares it with zero, return the result, else None."""
        key, number = id(args[0]), args[1] if len(args) > 1 else None
        if name in _ADDITIONS and type(number) is int:
            self._counts[key] += number
        elif name.endswith("_") and not name.startswith("__"):
            del self._counts[key]
        elif name in _COMPARISONS and type(number) is int and number == 0:
            return _COMPARISONS[name](self._counts[key], 0)
        return None

    def _record_refusal(self, error: CaptureError) -> CaptureError:
        self.first_refusal = self.first_refusal or error
        return error

    @contextlib.contextmanager
    def cover_entry_points(self, provenance: Provenance) -> Iterator[None]:
        """Patch PyTorch functions that the function mode does not see, so that they also use fake tensors."""
        # The autograd engine disables the mode for hooks, custom backwards and recomputed forwards; ``Function.apply``,
        # ``from_numpy`` and ``tolist`` are not overridable.
        self._module = lambda: provenance.locate_op()[0]
        is_capturing = capturing_thread()

        def run_backward(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not is_capturing():
                return engine(*args, **kwargs)
            with self, provenance.enter_backward():
                return engine(*self.swap(args), **self.swap(kwargs))

        apply = class_method(torch.autograd.Function, "apply")

        def substituted_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            return apply(cls, *self.swap(args), **self.swap(kwargs))

        with contextlib.ExitStack() as stack:
            stack.enter_context(wrap_engine_calls(run_backward))
            stack.enter_context(patch_attribute(torch.autograd.Function, "apply", classmethod(substituted_apply)))
            for owner, name, replacement in self._value_readers():
                stack.enter_context(patch_attribute(owner, name, replacement))
            for owner, name in TRANSFORM_ENTRY_POINTS:
                stack.enter_context(patch_attribute(owner, name, self._swap_arguments(getattr(owner, name))))
            # Gradient clipping uses another code path for types that are missing in this list.
            FOREACH_TENSOR_TYPES.append(FakeTensor)
            stack.callback(FOREACH_TENSOR_TYPES.remove, FakeTensor)
            yield

    def _value_readers(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield (owner, name, replacement) for functions that read values; replacements refuse unknown values."""

        def refuse_with(error: Callable[[], CaptureError]) -> Callable[..., Any]:
            def refuse(*_: Any, **__: Any) -> Any:
                raise self._record_refusal(error())

            return refuse

        as_list = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            # Without a mode, the tensor is a known value.
            value = tensor if has_no_dispatch_modes() else self.known.value(tensor)
            if value is None:
                raise self._record_refusal(value_read_refusal("tolist"))
            with without_modes():
                return as_list(value)

        def checked_storage_method(name: str) -> Callable[..., Any]:
            """Return the storage method ``name``, with a check that refuses tensors without contents."""
            original = getattr(torch.UntypedStorage, name)

            def call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
                # Only PyTorch itself may use storages of tensors without contents, to create them.
                if storage.device.type == "meta" and not called_from(*_FAKE_SOURCES):
                    raise self._record_refusal(value_read_refusal("untyped_storage"))
                return original(storage, *args, **kwargs)

            return call

        scale = torch.amp.GradScaler.scale

        def refuse_scaling(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled():
                raise self._record_refusal(grad_scaler_refusal())
            return scale(scaler, outputs)

        yield torch, "from_numpy", refuse_with(_numpy_refusal)
        for owner in (torch, torch.utils.dlpack):
            yield owner, "to_dlpack", refuse_with(partial(value_read_refusal, "__dlpack__"))
        for name in _STORAGE_READS:
            if hasattr(torch.UntypedStorage, name):
                yield torch.UntypedStorage, name, checked_storage_method(name)
        for kind in (torch.Tensor, FakeTensor):
            yield kind, "tolist", tolist
        yield torch.amp.GradScaler, "scale", refuse_scaling


def average_counts(models: Sequence[nn.Module]) -> dict[int, int]:
    """Map the id of each ``AveragedModel``'s ``n_averaged`` to the number of models that it has averaged."""
    # The first model is copied and others are averaged, so the ops depend on whether the count is zero. A meta count is
    # assumed to be one.
    return {
        id(module.n_averaged): 1 if module.n_averaged.is_meta else int(module.n_averaged)
        for model in models
        for module in model.modules()
        if isinstance(module, AveragedModel)
    }


def _convert_lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``ctc_loss`` with lists of lengths converted to tensors."""

    def tensor(value: Any) -> Any:
        return torch.tensor(value, dtype=torch.int64) if isinstance(value, list | tuple) else value

    named = {name: tensor(kwargs[name]) for name in ("input_lengths", "target_lengths") if name in kwargs}
    return (*args[:2], *map(tensor, args[2:4]), *args[4:]), kwargs | named


def _autocast_now(device_type: str) -> tuple[str, torch.dtype] | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return device_type, torch.get_autocast_dtype(device_type)


def _refuse_array(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a NumPy array with dimensions as the data of a new tensor."""
    for item in (*args[:1], kwargs.get("data"), kwargs.get("obj")):
        if hasattr(item, "__array_interface__") and getattr(item, "ndim", 0) > 0:
            raise _numpy_refusal()


def _numpy_refusal() -> CaptureError:
    return refusal(
        "the step makes a tensor from a NumPy array",
        "the contents of the array would be frozen into the step",
        "create it before the step and pass it as an argument, or register it as a buffer",
    )


_log = logging.getLogger(__name__)


@contextlib.contextmanager
def run_uncompiled(models: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled functions and modules as eager code, and log a warning about compiled modules."""
    names = [
        f"'{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        for model in models
        for name, module in model.named_modules()
        if is_compiled(module)
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _log.warning(
            "%s%s: wrapped by torch.compile; in this step it runs as plain PyTorch, with the results of plain PyTorch",
            names[0],
            more,
        )
    with without_compiled_code():
        yield
