"""The public functions: ``budget``, ``compile``, ``estimate`` and their companions."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore._torch_internals import Feature, require, tree_flatten
from outofcore.capture.guard import check_modules
from outofcore.capture.replicas import check_supported
from outofcore.capture.shards import Shards
from outofcore.checkpoint.loading import Checkpoint
from outofcore.checkpoint.saving import save_checkpoint
from outofcore.distributed.agreement import Agreement
from outofcore.errors import InputError
from outofcore.estimation.costing import LocalMachine, capture_variants, cost_step, open_target
from outofcore.estimation.sweep import Estimate, estimate_graph
from outofcore.execution.backend import bytes_unavailable_to_arena
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.engines import ReplayMode
from outofcore.execution.opening import (
    OpenHome,
    open_backend,
    open_device_homes,
    open_homes,
    parse_host_limit,
)
from outofcore.execution.stats import StepStats
from outofcore.follow.alignment import aligned
from outofcore.follow.devices import CPU, LoopHome, loop_device
from outofcore.follow.loop import Loop, LoopOptions
from outofcore.follow.measuring import Measurement
from outofcore.follow.native import load_paging
from outofcore.follow.running import stop_loops
from outofcore.follow.space import Excess
from outofcore.follow.stats import LoopStats
from outofcore.materialization import allocate, build, materialize
from outofcore.options import MemoryOptions, P, PlanOptions, R, RunOptions, UserStep
from outofcore.policies import Policy, PolicyLike, policy_of
from outofcore.profiling.cache import open_cache
from outofcore.progress import show_progress
from outofcore.runtime.available import resolve_budget
from outofcore.runtime.checks import Check
from outofcore.runtime.homes import enable_checks
from outofcore.runtime.native import load_native
from outofcore.step import Step
from outofcore.step_variants import Split, split_of
from outofcore.transforms.kernels import Kernels
from outofcore.units import parse_bytes
from outofcore.variant import LOWEST_MEMORY, smallest_variant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("outofcore")

# The values of ``check``, ``kernels`` and ``split`` of ``compile``.
CheckName = Literal["sampled", "full", "off"]
KernelsName = Literal["eager", "inductor"]
SplitName = Literal["exact", "close", "off"]


def _user_step(step: Callable[P, R], model: Any, optimizer: Any) -> UserStep[P, R]:
    """Combine a step with its models and optimizers; raise ``InputError`` if an argument cannot be used."""
    if not callable(step) or (isinstance(step, nn.Module) and isinstance(model, Optimizer)):
        description = "the model" if isinstance(step, nn.Module) else f"of type {type(step).__name__}"
        raise InputError(
            f"the first argument must be the training function, and is {description}: write the step as a function, "
            "such as def step(x, y): loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); "
            "optimizer.zero_grad(); return loss - and call outofcore.compile(step, model, optimizer, budget=...)"
        )
    models = _as_list(model, nn.Module, "model")
    check_modules(models, is_captured=False)
    return UserStep(step, models, _as_list(optimizer, Optimizer, "optimizer"))


def _as_list(value: Any, kind: type, argument: str) -> list[Any]:
    """Convert None, a value or several values to a list; raise ``InputError`` if a value is not a ``kind``."""
    if value is None:
        return []
    items = list(value) if isinstance(value, Iterable) and not isinstance(value, kind) else [value]
    for item in items:
        if not isinstance(item, kind):
            raise InputError(
                f"{argument} must be a {kind.__module__}.{kind.__qualname__} or a list of them, "
                f"not {type(item).__name__}"
            )
    return items


def _open_pinned_home(
    backend: CudaBackend, home: str | os.PathLike[str] | OpenHome | None, host_budget: int | str | None, check: str
) -> OpenHome:
    """Open the homes of a step on a GPU: pinned host memory, and a disk if ``home`` names one."""
    if isinstance(home, OpenHome):
        raise InputError(
            f"a step on {backend.device} opens its own homes, in pinned host memory and on a disk, and cannot use an "
            "open home: pass 'host', 'disk' or a folder as 'home', or leave it out"
        )
    if check == Check.FULL.value:
        raise InputError(f"copies of a step on {backend.device} are not checked; leave 'check' out")
    return OpenHome(open_device_homes(backend, home, host_budget), stays_open=False)


def _require_known_check(check: str) -> None:
    if check not in {mode.value for mode in Check}:
        raise InputError(f"there is no check {check!r}; choose one of {', '.join(mode.value for mode in Check)}")


def _open_home(
    home: str | os.PathLike[str] | None, host_budget: int | str | None, check: CheckName, *, stays_open: bool
) -> OpenHome:
    """Open a home in host memory or on a disk; with ``stays_open``, it remains open when its last step closes."""
    _require_known_check(check)
    return OpenHome(
        [enable_checks(store, Check(check)) for store in open_homes(home, host_budget)], stays_open=stays_open
    )


def open_home(
    home: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    check: CheckName = "sampled",
) -> OpenHome:
    """Open a home: host memory or disk space that holds models and can be shared by steps.

    Pass it to ``build``, ``materialize``, ``load`` and ``compile``, and close it after the last model is created.

    Args:
        home: "host", "disk" (default), or a folder on a disk.
        host_budget: bytes of host memory to use before the disk, as for ``compile``. New models go to the disk.
        check: as for ``compile``.

    Raises:
        InputError: an argument cannot be used. Includes ``UnitError`` and ``SpillError``.

    >>> import torch
    >>> import outofcore
    >>> with outofcore.open_home("host") as home:
    ...     model = outofcore.build(lambda: torch.nn.Linear(256, 256), home=home)
    ...     home.bytes >= 256 * 256 * 4
    True
    """
    return _open_home(home, host_budget, check, stays_open=True)


def _check_devices(models: Sequence[nn.Module], device: torch.device) -> None:
    """Raise ``InputError`` if a tensor of a model is neither on the CPU nor on ``device``."""
    for number, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # CPU tensors are fine for a GPU step: the plan fetches them, so the model need not fit on the device.
            prefix = f"model {number}: " if len(models) > 1 else ""
            if tensor.device.type == "meta":
                raise InputError(
                    f"{prefix}{name} is on the device meta and has no memory yet: allocate it with "
                    "outofcore.materialize(model); only outofcore.estimate takes such models"
                )
            if tensor.device != device and tensor.device.type != "cpu":
                raise InputError(
                    f"{prefix}{name} is on {tensor.device} and the step is to run on {device}; "
                    f"move the model there first: model.to({str(device)!r})"
                )


def compile(
    step: Callable[P, R],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    budget: int | str,
    device: str | torch.device | None = None,
    home: str | os.PathLike[str] | OpenHome | None = None,
    host_budget: int | str | None = None,
    policy: PolicyLike = "auto",
    cache: bool | str | os.PathLike[str] = True,
    check: CheckName = "sampled",
    dynamic: bool | None = None,
    shard: ProcessGroup | bool | None = None,
    replay: ReplayMode = True,
    kernels: KernelsName = "eager",
    split: SplitName = "exact",
    repeats: bool = True,
) -> Step[P, R]:
    """Make a training step run within a byte budget, with results bit-identical to plain PyTorch.

    The first call of the result captures the step.

    Args:
        step: the training step, a function of pytrees of tensors and constants. It may run forward, backward, clip,
            update and clear gradients, and return anything. It is not changed.
        model: the module that the step trains or uses, or a list of all of them.
        optimizer: the optimizer that the step calls, a list of them, or None.
        budget: device bytes for all tensors of the step: a number, text such as "6GiB", or a share of available memory,
            such as "70%".
        device: "cpu" (default) or "cuda". For a GPU, the model and the inputs may be on the CPU.
        home: where tensors are stored while they are not on the device: "host", "disk" (default), a folder on a disk,
            or an open home (``open_home``, or ``step.home`` of another step over the model). On a GPU: pinned host
            memory, and when that is full, the disk that ``home`` names, if any.
        host_budget: bytes of host memory, in addition to the budget, to use before a disk. Default: none; with
            home="host" and on a GPU, all that is available. A GPU with a disk needs 64 MiB more for copy buffers.
        policy: how to plan: a name in ``outofcore.policies.POLICIES``, text such as "window:reach=2", or an object of
            ``outofcore.policies``, which also describes how to write your own.
        cache: where measurements are stored for later processes: a folder, True for
            ``$XDG_CACHE_HOME/outofcore/measured``, or False for no cache.
        check: how many of the offloaded bytes are compared by checksum when they are fetched. "sampled": a few pages of
            each copy to disk. "full": all bytes of all copies, and once more after the step. "off": none.
        dynamic: how to handle inputs of many sizes. False: capture and plan each size. True: run every call as an eager
            loop, as ``outofcore.budget`` does. None: capture the first size, and switch to the eager loop at the next
            one, or if Python values that the step reads keep changing; but not on a GPU, with an open home, or if you
            pass ``policy``, ``kernels``, ``shard`` or split="close".
        shard: a process group, or True for the default one, that shares the model: each process keeps a range of every
            large parameter, its gradient and its optimizer state. See the guide to many processes.
        replay: whether native code calls PyTorch's ops after each has been called once from Python, which saves some
            microseconds per op. "graphs": consecutive ops on a GPU, except random ones, become CUDA graphs.
        kernels: "eager": PyTorch's own kernels. "inductor": fuse elementwise ops, norms, softmax and losses, which is
            faster where memory bandwidth is the limit, with other rounding than eager PyTorch. See the guide.
        split: "exact": split an op that exceeds the available memory, or for speed, if the result was found
            bit-identical on this machine. "off": never split. "close": also split large sums over rows and samples, the
            same way at every budget, with other rounding than eager PyTorch. See the guide to large ops.
        repeats: whether the budget must also hold a second call that starts with the gradients of the first. False:
            plan such a call when it comes, as in a step that accumulates in one call and updates in the next.

    Raises:
        InputError: an argument cannot be used. Includes ``UnitError`` and ``SpillError``.
        StateError: the native code is missing, or ``dynamic`` is True and eager loops are not possible here.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> with outofcore.compile(train_step, model, optimizer, budget="4MiB") as step:
    ...     losses = [step(torch.ones(64, 256)).item() for _ in range(3)]
    >>> losses[0] > losses[1] > losses[2]
    True
    """
    user = _user_step(step, model, optimizer)
    require(Feature.COMPILE)
    chosen = policy_of(policy)
    if replay not in (True, False, "graphs"):
        raise InputError(f"replay must be True, False or 'graphs', not {replay!r}")
    kernel_compiler, splits = _kernel_compiler(kernels), split_of(split)
    backend = open_backend(device, replay=replay)
    count = _budget_of(budget, backend.device, user.models)
    check_modules(user.models, is_captured=not dynamic)
    _check_devices(user.models, backend.device)
    if dynamic:
        _check_can_run_eagerly(backend.device, home, chosen, kernels, splits)
    store = open_cache(cache)
    check_supported(user.models)
    load_native(backend.flavor)
    group = _sharing_group(shard, dynamic, kernels)
    if group is not None:
        user = replace(user, shards=Shards(user.models, user.optimizers, group))
    loop = None
    if isinstance(backend, CudaBackend):
        opened = _open_pinned_home(backend, home, host_budget, check)
    elif isinstance(home, OpenHome):
        if host_budget is not None or check != "sampled":
            raise InputError(
                "an open home already has a host budget and a check; pass both to outofcore.open_home() instead"
            )
        opened = home
    else:
        opened = _open_home(home, host_budget, check, stays_open=False)
        if chosen == policy_of("auto") and kernels == "eager" and group is None and splits is not Split.CLOSE:
            # The loop starts without models: its calls move them there, since other steps may have some of them.
            limit = parse_host_limit(host_budget)
            plans = None if store is None else store.folder
            options = LoopOptions(CPU, LoopHome(home, limit), plans=plans, check=Check(check), for_compiled_step=True)
            loop = partial(Loop, count, (), options)
    return Step(
        user,
        MemoryOptions(count, opened),
        PlanOptions(chosen, splits, store, repeats),
        RunOptions(backend, kernel_compiler, dynamic, loop),
        Agreement(user.models, store, group),
    )


def _kernel_compiler(name: str, *, compiles: bool = True) -> Kernels | None:
    """Return the compiler of fused kernels for the name "inductor"; None for "eager"."""
    if name not in ("eager", "inductor"):
        raise InputError(f"there are no kernels {name!r}; choose 'eager' or 'inductor'")
    if name == "eager":
        return None
    require(Feature.KERNELS)
    return Kernels(compiles)


def _sharing_group(shard: ProcessGroup | bool | None, dynamic: bool | None, kernels: str) -> ProcessGroup | None:
    """Return the process group that shares the model; None if the model is not shared."""
    if shard is None or shard is False:
        return None
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise InputError(
            "shard= shares a model between processes, but no process group is initialized: start the script with "
            "torchrun, and call torch.distributed.init_process_group() first"
        )
    group = torch.distributed.group.WORLD if shard is True else shard
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise InputError(f"shard must be a process group of torch.distributed or True, not {type(group).__name__}")
    if dynamic or kernels != "eager":
        raise InputError(
            "shard= cannot be combined with dynamic= or kernels=: all processes run one plan of PyTorch's own kernels; "
            "leave these options out"
        )
    return group if group.size() > 1 else None


def _check_can_run_eagerly(device: torch.device, home: object, policy: Policy, kernels: str, splits: Split) -> None:
    """Raise ``InputError`` for options that eager loops do not support, ``StateError`` without native code."""
    if device.type != "cpu":
        raise InputError(f"dynamic=True works on the CPU only, and the step is for {device}; leave 'dynamic' out")
    if isinstance(home, OpenHome):
        raise InputError(
            "dynamic=True needs a home that the step opens itself: pass 'host', 'disk' or a folder as 'home'; or leave "
            "'dynamic' out"
        )
    if policy != policy_of("auto") or kernels != "eager":
        raise InputError(
            "dynamic=True runs every call as an eager loop, with PyTorch's own kernels and the policy 'auto'; "
            "leave 'policy' and 'kernels' out"
        )
    if splits is Split.CLOSE:
        raise InputError(
            "dynamic=True runs PyTorch's ops unsplit, so the losses would differ from those of planned steps with "
            "split='close'; leave 'dynamic' out, so that each size is planned"
        )
    load_paging()


def _device_of(models: Sequence[nn.Module]) -> torch.device | None:
    """Return the GPU of the models; None if they are on no GPU."""
    return next((p.device for model in models for p in model.parameters() if p.device.type == "cuda"), None)


def budget(
    limit: int | str | None = None,
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    device: str | torch.device | None = None,
    home: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    policy: PolicyLike | None = "auto",
    cache: bool | str | os.PathLike[str] = True,
    check: CheckName = "sampled",
    measure: bool = False,
    grow: bool = False,
) -> Loop:
    """Run an existing training loop within a byte budget, in eager PyTorch and with bit-identical results.

    In ``with outofcore.budget("6GiB", model) as run:`` each tensor of 64 KiB or more that this thread's ops use is in
    an arena of the budget's size while an op uses it. When the arena is full, tensors are evicted to the home: the
    least recently used first, and once the loop repeats itself, the one with the furthest next use (Belady, 1966).
    Fetches overlap with compute. Another process plans repeated steps, a few sizes per input signature. Deviations from
    the plan are handled on demand. The context also has ``start()`` and ``stop()``; ``run.stats`` has the statistics.

    Args:
        limit: bytes for all tensors and workspaces of the loop: a number, text such as "6GiB", or a share of available
            memory, such as "70%" (default; on a GPU all free memory less 5 %, at least 512 MiB). On a GPU it limits
            PyTorch's allocator; see the guide.
        model: the module that the loop trains, or several. Their parameters, buffers and gradients move to the home at
            the start. Other tensors are tracked from the first op that uses them.
        device: the device to manage: "cpu", or a GPU such as "cuda". Default: that of the model's parameters.
        home: where tensors outside the arena are stored: "disk" (default), a folder on a disk, or "host". On a GPU
            always pinned host memory.
        host_budget: bytes of host memory to use before a disk, or the limit of "host"; as for ``compile``.
        policy: how steps are planned, as for ``compile``; None: not at all.
        cache: where plans are stored for later processes: a folder, True for the user's cache folder, or False.
        check: "sampled": compare all bytes by checksum before a tensor is evicted without a copy, in case other threads
            or compiled code wrote to it, and 64 of every 4,160 bytes after a fetch from disk. "full": all bytes after
            every fetch. "off": no comparison; only ops may change tensors. No checks on a GPU.
        measure: find the memory needs of the loop, without a plan or a limit. At its end it prints the peak, the
            smallest budget that holds every op, and predicted step times at smaller budgets (``run.measurement()``).
        grow: let an op that needs more than the budget exceed it instead of failing. ``run.stats.exceedances`` counts
            these ops; a warning at the end reports their bytes.

    Raises:
        InputError: an argument cannot be used. Includes ``UnitError`` and ``SpillError``.
        BudgetError: an op does not fit; names the op, its source line and the bytes it needs. Raised at the exit of the
            context; within the loop, the op raises ``torch.OutOfMemoryError``.
        TransferError: a home failed (``SpillError``: it is full). Raised at the exit of the context; within the loop,
            the op raises ``RuntimeError`` and has not run.

    Limits: of other threads, only autograd's are managed. Extensions must not keep a pointer to a tensor from one op to
    the next. A NumPy array that shares memory with a tensor from before the loop does not follow it.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> losses = []
    >>> with outofcore.budget("2MiB", model) as run:
    ...     for _ in range(3):
    ...         loss = model(torch.ones(64, 256)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         losses.append(loss.item())
    >>> losses[0] > losses[1] > losses[2], run.stats.peak_bytes <= 2 << 20
    (True, True)
    """
    models = _as_list(model, nn.Module, "model")
    target = open_backend(_device_of(models) if device is None else device).device
    count = _budget_of(limit, target, models)
    if target.type != "cpu" and home not in (None, "host"):
        raise InputError(
            f"a loop on {target} keeps evicted tensors in pinned host memory, and cannot use home={str(home)!r}: "
            "leave 'home' out, and limit that memory with 'host_budget'"
        )
    if target.type != "cpu" and check == Check.FULL.value:
        raise InputError(f"copies of a loop on {target} are not checked; leave 'check' out")
    _require_known_check(check)
    store = open_cache(cache)
    if policy is not None:
        policy = policy_of(policy)
        try:
            pickle.dumps(policy)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the policy cannot be sent to the process that plans: {error}; define it at the top level of a module"
            ) from error
    # A later process cannot recognize a user policy by a repr that is an address.
    plans = None if store is None or " at 0x" in repr(policy) else store.folder
    loop_home = LoopHome(home, parse_host_limit(host_budget))
    excess = Excess.MEASURED if measure else Excess.ALLOWED if grow else Excess.REFUSED
    return Loop(count, models, LoopOptions(loop_device(target), loop_home, policy, plans, Check(check), excess))


_within = budget


def _budget_of(limit: int | str | None, device: torch.device, models: Sequence[nn.Module]) -> int:
    """Convert a budget to bytes; log the result if the budget was a percentage or None."""
    count, text = resolve_budget(limit, device, models)
    if text:
        _log.warning("outofcore: budget %s", text)
    return count


def stop() -> bool:
    """End the loop started by ``outofcore.budget``, from any thread; return whether one was running.

    Use it in a notebook when the handle of the loop is lost, for example after a cell ran twice or failed. The tensors
    keep their contents. If an op is running, the loop ends after it. Close compiled steps with ``Step.close``.

    >>> import torch
    >>> import outofcore
    >>> run = outofcore.budget("1MiB").start()
    >>> outofcore.stop(), outofcore.stop()
    (True, False)
    """
    return stop_loops()


def run(
    model: nn.Module,
    *inputs: Any,
    budget: int | str,
    home: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    check: CheckName = "sampled",
    **named_inputs: Any,
) -> Any:
    """Call a model once within a byte budget, without gradients; its weights may exceed memory.

    Weights are fetched in module order while earlier modules compute. Weights that are mapped from files (safetensors,
    ``torch.load(..., mmap=True)``, Hugging Face's ``from_pretrained``) are read from these files without a copy. The
    output is outside the arena.

    For many calls, as in ``model.generate(...)``, use ``with outofcore.budget("1GiB", model):`` once. Each call is then
    planned: some weights stay resident, and fetches for the next call overlap with the current one.

    Args:
        model: the module; its tensors are on the CPU or on one GPU.
        inputs: arguments of the call, as are ``named_inputs``.
        budget: bytes for all tensors and workspaces, as a number or as text such as "1GiB".
        home: where tensors that come from no file are stored; this, ``host_budget`` and ``check`` as for ``budget``.

    Raises:
        InputError: an argument cannot be used.
        BudgetError: an op does not fit.
        StateError: an eager loop is running; call the model in it.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    >>> result = outofcore.run(model, torch.ones(1, 512), budget="3MiB")
    >>> torch.equal(result, model(torch.ones(1, 512)))
    True
    """
    followed = _within(budget, model, home=home, host_budget=host_budget, policy=None, cache=False, check=check)
    with followed, torch.no_grad():
        result = model(*inputs, **named_inputs)
        followed.release(leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor))
    return result


def smallest_budget(
    step: Callable[..., Any],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    inputs: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    device: str | torch.device | None = None,
    cache: bool | str | os.PathLike[str] = True,
    kernels: KernelsName = "eager",
    split: SplitName = "exact",
) -> int:
    """Return the smallest budget in bytes with which ``compile`` can run the step repeatedly.

    Runs each family of ops once on scratch tensors to measure its workspace; your tensors are not changed. ``inputs``
    and ``kwargs`` are the arguments of the step; the others are as for ``compile``. Raises ``InputError`` if an
    argument cannot be used, ``CaptureError`` if the step cannot be captured as one graph.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(256, 256)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> outofcore.smallest_budget(train_step, model, optimizer, inputs=(torch.ones(64, 256),)) < 1 << 20
    True
    """
    user = _user_step(step, model, optimizer)
    backend = open_backend(device)
    _check_devices(user.models, backend.device)
    machine = LocalMachine(backend, cache=open_cache(cache))
    variants = capture_variants(user, inputs, kwargs or {}, machine, _kernel_compiler(kernels), split_of(split))
    backend.prepare()
    variant, smallest = smallest_variant(variants)
    if variants.later is not None and (variants.later.smallest_arena(LOWEST_MEMORY) or 0) > smallest:
        smallest = max(smallest, smallest_variant(variants.later)[1])
    return smallest + bytes_unavailable_to_arena(variants.get_variant(variant), backend, smallest)


def estimate(
    step: Callable[..., Any],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    inputs: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    budgets: Sequence[int | str] = (),
    device: str | torch.device | None = None,
    home: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    policy: PolicyLike = "auto",
    cache: bool | str | os.PathLike[str] = True,
    kernels: KernelsName = "eager",
    split: SplitName = "exact",
) -> Estimate:
    """Predict whether a step fits, and its time at several budgets, without running it.

    Runs each family of ops a few times on scratch tensors; your tensors are not changed. A model and inputs on the
    device ``meta`` take no memory. ``inputs`` and ``kwargs`` are the arguments of the step; arguments not listed are as
    for ``compile``. Raises ``InputError`` if an argument cannot be used, ``CaptureError`` if the step cannot be
    captured as one graph. Results are in bytes (on a GPU, of the arena) and seconds.

    Args:
        budgets: budgets to evaluate in addition to a default set.
        device: the device to measure, as for ``compile``; or a device to simulate, by its name in
            ``outofcore.presets``, such as "h100". A simulation runs no ops, ignores ``home`` and ``host_budget``, and
            assumes that all splits are exact.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(8192, 8192, device="meta")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> x = torch.empty(64, 8192, device="meta")
    >>> found = outofcore.estimate(train_step, model, optimizer, inputs=(x,), device="h100")
    >>> found.fits("100MiB"), found.fits("1GiB")
    (False, True)
    >>> found.at("1GiB").seconds < 0.1
    True
    """
    user, chosen = _user_step(step, model, optimizer), policy_of(policy)
    sizes = [parse_bytes(budget) for budget in budgets]
    with (
        open_target(None if device is None else str(device), home, host_budget, cache) as place,
        show_progress() as report,
    ):
        preset = None if isinstance(place, LocalMachine) else place
        compiler, splits = _kernel_compiler(kernels, compiles=preset is None), split_of(split)
        costing = cost_step(user, tuple(inputs), kwargs or {}, place, tell=report, kernels=compiler, split=splits)
        machine = "" if preset is None else preset.describe()
        return estimate_graph(
            costing.graph,
            costing.costs,
            budgets=sizes,
            policy=chosen,
            machine=machine,
            parts=costing.parts,
            tell=report,
        )


def save(
    folder: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    home: OpenHome | None = None,
    extra: Any = None,
    frozen: bool = True,
) -> None:
    """Save models and optimizers as ``Step.save`` does, without a compiled step.

    ``home`` is the home of the tensors, if they have one. An existing checkpoint in the folder stays valid until the
    new one is complete.

    Raises:
        InputError: the folder is not writable, or the model or ``extra`` has contents that cannot be saved.
        TransferError: a file could not be written; an existing checkpoint is unchanged.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> outofcore.save("checkpoint", model, optimizer, extra={"epoch": 3})

    Without frozen parameters, load into a model that has their values already:

    >>> from safetensors.torch import load_file
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2))
    >>> outofcore.save("adapter", model, frozen=False)
    >>> sorted(load_file("adapter/model-000001.safetensors"))
    ['1.bias', '1.weight']
    >>> outofcore.load("adapter", model)
    """
    models = _as_list(model, nn.Module, "model")
    optimizers = _as_list(optimizer, Optimizer, "optimizer")
    if home is not None:
        home.start()
    save_checkpoint(Path(folder), models, optimizers, None if home is None else home.home_tensors, extra, frozen=frozen)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    home: OpenHome | None = None,
) -> Any:
    """Load a checkpoint into models, optimizers and random generators; return its ``extra`` data.

    Pass the models and optimizers that were saved, or none of them to load only ``extra``, in which tuples come back as
    lists. Generators of PyTorch, Python and numpy are loaded too. Existing tensors are overwritten in place. Tensors on
    the meta device and missing optimizer state are created, at the home if there is one and they have 64 KiB or more.
    Frozen parameters that were left out (``frozen=False``) keep their values.

    Raises:
        InputError: there is no checkpoint, it is damaged or belongs to another model or optimizer, or it lacks a
            parameter that requires gradients or is on the meta device. Existing tensors are unchanged.
        TransferError: a file cannot be read or is corrupt; load another checkpoint before you use the model.
        SpillError: the home is full.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> outofcore.save("checkpoint", model, optimizer, extra={"epoch": 3})
    >>> outofcore.load("checkpoint", model, optimizer)
    {'epoch': 3}
    >>> outofcore.load("checkpoint")
    {'epoch': 3}
    """
    models = _as_list(model, nn.Module, "model")
    optimizers = _as_list(optimizer, Optimizer, "optimizer")
    home_tensors = None if home is None else home.home_tensors
    checkpoint = Checkpoint(Path(folder))
    if model is None and optimizer is None:
        return checkpoint.extra
    checkpoint.targets_by_file(models)  # refuse other models before they are allocated
    for module in models:
        allocate(module, home_tensors)
    checkpoint.load(models, optimizers, home_tensors)
    return checkpoint.extra


__all__ = [
    "Estimate",
    "Loop",
    "LoopStats",
    "Measurement",
    "OpenHome",
    "Step",
    "StepStats",
    "aligned",
    "budget",
    "build",
    "compile",
    "estimate",
    "load",
    "materialize",
    "open_home",
    "run",
    "save",
    "smallest_budget",
    "stop",
]
