"""The jobs of a visit to a GPU that are compared with plain PyTorch, each within a cap of device memory.

The cap is ``torch.cuda.set_per_process_memory_fraction``: whoever needs more fails. Plain PyTorch runs without it. Data
is random, and weights are a block of random numbers again and again: drawing each would take a thread half a minute.

``--predict`` (``make gpu-predictions``) works out what the planner expects of each row, on a machine without a GPU, and
keeps it in ``benchmarks/results``. A visit takes the caps and the batch from there that follow from plain PyTorch's
memory, so that it need not measure that first, and prints the predicted times beside the measured ones. A step is
captured there without memory, with the attention kernel that a GPU would take, and costs what a roofline over the peak
rates of the preset gives. Plans are not carried along: they would be plans for these estimates, where a visit is to
measure the plans that the library makes from what it measures.
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
_CHUNK = 4096  # tokens whose logits are made at once
_BLOCK = 1 << 20
# What a step on a GPU leaves of its budget to others, as it is asked for there: cuBLAS's workspace, and what the
# caching allocator takes beside the arena; and a share for what no plan foresees.
_BESIDE, _RESERVED_SHARE = 96 << 20, 64
_PREDICTION_LIMIT_S = 900


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        number: by which it is chosen.
        job: what is trained, in words.
        model: arguments of ``make``.
        cap: bytes of device memory; below 1: the share of what plain PyTorch needs.
        size: batch, or tokens in a sequence; 0: ``times`` the batch that fits the cap in plain PyTorch.
        others: published results of other systems, relative to plain PyTorch.
        goal: the same for this library.
        times: see ``size``.
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
        """Its name among the predictions."""
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
    """A vision transformer of the shape of ViT-g/14 (arXiv 2106.04560), for square images."""

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
    """What is trained: the model on the CPU, its optimizer, its step and a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    batch: tuple[Tensor, ...]


def make(model: dict[str, Any], size: int, *, again: bool = False, foretold: bool = False) -> Job:
    """Make the job of a row.

    Args:
        model: of the row.
        size: of the batch, or of a sequence.
        again: whether blocks are checkpointed.
        foretold: whether it is captured for a GPU that is not here, without memory.
    """
    shape = dict(model)
    kind = shape.pop("kind")
    torch.manual_seed(0)
    if kind == "resnet":
        from outofcore.zoo import workload  # noqa: PLC0415 - of these rows alone

        options = {"batch": size, "size": 224, "depth": 50, **shape}
        work = workload("resnet", **options, images="generated", optimizer="momentum", amp=True)
        net = work.build()
        if again:
            sys.path.insert(0, str(ROOT / "benchmarks"))
            from _blocks import checkpoint_blocks  # noqa: PLC0415 - of one rival alone

            checkpoint_blocks(net)
        optimizer = work.optimizer(net)
        return Job(net, optimizer, work.make_step(net, optimizer), next(work.batches()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            net = Vit(**shape) if kind == "vit" else Decoder(**shape)
    finally:
        torch.set_default_dtype(torch.float32)
    net.again = again
    if foretold:
        for part in net.modules():
            if isinstance(part, _Attention):
                part.foretold = True
    else:
        fill_weights(net.to_empty(device="cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    if kind == "vit":
        edge = shape.get("edge", 224)
        batch = torch.randn(size, 3, edge, edge, dtype=torch.bfloat16), torch.randint(0, 1000, (size,))
    else:
        batch = (torch.randint(0, shape["vocab"], (1, size)),)

    def step(*given: Tensor) -> Tensor:
        out = net(given[0])
        loss = F.cross_entropy(out.float(), given[1]) if len(given) > 1 else out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(net, optimizer, step, batch)


def fill_weights(model: nn.Module) -> None:
    """Give every parameter values: a block of random numbers again and again, and vectors, such as of norms, ones."""
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            if parameter.dim() < 2:
                flat.fill_(1)
                continue
            block = block.to(flat.dtype)
            whole = flat.numel() // _BLOCK * _BLOCK
            flat[:whole].view(-1, _BLOCK).copy_(block)
            flat[whole:].copy_(block[: flat.numel() - whole])


def measure(name: str, small: bool) -> dict[str, Any]:
    """Measure a row in one way, in this process.

    Args:
        name: such as "3: ours"; the ways are ours, plain and checkpoint.
        small: a tiny shape, to rehearse it.
    """
    import outofcore  # noqa: PLC0415 - not needed for predictions

    number, _, mode = name.partition(": ")
    row = next(row for row in ROWS if row.number == int(number))
    foretold = {} if small else json.loads(PREDICTIONS.read_text(encoding="utf-8"))[row.key]
    if small:
        row = shrink(row)
    size, cap = row.size or foretold["size"], int(row.cap) or foretold["cap"]
    if mode != "plain":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), 0)
    begin = time.perf_counter()
    job = make(row.model, size, again=mode == "checkpoint")
    made_s = time.perf_counter() - begin
    with contextlib.ExitStack() as stack:
        ours = None
        if mode == "ours":
            ours = outofcore.compile(job.step, job.model, job.optimizer, budget=cap, device="cuda", policy=POLICY)
            step: Callable[..., Tensor] = stack.enter_context(ours)
            batch = tuple(t.pin_memory() for t in job.batch)
            ours.prepare(*batch)  # by the whole search, as the row was predicted
        else:
            job.model.cuda()
            step, batch = job.step, tuple(t.cuda() for t in job.batch)
        found: dict[str, Any] = {"job": row.job, "mode": mode, "size": size, "made_s": made_s}
        found |= timed(lambda: step(*batch), WARM_UP, STEPS)
        found["per_s"] = size / found["seconds_a_step"]
        say = f"{found['seconds_a_step'] * 1e3:.1f} ms, {found['per_s']:.1f}/s, "
        say += f"peak {found['peak_reserved'] / GIB:.2f} GiB"
        if mode != "plain":
            found["cap"] = cap
            say += f" of {cap / GIB:.2f}"
        if ours is not None:
            stats = ours.stats
            found |= {"policy": POLICY, "predicted_s": stats.predicted_seconds, "bytes_out": stats.bytes_out}
            found |= {"off_plan": stats.off_plan, "warm_up": WARM_UP, "beforehand": foretold}
            say += f", predicted {stats.predicted_seconds / found['seconds_a_step']:.2f} of it{_foretell(foretold)}"
            say += f" ({POLICY}, {WARM_UP} steps before; others {row.others}; goal {row.goal})"
            if "seconds" in foretold:
                found["foretold_share"] = foretold["seconds"] / foretold["in_core_s"]
    return {**found, "say": say}


def timed(step: Callable[[], Tensor], warm_up: int, steps: int) -> dict[str, Any]:
    """Run a step so often, and return its median time, its first time, two losses and what the device reserved."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    taken, losses = [], []
    for number in range(warm_up + steps):
        begin = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
        if number in (0, warm_up - 1):
            losses.append(float(loss.detach()))
    return {
        "seconds_a_step": statistics.median(taken[warm_up:]),
        "first_s": taken[0],
        "losses": losses,
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def shrink(row: Row) -> Row:
    """Return a row whose model is tiny, within a cap that holds what is taken to measure a link."""
    tiny: dict[str, dict[str, Any]] = {
        "resnet": {"size": 32, "depth": 18},
        "vit": {"width": 64, "layers": 2, "heads": 2, "inner": 128, "edge": 28},
        "decoder": {"width": 64, "layers": 2, "heads": 2, "groups": 1, "head": 32, "inner": 128, "vocab": 512},
    }
    kind = row.model["kind"]
    size = 128 if kind == "decoder" else 4
    return replace(row, model={"kind": kind, **tiny[kind]}, cap=512 << 20, size=size)


def _foretell(foretold: dict[str, Any]) -> str:
    """Return what was predicted beforehand, in words."""
    if not foretold:
        return ""
    if "per_s" not in foretold:
        return f"; beforehand: {foretold.get('refused') or foretold.get('error')}"[:120]
    return f", beforehand {foretold['per_s']:.4g}/s"


def predict(row: Row) -> dict[str, Any]:
    """Predict what a row takes on the GPU of the preset, on a machine without one.

    Where the cap is a share of what plain PyTorch needs, it is that share of the least that holds everything; where the
    batch follows from the cap, it is extrapolated from two small ones.
    """
    from outofcore import planning  # noqa: PLC0415 - not needed where a row is measured
    from outofcore.errors import BudgetError  # noqa: PLC0415

    size = row.size or _fitting(row, lambda small: planning.in_core_budget(*_costed(row, small)))
    begin = time.process_time()
    graph, costs = _costed(row, size)
    captured = time.process_time()
    in_core, smallest = planning.in_core_budget(graph, costs), planning.smallest_budget(graph, costs)
    cap = int(row.cap if row.cap >= 1 else row.cap * in_core)
    found: dict[str, Any] = {
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
        found["refused"] = str(error).splitlines()[0][:300]
    else:
        seconds = planned.timeline.step_seconds
        found |= {"seconds": round(seconds, 4), "per_s": round(size / seconds, 2), "policy": planned.plan.policy}
        found["arena_bytes"] = planned.program.arena_bytes
    took = [round(after - before, 1) for before, after in ((begin, captured), (captured, time.process_time()))]
    print(f"{took[0]} s of processor time to capture, {took[1]} s to plan", file=sys.stderr, flush=True)
    return found


def _costed(row: Row, size: int) -> tuple[Any, Any]:
    """Return the step of a row with its costs on the GPU of the preset."""
    from outofcore import presets  # noqa: PLC0415 - not needed where a row is measured

    with torch.device("meta"):
        job = make(row.model, size, foretold=True)
    return costed_job(job, presets.device(PRESET))


def costed_job(job: Job, device: Any) -> tuple[Any, Any]:
    """Return the step of a job, captured without memory, with its costs on a device of ``outofcore.presets``."""
    from outofcore.estimation.costing import costed  # noqa: PLC0415 - not needed where a row is measured
    from outofcore.options import UserStep  # noqa: PLC0415
    from outofcore.progress import silent  # noqa: PLC0415

    batch = tuple(part.to("meta") for part in job.batch)
    user = UserStep(job.step, [job.model.to("meta")], [job.optimizer])
    found = costed(user, batch, {}, device, tell=silent)
    return found.graph, found.costs


def room_of(cap: int) -> int:
    """Return the bytes that a plan may use within a cap of device memory."""
    return cap - _BESIDE - max(cap // _RESERVED_SHARE, 32 << 20)


def predict_all(file: Path, numbers: set[int]) -> None:
    """Write the predictions of some rows, each made in a process of its own; those of other rows stay."""
    from outofcore import presets  # noqa: PLC0415 - not needed where a row is measured

    told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    device = presets.simulated(PRESET)
    told["device"] = device.describe() if device is not None else PRESET
    for row in ROWS:
        if row.number not in numbers:
            continue
        command = [sys.executable, str(Path(__file__)), "--predict-one", str(row.number)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PREDICTION_LIMIT_S, check=False, cwd=ROOT
            )
            print(done.stderr.strip()[-300:], flush=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-300:]}
        except subprocess.TimeoutExpired:
            found = {"error": f"not planned in {_PREDICTION_LIMIT_S} s"}
        told[row.key] = {"job": row.job, **found}
        told = {key: told[key] for key in ("device", *(row.key for row in ROWS)) if key in told}
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        print(row.number, found, flush=True)


def _fitting(row: Row, bytes_of: Callable[[int], int]) -> int:
    """Return so many times the batch that fits the cap in plain PyTorch, by what two small ones take."""
    small, large = bytes_of(16), bytes_of(48)
    each = max((large - small) / 32, 1.0)
    return max(int((row.cap - GIB - small) / each * row.times), 1)


def main() -> None:
    how, *numbers = sys.argv[1:]
    if how == "--predict":
        wanted = numbers[0].split(",") if numbers else [row.number for row in ROWS]
        predict_all(PREDICTIONS, {int(number) for number in wanted})
        return
    row = next(row for row in ROWS if row.number == int(numbers[0]))
    try:
        print(json.dumps(predict(row)), flush=True)
    except Exception as error:  # a row that cannot be planned is one to know of
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)


if __name__ == "__main__":
    main()
