"""Train PyTorch's databases of modules and operators within a tiny budget and compare each bit with plain PyTorch.

Storages of all sizes are moved, because the samples are small. Each case runs in plain PyTorch, then twice within a
budget: under stress (all tensors are evicted after each op), and in the smallest arena. Cases are skipped and counted
if plain PyTorch refuses them or gives other bits on a second run.

    python tests/torch_cpu/databases.py modules
    python tests/torch_cpu/databases.py operators --every 10 --first 3
    python tests/torch_cpu/databases.py operators --only nn.functional.conv2d

Needs its own process: PyTorch's databases change global settings. Prints one line of JSON; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

import outofcore
from outofcore.follow.native import load_paging

PAGE = 4096
ROOM = 1 << 28
MAX_TRIES = 24
# They return uninitialized memory; so does the driver gelsy of lstsq, in the last bits.
EXCLUDED = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_", "linalg.lstsq"),
}

Case = Callable[[], list[Any]]


def copy_tensors(value: Any) -> Any:
    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return copy.deepcopy(leaf)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return tree_map(copy_leaf, value)


def scalar_loss(values: Any) -> Tensor | None:
    """Return a loss that weighs each element of each floating output differently."""
    total: Tensor | None = None
    for number, leaf in enumerate(tree_leaves(values)):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        dense = leaf if leaf.layout is torch.strided else leaf.to_dense()
        plain = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        weights = torch.arange(plain.numel(), dtype=torch.float64).cos().reshape(plain.shape).to(plain.dtype)
        term = (plain * weights).sum() * (number + 1)
        total = term if total is None else total + term.to(total.dtype)
    return total


def comparable_copies(values: Any) -> list[Any]:
    """Return copies of the tensors, and the comparable Python values, of a result."""
    copies: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            dense = leaf.detach()
            copies.append((dense if dense.layout is torch.strided else dense.to_dense()).clone())
        elif isinstance(leaf, int | float | bool | str):
            copies.append(leaf)
    return copies


def equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
            return False
        if expected.is_quantized:
            actual, expected = actual.int_repr(), expected.int_repr()
        if actual.is_complex():
            actual, expected = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(expected.resolve_conj())
        if actual.is_floating_point():  # all NaN are equal
            return bool(
                torch.equal(actual.isnan(), expected.isnan())
                and torch.equal(
                    actual.nan_to_num(posinf=inf, neginf=-inf), expected.nan_to_num(posinf=inf, neginf=-inf)
                )
            )
        return torch.equal(actual, expected)
    return bool(actual == expected or (actual != actual and expected != expected))  # noqa: PLR0124 - NaN


def train_module(
    prototype: nn.Module, arguments: Any, make: Callable[..., torch.optim.Optimizer], *, read: bool
) -> list[Any]:
    torch.manual_seed(1)
    module, (args, kwargs) = copy.deepcopy(prototype).train(), copy_tensors(arguments)
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = [*module.parameters(), *inputs]
    optimizer = make(parameters) if parameters else None
    results: list[Any] = []
    for _ in range(3):
        out = module(*args, **kwargs)
        loss = scalar_loss(out)
        results += comparable_copies(out)
        if loss is None:
            continue
        loss.backward()
        if read:
            results.append(loss.item())
        results += comparable_copies([p.grad for p in parameters])
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=read)
    return [
        *results,
        *comparable_copies(list(module.state_dict().values())),
        *comparable_copies(inputs),
        torch.get_rng_state(),
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def modules(only: str) -> Iterator[tuple[str, Case]]:
    for info in module_db:
        if only and info.name != only:
            continue
        torch.manual_seed(0)
        try:
            inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
            listed = list(inputs)
        except Exception:
            continue
        for number, sample in enumerate(listed):

            def case(info: Any = info, sample: Any = sample, number: int = number) -> list[Any]:
                torch.manual_seed(2)
                module = info.module_cls(
                    *copy.deepcopy(sample.constructor_input.args), **sample.constructor_input.kwargs
                )
                prototype = module.to(torch.float32) if any(True for _ in module.parameters()) else module
                arguments = (sample.forward_input.args, sample.forward_input.kwargs)
                return train_module(prototype, arguments, (sgd, adam)[number % 2], read=number % 3 == 0)

            yield f"{info.name} {number} {sample.desc}".strip(), case


def operators(only: str, first: int) -> Iterator[tuple[str, Case]]:
    for info in op_db:
        if (only and info.name != only) or info.name in EXCLUDED:
            continue
        kinds = info.supported_dtypes("cpu")
        dtype = next((d for d in (torch.float32, torch.complex64, torch.int64, torch.bool) if d in kinds), None)
        if dtype is None:
            continue
        grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        torch.manual_seed(0)
        try:
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=grad))
        except Exception:
            continue
        for number, sample in enumerate(samples[: first or None]):
            for mode in ("call", "inplace", "out"):
                function = {"call": info.op, "inplace": info.inplace_variant, "out": info.op}[mode]
                if function is None or (mode == "out" and not info.supports_out):
                    continue

                def case(function: Any = function, sample: Any = sample, mode: str = mode) -> list[Any]:
                    torch.manual_seed(1)
                    value, args, kwargs = copy_tensors((sample.input, sample.args, sample.kwargs))
                    leaves = [
                        x for x in tree_leaves((value, args, kwargs)) if isinstance(x, Tensor) and x.requires_grad
                    ]
                    results: list[Any] = []
                    for _ in range(2):
                        if mode == "out":
                            with torch.no_grad():
                                shapes = function(value, *args, **kwargs)
                                out = tree_map(torch.empty_like, shapes)
                                function(value, *args, **kwargs, out=out)
                                results += comparable_copies(out)
                            continue
                        target = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
                        out = function(target if mode == "inplace" else value, *args, **kwargs)
                        results += comparable_copies(out)
                        loss = scalar_loss(out)
                        if loss is not None:
                            for gradient in torch.autograd.grad(loss, leaves, allow_unused=True):
                                results += comparable_copies([gradient])
                    return [*results, torch.get_rng_state()]

                yield (
                    f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''} {number} {mode}",
                    case,
                )


def run_within(case: Case, budget: int, *, stress: bool) -> tuple[list[Any], outofcore.LoopStats]:
    with outofcore.budget(budget, home="host", host_budget=ROOM, policy=None) as run:
        load_paging().follow_stress(run._space, int(stress))
        results = case()
        stats = run.stats
    return results, stats


def run_squeezed(case: Case) -> tuple[list[Any], outofcore.LoopStats]:
    """Run in the smallest arena that the refusals name."""
    budget = 4 * PAGE
    for _ in range(MAX_TRIES):
        try:
            return run_within(case, budget, stress=False)
        except outofcore.BudgetError as error:
            budget = max(budget + PAGE, error.smallest_budget or 0)
    return run_within(case, ROOM, stress=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=["modules", "operators"])
    parser.add_argument("--only", default="", help="Name of the only entry to run.")
    parser.add_argument("--every", type=int, default=1, help="Run every N-th case.")
    parser.add_argument("--start", type=int, default=0, help="Index of the first case.")
    parser.add_argument("--first", type=int, default=0, help="Number of samples of each operator; 0: all.")
    parser.add_argument("--verbose", action="store_true", help="Print the name of each case before it runs.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_paging().follow_smallest(1)
    databases = {"modules": modules(options.only), "operators": operators(options.only, options.first)}
    cases = itertools.chain.from_iterable(databases[database] for database in options.which)
    report: dict[str, Any] = {"ran": 0, "refused": 0, "unsteady": 0, "evictions": 0, "failed": []}
    for number, (name, case) in enumerate(cases):
        if number % options.every != options.start:
            continue
        if options.verbose:
            print(name, file=sys.stderr, flush=True)
        try:
            expected = case()
        except Exception:
            report["refused"] += 1
            continue
        if not all(map(equal, case(), expected)):
            report["unsteady"] += 1
            continue
        report["ran"] += 1
        for label, run in (
            ("stress", lambda c=case: run_within(c, ROOM, stress=True)),
            ("squeezed", lambda c=case: run_squeezed(c)),
        ):
            try:
                results, stats = run()
            except Exception:
                report["failed"].append(
                    f"{name}, {label}: {traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]}"
                )
                continue
            report["evictions"] += stats.evictions
            if len(results) != len(expected) or not all(map(equal, results, expected)):
                report["failed"].append(f"{name}, {label}: other bits")
    print(json.dumps(report, indent=1))
    return bool(report["failed"] or not report["ran"])


if __name__ == "__main__":
    sys.exit(main())
