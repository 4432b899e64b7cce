"""Operators that run graphs of their own."""

from __future__ import annotations

from typing import Any

import torch

from outofcore.onnx.operators.registry import Call, axis_of, known, number, operator

_MOST_TURNS = 1 << 62


@operator("If", read=(0,), pure=False)
def branch(call: Call, condition: torch.Tensor) -> Any:
    name = "then_branch" if bool(number(condition)) else "else_branch"
    return tuple(call.within(call.get(name), []))


@operator("Loop", read=(0, 1), pure=False)
def loop(call: Call, most: torch.Tensor | None, condition: torch.Tensor | None, *carried: Any) -> Any:
    body = call.get("body")
    limit = _MOST_TURNS if most is None else int(number(most))
    goes = True if condition is None else bool(number(condition))
    values = list(carried)
    scanned: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(values))]
    turn = 0
    while turn < limit and goes:
        found = call.within(body, [known(turn, torch.int64), known(goes, torch.bool), *values])
        goes = bool(number(found[0]))
        values = found[1 : 1 + len(values)]
        for items, item in zip(scanned, found[1 + len(values) :], strict=True):
            items.append(item)
        turn += 1
    if not turn and scanned:
        raise call.refuse("it runs no turn, so what it collects has no shape")
    return (*values, *(torch.stack(items) for items in scanned))


@operator("Scan", pure=False, since=9)
def scan(call: Call, *inputs: torch.Tensor) -> Any:
    body, count = call.get("body"), call.get("num_scan_inputs")
    states, given = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    made = len(body.outputs) - len(states)
    axes = call.get("scan_input_axes", (0,) * count)
    turned = call.get("scan_input_directions", (0,) * count)
    out_axes = call.get("scan_output_axes", (0,) * made)
    out_turned = call.get("scan_output_directions", (0,) * made)
    parts = [list(x.unbind(axis_of(axis, x.dim()))) for x, axis in zip(given, axes, strict=True)]
    parts = [items[::-1] if back else items for items, back in zip(parts, turned, strict=True)]
    collected: list[list[torch.Tensor]] = [[] for _ in range(made)]
    for now in zip(*parts, strict=True):
        found = call.within(body, [*states, *now])
        states = found[: len(states)]
        for items, item in zip(collected, found[len(states) :], strict=True):
            items.append(item)
    if not parts[0] and made:
        raise call.refuse("it runs no turn, so what it collects has no shape")
    stacked = [
        torch.stack(items[::-1] if back else items, axis_of(axis, items[0].dim() + 1))
        for items, axis, back in zip(collected, out_axes, out_turned, strict=True)
    ]
    return (*states, *stacked)
