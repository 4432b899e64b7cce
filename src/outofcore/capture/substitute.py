"""Run a step that names the user's real tensors on their fakes, without touching the real ones."""

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
    is_compiled,
    is_wrapper,
    replayable,
    without_compiled_code,
    without_modes,
)
from outofcore.capture.device_traits import traits_of
from outofcore.capture.engine_calls import around_engine
from outofcore.capture.known import KnownValues
from outofcore.capture.patching import capturing_thread, class_method, patched
from outofcore.capture.provenance import Provenance, called_from
from outofcore.capture.refusals import grad_scaler, higher_order, refusal, translated, undeclared, value_read
from outofcore.capture.tables import map_leaves
from outofcore.errors import CaptureError

# Reads of a tensor's value that fake tensors would answer with nonsense instead of an error.
_READS = frozenset({"numpy", "__array__", "__repr__", "__format__", "data_ptr"})
# What gives the bytes of a tensor away, or changes them past the operators.
_GIVES_AWAY = frozenset(
    (
        *("__dlpack__", "__reduce_ex__", "__deepcopy__", "share_memory_", "apply_", "map_", "map2_"),
        *("const_data_ptr", "_const_data_ptr", "mutable_data_ptr", "__cuda_array_interface__"),
    )
)
# Likewise of a storage.
_OF_STORAGES = (
    *("data_ptr", "tolist", "__getitem__", "__setitem__", "copy_", "fill_", "cpu", "cuda", "to", "clone", "pin_memory"),
    *("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "_write_file", "byteswap"),
    *("__reduce_ex__", "__deepcopy__", "resize_"),
)
# What may be asked of a tensor without looking at its bytes.
_METADATA = frozenset(
    (
        *("__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "element_size"),
        *("stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *("get_device", "is_pinned"),
    )
)
_ADDITIONS = frozenset({"__iadd__", "add_"})
_COMPARISONS = {"__eq__": operator.eq, "eq": operator.eq, "__gt__": operator.gt, "gt": operator.gt}
# Python functions that make a tensor of the data given.
_FACTORIES = frozenset({"tensor", "as_tensor", "asarray"})


# Where tensors without contents are made.
_OF_FAKES = ("torch/_subclasses/fake_tensor.py", "torch/_subclasses/meta_utils.py", "outofcore/capture/recorder.py")


class Substitute(TorchFunctionMode):
    """Replaces the user's tensors by their fakes in the arguments of every PyTorch function.

    The real objects stay in modules, optimizers and closures, and no call of the step reaches them. It must be the
    outermost mode. ``first_refusal`` is kept in case the user's code swallows it; ``known`` are the values that the
    step may read.
    """

    def __init__(
        self,
        fakes: dict[int, torch.Tensor],
        reals: Iterable[torch.Tensor],
        device: torch.device,
        counts: Mapping[int, int],
    ) -> None:
        """``fakes`` is by the id of the real tensor; ``reals`` holds those tensors so that their ids are not reused.

        ``counts`` are values, by id, of counts that the step may compare with zero (see ``average_counts``).
        """
        super().__init__()
        self._counts = dict(counts)
        self._fakes = fakes
        self._reals = list(reals)
        self._device = device
        self._functions: list[tuple[str, tuple[str, torch.dtype] | None]] = []
        self._module: Callable[[], str] = str  # the path of the module that runs
        self.first_refusal: CaptureError | None = None
        self.known = KnownValues()

    def calling(self) -> str:
        """Return the name of the PyTorch function that the user's code is in; empty if none."""
        return self._functions[-1][0] if self._functions else ""

    def autocast(self) -> tuple[str, torch.dtype] | None:
        """Device type and dtype of autocast where the user's code called that function; None if it is off.

        PyTorch has already turned autocast off where an operator is dispatched.
        """
        return self._functions[-1][1] if self._functions else None

    def swap(self, tree: Any) -> Any:
        """Replace real tensors in a tree by fakes; raises ``CaptureError`` for one that was not declared."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            # A wrapper was put around a fake, see ``everywhere``.
            known = isinstance(tensor, FakeTensor) or is_wrapper(tensor)
            found = tensor if known else self._fakes.get(id(tensor))
            if found is None:
                raise undeclared(tensor)
            return found

        return map_leaves(tree, fake)

    def _swapping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*self.swap(args), **self.swap(kwargs))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if isinstance(func, HigherOrderOperator) and func.name() != "custom_function_call":
            # Before its gradient is prepared, for which many trace the functions they are given.
            raise self._refused(higher_order(func.name(), self._module()))
        if args and id(args[0]) in self._counts:
            known = self._counted(name, args)
            if known is not None:
                return known
        try:
            if name in _READS:
                return self._read(func, name, args, kwargs or {})
            if name in _GIVES_AWAY:
                raise value_read(name)
            if name in _FACTORIES:
                _refuse_array(args, kwargs or {})
            try:
                new_args, new_kwargs = self.swap(args), self.swap(kwargs or {})
            except CaptureError:
                if name not in _METADATA:
                    raise
                new_args, new_kwargs = args, kwargs or {}
            if name == "ctc_loss" and traits_of(self._device).computes_in_capture:
                new_args, new_kwargs = _with_lengths(new_args, new_kwargs)
            self._functions.append((name, _autocast_now(self._device.type)))
            try:
                return func(*new_args, **new_kwargs)
            finally:
                self._functions.pop()
        except CaptureError as error:
            raise self._refused(error) from error.__cause__
        except Exception as error:
            known = translated(error, name)
            if known is None:
                raise
            raise self._refused(known) from error

    def _read(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of reading a tensor's known value."""
        value = None if name == "data_ptr" or args[0].requires_grad else self.known.value(args[0])
        if value is None:
            raise value_read(name)
        with without_modes():
            found = func(value, *args[1:], **kwargs)
        return found if isinstance(found, str) else self.known.lend(args[0], found)

    def _counted(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Answer whether a count is zero, and follow changes of it; None for any other question."""
        key, number = id(args[0]), args[1] if len(args) > 1 else None
        if name in _ADDITIONS and type(number) is int:
            self._counts[key] += number
        elif name.endswith("_") and not name.startswith("__"):
            del self._counts[key]
        elif name in _COMPARISONS and type(number) is int and number == 0:
            return _COMPARISONS[name](self._counts[key], 0)
        return None

    def _refused(self, error: CaptureError) -> CaptureError:
        self.first_refusal = self.first_refusal or error
        return error

    @contextlib.contextmanager
    def everywhere(self, provenance: Provenance) -> Iterator[None]:
        """Cover entries into PyTorch that a function mode does not see.

        The autograd engine sets the mode aside for hooks, custom backwards and recomputed forwards; ``Function.apply``,
        ``from_numpy`` and ``tolist`` are not overridable.
        """
        self._module = lambda: provenance.here()[0]
        here = capturing_thread()

        def run_backward(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not here():
                return engine(*args, **kwargs)
            with self, provenance.in_backward():
                return engine(*self.swap(args), **self.swap(kwargs))

        apply = class_method(torch.autograd.Function, "apply")

        def substituted_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            return apply(cls, *self.swap(args), **self.swap(kwargs))

        with contextlib.ExitStack() as stack:
            stack.enter_context(around_engine(run_backward))
            stack.enter_context(patched(torch.autograd.Function, "apply", classmethod(substituted_apply)))
            for owner, name, replacement in self._ways_to_values():
                stack.enter_context(patched(owner, name, replacement))
            for owner, name in TRANSFORM_ENTRY_POINTS:
                stack.enter_context(patched(owner, name, self._swapping(getattr(owner, name))))
            # Gradient clipping takes another path for tensor types that it does not know: not the eager one.
            FOREACH_TENSOR_TYPES.append(FakeTensor)
            stack.callback(FOREACH_TENSOR_TYPES.remove, FakeTensor)
            yield

    def _ways_to_values(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield functions that get at values, and what replaces them: it refuses, or answers with a known value."""

        def refusing(error: Callable[[], CaptureError]) -> Callable[..., Any]:
            def refuse(*_: Any, **__: Any) -> Any:
                raise self._refused(error())

            return refuse

        as_list = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            # Where no mode is on, it is a known value that is read.
            value = tensor if replayable() else self.known.value(tensor)
            if value is None:
                raise self._refused(value_read("tolist"))
            with without_modes():
                return as_list(value)

        def of_storage(name: str) -> Callable[..., Any]:
            original = getattr(torch.UntypedStorage, name)

            def call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
                # That of a tensor without contents, and it is not PyTorch that makes one.
                if storage.device.type == "meta" and not called_from(*_OF_FAKES):
                    raise self._refused(value_read("untyped_storage"))
                return original(storage, *args, **kwargs)

            return call

        scale = torch.amp.GradScaler.scale

        def scaled(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled():
                raise self._refused(grad_scaler())
            return scale(scaler, outputs)

        yield torch, "from_numpy", refusing(_array_refusal)
        for owner in (torch, torch.utils.dlpack):
            yield owner, "to_dlpack", refusing(partial(value_read, "__dlpack__"))
        for name in _OF_STORAGES:
            if hasattr(torch.UntypedStorage, name):
                yield torch.UntypedStorage, name, of_storage(name)
        for kind in (torch.Tensor, FakeTensor):
            yield kind, "tolist", tolist
        yield torch.amp.GradScaler, "scale", scaled


def average_counts(models: Sequence[nn.Module]) -> dict[int, int]:
    """Return how many models each ``AveragedModel`` has averaged, by the id of its count.

    It copies the first and averages the others, so whether its count is zero decides which ops there are. A count
    without a value is taken as one.
    """
    return {
        id(module.n_averaged): 1 if module.n_averaged.is_meta else int(module.n_averaged)
        for model in models
        for module in model.modules()
        if isinstance(module, AveragedModel)
    }


def _with_lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert lists of lengths for ``ctc_loss`` to tensors: it would make and fill one below dispatch."""

    def tensor(value: Any) -> Any:
        return torch.tensor(value, dtype=torch.int64) if isinstance(value, list | tuple) else value

    named = {name: tensor(kwargs[name]) for name in ("input_lengths", "target_lengths") if name in kwargs}
    return (*args[:2], *map(tensor, args[2:4]), *args[4:]), kwargs | named


def _autocast_now(device_type: str) -> tuple[str, torch.dtype] | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return device_type, torch.get_autocast_dtype(device_type)


def _refuse_array(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for item in (*args[:1], kwargs.get("data"), kwargs.get("obj")):
        if hasattr(item, "__array_interface__") and getattr(item, "ndim", 0) > 0:
            raise _array_refusal()


def _array_refusal() -> CaptureError:
    return refusal(
        "the step makes a tensor from a NumPy array",
        "the contents of the array would be frozen into the step",
        "make it before the step and pass it as an argument, or register it as a buffer",
    )


_log = logging.getLogger(__name__)


@contextlib.contextmanager
def uncompiled(models: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled functions and modules as eager code, and report which modules that concerns.

    A compiled function that is no module cannot be detected, so it is not reported.
    """
    names = [
        f"'{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        for model in models
        for name, module in model.named_modules()
        if is_compiled(module)
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _log.warning(
            "%s%s: wrapped by torch.compile; in this step it runs as plain PyTorch, with the numbers of plain PyTorch",
            names[0],
            more,
        )
    with without_compiled_code():
        yield
