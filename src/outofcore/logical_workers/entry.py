"""``outofcore.elastic``: check its arguments, find the processes, and compile the step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import outofcore
from outofcore.errors import InputError
from outofcore.logical_workers.phases import combine_phases
from outofcore.logical_workers.processes import WorkerProcesses
from outofcore.logical_workers.training import Elastic

# Class names of wrappers that exchange gradients themselves.
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})


def elastic(
    step: Callable[..., Any],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    workers: int,
    budget: int | str,
    update: Callable[[], object] | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    device: str | torch.device | None = None,
    home: str | os.PathLike[str] | outofcore.OpenHome | None = None,
    host_budget: int | str | None = None,
    policy: Any = "auto",
    cache: bool | str | os.PathLike[str] = True,
    check: Literal["sampled", "full", "off"] = "sampled",
) -> Elastic:
    """Train with logical workers: any number of processes, up to one per worker, gives the same bits.

    Processes started by torchrun, or with ``torch.distributed`` initialised, share the workers; a single process has
    them all. Each worker has its own batches and random generators. A process runs its workers one after the other
    within its budget. Gradients are summed in the order of the workers and divided by their number; then all processes
    make the same update. The number of processes may change from one checkpoint to the next.

    A step equals, bit for bit, this in plain PyTorch, where each worker has its own generators and the buffers that
    worker 0 wrote in the step before: ``step(*batches[k])`` for each worker ``k`` in order, which adds up gradients;
    ``p.grad /= workers`` for each parameter; ``update()``.

    Args:
        step: forward pass, loss and ``backward()`` of one worker's batch, as a function of tensors; no update.
        model: the module that the step trains, or a list of all that it uses, in ordinary memory or built at a home.
            Equal in all processes: build it from one seed.
        optimizer: the optimizer, or a list of them. ``elastic`` calls its ``step``.
        workers: number of logical workers, fixed for the whole training.
        budget: bytes for all tensors of this process's steps, as for ``compile``. Some MiB of buffers for the sum, and
            twice the model's changing buffers (running statistics), come on top.
        update: called instead of ``optimizer.step()`` once gradients are summed, e.g. to clip them first.
        seed: of the workers' random generators. Generators of the process itself are not used.
        timeout: seconds to wait for another process.
        device: as for ``compile``. The sum goes through host memory, by gloo, also between GPUs.
        home: as for ``compile``. Processes may differ in this and the following arguments, and in the budget.
        host_budget: as for ``compile``.
        policy: as for ``compile``.
        cache: as for ``compile``.
        check: as for ``compile``.

    Returns:
        A callable that takes ``{logical worker: batch}`` and returns ``{logical worker: the step's result}``.

    Raises:
        InputError: an argument is invalid, there are more processes than workers, or processes differ in a fact that
            must be equal, such as threads or the model.
        StateError: the processes do not find each other.

    >>> import torch
    >>> import outofcore
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> model = torch.nn.Linear(256, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> def train_step(x, y):
    ...     loss = (model(x)[:, 0] - y).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> data = torch.utils.data.TensorDataset(torch.randn(64, 256), torch.randn(64))
    >>> with outofcore.elastic(train_step, model, optimizer, workers=4, budget="4MiB") as run:
    ...     for batches in run.loader(data, batch_size=8):
    ...         losses = run(batches)
    >>> list(losses), run.steps
    ([0, 1, 2, 3], 2)
    """
    if not callable(step) or isinstance(model, Optimizer):
        outofcore.compile(step, model, optimizer, budget=budget)  # raises InputError
    models, optimizers = _as_list(model, nn.Module), _as_list(optimizer, Optimizer)
    if not optimizers:
        raise InputError("elastic() needs the optimizer that trains the model; give it as the third argument")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InputError(f"workers must be at least 1, not {workers!r}")
    if not timeout > 0:
        raise InputError(f"timeout must be a number of seconds above zero, not {timeout!r}")
    if seed < 0:
        raise InputError(f"seed must be at least 0, not {seed}")
    _check_unwrapped(models)
    with contextlib.ExitStack() as cleanup:
        processes = WorkerProcesses(timedelta(seconds=timeout))
        cleanup.callback(processes.close)
        compiled = outofcore.compile(
            combine_phases(step, models, optimizers, update),
            models,
            optimizers,
            budget=budget,
            device=device,
            home=home,
            host_budget=host_budget,
            policy=policy,
            cache=cache,
            check=check,
            dynamic=False,
            repeats=False,
        )
        cleanup.callback(compiled.close)
        device_object = torch.device(device or "cpu")
        gpu = None if device_object.type == "cpu" else device_object
        run = Elastic(compiled, models, optimizers, workers, seed, gpu, processes)
        cleanup.pop_all()
    return run


def _as_list(value: Any, kind: type) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, kind) else [value]


def _check_unwrapped(models: Sequence[Any]) -> None:
    """Refuse models in wrappers that exchange gradients themselves, such as ``DistributedDataParallel``."""
    modules = (named for model in models if isinstance(model, nn.Module) for named in model.named_modules())
    for path, module in modules:
        kind, location = type(module).__name__, f"the module {path}" if path else "the model"
        if kind in _WRAPPERS or hasattr(module, "_get_fsdp_state"):
            raise InputError(
                f"{location} is wrapped in {kind}, which exchanges gradients in another order; give "
                "outofcore.elastic() the model itself (model.module), since elastic() replaces the wrapper"
            )
