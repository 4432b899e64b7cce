"""Tests of measurements of ops on generated tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outofcore
from outofcore.capture import capture_step
from outofcore.errors import CaptureError
from outofcore.profiling.ops import profile_ops

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cholesky": lambda x: torch.linalg.cholesky(definite(x)),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(definite(x))),
    "inverse": lambda x: torch.linalg.inv(definite(x)),
    "solve": lambda x: torch.linalg.solve(definite(x), x),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(definite(x).triu(), x, upper=True),
    "lu": lambda x: torch.linalg.lu(definite(x))[1],
    "singular_values": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
    "eigenvalues": lambda x: torch.linalg.eigh(definite(x))[0],
    "division_of_whole_numbers": lambda x: x * (torch.arange(1, 6) // torch.arange(1, 6)),
    "repeats": lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 3, 4]), 0, output_size=10),
    "segments": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 3])),
    "poisson": lambda x: x * torch.poisson(x.detach()),
    "margins": lambda x: F.multi_margin_loss(x, torch.tensor([1, 2, 0, 1])),
}


def definite(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t() + 5 * torch.eye(len(x))


class Weighted(nn.Module):
    def __init__(self, rows: int = 4, columns: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows, columns) + 0.5)


def training(model: Weighted, function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = function(x * model.weight).sum()
        loss.backward()
        model.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_op_runs_on_generated_tensors(name: str) -> None:
    model = Weighted()
    captured = capture_step(training(model, FUNCTIONS[name]), [model], [], (torch.rand(4, 5),), {})
    profiles = profile_ops(captured, measure_time=False)
    for op, profile in zip(captured.graph.ops, profiles, strict=True):
        assert profile.requests.requests or not op.creates, op.name


@torch.library.custom_op("outofcore_tests::strict", mutates_args=())
def strict(x: torch.Tensor) -> torch.Tensor:
    if float(x.sum()) != 42:
        raise ValueError("the sum has to be 42")
    return x.clone()


strict.register_fake(torch.empty_like)


@torch.library.custom_op("outofcore_tests::lying", mutates_args=())
def lying(x: torch.Tensor) -> torch.Tensor:
    return x.t().clone()


lying.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (strict, "strict.default does not run on any scratch contents .the sum has to be 42."),
        (lying, r"is a float32 tensor of shape \(5, 4\), and was captured as a float32 tensor of shape \(4, 5\)"),
    ],
)
def test_unmeasurable_op_is_refused_with_the_users_line(op: Any, message: str) -> None:
    model = Weighted()
    step = outofcore.compile(training(model, lambda x: x + op(x.detach())), model, budget="64MiB")
    with pytest.raises(CaptureError, match=message) as error:
        step(torch.rand(4, 5))
    assert error.value.location.startswith(__file__)


def test_embedding_bag_workspace_is_measured_with_nonempty_bags() -> None:
    model = nn.EmbeddingBag(256, 128, mode="max")
    words = torch.randint(0, 256, (512, 8))
    captured = capture_step(partial(run_on, model), [model], [], (words,), {})
    profiles = profile_ops(captured, measure_time=False)
    backward = [i for i, op in enumerate(captured.graph.ops) if "embedding" in op.name and "backward" in op.name]
    assert profiles[backward[0]].cost.workspace_bytes >= 512 * 128 * 4


def run_on(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    loss = model(words).square().sum()
    loss.backward()
    return loss
