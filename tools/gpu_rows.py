"""The jobs of a GPU visit that are compared with plain PyTorch, each within a cap of device memory.

The cap is ``torch.cuda.set_per_process_memory_fraction``; a job that exceeds it fails. ``--predict`` (``make
gpu-predictions``) predicts each row on a machine without a GPU: the step is captured on meta tensors, and costs are a
roofline over the preset's peak rates. A visit takes caps and batch sizes that depend on plain PyTorch's memory from
there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_visit import ROOT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

GIB = 1 << 30
STEPS, WARM_UP = 4, 10
POLICY = "auto"
PRESET = "h200"
PREDICTIONS = ROOT / "benchmarks" / "results" / "gpu-predictions.json"
_CHUNK = 4096  # tokens per block of logits
_BLOCK = 1 << 20
# Memory of a GPU step outside its plan: cuBLAS's workspace, the caching allocator outside the arena, and a share for
# unplanned requests.
_OUTSIDE_ARENA, _RESERVED_SHARE = 96 << 20, 64
_PREDICTION_LIMIT_S = 900


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        cap: bytes of device memory; below 1: share of plain PyTorch's need.
        size: batch size, or tokens per sequence; 0: ``times`` the batch that fits the cap in plain PyTorch.
        others, goal: published results of other systems, and our goal, relative to plain PyTorch.
    """

    number: int
    job: str
    model: dict[str, Any]
    cap: float
    size: int
    others: str
    goal: str
    times: float = 1

    @property
    def key(self) -> str:
        return f"{self.number}/{self.size}"


_QWEN_06 = {"kind": "decoder", "width": 1024, "layers": 28, "heads": 16, "groups": 8, "head": 128, "inner": 3072}
_RESNET = {"kind": "resnet"}
ROWS = (
    Row(1, "ViT-giant-14, bf16, batch 32, AdamW", {"kind": "vit"}, 0.41, 32, "1.20x", "<= 1.05x"),
    Row(3, "ResNet-50, batch 640, 16 GiB", _RESNET, 16 * GIB, 640, "0.62 to 0.72 of its rate", ">= 0.92"),
    Row(4, "Qwen3-0.6B shape, full", {**_QWEN_06, "vocab": 151936}, 0.69, 4096, "2.23x", "<= 1.10x"),
    Row(2, "ResNet-50, 7.5 times the batch of 16 GiB", _RESNET, 16 * GIB, 0, "0.55 of its rate", ">= 0.90", times=7.5),
)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, head: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.head, self.causal = heads, groups, head, causal
        self.foretold = False  # capture the GPU's flash kernel without running it
        self.q, self.o = nn.Linear(width, heads * head, bias=False), nn.Linear(heads * head, width, bias=False)
        self.k, self.v = nn.Linear(width, groups * head, bias=False), nn.Linear(width, groups * head, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.head).transpose(1, 2)
        k = self.k(x).view(b, t, self.groups, self.head).transpose(1, 2)
        v = self.v(x).view(b, t, self.groups, self.head).transpose(1, 2)
        if turn is not None:
            q, k = _rotate(q, *turn), _rotate(k, *turn)
        if self.foretold:
            y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal)[0]
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups != self.heads)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (Su et al., arXiv 2104.09864)."""
    first_half, second_half = x.chunk(2, -1)
    return torch.cat((first_half * cos - second_half * sin, first_half * sin + second_half * cos), -1)


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
    """A decoder in the style of Llama and Qwen; its loss computes logits in blocks of tokens."""

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
        hidden, targets = self.norm(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], _CHUNK):
            hidden_block, target_block = hidden[start : start + _CHUNK], targets[start : start + _CHUNK]
            total = total + (
                checkpoint(self._loss, hidden_block, target_block, use_reentrant=False)
                if self.again
                else self._loss(hidden_block, target_block)
            )
        return total / hidden.shape[0]

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.out(hidden).float(), targets, reduction="sum")


class Vit(nn.Module):
    """A vision transformer with the shape of ViT-g/14 (arXiv 2106.04560), for square images."""

    def __init__(
        self, width: int = 1408, layers: int = 40, heads: int = 16, inner: int = 6144, edge: int = 224
    ) -> None:
        super().__init__()
        self.again = False
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.place = nn.Parameter(torch.zeros(1, (edge // 14) ** 2, width))
        self.blocks = nn.ModuleList(
            _Block(width, heads, heads, width // heads, inner, causal=False) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x).mean(1))


@dataclass
class Job:
    """A training job: the model on the CPU, its optimizer, its step and a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    batch: tuple[Tensor, ...]


def make(model: dict[str, Any], size: int, *, checkpointed: bool = False, for_capture: bool = False) -> Job:
    """Build the job of a row.

    ``size`` is the batch size, or the length of a sequence. ``checkpointed`` checkpoints blocks. ``for_capture`` builds
    the job on meta tensors, for capture with the kernels of an absent GPU.
    """
    shape = dict(model)
    kind = shape.pop("kind")
    torch.manual_seed(0)
    if kind == "resnet":
        from outofcore.zoo import workload  # noqa: PLC0415 - used only by these rows

        options = {"batch": size, "size": 224, "depth": 50, **shape}
        work = workload("resnet", **options, images="generated", optimizer="momentum", amp=True)
        net = work.build()
        if checkpointed:
            sys.path.insert(0, str(ROOT / "benchmarks"))
            from _blocks import checkpoint_blocks  # noqa: PLC0415 - used only by one rival

            checkpoint_blocks(net)
        optimizer = work.optimizer(net)
        return Job(net, optimizer, work.make_step(net, optimizer), next(work.batches()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            net = Vit(**shape) if kind == "vit" else Decoder(**shape)
    finally:
        torch.set_default_dtype(torch.float32)
    net.again = checkpointed
    if for_capture:
        for module in net.modules():
            if isinstance(module, _Attention):
                module.foretold = True
    else:
        fill_weights(net.to_empty(device="cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    if kind == "vit":
        edge = shape.get("edge", 224)
        batch = torch.randn(size, 3, edge, edge, dtype=torch.bfloat16), torch.randint(0, 1000, (size,))
    else:
        batch = (torch.randint(0, shape["vocab"], (1, size)),)

    def step(*inputs: Tensor) -> Tensor:
        out = net(inputs[0])
        loss = F.cross_entropy(out.float(), inputs[1]) if len(inputs) > 1 else out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(net, optimizer, step, batch)


def fill_weights(model: nn.Module) -> None:
    """Fill matrices with one repeated block of random numbers, and vectors with ones."""
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            if parameter.dim() < 2:
                flat.fill_(1)
                continue
            block = block.to(flat.dtype)
            block_elements = flat.numel() // _BLOCK * _BLOCK
            flat[:block_elements].view(-1, _BLOCK).copy_(block)
            flat[block_elements:].copy_(block[: flat.numel() - block_elements])


def measure(name: str, small: bool) -> dict[str, Any]:
    """Measure a row such as "3: ours" in this process; modes are ours, plain and checkpoint."""
    import outofcore  # noqa: PLC0415 - not needed for predictions

    number, _, mode = name.partition(": ")
    row = next(row for row in ROWS if row.number == int(number))
    prediction = {} if small else json.loads(PREDICTIONS.read_text(encoding="utf-8"))[row.key]
    if small:
        row = shrink(row)
    size, cap = row.size or prediction["size"], int(row.cap) or prediction["cap"]
    if mode != "plain":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), 0)
    begin = time.perf_counter()
    job = make(row.model, size, checkpointed=mode == "checkpoint")
    made_s = time.perf_counter() - begin
    with contextlib.ExitStack() as stack:
        compiled_step = None
        if mode == "ours":
            compiled_step = outofcore.compile(
                job.step, job.model, job.optimizer, budget=cap, device="cuda", policy=POLICY
            )
            step: Callable[..., Tensor] = stack.enter_context(compiled_step)
            batch = tuple(t.pin_memory() for t in job.batch)
            compiled_step.prepare(*batch)  # with the full search, as in the prediction
        else:
            job.model.cuda()
            step, batch = job.step, tuple(t.cuda() for t in job.batch)
        result: dict[str, Any] = {"job": row.job, "mode": mode, "size": size, "made_s": made_s}
        result |= time_steps(lambda: step(*batch), WARM_UP, STEPS)
        result["per_s"] = size / result["seconds_a_step"]
        say = f"{result['seconds_a_step'] * 1e3:.1f} ms, {result['per_s']:.1f}/s, "
        say += f"peak {result['peak_reserved'] / GIB:.2f} GiB"
        if mode != "plain":
            result["cap"] = cap
            say += f" of {cap / GIB:.2f}"
        if compiled_step is not None:
            stats = compiled_step.stats
            result |= {"policy": POLICY, "predicted_s": stats.predicted_seconds, "bytes_out": stats.bytes_out}
            result |= {"off_plan": stats.off_plan, "warm_up": WARM_UP, "beforehand": prediction}
            say += f", predicted {stats.predicted_seconds / result['seconds_a_step']:.2f} of it"
            say += _describe_prediction(prediction)
            say += f" ({POLICY}, {WARM_UP} steps before; others {row.others}; goal {row.goal})"
            if "seconds" in prediction:
                result["foretold_share"] = prediction["seconds"] / prediction["in_core_s"]
    return {**result, "say": say}


def time_steps(step: Callable[[], Tensor], warm_up: int, steps: int) -> dict[str, Any]:
    """Run a step repeatedly; return its median and first time, two losses and the device's peak reserved bytes."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for number in range(warm_up + steps):
        begin = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        if number in (0, warm_up - 1):
            losses.append(float(loss.detach()))
    return {
        "seconds_a_step": statistics.median(seconds[warm_up:]),
        "first_s": seconds[0],
        "losses": losses,
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def shrink(row: Row) -> Row:
    """Return a row with a tiny model, and a cap large enough to measure links."""
    tiny: dict[str, dict[str, Any]] = {
        "resnet": {"size": 32, "depth": 18},
        "vit": {"width": 64, "layers": 2, "heads": 2, "inner": 128, "edge": 28},
        "decoder": {"width": 64, "layers": 2, "heads": 2, "groups": 1, "head": 32, "inner": 128, "vocab": 512},
    }
    kind = row.model["kind"]
    size = 128 if kind == "decoder" else 4
    return replace(row, model={"kind": kind, **tiny[kind]}, cap=512 << 20, size=size)


def _describe_prediction(prediction: dict[str, Any]) -> str:
    if not prediction:
        return ""
    if "per_s" not in prediction:
        return f"; beforehand: {prediction.get('refused') or prediction.get('error')}"[:120]
    return f", beforehand {prediction['per_s']:.4g}/s"


def predict(row: Row) -> dict[str, Any]:
    """Predict a row for the preset's GPU; a batch that depends on the cap is extrapolated from two small batches."""
    from outofcore import planning  # noqa: PLC0415 - not needed to measure a row
    from outofcore.errors import BudgetError  # noqa: PLC0415

    size = row.size or _extrapolate_batch(row, lambda small: planning.in_core_budget(*_capture_row(row, small)))
    begin = time.process_time()
    graph, costs = _capture_row(row, size)
    captured = time.process_time()
    in_core, smallest = planning.in_core_budget(graph, costs), planning.smallest_budget(graph, costs)
    cap = int(row.cap if row.cap >= 1 else row.cap * in_core)
    prediction: dict[str, Any] = {
        "size": size,
        "cap": cap,
        "ops": len(graph.ops),
        "in_core_bytes": in_core,
        "smallest_bytes": smallest,
        "in_core_s": round(costs.compute_seconds, 4),
    }
    try:
        planned = planning.plan_step(graph, costs, room_of(cap))
    except BudgetError as error:
        prediction["refused"] = str(error).splitlines()[0][:300]
    else:
        seconds = planned.timeline.step_seconds
        prediction |= {"seconds": round(seconds, 4), "per_s": round(size / seconds, 2), "policy": planned.plan.policy}
        prediction["arena_bytes"] = planned.program.arena_bytes
    durations = [round(after - before, 1) for before, after in ((begin, captured), (captured, time.process_time()))]
    print(f"{durations[0]} s of processor time to capture, {durations[1]} s to plan", file=sys.stderr, flush=True)
    return prediction


def _capture_row(row: Row, size: int) -> tuple[Any, Any]:
    from outofcore import presets  # noqa: PLC0415 - not needed to measure a row

    with torch.device("meta"):
        job = make(row.model, size, for_capture=True)
    return capture_with_costs(job, presets.device(PRESET))


def capture_with_costs(job: Job, device: Any) -> tuple[Any, Any]:
    """Return a job's step, captured on meta tensors, with its costs on a device of ``outofcore.presets``."""
    from outofcore.estimation.costing import cost_step  # noqa: PLC0415 - not needed to measure a row
    from outofcore.options import UserStep  # noqa: PLC0415
    from outofcore.progress import ignore_progress  # noqa: PLC0415

    batch = tuple(part.to("meta") for part in job.batch)
    user = UserStep(job.step, [job.model.to("meta")], [job.optimizer])
    estimate = cost_step(user, batch, {}, device, tell=ignore_progress)
    return estimate.graph, estimate.costs


def room_of(cap: int) -> int:
    """Return the bytes that a plan may use within a cap of device memory."""
    return cap - _OUTSIDE_ARENA - max(cap // _RESERVED_SHARE, 32 << 20)


def predict_all(file: Path, numbers: set[int]) -> None:
    """Write predictions of the given rows, each made in a separate process; other rows stay."""
    from outofcore import presets  # noqa: PLC0415 - not needed to measure a row

    predictions: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    device = presets.simulated(PRESET)
    predictions["device"] = device.describe() if device is not None else PRESET
    for row in ROWS:
        if row.number not in numbers:
            continue
        command = [sys.executable, str(Path(__file__)), "--predict-one", str(row.number)]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_PREDICTION_LIMIT_S, check=False, cwd=ROOT
            )
            print(process.stderr.strip()[-300:], flush=True)
            lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
            prediction = json.loads(lines[-1]) if lines else {"error": process.stderr.strip()[-300:]}
        except subprocess.TimeoutExpired:
            prediction = {"error": f"not planned in {_PREDICTION_LIMIT_S} s"}
        predictions[row.key] = {"job": row.job, **prediction}
        predictions = {key: predictions[key] for key in ("device", *(row.key for row in ROWS)) if key in predictions}
        file.write_text(json.dumps(predictions, indent=1) + "\n", encoding="utf-8")
        print(row.number, prediction, flush=True)


def _extrapolate_batch(row: Row, bytes_of: Callable[[int], int]) -> int:
    """Return ``row.times`` the batch that fits the cap in plain PyTorch, extrapolated from two small batches."""
    small, large = bytes_of(16), bytes_of(48)
    bytes_per_sample = max((large - small) / 32, 1.0)
    return max(int((row.cap - GIB - small) / bytes_per_sample * row.times), 1)


def main() -> None:
    mode, *numbers = sys.argv[1:]
    if mode == "--predict":
        chosen = numbers[0].split(",") if numbers else [row.number for row in ROWS]
        predict_all(PREDICTIONS, {int(number) for number in chosen})
        return
    row = next(row for row in ROWS if row.number == int(numbers[0]))
    try:
        print(json.dumps(predict(row)), flush=True)
    except Exception as error:  # record the failure as the row's result
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)


if __name__ == "__main__":
    main()
