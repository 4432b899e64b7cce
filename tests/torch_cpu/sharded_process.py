"""One of several processes that train a sharded model and check its results; see ``gloo_process.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_process import Normed, assert_same_tensors, batches, expect_error, main, make_plain_step
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import outofcore
from outofcore.costs import Costs
from outofcore.errors import CommunicationError, InputError, StateError
from outofcore.graph import StepGraph
from outofcore.planning.offload_all import offload_all
from outofcore.policies import Asked, Plan, Residency
from outofcore.program import Run

# Its square is not divisible by two or three.
WIDTH = 301

Make = Callable[[nn.Module, Optimizer], Any]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
}


class GatherAgain:
    """A policy that gathers each parameter again for each use, and offloads all other storages."""

    name = "again"

    def variants(self, graph: StepGraph, costs: Costs, budget: int) -> Sequence[Asked]:
        gathered = {s for op in graph.ops if op.communicates and op.rerunnable for s in op.creates}
        plan = offload_all(graph, budget, costs=costs)
        decisions = tuple(
            replace(decision, residency=Residency.RECOMPUTE) if decision.gap.storage in gathered else decision
            for decision in plan.decisions
        )
        return [lambda room: Plan(self.name, room, decisions)]


def build_model(optimizer: str, seed: int = 0) -> tuple[Normed, Optimizer]:
    torch.manual_seed(seed)
    model = Normed(WIDTH)
    torch.manual_seed(7 + dist.get_rank())  # for dropout
    return model, OPTIMIZERS[optimizer](model.parameters())


def tensors(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return parameters, gradients and optimizer state, but no statistics, which differ between processes."""
    copies = [p.detach().clone() for p in model.parameters()]
    copies += [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
    return copies + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train_replicated(optimizer: str, make: Make, rank: int) -> list[Tensor]:
    model, chosen = build_model(optimizer)
    step = make(DistributedDataParallel(model, bucket_cap_mb=0.25), chosen)
    losses = [step(*batch).detach().clone() for batch in batches(rank, 4)]
    return losses + tensors(model, chosen)


def train_sharded(
    optimizer: str, make: Make, rank: int, budget: int | str = "1GiB", policy: Any = "auto"
) -> tuple[list[Tensor], Any]:
    # All ranks get the model of rank 0, whose seed differs from theirs.
    model, chosen = build_model(optimizer, seed=rank)
    step = outofcore.compile(
        make(model, chosen), model, chosen, budget=budget, policy=policy, home="host", check="full", shard=True
    )
    losses = [step(*batch).detach().clone() for batch in batches(rank, 4)]
    planned = step.planned
    step.close()
    return losses + tensors(model, chosen), planned


def collective_reruns(planned: Any) -> list[bool]:
    """Return for each collective of a plan whether it is a rerun."""
    return [i.again for i in planned.program.instructions if isinstance(i, Run) and i.communicates]


def clearing_first(model: nn.Module, optimizer: Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def keeping_gradients(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return a step with two backward passes that keeps zeroed gradients between steps."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        nn.functional.cross_entropy(model(x[:half]), y[:half]).backward()
        loss = nn.functional.cross_entropy(model(x[half:]), y[half:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


def clamping(model: nn.Module, optimizer: Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        optimizer.zero_grad()
        return loss + model(x).square().mean().detach()

    return step


def bits(rank: int) -> None:
    """Compare with ``DistributedDataParallel``: in core, out of core, and with repeated gathers."""
    theirs = train_replicated("AdamW", make_plain_step, rank)
    ours, planned = train_sharded("AdamW", make_plain_step, rank)
    assert_same_tensors(ours, theirs, "in core")
    assert not any(collective_reruns(planned))
    peak = planned.program.arena_bytes
    ours, planned = train_sharded("AdamW", make_plain_step, rank, peak * 8 // 10)
    assert_same_tensors(ours, theirs, "out of core")
    assert planned.program.arena_bytes <= peak * 8 // 10
    ours, planned = train_sharded("AdamW", make_plain_step, rank, peak * 6 // 10, GatherAgain())
    assert_same_tensors(ours, theirs, "gathered again")
    assert sum(collective_reruns(planned)) >= 6


def more_bits(rank: int) -> None:
    for name in ("SGD", "momentum"):
        ours, planned = train_sharded(name, make_plain_step, rank)
        assert_same_tensors(ours, train_replicated(name, make_plain_step, rank), name)
        assert not any(collective_reruns(planned))
    for make in (keeping_gradients, clamping):
        assert_same_tensors(train_sharded("AdamW", make, rank)[0], train_replicated("AdamW", make, rank), make.__name__)


def order(rank: int) -> None:
    """Check that three processes load the model of two and sum gradients in the order of ranks."""
    loading(Path(sys.argv[4]).parent)

    def summing(model: nn.Module, optimizer: Optimizer) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            for parameter in model.parameters():
                mine = parameter.grad * (1.0 / dist.get_world_size())
                contributions = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(contributions, mine)
                total = contributions[0] + contributions[1]
                for contribution in contributions[2:]:
                    total += contribution
                parameter.grad = total
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    model, optimizer = build_model("AdamW")
    step = summing(model, optimizer)
    theirs = [step(*batch).detach().clone() for batch in batches(rank, 4)] + tensors(model, optimizer)
    ours, planned = train_sharded("AdamW", without_clipping, rank)
    assert_same_tensors(ours, theirs, "in core")
    assert_same_tensors(
        train_sharded("AdamW", without_clipping, rank, planned.program.arena_bytes * 8 // 10)[0], theirs, "out of core"
    )


def without_clipping(model: nn.Module, optimizer: Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def states(rank: int) -> None:
    """Check the state that a user sees of a sharded model, and the refusals."""
    batch, later_batch = batches(rank, 2)
    model, optimizer = build_model("AdamW")
    weight = model.hidden[0].weight
    step = outofcore.compile(
        clearing_first(model, optimizer), model, optimizer, budget="64MiB", home="host", shard=True
    )
    step(*batch)
    local_bytes = sum(state.bytes for state in step._session.keeper._states.values() if "norm.running" not in state.key)
    whole = sum(4 * p.numel() for p in model.parameters()) * 4  # with a gradient and two moments
    assert local_bytes <= 0.52 * whole, (local_bytes, whole)
    assert (weight.is_meta, weight.grad.is_meta, model.last.bias.is_meta) == (True, True, False)
    assert optimizer.state[weight]["exp_avg"].shape == (step._session._user.shards.shard_of(weight).count,)
    expect_error(NotImplementedError, "meta", weight.tolist)
    expect_error(RuntimeError, "meta", lambda: weight.sum().item())
    expect_error(StateError, "use step.save() and step.load()", step.state_dict)
    step.save(Path(sys.argv[4]).parent / "saved")
    optimizer.zero_grad()
    expected = step(*later_batch).detach().clone()
    with torch.no_grad():
        weight.mul_(2)
    expect_error(StateError, "hidden.0.weight was changed between two steps", lambda: step(*later_batch))
    step.load(Path(sys.argv[4]).parent / "saved")
    expect_error(
        RuntimeError, "broadcast", optimizer.step
    )  # a range of a moment does not fit a parameter without contents
    expect_error(StateError, "(optimizer.step() belongs in the step too.)", lambda: step(*later_batch))
    step.load(Path(sys.argv[4]).parent / "saved")
    weight.grad.zero_()
    expect_error(
        StateError, "the gradient of hidden.0.weight was changed between two steps", lambda: step(*later_batch)
    )
    weight.grad = None
    shape = InputError, "about to run different steps", lambda: step(*[t[: 512 + rank] for t in later_batch])
    expect_error(*shape)
    assert torch.equal(step(*later_batch), expected), "the loaded model differs from the saved one"
    # The same error if both ranks have a plan.
    step(*[t[:512] for t in later_batch])
    expect_error(
        InputError, "about to run different steps", lambda: step(*[t[: 512 if rank else None] for t in later_batch])
    )
    step(*later_batch)
    step.close()
    assert not weight.is_meta and weight.grad.shape == weight.shape == optimizer.state[weight]["exp_avg"].shape
    assert torch.isfinite(model(batch[0])).all()
    clearing_first(model, optimizer)(*batch)  # training continues in plain PyTorch

    def compile_model(model: nn.Module, optimizer: Any, **settings: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            return model(x)

        return outofcore.compile(step, model, optimizer, budget="64MiB", home="host", **settings)

    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        text = f"the optimizer {kind.__name__} updates first.weight, which is spread over"
        expect_error(InputError, text, lambda kind=kind: compile_model(model, kind(model.parameters()), shard=True))
    expect_error(
        InputError,
        "pass and call the wrapped module",
        lambda: compile_model(DistributedDataParallel(model), None, shard=True),
    )
    expect_error(
        InputError,
        "shard= cannot be combined with dynamic=",
        lambda: compile_model(model, None, shard=True, dynamic=True),
    )
    expect_error(InputError, "must be a process group", lambda: compile_model(model, None, shard="all"))
    torch.manual_seed(0)
    wide = nn.Linear(256, 256 + rank)
    text = "have different models: " if rank else "rank 1 and rank 0 have different models: "
    expect_error(InputError, text, lambda: compile_model(wide, None, shard=True)(torch.ones(2, 256)))
    assert not wide.weight.is_meta
    death(rank)


def saving(rank: int) -> None:
    """Train and save in two processes, and compare later steps with those after a load."""
    folder = Path(sys.argv[4]).parent
    model, optimizer = build_model("AdamW")
    model.to(memory_format=torch.channels_last)  # has no effect on these parameters and is not refused
    step = outofcore.compile(clearing_first(model, optimizer), model, optimizer, budget="64MiB", shard=True)
    all_batches = list(batches(rank, 4))
    for batch in all_batches[:2]:
        step(*batch)
    step.save(folder / "saved", extra={"steps": 2})
    losses = [step(*batch).detach().clone() for batch in all_batches[2:]]
    step.close()
    torch.save(losses + tensors(model, optimizer), folder / f"after-{rank}.pt")
    model, optimizer = build_model("AdamW", seed=99)
    step = outofcore.compile(clearing_first(model, optimizer), model, optimizer, budget="64MiB", shard=True)
    assert step.load(folder / "saved") == {"steps": 2}
    losses = [step(*batch).detach().clone() for batch in all_batches[2:]]
    step.close()
    assert_same_tensors(losses + tensors(model, optimizer), torch.load(folder / f"after-{rank}.pt"), "after loading")


def frozen(rank: int) -> None:
    """Check that a checkpoint omits sharded frozen weights and that a load keeps them."""
    folder = Path(sys.argv[4]).parent
    both_batches = list(batches(rank, 2))

    def adapting(seed: int) -> tuple[Normed, Optimizer, Any]:
        model, optimizer = build_model("AdamW")
        for layer in model.hidden[1:]:
            layer.requires_grad_(False)
        if seed:
            nn.init.zeros_(model.hidden[0].weight)
        return (
            model,
            optimizer,
            outofcore.compile(without_clipping(model, optimizer), model, optimizer, budget="64MiB", shard=True),
        )

    model, optimizer, step = adapting(0)
    step(*both_batches[0])
    step.save(folder / "saved", frozen=False)
    loss = step(*both_batches[1]).detach().clone()
    step.close()
    [file] = (folder / "saved").glob("model-*.safetensors")
    assert [name for name in load_file(file) if "hidden" in name] == ["hidden.0.weight", "hidden.0.bias"]
    loaded_model, loaded_optimizer, step = adapting(1)
    step.load(folder / "saved")
    assert_same_tensors([step(*both_batches[1]).detach().clone()], [loss], "the loss after loading")
    step.close()
    assert_same_tensors(tensors(loaded_model, loaded_optimizer), tensors(model, optimizer), "after loading")


def loading(folder: Path) -> None:
    """Check that any number of processes can load the saved model."""
    model, optimizer = build_model("AdamW", seed=99)
    step = outofcore.compile(clearing_first(model, optimizer), model, optimizer, budget="64MiB", shard=True)
    step.load(folder / "saved")
    step.close()
    plain_model, plain_optimizer = build_model("AdamW", seed=98)
    outofcore.load(folder / "saved", plain_model, plain_optimizer)
    assert_same_tensors(tensors(model, optimizer), tensors(plain_model, plain_optimizer), "loaded by others")
    if dist.get_rank() == 0:
        outofcore.save(folder / "plain", plain_model, plain_optimizer)


def death(rank: int) -> None:
    """Check that the death of a process ends the steps of others, and that they can close."""
    model, optimizer = build_model("SGD")
    step = outofcore.compile(
        without_clipping(model, optimizer), model, optimizer, budget="64MiB", home="host", shard=True
    )
    all_batches = list(batches(rank, 3))
    step(*all_batches[0])
    if rank == 1:
        os._exit(3)
    expect_error(CommunicationError, "Another process has ended", lambda: step(*all_batches[1]))
    try:
        step.close()
    except CommunicationError as error:
        assert "Another process has ended" in str(error)
    assert model.hidden[0].weight.is_meta
    expect_error(NotImplementedError, "meta", model.hidden[0].weight.tolist)


if __name__ == "__main__":
    main(bits, more_bits, order, states, saving, frozen)
