"""The comparison of a visit to a GPU: jobs within a cap of device memory, each measurement a process of its own.

The cap is ``torch.cuda.set_per_process_memory_fraction``: whoever needs more fails. Plain PyTorch runs without it, as
what ratios are to. Weights and data are random. Cheap rows come first; rivals that can eat the host's memory run last,
within a limit of their own.

What the planner expects of each row is worked out beforehand, on a machine without a GPU (``--predict``, or
``make gpu-predictions``), and kept in ``benchmarks/results``: a visit tells how far it was from what it finds. A step
is captured there without memory, with the attention kernel that a GPU would take, and costs what a roofline over the
peak rates of the preset gives.

Beside the comparison there is the pace of loops that are followed (``outofcore.budget``). Neither has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_visit import ROOT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

GIB = 1 << 30
STEPS, WARM_UP = 4, 7
PRESET = "h200"
PREDICTIONS = ROOT / "benchmarks" / "results" / "gpu-predictions.json"
_CHUNK = 4096  # tokens whose logits are made at once
# What a step on a GPU leaves of its budget to others, as it is asked for there: cuBLAS's workspace, and what the
# caching allocator takes beside the arena; and a share for what no plan foresees.
_BESIDE, _RESERVED_SHARE = 96 << 20, 64
_PREDICTION_LIMIT_S = 900


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        number: of it.
        job: what is trained, in words.
        model: arguments of ``make``.
        cap: bytes of device memory; below 1: the share of what plain PyTorch reserves.
        others: what others reach, as they say.
        goal: what it is to be here.
        sizes: batches, or tokens in a sequence, one after the other until one fails.
        rivals: ways to train in plain PyTorch under the same cap.
        limit: seconds of one measurement.
    """

    number: int
    job: str
    model: dict[str, Any]
    cap: float
    others: str
    goal: str
    sizes: tuple[int, ...]
    rivals: tuple[str, ...] = ("checkpoint",)
    limit: int = 150


_QWEN_06 = {"kind": "decoder", "width": 1024, "layers": 28, "heads": 16, "groups": 8, "head": 128, "inner": 3072}
_QWEN_4 = {"kind": "decoder", "width": 2560, "layers": 36, "heads": 32, "groups": 8, "head": 128, "inner": 9728}
_LLAMA_8 = {"kind": "decoder", "width": 4096, "layers": 32, "heads": 32, "groups": 8, "head": 128, "inner": 14336}
ROWS = (
    Row(
        1,
        "ViT-giant-14, bf16, batch 32, AdamW",
        {"kind": "vit"},
        0.41,
        "1.20x at 0.41; 2.46x at 0.70",
        "<= 1.05x",
        (32,),
    ),
    Row(3, "ResNet-50, batch 640, 16 GiB", {"kind": "resnet"}, 16 * GIB, "0.62 to 0.72", ">= 0.92", (640,)),
    Row(4, "Qwen3-0.6B shape, full", {**_QWEN_06, "vocab": 151936}, 0.69, "2.23x at 0.69", "<= 1.10x", (4096,)),
    Row(
        2,
        "ResNet-50, 7.5 times the batch of 16 GiB",
        {"kind": "resnet", "times": 7.5},
        16 * GIB,
        "0.55",
        ">= 0.90",
        (0,),
    ),
    Row(
        7,
        "4 B, state off the device",
        {**_QWEN_4, "vocab": 151936},
        0.55,
        "0.44, 0.90, 1.00",
        "0.60, 0.95, 1.00",
        (8192, 16384, 32768),
        limit=240,
    ),
    Row(
        5,
        "Llama-3.1-8B shape, LoRA r32, 24 GiB",
        {**_LLAMA_8, "vocab": 128256, "rank": 32},
        24 * GIB,
        "78,475 tokens, 4-bit base",
        "longer; >= 0.9 from 8k",
        (8192, 32768, 81920, 131072),
        limit=240,
    ),
    Row(
        6,
        "Qwen3-4B shape, full, 80 GiB",
        {**_QWEN_4, "vocab": 151936},
        80 * GIB,
        "256k tokens; 48.8 GB at 96k",
        ">= 400k; <= 30 GB",
        (98304, 262144, 409600),
        limit=300,
    ),
    Row(
        8,
        "depth at 12 GB, batch 16",
        {"kind": "resnet", "small": True},
        12 * GIB,
        "2,498 layers",
        ">= 25,000",
        (2498, 24998),
        (),
    ),
)


_KEYS = tuple(f"{row.number}/{size}" for row in ROWS for size in row.sizes)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, head: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.head, self.causal = heads, groups, head, causal
        self.foretold = False  # whether no kernel runs, and the GPU's is to be captured all the same
        self.q, self.o = nn.Linear(width, heads * head, bias=False), nn.Linear(heads * head, width, bias=False)
        self.k, self.v = nn.Linear(width, groups * head, bias=False), nn.Linear(width, groups * head, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.head).transpose(1, 2)
        k = self.k(x).view(b, t, self.groups, self.head).transpose(1, 2)
        v = self.v(x).view(b, t, self.groups, self.head).transpose(1, 2)
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        if self.foretold:
            y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal)[0]
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups != self.heads)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su and others, arXiv 2104.09864)."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, head: int, inner: int, *, causal: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if causal else nn.LayerNorm
        self.n1, self.n2, self.gated = norm(width), norm(width), causal
        self.attention = _Attention(width, heads, groups, head, causal=causal)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if causal else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.n1(x), turn)
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y) if self.gate is not None else F.gelu(self.up(y)))


class Decoder(nn.Module):
    """A decoder of the shape of Llama's and Qwen's; its loss makes the logits of a few thousand tokens at once."""

    def __init__(self, width: int, layers: int, heads: int, groups: int, head: int, inner: int, vocab: int) -> None:
        super().__init__()
        self.head_size, self.again = head, False
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width, heads, groups, head, inner, causal=True) for _ in range(layers))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        half = self.head_size // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)[:, None] * rates
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, turn, use_reentrant=False) if self.again else block(x, turn)
        hidden, wanted = self.norm(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in range(0, hidden.shape[0], _CHUNK):
            part, goal = hidden[at : at + _CHUNK], wanted[at : at + _CHUNK]
            total = total + (
                checkpoint(self._loss, part, goal, use_reentrant=False) if self.again else self._loss(part, goal)
            )
        return total / hidden.shape[0]

    def _loss(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.out(hidden).float(), wanted, reduction="sum")


class Vit(nn.Module):
    """A vision transformer of the shape of ViT-g/14 (arXiv 2106.04560), for images of 224 pixels."""

    def __init__(self, width: int = 1408, layers: int = 40, heads: int = 16, inner: int = 6144) -> None:
        super().__init__()
        self.again = False
        self.patches, self.place = nn.Conv2d(3, width, 14, 14), nn.Parameter(torch.zeros(1, 256, width))
        self.blocks = nn.ModuleList(
            _Block(width, heads, heads, width // heads, inner, causal=False) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x).mean(1))


class _Lora(nn.Module):
    """A frozen linear layer with a trained product of two narrow matrices beside it (arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(requires_grad=False)
        self.a = nn.Linear(linear.in_features, rank, bias=False, dtype=linear.weight.dtype)
        self.b = nn.Linear(rank, linear.out_features, bias=False, dtype=linear.weight.dtype)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.b(self.a(x))


def _with_lora(model: nn.Module, rank: int) -> None:
    model.requires_grad_(requires_grad=False)
    for block in [*model.modules()]:
        if isinstance(block, _Attention | _Block):
            for name, child in [*block.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(block, name, _Lora(child, rank))


@dataclass
class Job:
    """What is trained: the model on the CPU, its optimizer, its step, a batch, and how much that is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    batch: tuple[Tensor, ...]
    samples: int
    extra: dict[str, Any] = field(default_factory=dict)


def make(model: dict[str, Any], size: int, *, again: bool = False, foretold: bool = False) -> Job:
    """A job of a row.

    Args:
        model: of the row.
        size: of the batch, of a sequence, or layers of a deep network.
        again: whether blocks are checkpointed.
        foretold: whether it is captured for a GPU that is not here.
    """
    shape = dict(model)
    kind = shape.pop("kind")
    torch.manual_seed(0)
    if kind == "zoo":
        from outofcore.zoo import workload  # noqa: PLC0415 - of these rows alone

        work = workload(shape.pop("name"), batch=size, **shape)
        net = work.build()
        optimizer = work.optimizer(net)
        return Job(net, optimizer, work.make_step(net, optimizer), next(work.batches()), size)
    if kind == "resnet":
        from outofcore.zoo import workload  # noqa: PLC0415 - of this row alone

        small = bool(shape.get("small"))
        options = {"batch": 16 if small else size, "size": 32 if small else 224, "depth": size if small else 50}
        work = workload("resnet", **options, images="generated", optimizer="momentum", amp=True)
        net = work.build()
        optimizer = work.optimizer(net)
        return Job(net, optimizer, work.make_step(net, optimizer), next(work.batches()), options["batch"])
    rank = shape.pop("rank", 0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        net = Vit() if kind == "vit" else Decoder(**shape)
        if rank:
            _with_lora(net, rank)
    finally:
        torch.set_default_dtype(torch.float32)
    net.again = again
    for part in net.modules():
        if isinstance(part, _Attention):
            part.foretold = foretold
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-5)
    if kind == "vit":
        batch = torch.randn(size, 3, 224, 224, dtype=torch.bfloat16), torch.randint(0, 1000, (size,))
    else:
        batch = (torch.randint(0, shape["vocab"], (1, size)),)

    def step(*given: Tensor) -> Tensor:
        out = net(given[0])
        loss = F.cross_entropy(out.float(), given[1]) if len(given) > 1 else out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(net, optimizer, step, batch, size)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """One measurement, in this process."""
    import outofcore  # noqa: PLC0415 - not needed for plain PyTorch

    if spec["mode"] == "save-on-cpu":
        # Its pinned memory, rounded up to powers of two, is not to take the machine down.
        most = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.8)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    total = torch.cuda.get_device_properties(0).total_memory
    if spec["cap"] and spec["mode"] != "followed":  # what is below 64 KiB lies beside the budget of a loop
        torch.cuda.set_per_process_memory_fraction(min(spec["cap"] / total, 1.0), 0)
    job = make(spec["model"], spec["size"], again=spec["mode"] == "checkpoint")
    with contextlib.ExitStack() as stack:
        ours = loop = None
        if spec["mode"] == "outofcore":
            ours = outofcore.compile(job.step, job.model, job.optimizer, budget=spec["cap"], device="cuda")
            step: Callable[..., Tensor] = stack.enter_context(ours)
            batch = tuple(t.pin_memory() for t in job.batch)
        else:
            job.model.cuda()
            step, batch = job.step, tuple(t.cuda() for t in job.batch)
            if spec["mode"] == "save-on-cpu":
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=True))
            if spec["mode"] == "followed":
                loop = stack.enter_context(outofcore.budget(spec["cap"], job.model, cache=False))
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        first, taken, losses = 0.0, [], []
        for number in range(spec["warm_up"] + spec["steps"]):
            if number == spec["warm_up"] and loop is not None:
                _until_planned(loop, lambda: step(*batch))
            start = time.perf_counter()
            loss = step(*batch)
            torch.cuda.synchronize()
            if number == 0:
                first = time.perf_counter() - begin
            if number in (0, spec["warm_up"] - 1):
                losses.append(float(loss.detach()))
            if number >= spec["warm_up"]:
                taken.append(time.perf_counter() - start)
        seconds = statistics.median(taken)
        answer: dict[str, Any] = {
            "seconds": seconds,
            "per_s": job.samples / seconds,
            "first_s": first,
            "losses": losses,  # of the first step, and of the last one that is not timed
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }
        if ours is not None:
            stats = ours.stats
            answer |= {"predicted_s": stats.predicted_seconds, "bytes_out": stats.bytes_out, "off_plan": stats.off_plan}
        if loop is not None:
            answer["loop"] = asdict(loop.stats)
    return answer


def _until_planned(loop: Any, step: Callable[[], object], most: float = 20) -> None:
    """Run steps until the loop is followed by a plan, where it needs one; they are planned beside it."""
    deadline = time.monotonic() + most
    while time.monotonic() < deadline and loop.stats.evictions and not loop.stats.planned_ops:
        step()
        torch.cuda.synchronize()
    for _ in range(3):
        step()


def predict(row: Row, size: int) -> dict[str, Any]:
    """What the planner expects of a row on the GPU of the preset, from a machine without one.

    Where the cap is a share of what plain PyTorch takes, it is that share of the least that holds all; where the batch
    follows from the cap, it is worked out from two small ones, as on the GPU.
    """
    from outofcore import planning  # noqa: PLC0415 - not needed for plain PyTorch
    from outofcore.errors import BudgetError  # noqa: PLC0415

    batch = size or _fitting(row, lambda small: planning.in_core_budget(*_costed(row, small)))
    begin = time.process_time()
    graph, costs = _costed(row, batch)
    captured = time.process_time()
    in_core, smallest = planning.in_core_budget(graph, costs), planning.smallest_budget(graph, costs)
    cap = int(row.cap if row.cap >= 1 else row.cap * in_core)
    room = cap - _BESIDE - max(cap // _RESERVED_SHARE, 32 << 20)
    found: dict[str, Any] = {
        "size": batch,
        "cap": cap,
        "ops": len(graph.ops),
        "in_core_bytes": in_core,
        "smallest_bytes": smallest,
        "in_core_s": round(costs.compute_seconds, 4),
    }
    try:
        planned = planning.plan_step(graph, costs, room)
    except BudgetError as error:
        found["refused"] = str(error).splitlines()[0][:300]
    else:
        # A step of a deep network has one sample; a sequence has so many tokens.
        samples = 16 if row.model.get("small") else batch
        seconds = planned.timeline.step_seconds
        found |= {"seconds": round(seconds, 4), "per_s": round(samples / seconds, 2), "policy": planned.plan.policy}
        found["arena_bytes"] = planned.program.arena_bytes
    took = [round(after - before, 1) for before, after in ((begin, captured), (captured, time.process_time()))]
    print(f"{took[0]} s of processor time to capture, {took[1]} s to plan", file=sys.stderr, flush=True)
    return found


def _costed(row: Row, size: int) -> tuple[Any, Any]:
    """The step of a row with its costs on the GPU of the preset."""
    from outofcore import presets  # noqa: PLC0415 - not needed for plain PyTorch
    from outofcore.estimation.costing import costed  # noqa: PLC0415
    from outofcore.progress import silent  # noqa: PLC0415

    device = presets.simulated(PRESET)
    if device is None:
        raise RuntimeError(f"there is no preset {PRESET}")
    model = {name: value for name, value in row.model.items() if name != "times"}
    with torch.device("meta"):
        job = make(model, size, foretold=True)
    batch = tuple(part.to("meta") for part in job.batch)
    models = [job.model.to("meta")]
    found = costed(job.step, models, [job.optimizer], batch, {}, where=device, cache=None, tell=silent)
    return found.graph, found.costs


def predict_all(file: Path, numbers: set[int]) -> None:
    """Write the predictions of some rows, each made in a process of its own; those of others stay."""
    from outofcore import presets  # noqa: PLC0415 - not needed for plain PyTorch

    told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    device = presets.simulated(PRESET)
    told["device"] = device.describe() if device is not None else PRESET
    for row in ROWS:
        for size in row.sizes if row.number in numbers else ():
            command = [sys.executable, str(Path(__file__)), "--predict-one", str(row.number), str(size)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_PREDICTION_LIMIT_S, check=False, cwd=ROOT
                )
                print(done.stderr.strip()[-300:], flush=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                found = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-300:]}
            except subprocess.TimeoutExpired:
                found = {"error": f"not planned in {_PREDICTION_LIMIT_S} s"}
            told[f"{row.number}/{size}"] = {"job": row.job, **found}
            told = {key: told[key] for key in ("device", *_KEYS) if key in told}
            file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            print(row.number, size, found, flush=True)


def compare(seconds: float, small: bool, tell: Callable[..., None], failed: list[str]) -> None:
    """All rows, as long as there is time.

    Args:
        seconds: for all of it.
        small: tiny shapes, to try the comparison itself.
        tell: prints a result.
        failed: gets the rows in which ours did not run.
    """
    deadline = time.monotonic() + seconds
    late: list[tuple[Row, int, float]] = []
    told = json.loads(PREDICTIONS.read_text(encoding="utf-8")) if PREDICTIONS.exists() else {}
    for row in [_tiny(row) for row in ROWS] if small else ROWS:
        if deadline - time.monotonic() < 30:
            tell(piece="H", say=f"no time left for row {row.number}")
            continue
        for size in row.sizes:
            cap, answers = row.cap, {}
            wanted = size or _fitting(row, partial(_reserved, row, deadline))
            base = row.model | ({} if size else {"times": 0})
            base.pop("times", None)
            if row.number not in (6, 8):
                answers["plain, no cap"] = _run(row, base, "plain", wanted, None, deadline)
            foretold = None if small else told.get(f"{row.number}/{size}")
            if cap < 1:
                # Where plain PyTorch does not run, a share of what it would take, as far as that is known.
                peak = answers["plain, no cap"].get("peak_reserved", 0)
                cap = cap * peak or (foretold or {}).get("cap", 0)
                if not cap:
                    tell(piece="H", say=f"! row {row.number}, {row.job}, {wanted}: nothing to take a share of")
                    failed.append(row.job)
                    break
            answers["outofcore"] = _run(row, base, "outofcore", wanted, int(cap), deadline)
            for rival in row.rivals:
                answers[rival] = _run(row, base, rival, wanted, int(cap), deadline)
            tell(piece="H", row=row.number, job=row.job, size=wanted, cap=int(cap), answers=answers, predicted=foretold)
            tell(piece="H", say=_line(row, wanted, answers, foretold))
            if "seconds" not in answers["outofcore"]:
                failed.append(row.job)
                break
            late.append((row, wanted, cap))
    for row, size, cap in late[:3]:
        if deadline - time.monotonic() > 30 and row.rivals:
            model = {name: value for name, value in row.model.items() if name != "times"}
            answer = _run(row, model, "save-on-cpu", size, int(cap), deadline)
            tell(piece="H", row=row.number, size=size, answers={"save-on-cpu": answer})


def _tiny(row: Row) -> Row:
    model = {"kind": "resnet"} if row.model["kind"] == "resnet" else dict(row.model)
    if model["kind"] == "decoder":
        model |= {"width": 256, "layers": 3, "heads": 4, "groups": 2, "head": 64, "inner": 512, "vocab": 512}
    cap = row.cap if row.cap < 1 else 2 * GIB
    return Row(
        row.number, row.job, model, cap, row.others, row.goal, (4 if model["kind"] != "decoder" else 256,), row.rivals
    )


def _fitting(row: Row, bytes_of: Callable[[int], int]) -> int:
    """So many times the batch that fits the cap in plain PyTorch, by what two small ones take."""
    small, large = bytes_of(16), bytes_of(48)
    each = max((large - small) / 32, 1.0)
    return max(int((row.cap - GIB - small) / each * row.model["times"]), 1)


def _reserved(row: Row, deadline: float, size: int) -> int:
    """Bytes that plain PyTorch takes from the device."""
    model = {name: value for name, value in row.model.items() if name != "times"}
    return _run(row, model, "plain", size, None, deadline).get("peak_reserved", 0)


def _line(row: Row, size: int, answers: dict[str, Any], foretold: dict[str, Any] | None) -> str:
    """A row in words."""
    ours, plain = answers["outofcore"], answers.get("plain, no cap", {})
    told = _foretold(ours, plain, foretold)
    if "seconds" not in ours:
        return f"! row {row.number}, {row.job}, {size}: {ours.get('error')}: {str(ours.get('detail'))[:80]}{told}"
    share = f"{ours['seconds'] / plain['seconds']:.2f}x of in core" if "seconds" in plain else "in core does not run"
    return (
        f"row {row.number}, {row.job}, {size}: {share}, {ours['per_s']:.1f}/s, "
        f"peak {ours['peak_reserved'] / GIB:.1f} GiB, predicted {ours['predicted_s'] / ours['seconds']:.2f} of it"
        f"{told} (others {row.others}; goal {row.goal})"
    )


def _foretold(ours: dict[str, Any], plain: dict[str, Any], foretold: dict[str, Any] | None) -> str:
    """What was predicted without a GPU beside what was measured on it, in words."""
    if foretold is None:
        return ""
    if "per_s" not in foretold:
        return f"; beforehand: {foretold.get('refused') or foretold.get('error')}"[:120]
    found = f"{ours['per_s']:.4g}" if "per_s" in ours else "nothing"
    text = f"; beforehand {foretold['per_s']:.4g}/s, measured {found}"
    if "seconds" in plain and "seconds" in ours:
        text += (
            f", as shares of in core {foretold['seconds'] / foretold['in_core_s']:.2f}x, measured "
            f"{ours['seconds'] / plain['seconds']:.2f}x"
        )
    return text


def _run(row: Row, model: dict[str, Any], mode: str, size: int, cap: int | None, deadline: float) -> dict[str, Any]:
    limit = min(row.limit, deadline - time.monotonic())
    if limit < 10:
        return {"error": "no time left"}
    few = size >= 65536
    steps, warm_up = (2, 2) if few else (STEPS, WARM_UP)
    spec = {"model": model, "mode": mode, "size": size, "cap": cap, "steps": steps, "warm_up": warm_up}
    env = dict(os.environ)
    if mode != "outofcore":
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    process = subprocess.Popen(
        [sys.executable, "-u", str(Path(__file__)), json.dumps(spec)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # it leads a session of its own
        process.communicate()
        return {"error": f"not done in {limit:.0f} s"}
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": f"exit status {process.returncode}"}


_PACES = {
    "GPT, 25M": {"kind": "zoo", "name": "gpt", "params": "25M", "context": 256, "optimizer": "adamw"},
    "ResNet-50": {"kind": "zoo", "name": "resnet", "depth": 50, "images": "generated", "optimizer": "momentum"},
}
_TINY_PACES: dict[str, dict[str, Any]] = {
    "GPT, 25M": {"kind": "zoo", "name": "gpt", "layers": 2, "width": 64, "heads": 2, "context": 32},
    "ResNet-50": {"kind": "zoo", "name": "resnet", "depth": 50, "size": 32, "images": "generated"},
}
_PACE_BATCHES = {"GPT, 25M": 32, "ResNet-50": 64}


def paces(seconds: float, small: bool, tell: Callable[..., None], failed: list[str]) -> None:
    """Loops that are followed, with room for all and in half of it, beside plain PyTorch and a compiled step.

    Args:
        seconds: for all of it.
        small: tiny shapes.
        tell: prints a result.
        failed: gets what did not run.
    """
    deadline = time.monotonic() + seconds
    for name, model in (_TINY_PACES if small else _PACES).items():
        batch = 4 if small else _PACE_BATCHES[name]
        row = Row(0, name, model, 0, "", "", (batch,), (), 60)
        plain = _run(row, model, "plain", batch, None, deadline)
        peak = int(plain.get("peak_reserved", 0)) or 2 * GIB
        answers = {
            "followed, room": _run(row, model, "followed", batch, peak + GIB // 4, deadline),
            "followed, half": _run(row, model, "followed", batch, peak // 2, deadline),
            "compiled, half": _run(row, model, "outofcore", batch, max(peak // 2, GIB // 4), deadline),
        }
        tell(piece="I", job=name, size=batch, peak=peak, answers={"plain": plain, **answers})
        parts: list[str] = []
        for way, answer in answers.items():
            if "seconds" in answer and "seconds" in plain:
                near = all(abs(a - b) <= 0.01 * abs(b) for a, b in zip(answer["losses"], plain["losses"], strict=True))
                same = "" if near else " (another loss)"
                parts.append(f"{way} {answer['seconds'] / plain['seconds']:.2f}x{same}")
            else:
                parts.append(f"{way}: {answer.get('error')}: {str(answer.get('detail'))[:60]}")
                failed.append(f"{name}, {way}")
        bad = "! " if any("seconds" not in answer for answer in answers.values()) else ""
        told = f"{plain['seconds'] * 1e3:.1f} ms" if "seconds" in plain else f"{plain.get('error')}"
        tell(piece="I", say=f"{bad}{name}: plain {told}; {', '.join(parts)}")


def main() -> None:
    if sys.argv[1] == "--predict":
        wanted = sys.argv[2] if len(sys.argv) > 2 else ",".join(str(row.number) for row in ROWS)
        predict_all(PREDICTIONS, {int(number) for number in wanted.split(",")})
        return
    if sys.argv[1] == "--predict-one":
        row = next(row for row in ROWS if row.number == int(sys.argv[2]))
        try:
            print(json.dumps(predict(row, int(sys.argv[3]))), flush=True)
        except Exception as error:  # a row that cannot be planned is one to know of
            print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)
        return
    try:
        answer = measure(json.loads(sys.argv[1]))
    except torch.OutOfMemoryError as error:
        answer = {"error": "out of memory", "detail": str(error).splitlines()[0]}
    except Exception as error:  # the row says so, and the next one is measured
        answer = {"error": type(error).__name__, "detail": str(error)[:1000]}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
