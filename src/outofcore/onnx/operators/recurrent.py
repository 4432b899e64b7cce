"""Recurrent layers, step by step: RNN, GRU and LSTM with every activation and direction of the standard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import Refused, operator

# By name in lower case: given alpha and beta, and their defaults; None: it takes none.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], float | None, float | None]] = {
    "relu": (lambda x, a, b: torch.relu(x), None, None),
    "tanh": (lambda x, a, b: torch.tanh(x), None, None),
    "sigmoid": (lambda x, a, b: torch.sigmoid(x), None, None),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: F.leaky_relu(x, a), 0.01, None),
    "thresholdedrelu": (lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)), 1.0, None),
    "scaledtanh": (lambda x, a, b: a * torch.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: torch.clamp(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: F.elu(x, a), 1.0, None),
    "softsign": (lambda x, a, b: F.softsign(x), None, None),
    "softplus": (lambda x, a, b: F.softplus(x), None, None),
}
# How many activations a direction has, and which hold without others.
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_States = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Direction:
    """What one direction computes with: its own weights, and what is asked of the node."""

    r: Tensor
    bias: Tensor | None  # of the state
    peepholes: Tensor | None
    activations: list[Callable[[Tensor], Tensor]]
    clip: float | None
    is_variant: bool  # linear_before_reset of a GRU, input_forget of an LSTM

    def activated(self, place: int, x: Tensor) -> Tensor:
        """Limit numbers and apply an activation to them."""
        return self.activations[place](x if self.clip is None else torch.clamp(x, -self.clip, self.clip))


def _rnn(own: _Direction, x: Tensor, now: _States) -> _States:
    return (own.activated(0, x + F.linear(now[0], own.r, own.bias)),)


def _gru(own: _Direction, x: Tensor, now: _States) -> _States:
    (h,) = now
    size = h.shape[-1]
    lead, inner = (None, None) if own.bias is None else (own.bias[: 2 * size], own.bias[2 * size :])
    gates = F.linear(h, own.r[: 2 * size], lead) + x[:, : 2 * size]
    z, reset = own.activated(0, gates).split(size, -1)
    late, w = own.is_variant, own.r[2 * size :]
    past = reset * F.linear(h, w, inner) if late else F.linear(reset * h, w, inner)
    return ((1 - z) * own.activated(1, x[:, 2 * size :] + past) + z * h,)


def _lstm(own: _Direction, x: Tensor, now: _States) -> _States:
    h, c = now
    inner, outer, forget, new = (x + F.linear(h, own.r, own.bias)).chunk(4, -1)
    peeps = None if own.peepholes is None else own.peepholes.chunk(3)
    if peeps is not None:
        inner, forget = inner + peeps[0] * c, forget + peeps[2] * c
    i = own.activated(0, inner)
    kept = 1 - i if own.is_variant else own.activated(0, forget)
    after = kept * c + i * own.activated(1, new)
    if peeps is not None:
        outer = outer + peeps[1] * after
    return own.activated(0, outer) * own.activations[2](after), after


_STEPS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


def _activations(names: tuple[str, ...], alpha: list[float], beta: list[float]) -> list[Callable[[Tensor], Tensor]]:
    found: list[Callable[[Tensor], Tensor]] = []
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            raise Refused(f"the activation {name!r} is not known")
        function, a, b = _ACTIVATIONS[name.lower()]
        a = alpha.pop(0) if alpha and a is not None else a or 0.0
        b = beta.pop(0) if beta and b is not None else b or 0.0
        found.append(lambda x, f=function, a=a, b=b: f(x, a, b))
    return found


@operator("RNN", "GRU", "LSTM", many=True)
def recurrent(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    state: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    op: str,
    activations: tuple[str, ...] = (),
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    clip: float | None = None,
    direction: str = "forward",
    input_forget: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    """Run all directions of a layer.

    Args:
        x: (time, batch, inputs), or with layout=1 the batch first.
        lengths: how long each sequence of the batch is.
        state, cell: (directions, batch, size) each, or None for zeros.
    """
    count, hidden, each = w.shape[0], r.shape[-1], len(_DEFAULTS[op])
    if count != (2 if direction == "bidirectional" else 1):
        raise Refused(f"it runs {direction} and has weights for {count} directions")
    if w.shape[1] != {"RNN": 1, "GRU": 3, "LSTM": 4}[op] * hidden:
        raise Refused(f"weights of {w.shape[1]} rows for a state of {hidden}")
    functions = _activations(activations or _DEFAULTS[op] * count, list(activation_alpha), list(activation_beta))
    if len(functions) != each * count:
        raise Refused(f"it has {len(functions)} activations, and {each * count} are needed")
    states = [state, cell] if op == "LSTM" else [state]
    if layout:
        x = x.transpose(0, 1)
        states = [None if one is None else one.transpose(0, 1) for one in states]
    outputs: list[Tensor] = []
    ends: list[_States] = []
    for place in range(count):
        bias, of_state = (None, None) if b is None else b[place].reshape(2, -1)
        own = _Direction(
            r[place],
            of_state,
            None if peepholes is None else peepholes[place],
            functions[place * each : (place + 1) * each],
            clip,
            bool(input_forget or linear_before_reset),
        )
        now = tuple(x.new_zeros(x.shape[1], hidden) if one is None else one[place] for one in states)
        projected = F.linear(x, w[place], bias)
        made: dict[int, Tensor] = {}
        times = range(x.shape[0])
        for time in reversed(times) if direction == "reverse" or place == 1 else times:
            new = _STEPS[op](own, projected[time], now)
            made[time] = new[0]
            if lengths is not None:
                lasts = (time < lengths).reshape(-1, 1)
                made[time] = torch.where(lasts, new[0], torch.zeros_like(new[0]))
                new = tuple(torch.where(lasts, after, before) for after, before in zip(new, now, strict=True))
            now = new
        outputs.append(torch.stack([made[time] for time in times]))
        ends.append(now)
    y = torch.stack(outputs, 1)
    last = [torch.stack(list(parts)) for parts in zip(*ends, strict=True)]
    if layout:
        return y.permute(2, 0, 1, 3), *(one.transpose(0, 1) for one in last)
    return y, *last
