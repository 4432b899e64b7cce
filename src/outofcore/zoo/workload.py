"""A model with everything that a training step of it needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from outofcore.zoo.data import Batches
from outofcore.zoo.optimizers import learning_rate, make_optimizer
from outofcore.zoo.options import ZooOptions

Loss = Callable[..., Tensor]
TrainStep = Callable[..., Tensor]


@dataclass(frozen=True)
class Workload:
    """One entry of the zoo, ready to train.

    Attributes:
        name: as in `outofcore.zoo.names`.
        options: what was asked for.
        shape: the model in words, such as "50 layers, 224 × 224 pixels".
        data: where the batches come from, in words.
        network: makes the model, with weights from PyTorch's default generator.
        loss: called as ``loss(model, *batch)``; a scalar tensor.
        stream: called as ``stream(batch, seed)``; endless batches.
    """

    name: str
    options: ZooOptions
    shape: str
    data: str
    network: Callable[[], nn.Module]
    loss: Loss
    stream: Callable[[int, int], Batches]

    def build(self, seed: int | None = None) -> nn.Module:
        """The model in training mode on the CPU. The same seed gives the same weights.

        PyTorch's own generators are left as they were.
        """
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed: that would seed the generators of the accelerators, too.
            torch.default_generator.manual_seed(self.options.seed if seed is None else seed)
            return self.network().train()

    def skeleton(self) -> nn.Module:
        """The model in training mode on the meta device: without memory, for ``outofcore.load`` to fill."""
        with torch.device("meta"):
            return self.network().train()

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """The optimizer that the options name, for all parameters of the model."""
        return make_optimizer(model.parameters(), self.options)

    def make_step(self, model: nn.Module, optimizer: optim.Optimizer) -> TrainStep:
        """One training step as a user would write it.

        Returns:
            A function of the tensors of a batch, on the device of the model. It returns the loss, a scalar.
        """
        loss_of, amp, clip = self.loss, self.options.amp, self.options.clip

        def precision(device: torch.device) -> AbstractContextManager[object]:
            return torch.autocast(device.type, dtype=torch.bfloat16) if amp else nullcontext()

        def train_step(*batch: Tensor) -> Tensor:
            with precision(batch[0].device):
                loss = loss_of(model, *batch)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train_step

    def batches(self, batch: int | None = None, seed: int | None = None) -> Batches:
        """Endless batches on the CPU, as tuples of the arguments of the step; by default those of the options."""
        return self.stream(self.options.batch if batch is None else batch, self.options.seed if seed is None else seed)

    def parameter_count(self) -> int:
        """How many parameters the model has, shared ones counted once; takes no memory for them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.network().parameters())

    def describe(self) -> str:
        """The workload in one line."""
        options = self.options
        parts = [
            f"{self.name}: {self.shape}",
            f"{self.parameter_count():,} parameters",
            f"batch {options.batch}",
            f"{options.optimizer.value} at {learning_rate(options):g}"
            + (f" ({options.optimizer_impl.value})" if options.optimizer_impl else ""),
        ]
        if options.amp:
            parts.append("autocast to bfloat16")
        if options.clip is not None:
            parts.append(f"gradients clipped to {options.clip:g}")
        return "; ".join([*parts, self.data])
