"""Compare random eager loops with plain PyTorch: branches, sizes, views, in-place ops, frees, errors, addresses.

Seeds from FIRST to LAST - 1, each for a number of steps:

    python tests/torch_cpu/random_loops.py FIRST LAST [STEPS]
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import outofcore
from outofcore.analysis import is_large
from outofcore.follow.native import load_paging

Pool = list[Tensor]
Action = Callable[[Pool, random.Random], Any]


def _pick_tensor(pool: Pool, draw: random.Random) -> Tensor:
    return pool[draw.randrange(len(pool))]


def _new(pool: Pool, draw: random.Random) -> None:
    rows = draw.choice((8, 60, 100, 128, 200))
    pool.append(draw.choice((torch.randn, torch.rand, torch.ones))(rows, 200))


def _binary(pool: Pool, draw: random.Random) -> None:
    a, b = _pick_tensor(pool, draw), _pick_tensor(pool, draw)
    rows = min(len(a), len(b))
    op = draw.choice((torch.add, torch.sub, torch.maximum, lambda x, y: x * torch.sigmoid(y)))
    pool.append(op(a[:rows], b[:rows]).contiguous())


def _matmul(pool: Pool, draw: random.Random) -> None:
    a, b = _pick_tensor(pool, draw), _pick_tensor(pool, draw)
    pool.append(torch.softmax(a @ b.t() / 200, -1) @ b)


def _in_place(pool: Pool, draw: random.Random) -> None:
    x = _pick_tensor(pool, draw)
    part = x[draw.randrange(len(x)) :: draw.choice((1, 2))]
    draw.choice((lambda: part.mul_(0.5), lambda: part.clamp_(-1, 1), lambda: part.add_(0.25), x.tanh_))()


def _out(pool: Pool, draw: random.Random) -> None:
    a, target = _pick_tensor(pool, draw), torch.empty(0)
    torch.cumsum(a, 0, out=target)
    pool.append(target / 100)


def _free(pool: Pool, draw: random.Random) -> None:
    if len(pool) > 6:
        del pool[draw.randrange(len(pool))]


def _read(pool: Pool, draw: random.Random) -> Any:
    x = _pick_tensor(pool, draw)
    return draw.choice((lambda: x.sum().item(), x[0].tolist, lambda: bool(x.max() > 1)))()


def _train(pool: Pool, draw: random.Random) -> float:
    layer, x = (
        nn.Sequential(nn.Linear(200, 150), nn.GELU(), nn.Dropout(0.2), nn.Linear(150, 200)),
        _pick_tensor(pool, draw),
    )
    optimizer = torch.optim.Adam(layer.parameters(), foreach=draw.random() < 0.5)
    loss = torch.zeros(())
    for _ in range(draw.randrange(1, 3)):
        optimizer.zero_grad()
        loss = (layer(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    pool.append(layer(x).detach())
    return loss.item()


def _fail(pool: Pool, draw: random.Random) -> None:
    x = _pick_tensor(pool, draw)
    with pytest.raises(RuntimeError):
        torch.cat([x * 2, x[:, :7]], 0)
    with pytest.raises(RuntimeError):
        x.add_(x[:, :7])


def _array(pool: Pool, draw: random.Random) -> None:
    array = _pick_tensor(pool, draw).numpy()
    array[draw.randrange(len(array))] = draw.random()


def _thread(pool: Pool, draw: random.Random) -> None:
    x, value = _pick_tensor(pool, draw), draw.random()
    thread = threading.Thread(target=lambda: x[::2].fill_(value))
    thread.start()
    thread.join()


def _data(pool: Pool, draw: random.Random) -> None:
    i, j = draw.randrange(len(pool)), draw.randrange(len(pool))
    holder = torch.empty(0)
    holder.data = pool[i]
    pool[j] = holder
    pool.append(holder.clone())


def _resize(pool: Pool, draw: random.Random) -> None:
    x = _pick_tensor(pool, draw).clone()
    rows = len(x)
    x.resize_(rows + 50, 200)[rows:].zero_()
    pool.append(x)


class _StopError(Exception):
    """An error that a step of the user raises."""


class _Raises(torch.autograd.Function):
    """An identity function that raises on a chosen use of its forward or backward pass."""

    remaining: ClassVar[dict[str, int]] = {"forward": 0, "backward": 0}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Raises.remaining["forward"] -= 1
        if _Raises.remaining["forward"] == 0:
            raise _StopError
        ctx.save_for_backward(x * 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _Raises.remaining["backward"] -= 1
        if _Raises.remaining["backward"] == 0:
            raise _StopError
        (saved,) = ctx.saved_tensors
        return gradients[0] + saved * 1e-3


def _layers() -> list[nn.Module]:
    return [nn.Linear(200, 200) for _ in range(4)]


def _train_with_error(pool: Pool, draw: random.Random) -> list[int]:
    """Run a training step that raises halfway, then one that continues from there."""
    layers, x, outcomes = _layers(), _pick_tensor(pool, draw), []
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, foreach=draw.random() < 0.5)
    hooked = parameters[draw.randrange(len(parameters))]
    for failure in (draw.choice(("forward", "backward", "hook", "update")), "nothing"):
        _Raises.remaining = {name: draw.randrange(1, 5) if name == failure else 0 for name in ("forward", "backward")}
        handles = []
        if failure == "hook":
            handles.append(hooked.register_hook(_raise))
        if failure == "update":
            handles.append(optimizer.register_step_post_hook(_raise))
        try:
            y = x
            for layer in layers:
                y = _Raises.apply(torch.tanh(layer(y)))
            (y - x).square().mean().backward()
            optimizer.step()
            outcomes.append(1)
        except _StopError:
            outcomes.append(0)
        for handle in handles:
            handle.remove()
    pool += [p.detach() for p in parameters if p.dim() == 2 and draw.random() < 0.5]
    pool += [p.grad for p in parameters if p.dim() == 2 and p.grad is not None and draw.random() < 0.3]
    return outcomes


def _raise(*_: Any) -> None:
    raise _StopError


def _interrupt_training(pool: Pool, draw: random.Random) -> None:
    """Interrupt steps on copies of tensors and discard the results: the originals must not change."""
    copies, after, generator = [x.clone() for x in pool[:8]], draw.random() * 0.02, torch.get_rng_state()
    order, armed = random.Random(draw.random()), [True]

    def stop(*_: Any) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        for _ in range(6):
            with torch.set_grad_enabled(True):
                _train(copies, order)
            _in_place(copies, order)
            _binary(copies, order)
            _resize(copies, order)
        armed.clear()
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_rng_state(generator)


def _branch(pool: Pool, draw: random.Random) -> bool:
    x = _pick_tensor(pool, draw)
    positive = bool(x.mean() > 0)
    rows = int(x.abs().sum().nan_to_num(0, 0, 0).item()) % 150 + 20
    pool.append(x.sigmoid() if positive else x.tanh().repeat(2, 1)[:rows])
    if x.abs().max() > 2:
        pool.append(x.clamp(-2, 2))
    return positive


def _sizes(pool: Pool, draw: random.Random) -> float:
    total = 0.0
    for _ in range(4):
        x = torch.rand(draw.choice((1, 7, 81, 82, 83, 300, 600)), 200)
        total += (x * x.mean()).sum().item()
    return total


ACTIONS: tuple[tuple[Action, int], ...] = (
    *((_new, 6), (_binary, 8), (_matmul, 3), (_in_place, 8), (_out, 3), (_free, 8), (_read, 6), (_train, 2)),
    *((_fail, 1), (_array, 1), (_thread, 2), (_data, 2), (_resize, 2)),
    *((_train_with_error, 2), (_interrupt_training, 1), (_branch, 3), (_sizes, 2)),
)


_MAX_SMALL = 8


def loop(seed: int, steps: int, between: Callable[[random.Random], None]) -> tuple[list[Any], Pool]:
    draw, nudge = random.Random(seed), random.Random(seed + 1)
    torch.manual_seed(seed)
    pool: Pool = [torch.randn(100, 200) for _ in range(6)]
    results = []
    # A period repeats, like the ops of a loop.
    period = [draw.choices(*zip(*ACTIONS, strict=True))[0] for _ in range(40)]
    for step in range(steps):
        is_periodic = draw.random() < 0.8
        action = period[step % 40] if is_periodic else draw.choices(*zip(*ACTIONS, strict=True))[0]
        with torch.set_grad_enabled(action in (_train, _train_with_error)):
            results.append(action(pool, draw))
        while len(pool) > 60:
            del pool[draw.randrange(len(pool))]
        small = [number for number, tensor in enumerate(pool) if not is_large(tensor.nbytes)]
        # Small tensors cannot be evicted and must fit together with an op's operands.
        for number in reversed(small[:-_MAX_SMALL]):
            del pool[number]
        between(nudge)
    return results, pool


def compare(seed: int, steps: int) -> None:
    expected_results, theirs = loop(seed, steps, lambda _: None)
    library = load_paging()
    with outofcore.budget(("3MiB", "2500KiB", "5MiB")[seed % 3], home=("disk", "host")[seed % 2]) as run:

        def between(draw: random.Random) -> None:
            chance = draw.random()
            if chance < 0.05:
                library.follow_evict_all(run._space)
            library.follow_stress(run._space, int(chance > 0.97))

        results, ours = loop(seed, steps, between)
        stats = run.stats
    assert results == expected_results
    assert len(ours) == len(theirs)
    for number, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert actual.equal(expected), f"tensor {number} differs"
    assert stats.evictions > 50
    assert stats.peak_bytes <= 5 << 20


if __name__ == "__main__":
    torch.set_num_threads(1)
    first, last, *more = map(int, sys.argv[1:])
    for number in range(first, last):
        compare(number, *(more or [1000]))
        print(f"seed {number}: the same", flush=True)
