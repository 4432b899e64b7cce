"""Predict the steps of published jobs of other systems on the same card.

Each job is captured on meta tensors and planned within the other system's memory, in its own process. Op costs are a
roofline over a preset's peak rates, and links carry both directions concurrently; see ``outofcore.presets``. An
optimizer update is one op that reads and writes each of its bytes once.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_rows import GIB, PREDICTIONS, Decoder, Job, capture_with_costs, room_of
from torch import Tensor, nn

from outofcore import planning, presets
from outofcore.costs import Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.planning import QUICK, Planned
from outofcore.presets import Number
from outofcore.program import CopyIn, CopyOut, Run
from outofcore.report import step_report
from outofcore.report.waits import time_spent
from outofcore.simulator import simulate
from outofcore.units import format_bytes
from outofcore.zoo import workload

RESULTS = PREDICTIONS.with_name("gpu-rivals.json")
TABLE = RESULTS.with_suffix(".md")
_LIMIT_S = 900
_RANK = 16
# Steps with more ops are planned by a quick search.
_LONG_OPS = 2000
# Smallest share of the step that is worth optimizing.
_SIGNIFICANT_SHARE = 0.05
# Measured by a GPU visit: ResNet-50 in core on an H200, bf16, NCHW images, over the roofline's 87.8 ms.
RESNET_SLOWDOWN = 251.9 / 87.8
# Name prefixes of compute-bound ops; the others are bound by device memory.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_dot_product", "aten.convolution")


@dataclass(frozen=True)
class Rival:
    """A job with another system's published results.

    Attributes:
        model: the shape; ``kind`` is "decoder", or a workload of the zoo.
        samples: samples per step.
        device: a preset.
        system: the other system.
        cap: GiB of device memory that it used; None: the whole card.
        host: GiB of host memory for evicted tensors; None: unlimited.
        lora: whether the weights are frozen, with adapters on the blocks' linear layers.
        rate, flops: published samples, tokens or operations per second; None: unavailable.
        share: published share of its own in-core speed.
        slowdown: measured op times over the roofline's.
        note: differences between its job and the planned one.
    """

    key: str
    job: str
    model: dict[str, Any]
    samples: int
    unit: str
    device: str
    system: str
    source: str
    cap: float | None = None
    host: float | None = None
    sequence: int = 1
    lora: bool = False
    rate: float | None = None
    flops: float | None = None
    share: float | None = None
    slowdown: float = 1.0
    note: str = ""

    @property
    def size(self) -> int:
        """Samples or tokens per step."""
        return self.samples * self.sequence


def _decoder(
    width: int, layers: int, heads: int, groups: int, inner: int, vocab: int, head: int = 128
) -> dict[str, Any]:
    shape = {"width": width, "layers": layers, "heads": heads, "groups": groups, "head": head, "inner": inner}
    return {"kind": "decoder", **shape, "vocab": vocab}


_LLAMA = _decoder(4096, 32, 32, 8, 14336, 128256)
_QWEN_7B = _decoder(3584, 28, 28, 4, 18944, 152064)
_QWEN_32B = _decoder(5120, 64, 64, 8, 25600, 151936)
_QWEN36 = _decoder(5120, 64, 24, 4, 17408, 248320, head=256)
_RESNET = {"kind": "resnet", "size": 224, "depth": 50, "images": "generated", "optimizer": "momentum"}
_UNET = {"kind": "unet3d", "size": 192, "optimizer": "momentum"}

_TORCHTUNE = "README of torchtune, memory and training speed: batch 2, packed to 2,048, compiled"
_FLEXTRAIN = "als244/flextrain, docs/verified_runs.md, 2026-05-10: 65,536 tokens a step by experiments/verified_runs.py"
_ROUNDPIPE = "README of roundpipe on PyPI: 8 cards together, of which this is an eighth"
_SLIDEFORMER = "arXiv 2603.16428 and RegiaYoung/SlideFormer: above 95 % of the peak without offload; rates are pictures"
_WINDOW = "arXiv 2010.14109: V100 of 16 GB"
_POOCH = "arXiv 1907.05013: V100 of 16 GB, 38 % slower on PCIe 3 and 28 % on NVLink 2"
_TFLMS = "arXiv 1812.07816: V100 of 16 GB; whole volumes, no rate at hand"
_MEGATRAIN = "arXiv 2604.05091 and its README: 272 TFLOPS on one H100, as tokens by the operations counted here"
_ASSUMED = "tokens of a step are not stated: 32,768 are assumed"

RIVALS = (
    Rival("unet-laptop", "3D U-Net, one volume of 192³, fp32", _UNET, 1, "volumes", "laptop", "TFLMS", _TFLMS),
    Rival(
        "pooch-laptop",
        "ResNet-50, batch 640, fp32: 50 GB",
        _RESNET,
        640,
        "images",
        "laptop",
        "PoocH",
        _POOCH,
        share=0.62,
    ),
    Rival(
        "window-laptop",
        "ResNet-50, batch 1,440, fp32: 7.5 times what fits",
        _RESNET,
        1440,
        "images",
        "laptop",
        "window scheduling",
        _WINDOW,
        share=0.55,
    ),
    Rival(
        "window-h100",
        "ResNet-50, batch 2,595, bf16: 7.5 times what fits 16 GiB",
        {**_RESNET, "amp": True},
        2595,
        "images",
        "h100",
        "window scheduling",
        _WINDOW,
        cap=16,
        share=0.55,
        slowdown=RESNET_SLOWDOWN,
        note="ops 2.87 times as long as by the roofline, as was measured on an H200",
    ),
    Rival(
        "torchtune-full-4090",
        "Llama-3.1-8B, full, 2 × 2,048",
        _LLAMA,
        2,
        "tokens",
        "rtx4090",
        "torchtune",
        _TORCHTUNE,
        cap=18.9,
        sequence=2048,
        rate=1650,
        note="its optimizer state has 8 bits and is paged; ours bf16",
    ),
    Rival(
        "torchtune-lora-4090",
        "Llama-3.1-8B, LoRA, 2 × 2,048",
        _LLAMA,
        2,
        "tokens",
        "rtx4090",
        "torchtune",
        _TORCHTUNE,
        cap=16.2,
        sequence=2048,
        lora=True,
        rate=3083,
    ),
    Rival(
        "flextrain-full-5090",
        "Llama-3.1-8B, full, 32 × 2,048",
        _LLAMA,
        32,
        "tokens",
        "rtx5090",
        "FlexTrain",
        _FLEXTRAIN,
        cap=26.8,
        host=184,
        sequence=2048,
        rate=3723,
    ),
    Rival(
        "flextrain-lora-5090",
        "Llama-3.1-8B, LoRA, 32 × 2,048",
        _LLAMA,
        32,
        "tokens",
        "rtx5090",
        "FlexTrain",
        _FLEXTRAIN,
        cap=27.5,
        host=184,
        sequence=2048,
        lora=True,
        rate=5330,
    ),
    Rival(
        "flextrain-27b-5090",
        "Qwen3.6-27B, LoRA, 32 × 2,048",
        _QWEN36,
        32,
        "tokens",
        "rtx5090",
        "FlexTrain",
        _FLEXTRAIN,
        cap=28.7,
        host=184,
        sequence=2048,
        lora=True,
        rate=1284,
        note="full attention in all 64 layers, where the model has gated linear attention in 48",
    ),
    Rival(
        "slideformer-8b-4090",
        "Llama-3.1-8B, full, 64 × 1,024",
        _LLAMA,
        64,
        "tokens",
        "rtx4090",
        "SlideFormer",
        _SLIDEFORMER,
        sequence=1024,
        share=0.95,
        note="its master weights and optimizer state are fp32, on the CPU; ours bf16",
    ),
    Rival(
        "roundpipe-8b-4090",
        "Llama-3.1-8B, full, 16 × 2,048",
        _LLAMA,
        16,
        "tokens",
        "rtx4090",
        "RoundPipe",
        _ROUNDPIPE,
        sequence=2048,
        rate=24275 / 8,
        note=_ASSUMED,
    ),
    Rival(
        "megatrain-7b-h100",
        "Qwen2.5-7B, full, 158 × 1,024",
        _QWEN_7B,
        158,
        "tokens",
        "h100",
        "MegaTrain",
        _MEGATRAIN,
        sequence=1024,
        flops=272e12,
        note="it updates on the CPU",
    ),
    Rival(
        "roundpipe-32b-4090",
        "Qwen3-32B, full, 16 × 2,048",
        _QWEN_32B,
        16,
        "tokens",
        "rtx4090",
        "RoundPipe",
        _ROUNDPIPE,
        sequence=2048,
        rate=5516 / 8,
        note=_ASSUMED,
    ),
)


class LoraLinear(nn.Module):
    """A frozen linear layer with a LoRA adapter of rank 16 (Hu et al., arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        factory_options = {"dtype": base.weight.dtype, "device": base.weight.device, "bias": False}
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, _RANK, **factory_options)
        self.up = nn.Linear(_RANK, base.out_features, **factory_options)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


def add_adapters(model: Decoder) -> None:
    """Freeze a decoder and add an adapter to each linear layer of its blocks."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for parent in (block, block.attention):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(parent, name, LoraLinear(layer))


def make_job(rival: Rival) -> Job:
    shape = dict(rival.model)
    kind = shape.pop("kind")
    if kind != "decoder":
        work = workload(kind, batch=rival.samples, **shape)
        net = work.build()
        optimizer = work.optimizer(net)
        batch = tuple(torch.empty((rival.samples, *size), dtype=dtype, device="meta") for size, dtype in work.sample)
        return Job(net, optimizer, work.make_step(net, optimizer), batch)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Decoder(**shape)
    finally:
        torch.set_default_dtype(torch.float32)
    for block in model.blocks:
        block.attention.foretold = True
    if rival.lora:
        add_adapters(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, step, (torch.zeros((rival.samples, rival.sequence), dtype=torch.int64),))


def count_operations(rival: Rival) -> float | None:
    """Return the operations of a decoder's step in products and causal attention, each counted once."""
    model = rival.model
    if model["kind"] != "decoder":
        return None
    inside = model["heads"] * model["head"]
    block = 2 * model["width"] * (inside + model["groups"] * model["head"]) + 3 * model["width"] * model["inner"]
    weights = model["layers"] * block + model["width"] * model["vocab"]
    # Forward pass, input gradients and weight gradients (if trained); attention recomputes its scores.
    products = (4 if rival.lora else 6) * weights
    return float(rival.size * (products + 7 * model["layers"] * rival.sequence * inside))


def rate_of(rival: Rival) -> float | None:
    counted = count_operations(rival)
    if rival.flops is None or counted is None:
        return rival.rate
    return rival.flops * rival.size / counted


def predict(rival: Rival) -> dict[str, Any]:
    device = presets.device(rival.device)
    with torch.device("meta"):
        job = make_job(rival)
    graph, costs = capture_with_costs(job, device)
    ops = tuple(OpCost(cost.seconds * rival.slowdown, cost.workspace_bytes) for cost in costs.ops)
    home = replace(costs.homes[0], bytes=None if rival.host is None else int(rival.host * GIB))
    costs = Costs(ops, (home,))
    cap = device.memory_bytes if rival.cap is None else int(rival.cap * GIB)
    name, bytes_of_op = find_largest_op(graph, costs)
    products = sum(c.seconds for op, c in zip(graph.ops, costs.ops, strict=True) if op.name.startswith(_PRODUCTS))
    rate = rate_of(rival)
    prediction: dict[str, Any] = {
        "size": rival.size,
        "frozen": rival.lora,
        "device": device.name,
        "cap": cap,
        "room": room_of(cap),
        "host": home.bytes,
        "ops": len(graph.ops),
        "in_core_bytes": planning.in_core_budget(graph, costs),
        "smallest_bytes": planning.smallest_budget(graph, costs),
        "largest_op": name,
        "largest_op_bytes": bytes_of_op,
        "in_core_s": costs.compute_seconds,
        "products_s": products,
        "published_rate": rate,
        "published_s": rival.size / rate if rate else costs.compute_seconds / rival.share if rival.share else None,
    }
    operations = count_operations(rival)
    if operations is not None:
        peak = device.flops[Number.HALF]
        prediction["in_core_of_peak"] = operations / costs.compute_seconds / peak
        if rate is not None:
            prediction["published_of_peak"] = operations / prediction["published_s"] / peak
    params, prediction["search"] = None, "whole"
    if len(graph.ops) > _LONG_OPS:
        params, prediction["search"] = QUICK, "quick"
    try:
        planned = planning.plan_step(graph, costs, prediction["room"], params=params)
    except BudgetError as error:
        prediction["refused"] = str(error).splitlines()[0][:300]
    else:
        prediction |= summarize_plan(graph, costs, planned, prediction["room"])
        prediction["per_s"] = rival.size / prediction["seconds"]
        published_s = prediction["published_s"]
        if rate is not None and published_s < costs.compute_seconds:
            speedup = published_s / costs.compute_seconds
            scaled_costs = replace(
                costs, ops=tuple(replace(cost, seconds=cost.seconds * speedup) for cost in costs.ops)
            )
            prediction["at_their_pace_s"] = simulate(graph, scaled_costs, planned.program).step_seconds
    usage = resource.getrusage(resource.RUSAGE_SELF)
    prediction |= {"processor_s": usage.ru_utime + usage.ru_stime, "peak_rss": usage.ru_maxrss << 10}
    return prediction


def summarize_plan(graph: StepGraph, costs: Costs, planned: Planned, room: int) -> dict[str, Any]:
    program, timeline = planned.program, planned.timeline
    report = step_report(graph, planned.plan, program, timeline, room)
    spent, _ = time_spent(graph, program, timeline)
    busy: Counter[type] = Counter()
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        busy[type(instruction)] += end - start
    home = costs.homes[0]
    link = max(report.bytes_out / home.bytes_per_s_out, report.bytes_in / home.bytes_per_s_in)
    seconds = timeline.step_seconds
    faster_costs = {
        "ops": replace(costs, ops=tuple(replace(cost, seconds=cost.seconds / 2) for cost in costs.ops)),
        "link": replace(
            costs,
            homes=(replace(home, bytes_per_s_out=2 * home.bytes_per_s_out, bytes_per_s_in=2 * home.bytes_per_s_in),),
        ),
    }
    return {
        "policy": planned.plan.policy,
        "seconds": seconds,
        "arena_bytes": program.arena_bytes,
        "bytes_out": report.bytes_out,
        "bytes_in": report.bytes_in,
        "moved": {moved.kind.value: [moved.bytes_out, moved.bytes_in] for moved in report.moved},
        "link_s": link,
        "ops_s": spent.ops,
        "again_s": spent.again,
        "waits_for_copies_s": spent.for_copies + spent.end,
        "waits_for_room_s": spent.for_room,
        "busy": {"ops": busy[Run] / seconds, "out": busy[CopyOut] / seconds, "in": busy[CopyIn] / seconds},
        "twice_as_fast_s": {
            resource_name: simulate(graph, c, program).step_seconds for resource_name, c in faster_costs.items()
        },
    }


def find_largest_op(graph: StepGraph, costs: Costs) -> tuple[str, int]:
    """Return the name and bytes of the op with the largest working set."""
    sizes = [
        sum(graph.storages[s].bytes for s in set(op.touched)) + cost.workspace_bytes
        for op, cost in zip(graph.ops, costs.ops, strict=True)
    ]
    index = max(range(len(sizes)), key=sizes.__getitem__)
    return graph.ops[index].name, sizes[index]


_REMEDIES = {
    "optimizer_state": "keep the optimizer's state in 8 bits, or update on the CPU",
    "parameter": "let each copy of a weight serve more tokens, or carry weights in 8 bits",
    "gradient": "update each weight as soon as its gradient is there, so that gradients need not leave",
    "activation": "recompute more of a block rather than copy it, or carry activations in 8 bits",
}


def recommend_work(row: dict[str, Any]) -> str:
    """Recommend work that would beat the rival, in a few sentences."""
    text = _recommend(row)
    bytes_out = row["moved"].get("parameter", (0, 0))[0] if row.get("frozen") and "moved" in row else 0
    if bytes_out > _SIGNIFICANT_SHARE * row.get("bytes_out", 0):
        text += (
            f" Frozen weights are copied out ({bytes_out / GIB:.0f} GiB): find out on a GPU that nothing wrote to them."
        )
    return text


def _recommend(row: dict[str, Any]) -> str:
    largest = f"{_short_name(row.get('largest_op', ''))} needs {row.get('largest_op_bytes', 0) / GIB:.1f} GiB at once"
    if "seconds" not in row:
        reason = f"No plan ({row.get('refused') or row.get('error')})."
        if "refused" not in row:
            return reason
        fits = row["smallest_bytes"] <= row["room"]
        return f"{reason} {'Every op fits: search harder for a plan.' if fits else f'{largest}: run it in parts.'}"
    seconds, in_core, published_s = row["seconds"], row["in_core_s"], row["published_s"]
    if published_s is not None and in_core > published_s:
        return _recommend_kernels(row)
    speed = "speed" if row.get("published_rate") else "share of the speed in core"
    if published_s is None:
        lead, goal = "No rate to beat is at hand", in_core
    elif seconds <= published_s:
        lead, goal = f"First by these figures, at {published_s / seconds:.2f} of its {speed}", in_core
    else:
        lead, goal = f"Behind, at {published_s / seconds:.2f} of its {speed}", published_s
    if seconds <= goal * (1 + _SIGNIFICANT_SHARE):
        return f"{lead}. Ops are the limit and the copies hide: prove it on a card."
    seconds_lost = {
        "copies": row["waits_for_copies_s"],
        "room": row["waits_for_room_s"],
        "again": row["again_s"],
    }
    largest_loss = max(seconds_lost, key=lambda name: seconds_lost[name])
    moved = {kind: max(both) for kind, both in row["moved"].items()}
    top_kind = max(moved, key=lambda kind: moved[kind], default="")
    share = f"{seconds_lost[largest_loss] / seconds:.0%} of the step"
    if row["largest_op_bytes"] > row["room"] / 2:
        return f"{lead}. {largest}, of {row['room'] / GIB:.1f}, so little can move beside it: run such ops in slices."
    link_text = f"mostly for {top_kind.replace('_', ' ')}s ({moved.get(top_kind, 0) / GIB:.0f} GiB one way)"
    if row["link_s"] > goal or largest_loss == "copies":
        return (
            f"{lead}. Bound by the link: it needs {row['link_s']:.2f} s, {link_text}, and ops wait for {share}: "
            f"{_REMEDIES.get(top_kind, 'move less')}."
        )
    if largest_loss == "again" and row["link_s"] > seconds / 2:
        return (
            f"{lead}. Ops that run again take {share}, since the link is busy for {row['link_s'] / seconds:.0%} of it,"
            f" {link_text}: {_REMEDIES.get(top_kind, 'move less')}."
        )
    if largest_loss == "again":
        return f"{lead}. Ops that run again take {share}: {_recommend_against_reruns(row)}."
    return f"{lead}. Copies wait for room, {share}: run the largest ops in slices, of which {largest}."


def _recommend_against_reruns(row: dict[str, Any]) -> str:
    if row["link_s"] >= row["seconds"] / 4:
        return "hold what they make in fewer bytes"
    idle = f"the link idles for {1 - row['link_s'] / row['seconds']:.0%}, so let the search offload more"
    return f"{idle}, and run the batch in micro-batches, which take less of the host" if row.get("host") else idle


def _recommend_kernels(row: dict[str, Any]) -> str:
    """Return recommendations for a row whose in-core op time exceeds the rival's step."""
    in_core, published_s = row["in_core_s"], row["published_s"]
    text = f"Bound by ops: in core they take {in_core / published_s:.2f} of its step"
    if row["products_s"] > published_s:
        text += ", and products alone more than all of it: measure the share of peak that products reach on this card"
    else:
        text += f", {1 - row['products_s'] / in_core:.0%} of it bound by memory: fuse those"
    if "at_their_pace_s" not in row:
        return f"{text}."
    excess = row["at_their_pace_s"] / published_s - 1
    text += f". With ops sped up to the length of its step, this plan would still add {excess:.0%}"
    if excess <= _SIGNIFICANT_SHARE:
        return f"{text}: moving is not the limit."
    moved = {kind: max(both) for kind, both in row["moved"].items()}
    top = max(moved, key=lambda kind: moved[kind], default="")
    rerun_seconds = row["again_s"] * published_s / in_core
    if rerun_seconds > (row["at_their_pace_s"] - published_s) / 2:
        return f"{text}, most of it ops that run again: {_recommend_against_reruns(row)}."
    return f"{text}, mostly for {top.replace('_', ' ')}s ({moved.get(top, 0) / GIB:.0f} GiB one way): {_REMEDIES[top]}."


def _short_name(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")


def render_table(results: dict[str, Any]) -> str:
    lines = [
        "# Jobs that others publish, as the planner predicts them",
        "",
        "*Simulated* by `make gpu-rivals` (`tools/gpu_rivals.py`), on no GPU at all; see the notes below.",
        "",
        "| job | card, cap | rival | our step | our rate | over rival | in core | link alone | ops again | largest op "
        "| busy: ops, out, in | of peak: ours in core, rival |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [(rival, results[rival.key]) for rival in RIVALS if rival.key in results]
    lines += [_render_row(rival, prediction) for rival, prediction in rows]
    lines += ["", "## What would have to be built to be first", ""]
    lines += [f"- **{rival.job}** ({rival.system}): {recommend_work(prediction)}" for rival, prediction in rows]
    lines += ["", "## Sources, and what differs", ""]
    for rival, prediction in rows:
        notes = [rival.source, *([rival.note] if rival.note else [])]
        if "seconds" in prediction and prediction["search"] != "whole":
            notes.append(f"search: {prediction['search']}")
        lines.append(f"- **{rival.job}** ({rival.system}): {'; '.join(notes)}.")
    return "\n".join([*lines, "", _NOTES, ""])


_NOTES = """\
## How to read it

*over rival* is the predicted rate over the published one; where a share of the in-core speed is published, it is our
share over that one. *in core* is the roofline with everything in memory, *link alone* the bytes of the busier way over
the rate of the link: a plan that moves these bytes takes at least the longer of the two. *largest op* is what one op
needs at once. *busy* is the share of the predicted step in which ops run, and in which bytes go out and come in.

Products are assumed to reach 60 % of the peak of tensor cores, attention 40 %, convolutions 35 %, on all cards alike.
Measurements and published rates contradict this, in both directions:

- ResNet-50 at batch 640, in bf16 with images in NCHW, took 251.9 ms in core on an H200; the roofline says 87.8 ms.
  One measurement does not tell how much of that is convolutions, and says nothing about other cards, so the presets
  keep their share. The row for the H100 takes the measured ratio for all ops. The laptop's rows are in fp32, for which
  nothing was measured: if ops are slower there as well, the link matters less.
- FlexTrain's rates need about 80 % of the peak of an RTX 5090 for products: there the roofline is too slow.

What rivals do besides moves the comparison as well: 8-bit state, updates on the CPU and their own kernels give other
bits than plain PyTorch."""


def _render_row(rival: Rival, prediction: dict[str, Any]) -> str:
    card = presets.device(rival.device)
    cap = f"{card.name}, {rival.cap or card.memory_bytes / GIB:.1f} GiB"
    cap += ", host not limited" if rival.host is None else f", {rival.host:.0f} GiB of host"
    rate = rate_of(rival)
    published = (
        f"{rate:,.0f} {rival.unit}/s" if rate else f"{rival.share:.0%} of in core" if rival.share else "not at hand"
    )
    cells = [rival.job, cap, f"{rival.system}, {published}"]
    if "seconds" not in prediction:
        return (
            "| " + " | ".join([*cells, prediction.get("refused") or prediction.get("error") or "?", *[""] * 8]) + " |"
        )
    seconds = prediction["seconds"]
    ratio = f"{prediction['published_s'] / seconds:.2f}" if prediction["published_s"] else "-"
    shares = [
        f"{prediction[name]:.0%}" if name in prediction else "-" for name in ("in_core_of_peak", "published_of_peak")
    ]
    busy = prediction["busy"]
    cells += [
        f"{seconds:.2f} s",
        f"{prediction['per_s']:,.4g} {rival.unit}/s",
        ratio + (" (shares)" if rate is None and rival.share else ""),
        f"{prediction['in_core_s']:.2f} s",
        f"{prediction['link_s']:.2f} s",
        f"{prediction['again_s']:.2f} s",
        f"{format_bytes(prediction['largest_op_bytes'])} ({_short_name(prediction['largest_op'])})",
        f"{busy['ops']:.0%}, {busy['out']:.0%}, {busy['in']:.0%}",
        ", ".join(shares),
    ]
    return "| " + " | ".join(cells) + " |"


def predict_all(keys: Iterable[str]) -> None:
    """Predict the given rows in separate processes, and write all available rows."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for rival in RIVALS:
        if rival.key not in keys:
            continue
        command = [sys.executable, __file__, "--one", rival.key]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
            prediction = json.loads(lines[-1]) if lines else {"error": process.stderr.strip()[-300:]}
        except subprocess.TimeoutExpired:
            prediction = {"error": f"not planned in {_LIMIT_S} s"}
        results[rival.key] = {
            "who": rival.system,
            "job": rival.job,
            "source": rival.source,
            **_round_numbers(prediction),
        }
        results = {entry.key: results[entry.key] for entry in RIVALS if entry.key in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        TABLE.write_text(render_table(results), encoding="utf-8")
        print(rival.key, prediction, flush=True)


def _round_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round_numbers(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--one"]:
        rival = next(rival for rival in RIVALS if rival.key == arguments[1])
        try:
            print(json.dumps(predict(rival)), flush=True)
        except Exception as error:  # record the failure as the row's result
            print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)
    elif arguments[:1] == ["--table"]:
        TABLE.write_text(render_table(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    else:
        predict_all(arguments[0].split(",") if arguments else [rival.key for rival in RIVALS])


if __name__ == "__main__":
    main()
