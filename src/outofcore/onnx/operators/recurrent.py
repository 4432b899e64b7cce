"""RNN, GRU and LSTM, computed step by step, with all activations and directions of the standard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.onnx.operators.registry import Unsupported, operator

# By lower-case name: a function of x, alpha and beta, and the defaults of both; None: unused.
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
_States = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Direction:
    r: Tensor
    bias: Tensor | None  # of the state
    peepholes: Tensor | None
    activations: list[Callable[[Tensor], Tensor]]
    clip: float | None
    is_variant: bool  # linear_before_reset of a GRU, input_forget of an LSTM

    def activate(self, place: int, x: Tensor) -> Tensor:
        return self.activations[place](x if self.clip is None else torch.clamp(x, -self.clip, self.clip))

    def run(
        self, cell: _LayerType, x: Tensor, states: _States, lengths: Tensor | None, *, backwards: bool
    ) -> tuple[Tensor, _States]:
        """Run a layer in one direction; return the outputs, zero beyond each sequence's length, and the last states."""
        outputs: dict[int, Tensor] = {}
        times = range(x.shape[0])
        for time in reversed(times) if backwards else times:
            new = cell.step(self, x[time], states)
            outputs[time] = new[0]
            if lengths is not None:
                lasts = (time < lengths).reshape(-1, 1)
                outputs[time] = torch.where(lasts, new[0], torch.zeros_like(new[0]))
                new = tuple(torch.where(lasts, after, before) for after, before in zip(new, states, strict=True))
            states = new
        return torch.stack([outputs[time] for time in times]), states


def _rnn(direction: _Direction, x: Tensor, states: _States) -> _States:
    return (direction.activate(0, x + F.linear(states[0], direction.r, direction.bias)),)


def _gru(direction: _Direction, x: Tensor, states: _States) -> _States:
    """Return a GRU's states after one time step; ``x`` is the input, already multiplied by its weights."""
    (h,) = states
    size = h.shape[-1]
    lead, inner = (None, None) if direction.bias is None else (direction.bias[: 2 * size], direction.bias[2 * size :])
    gates = F.linear(h, direction.r[: 2 * size], lead) + x[:, : 2 * size]
    z, reset = direction.activate(0, gates).split(size, -1)
    late, w = direction.is_variant, direction.r[2 * size :]
    past = reset * F.linear(h, w, inner) if late else F.linear(reset * h, w, inner)
    return ((1 - z) * direction.activate(1, x[:, 2 * size :] + past) + z * h,)


def _lstm(direction: _Direction, x: Tensor, states: _States) -> _States:
    """Return an LSTM's states after one time step; ``x`` is the input, already multiplied by its weights."""
    h, c = states
    inner, outer, forget, new = (x + F.linear(h, direction.r, direction.bias)).chunk(4, -1)
    peeps = None if direction.peepholes is None else direction.peepholes.chunk(3)
    if peeps is not None:
        inner, forget = inner + peeps[0] * c, forget + peeps[2] * c
    i = direction.activate(0, inner)
    forget_gate = 1 - i if direction.is_variant else direction.activate(0, forget)
    after = forget_gate * c + i * direction.activate(1, new)
    if peeps is not None:
        outer = outer + peeps[1] * after
    return direction.activate(0, outer) * direction.activations[2](after), after


@dataclass(frozen=True)
class _LayerType:
    step: Callable[[_Direction, Tensor, _States], _States]
    gates: int  # stacked along the rows of the weights
    activations: tuple[str, ...]  # by default


_CELLS = {
    "RNN": _LayerType(_rnn, 1, ("Tanh",)),
    "GRU": _LayerType(_gru, 3, ("Sigmoid", "Tanh")),
    "LSTM": _LayerType(_lstm, 4, ("Sigmoid", "Tanh", "Tanh")),
}


@dataclass(frozen=True)
class RecurrentAttributes:
    op: str
    activations: tuple[str, ...] = ()
    activation_alpha: tuple[float, ...] = ()
    activation_beta: tuple[float, ...] = ()
    clip: float | None = None
    direction: str = "forward"
    input_forget: int = 0
    layout: int = 0
    linear_before_reset: int = 0

    def activations_by_direction(self, count: int) -> list[list[Callable[[Tensor], Tensor]]]:
        """Return the activation functions of each of ``count`` directions."""
        defaults = _CELLS[self.op].activations
        alpha, beta = list(self.activation_alpha), list(self.activation_beta)
        functions: list[Callable[[Tensor], Tensor]] = []
        for name in self.activations or defaults * count:
            if name.lower() not in _ACTIVATIONS:
                raise Unsupported(f"the activation {name!r} is unknown")
            function, a, b = _ACTIVATIONS[name.lower()]
            a = alpha.pop(0) if alpha and a is not None else a or 0.0
            b = beta.pop(0) if beta and b is not None else b or 0.0
            functions.append(lambda x, f=function, a=a, b=b: f(x, a, b))
        per_direction = len(defaults)
        if len(functions) != per_direction * count:
            raise Unsupported(f"it has {len(functions)} activations, and its directions need {per_direction * count}")
        return [functions[place * per_direction : (place + 1) * per_direction] for place in range(count)]


@operator("RNN", "GRU", "LSTM", many=True, attributes=RecurrentAttributes)
def recurrent(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    *states: Tensor | None,
    asked: RecurrentAttributes,
) -> tuple[Tensor, ...]:
    """Return a layer's outputs and last states; ``states``: initial hidden and cell state, and peephole weights."""
    cell, count, hidden = _CELLS[asked.op], w.shape[0], r.shape[-1]
    if count != (2 if asked.direction == "bidirectional" else 1):
        raise Unsupported(f"it runs {asked.direction} and has weights for {count} directions")
    if w.shape[1] != cell.gates * hidden:
        raise Unsupported(
            f"its weights have {w.shape[1]} rows, not {cell.gates * hidden} ({cell.gates} gates x {hidden})"
        )
    functions = asked.activations_by_direction(count)
    first, second, peepholes = (*states, None, None, None)[:3]
    start_states = [first, second] if asked.op == "LSTM" else [first]
    if asked.layout:
        x = x.transpose(0, 1)
        start_states = [None if state is None else state.transpose(0, 1) for state in start_states]
    outputs: list[Tensor] = []
    final_states: list[_States] = []
    for place in range(count):
        bias, of_state = (None, None) if b is None else b[place].reshape(2, -1)
        peeps = None if peepholes is None else peepholes[place]
        is_variant = bool(asked.input_forget or asked.linear_before_reset)
        direction = _Direction(r[place], of_state, peeps, functions[place], asked.clip, is_variant)
        now = tuple(x.new_zeros(x.shape[1], hidden) if state is None else state[place] for state in start_states)
        backwards = asked.direction == "reverse" or place == 1
        y, end = direction.run(cell, F.linear(x, w[place], bias), now, lengths, backwards=backwards)
        outputs.append(y)
        final_states.append(end)
    y = torch.stack(outputs, 1)
    last = [torch.stack(list(parts)) for parts in zip(*final_states, strict=True)]
    if asked.layout:
        return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last)
    return y, *last
