"""Random programs of several threads: compare each thread's results within a budget with plain PyTorch's, bit for bit.

A seed draws a training loop and one to three roles, most of which run in their own thread: a loader, a saver, a teacher
and so on. Each thread has its own data and generator. Threads exchange tensors by queues. A thread never writes to
a tensor that another may be reading, so results do not depend on the interleaving. Each program runs in a forked
process, because it may hang or crash.

    python tests/torch_cpu/thread_programs.py --seconds 60 --threads 2..4
    python tests/torch_cpu/thread_programs.py --roles loader --programs 3 --stress
    python tests/torch_cpu/thread_programs.py --inline 17           # in this process, for debuggers and sanitizers
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import itertools
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from thread_roles import ACTIONS, LAUNCHERS, ROLES, Loader, Plan, crc, make_model, make_optimizer, or_exit
from torch import Tensor, nn

import outofcore.api  # before forking, so that processes need not import it
from outofcore.follow.native import load_paging
from outofcore.units import KIB, MIB

CONTEXTS = ("one", "ends", "two")


def draw_plan(seed: int, options: argparse.Namespace) -> Plan:
    draw = random.Random(seed)
    roles = options.roles or [draw.choice(list(ROLES)) for _ in range(draw.randint(*options.threads) - 1)]
    # A second role of these kinds would be idle or lack a partner.
    once = {"loader": "loader", "teacher": "teacher", "collective": "gloo", "functional": "gloo"}
    first = {once.get(role, place): role for place, role in reversed(list(enumerate(roles)))}
    return Plan(
        seed,
        tuple(reversed(first.values())),
        width=draw.choice((128, 192, 256, 384)),
        batch=draw.choice((130, 200, 256, 400)),
        layers=draw.randint(2, 5),
        steps=options.steps or draw.randint(6, 12),
        contexts=draw.choice(options.contexts),
        share=draw.uniform(*options.share),
        home=draw.choice(("disk", "host")),
        stress=options.stress or draw.random() < 0.2,
        planned=draw.random() < 0.2,
        launcher=options.launcher,
        switching=draw.random() < 0.5,
        in_thread=draw.random() < 0.3,
        late_joins=draw.random() < 0.5,
    )


class Training:
    def __init__(self, plan: Plan, roles: bool = True) -> None:
        self.plan, self.draw = plan, random.Random(f"{plan.seed} loop")
        torch.manual_seed(plan.seed)
        names = enumerate(plan.roles if roles else ())
        self.roles = [ROLES[name](plan, random.Random(f"{plan.seed} {place} {name}")) for place, name in names]
        torch.manual_seed(plan.seed)
        self.model = nn.Sequential(make_model(plan, plan.layers), nn.Dropout(0.1))
        self.optimizer = make_optimizer(self.model, self.draw)
        self.batch = self.target = self.out = torch.zeros(0)
        self.scratch = torch.ones(200, 200)
        self.pool = [torch.randn(100, 200) for _ in range(6)]
        self.seen: list[Any] = []
        self.run: outofcore.Loop | None = None
        self.counts, self.beyond = Counter[str](), 0
        self.set_to_none = self.draw.random() < 0.7

    def tensors(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [tensor.detach() for tensor in (*parameters, *gradients, *state)]

    def step(self, number: int) -> None:
        for role in self.roles:
            if role.starts == number:
                role.start()
        loader = next((role for role in self.roles if isinstance(role, Loader)), None)
        self.batch = loader.outbox.get() if loader else torch.randn(self.plan.batch, self.plan.width)
        self.target = self.batch
        for role in self.roles:
            role.before(self, number)
        self.out = self.model(self.batch)
        with torch.no_grad():
            for _ in range(self.draw.randrange(4)):
                self.seen.append(self.draw.choice(ACTIONS)(self.pool, self.draw))
            del self.pool[20:]
            self.seen.append(self.model(self.batch).sum().item())
        for role in self.roles:
            role.wait_until_writable(self, number)
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = (self.out - self.target).square().mean()
        loss.backward()
        self.optimizer.step()
        self.seen.append(loss.item())
        for role in self.roles:
            role.after(self, number)

    def train(self, budget: int | None) -> None:
        for role in self.roles:
            role.prepare_pool()
            if role.starts < 0:
                role.start()
        stretches = self.plan.stretches()
        for first, last, within in stretches:
            with self.budget(budget if within else None):
                for number in range(first, last):
                    self.step(number)
                if last == self.plan.steps and not self.plan.late_joins:
                    self.finish()
        if self.plan.late_joins:
            self.finish()

    def finish(self) -> None:
        for role in self.roles:
            role.finish()
            self.seen += [tensor.sum().item() for tensor in role.kept]

    @contextlib.contextmanager
    def budget(self, limit: int | None) -> Iterator[None]:
        if limit is None:
            yield
            return
        models = [self.model, *(model for role in self.roles for model in role.models())]
        policy = "auto" if self.plan.planned else None
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = status_bytes("VmRSS")
        with outofcore.budget(limit, models, home=self.plan.home, policy=policy, cache=False) as self.run:
            load_paging().follow_stress(self.run._space, int(self.plan.stress))
            yield
            stats = self.run.stats
            self.counts.update(ops=stats.ops, evictions=stats.evictions, fetches=stats.fetches)
        self.run = None
        self.beyond = max(self.beyond, status_bytes("VmHWM") - before - limit)

    def results(self) -> list[list[Any]]:
        tensors = [*self.tensors(), *self.pool, self.out.detach()]
        ours = [*self.seen, *map(crc, tensors)]
        return [ours, *([*role.seen, *map(crc, role.kept)] for role in self.roles)]


def in_child(function: Callable[[], Any], seconds: float, verbose: bool = False) -> tuple[Any, str]:
    """Call a function in a forked process; return (result, ""), or (None, the reason for its failure)."""
    with tempfile.TemporaryDirectory() as folder:
        result_file, stderr_file = Path(folder) / "result", Path(folder) / "said"
        child = os.fork()
        if child == 0:
            os.setsid()
            tempfile.tempdir = folder
            os.dup2(os.open(stderr_file, os.O_WRONLY | os.O_CREAT), 2)
            faulthandler.enable()
            faulthandler.dump_traceback_later(seconds, exit=True)
            or_exit(lambda: result_file.write_bytes(pickle.dumps(function())))
            os._exit(0)
        deadline, status = time.monotonic() + seconds + 15, None
        while status is None:
            time.sleep(0.005)
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # processes that the child left running
        if status == 0:
            return pickle.loads(result_file.read_bytes()), ""
        stderr_text = stderr_file.read_text(errors="replace")
        if verbose:
            print(stderr_text, file=sys.stderr)
        errors = [line for line in stderr_text.splitlines() if line.startswith("error: ")]
        if os.WIFSIGNALED(status) and "Timeout (" not in stderr_text:
            number = os.WTERMSIG(status)
            return None, "hang" if number == signal.SIGKILL else f"crash by {signal.Signals(number).name}"
        return None, errors[0][:300] if errors else "hang" if "Timeout (" in stderr_text else f"exit status {status}"


def run(plan: Plan, budget: int | None, roles: bool = True) -> tuple[list[list[Any]], Counter[str], int, float]:
    """Run a program; return results, counts, bytes beyond the budget and the longest action of a role."""
    sys.setswitchinterval(1e-5 if plan.switching else 0.005)
    Training(plan, roles=False).step(0)  # loads code and libraries, which would count as memory beyond the budget
    training = Training(plan, roles)
    if plan.in_thread:
        thread = threading.Thread(target=or_exit, args=(lambda: training.train(budget),))
        thread.start()
        thread.join()
    else:
        training.train(budget)
    longest = max((role.longest for role in training.roles), default=0.0)
    return training.results(), training.counts, training.beyond, longest


def smallest_budget(plan: Plan) -> int:
    """Return the smallest budget in which the loop runs without roles."""
    alone, budget = replace(plan, contexts="one", stress=False, planned=False, in_thread=False), 512 * KIB
    while True:
        try:
            run(alone, budget, roles=False)
            return budget
        except outofcore.BudgetError as error:
            budget = max(error.smallest_budget or 0, budget + 64 * KIB)


def budget_of(plan: Plan, smallest: int) -> int:
    """Return a budget for the loop and the largest storage that its roles make it use."""
    return int(plan.share * (smallest + max(ROLES[name].extra_bytes(plan) for name in plan.roles)))


def check(plan: Plan, options: argparse.Namespace) -> tuple[str, Any]:
    """Compare a program with plain PyTorch; return the error or "", and the results within the budget."""
    smallest, error = in_child(lambda: smallest_budget(plan), options.limit, options.verbose)
    if error:
        return f"no smallest budget: {error}", None
    theirs, error = in_child(lambda: run(plan, None), options.limit, options.verbose)
    if error:
        return f"plain PyTorch: {error}", None
    budget = None if options.plain else budget_of(plan, smallest)
    ours, error = in_child(lambda: run(plan, budget), options.limit, options.verbose)
    if error:
        return error, None
    for name, actual, expected in zip(("loop", *plan.roles), ours[0], theirs[0], strict=True):
        different = [
            index
            for index, pair in enumerate(itertools.zip_longest(actual, expected))
            if repr(pair[0]) != repr(pair[1])
        ]
        if different:
            index = different[0]
            return (
                f"{len(different)} of {len(expected)} values of {name} differ, the first at {index}: "
                f"{str(actual[index])[:60]}, not {str(expected[index])[:60]}"
            ), ours
    return "", ours


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise ValueError(f"the kernel does not report {field}")


def ends_of(text: str, number: Callable[[str], Any]) -> tuple[Any, Any]:
    first, _, last = text.partition("..")
    return number(first), number(last or first)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Run random programs of several threads, and compare with plain PyTorch."
    )
    parser.add_argument("--seconds", type=float, default=60, help="seconds until the last program starts; 60")
    parser.add_argument("--programs", type=int, default=sys.maxsize, help="maximum number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; 0")
    parser.add_argument("--threads", default="2..4", help="number of threads of a program, including the loop's; 2..4")
    parser.add_argument("--roles", nargs="+", choices=ROLES, help="roles of each program; random ones by default")
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=CONTEXTS, help="when the loop has a budget")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="how threads are started; random by default")
    parser.add_argument("--steps", type=int, help="steps of each loop")
    parser.add_argument("--stress", action="store_true", help="evict everything after each op of the loop")
    parser.add_argument("--share", default="1.2..3", help="budget as a multiple of the loop's smallest; 1.2..3")
    parser.add_argument("--plain", action="store_true", help="compare plain PyTorch with itself, to check the programs")
    parser.add_argument("--limit", type=float, default=60, help="seconds until a program counts as hanging; 60")
    parser.add_argument("--verbose", action="store_true", help="print the output of failing programs")
    parser.add_argument("--inline", type=int, help="seed of one program to run in this process without comparison")
    options = parser.parse_args(arguments)
    options.threads, options.share = ends_of(options.threads, int), ends_of(options.share, float)
    torch.set_num_threads(1)
    load_paging()
    torch.optim.AdamW([torch.zeros(1)])  # imports modules that each process would import
    if options.inline is not None:
        plan = draw_plan(options.inline, options)
        faulthandler.dump_traceback_later(options.limit, exit=True)
        print(plan, *run(plan, budget_of(plan, smallest_budget(plan)))[1:])
        return 0
    counts, beyond, longest, failed = Counter[str](), 0, 0.0, 0
    end = time.monotonic() + options.seconds
    for seed in range(options.seed, options.seed + options.programs):
        if time.monotonic() > end:
            break
        plan = draw_plan(seed, options)
        error, ours = check(plan, options)
        counts["programs"] += 1
        if error:
            failed += 1
            print(f"seed {seed} ({' '.join(plan.roles)}, {plan.contexts}): {error}", flush=True)
        if ours is not None:
            counts.update(ours[1])
            beyond, longest = max(beyond, ours[2]), max(longest, ours[3])
    summary = ", ".join(f"{counts[name]} {name}" for name in ("programs", "ops", "evictions", "fetches"))
    print(f"{summary}, {beyond / MIB:.1f} MiB beyond the budget, longest action {longest:.2f} s, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:  # one line of arguments per run, so that PyTorch is imported once
        for line in sys.stdin:
            print(f"exit {int(main(line.split()))}", flush=True)
    else:
        sys.exit(main(sys.argv[1:]))
