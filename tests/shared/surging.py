"""Training steps whose ops need more memory at some calls than at others, and a comparison of them with plain PyTorch.

The optimizers are short versions of published ones, reduced to when they ask for memory and when they make state. The
models have ops whose scratch memory depends on values. Sizes are such that a step takes milliseconds.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.optim import Optimizer

import outofcore
from outofcore.errors import BudgetError
from outofcore.execution.arena import Answer, Arena
from outofcore.execution.demand_eviction import DemandEviction
from outofcore.units import PAGE_BYTES, round_up

WIDTH, BATCH = 192, 48
Made = tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, Optimizer]


class Matrixwise(Optimizer):
    """A base for optimizers that do something to the gradient of each matrix.

    Args:
        params: of the model.
        every: how often they do what is dear.
    """

    def __init__(self, params: Any, *, lr: float = 1e-2, every: int = 3) -> None:
        super().__init__(params, {"lr": lr})
        self.every = every

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                update = parameter.grad
                if parameter.ndim == 2:
                    update = self.matrix(parameter, parameter.grad, state)
                parameter.add_(update, alpha=-group["lr"])

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The update of a matrix."""
        raise NotImplementedError

    def is_due(self, state: dict[str, Any]) -> bool:
        """Whether what is dear is to be done in this step."""
        return bool(state["step"] % self.every == 0)


class Shampoo(Matrixwise):
    """Preconditioners whose roots are taken now and then (Gupta et al., arXiv 1802.09568)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if "left" not in state:
            state["left"] = torch.eye(gradient.shape[0])
            state["root"] = torch.eye(gradient.shape[0])
        state["left"].addmm_(gradient, gradient.t())
        if self.is_due(state):
            values, vectors = torch.linalg.eigh(state["left"])
            state["root"].copy_(vectors @ torch.diag(values.clamp_min(1e-6).pow(-0.25)) @ vectors.t())
        return state["root"] @ gradient


class GaLore(Matrixwise):
    """Moments in a space of low rank, found anew now and then (Zhao et al., arXiv 2403.03507)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if "basis" not in state or self.is_due(state):
            left, _, _ = torch.linalg.svd(gradient, full_matrices=True)
            state["basis"] = left[:, :16].contiguous()
        low = state["basis"].t() @ gradient
        if "moment" not in state:
            state["moment"] = torch.zeros_like(low)
        state["moment"].mul_(0.9).add_(low)
        return state["basis"] @ state["moment"]


class Soap(Matrixwise):
    """Adam in the eigenbasis of a preconditioner, which a QR decomposition renews (Vyas et al., arXiv 2409.11321)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if "cover" not in state:
            state["cover"], state["basis"] = torch.eye(len(gradient)), torch.eye(len(gradient))
            state["second"] = torch.zeros_like(gradient)
        state["cover"].mul_(0.95).addmm_(gradient, gradient.t())
        if self.is_due(state):
            state["basis"].copy_(torch.linalg.qr(state["cover"] @ state["basis"])[0])
        turned = state["basis"].t() @ gradient
        state["second"].mul_(0.99).addcmul_(turned, turned, value=0.01)
        return state["basis"] @ (turned / (state["second"].sqrt() + 1e-3))


class Muon(Matrixwise):
    """Momentum made orthogonal by Newton and Schulz, in more steps now and then (Jordan, 2024)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(0.95).add_(gradient)
        x = state["momentum"] / (state["momentum"].norm() + 1e-7)
        kept = []
        for _ in range(5 if self.is_due(state) else 2):
            square = x @ x.t()
            kept.append(square)
            x = 1.5 * x - 0.5 * square @ x
        return x + 1e-6 * sum(kept) @ x if self.is_due(state) else x


class Lookahead(Matrixwise):
    """Slow weights that are made at the first synchronisation (Zhang et al., arXiv 1907.08610)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if self.is_due(state):
            if "slow" not in state:
                state["slow"] = parameter.clone()
            state["slow"].add_(parameter - state["slow"], alpha=0.5)
            parameter.copy_(state["slow"])
        return gradient


class WarmUp(Matrixwise):
    """Moments from the fourth step on."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if state["step"] == 4:
            state["moment"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        if state["step"] < 4:
            return gradient
        state["moment"].lerp_(gradient, 0.1)
        state["second"].lerp_(gradient.square(), 0.01)
        return state["moment"] / (state["second"].sqrt() + 1e-3)


class Whitening(Matrixwise):
    """A singular value decomposition every third step."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not self.is_due(state):
            return gradient
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return left @ right


class Kronecker(Matrixwise):
    """A damped inverse, made anew every third step and first at the third."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if self.is_due(state):
            state["inverse"] = torch.linalg.inv(gradient @ gradient.t() + torch.eye(len(gradient)))
        return state["inverse"] @ gradient if "inverse" in state else gradient


class Secant(Matrixwise):
    """A history of gradients that grows for some steps."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        count = min(state["step"], 3)
        history = state.get("history")
        if history is None or len(history) < count:
            older = [] if history is None else [history]
            state["history"] = torch.cat([*older, gradient.unsqueeze(0).clone()])
        else:
            history.copy_(torch.cat([history[1:], gradient.unsqueeze(0)]))
        return state["history"].mean(0)


class Clipping(Matrixwise):
    """Quantiles of all elements, every third step."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not self.is_due(state):
            return gradient.clamp(-1, 1)
        ranked = gradient.abs().flatten().sort().values
        return gradient.clamp(-ranked[-9], ranked[-9])


OPTIMIZERS: dict[str, type[Matrixwise]] = {
    kind.__name__.lower(): kind
    for kind in (Shampoo, GaLore, Soap, Muon, Lookahead, WarmUp, Whitening, Kronecker, Secant, Clipping)
}


@torch.library.custom_op("outofcore_tests::surge", mutates_args=())
def surge(x: torch.Tensor, most: int) -> torch.Tensor:
    """Doubles, by way of scratch memory that depends on values: from 4 up to 16 * ``most`` times that of ``x``."""
    share = min(max(float(x.detach().abs().mean()), 0.25), float(most))
    scratch = torch.ones(max(int(share * 16 * x.numel()), 1))
    return x * 2 * scratch[:1]


@surge.register_fake
def _(x: torch.Tensor, most: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("outofcore_tests::surge_backward", mutates_args=())
def surge_backward(gradient: torch.Tensor, most: int) -> torch.Tensor:
    """The same for the gradient."""
    return surge(gradient, most)


@surge_backward.register_fake
def _(gradient: torch.Tensor, most: int) -> torch.Tensor:
    return torch.empty_like(gradient)


def _keep_most(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.most = inputs[1]


surge.register_autograd(lambda context, given: (surge_backward(given, context.most), None), setup_context=_keep_most)


class Surging(nn.Module):
    """An operator of the user's whose scratch memory depends on values, in both passes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return surge(x, self.most)


class Observing(nn.Module):
    """An observer that keeps a histogram of all values, and passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.counts.add_(torch.histc(x.abs().sort().values.flatten(), 64, 0.0, 8.0))
        return x


class Through(nn.Module):
    """A product with a matrix that a function makes of a square weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.function(self.weight)


def _positive(weight: torch.Tensor) -> torch.Tensor:
    return weight @ weight.t() + torch.eye(len(weight))


def _mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.ReLU(), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "orthogonal": lambda: _mlp(orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="matrix_exp")),
    "cayley": lambda: _mlp(orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")),
    "matrix_exp": lambda: _mlp(Through(torch.matrix_exp)),
    "spectral": lambda: _mlp(spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "cholesky": lambda: _mlp(Through(lambda w: torch.linalg.cholesky(_positive(w)))),
    "inverse": lambda: _mlp(Through(lambda w: torch.linalg.inv(_positive(w)))),
    "fake_quant": lambda: _mlp(FusedMovingAvgObsFakeQuantize()),
    "observer": lambda: _mlp(Observing()),
    "surge": lambda: _mlp(Surging(4)),
    "surges": lambda: _mlp(Surging(12), nn.Linear(WIDTH, WIDTH), Surging(3)),
}


def names() -> list[str]:
    """All cases: optimizers on a plain model, and models with a plain optimizer."""
    return [*OPTIMIZERS, *MODELS]


def make(name: str) -> Made:
    """A step of a case, with its model and optimizer, always the same."""
    torch.manual_seed(0)
    if name in OPTIMIZERS:
        model: nn.Module = nn.Sequential(_mlp(), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        optimizer: Optimizer = OPTIMIZERS[name](model.parameters())
    else:
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.flip(0))
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def batches(count: int) -> Iterator[torch.Tensor]:
    """Batches whose values grow and fall."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        yield torch.randn(BATCH, WIDTH, generator=generator) * (0.2, 1.0, 4.0, 12.0)[number % 4]


def smallest_budget(name: str) -> int:
    """What the refusal of a budget that is too small asks for."""
    step, model, optimizer = make(name)
    with outofcore.compile(step, model, optimizer, budget=64 << 10, cache=False) as compiled:
        try:
            compiled(next(batches(1)))
        except BudgetError as error:
            if error.smallest_budget is not None:
                return error.smallest_budget
            raise
    raise AssertionError("64 KiB held the step")


def contents(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of all that a step leaves."""
    found = [tensor.clone() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        found += [value.clone() for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return found


@dataclass(frozen=True)
class Outcome:
    """What became of a case within a budget.

    Attributes:
        exact: whether all losses and states are those of plain PyTorch, bit for bit.
        peak: the most bytes of physical memory that the arena and its annex took with what was served outside of them,
            when a request beyond the plan was served and between steps.
        off_plan: requests that no plan foresaw.
        beyond: of them, those that exceeded the budget, and their bytes.
        evicted: bytes that left for requests.
        overflow: bytes of a home that ops worked on since the budget could not hold them.
        followed: why the calls were run as an eager loop; empty: they were not.
        seconds: that all calls took.
    """

    exact: bool
    peak: int
    off_plan: int
    beyond: tuple[int, int]
    evicted: int
    overflow: int
    followed: str
    seconds: float


def compare(name: str, budget: int, steps: int, *, cache: Any = False, **settings: Any) -> Outcome:
    """Run a case in plain PyTorch and within a budget."""
    step, model, optimizer = make(name)
    losses = [step(x).item() for x in batches(steps)]
    expected = contents(model, optimizer)
    step, model, optimizer = make(name)
    begin = time.perf_counter()
    seen: dict[int, DemandEviction] = {}
    arenas: dict[int, tuple[Arena, int, int]] = {}
    peak = 0

    def measure(arena: Arena, more: int = 0) -> None:
        nonlocal peak
        counters = arena.counters()
        peak = max(peak, arena.resident_bytes() + counters.live_bytes + more)
        arenas[id(arena)] = arena, counters.beyond, counters.beyond_bytes

    class Measured(DemandEviction):
        def _serve(self, count: int, scope: int) -> int:
            answer = super()._serve(count, scope)
            # Nothing of it has been touched yet.
            is_home = answer in self._faces
            measure(self._arena, 0 if is_home or answer == Answer.REFUSE else round_up(count, PAGE_BYTES))
            return answer

        def begin(self, *args: Any) -> None:
            seen[id(self)] = self
            super().begin(*args)

    with (
        mock.patch("outofcore.execution.runner.DemandEviction", Measured),
        mock.patch.object(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE),  # bytes that nobody asked for would count
        outofcore.compile(step, model, optimizer, budget=budget, cache=cache, **settings) as compiled,
    ):
        session, found = compiled._session, []
        for x in batches(steps):
            found.append(compiled(x).item())
            if isinstance(session.steps.arena, Arena):
                measure(session.steps.arena)
        seconds = time.perf_counter() - begin
        exact = found == losses
        exact &= all(map(torch.equal, contents(model, optimizer), expected))
        exact &= len(contents(model, optimizer)) == len(expected)
        return Outcome(
            exact,
            peak,
            session.steps.off_plan,
            (sum(one[1] for one in arenas.values()), sum(one[2] for one in arenas.values())),
            sum(lender.evicted_bytes for lender in seen.values()),
            sum(lender.overflow_bytes for lender in seen.values()),
            session.why_followed,
            seconds,
        )
