"""Training steps that update parameters or change modules by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from capture_cases import Case, classify, mlp_model, supervised_step
from torch import nn
from torch.func import functional_call


def by_hand() -> Case:
    model = mlp_model()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for index, p in enumerate(model.parameters()):
                match index % 4:
                    case 0:
                        p.sub_(0.1 * p.grad)
                    case 1:
                        p.data.add_(p.grad.data, alpha=-0.1)
                    case 2:
                        p.data = p - 0.1 * p.grad
                    case _:
                        p.copy_(p.detach() - 0.1 * p.grad)
                        del p.grad
        model.zero_grad()
        return loss

    return Case(step, [model], [], classify())


def two_passes() -> Case:
    """Sharpness-aware minimization: gradients at perturbed parameters, which are then restored."""
    model = mlp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            length = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / length) for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        torch._foreach_sub_([p.data for p in model.parameters()], moves)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(step, [model], [optimizer], classify())


def as_vector() -> Case:
    model = mlp_model()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(model.parameters())
            flat -= 0.1 * torch.cat([g.flatten() for g in grads])
            nn.utils.vector_to_parameters(flat, model.parameters())
        return loss

    return Case(step, [model], [], classify())


def functional() -> Case:
    """One step of meta-learning: the loss after an inner update."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in model.named_parameters()]
        inner = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        moved = {n: p - 0.1 * g for n, p, g in zip(names, model.parameters(), grads, strict=True)}
        loss = F.cross_entropy(functional_call(model, moved, (x,)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer], classify())


def hooked_weights() -> Case:
    """Hook-based weight and spectral normalization, which set an attribute before each forward pass."""
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 4)), nn.Dropout(0.1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Case(supervised_step(model, optimizer), [model], [optimizer], classify())


def shared_memory() -> Case:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(8 * 4 + 4)
            self.weight = nn.Parameter(flat[:32].view(4, 8))
            self.bias = nn.Parameter(flat[32:])
            self.register_buffer("flat", flat)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight, self.bias) + self.flat.mean()

    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Case(supervised_step(model, optimizer), [model], [optimizer], classify())


def hooks_everywhere() -> Case:
    model = mlp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].register_forward_hook(lambda module, args, out: out * 1.5)
    model[1].register_full_backward_hook(lambda module, into, outof: (into[0].clamp(-0.1, 0.1),))
    model[4].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autograd.profiler.record_function("mine"):
            hidden = model(x)
            hidden.register_hook(lambda grad: grad * 2)
            hidden.retain_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                loss = F.cross_entropy(hidden.sin(), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, hidden.grad

    return Case(step, [model], [optimizer], classify())
