"""Operators that run inner graphs, as modules, because values decide at run time which graph runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outofcore.onnx.operators.registry import Unsupported, axis_of, operator

_NO_ITERATION = "it runs 0 times, so its collected outputs have no shape"


class ControlNode(nn.Module):
    """A node that runs inner graphs; ``forward`` takes a device, inputs, and the outer values of each graph."""

    def __init__(self, graphs: dict[str, Any], attributes: dict[str, Any], output_count: int) -> None:
        super().__init__()
        self.attributes = attributes
        self.output_count = output_count
        for name, graph in graphs.items():
            self.add_module(name, graph)

    def run(self, name: str, values: list[Any], outer: dict[str, list[Any]], device: torch.device) -> list[Any]:
        return self.get_submodule(name).forward(*values, *outer[name], device)


@operator("If", read=(0,), pure=False, many=True)
class IfNode(ControlNode):
    def forward(self, device: torch.device, inputs: list[Any], outer: dict[str, list[Any]]) -> list[Any]:
        ((condition,),) = inputs
        return self.run("then_branch" if condition else "else_branch", [], outer, device)


@operator("Loop", read=(0, 1), pure=False, many=True)
class LoopNode(ControlNode):
    """Runs a graph a number of times, or until its first output is false."""

    def forward(self, device: torch.device, inputs: list[Any], outer: dict[str, list[Any]]) -> list[Any]:
        limit, condition, *values = inputs
        goes_on = condition is None or bool(condition[0])
        scanned: list[list[Tensor]] = []
        turn = 0
        while goes_on and (limit is None or turn < limit[0]):
            iteration, condition_tensor = torch.tensor(turn), torch.tensor(goes_on)
            results = self.run("body", [iteration, condition_tensor, *values], outer, device)
            goes_on, values = bool(results[0].item()), results[1 : 1 + len(values)]
            scanned.append(results[1 + len(values) :])
            turn += 1
        if not turn and self.output_count > len(values):
            raise Unsupported(_NO_ITERATION)
        return [*values, *(torch.stack(parts) for parts in zip(*scanned, strict=True))]


@operator("Scan", pure=False, many=True, since=9)
class ScanNode(ControlNode):
    """Runs a graph once for each slice of its inputs along an axis, and stacks the outputs."""

    def forward(self, device: torch.device, inputs: list[Any], outer: dict[str, list[Any]]) -> list[Any]:
        attributes = self.attributes
        count: int = attributes["num_scan_inputs"]
        states = inputs[: len(inputs) - count]
        collected_count = self.output_count - len(states)
        axes, turned = (
            attributes.get("scan_input_axes", (0,) * count),
            attributes.get("scan_input_directions", (0,) * count),
        )
        parts = [x.unbind(axis_of(axis, x.dim())) for x, axis in zip(inputs[len(states) :], axes, strict=True)]
        parts = [items[::-1] if back else items for items, back in zip(parts, turned, strict=True)]
        collected: list[list[Tensor]] = []
        for now in zip(*parts, strict=True):
            results = self.run("body", [*states, *now], outer, device)
            states = results[: len(states)]
            collected.append(results[len(states) :])
        if not collected and collected_count:
            raise Unsupported(_NO_ITERATION)
        axes, turned = (
            attributes.get("scan_output_axes", (0,) * collected_count),
            attributes.get("scan_output_directions", (0,) * collected_count),
        )
        stacked = [
            torch.stack(items[::-1] if back else items, axis)
            for items, axis, back in zip(zip(*collected, strict=True), axes, turned, strict=True)
        ]
        return [*states, *stacked]
