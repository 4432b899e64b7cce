"""Which state tensors an optimizer keeps for a parameter, found out without memory by letting it step on fakes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from outofcore._torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode
from outofcore.capture.captured import CPU
from outofcore.capture.optimizers import as_leaf, run_shadow
from outofcore.errors import CaptureError, OutOfCoreError


@dataclass(frozen=True)
class TensorShape:
    """All of a tensor but its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The least bytes of a storage that can hold it."""
        if 0 in self.shape:
            return 0
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return extent * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor like this one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def shape_of(tensor: torch.Tensor) -> TensorShape:
    """All of a tensor but its bytes."""
    return TensorShape(tensor.dtype, tuple(tensor.shape), tensor.stride())


class _PretendValues(TorchDispatchMode):
    """Answers every read of a fake tensor's value with some number, and leaves fused updates, which only write, undone.

    An optimizer reads its step count to compute factors; on what state it keeps they have no influence.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            dtype = args[0].dtype
            return True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 2
        if name == "aten::equal":
            return True
        if name.startswith("aten::_fused_") and name.endswith("_"):
            return None
        return func(*args, **(kwargs or {}))


class StateLayouts:
    """Finds out the state of one optimizer, once for all parameters that are alike.

    Args:
        optimizer: the user's.
        device: where the step runs; parameters are taken to be there.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device = CPU) -> None:
        self._optimizer = optimizer
        self._device = device
        self._known: dict[Any, list[dict[str, TensorShape]]] = {}

    def learn(
        self, members: Sequence[tuple[int, torch.Tensor]], grads: Sequence[TensorShape | None]
    ) -> list[dict[str, TensorShape]]:
        """The state tensors, by name, that two steps leave for each member (group index, the user's parameter).

        State that already exists is taken as it is. State on another device than the parameter is left out.

        Raises:
            CaptureError: the optimizer keeps tensors where the graph cannot see them, or its step does not
                run on fakes.
        """
        entries = [self._optimizer.state.get(parameter, {}) for _, parameter in members]
        alike = tuple(
            (group, shape_of(parameter), parameter.device, grad, tuple((n, _plain(v)) for n, v in own.items()))
            for (group, parameter), grad, own in zip(members, grads, entries, strict=True)
        )
        if alike not in self._known:
            self._known[alike] = self._rehearse(members, grads, entries)
        return self._known[alike]

    def _rehearse(
        self,
        members: Sequence[tuple[int, torch.Tensor]],
        grads: Sequence[TensorShape | None],
        entries: Sequence[dict[str, Any]],
    ) -> list[dict[str, TensorShape]]:
        optimizer = self._optimizer
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _PretendValues():
            leaves: list[tuple[int, torch.Tensor]] = []
            for (group, parameter), grad in zip(members, grads, strict=True):
                fake = shape_of(parameter).empty(self._device)
                leaves.append((group, as_leaf(fake, grad.empty(self._device) if grad else None)))
            state = [
                {name: self._faked(value, mode, parameter, group) for name, value in own.items()}
                for own, (group, parameter) in zip(entries, members, strict=True)
            ]
            try:
                # State may be made at the first step or, by some, at the second.
                shadow = run_shadow(optimizer, leaves, state)
                state = [dict(shadow.state.get(leaf) or {}) for _, leaf in leaves]
                shadow = run_shadow(optimizer, leaves, state)
                state = [dict(shadow.state.get(leaf) or {}) for _, leaf in leaves]
            except OutOfCoreError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"the step of {type(optimizer).__name__} cannot be tried on tensors without contents: {error}; use "
                    "an optimizer of torch.optim, or let it take one step before the training step is compiled"
                ) from error
        self._check_hidden(shadow, [leaf for _, leaf in leaves])
        return [self._tensors(own) for own in state]

    def _faked(self, value: Any, mode: FakeTensorMode, parameter: torch.Tensor, group: int) -> Any:
        if isinstance(value, torch.Tensor):
            # Moments go where their parameter goes. So does a step count, unless the optimizer wants it on the CPU.
            settings = self._optimizer.param_groups[group]
            follows = value.ndim > 0 or bool(settings.get("fused") or settings.get("capturable"))
            moves = value.device == parameter.device and (follows or value.device == self._device)
            with mode:
                return shape_of(value).empty(self._device if moves else value.device)
        return copy.deepcopy(value)

    def _tensors(self, entries: dict[str, Any]) -> dict[str, TensorShape]:
        found: dict[str, TensorShape] = {}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                if not isinstance(name, str):
                    raise self._hidden(f"under the key {name!r}, which is not text,")
                if value.device == self._device:
                    found[name] = shape_of(value)
            elif _has_tensor(value):
                raise self._hidden(f"inside a {type(value).__name__} in its state {name!r}")
        return found

    def _check_hidden(self, shadow: Optimizer, leaves: Sequence[torch.Tensor]) -> None:
        for name, value in shadow.__dict__.items():
            if name not in {"state", "param_groups"} and _has_fake(value):
                raise self._hidden(f"in its attribute {name!r}")
        for group in shadow.param_groups:
            for name, value in group.items():
                if name != "params" and _has_fake(value):
                    raise self._hidden(f"in its setting {name!r}")
        known = {id(leaf) for leaf in leaves}
        for key, value in shadow.state.items():
            if id(key) not in known and _has_fake(value):
                raise self._hidden("in its state, but not of one of its parameters")

    def _hidden(self, where: str) -> CaptureError:
        return CaptureError(
            f"{type(self._optimizer).__name__} keeps a tensor {where} where its bytes cannot be planned: state has to "
            "be in optimizer.state[parameter][name]; keep it there, or use another optimizer"
        )


def _plain(value: Any) -> Any:
    """What of a state entry bears on the layout."""
    return (shape_of(value), value.device) if isinstance(value, torch.Tensor) else type(value)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _has_fake(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_fake(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_has_fake(item) for item in value)
    return isinstance(value, FakeTensor)
