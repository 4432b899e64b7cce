"""One process of the GPU benchmark: trains one workload in one way under one cap, and prints a line of JSON.

Its argument is JSON: ``model`` and ``options`` of the zoo, ``mode``, ``cap`` (bytes of device memory, or null for all),
``policy`` of outofcore, ``steps`` and ``warm_up``. What else is printed goes to standard error.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _blocks import blocks_of, checkpoint_blocks

import outofcore
from outofcore import _torch_internals as internals
from outofcore.cli.subjects import find_workload
from outofcore.errors import OutOfCoreError
from outofcore.zoo import Workload

Step = Callable[..., torch.Tensor]


class AbsentError(Exception):
    """A package that a mode needs is not installed."""


def _within(context: Callable[[], Any], step: Step) -> Step:
    """The step with its forward pass, and all else, under a context manager."""

    def run(*batch: torch.Tensor) -> torch.Tensor:
        with context():
            return step(*batch)

    return run


def _offload_activations(model: torch.nn.Module) -> Callable[[], Any]:
    try:
        from trl.models.activation_offloading import OffloadActivations  # noqa: PLC0415 - may be missing
    except ImportError as error:
        raise AbsentError(f"TRL is not installed: {error}") from error
    return functools.partial(OffloadActivations, use_pin_memory=True, use_streams=True)


def _shard(model: torch.nn.Module) -> None:
    from torch.distributed import fsdp, init_process_group  # noqa: PLC0415 - slow, and one mode's only

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    policy = fsdp.CPUOffloadPolicy(pin_memory=True)
    for block in blocks_of(model):
        fsdp.fully_shard(block, offload_policy=policy)
    fsdp.fully_shard(model, offload_policy=policy)


def _deepspeed(work: Workload, device: torch.device, spec: dict[str, Any]) -> Step:
    try:
        import deepspeed  # type: ignore[import-not-found]  # noqa: PLC0415 - may be missing
    except ImportError as error:
        raise AbsentError(f"DeepSpeed is not installed: {error}") from error
    model = work.build()
    config = {
        "train_micro_batch_size_per_gpu": work.options.batch,
        "bf16": {"enabled": work.options.amp},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=work.optimizer(model), config=config)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        loss = work.loss(engine, *batch)
        engine.backward(loss)
        engine.step()
        return loss

    return run


def _prepared(work: Workload, spec: dict[str, Any], device: torch.device) -> tuple[Step, outofcore.Step | None, bool]:
    """The step, outofcore's own if it is that, and whether the batch stays on the CPU."""
    mode = spec["mode"]
    if mode == "outofcore":
        model = work.build()
        optimizer = work.optimizer(model)
        step = outofcore.compile(
            work.make_step(model, optimizer), model, optimizer, budget=spec["cap"], device=device, policy=spec["policy"]
        )
        return step, step, True
    if mode == "deepspeed":
        return _deepspeed(work, device, spec), None, False
    model = work.build()
    if mode == "fsdp2-offload":
        _shard(model)
    else:
        model = model.to(device)
    if mode in ("checkpoint", "selective-checkpoint"):
        checkpoint_blocks(model, selective=mode != "checkpoint")
    if mode == "compile-budget":
        internals.set_activation_memory_budget(spec["share"])
        model.compile()
    step = work.make_step(model, work.optimizer(model))
    if mode == "save-on-cpu":
        step = _within(functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True), step)
    if mode == "trl-offload":
        step = _within(_offload_activations(model), step)
    return step, None, False


def _train(spec: dict[str, Any]) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    if spec["cap"] is not None:
        torch.cuda.set_per_process_memory_fraction(min(spec["cap"] / properties.total_memory, 1.0), device)
    work = find_workload(spec["model"], spec["options"])
    torch.manual_seed(work.options.seed)
    step, ours, on_host = _prepared(work, spec, device)
    batch = tuple(t.pin_memory() if on_host else t.to(device) for t in next(work.batches()))
    torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    first = time.perf_counter()
    for number in range(spec["warm_up"] + spec["steps"]):
        start = time.perf_counter()
        loss = step(*batch)
        torch.cuda.synchronize()
        if number >= spec["warm_up"]:
            seconds.append(time.perf_counter() - start)
        elif number == 0:
            first = time.perf_counter() - first
    answer: dict[str, Any] = {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "first_step_s": first,
        "loss": float(loss.detach()),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "device": properties.name,
    }
    if ours is not None:
        stats = ours.stats
        answer |= {
            "bytes_out": stats.bytes_out,
            "bytes_in": stats.bytes_in,
            "off_plan": stats.off_plan,
            "predicted_s": stats.predicted_seconds,
            "policy": ours.planned.plan.policy,
        }
        ours.close()
    return answer


def main() -> None:
    # The pipe to the parent is for the answer alone: whatever a library prints goes to standard error.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        answer = _train(json.loads(sys.argv[1]))
    except torch.OutOfMemoryError as error:
        answer = {"error": "out of memory", "detail": str(error).splitlines()[0]}
    except AbsentError as error:
        answer = {"error": "absent", "detail": str(error)}
    except (OutOfCoreError, RuntimeError, ImportError, ValueError) as error:
        answer = {"error": type(error).__name__, "detail": str(error)[:2000]}
    print(json.dumps(answer), file=pipe, flush=True)


if __name__ == "__main__":
    main()
