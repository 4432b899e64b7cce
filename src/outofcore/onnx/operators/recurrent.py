"""Recurrent layers, step by step: RNN, GRU and LSTM with every activation and direction of the standard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outofcore.errors import InputError
from outofcore.onnx.operators.registry import Call, operator

_Activation = Callable[[torch.Tensor], torch.Tensor]
# By name in lower case, given alpha and beta.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "relu": lambda x, a, b: torch.relu(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "affine": lambda x, a, b: a * x + b,
    "leakyrelu": lambda x, a, b: F.leaky_relu(x, a),
    "thresholdedrelu": lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "hardsigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "elu": lambda x, a, b: F.elu(x, a),
    "softsign": lambda x, a, b: F.softsign(x),
    "softplus": lambda x, a, b: F.softplus(x),
}
# Which of them take alpha, beta, and what holds without.
_NUMBERS = {
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
}


@dataclass(frozen=True)
class _Direction:
    """What one direction computes with: its own weights."""

    w: torch.Tensor
    r: torch.Tensor
    bias: torch.Tensor | None  # of the input and of the state, one after the other
    peepholes: torch.Tensor | None
    activations: list[_Activation]


_Step = Callable[[_Direction, torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def _activations(call: Call, defaults: list[str], directions: int) -> list[_Activation]:
    names = [name.lower() for name in call.get("activations", tuple(defaults * directions))]
    alphas, betas = list(call.get("activation_alpha", ())), list(call.get("activation_beta", ()))
    found: list[_Activation] = []
    for name in names:
        if name not in _ACTIVATIONS:
            raise call.refuse(f"the activation {name!r} is not known")
        takes = _NUMBERS.get(name, (None, None))
        alpha = (alphas.pop(0) if alphas else takes[0]) if takes[0] is not None else 0.0
        beta = (betas.pop(0) if betas else takes[1]) if takes[1] is not None else 0.0
        function = _ACTIVATIONS[name]
        found.append(lambda x, f=function, a=alpha, b=beta: f(x, a, b))
    if len(found) != len(defaults) * directions:
        raise call.refuse(f"it has {len(found)} activations, and {len(defaults) * directions} are needed")
    return found


def _run(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor | None,
    lengths: torch.Tensor | None,
    states: list[torch.Tensor | None],
    peepholes: torch.Tensor | None,
    defaults: list[str],
    step: _Step,
) -> Any:
    """All directions of a layer.

    Args:
        x: (time, batch, inputs), or with layout=1 the batch first.
        lengths: how long each sequence of the batch is.
        states: (directions, batch, size) each, or None for zeros.
    """
    batch_first = bool(call.get("layout", 0))
    direction = call.get("direction", "forward")
    count = w.shape[0]
    if count != (2 if direction == "bidirectional" else 1):
        raise call.refuse(f"it runs {direction} and has weights for {count} directions")
    if batch_first:
        x = x.transpose(0, 1)
        states = [None if one is None else one.transpose(0, 1) for one in states]
    activations = _activations(call, defaults, count)
    each = len(defaults)
    hidden = r.shape[-1]
    outputs: list[torch.Tensor] = []
    ends: list[tuple[torch.Tensor, ...]] = []
    for place in range(count):
        backwards = direction == "reverse" or place == 1
        own = _Direction(
            w[place],
            r[place],
            None if b is None else b[place],
            None if peepholes is None else peepholes[place],
            activations[place * each : (place + 1) * each],
        )
        now = tuple(x.new_zeros(x.shape[1], hidden) if state is None else state[place] for state in states)
        bias = None if own.bias is None else own.bias.reshape(2, -1)[0]
        projected = F.linear(x, own.w, bias)
        made: list[torch.Tensor | None] = [None] * x.shape[0]
        for time in reversed(range(x.shape[0])) if backwards else range(x.shape[0]):
            new = step(own, projected[time], now)
            if lengths is None:
                made[time], now = new[0], new
                continue
            lasts = (time < lengths).reshape(-1, 1)
            made[time] = torch.where(lasts, new[0], torch.zeros_like(new[0]))
            now = tuple(torch.where(lasts, after, before) for after, before in zip(new, now, strict=True))
        outputs.append(torch.stack([one for one in made if one is not None]))
        ends.append(now)
    y = torch.stack(outputs, 1)
    last = [torch.stack([end[place] for end in ends]) for place in range(len(states))]
    if batch_first:
        y = y.permute(2, 0, 1, 3)
        last = [one.transpose(0, 1) for one in last]
    return (y, *last)


def _limited(call: Call, x: torch.Tensor) -> torch.Tensor:
    limit = call.get("clip")
    return x if limit is None else torch.clamp(x, -limit, limit)


def _recurrent_bias(own: _Direction) -> torch.Tensor | None:
    return None if own.bias is None else own.bias.reshape(2, -1)[1]


@operator("RNN")
def rnn(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
) -> Any:
    def step(own: _Direction, x: torch.Tensor, now: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (own.activations[0](_limited(call, x + F.linear(now[0], own.r, _recurrent_bias(own)))),)

    return _run(call, x, w, r, b, lengths, [state], None, ["Tanh"], step)


@operator("GRU")
def gru(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
) -> Any:
    late = bool(call.get("linear_before_reset", 0))

    def step(own: _Direction, x: torch.Tensor, now: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        h = now[0]
        size = h.shape[-1]
        bias = _recurrent_bias(own)
        gates = F.linear(h, own.r[: 2 * size], None if bias is None else bias[: 2 * size]) + x[:, : 2 * size]
        z, reset = own.activations[0](_limited(call, gates)).split(size, -1)
        inner = None if bias is None else bias[2 * size :]
        past = reset * F.linear(h, own.r[2 * size :], inner) if late else F.linear(reset * h, own.r[2 * size :], inner)
        new = own.activations[1](_limited(call, x[:, 2 * size :] + past))
        return ((1 - z) * new + z * h,)

    return _run(call, x, w, r, b, lengths, [state], None, ["Sigmoid", "Tanh"], step)


@operator("LSTM")
def lstm(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    peepholes: torch.Tensor | None = None,
) -> Any:
    coupled = bool(call.get("input_forget", 0))

    def step(own: _Direction, x: torch.Tensor, now: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        h, c = now
        f, g, k = own.activations
        inner, outer, forget, new = (x + F.linear(h, own.r, _recurrent_bias(own))).chunk(4, -1)
        peeps: Any = None if own.peepholes is None else own.peepholes.chunk(3)
        if peeps is not None:
            inner, forget = inner + peeps[0] * c, forget + peeps[2] * c
        i = f(_limited(call, inner))
        kept = 1 - i if coupled else f(_limited(call, forget))
        after = kept * c + i * g(_limited(call, new))
        if peeps is not None:
            outer = outer + peeps[1] * after
        return f(_limited(call, outer)) * k(after), after

    if w.shape[1] != 4 * r.shape[2]:
        raise InputError(f"{call.node}: weights of {w.shape[1]} rows for a state of {r.shape[2]}")
    return _run(call, x, w, r, b, lengths, [state, cell], peepholes, ["Sigmoid", "Tanh", "Tanh"], step)
