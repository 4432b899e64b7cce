"""Roles of threads in the programs of ``thread_programs.py``; their results depend only on their own draws."""

from __future__ import annotations

import _thread
import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import random
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import random_loops
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from outofcore.follow.native import load_paging

if TYPE_CHECKING:
    from thread_programs import Training

LAUNCHERS = ("threading", "_thread", "futures", "pool")
# Actions of random_loops without draws from PyTorch's generator, which belongs to the loop.
ACTIONS = tuple(
    getattr(random_loops, f"_{name}")
    for name in ("binary", "matmul", "in_place", "out", "free", "read", "resize", "data", "branch")
)
# Shape of the flat buffer that processes sum.
ROWS, ROW = 3, 40_000


@dataclass(frozen=True)
class Plan:
    seed: int
    roles: tuple[str, ...]
    width: int
    batch: int
    layers: int
    steps: int
    contexts: str
    share: float  # budget over the smallest one that holds the loop
    home: str
    stress: bool
    planned: bool
    launcher: str | None  # how threads are started; None if each role draws
    switching: bool  # switch between threads as often as Python can
    in_thread: bool  # run the loop in a thread, too
    late_joins: bool  # join roles after the last context

    def stretches(self) -> list[tuple[int, int, bool]]:
        """Return ranges of steps, and whether each runs within a budget."""
        third = self.steps // 3
        cuts = {
            "one": [(0, self.steps, True)],
            "ends": [(0, 2 * third, True), (2 * third, self.steps, False)],
            "two": [(0, third, True), (third, third + 1, False), (third + 1, self.steps, True)],
        }
        return cuts[self.contexts]


def make_model(plan: Plan, layers: int) -> nn.Module:
    parts = [(nn.Linear(plan.width, plan.width), nn.LayerNorm(plan.width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*itertools.chain(*parts))


def make_optimizer(model: nn.Module, draw: random.Random) -> torch.optim.Optimizer:
    parameters, foreach = list(model.parameters()), draw.random() < 0.5
    if draw.random() < 0.5:
        return torch.optim.SGD(parameters, 0.05, momentum=0.9, foreach=foreach)
    return torch.optim.AdamW(parameters, 1e-3, foreach=foreach)


def crc(values: Tensor | np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.asarray(values).tobytes())


def or_exit(function: Callable[[], object]) -> None:
    """Call a function; end the process at once if it fails in any thread."""
    torch.set_num_threads(1)
    try:
        function()
    except BaseException as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(3)


class Role:
    """Work concurrent with the loop: its thread runs ``work``, and the loop's thread calls all other methods."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        self.plan, self.draw = plan, draw
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.outbox: queue.Queue[Any] = queue.Queue()
        self.seen: list[Any] = []
        self.kept: list[Tensor] = []
        self.longest = 0.0
        self.generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.starts = draw.choice((-1, 0))  # the first step; -1 if before the first context
        self._launcher, self._pool = plan.launcher or draw.choice(LAUNCHERS), None
        self.join: Callable[[], object] = int

    def prepare_pool(self) -> None:
        if self._launcher == "futures":
            self._pool = ThreadPoolExecutor(1)
            self._pool.submit(int).result()
        elif self._launcher == "pool":
            self._pool = ThreadPool(1)

    def start(self) -> None:
        body = functools.partial(or_exit, self.work)
        if isinstance(self._pool, ThreadPoolExecutor):
            self.join = self._pool.submit(body).result
        elif self._pool is not None:
            self.join = self._pool.apply_async(body).get
        elif self._launcher == "_thread":
            finished = threading.Event()
            _thread.start_new_thread(lambda: (body(), finished.set()), ())
            self.join = finished.wait
        else:
            thread = threading.Thread(target=body)
            thread.start()
            self.join = thread.join

    @staticmethod
    def extra_bytes(plan: Plan) -> int:
        """Return the bytes of the largest storage that an op of the loop uses because of the role."""
        return 0

    @contextlib.contextmanager
    def measure_action(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.longest = max(self.longest, time.perf_counter() - start)

    def models(self) -> list[nn.Module]:
        return []

    def work(self) -> None: ...

    def before(self, loop: Training, step: int) -> None:
        """Run at the beginning of a step."""

    def wait_until_writable(self, loop: Training, step: int) -> None:
        """Wait until the loop may write to parameters, gradients and optimizer state."""

    def after(self, loop: Training, step: int) -> None:
        """Run at the end of a step."""

    def finish(self) -> None:
        self.inbox.put(None)
        self.join()


class Loader(Role):
    """Makes the loop's batches: random numbers, or slices of a dataset that the loop also reads."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.outbox = queue.Queue(draw.choice((1, 4)))
        self.data = torch.rand(plan.batch * 4, plan.width)

    @staticmethod
    def extra_bytes(plan: Plan) -> int:
        return 4 * plan.batch * 4 * plan.width

    def work(self) -> None:
        for _ in range(self.plan.steps):
            with self.measure_action():
                batch = self.make()
            self.outbox.put(batch)
            self.seen.append(batch.sum().item())

    def make(self) -> Tensor:
        rows, data = self.plan.batch, self.data
        first = self.draw.randrange(len(data) - rows)
        style = self.draw.randrange(4)
        if style == 0:
            return torch.rand(rows, self.plan.width, generator=self.generator) * 2
        if style == 1:
            return data[first : first + rows]
        if style == 2:
            return data[torch.randint(0, len(data), (rows,), generator=self.generator)].flip(0)
        self.kept.append(torch.stack([data[first + row] for row in range(rows)]))
        return self.kept[-1]

    def wait_until_writable(self, loop: Training, step: int) -> None:
        loop.seen.append(self.data[step : step + 50].sum().item())


class Visitor(Role):
    """Reads tensors after a step, until the loop is about to write to them."""

    pending = False

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.starts = draw.choice((-1, 0, 1))

    def after(self, loop: Training, step: int) -> None:
        self.inbox.put((step, self.show(loop)))
        self.pending = True

    def wait_until_writable(self, loop: Training, step: int) -> None:
        if self.pending:
            self.outbox.get()
            self.pending = False
            self.after_visit(loop)

    def work(self) -> None:
        for step, shown in iter(self.inbox.get, None):
            with self.measure_action():
                self.visit(step, shown)
            self.outbox.put(True)

    def show(self, loop: Training) -> Any:
        return loop.tensors()

    def visit(self, step: int, shown: Any) -> None: ...

    def after_visit(self, loop: Training) -> None: ...


class Logger(Visitor):
    """Reads parameters, gradients, optimizer state and an activation to which it has the last reference."""

    def show(self, loop: Training) -> Any:
        return [*loop.tensors(), loop.out]

    def visit(self, step: int, shown: list[Tensor]) -> None:
        looks: tuple[Callable[[Tensor], Any], ...] = (
            lambda t: t.norm().item(),
            lambda t: t.histc(16).tolist(),
            lambda t: t.flatten()[:200].tolist(),
            lambda t: t.tolist(),
            lambda t: crc(t.numpy().copy()),
            repr,
        )
        for tensor in self.draw.sample(shown, min(len(shown), 8)):
            look = self.draw.choices(looks, (4, 3, 3, 1, 1, 1))[0]
            self.seen.append(look(tensor.detach()))


class Checkpoint(Visitor):
    """Writes the loop's own tensors to a file while the loop reads them."""

    def visit(self, step: int, shown: list[Tensor]) -> None:
        buffer, style = io.BytesIO(), self.draw.randrange(3)
        if style == 0:
            torch.save(shown, buffer)
        for tensor in shown if style == 1 else ():
            np.save(buffer, tensor.numpy())
        for tensor in shown if style == 2 else ():
            buffer.write(tensor.cpu().numpy().tobytes())
        self.seen.append(zlib.crc32(buffer.getbuffer()))


class Saver(Checkpoint):
    """Writes clones made by the loop, which does not wait for it."""

    def show(self, loop: Training) -> Any:
        return [tensor.clone() for tensor in loop.tensors()]

    def wait_until_writable(self, loop: Training, step: int) -> None:
        pass


class Writer(Visitor):
    """Updates an average of the parameters and a scratch tensor, both of which the loop reads later."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.average: list[Tensor] = []

    def show(self, loop: Training) -> Any:
        if not self.average:
            self.average = [p.detach().clone() for p in loop.model.parameters()]
        return [p.detach() for p in loop.model.parameters()], loop.scratch

    def visit(self, step: int, shown: Any) -> None:
        parameters, scratch = shown
        for mean, parameter in zip(self.average, parameters, strict=True):
            mean.lerp_(parameter, 0.1) if self.draw.random() < 0.5 else mean.mul_(0.9).add_(parameter, alpha=0.1)
        scratch[step % 2 :: 2].fill_(step)

    def after_visit(self, loop: Training) -> None:
        loop.seen += [mean.sum().item() for mean in self.average]
        loop.seen.append((loop.scratch * 2).sum().item())


class Forker(Visitor):
    def visit(self, step: int, shown: list[Tensor]) -> None:
        self.seen += [tensor.sum().item() for tensor in shown[:2]]
        if step % 4 != 1:
            return
        shown = [tensor.detach() for tensor in shown]
        if self.draw.random() < 0.5:
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=send_sums, args=(theirs, shown))
            process.start()
            self.seen += ours.recv()
            process.join()
            return
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writable, pickle.dumps([tensor.sum().item() for tensor in shown]))
            os._exit(0)
        os.close(writable)
        self.seen += pickle.loads(os.read(readable, 1 << 16))
        os.close(readable)
        os.waitpid(child, 0)


def send_sums(pipe: Any, tensors: list[Tensor]) -> None:
    pipe.send([tensor.sum().item() for tensor in tensors])


class Teacher(Role):
    """A frozen model that answers in a thread and then reads its own answers."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.model, self.is_passed = make_model(plan, draw.randint(1, 3)).requires_grad_(False), draw.random() < 0.5

    def models(self) -> list[nn.Module]:
        return [self.model] if self.is_passed else []

    @torch.no_grad()
    def work(self) -> None:
        for batch in iter(self.inbox.get, None):
            with self.measure_action():
                answer = self.model(batch).softmax(-1)
            self.outbox.put(answer)
            self.seen += [answer.sum(0).norm().item(), (batch * answer).sum().item()]

    def before(self, loop: Training, step: int) -> None:
        self.inbox.put(loop.batch)

    def wait_until_writable(self, loop: Training, step: int) -> None:
        loop.target = self.outbox.get()


class Twin(Role):
    """Trains a model of its own in a thread that has not opened the budget."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.model = make_model(plan, draw.randint(1, 3))
        self.optimizer = make_optimizer(self.model, draw)
        # A model that a thread trains while the first context opens must not be given.
        self.is_passed = self.starts >= 0 and draw.random() < 0.5
        self.has_stepped = threading.Event()

    def models(self) -> list[nn.Module]:
        return [self.model] if self.is_passed else []

    def start(self) -> None:
        super().start()
        if self.is_passed:  # a later context may be given it only if the thread trains in an earlier one
            self.has_stepped.wait()

    def work(self) -> None:
        for _ in range(self.plan.steps * 2):
            with self.measure_action():
                batch = torch.rand(self.plan.batch, self.plan.width, generator=self.generator)
                loss = (self.model(batch) - batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.has_stepped.set()
            self.seen.append(loss.item())
        self.kept = [p.detach() for p in self.model.parameters()]


class Actor(Role):
    """Runs the actions of random loops: views, in-place ops, frees, branches on values."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.kept = [torch.rand(100, 200) for _ in range(8)]

    @torch.no_grad()
    def work(self) -> None:
        for _ in range(self.plan.steps * 12):
            with self.measure_action():
                self.seen.append(self.draw.choice(ACTIONS)(self.kept, self.draw))
            del self.kept[30:]


class Collective(Role):
    """Sums rows of a flat buffer with another process, while the loop uses other rows."""

    styles: tuple[str, ...] = ("async", "thread")

    @staticmethod
    def extra_bytes(plan: Plan) -> int:
        return 4 * ROWS * ROW

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        super().__init__(plan, draw)
        self.style = draw.choice(self.styles)
        store = Path(tempfile.mkdtemp()) / "store"
        readable, self.release = os.pipe()
        if os.fork() == 0:  # before any thread starts
            os.close(self.release)
            or_exit(lambda: self.assist(store, readable))
            os._exit(0)
        os.close(readable)
        join_group(store, 0)
        self.flat, self.result = torch.zeros(ROWS, ROW), torch.zeros(ROW)
        self.work_in_flight: Any = None

    def assist(self, store: Path, readable: int) -> None:
        """Join each all-reduce when the other process writes a byte."""
        join_group(store, 1)
        for step in itertools.count():
            if not os.read(readable, 1):
                return
            row = torch.arange(ROW).mul(step + 3.0)
            self.sum_up(row).sum() if self.style == "functional" else dist.all_reduce(row)

    def sum_up(self, row: Tensor) -> Tensor:
        return functional.all_reduce(row, "sum", dist.group.WORLD)  # type: ignore[arg-type]

    def work(self) -> None:
        for row in iter(self.inbox.get, None):
            with self.measure_action():
                dist.all_reduce(row)
            self.outbox.put(row.sum().item())

    def before(self, loop: Training, step: int) -> None:
        row = self.flat[step % ROWS]
        row.copy_(torch.arange(ROW).mul(step + 1.0))
        if self.style == "async":
            self.work_in_flight = dist.all_reduce(row, async_op=True)
        elif self.style == "thread":
            self.inbox.put(row)
        else:
            self.result = self.sum_up(row)
        self.flat[(step + 1) % ROWS] += 5  # uses the same storage but must not wait

    def wait_until_writable(self, loop: Training, step: int) -> None:
        if loop.run is not None and self.plan.stress:
            load_paging().follow_evict_all(loop.run._space)
        os.write(self.release, b".")
        if self.style == "async":
            self.work_in_flight.wait()
        self.seen.append(self.outbox.get() if self.style == "thread" else (self.result + 0).sum().item())
        loop.seen += self.flat.sum(1).tolist()

    def finish(self) -> None:
        super().finish()
        os.close(self.release)


class FunctionalCollective(Collective):
    """Sums tensors with another process by collectives that return their results."""

    styles = ("functional",)


def join_group(store: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


ROLES: dict[str, type[Role]] = {
    "loader": Loader,
    "saver": Saver,
    "checkpoint": Checkpoint,
    "teacher": Teacher,
    "twin": Twin,
    "logger": Logger,
    "writer": Writer,
    "forker": Forker,
    "actor": Actor,
    "collective": Collective,
    "functional": FunctionalCollective,
}
