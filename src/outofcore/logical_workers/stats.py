"""What a step of logical workers took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticStats:
    """What the last step did in this process.

    Attributes:
        seconds: of all of it.
        turn_seconds: of each worker's forward and backward pass.
        switch_seconds: between turns: generators, buffers and gradients change places.
        sum_seconds: waiting for other processes, and the sum of all gradients.
        update_seconds: of the optimizers.
        gradient_bytes: of one worker.
        bytes_sent: by this process.
        least_bytes: that each process sends in a ring all-reduce of the gradients, on average.

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
