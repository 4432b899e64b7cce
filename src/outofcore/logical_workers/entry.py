"""``outofcore.elastic``: its arguments checked, the processes found, and the step compiled."""

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
from outofcore.logical_workers.phases import phases
from outofcore.logical_workers.processes import Processes
from outofcore.logical_workers.training import Elastic

# Wrappers that exchange gradients by themselves, by the names of their classes.
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
    """Train with logical workers: the same bits on one process as on any number up to that of the workers.

    Started by torchrun, or with ``torch.distributed`` initialised, the processes share the workers; alone, one process
    has them all. Each worker has its own batches and its own random generators. A process runs its workers one after
    the other within its budget; gradients are summed in the order of the workers, divided by their number, and one
    update follows, in all processes the same. The number of processes may change from one checkpoint to the next.

    A step is, bit for bit, this in plain PyTorch, each worker with its own generators and with the buffers that worker
    0 left in the step before: ``step(*batches[k])`` for each worker ``k`` in order, which adds up gradients; ``p.grad
    /= workers`` for each parameter; ``update()``.

    Args:
        step: forward, loss and ``backward()`` of one worker's batch, as a function of tensors; no update.
        model: the module that the step trains, or a list of all that it uses, in ordinary memory or born at a home.
            The same in every process: build it from one seed.
        optimizer: the optimizer, or a list of them. Its ``step`` is called here.
        workers: how many logical workers there are, for the whole of the training.
        budget: bytes for all tensors of this process's steps, as for ``compile``. Some MiB of buffers for the sum, and
            the model's changing buffers (running statistics), twice, lie beside it.
        update: called in place of ``optimizer.step()`` once gradients are summed, such as one that clips them before.
        seed: of the workers' random generators. Those of the process itself are never used.
        timeout: seconds that a process waits for another.
        device: as for ``compile``. The sum goes through host memory, by gloo, also between GPUs.
        home: as for ``compile``. Processes may differ in this and the following, and in the budget.
        host_budget: as for ``compile``.
        policy: as for ``compile``.
        cache: as for ``compile``.
        check: as for ``compile``.

    Returns:
        A callable that takes ``{logical worker: batch}`` and returns ``{logical worker: what the step returns}``.

    Raises:
        InputError: an argument cannot be used, there are more processes than workers, or processes differ in what has
            to be the same everywhere, such as threads or the model.
        StateError: the processes do not find together.

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
        outofcore.compile(step, model, optimizer, budget=budget)  # it refuses them
    models, optimizers = _as_list(model, nn.Module), _as_list(optimizer, Optimizer)
    if not optimizers:
        raise InputError("there is no optimizer to update the parameters with; give the one that trains the model")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InputError(f"there must be at least one logical worker, and workers is {workers!r}")
    if not timeout > 0:
        raise InputError(f"timeout must be a number of seconds above zero, not {timeout!r}")
    if seed < 0:
        raise InputError(f"the seed must not be negative, and is {seed}")
    _check_unwrapped(models)
    with contextlib.ExitStack() as undo:
        processes = Processes(timedelta(seconds=timeout))
        undo.callback(processes.close)
        compiled = outofcore.compile(
            phases(step, models, optimizers, update),
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
        undo.callback(compiled.close)
        where = torch.device(device or "cpu")
        gpu = None if where.type == "cpu" else where
        run = Elastic(compiled, models, optimizers, workers, seed, gpu, processes)
        undo.pop_all()
    return run


def _as_list(given: Any, kind: type) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]


def _check_unwrapped(models: Sequence[Any]) -> None:
    """Refuse models that exchange gradients themselves."""
    modules = (named for model in models if isinstance(model, nn.Module) for named in model.named_modules())
    for path, module in modules:
        kind, where = type(module).__name__, f"the module {path}" if path else "the model"
        if kind in _WRAPPERS or hasattr(module, "_get_fsdp_state"):
            raise InputError(
                f"{where} is wrapped in {kind}, which exchanges gradients in an order of its own; give "
                "outofcore.elastic() the model itself (model.module): it takes the wrapper's place"
            )
