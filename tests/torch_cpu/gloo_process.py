"""One of several processes that train together over gloo; it fails on any error.

python gloo_process.py SCENARIO RANK PROCESSES STORE, where STORE is a file that does not exist yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import outofcore
from outofcore.errors import CaptureError, CommunicationError, InputError, StateError

Batch = tuple[Tensor, Tensor]


class Normed(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, width), nn.BatchNorm1d(width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.again = self.hidden[0]
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for layer in (*self.hidden, self.again):
            x = x + nn.functional.dropout(torch.relu(layer(x)), 0.1, self.training)
        return self.last(x)


def batches(rank: int, count: int, size: int = 1024) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(size, 64, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def make_ddp_model(**settings: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Normed(), bucket_cap_mb=0.25, **settings)
    torch.manual_seed(7 + dist.get_rank())  # for dropout
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = (value for p in model.parameters() for value in optimizer.state[p].values())
    grads = (p.grad for p in model.parameters() if p.grad is not None)
    return [t.detach().clone() for t in (*model.state_dict().values(), *states, *grads, torch.get_rng_state())]


def train(
    budget: int | str | None, make: Callable[..., Any], rank: int, steps: int = 4, **settings: Any
) -> tuple[list[Tensor], int]:
    """Return losses and all state after some steps, and the plan's peak bytes; None as budget is plain PyTorch."""
    model, optimizer = make_ddp_model(**settings)
    step: Any = make(model, optimizer)
    if budget is not None:
        step = outofcore.compile(step, model, optimizer, budget=budget, home="host", check="full")
    losses = [step(*batch).detach().clone() for batch in batches(rank, steps)]
    peak = 0
    if budget is not None:
        peak = step.planned.program.arena_bytes
        if step._session.updates.background.is_busy:
            raise AssertionError("a process plans in the background although others train with it")
        step.close()
    return losses + tensors(model, optimizer), peak


def assert_same_tensors(ours: list[Tensor], theirs: list[Tensor], label: str) -> None:
    assert len(ours) == len(theirs), label
    for number, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(actual, expected), f"rank {dist.get_rank()}, {label}: value {number} differs"


def make_plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_accumulating_step(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Make a step of two backward passes with one reduction; gradients persist between steps."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        with model.no_sync():
            nn.functional.cross_entropy(model(x[:half]), y[:half]).backward()
        loss = nn.functional.cross_entropy(model(x[half:]), y[half:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


def replicas(rank: int) -> None:
    theirs, _ = train(None, make_plain_step, rank)
    ours, peak = train("1GiB", make_plain_step, rank)
    assert_same_tensors(ours, theirs, "in core")
    ours, less = train(peak * 6 // 10, make_plain_step, rank)
    assert less <= peak * 6 // 10
    assert_same_tensors(ours, theirs, "out of core")
    if dist.get_world_size() > 2:
        return
    settings = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    assert_same_tensors(
        train("1GiB", make_accumulating_step, rank, **settings)[0],
        train(None, make_accumulating_step, rank, **settings)[0],
        "sums",
    )
    no_sync(rank)


def no_sync(rank: int) -> None:
    def run(budget: str | None) -> list[Tensor]:
        model, optimizer = make_ddp_model()

        def gather(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        step: Any = gather if budget is None else outofcore.compile(gather, model, budget=budget, home="host")
        losses = []
        for number, batch in enumerate(batches(rank, 4)):
            with model.no_sync() if number % 2 == 0 else nullcontext():
                losses.append(step(*batch).detach().clone())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        if budget is not None:
            step.close()
        return losses + tensors(model, optimizer)

    assert_same_tensors(run("1GiB"), run(None), "no_sync around calls")


def collectives(rank: int) -> None:
    """Check collectives within a step: waited for at once, waited for later, and functional."""
    group = dist.group.WORLD

    def run(budget: int | str | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(11)], nn.Linear(64, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> tuple[Tensor, ...]:
            out = model(x)
            everyone = functional.all_gather_tensor(out.detach(), 0, group)
            loss = (out - everyone.mean(0)).square().mean()
            loss.backward()
            works = []
            for number, parameter in enumerate(model.parameters()):
                if number % 2:
                    works.append(dist.all_reduce(parameter.grad, async_op=True))
                else:
                    parameter.grad.copy_(functional.all_reduce(parameter.grad, "max", group))
            for work in works:
                work.wait()
            gathered, scattered = torch.empty(32), torch.empty(8)
            dist.all_gather_into_tensor(gathered, out.detach().sum(0))
            dist.reduce_scatter_tensor(scattered, out.detach().sum(0))
            broadcasted = functional.broadcast(out.detach(), 1, group)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total, gathered, scattered, broadcasted

        compiled: Any = step
        if budget is not None:
            compiled = outofcore.compile(step, model, optimizer, budget=budget, home="host")
        generator = torch.Generator().manual_seed(rank)
        results = [t.clone() for _ in range(4) for t in compiled(torch.randn(256, 64, generator=generator))]
        peak = 0
        if budget is not None:
            ops = compiled.captured.graph.ops
            assert sum(op.communicates for op in ops) == 1 + 24 + 4
            peak = compiled.planned.program.arena_bytes
            compiled.close()
        return results + [p.detach().clone() for p in model.parameters()], peak

    theirs, _ = run(None)
    ours, peak = run("1GiB")
    assert_same_tensors(ours, theirs, "in core")
    assert_same_tensors(run(peak * 6 // 10)[0], theirs, "out of core")


def expect_error(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError(f"no error with {text!r} was raised")


def refusals(rank: int) -> None:
    """Check that all processes refuse an invalid step before any state moves, and can then run another step."""
    batch = next(batches(rank, 1))
    folder = Path(sys.argv[4]).parent

    def one(budget: str = "1GiB", **settings: Any) -> Any:
        model, optimizer = make_ddp_model(**settings)
        return outofcore.compile(make_plain_step(model, optimizer), model, optimizer, budget=budget, home=folder)

    expect_error(InputError, "differ in budget: 768 MiB", lambda: one("1GiB" if rank == 0 else "768MiB")(*batch))
    smallest = "400KiB"
    text = "cannot hold" if rank == 0 else "rank 0, which plans for all ranks, cannot plan this step: BudgetError"
    expect_error(Exception, text, lambda: one(smallest)(*batch))
    expect_error(InputError, "find_unused_parameters=True", lambda: one(find_unused_parameters=True))

    flags = {"first": True}
    torch.manual_seed(0)
    layer = nn.Linear(64, 16 if rank else 8)

    def reduce_output(x: Tensor) -> Tensor:
        dist.all_reduce(y := layer(x).detach())
        return y

    step = outofcore.compile(reduce_output, layer, budget="64MiB", home=folder)
    expect_error(InputError, "have different models: model.weight is float32 of shape (16, 64)", lambda: step(batch[0]))

    layer = nn.Linear(64, 8)

    def reduce_and_broadcast(x: Tensor, first: bool) -> Tensor:
        y, z = layer(x).detach(), x.clone()
        if first:
            dist.all_reduce(y)
        dist.broadcast(z, 0)
        if not first:
            dist.all_reduce(y)
        return y + z.sum()

    step = outofcore.compile(reduce_and_broadcast, layer, budget="64MiB", home=folder)
    text = "run different collectives: number 0 is broadcast (from rank 0) of 262144 bytes of float32 among 2 processes"
    expect_error(StateError, text, lambda: step(batch[0], rank == 0))
    for first in (True, False):
        step(batch[0], first)
    expect_error(StateError, text, lambda: step(batch[0], rank == 0))
    step(batch[0], True)
    step.close()

    def reading(x: Tensor) -> Tensor:
        dist.all_reduce(y := layer(x).detach())
        if rank and flags["first"]:
            y.sum().item()
        return y

    model = DistributedDataParallel(layer)
    step = outofcore.compile(reading, [layer, model], budget="64MiB", home=folder)
    if rank:
        expect_error(CaptureError, ".item() reads the value", lambda: step(batch[0]))
    else:
        expect_error(StateError, "rank 1 cannot run this step, so no rank runs it", lambda: step(batch[0]))
    flags["first"] = False
    assert torch.isfinite(step(batch[0])).all()
    step.close()

    half = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    unused = outofcore.compile(lambda x: half.module[0](half(x) * 0 + x).sum().backward(), half, budget="64MiB")
    unused.close()

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    part = DistributedDataParallel(Half())
    step = outofcore.compile(lambda x: part(x).sum().backward(), part, budget="64MiB", home=folder)
    expect_error(CaptureError, "idle.weight, idle.bias got no gradient", lambda: step(batch[0]))
    step.close()


def death(rank: int) -> None:
    """Check that the death of a process in mid-step ends the step of the others and leaves the model unchanged."""
    state = {"now": False}

    @torch.library.custom_op("together::maybe_end", mutates_args=())
    def maybe_end(x: Tensor) -> Tensor:
        if state["now"]:
            os._exit(3)
        return x.clone()

    @maybe_end.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    maybe_end.register_autograd(lambda ctx, gradient: maybe_end(gradient))
    model, optimizer = make_ddp_model()

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return maybe_end(model(maybe_end(x)))

    step = outofcore.compile(make_step_of(Around(), model, optimizer), model, optimizer, budget="1GiB", home="host")
    all_batches = list(batches(rank, 4))
    for batch in all_batches[:3]:
        step(*batch)
    before = tensors(model, optimizer)
    state["now"] = rank == 1
    try:
        step(*all_batches[3])
    except CommunicationError as error:
        messages = [str(error), *error.__notes__]
    else:
        raise AssertionError("the other process ended, but no error was raised")
    assert "all_reduce (sum)" in messages[0] or "broadcast" in messages[0], messages
    assert any("as they were before this step" in note for note in messages[1:]), messages
    assert_same_tensors(tensors(model, optimizer), before, "after the other process had ended")
    expect_error(StateError, "out of step with them", lambda: step(*all_batches[3]))
    step.close()
    assert_same_tensors(tensors(model, optimizer), before, "closed after the other process had ended")


def make_step_of(run: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main(*scenarios: Callable[[int], None]) -> None:
    scenario, rank, processes, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    {function.__name__: function for function in scenarios}[scenario](rank)
    print("same", flush=True)
    # Threads of the process group may still run while the interpreter ends, and abort it.
    os._exit(0)


if __name__ == "__main__":
    main(replicas, collectives, refusals, death)
