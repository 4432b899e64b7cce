"""Compile PyTorch's databases of modules, operators and optimizers and compare each bit with plain PyTorch.

Each sample becomes a step (an optimizer: with a small model), which runs in plain PyTorch, compiled in core, and
compiled within its smallest budget. Refused samples are counted by refusal and entry.

    python tests/torch_cpu/databases_compiled.py modules operators optimizers
    python tests/torch_cpu/databases_compiled.py operators --only nn.functional.conv2d

Prints one line of JSON; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import json
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from databases import comparable_copies, equal
from databases_split import modules, operators, step_of
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

import outofcore

CALLS = 3
ROOMY = 64 << 20
# The step, its arguments, the model and the optimizers.
StepParts = tuple[Callable[..., Any], list[Any], nn.Module, list[torch.optim.Optimizer]]


def sample_entries(
    kind: Callable[[str, int], Iterator[Any]], only: str, first: int
) -> Iterator[tuple[str, Callable[[], StepParts]]]:
    for sample in kind(only, first):

        def make(sample: Any = sample) -> StepParts:
            copied = copy.copy(sample)
            if sample.model is not None:
                model = copy.deepcopy(sample.model)
                copied = type(sample)(sample.name, model, sample.given, model)
            step, tensors = step_of(copied)
            return step, tensors, copied.model or nn.Identity(), []

        yield sample.name, make


def optimizer_entries(only: str) -> Iterator[tuple[str, Callable[[], StepParts]]]:
    for info in optim_db:
        if only and info.optim_cls.__name__ != only:
            continue
        for number, sample in enumerate(info.optim_inputs_func(device="cpu")):

            def make(info: Any = info, sample: Any = sample) -> StepParts:
                torch.manual_seed(2)
                model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
                optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(sample.kwargs))

                def step(x: torch.Tensor) -> torch.Tensor:
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    return loss

                return step, [torch.randn(8, 16)], model, [optimizer]

            yield f"{info.optim_cls.__name__} {number} {sample.desc}", make


def run_step(make: Callable[[], StepParts], budget: int | None, cache: str) -> list[Any]:
    """Return the results of all calls, the model state and the generator state; without a budget in plain PyTorch."""
    step, arguments, model, optimizers = make()
    run: Any = step
    if budget is not None:
        run = outofcore.compile(step, model, optimizers or None, budget=budget, home="host", cache=cache, dynamic=False)
    torch.manual_seed(1)
    try:
        results = [leaf for _ in range(CALLS) for leaf in comparable_copies(run(*arguments))]
    finally:
        if budget is not None:
            run.close()
    return [*results, *comparable_copies(list(model.state_dict().values())), torch.get_rng_state()]


def smallest_budget(make: Callable[[], StepParts], cache: str) -> int:
    step, arguments, model, optimizers = make()
    with outofcore.compile(
        step, model, optimizers or None, budget=4096, home="host", cache=cache, dynamic=False
    ) as run:
        try:
            run.prepare(*arguments)
        except outofcore.BudgetError as error:
            return error.smallest_budget or ROOMY
    return 4096


def refusal_kind(error: Exception) -> str:
    """Return the message of a refusal without its location and numbers."""
    text = re.sub(r"^\S+:\d+: ", "", str(error).partition("\n")[0])
    return re.sub(r"\d+", "N", f"{type(error).__name__}: {text[:70]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=["modules", "operators", "optimizers"])
    parser.add_argument("--only", default="", help="Name of the only entry to run.")
    parser.add_argument("--every", type=int, default=1, help="Run every N-th sample.")
    parser.add_argument("--start", type=int, default=0, help="Index of the first sample.")
    parser.add_argument("--first", type=int, default=0, help="Number of samples of each entry; 0: all.")
    parser.add_argument("--verbose", action="store_true", help="Print the name of each sample before it runs.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kinds = {
        "modules": sample_entries(modules, options.only, options.first),
        "operators": sample_entries(operators, options.only, options.first),
        "optimizers": optimizer_entries(options.only),
    }
    report: dict[str, Any] = {"ran": 0, "plain refuses": 0, "unsteady": 0, "failed": []}
    refused: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as cache:
        for number, (name, make) in enumerate(
            itertools.chain.from_iterable(kinds[database] for database in options.which)
        ):
            if number % options.every != options.start:
                continue
            if options.verbose:
                print(name, file=sys.stderr, flush=True)
            try:
                expected = run_step(make, None, cache)
                repeated = run_step(make, None, cache)
            except Exception:
                report["plain refuses"] += 1
                continue
            if not all(map(equal, repeated, expected)):
                report["unsteady"] += 1
                continue
            try:
                for budget in (ROOMY, smallest_budget(make, cache)):
                    results = run_step(make, budget, cache)
                    if len(results) != len(expected) or not all(map(equal, results, expected)):
                        report["failed"].append(f"{name} in {budget} bytes: other bits")
            except (outofcore.CaptureError, outofcore.InputError) as error:
                refused[refusal_kind(error)][name.partition(" ")[0]] += 1
                continue
            except Exception:
                last = traceback.format_exc(limit=-1).strip().splitlines()
                report["failed"].append(f"{name}: {' | '.join(last[-3:])[:300]}")
                continue
            report["ran"] += 1
    print(json.dumps(report | {"refused": refused}))
    return bool(report["failed"] or not report["ran"])


if __name__ == "__main__":
    sys.exit(main())
