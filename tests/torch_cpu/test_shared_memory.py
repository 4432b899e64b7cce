"""Tests of tensors in shared memory, such as files: their addresses and contents stay plain PyTorch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outofcore

WIDTH = 192  # a square matrix takes 144 KiB
COUNT = WIDTH * WIDTH
OFFSET = 1024 + 12  # elements before the tensor in its file

Place = Callable[[Path, Tensor], Tensor]


def map_file(mode: str) -> Place:
    def place(file: Path, values: Tensor) -> Tensor:
        np.concatenate([np.zeros(OFFSET, np.float32), values.detach().numpy().ravel()]).tofile(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only arrays
            whole = torch.from_numpy(np.memmap(file, np.float32, mode=mode))  # type: ignore[call-overload]
        return whole[OFFSET:].view(values.shape)

    return place


def from_file(file: Path, values: Tensor) -> Tensor:
    map_file("r+")(file, values)
    whole = torch.from_file(str(file), shared=True, size=OFFSET + values.numel())
    return whole[OFFSET:].view(values.shape)


def map_slice(file: Path, values: Tensor) -> Tensor:
    map_file("r+")(file, values)
    part = np.memmap(file, np.float32, mode="r+", offset=4 * OFFSET, shape=tuple(values.shape))
    return torch.from_numpy(part)


PRIVATE = map_file("c")
WRITABLE: dict[str, Place] = {"memmap": map_file("r+"), "from_file": from_file, "sliced": map_slice}


class Model(nn.Module):
    def __init__(self, place: Place, file: Path, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))
        self.seen: Tensor | None = None
        if kind == "parameter":
            self.layers[1].weight = nn.Parameter(place(file, self.layers[1].weight))
        if kind == "frozen":
            self.layers[1].weight = nn.Parameter(place(file, self.layers[1].weight), requires_grad=False)
        if kind == "buffer":
            self.mean = place(file, torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        self.mean.mul_(0.9).add_(y.detach(), alpha=0.1)
        return (y + self.mean.detach().clone()).square().mean()


def run_steps(step: Callable[[Tensor], Tensor], x: Tensor, between: Callable[[Tensor], object]) -> list[float]:
    losses = []
    for _ in range(4):
        losses.append(step(x).item())
        between(x)
    return losses


Callback = Callable[[Tensor], object]
Optimizers = list[torch.optim.Optimizer]


def make_step(model: Model, optimizers: Optimizers) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def train_plain(model: Model, x: Tensor, optimizers: Optimizers, between: Callback = lambda x: None) -> list[float]:
    step = make_step(model, optimizers)
    return run_steps(lambda x: step(x).detach(), x, between)


def train_eagerly(model: Model, x: Tensor, optimizers: Optimizers, between: Callback = lambda x: None) -> list[float]:
    with outofcore.budget("1200KiB", model, home="host") as run:
        losses = train_plain(model, x, optimizers, between)
    assert run.stats.evictions > 0 or model.mean.is_shared()  # shared tensors are not moved
    return losses


def train_compiled(
    model: Model, x: Tensor, optimizers: Optimizers, between: Callback = lambda x: None, **options: Any
) -> list[float]:
    compiled_step = outofcore.compile(
        make_step(model, optimizers), model, optimizers, budget="1800KiB", home="host", cache=False, **options
    )
    with compiled_step:
        return run_steps(compiled_step, x, between)


def train_dynamic(model: Model, x: Tensor, optimizers: Optimizers, between: Callback = lambda x: None) -> list[float]:
    return train_compiled(model, x, optimizers, between, dynamic=True)


def train_and_read(train: Any, place: Place, file: Path, kind: str) -> tuple[list[float], list[Tensor], bytes]:
    model = Model(place, file, kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    x = torch.linspace(-1, 1, COUNT).view(WIDTH, WIDTH)
    if kind == "input":
        x = place(file, x)
    if kind == "state":
        weight = model.layers[1].weight
        optimizer.state[weight]["momentum_buffer"] = place(file, torch.ones_like(weight))
    addresses = [t.data_ptr() for t in (model.layers[1].weight, model.mean, x)]
    losses = train(model, x, [optimizer])
    index = {"parameter": 0, "frozen": 0, "buffer": 1, "input": 2}.get(kind)
    if index is not None and place is not PRIVATE:  # the tensor was not moved
        assert (model.layers[1].weight, model.mean, x)[index].data_ptr() == addresses[index]
    final_tensors = [t.detach().clone() for t in model.state_dict().values()]
    final_tensors += [t.clone() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return losses, final_tensors, file.read_bytes()


@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer", "input", "state"])
@pytest.mark.parametrize("train", [train_eagerly, train_compiled, train_dynamic])
def test_file_gets_the_bytes_of_plain_pytorch(tmp_path: Path, train: Any, kind: str) -> None:
    for name, place in WRITABLE.items() if kind == "parameter" else [("memmap", WRITABLE["memmap"])]:
        theirs = train_and_read(train_plain, place, tmp_path / f"{name} of theirs", kind)
        ours = train_and_read(train, place, tmp_path / f"{name} of ours", kind)
        assert ours[0] == theirs[0]
        assert all(map(torch.equal, ours[1], theirs[1]))
        assert ours[2] == theirs[2]


@pytest.mark.parametrize("train", [train_eagerly, train_compiled, train_dynamic])
@pytest.mark.parametrize(("place", "kind"), [(PRIVATE, "parameter"), (map_file("r"), "frozen")], ids=["c", "r"])
def test_read_only_or_private_file_stays_unchanged(tmp_path: Path, train: Any, place: Place, kind: str) -> None:
    theirs = train_and_read(train_plain, place, tmp_path / "theirs", kind)
    ours = train_and_read(train, place, tmp_path / "ours", kind)
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))
    assert ours[2] == theirs[2]
    assert not np.fromfile(tmp_path / "ours", np.float32)[:OFFSET].any()


def _serve_model(model: nn.Module, requests: Any, replies: Any) -> None:
    """On each request, send the sums of the model's tensors, then change it."""
    while requests.get():
        replies.put([t.sum(0) for t in model.state_dict().values()])
        with torch.no_grad():
            model.layers[0].weight.mul_(0.5)  # type: ignore[index, union-attr]
        replies.put(None)


@pytest.mark.parametrize("train", [train_eagerly, train_compiled, train_dynamic])
def test_other_process_reads_and_changes_a_shared_model(train: Any) -> None:
    results: list[list[Any]] = []
    for run in (train_plain, train):
        model = Model(lambda file, values: values, Path(), "nothing")
        model.share_memory()
        context = torch.multiprocessing.get_context("spawn")
        requests, replies = context.SimpleQueue(), context.SimpleQueue()
        process = context.Process(target=_serve_model, args=(model, requests, replies))
        process.start()
        values_read: list[Any] = []

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def ask(
            x: Tensor, requests: Any = requests, replies: Any = replies, values_read: list[Any] = values_read
        ) -> None:
            requests.put(True)
            values_read.extend(t.tolist() for t in replies.get())
            replies.get()

        x = torch.linspace(-1, 1, COUNT).view(WIDTH, WIDTH)
        values_read.append(run(model, x, [optimizer], between=ask))
        requests.put(False)
        process.join()
        assert all(t.is_shared() for t in model.state_dict().values())
        results.append(values_read)
    assert results[0] == results[1]


def test_tensor_moved_to_a_file_between_steps_is_trained_there(tmp_path: Path) -> None:
    results = []
    for run in (train_plain, train_compiled):
        model = Model(lambda file, values: values, Path(), "nothing")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        file, moved = tmp_path / run.__name__, []

        def move(x: Tensor, model: Model = model, file: Path = file, moved: list[Tensor] = moved) -> None:
            if not moved:
                moved.append(map_file("r+")(file, model.layers[1].weight.detach().clone()))
                model.layers[1].weight.data = moved[0]

        x = torch.linspace(-1, 1, COUNT).view(WIDTH, WIDTH)
        results.append((run(model, x, [optimizer], between=move), file.read_bytes()))
        assert model.layers[1].weight.data_ptr() == moved[0].data_ptr()
    assert results[0] == results[1]
