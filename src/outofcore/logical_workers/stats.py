"""Statistics of a step of logical workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticStats:
    """Statistics of the last step in this process.

    Attributes:
        seconds: of the whole step.
        turn_seconds: of each worker's forward and backward pass.
        switch_seconds: between turns, to switch generators, buffers and gradients.
        sum_seconds: to wait for other processes and sum all gradients.
        update_seconds: of the optimizers.
        gradient_bytes: of one worker.
        bytes_sent: by this process.
        least_bytes: sent by each process in a ring all-reduce of the gradients, on average.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(8, 8)
    >>> def train_step(x):
    ...     model(x).square().mean().backward()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with outofcore.elastic(train_step, model, optimizer, workers=2, budget="1MiB") as run:
    ...     losses = run({0: torch.ones(4, 8), 1: torch.zeros(4, 8)})
    >>> len(run.stats.turn_seconds), run.stats.gradient_bytes, run.stats.bytes_sent
    (2, 288, 0)
    """

    seconds: float
    turn_seconds: tuple[float, ...]
    switch_seconds: float
    sum_seconds: float
    update_seconds: float
    gradient_bytes: int
    bytes_sent: int
    least_bytes: int
