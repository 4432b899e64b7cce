"""The pairs of model and budget in the record, by model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from record_models import Training, shared_model, transformers_model, zoo_model

# Compiled by ``outofcore.compile``, run as a loop under ``outofcore.budget``, or planned without a home and not run.
RunMode = Literal["compile", "budget", "plan without a home"]


@dataclass(frozen=True)
class Pair:
    """A budget for a model, and how its step runs.

    Attributes:
        home: "host", "disk", or e.g. "host 4MiB, disk" for a limited host memory before a disk.
        search: effort of ``auto``: ``planning.QUICK``, or its defaults.
        recompute: whether a loop may recompute saved tensors.
    """

    mode: RunMode
    budget: str
    home: str = "disk"
    search: Literal["quick", "full"] = "quick"
    split: Literal["exact", "close", "off"] = "exact"
    kernels: Literal["eager", "inductor"] = "eager"
    recompute: bool = False

    @property
    def name(self) -> str:
        """The description of the pair, unique within its model."""
        parts = [self.mode, self.budget]
        if self.mode == "compile":
            parts.append(f"home {self.home}")
        if self.search == "full":
            parts.append("full search")
        if self.split != "exact":
            parts.append(f"split {self.split}")
        if self.kernels != "eager":
            parts.append(f"kernels {self.kernels}")
        if self.recompute:
            parts.append("with recomputation")
        return ", ".join(parts)


@dataclass(frozen=True)
class Group:
    """A model with its pairs, one file of the record.

    ``make`` builds a new training; for several processes it takes the rank and a wrapper of the model.
    """

    make: Callable[..., Training]
    pairs: tuple[Pair, ...]
    processes: int = 1


_GPT: dict[str, Any] = {"layers": 2, "width": 128, "heads": 4, "context": 128, "batch": 4}
_PICTURES: dict[str, Any] = {"classes": 10, "images": "generated"}

# Slowest first, so that no long one starts last.
GROUPS: Mapping[str, Group] = {
    "densenet121": Group(
        partial(zoo_model, "densenet121", size=64, batch=4, optimizer="momentum", **_PICTURES),
        (Pair("compile", "54MiB"), Pair("plan without a home", "80MiB")),
    ),
    "gpt": Group(
        partial(zoo_model, "gpt", **_GPT),
        (
            Pair("compile", "32MiB"),
            Pair("compile", "12MiB"),
            Pair("compile", "12MiB", search="full"),
            Pair("compile", "5MiB", home="host"),
            Pair("compile", "8MiB", home="host 4MiB, disk"),
            Pair("budget", "12MiB"),
            Pair("budget", "8MiB", recompute=True),
            Pair("plan without a home", "12MiB"),
        ),
    ),
    "vgg16": Group(
        partial(zoo_model, "vgg16", size=32, batch=2, optimizer="sgd", **_PICTURES),
        (Pair("compile", "64MiB", home="host"),),
    ),
    "resnet18": Group(
        partial(zoo_model, "resnet", depth=18, size=64, batch=4, optimizer="momentum", **_PICTURES),
        (
            Pair("compile", "160MiB", home="host"),
            Pair("compile", "64MiB"),
            Pair("compile", "32MiB", split="off"),
            Pair("compile", "8MiB", home="host"),
            Pair("budget", "72MiB"),
            Pair("plan without a home", "108MiB"),
            Pair("plan without a home", "106MiB", search="full"),
        ),
    ),
    "gpt-large-vocabulary": Group(
        partial(zoo_model, "gpt", layers=1, width=128, heads=4, context=128, batch=16, vocab=2048),
        (Pair("compile", "24MiB"), Pair("compile", "24MiB", split="close"), Pair("compile", "100MiB", split="close")),
    ),
    "unet3d": Group(
        partial(zoo_model, "unet3d", size=16, base=8, batch=2),
        (
            Pair("compile", "14MiB", search="full"),
            Pair("compile", "7MiB"),
            Pair("budget", "12MiB"),
        ),
    ),
    "gpt2": Group(
        partial(transformers_model, "gpt2"),
        (
            Pair("compile", "8MiB", search="full"),
            Pair("compile", "24MiB", kernels="inductor"),
            Pair("compile", "8MiB", kernels="inductor"),
            Pair("budget", "10MiB"),
        ),
    ),
    "bert": Group(
        partial(transformers_model, "bert"),
        (Pair("compile", "6MiB", search="full"), Pair("plan without a home", "11MiB")),
    ),
    "llama": Group(
        partial(transformers_model, "llama"),
        (
            Pair("compile", "7MiB", home="host"),
            Pair("compile", "9MiB", kernels="inductor"),
            Pair("budget", "9MiB"),
        ),
    ),
    "t5": Group(partial(transformers_model, "t5"), (Pair("compile", "11MiB"), Pair("budget", "14MiB"))),
    "shared": Group(
        shared_model,
        (Pair("compile", "32MiB", home="host"), Pair("compile", "12MiB"), Pair("compile", "7MiB", search="full")),
        processes=2,
    ),
    "gpt-keeps-gradients": Group(
        partial(zoo_model, "gpt", keeps_gradients=True, **_GPT), (Pair("compile", "10MiB"), Pair("budget", "14MiB"))
    ),
    "whisper": Group(partial(transformers_model, "whisper"), (Pair("compile", "10MiB"), Pair("budget", "8MiB"))),
    "vit": Group(
        partial(transformers_model, "vit"),
        (Pair("compile", "6MiB", home="host", search="full"), Pair("budget", "4MiB")),
    ),
}
