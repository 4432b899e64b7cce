"""Facts that must be equal in all processes and over time, so that a training gives the same bits."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outofcore import OpenHome
from outofcore.errors import InputError
from outofcore.logical_workers.gradients import GradientLayout, PieceBuffers, TensorRows


def kernel_facts(workers: int, seed: int, gpu: torch.device | None) -> dict[str, str]:
    """Return the settings, versions and hardware that decide the bits of results, by name."""
    facts = {
        "logical workers": str(workers),
        "seed": str(seed),
        # CPU kernels split sums by the number of threads, and the instruction set decides their width.
        "threads (torch.get_num_threads)": str(torch.get_num_threads()),
        "PyTorch": str(torch.__version__),
        "device": "cpu" if gpu is None else gpu.type,
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if gpu is None:
        return facts | {
            "instructions of the processor": torch.backends.cpu.get_cpu_capability(),
            "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
            "matmul precision": _matmul_precision(torch.backends.mkldnn),
        }
    return facts | {
        "GPU": torch.cuda.get_device_name(gpu),
        "CUDA": str(torch.version.cuda),
        "cuDNN": f"{torch.backends.cudnn.version()} enabled {torch.backends.cudnn.enabled}, "
        f"benchmark {torch.backends.cudnn.benchmark}, deterministic {torch.backends.cudnn.deterministic}",
        "matmul precision": _matmul_precision(torch.backends.cuda),
    }


def _matmul_precision(backend: Any) -> str:
    return str(getattr(getattr(backend, "matmul", None), "fp32_precision", None))


def model_facts(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], home: OpenHome) -> dict[str, str]:
    """Return facts about models and optimizers that must be equal in all processes, by name."""
    names: list[str] = []
    contents, buffers = 0, PieceBuffers(1)
    for number, model in enumerate(models):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            names.append(f"{number}.{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
            tensors = [tensor.detach().contiguous()]
            layout, rows = GradientLayout(tensors), TensorRows(tensors, home)
            for spans in layout.spans:
                elements = buffers.row(0, layout, spans)
                rows.read(spans[0], elements)
                contents = zlib.crc32(elements.view(torch.uint8).numpy().data, contents)
    settings = [
        [type(optimizer).__name__, *({n: v for n, v in g.items() if n != "params"} for g in optimizer.param_groups)]
        for optimizer in optimizers
    ]
    return {
        "names and shapes of parameters and buffers": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
        "values of parameters and buffers": f"{contents:08x}",
        "optimizer and its settings": str(settings),
    }


_ADVICE = {
    "threads "
    "(torch.get_num_threads)": "call torch.set_num_threads() with the same number in all processes, first of all: "
    "torchrun gives each of several processes one thread, and a single process one thread per core",
    "values of parameters and buffers": "build the model from the same seed in all processes: torch.manual_seed(0)",
}


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """Return the first fact that differs, as (name, my value, their value, advice); None if all are equal."""
    for name in dict.fromkeys((*mine, *theirs)):
        my_value, their_value = mine.get(name, "unknown"), theirs.get(name, "unknown")
        if my_value != their_value:
            return name, my_value, their_value, _ADVICE.get(name, "make them the same")
    return None


def check_facts_match(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise ``InputError`` for the first fact in which a process differs from process 0."""
    for rank, rank_facts in enumerate(facts):
        mismatch = first_difference(facts[0], rank_facts)
        if mismatch is not None:
            name, first_value, value, advice = mismatch
            raise InputError(f"{name}: process 0 has {first_value}, but process {rank} has {value}; {advice}")
