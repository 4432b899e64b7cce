"""The library as its users see it: ``compile`` a training step under a byte budget, and call it."""

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
from outofcore.estimation.costing import LocalMachine, captured_variants, costed, opened_place
from outofcore.estimation.sweep import Estimate, estimated
from outofcore.execution.backend import beside_the_arena
from outofcore.execution.cuda.backend import CudaBackend
from outofcore.execution.engines import Replaying
from outofcore.execution.opening import (
    OpenHome,
    host_limit,
    open_backend,
    open_device_homes,
    open_homes,
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
from outofcore.progress import following
from outofcore.runtime.available import budget_of
from outofcore.runtime.checks import Check
from outofcore.runtime.homes import check_copies
from outofcore.runtime.native import load_native
from outofcore.step import Step
from outofcore.step_variants import Split, split_of
from outofcore.transforms.kernels import Kernels
from outofcore.units import parse_bytes
from outofcore.variant import LOWEST_MEMORY, smallest_variant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("outofcore")

# How much of what comes back from a home is compared by checksum, who writes the kernels of all that is not a product,
# and whether ops run in parts: see ``compile``.
CheckName = Literal["sampled", "full", "off"]
KernelsName = Literal["eager", "inductor"]
SplitName = Literal["exact", "close", "off"]


def _user_step(step: Callable[P, R], model: Any, optimizer: Any) -> UserStep[P, R]:
    """A step with its models and optimizers as lists; raises ``InputError`` if one of them is something else."""
    if not callable(step) or (isinstance(step, nn.Module) and isinstance(model, Optimizer)):
        what = "the model" if isinstance(step, nn.Module) else f"of type {type(step).__name__}"
        raise InputError(
            f"the first argument must be the training function, and is {what}: write the step as a function, such as "
            "def step(x, y): loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad(); "
            "return loss - and give outofcore.compile(step, model, optimizer, budget=...)"
        )
    models = _as_list(model, nn.Module, "model")
    check_modules(models, is_captured=False)
    return UserStep(step, models, _as_list(optimizer, Optimizer, "optimizer"))


def _as_list(given: Any, kind: type, what: str) -> list[Any]:
    if given is None:
        return []
    items = list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise InputError(
                f"{what} must be a {kind.__module__}.{kind.__qualname__} or a list of them, not {type(item).__name__}"
            )
    return items


def _pinned(
    backend: CudaBackend, home: str | os.PathLike[str] | OpenHome | None, host_budget: int | str | None, check: str
) -> OpenHome:
    """The homes of a step on a GPU, opened."""
    if isinstance(home, OpenHome) or check == Check.FULL.value:
        raise InputError(
            f"a step on {backend.device} has homes of its own, in pinned host memory and on a disk, whose copies are "
            "not checked: give 'host', 'disk' or a folder as 'home', and leave 'check' out"
        )
    return OpenHome(open_device_homes(backend, home, host_budget), kept=False)


def _check_name(check: str) -> None:
    if check not in {mode.value for mode in Check}:
        raise InputError(f"there is no check {check!r}; choose one of {', '.join(mode.value for mode in Check)}")


def _opened(
    home: str | os.PathLike[str] | None, host_budget: int | str | None, check: CheckName, *, kept: bool
) -> OpenHome:
    _check_name(check)
    return OpenHome([check_copies(store, Check(check)) for store in open_homes(home, host_budget)], kept=kept)


def open_home(
    home: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    check: CheckName = "sampled",
) -> OpenHome:
    """Open a home for models to be born in, and for several steps to share.

    Args:
        home: "host", "disk", or a folder on a disk. By default "disk".
        host_budget: bytes of host memory to be used before a disk, as for ``compile``. Models are born on the disk.
        check: as for ``compile``.

    Returns:
        The home; for ``build``, ``materialize``, ``load`` and ``compile``. Close it when no model is to be born in it
        any more.

    Raises:
        InputError: an argument cannot be used; ``UnitError`` and ``SpillError`` are kinds of it.

    >>> import torch
    >>> import outofcore
    >>> with outofcore.open_home("host") as home:
    ...     model = outofcore.build(lambda: torch.nn.Linear(256, 256), home=home)
    ...     home.bytes >= 256 * 256 * 4
    True
    """
    return _opened(home, host_budget, check, kept=True)


def _check_devices(models: Sequence[nn.Module], wanted: torch.device) -> None:
    for number, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # CPU tensors are moved to the device on demand, as planned: the model need not fit there.
            which = f"model {number}: " if len(models) > 1 else ""
            if tensor.device.type == "meta":
                raise InputError(
                    f"{which}{name} is on the device meta and has no memory yet: outofcore.materialize(model) gives it "
                    "some; only outofcore.estimate takes such models"
                )
            if tensor.device != wanted and tensor.device.type != "cpu":
                raise InputError(
                    f"{which}{name} is on {tensor.device} and the step is to run on {wanted}; "
                    f"move the model there first: model.to({str(wanted)!r})"
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
    replay: Replaying = True,
    kernels: KernelsName = "eager",
    split: SplitName = "exact",
    repeats: bool = True,
) -> Step[P, R]:
    """Make a training step run within a byte budget, bit for bit as it does in plain PyTorch.

    Args:
        step: the training step: any function of pytrees of tensors and constants, that may run forward,
            backward, clip, update and clear gradients, and returns what it likes. It is not changed.
        model: the module that the step trains or uses, or a list of all of them.
        optimizer: the optimizer that the step calls, a list of them, or None.
        budget: device bytes for all tensors of the step, as a number or as text such as "6GiB"; or a share of what is
            available now, such as "70%".
        device: "cpu", the default, or "cuda". For a step on a GPU, the model may be on the CPU, and what the step is
            called with as well: then it need not fit the device. Its home is pinned host memory of its own, and a
            disk behind it if ``home`` names one.
        home: where bytes live that are not on the device: "host", "disk", or a folder on a disk, opened for this
            step alone; or a home that is open (``open_home``), or that of another step over the same model
            (``step.home``). By default "disk"; for a step on a GPU "host".
        host_budget: bytes of host memory, beside the budget, for what is not on the device, as a number or as text.
            With a home on disk this is a tier before it: what fits there does not go to disk. By default there is
            none; with home="host" it limits that. A home that is open has its own. For a step on a GPU it is pinned, by
            default as much as there is, and what it does not hold goes to the disk that ``home`` names; 64 MiB more
            are the buffers between the device and that.
        policy: how to plan: a name of ``outofcore.policies.POLICIES``, text such as "window:reach=2", or an object
            of ``outofcore.policies``, where one's own are described as well.
        cache: where measurements of ops and links are kept for later processes: a folder, True for the user's
            own (``$XDG_CACHE_HOME/outofcore/measured``), or False for nowhere.
        check: how much of what leaves the device is compared by checksum when it comes back within a step: "sampled",
            a few pages of each copy to disk; "full", all bytes of all copies, and what stays at a home after the step
            is read back once; "off", nothing.
        dynamic: what to do where inputs come in many sizes. False: each is captured and planned when it first comes,
            which takes seconds, and the plans are kept. True: nothing is captured; each call is run as it is, op by
            op, within the budget, as ``outofcore.budget`` runs a loop. None: the first is captured and planned, and
            with the first call of another size the step passes to being followed, once and for good; but it does not
            on a GPU, where loops cannot be followed, with a ``policy`` or ``kernels`` of your choice, or with a home
            that is open or shared by other steps: these then find the model there. So it passes as well where Python
            values that the step reads change again and again.
        shard: a process group, or True for the default one, whose processes share the model: each keeps a range of
            every large parameter, of its gradient and of its optimizer state, and the step gathers parameters and
            reduces gradients. Every process gives batches of its own, of the same shapes. The model is the plain
            module, and is that of rank 0 in all processes from the first call on; its large parameters are then on the
            device ``meta``, without contents, until the step is closed. Optimizers have to be elementwise, as SGD, Adam
            and AdamW are. See the guide to many processes.
        replay: whether native code calls PyTorch's own ops, once each was called from Python, which saves some
            microseconds for each. Where ops are long, Python calls them anyway. With "graphs", ops on a GPU that
            follow each other become CUDA graphs, but for random ones. Other values are refused.
        kernels: "eager", PyTorch's own, op by op; or "inductor": elementwise ops, norms, softmax and losses that follow
            one another become one op each, compiled by PyTorch's Inductor, which is faster where memory is what takes
            time. Losses are then the same to the last bit at every budget and in every process with the same versions
            on the same kind of machine, but they are not those of eager PyTorch to the last bit. The first call takes
            some seconds for each kernel that is not in Inductor's cache yet. Without a C++ compiler (on a GPU: Triton)
            the log says so, and PyTorch's own kernels run. See the guide to compiled kernels.
        split: "exact", an op that needs more memory than there is runs in parts, where its parts were found to give the
            bits of the whole on this machine; or "off", it does not, and the budget has to hold it. Plans may cut ops
            for speed as well, where the neediest ones leave no room for what moves beside them. With "close", large
            sums over rows and samples, of which the gradients of weights are made, are taken in parts as well, at every
            budget the same ones: losses are then the same to the last bit at every budget, but they are not those of
            eager PyTorch to the last bit. Each size of inputs is then captured and planned. See the guide to ops that
            are larger than their room.
        repeats: whether the budget must also hold a second call that begins with the gradients of the first. False:
            such a call is planned when it comes, as for a step that takes turns with an update (a plain argument tells
            which of the two a call is), which clears them.

    Returns:
        A callable with the signature of ``step``. Nothing is captured before its first call.

    Limits: a followed call has no refusal beforehand. An op that does not fit ends it with a ``BudgetError`` that says
    how much it needs: a plan may hold within less, since it places every byte and updates a parameter in pieces.
    What came before that op is done, as in plain PyTorch, and the step can be called again.

    Raises:
        InputError: an argument cannot be used; ``UnitError`` and ``SpillError`` are kinds of it.
        StateError: there is no native code, or ``dynamic`` is True and loops cannot be followed here.

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
        raise InputError(f"replay={replay!r} is none of True, False and 'graphs'")
    made, splits = _kernels(kernels), split_of(split)
    backend = open_backend(device, replay=replay)
    count = _budget_of(budget, backend.device, user.models)
    check_modules(user.models, is_captured=not dynamic)
    _check_devices(user.models, backend.device)
    if dynamic:
        _check_followable(backend.device, home, chosen, kernels, splits)
    kept = open_cache(cache)
    check_supported(user.models)
    load_native(backend.flavor)
    group = _sharing_group(shard, dynamic, kernels)
    if group is not None:
        user = replace(user, shards=Shards(user.models, user.optimizers, group))
    loop = None
    if isinstance(backend, CudaBackend):
        opened = _pinned(backend, home, host_budget, check)
    elif isinstance(home, OpenHome):
        if host_budget is not None or check != "sampled":
            raise InputError(
                "a home that is open has its host budget and its check already; give them to outofcore.open_home()"
            )
        opened = home
    else:
        opened = _opened(home, host_budget, check, kept=False)
        if chosen == policy_of("auto") and kernels == "eager" and group is None and splits is not Split.CLOSE:
            # The calls bring the model to it, of which they know what other steps have.
            limit = host_limit(host_budget)
            plans = None if kept is None else kept.folder
            options = LoopOptions(CPU, LoopHome(home, limit), plans=plans, check=Check(check), beside=True)
            loop = partial(Loop, count, (), options)
    return Step(
        user,
        MemoryOptions(count, opened),
        PlanOptions(chosen, splits, kept, repeats),
        RunOptions(backend, made, dynamic, loop),
        Agreement(user.models, kept, group),
    )


def _kernels(name: str, *, compiles: bool = True) -> Kernels | None:
    """What compiles the kernels of a step; None: they are PyTorch's own."""
    if name not in ("eager", "inductor"):
        raise InputError(f"there are no kernels {name!r}; choose 'eager' or 'inductor'")
    if name == "eager":
        return None
    require(Feature.KERNELS)
    return Kernels(compiles)


def _sharing_group(shard: ProcessGroup | bool | None, dynamic: bool | None, kernels: str) -> ProcessGroup | None:
    """The processes that share a model; None: nobody else has any of it."""
    if shard is None or shard is False:
        return None
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise InputError(
            "shard= spreads a model over the processes of a group, and there is none: start the script with torchrun, "
            "and call torch.distributed.init_process_group() before"
        )
    group = torch.distributed.group.WORLD if shard is True else shard
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise InputError(f"shard must be a process group of torch.distributed or True, not {type(group).__name__}")
    if dynamic or kernels != "eager":
        raise InputError("processes that share a model follow one plan: with 'shard' leave 'dynamic' and 'kernels' out")
    return group if group.size() > 1 else None


def _check_followable(device: torch.device, home: object, policy: Policy, kernels: str, splits: Split) -> None:
    """Refuse ``dynamic=True`` where calls cannot be followed."""
    if device.type != "cpu":
        raise InputError(f"calls are followed on the CPU only, and the step is for {device}; leave 'dynamic' out")
    if isinstance(home, OpenHome):
        raise InputError(
            "calls that are followed have a home of their own: with dynamic=True give 'host', 'disk' or a folder as "
            "'home'; or leave 'dynamic' out"
        )
    if policy != policy_of("auto") or kernels != "eager":
        raise InputError(
            "calls that are followed are neither planned nor measured: with dynamic=True leave 'policy' and "
            "'kernels' out"
        )
    if splits is Split.CLOSE:
        raise InputError(
            "calls that are followed run PyTorch's ops as they are, and their losses would not be those of planned "
            "steps with split='close'; leave 'dynamic' out, so that each size is planned"
        )
    load_paging()


def _device_of(models: Sequence[nn.Module]) -> torch.device | None:
    """The GPU that a model is on; None: it is on none."""
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
    """Run a loop as it is, in eager PyTorch, within a byte budget and with the very same numbers.

    In ``with outofcore.budget("6GiB", model) as run:`` every tensor of 64 KiB and more that this thread's ops touch
    lies in an arena of the budget's size while an op uses it. When there is no room left, what is used furthest from
    now leaves for the home: by what the loop did before, once it repeats itself (Belady, 1966), and until then by how
    long it was not used. What is known to come is fetched beside the ops before it. Steps that come again are planned
    in a process beside the loop, a few sizes of each kind of step; such a plan says from then on what leaves and comes
    when, and where it lies. Whatever is not as planned happens on demand.

    Args:
        limit: bytes for all tensors and workspaces of the loop, as a number or as text such as "6GiB", or a share of
            what is available now, such as "70%". On a GPU it is what PyTorch's allocator may take for the loop: see the
            guide. By default 70 % of the memory that is available, and on a GPU what is free there, less 5 % and at
            least 512 MiB; a line on standard error says how much that is.
        model: the module that the loop trains, or several. Their parameters, buffers and gradients move to the home
            when the loop is started; other tensors, such as batches, are taken over when an op first uses them, and
            the state of an optimizer when it first steps.
        device: whose tensors are followed: "cpu", or a GPU such as "cuda". By default that of the model's parameters.
        home: where bytes live that are not in the arena: "disk", the default, a folder on a disk, or "host"; for a GPU
            pinned host memory alone.
        host_budget: as for ``compile``: bytes of host memory that are used before a disk, or the limit of "host".
        policy: how steps are planned, as for ``compile``; None: they are not.
        cache: where plans are kept for later processes: a folder, True for the user's cache folder, or False.
        check: "off" trusts that a tensor in the arena is changed by ops alone; else all of it is compared by checksum
            before it leaves without being written, so that what other threads or compiled code wrote is not lost, and
            64 of every 4,160 bytes are when it comes back from a disk, so that damage there ends the step; with "full",
            all bytes are, from host memory as well. On a GPU nothing is compared.
        measure: find out what the loop needs: it may exceed the budget, nothing is planned, and at its end a few lines
            on standard error give the peak in core, the smallest budget that holds every op that ran, and predicted
            step times within 3/4, 1/2 and 1/4 of the peak; also as ``run.measurement()``.
        grow: let ops that cannot do with less exceed the budget, as far as the device has the memory, instead of an
            error. ``run.stats.exceedances`` counts them, and a warning at the end says what they needed.

    Returns:
        A context manager, also with ``start()`` and ``stop()``; ``run.stats`` tells what happened.

    Raises:
        InputError: an argument cannot be used; ``UnitError`` and ``SpillError`` are kinds of it. In the loop, where an
            op alone does not fit, PyTorch raises ``torch.OutOfMemoryError``; out of the context comes a ``BudgetError``
            that says which op, where, and what it needs. Where a home fails, PyTorch raises a RuntimeError at the op,
            which has not run; out of the context comes a ``TransferError``, or a ``SpillError`` if no home has room.

    Limits: of other threads only what autograd starts is followed. Compiled extensions that keep a pointer from one op
    to the next do not see the tensor move. A NumPy array over a tensor that was made before the loop does not follow
    the tensor into the arena.

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
    followed = open_backend(_device_of(models) if device is None else device).device
    count = _budget_of(limit, followed, models)
    if followed.type != "cpu" and home not in (None, "host"):
        raise InputError(
            f"a loop on {followed} keeps what is away in pinned host memory, and home={str(home)!r} was asked for: "
            "leave 'home' out, and limit that memory by 'host_budget'"
        )
    if followed.type != "cpu" and check == Check.FULL.value:
        raise InputError(f"copies of a loop on {followed} are not checked; leave 'check' out")
    _check_name(check)
    kept = open_cache(cache)
    if policy is not None:
        policy = policy_of(policy)
        try:
            pickle.dumps(policy)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the policy cannot be sent to the process that plans: {error}; define it at the top level of a module"
            ) from error
    # A policy of the user's own that is known by its address alone may be another one the next time.
    plans = None if kept is None or " at 0x" in repr(policy) else kept.folder
    at = LoopHome(home, host_limit(host_budget))
    excess = Excess.MEASURED if measure else Excess.ALLOWED if grow else Excess.REFUSED
    return Loop(count, models, LoopOptions(loop_device(followed), at, policy, plans, Check(check), excess))


_within = budget


def _budget_of(limit: int | str | None, device: torch.device, models: Sequence[nn.Module]) -> int:
    """Return a budget in bytes; log it if it was not given in bytes."""
    count, text = budget_of(limit, device, models)
    if text:
        _log.warning("outofcore: budget %s", text)
    return count


def stop() -> bool:
    """End the loop started by ``outofcore.budget``, without its handle and from any thread.

    In a notebook, where a cell that starts a loop has run twice or has failed, this ends it without the handle. Its
    tensors keep their contents and can be used; their memory goes with them. While an op runs, the loop ends with it.
    A loop whose handle is lost, so that nothing refers to it any more, ends by itself. Compiled steps are not ended:
    ``Step.close`` does that.

    Returns:
        whether a loop was ended; where none runs, nothing is done.

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
    """Call a model whose weights do not fit, once, without gradients and within a byte budget.

    While one module computes, the weights of the next ones come, in the order in which the model has its modules.
    Weights that were mapped from files (safetensors, ``torch.load(..., mmap=True)``, Hugging Face's
    ``from_pretrained``) are read from there: nothing is copied beforehand, and no disk is used.

    For many calls, such as ``model.generate(...)`` makes, open the context once: in
    ``with outofcore.budget("1GiB", model):`` each call of the model without gradients is a step that is planned, so
    that some of the weights stay, and the first ones of the next call come during the last ones of this one.

    Args:
        model: the module; its tensors are on the CPU or on one GPU.
        inputs: of the call.
        budget: bytes for all tensors and workspaces, as a number or as text such as "1GiB".
        home: where what comes from no file is kept, as for ``outofcore.budget``; its ``host_budget`` and ``check`` too.
        host_budget: see ``home``.
        check: see ``home``.
        named_inputs: of the call.

    Returns:
        what the model returns, in memory of its own.

    Raises:
        InputError: an argument cannot be used.
        BudgetError: an op alone does not fit.
        StateError: a loop is followed already; there, call the model.

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
    """The smallest budget in bytes with which ``compile`` can run the step on these inputs, again and again.

    Each family of ops is run once on scratch tensors to learn its workspace; nothing of the user's is changed.

    Args:
        step: as for ``compile``.
        model: as for ``compile``.
        optimizer: as for ``compile``.
        inputs: the positional arguments of the step.
        kwargs: its keyword arguments.
        device: as for ``compile``.
        cache: as for ``compile``.
        kernels: as for ``compile``.
        split: as for ``compile``.

    Raises:
        InputError: an argument cannot be used.
        CaptureError: the step cannot become one graph.

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
    where = LocalMachine(backend, cache=open_cache(cache))
    variants = captured_variants(user, inputs, kwargs or {}, where, _kernels(kernels), split_of(split))
    backend.prepare()
    variant, smallest = smallest_variant(variants)
    if variants.later is not None and (variants.later.need(LOWEST_MEMORY) or 0) > smallest:
        smallest = max(smallest, smallest_variant(variants.later)[1])
    return smallest + beside_the_arena(variants.made(variant), backend, smallest)


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
    """Whether a step fits, and how long it would take over budgets, without training it.

    Each family of ops is run a few times on scratch tensors; nothing of the user's is changed. For a device that is
    not here nothing is run at all. A model and inputs on the device ``meta`` do as well: they take no memory.

    Args:
        step: as for ``compile``.
        model: as for ``compile``, or on the device ``meta``.
        optimizer: as for ``compile``.
        inputs: the positional arguments of the step.
        kwargs: its keyword arguments.
        budgets: to be looked at, besides those that suit the step.
        device: where the step is to run and is measured, as for ``compile``; or a device that need not be here and
            is simulated, by its name in ``outofcore.presets``, such as "h100".
        home: as for ``compile``; ignored for a device that is simulated.
        host_budget: as for ``compile``; ignored for a device that is simulated.
        policy: as for ``compile``.
        cache: as for ``compile``.
        kernels: as for ``compile``. For a device that is simulated nothing is compiled.
        split: as for ``compile``. For a device that is simulated all parts are taken to give the bits of the whole.

    Returns:
        Budgets in bytes and step times in seconds; on a GPU the bytes are those of the arena.

    Raises:
        InputError: an argument cannot be used.
        CaptureError: the step cannot become one graph.

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
    wanted = [parse_bytes(budget) for budget in budgets]
    with opened_place(None if device is None else str(device), home, host_budget, cache) as where, following() as tell:
        preset = None if isinstance(where, LocalMachine) else where
        made, splits = _kernels(kernels, compiles=preset is None), split_of(split)
        found = costed(user, tuple(inputs), kwargs or {}, where, tell=tell, kernels=made, split=splits)
        machine = "" if preset is None else preset.describe()
        return estimated(
            found.graph, found.costs, budgets=wanted, policy=chosen, machine=machine, parts=found.parts, tell=tell
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
    """Save models and optimizers as ``Step.save`` does, with or without a compiled step.

    Args:
        folder: where the checkpoint goes; one that is there counts until this one is whole.
        model: one or several.
        optimizer: one, several or None.
        home: where tensors live, if anywhere.
        extra: as for ``Step.save``.
        frozen: False leaves out parameters that do not require gradients, as for ``Step.save``.

    Raises:
        InputError: the folder cannot be written to, or something of the model or of ``extra`` cannot be saved.
        TransferError: a file could not be written; the checkpoint that was there before is as it was.

    >>> import torch
    >>> import outofcore
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> outofcore.save("checkpoint", model, optimizer, extra={"epoch": 3})

    Without its frozen parameters, a model is loaded where they have their values already:

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
    save_checkpoint(Path(folder), models, optimizers, None if home is None else home.faces, extra, frozen=frozen)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    home: OpenHome | None = None,
) -> Any:
    """Load a checkpoint into models and optimizers, and PyTorch's, Python's and numpy's random generators.

    What exists is overwritten where it is. A model on the meta device gets its tensors now, straight from the files;
    so does the state of an optimizer that has none yet. Frozen parameters that were left out (``frozen=False``) stay as
    they are, so they must have their values.

    Args:
        folder: that a checkpoint was saved into.
        model: as when it was saved; None: nothing is loaded, and what was saved as ``extra`` is returned.
        optimizer: as when it was saved.
        home: where tensors of 64 KiB or more are born that do not exist yet; None: in ordinary memory.

    Returns:
        What was saved as ``extra``; tuples come back as lists.

    Raises:
        InputError: there is no checkpoint, it is damaged, or it is one of another model or optimizer, or it was saved
            without a parameter that requires gradients or is on the meta device; nothing has been changed but a model
            on the meta device whose names fit.
        TransferError: a file cannot be read or is not as it was saved; do not use the model before another checkpoint
            has been loaded.
        SpillError: the home has no room.

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
    faces = None if home is None else home.faces
    checkpoint = Checkpoint(Path(folder))
    if model is None and optimizer is None:
        return checkpoint.extra
    checkpoint.targets_in(models)  # it refuses others before they get memory
    for one in models:
        allocate(one, faces)
    checkpoint.load(models, optimizers, faces)
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
