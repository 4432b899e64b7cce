"""Training steps with ops that need more memory in some calls, compared with plain PyTorch."""

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
StepCase = tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, Optimizer]


class Matrixwise(Optimizer):
    """A base of optimizers that transform each matrix's gradient, at a high cost every few steps."""

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
        raise NotImplementedError

    def is_due(self, state: dict[str, Any]) -> bool:
        return bool(state["step"] % self.every == 0)


class Shampoo(Matrixwise):
    """Preconditioners with periodically updated roots (Gupta et al., arXiv 1802.09568)."""

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
    """Moments in a low-rank space, recomputed periodically (Zhao et al., arXiv 2403.03507)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if "basis" not in state or self.is_due(state):
            left_vectors, _, _ = torch.linalg.svd(gradient, full_matrices=True)
            state["basis"] = left_vectors[:, :16].contiguous()
        projected = state["basis"].t() @ gradient
        if "moment" not in state:
            state["moment"] = torch.zeros_like(projected)
        state["moment"].mul_(0.9).add_(projected)
        return state["basis"] @ state["moment"]


class Soap(Matrixwise):
    """Adam in the eigenbasis of a preconditioner, updated by a QR decomposition (Vyas et al., arXiv 2409.11321)."""

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
    """Momentum orthogonalized by Newton-Schulz steps, periodically by more of them (Jordan, 2024)."""

    def matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(0.95).add_(gradient)
        x = state["momentum"] / (state["momentum"].norm() + 1e-7)
        squares = []
        for _ in range(5 if self.is_due(state) else 2):
            square = x @ x.t()
            squares.append(square)
            x = 1.5 * x - 0.5 * square @ x
        return x + 1e-6 * sum(squares) @ x if self.is_due(state) else x


class Lookahead(Matrixwise):
    """Slow weights, created at the first synchronisation (Zhang et al., arXiv 1907.08610)."""

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
        left_vectors, _, right_vectors = torch.linalg.svd(gradient, full_matrices=False)
        return left_vectors @ right_vectors


class Kronecker(Matrixwise):
    """A damped inverse, computed every third step."""

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
def surge(x: torch.Tensor, max_share: int) -> torch.Tensor:
    """Double ``x`` with scratch memory of 4 to 16 * ``max_share`` times its bytes, depending on its values."""
    share = min(max(float(x.detach().abs().mean()), 0.25), float(max_share))
    scratch = torch.ones(max(int(share * 16 * x.numel()), 1))
    return x * 2 * scratch[:1]


@surge.register_fake
def _(x: torch.Tensor, max_share: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("outofcore_tests::surge_backward", mutates_args=())
def surge_backward(gradient: torch.Tensor, max_share: int) -> torch.Tensor:
    return surge(gradient, max_share)


@surge_backward.register_fake
def _(gradient: torch.Tensor, max_share: int) -> torch.Tensor:
    return torch.empty_like(gradient)


def _save_max_share(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.most = inputs[1]


surge.register_autograd(
    lambda context, gradient: (surge_backward(gradient, context.most), None), setup_context=_save_max_share
)


class Surging(nn.Module):
    """A custom operator with scratch memory that depends on values, in both passes."""

    def __init__(self, max_share: int) -> None:
        super().__init__()
        self.max_share = max_share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return surge(x, self.max_share)


class Observing(nn.Module):
    """An observer that keeps a histogram of all values and passes them on."""

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
    return [*OPTIMIZERS, *MODELS]


def make(name: str) -> StepCase:
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
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        yield torch.randn(BATCH, WIDTH, generator=generator) * (0.2, 1.0, 4.0, 12.0)[number % 4]


def smallest_budget(name: str) -> int:
    """Return the smallest budget that the error for a too small budget names."""
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
    tensors = [tensor.clone() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [value.clone() for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return tensors


@dataclass(frozen=True)
class CaseResult:
    """The result of running a case within a budget."""

    exact: bool  # losses and state equal plain PyTorch's bit for bit
    peak: int  # physical bytes of the arena, its annex and memory served outside of them
    off_plan: int  # requests beyond the plan
    beyond: tuple[int, int]  # number and bytes of the requests that exceeded the budget
    evicted: int  # bytes evicted to serve requests
    overflow: int  # bytes used directly at a home because they did not fit the budget
    followed: str  # why the calls ran as an eager loop; empty if they did not
    seconds: float  # total time of all calls


def compare(name: str, budget: int, steps: int, *, cache: Any = False, **settings: Any) -> CaseResult:
    """Run a case in plain PyTorch and within a budget."""
    step, model, optimizer = make(name)
    losses = [step(x).item() for x in batches(steps)]
    expected = contents(model, optimizer)
    step, model, optimizer = make(name)
    begin = time.perf_counter()
    lenders: dict[int, DemandEviction] = {}
    arenas: dict[int, tuple[Arena, int, int]] = {}
    peak = 0

    def measure(arena: Arena, served_bytes: int = 0) -> None:
        nonlocal peak
        counters = arena.counters()
        peak = max(peak, arena.resident_bytes() + counters.live_bytes + served_bytes)
        arenas[id(arena)] = arena, counters.beyond, counters.beyond_bytes

    class MeasuredEviction(DemandEviction):
        def _serve(self, count: int, scope: int) -> int:
            answer = super()._serve(count, scope)
            # The pages of the answer are not resident yet.
            is_home = answer in self._overflows
            measure(self._arena, 0 if is_home or answer == Answer.REFUSE else round_up(count, PAGE_BYTES))
            return answer

        def begin(self, *args: Any) -> None:
            lenders[id(self)] = self
            super().begin(*args)

    with (
        mock.patch("outofcore.execution.runner.DemandEviction", MeasuredEviction),
        mock.patch.object(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE),  # huge pages would count unrequested bytes
        outofcore.compile(step, model, optimizer, budget=budget, cache=cache, **settings) as compiled,
    ):
        session, results = compiled._session, []
        for x in batches(steps):
            results.append(compiled(x).item())
            if isinstance(session.steps.arena, Arena):
                measure(session.steps.arena)
        seconds = time.perf_counter() - begin
        exact = results == losses
        exact &= all(map(torch.equal, contents(model, optimizer), expected))
        exact &= len(contents(model, optimizer)) == len(expected)
        return CaseResult(
            exact,
            peak,
            session.steps.off_plan,
            (sum(entry[1] for entry in arenas.values()), sum(entry[2] for entry in arenas.values())),
            sum(lender.evicted_bytes for lender in lenders.values()),
            sum(lender.overflow_bytes for lender in lenders.values()),
            session.eager_reason,
            seconds,
        )
