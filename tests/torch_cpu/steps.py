"""Training steps of several tests, the tensors that a user sees of them, and their budgets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import capture_cases as cases
import capture_more_cases as more
import pytest
import torch
import torch.nn.functional as F
from capture_cases import Case
from torch.utils import _pytree as pytree

import outofcore
from outofcore import zoo
from outofcore.capture import Captured
from outofcore.capture.step import capture_step
from outofcore.planning import in_core_budget
from outofcore.transforms.passes import rewrite_for_lowest_memory

ZOO: dict[str, dict[str, Any]] = {
    "resnet": {"depth": 18, "size": 64, "batch": 2},
    "vgg16": {"size": 32, "batch": 1, "optimizer": "sgd"},
    "densenet121": {"size": 64, "batch": 2, "optimizer": "momentum"},
    "unet3d": {"size": 16, "base": 8, "batch": 1},
    "gpt": {"layers": 2, "width": 128, "heads": 4, "context": 128, "batch": 4, "dropout": 0.1},
}


def from_zoo(name: str, **options: Any) -> Case:
    workload = zoo.workload(name, **{**ZOO[name], **options})
    model = workload.build()
    optimizer = workload.optimizer(model)
    batches = workload.batches()
    return Case(workload.make_step(model, optimizer), [model], [optimizer], lambda: next(batches))


def optimizer_case(make: Callable[[Any], torch.optim.Optimizer]) -> Case:
    """Return a step with parameters large enough to be evicted."""
    model = torch.nn.Sequential(torch.nn.Linear(160, 160), torch.nn.Tanh(), torch.nn.Linear(160, 4))
    optimizer = make(model.parameters())
    return Case(cases.supervised_step(model, optimizer), [model], [optimizer], cases.classify(width=160))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum_foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "sgd_fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw": torch.optim.AdamW,
    "adamw_foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, fused=True, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
}


def language_model(kind: str) -> Case:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    sizes = {
        "vocab_size": 600,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attention_dropout=0.1))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, [model], [optimizer], lambda: (torch.randint(0, 600, (4, 64)),))


def gan() -> Case:
    generator = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    critic = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.LeakyReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(256, 1)
    )
    make = torch.optim.Adam(generator.parameters(), lr=1e-3)
    judge = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.5)

    def step(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        judge.zero_grad()
        fake = generator(torch.randn(real.shape[0], 16))
        verdict = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        verdict.backward()
        judge.step()
        make.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        make.step()
        make.zero_grad()
        judge.zero_grad()
        return verdict, loss

    return Case(step, [generator, critic], [make, judge], lambda: (torch.randn(128, 256),))


CASES: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(from_zoo, name) for name in ZOO},
    "gpt_clipped_bf16": functools.partial(from_zoo, "gpt", clip=1.0, amp=True),
    "resnet_bf16": functools.partial(from_zoo, "resnet", amp=True),
    **{f"optimizer_{name}": functools.partial(optimizer_case, make) for name, make in OPTIMIZERS.items()},
    "llama": functools.partial(language_model, "llama"),
    "bert": functools.partial(language_model, "bert"),
    "gan": gan,
    "accumulation_inside": cases.accumulation_inside,
    "accumulation_across": cases.accumulation_across,
    "gradients_left": cases.gradients_left,
    "moving_average": cases.moving_average,
    "autocast": cases.autocast,
    "checkpointed": functools.partial(cases.gpt, checkpointing="plain"),
    "lstm": functools.partial(cases.recurrent, torch.nn.LSTM),
    "inference": cases.inference,
    "mutated_input": cases.mutated_input,
    "rebinding": cases.rebinding,
    "shared_memory": more.shared_memory,
    "two_passes": more.two_passes,
}


def visible_tensors(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    for m, model in enumerate(case.models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield f"{m}.{name}", tensor
            if tensor.grad is not None:
                yield f"{m}.{name}.grad", tensor.grad
    for o, optimizer in enumerate(case.optimizers):
        for number, entries in optimizer.state_dict()["state"].items():
            for name, item in entries.items():
                yield f"{o}.{number}.{name}", torch.as_tensor(item)


def assert_same(ours: Any, theirs: Any) -> None:
    for actual, expected in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(actual, expected.detach())
        else:
            assert actual == expected


@functools.cache
def smallest_of(make: Callable[[], Case], split: Literal["exact", "off"] = "exact") -> int:
    torch.manual_seed(1234)
    case = make()
    return outofcore.smallest_budget(
        case.step,
        list(case.models),
        list(case.optimizers),
        inputs=case.batch(),
        split=split,
        **({"kwargs": case.kwargs} if case.kwargs else {}),
    )


@functools.cache
def budgets_of(make: Callable[[], Case], split: Literal["exact", "off"] = "exact") -> tuple[int, int]:
    """Return the smallest budget, and one for a step in core."""
    torch.manual_seed(1234)
    case = make()
    with outofcore.compile(case.step, list(case.models), list(case.optimizers), budget="64GiB") as step:
        step(*case.batch(), **case.kwargs)
        return smallest_of(make, split), in_core_budget(step.captured.graph, step.costs)


def small_step(
    width: int = 64,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 32))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer


def captured_small_step(width: int = 64) -> Captured:
    step, model, optimizer = small_step(width)
    return rewrite_for_lowest_memory(capture_step(step, [model], [optimizer], (torch.ones(8, 32),), {}))
