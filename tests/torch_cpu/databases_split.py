"""Split the ops of PyTorch's databases of modules and operators by 2, 3 and 5 and compare each bit.

Each sample is captured as a step with forward and backward pass. Each op that has a split rule is split, with storages
of any size, unless its exactness check fails. Samples that cannot be compared are skipped and counted.

    python tests/torch_cpu/databases_split.py modules operators
    python tests/torch_cpu/databases_split.py operators --only nn.functional.conv2d --parts 3

Prints one line of JSON; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from databases import EXCLUDED, comparable_copies, copy_tensors, equal, scalar_loss
from replay import Replay
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from outofcore.capture import Captured, capture_step
from outofcore.execution.backend import CpuBackend
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import find_mismatches
from outofcore.transforms.passes import hoist_order, reorder, reuse_arguments
from outofcore.transforms.split import split_step

ROOM = 1 << 30


@dataclass(frozen=True)
class Sample:
    name: str
    call: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    model: nn.Module | None = None


def operators(only: str, first: int) -> Iterator[Sample]:
    for info in op_db:
        if (only and info.name != only) or info.name in EXCLUDED:
            continue
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        try:
            samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))
        except Exception:
            continue
        for number, inputs in enumerate(samples[: first or None]):
            yield Sample(f"{info.name} {number}", info.op, ((inputs.input, *inputs.args), inputs.kwargs))


def modules(only: str, first: int) -> Iterator[Sample]:
    for info in module_db:
        if only and info.name != only:
            continue
        torch.manual_seed(0)
        try:
            listed = list(
                info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
            )
        except Exception:
            continue
        for number, inputs in enumerate(listed[: first or None]):
            torch.manual_seed(2)
            module = info.module_cls(*copy.deepcopy(inputs.constructor_input.args), **inputs.constructor_input.kwargs)
            module = module.to(torch.float32).train() if any(True for _ in module.parameters()) else module.train()
            arguments = (inputs.forward_input.args, inputs.forward_input.kwargs)
            yield Sample(f"{info.name} {number} {inputs.desc}".strip(), module, arguments, module)


def step_of(sample: Sample) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return forward and backward as a function of tensors only, and these tensors."""
    leaves, tree = tree_flatten(copy_tensors(sample.arguments))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    needed = [leaves[place].requires_grad for place in places]

    def step(*tensors: Tensor) -> Any:
        filled = list(leaves)
        differentiated: list[Tensor] = []
        for place, tensor, needs in zip(places, tensors, needed, strict=True):
            filled[place] = tensor.detach().requires_grad_() if needs else tensor
            differentiated += [filled[place]] if needs else []
        args, kwargs = tree_unflatten(filled, tree)
        out = sample.call(*args, **kwargs)
        loss = scalar_loss(out)
        differentiated += [] if sample.model is None else list(sample.model.parameters())
        gradients = (
            () if loss is None or not differentiated else torch.autograd.grad(loss, differentiated, allow_unused=True)
        )
        return [leaf for leaf in tree_flatten((out, gradients))[0] if isinstance(leaf, Tensor)]

    return step, [leaves[place].detach() for place in places]


def split_with_checks(captured: Captured, parts: int, verdicts: Cache) -> tuple[Captured, int, int] | None:
    """Return the split step, its exactness checks and its mismatches; None if no op can be split."""
    refused: frozenset[str] = frozenset()
    while True:
        split_result = split_step(captured, 1, parts=parts, min_bytes=1, refused=refused)
        if not split_result.checks:
            return None
        mismatches = find_mismatches(split_result.checks, split_result.values, CpuBackend(), ROOM, verdicts)
        if not mismatches:
            break
        refused |= mismatches
    reused = reuse_arguments(split_result.captured, min_bytes=1)
    return reorder(reused, hoist_order(reused)), len(split_result.checks), len(refused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=["modules", "operators"])
    parser.add_argument("--only", default="", help="Name of the only entry to run.")
    parser.add_argument("--every", type=int, default=1, help="Run every N-th sample.")
    parser.add_argument("--start", type=int, default=0, help="Index of the first sample.")
    parser.add_argument("--first", type=int, default=0, help="Number of samples of each entry; 0: all.")
    parser.add_argument("--parts", type=int, action="append", help="Split factor; may be repeated.")
    parser.add_argument("--verbose", action="store_true", help="Print the name of each sample before it runs.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    databases = {"modules": modules, "operators": operators}
    samples = itertools.chain.from_iterable(
        databases[database](options.only, options.first) for database in options.which
    )
    report: dict[str, Any] = {"samples": 0, "not captured": 0, "unsteady": 0, "nothing to cut": 0, "steps in parts": 0}
    report |= {"claims": 0, "refuted": 0, "otherwise as a whole": [], "failed": []}
    with tempfile.TemporaryDirectory() as folder:
        verdicts = Cache(Path(folder))
        for number, sample in enumerate(samples):
            if number % options.every == options.start:
                _check_sample(sample, tuple(options.parts or (2, 3, 5)), verdicts, report, verbose=options.verbose)
    print(json.dumps(report, indent=1))
    return bool(report["failed"] or not report["steps in parts"])


def _restore(models: list[nn.Module], before: list[dict[str, Any]]) -> None:
    torch.manual_seed(1)
    for model, state in zip(models, before, strict=True):
        model.load_state_dict(state)


def _check_sample(
    sample: Sample, parts: tuple[int, ...], verdicts: Cache, report: dict[str, Any], *, verbose: bool
) -> None:
    if verbose:
        print(sample.name, file=sys.stderr, flush=True)
    report["samples"] += 1
    models = [] if sample.model is None else [sample.model]
    before = [copy.deepcopy(model.state_dict()) for model in models]

    def plain() -> list[Any]:
        _restore(models, before)
        step, tensors = step_of(sample)
        return comparable_copies(step(*tensors))

    try:
        expected = plain()
        repeated = plain()
        step, tensors = step_of(sample)
        captured = capture_step(step, models, [], tuple(tensors), {})
        _restore(models, before)
        uncut = comparable_copies(Replay(captured)(*step_of(sample)[1]))
    except Exception:
        report["not captured"] += 1
        return
    if not all(map(equal, repeated, expected)):
        report["unsteady"] += 1
        return
    if len(uncut) != len(expected) or not all(map(equal, uncut, expected)):
        # The other databases compare unsplit steps with eager PyTorch.
        report["otherwise as a whole"].append(sample.name)
        expected = uncut
    for count in parts:
        try:
            outcome = split_with_checks(captured, count, verdicts)
            if outcome is None:
                report["nothing to cut"] += 1
                continue
            cut, claims, mismatches = outcome
            report["claims"] += claims
            report["refuted"] += mismatches
            _restore(models, before)
            results = comparable_copies(Replay(cut)(*step_of(sample)[1]))
        except Exception:
            last = traceback.format_exc(limit=-1).strip().splitlines()[-1][:300]
            report["failed"].append(f"{sample.name}, {count} parts: {last}")
            continue
        report["steps in parts"] += 1
        if len(results) != len(expected) or not all(map(equal, results, expected)):
            report["failed"].append(f"{sample.name}, {count} parts: other bits")


if __name__ == "__main__":
    sys.exit(main())
