"""Predict step times of ``outofcore.budget`` loops on GPUs with and without recomputation, without a GPU.

Each loop runs in eager PyTorch on meta tensors; a recorder records the ops and storages that ``paging.cpp`` records.
Recomputation follows ``runtime/csrc/follow/recipes.h``, with the ops of ``Device::repeats`` and the choice of
``worth_making_again``. Both records are planned with keep and offload only. Op costs are a roofline over
``outofcore.presets``, without host time; an optimizer's update is one op per parameter.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from _blocks import checkpoint_blocks
from _common import write_result
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import outofcore
from outofcore import planning, presets
from outofcore.capture.captured import Call, Ref
from outofcore.errors import BudgetError
from outofcore.estimation.costing import count_operations
from outofcore.follow.recompute_trial import MIN_DELAY, MIN_SPEEDUP
from outofcore.follow.records import StepRecord, read_record
from outofcore.follow.remaking import ComputedStorage, choose_recomputed
from outofcore.graph import Op
from outofcore.planning import QUICK
from outofcore.presets import Device, Number, Work
from outofcore.units import format_bytes
from outofcore.zoo import workload

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from gpu_rows import Decoder

LARGE = 1 << 16
DEVICES = ("h100", "rtx4090")
SHARES = (0.75, 0.5, 0.375, 0.25)
_DEEPEST = 4  # as in lineage.h
_MOST_STEPS = 8
_FOLLOW = Path(outofcore.__file__).parent / "runtime" / "csrc" / "follow"
# The list in ``Device::repeats``; elementwise ops can be repeated too.
_REPEAT = frozenset(
    re.findall(r'"(aten::\w+)"', (_FOLLOW / "device_cuda.h").read_text(encoding="utf-8").partition("bool repeats")[2])
)
_ALLOCATE = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"})


@dataclass(frozen=True)
class RepeatableOp:
    """An op that can run again."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[int, Lineage | None]  # by storage; None: not recomputable
    seconds: float


@dataclass(frozen=True)
class Lineage:
    """The ops that produced a storage."""

    storage: int
    steps: tuple[RepeatableOp, ...]
    result: int
    depth: int


@dataclass(frozen=True)
class ArgumentView:
    """A tensor argument: its storage and its geometry."""

    storage: int
    version: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device="meta").set_(storage, self.offset, self.sizes, self.strides)


class Recipe:
    """The object that autograd saves instead of a tensor."""

    def __init__(self, making: Lineage, original: StorageWeakRef | None) -> None:
        self.lineage, self.original = making, original
        self.rerun_storage: StorageWeakRef | None = None
        self.inputs: dict[int, torch.UntypedStorage] = {}
        self.recipes: dict[int, Recipe] = {}


def _strong(weak: StorageWeakRef | None) -> torch.UntypedStorage | None:
    return None if weak is None or weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


@dataclass
class Recorder(TorchDispatchMode):
    """Records the ops of a step as the integers that ``read_record`` parses.

    ``chosen`` are the storages that autograd saves as recipes, in order of first use.
    """

    device: Device
    chosen: frozenset[int] = frozenset()
    ids: dict[int, int] = field(default_factory=dict)  # live storages by address
    weak: dict[int, StorageWeakRef] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)  # bytes, freed, created, persistent
    ops: list[tuple[str, float, list[tuple[int, int, int, int]]]] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    lineages: dict[int, Lineage] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    recipes: dict[int, weakref.ref[Recipe]] = field(default_factory=dict)
    recompute_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()
        self._quiet = False

    def mark_persistent(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if (storage := self._id(tensor, created=False)) is not None:
                self.rows[storage][3] = 1

    def update(self, parameter: Tensor, states: int) -> None:
        """Record an op that updates a parameter from its gradient and ``states`` state tensors."""
        if parameter.grad is None or (parameter_id := self._id(parameter, created=False)) is None:
            return
        gradient = self._id(parameter.grad, created=False)
        self._free()
        touches = [(1, parameter_id, 1, 0), (2, gradient, 0, 0)]
        for index in range(states):
            self.rows.append([self.rows[parameter_id][0], -1, 0, 1])
            touches.append((3 + index, len(self.rows) - 1, 1, 0))
        moved = self.rows[parameter_id][0] * (3 + 2 * states)
        self.ops.append(("update", self.device.seconds(Work.STREAMING, Number.FP32, 0.0, moved), touches))

    def encode(self) -> tuple[list[int], list[str]]:
        self._free()
        names = list(dict.fromkeys(name for name, _, _ in self.ops))
        encoded = [0, len(self.ops), len(self.rows), 0, 0, 0, 0, 0]
        for row in self.rows:
            encoded += row
        for name, seconds, touches in self.ops:
            encoded += [names.index(name), round(seconds * 1e9), 0, len(touches)]
            for touch in touches:
                encoded += touch
        return encoded, names

    def recompute_candidates(self) -> list[ComputedStorage]:
        """Return the recomputation candidates, as ``Recipes.noted`` does."""
        candidates = []
        for storage, (count, _, created, _) in enumerate(self.rows):
            making = self.lineages.get(storage)
            if making is not None and created:
                inputs = dict.fromkeys(i for step in making.steps for i in step.inputs if i != storage)
                seconds = sum(step.seconds for step in making.steps)
                candidates.append(ComputedStorage(storage, count, seconds, tuple(inputs), storage in self.saved))
            elif created or storage in self.saved:
                candidates.append(ComputedStorage(storage, count, None, (), storage in self.saved))
        return candidates

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().nbytes() < LARGE:
            return tensor
        storage = self.ids.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return tensor
        self.saved.add(storage)
        if storage not in self.chosen or storage not in self.lineages or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        recipe = self._recipe(self.lineages[storage], self.weak[storage], _DEEPEST)
        return tensor if recipe is None else (recipe, self._place(tensor, storage))

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        recipe, place = packed
        return self._without_recording(lambda: place.on(self._bytes(recipe)))

    def _recipe(self, making: Lineage, original: StorageWeakRef | None, max_depth: int) -> Recipe | None:
        if max_depth <= 0:
            return None
        known_recipe = self.recipes.get(making.storage)
        if known_recipe is not None and (live := known_recipe()) is not None and original is not None:
            return live
        recipe = Recipe(making, original)
        for step in making.steps:
            for storage, input_lineage in step.inputs.items():
                if storage == making.storage or storage in recipe.inputs or storage in recipe.recipes:
                    continue
                known_recipe = self.recipes.get(storage)
                inner = None if known_recipe is None else known_recipe()
                if inner is None and input_lineage is not None and storage in self.chosen:
                    inner = self._recipe(input_lineage, self.weak.get(storage), max_depth - 1)
                if inner is not None:
                    recipe.recipes[storage] = inner
                    continue
                storage_to_keep = self._without_recording(lambda storage=storage: _strong(self.weak.get(storage)))
                if storage_to_keep is None:
                    return None
                recipe.inputs[storage] = storage_to_keep
        self.recipes[making.storage] = weakref.ref(recipe)
        return recipe

    def _bytes(self, recipe: Recipe) -> torch.UntypedStorage:
        live = _strong(recipe.original) or _strong(recipe.rerun_storage)
        if live is not None:
            return live
        storages = dict(recipe.inputs)
        for storage, inner in recipe.recipes.items():
            storages[storage] = self._bytes(inner)
        result: torch.UntypedStorage | None = None
        for step in recipe.lineage.steps:
            if result is not None:
                storages[recipe.lineage.storage] = result
            args, kwargs = tree_map_only(
                ArgumentView, lambda place: place.on(storages[place.storage]), (step.args, step.kwargs)
            )
            self._quiet = False
            returned = step.func(*args, **kwargs)
            self._quiet = True
            self.recompute_seconds += step.seconds
            if result is None:
                fresh = [t.untyped_storage() for t in tree_leaves(returned) if isinstance(t, Tensor)]
                result = fresh[recipe.lineage.result]
        recipe.rerun_storage = StorageWeakRef(result)
        return result

    def _without_recording(self, action: Callable[[], Any]) -> Any:
        before, self._quiet = self._quiet, True
        try:
            return action()
        finally:
            self._quiet = before

    def _id(self, tensor: Tensor, *, created: bool) -> int | None:
        storage = tensor.untyped_storage()
        if storage.nbytes() < LARGE:
            return None
        address = storage._cdata
        if address not in self.ids:
            self.ids[address] = len(self.rows)
            self.weak[len(self.rows)] = StorageWeakRef(storage)
            self.rows.append([storage.nbytes(), -1, int(created), 0])
        return self.ids[address]

    def _free(self) -> None:
        for address, storage in list(self.ids.items()):
            if self.weak[storage].expired():
                self.rows[storage][1] = len(self.ops)
                del self.ids[address], self.weak[storage]

    def _place(self, tensor: Tensor, storage: int) -> ArgumentView:
        shape = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return ArgumentView(storage, self.versions.get(storage, 0), tensor.dtype, *shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        self._free()
        schema = func._schema
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        touches: dict[int, tuple[int, int, int, int]] = {}
        positions: dict[int, int] = {}
        position_of = {a.name: i for i, a in enumerate(schema.arguments)}
        values = [(i, v) for i, v in enumerate(args)] + [(position_of[n], v) for n, v in kwargs.items()]
        for position, value in values:
            for tensor in tree_leaves(value):
                if not isinstance(tensor, Tensor) or (storage := self._id(tensor, created=False)) is None:
                    continue
                positions[storage] = position
                write = int(written[position]) | (touches[storage][2] if storage in touches else 0)
                touches[storage] = (len(touches) + 1, storage, write, 0)
        step = self._step(func, schema, written, args, kwargs)
        returned = func(*args, **kwargs)
        results = [t for t in tree_leaves(returned) if isinstance(t, Tensor)]
        if func.is_view or (schema.name in ("aten::detach", "aten::_unsafe_view", "aten::alias")):
            return returned
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        seconds = self._seconds(func, schema, args, kwargs, inputs, results)
        fresh = []
        for tensor in results:
            is_known = tensor.untyped_storage()._cdata in self.ids
            if (storage := self._id(tensor, created=True)) is None or is_known:
                fresh.append(None)
                continue
            fresh.append(storage)
            touches[storage] = (-len(fresh), storage, 1, 1)
        if touches:
            self.ops.append((schema.name, seconds, list(touches.values())))
        self._lineage(step, written, touches, fresh, seconds, schema)
        return returned

    def _step(self, func: Any, schema: Any, written: list[bool], args: Any, kwargs: Any) -> RepeatableOp | None:
        if torch.Tag.pointwise not in func.tags and schema.name not in _REPEAT:
            return None
        writes = sum(written)
        norm = schema.name == "aten::native_batch_norm"
        if writes and not (writes == 1 and written[0] and schema.name.endswith("_") and len(schema.returns) == 1):
            return None
        if not writes and any(r.alias_info is not None for r in schema.returns):
            return None
        inputs: dict[int, Lineage | None] = {}

        def place(tensor: Tensor) -> Any:
            storage = self._id(tensor, created=False)
            if storage is None:
                return self._without_recording(tensor.detach)
            making = self.lineages.get(storage)
            inputs[storage] = making if making is not None and making.depth < _DEEPEST else None
            return self._place(tensor, storage)

        args, kwargs = tree_map_only(Tensor, place, (tuple(args), kwargs))
        if norm:
            args = (*args[:3], None, None, *args[5:]) if args[5] else args
        return RepeatableOp(func, args, kwargs, inputs, 0.0)

    def _lineage(
        self,
        step: RepeatableOp | None,
        written: list[bool],
        touches: Any,
        fresh: list[int | None],
        seconds: float,
        schema: Any,
    ) -> None:
        step = None if step is None else replace(step, seconds=seconds)
        changed = [s for _, s, writes, creates in touches.values() if writes and not creates]
        for storage in changed:
            self.versions[storage] = self.versions.get(storage, 0) + 1
            before = self.lineages.pop(storage, None)
            if before is not None and step is not None and written[0] and len(before.steps) < _MOST_STEPS:
                self.lineages[storage] = replace(before, steps=(*before.steps, step))
        if changed or step is None:
            return
        for result, storage in enumerate(fresh):
            if storage is not None:
                depth = max((m.depth + 1 for m in step.inputs.values() if m is not None), default=0)
                self.lineages[storage] = Lineage(storage, (step,), result, min(depth, _DEEPEST))

    def _seconds(
        self, func: Any, schema: Any, args: Any, kwargs: Any, inputs: list[Tensor], results: list[Tensor]
    ) -> float:
        if schema.name in _ALLOCATE:
            return 0.0
        tensors = list({id(t): t for t in [*inputs, *results]}.values())
        numbers = {id(t): i for i, t in enumerate(tensors)}
        values = [SimpleNamespace(dtype=t.dtype, shape=tuple(t.shape), stride=t.stride()) for t in tensors]
        refs, keyword_refs = tree_map_only(Tensor, lambda t: Ref(numbers[id(t)]), (tuple(args), kwargs))
        call = Call(func, refs, keyword_refs, tuple(numbers[id(t)] for t in results))
        name = f"aten.{schema.name.partition('::')[2]}"
        work, operations = count_operations(SimpleNamespace(values=values), Op(0, name, (), (), ()), call)
        moved = 0
        for value in values:
            count = value.dtype.itemsize
            for size, stride in zip(value.shape, value.stride, strict=True):
                count *= size if stride else 1
            moved += count
        floating = [value.dtype for value in values if value.dtype.is_floating_point]
        half = floating and floating[0] in (torch.bfloat16, torch.float16)
        number = Number.HALF if half else Number.TF32 if work is Work.CONVOLUTION else Number.FP32
        return self.device.seconds(work, number, operations, moved)


@dataclass(frozen=True)
class Loop:
    title: str
    build: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]
    states: int  # tensors of optimizer state for each parameter
    checkpoint: Callable[[nn.Module], None] = checkpoint_blocks


def _zoo_loop(name: str, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    work = workload(name, **options)
    model = work.network().to(dtype)
    batch = [
        torch.empty((options["batch"], *size), dtype=dtype if element_type.is_floating_point else element_type)
        for size, element_type in work.sample
    ]
    return model, lambda model: work.loss(model, *batch)


def _llama_loop(layers: int, tokens: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = Decoder(width=2048, layers=layers, heads=32, groups=8, head=64, inner=8192, vocab=128256).bfloat16()
    for block in model.blocks:
        block.attention.foretold = True
    batch = torch.zeros((tokens // 2048, 2048), dtype=torch.int64)
    return model, lambda model: model(batch)


def _checkpoint_decoder(model: nn.Module) -> None:
    model.again = True


_GPT = partial(_zoo_loop, "gpt", torch.bfloat16, context=1024, vocab=50304)
LOOPS = {
    "gpt-124m": Loop("GPT of 124 million, bf16, 64 x 1,024", partial(_GPT, batch=64, layers=12, width=768), 2),
    "gpt-1b": Loop(
        "GPT of 12 layers of width 2,048, bf16, 16 x 1,024", partial(_GPT, batch=16, layers=12, width=2048), 2
    ),
    "llama": Loop(
        "Llama of 12 layers of Llama-3.2-1B's, bf16, 16 x 2,048",
        partial(_llama_loop, 12, 32768),
        2,
        _checkpoint_decoder,
    ),
    "resnet50": Loop(
        "ResNet-50, bf16, batch 512",
        partial(_zoo_loop, "resnet", torch.bfloat16, batch=512, size=224, depth=50, images="generated"),
        1,
    ),
    "unet3d": Loop("3D U-Net, fp32, 4 x 128^3", partial(_zoo_loop, "unet3d", torch.float32, batch=4, size=128), 1),
}


def _attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]


def record(
    loop: Loop, device: Device, chosen: frozenset[int] = frozenset(), *, checkpointed: bool = False
) -> tuple[StepRecord, Recorder]:
    with torch.device("meta"), mock.patch.object(F, "scaled_dot_product_attention", _attention):
        model, loss_of = loop.build()
        if checkpointed:
            loop.checkpoint(model)
        recorder = Recorder(device, chosen)
        recorder.mark_persistent([*model.parameters(), *model.buffers()])
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            loss_of(model).backward()
            for parameter in model.parameters():
                recorder.update(parameter, loop.states)
            model.zero_grad()
        step_record = read_record(*recorder.encode())
    return replace(step_record, costs=replace(step_record.costs, homes=(device.home(),))), recorder


def _predict_seconds(record: StepRecord, budget: int) -> float | None:
    try:
        return planning.plan_step(record.graph, record.costs, budget, params=QUICK).timeline.step_seconds
    except BudgetError:
        return None


def predict(name: str, key: str) -> dict[str, Any]:
    """Predict a loop's step times on a device, at shares of its in-core budget."""
    loop, device = LOOPS[name], presets.device(key)
    start = time.process_time()
    plain, recorder = record(loop, device)
    candidates, rate = recorder.recompute_candidates(), device.out_bytes_per_s
    in_core = planning.in_core_budget(plain.graph, plain.costs)
    checkpointed, _ = record(loop, device, checkpointed=True)
    compute = plain.costs.compute_seconds
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        budget = int(in_core * share)
        offloaded = _predict_seconds(plain, budget)
        row: dict[str, Any] = {"share": share, "budget": budget, "offloaded_s": offloaded}
        if offloaded is not None:
            stalled = offloaded - compute
            row |= {"recomputed_s": offloaded, "again_s": 0.0}
            if stalled > MIN_DELAY * compute:
                chosen = choose_recomputed(candidates, rate, target_bytes=int(stalled * rate))
                remade, remade_recorder = record(loop, device, frozenset(chosen))
                recomputed = _predict_seconds(remade, budget)
                if recomputed is not None and recomputed < offloaded * (1 - MIN_SPEEDUP):
                    row |= {"recomputed_s": recomputed, "again_s": remade_recorder.recompute_seconds}
        row["checkpointed_s"] = _predict_seconds(checkpointed, budget)
        rows.append(row)
    return {
        "loop": loop.title,
        "device": device.name,
        "ops": len(plain.graph.ops),
        "in_core_bytes": in_core,
        "in_core_s": compute,
        "saved_bytes": sum(candidate.bytes for candidate in candidates if candidate.saved),
        "rows": rows,
        "processor_s": round(time.process_time() - start, 1),
    }


def render_page(predictions: Iterable[dict[str, Any]]) -> str:
    lines = [
        "# Recomputation in loops on GPUs, predicted",
        "",
        "*Simulated* by `python benchmarks/loop_recompute.py`, without a GPU; its docstring describes the model.",
        "Step times in ms.",
        "",
        "| loop | device | budget, of in core | in core | offload | offload, recompute | saved | recomputed ops "
        "| checkpointed by hand |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for prediction in predictions:
        for row in prediction["rows"]:
            offloaded = row["offloaded_s"]
            cells = [
                prediction["loop"],
                prediction["device"],
                f"{row['share']:g} ({format_bytes(row['budget'])})",
                _milliseconds(prediction["in_core_s"]),
                _milliseconds(offloaded),
                *("-" if offloaded is None else text for text in _recompute_cells(row)),
                _milliseconds(row["checkpointed_s"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "A dash: the budget is too small for the largest op."]
    return "\n".join([*lines, ""])


def _recompute_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    if row["offloaded_s"] is None:
        return "", "", ""
    saved = 1 - row["recomputed_s"] / row["offloaded_s"]
    return _milliseconds(row["recomputed_s"]), f"{saved:.0%}", _milliseconds(row["again_s"])


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g}"


def main(
    loops: Annotated[str, typer.Option(help="Keys of loops, separated by commas.")] = ",".join(LOOPS),
    devices: Annotated[str, typer.Option(help="Device presets, separated by commas.")] = ",".join(DEVICES),
    date: Annotated[str | None, typer.Option(help="Date of the measurement, ISO 8601.")] = None,
) -> None:
    """Predict step times of loops on GPUs with and without recomputation."""
    predictions = [predict(name, key) for name in loops.split(",") for key in devices.split(",")]
    page = render_page(predictions)
    path = write_result("loop-recompute", {"predictions": predictions}, date)
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    typer.run(main)
