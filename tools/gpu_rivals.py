"""Jobs whose speed others publish for one card, with the step that the planner predicts for the same job on that card.

``make gpu-rivals`` captures each job without memory, plans it within the memory that the other system took, and
writes ``benchmarks/results/gpu-rivals.json`` and the table ``gpu-rivals.md`` beside it. Every job is a process of its
own, with a time limit; ``ROWS=key,key`` does a part, and the other rows stay.

Everything is simulated. Ops cost what a roofline over the peak rates of a preset gives, and links carry both ways at
once; see ``outofcore.presets``. An optimizer's update counts as one op that reads and writes each of its bytes once. A
published figure that is not at hand is not guessed: the cell says so.
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
from gpu_rows import GIB, PREDICTIONS, Decoder, Job, costed_job, room_of
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
# Steps of more ops are planned by a quick search.
_LONG_OPS = 2000
# A part of the step that is worth building something for.
_MUCH = 0.05
# What a GPU visit measured of ResNet-50 in core on an H200, in bf16 with images in NCHW, over the roofline's 87.8 ms.
RESNET_SLOWDOWN = 251.9 / 87.8
# By the beginning of their names: ops whose arithmetic is counted. The others are bound by the device's memory.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_dot_product", "aten.convolution")


@dataclass(frozen=True)
class Rival:
    """A job with what another system reaches.

    Attributes:
        key: by which it is chosen.
        job: what is trained, in words.
        model: the shape; ``kind`` is "decoder", or a workload of the zoo.
        samples: in a step.
        unit: of the rate.
        device: a preset.
        who: the other system.
        source: where its figures stand.
        cap: GiB of device memory that it took or had; None: all of the card.
        host: GiB of host memory for what leaves; None: not limited.
        sequence: tokens of a sample.
        lora: whether the weights are frozen, with adapters on the linear layers of all blocks.
        rate: samples or tokens a second that it reaches; None: not at hand.
        flops: operations a second that it reaches, where that is what is published.
        share: of its speed with all in core, where that is what is published.
        slowdown: how much longer ops take than the roofline says, where that was measured.
        note: what differs between its job and the one that is planned here.
    """

    key: str
    job: str
    model: dict[str, Any]
    samples: int
    unit: str
    device: str
    who: str
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
        """Samples or tokens in a step."""
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


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 16 (LoRA; Hu and others, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        kind = {"dtype": base.weight.dtype, "device": base.weight.device, "bias": False}
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, _RANK, **kind)
        self.up = nn.Linear(_RANK, base.out_features, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


def adapt(model: Decoder) -> None:
    """Freeze a decoder, and put an adapter on each linear layer of its blocks."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for parent in (block, block.attention):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(parent, name, Adapted(layer))


def make(rival: Rival) -> Job:
    """Make the job of a rival, without memory."""
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
        adapt(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, step, (torch.zeros((rival.samples, rival.sequence), dtype=torch.int64),))


def count_operations(rival: Rival) -> float | None:
    """Return the additions and multiplications of a decoder's step in products and causal attention, each done once."""
    m = rival.model
    if m["kind"] != "decoder":
        return None
    inside = m["heads"] * m["head"]
    block = 2 * m["width"] * (inside + m["groups"] * m["head"]) + 3 * m["width"] * m["inner"]
    weights = m["layers"] * block + m["width"] * m["vocab"]
    # Forward, gradients of inputs and, where they are trained, of weights; attention computes its scores again.
    products = (4 if rival.lora else 6) * weights
    return float(rival.size * (products + 7 * m["layers"] * rival.sequence * inside))


def rate_of(rival: Rival) -> float | None:
    """Return the samples or tokens a second that the other system reaches, or None if that is not known."""
    counted = count_operations(rival)
    if rival.flops is None or counted is None:
        return rival.rate
    return rival.flops * rival.size / counted


def predict(rival: Rival) -> dict[str, Any]:
    """Plan the job of a rival on its card, and return what follows from the plan."""
    device = presets.device(rival.device)
    with torch.device("meta"):
        job = make(rival)
    graph, costs = costed_job(job, device)
    ops = tuple(OpCost(cost.seconds * rival.slowdown, cost.workspace_bytes) for cost in costs.ops)
    home = replace(costs.homes[0], bytes=None if rival.host is None else int(rival.host * GIB))
    costs = Costs(ops, (home,))
    cap = device.memory_bytes if rival.cap is None else int(rival.cap * GIB)
    name, bytes_of_op = find_largest_op(graph, costs)
    products = sum(c.seconds for op, c in zip(graph.ops, costs.ops, strict=True) if op.name.startswith(_PRODUCTS))
    rate = rate_of(rival)
    found: dict[str, Any] = {
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
    counted = count_operations(rival)
    if counted is not None:
        peak = device.flops[Number.HALF]
        found["in_core_of_peak"] = counted / costs.compute_seconds / peak
        if rate is not None:
            found["published_of_peak"] = counted / found["published_s"] / peak
    params, found["search"] = None, "whole"
    if len(graph.ops) > _LONG_OPS:
        params, found["search"] = QUICK, "quick"
    try:
        planned = planning.plan_step(graph, costs, found["room"], params=params)
    except BudgetError as error:
        found["refused"] = str(error).splitlines()[0][:300]
    else:
        found |= summarize_plan(graph, costs, planned, found["room"])
        found["per_s"] = rival.size / found["seconds"]
        wanted = found["published_s"]
        if rate is not None and wanted < costs.compute_seconds:
            faster = wanted / costs.compute_seconds
            at_theirs = replace(costs, ops=tuple(replace(cost, seconds=cost.seconds * faster) for cost in costs.ops))
            found["at_their_pace_s"] = simulate(graph, at_theirs, planned.program).step_seconds
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found |= {"processor_s": usage.ru_utime + usage.ru_stime, "peak_rss": usage.ru_maxrss << 10}
    return found


def summarize_plan(graph: StepGraph, costs: Costs, planned: Planned, room: int) -> dict[str, Any]:
    """Return what a plan's step takes, moves and waits for."""
    program, timeline = planned.program, planned.timeline
    report = step_report(graph, planned.plan, program, timeline, room)
    spent, _ = time_spent(graph, program, timeline)
    busy: Counter[type] = Counter()
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        busy[type(instruction)] += end - start
    home = costs.homes[0]
    link = max(report.bytes_out / home.bytes_per_s_out, report.bytes_in / home.bytes_per_s_in)
    seconds = timeline.step_seconds
    twice = {
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
        "twice_as_fast_s": {what: simulate(graph, c, program).step_seconds for what, c in twice.items()},
    }


def find_largest_op(graph: StepGraph, costs: Costs) -> tuple[str, int]:
    """Return the op that needs the most bytes at once, and how many."""
    sizes = [
        sum(graph.storages[s].bytes for s in set(op.touched)) + cost.workspace_bytes
        for op, cost in zip(graph.ops, costs.ops, strict=True)
    ]
    place = max(range(len(sizes)), key=sizes.__getitem__)
    return graph.ops[place].name, sizes[place]


_REMEDIES = {
    "optimizer_state": "keep the optimizer's state in 8 bits, or update on the CPU",
    "parameter": "let each copy of a weight serve more tokens, or carry weights in 8 bits",
    "gradient": "update each weight as soon as its gradient is there, so that gradients need not leave",
    "activation": "recompute more of a block rather than copy it, or carry activations in 8 bits",
}


def recommend_work(found: dict[str, Any]) -> str:
    """Return, in a few sentences, what the figures of a row say has to be built to be first."""
    text = _recommend(found)
    out = found["moved"].get("parameter", (0, 0))[0] if found.get("frozen") and "moved" in found else 0
    if out > _MUCH * found.get("bytes_out", 0):
        text += f" Frozen weights are copied out ({out / GIB:.0f} GiB): find out on a GPU that nothing wrote to them."
    return text


def _recommend(found: dict[str, Any]) -> str:
    largest = f"{_short(found.get('largest_op', ''))} needs {found.get('largest_op_bytes', 0) / GIB:.1f} GiB at once"
    if "seconds" not in found:
        why = f"No plan ({found.get('refused') or found.get('error')})."
        if "refused" not in found:
            return why
        fits = found["smallest_bytes"] <= found["room"]
        return f"{why} {'Every op fits: search harder for a plan.' if fits else f'{largest}: run it in parts.'}"
    seconds, in_core, wanted = found["seconds"], found["in_core_s"], found["published_s"]
    if wanted is not None and in_core > wanted:
        return _recommend_kernels(found)
    speed = "speed" if found.get("published_rate") else "share of the speed in core"
    if wanted is None:
        lead, goal = "No rate to beat is at hand", in_core
    elif seconds <= wanted:
        lead, goal = f"First by these figures, at {wanted / seconds:.2f} of its {speed}", in_core
    else:
        lead, goal = f"Behind, at {wanted / seconds:.2f} of its {speed}", wanted
    if seconds <= goal * (1 + _MUCH):
        return f"{lead}. Ops are the limit and the copies hide: prove it on a card."
    lost = {
        "copies": found["waits_for_copies_s"],
        "room": found["waits_for_room_s"],
        "again": found["again_s"],
    }
    worst = max(lost, key=lambda name: lost[name])
    moved = {kind: max(both) for kind, both in found["moved"].items()}
    most = max(moved, key=lambda kind: moved[kind], default="")
    part = f"{lost[worst] / seconds:.0%} of the step"
    if found["largest_op_bytes"] > found["room"] / 2:
        return f"{lead}. {largest}, of {found['room'] / GIB:.1f}, so little can move beside it: run such ops in slices."
    mostly = f"mostly for {most.replace('_', ' ')}s ({moved.get(most, 0) / GIB:.0f} GiB one way)"
    if found["link_s"] > goal or worst == "copies":
        return (
            f"{lead}. Bound by the link: it needs {found['link_s']:.2f} s, {mostly}, and ops wait for {part}: "
            f"{_REMEDIES.get(most, 'move less')}."
        )
    if worst == "again" and found["link_s"] > seconds / 2:
        return (
            f"{lead}. Ops that run again take {part}, since the link is busy for {found['link_s'] / seconds:.0%} of it,"
            f" {mostly}: {_REMEDIES.get(most, 'move less')}."
        )
    if worst == "again":
        return f"{lead}. Ops that run again take {part}: {_instead_of_running_again(found)}."
    return f"{lead}. Copies wait for room, {part}: run the largest ops in slices, of which {largest}."


def _instead_of_running_again(found: dict[str, Any]) -> str:
    if found["link_s"] >= found["seconds"] / 4:
        return "hold what they make in fewer bytes"
    idle = f"the link idles for {1 - found['link_s'] / found['seconds']:.0%}, so let the search offload more"
    return f"{idle}, and run the batch in micro-batches, which take less of the host" if found.get("host") else idle


def _recommend_kernels(found: dict[str, Any]) -> str:
    """Return what a row needs whose ops alone, with everything in memory, take longer than the rival's step."""
    in_core, wanted = found["in_core_s"], found["published_s"]
    text = f"Bound by ops: in core they take {in_core / wanted:.2f} of its step"
    if found["products_s"] > wanted:
        text += ", and products alone more than all of it: measure the share of peak that products reach on this card"
    else:
        text += f", {1 - found['products_s'] / in_core:.0%} of it bound by memory: fuse those"
    if "at_their_pace_s" not in found:
        return f"{text}."
    over = found["at_their_pace_s"] / wanted - 1
    text += f". With ops sped up to the length of its step, this plan would still add {over:.0%}"
    if over <= _MUCH:
        return f"{text}: moving is not the limit."
    moved = {kind: max(both) for kind, both in found["moved"].items()}
    most = max(moved, key=lambda kind: moved[kind], default="")
    again = found["again_s"] * wanted / in_core
    if again > (found["at_their_pace_s"] - wanted) / 2:
        return f"{text}, most of it ops that run again: {_instead_of_running_again(found)}."
    return (
        f"{text}, mostly for {most.replace('_', ' ')}s ({moved.get(most, 0) / GIB:.0f} GiB one way): {_REMEDIES[most]}."
    )


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")


def render_table(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    lines = [
        "# Jobs that others publish, as the planner predicts them",
        "",
        "*Simulated* by `make gpu-rivals` (`tools/gpu_rivals.py`), on no GPU at all; see the notes below.",
        "",
        "| job | card, cap | rival | our step | our rate | over rival | in core | link alone | ops again | largest op "
        "| busy: ops, out, in | of peak: ours in core, rival |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    known = [(rival, results[rival.key]) for rival in RIVALS if rival.key in results]
    lines += [_render_row(rival, found) for rival, found in known]
    lines += ["", "## What would have to be built to be first", ""]
    lines += [f"- **{rival.job}** ({rival.who}): {recommend_work(found)}" for rival, found in known]
    lines += ["", "## Sources, and what differs", ""]
    for rival, found in known:
        notes = [rival.source, *([rival.note] if rival.note else [])]
        if "seconds" in found and found["search"] != "whole":
            notes.append(f"search: {found['search']}")
        lines.append(f"- **{rival.job}** ({rival.who}): {'; '.join(notes)}.")
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


def _render_row(rival: Rival, found: dict[str, Any]) -> str:
    card = presets.device(rival.device)
    cap = f"{card.name}, {rival.cap or card.memory_bytes / GIB:.1f} GiB"
    cap += ", host not limited" if rival.host is None else f", {rival.host:.0f} GiB of host"
    rate = rate_of(rival)
    theirs = (
        f"{rate:,.0f} {rival.unit}/s" if rate else f"{rival.share:.0%} of in core" if rival.share else "not at hand"
    )
    cells = [rival.job, cap, f"{rival.who}, {theirs}"]
    if "seconds" not in found:
        return "| " + " | ".join([*cells, found.get("refused") or found.get("error") or "?", *[""] * 8]) + " |"
    seconds = found["seconds"]
    over = f"{found['published_s'] / seconds:.2f}" if found["published_s"] else "-"
    shares = [f"{found[name]:.0%}" if name in found else "-" for name in ("in_core_of_peak", "published_of_peak")]
    busy = found["busy"]
    cells += [
        f"{seconds:.2f} s",
        f"{found['per_s']:,.4g} {rival.unit}/s",
        over + (" (shares)" if rate is None and rival.share else ""),
        f"{found['in_core_s']:.2f} s",
        f"{found['link_s']:.2f} s",
        f"{found['again_s']:.2f} s",
        f"{format_bytes(found['largest_op_bytes'])} ({_short(found['largest_op'])})",
        f"{busy['ops']:.0%}, {busy['out']:.0%}, {busy['in']:.0%}",
        ", ".join(shares),
    ]
    return "| " + " | ".join(cells) + " |"


def predict_all(keys: Iterable[str]) -> None:
    """Predict some rows, each in a process of its own, and write all that are known."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for rival in RIVALS:
        if rival.key not in keys:
            continue
        command = [sys.executable, __file__, "--one", rival.key]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-300:]}
        except subprocess.TimeoutExpired:
            found = {"error": f"not planned in {_LIMIT_S} s"}
        results[rival.key] = {"who": rival.who, "job": rival.job, "source": rival.source, **_rounded(found)}
        results = {each.key: results[each.key] for each in RIVALS if each.key in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        TABLE.write_text(render_table(results), encoding="utf-8")
        print(rival.key, found, flush=True)


def _rounded(value: Any) -> Any:
    """Return a value with its numbers at five digits."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--one"]:
        rival = next(rival for rival in RIVALS if rival.key == arguments[1])
        try:
            print(json.dumps(predict(rival)), flush=True)
        except Exception as error:  # a row that cannot be planned is one to know of
            print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)
    elif arguments[:1] == ["--table"]:
        TABLE.write_text(render_table(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    else:
        predict_all(arguments[0].split(",") if arguments else [rival.key for rival in RIVALS])


if __name__ == "__main__":
    main()
