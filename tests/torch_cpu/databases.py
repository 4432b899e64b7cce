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
LEFT_OUT = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_", "linalg.lstsq"),
}

Case = Callable[[], list[Any]]


def fresh(value: Any) -> Any:
    """Return a copy with new tensors."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return copy.deepcopy(leaf)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return tree_map(copied, value)


def scalar(values: Any) -> Tensor | None:
    """Return a loss that weighs each element of each floating output differently."""
    total: Tensor | None = None
    for number, leaf in enumerate(tree_leaves(values)):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        dense = leaf if leaf.layout is torch.strided else leaf.to_dense()
        plain = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        weights = torch.arange(plain.numel(), dtype=torch.float64).cos().reshape(plain.shape).to(plain.dtype)
        part = (plain * weights).sum() * (number + 1)
        total = part if total is None else total + part.to(total.dtype)
    return total


def kept(values: Any) -> list[Any]:
    """Return copies of the tensors, and the comparable Python values, of a result."""
    found: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            dense = leaf.detach()
            found.append((dense if dense.layout is torch.strided else dense.to_dense()).clone())
        elif isinstance(leaf, int | float | bool | str):
            found.append(leaf)
    return found


def equal(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        if not isinstance(left, Tensor) or left.shape != right.shape or left.dtype != right.dtype:
            return False
        if right.is_quantized:
            left, right = left.int_repr(), right.int_repr()
        if left.is_complex():
            left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
        if left.is_floating_point():  # all NaN are equal
            return bool(torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num()))
        return torch.equal(left, right)
    return bool(left == right or (left != left and right != right))  # noqa: PLR0124 - NaN


def train_module(
    prototype: nn.Module, given: Any, make: Callable[..., torch.optim.Optimizer], *, read: bool
) -> list[Any]:
    """Train one module for three steps and return all its results."""
    torch.manual_seed(1)
    module, (args, kwargs) = copy.deepcopy(prototype).train(), fresh(given)
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = [*module.parameters(), *inputs]
    optimizer = make(parameters) if parameters else None
    seen: list[Any] = []
    for _ in range(3):
        out = module(*args, **kwargs)
        loss = scalar(out)
        seen += kept(out)
        if loss is None:
            continue
        loss.backward()
        if read:
            seen.append(loss.item())
        seen += kept([p.grad for p in parameters])
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=read)
    return [*seen, *kept(list(module.state_dict().values())), *kept(inputs), torch.get_rng_state()]


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
        for number, one in enumerate(listed):

            def case(info: Any = info, one: Any = one, number: int = number) -> list[Any]:
                torch.manual_seed(2)
                made = info.module_cls(*copy.deepcopy(one.constructor_input.args), **one.constructor_input.kwargs)
                prototype = made.to(torch.float32) if any(True for _ in made.parameters()) else made
                given = (one.forward_input.args, one.forward_input.kwargs)
                return train_module(prototype, given, (sgd, adam)[number % 2], read=number % 3 == 0)

            yield f"{info.name} {number} {one.desc}".strip(), case


def operators(only: str, first: int) -> Iterator[tuple[str, Case]]:
    for info in op_db:
        if (only and info.name != only) or info.name in LEFT_OUT:
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
            for how in ("call", "inplace", "out"):
                function = {"call": info.op, "inplace": info.inplace_variant, "out": info.op}[how]
                if function is None or (how == "out" and not info.supports_out):
                    continue

                def case(function: Any = function, sample: Any = sample, how: str = how) -> list[Any]:
                    torch.manual_seed(1)
                    value, args, kwargs = fresh((sample.input, sample.args, sample.kwargs))
                    leaves = [
                        x for x in tree_leaves((value, args, kwargs)) if isinstance(x, Tensor) and x.requires_grad
                    ]
                    seen: list[Any] = []
                    for _ in range(2):
                        if how == "out":
                            with torch.no_grad():
                                shapes = function(value, *args, **kwargs)
                                out = tree_map(torch.empty_like, shapes)
                                function(value, *args, **kwargs, out=out)
                                seen += kept(out)
                            continue
                        target = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
                        out = function(target if how == "inplace" else value, *args, **kwargs)
                        seen += kept(out)
                        loss = scalar(out)
                        if loss is not None:
                            for gradient in torch.autograd.grad(loss, leaves, allow_unused=True):
                                seen += kept([gradient])
                    return [*seen, torch.get_rng_state()]

                yield (
                    f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''} {number} {how}",
                    case,
                )


def run_within(case: Case, budget: int, *, stress: bool) -> tuple[list[Any], outofcore.LoopStats]:
    with outofcore.budget(budget, home="host", host_budget=ROOM, policy=None) as run:
        load_paging().follow_stress(run._space, int(stress))
        seen = case()
        stats = run.stats
    return seen, stats


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
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("which", nargs="+", choices=["modules", "operators"])
    arguments.add_argument("--only", default="", help="Name of the only entry to run.")
    arguments.add_argument("--every", type=int, default=1, help="Run every N-th case.")
    arguments.add_argument("--start", type=int, default=0, help="Index of the first case.")
    arguments.add_argument("--first", type=int, default=0, help="Number of samples of each operator; 0: all.")
    arguments.add_argument("--verbose", action="store_true", help="Print the name of each case before it runs.")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_paging().follow_smallest(1)
    both = {"modules": modules(given.only), "operators": operators(given.only, given.first)}
    cases = itertools.chain.from_iterable(both[which] for which in given.which)
    told: dict[str, Any] = {"ran": 0, "refused": 0, "unsteady": 0, "evictions": 0, "failed": []}
    for number, (name, case) in enumerate(cases):
        if number % given.every != given.start:
            continue
        if given.verbose:
            print(name, file=sys.stderr, flush=True)
        try:
            wanted = case()
        except Exception:
            told["refused"] += 1
            continue
        if not all(map(equal, case(), wanted)):
            told["unsteady"] += 1
            continue
        told["ran"] += 1
        for how, run in (
            ("stress", lambda c=case: run_within(c, ROOM, stress=True)),
            ("squeezed", lambda c=case: run_squeezed(c)),
        ):
            try:
                seen, stats = run()
            except Exception:
                told["failed"].append(f"{name}, {how}: {traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]}")
                continue
            told["evictions"] += stats.evictions
            if len(seen) != len(wanted) or not all(map(equal, seen, wanted)):
                told["failed"].append(f"{name}, {how}: other bits")
    print(json.dumps(told, indent=1))
    return bool(told["failed"] or not told["ran"])


if __name__ == "__main__":
    sys.exit(main())
