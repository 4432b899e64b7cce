"""Tensors in memory that others see, such as a file: it stays where it is, and has what PyTorch leaves there."""

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

WIDTH = 192  # a square of it has 144 KiB
COUNT = WIDTH * WIDTH
OFFSET = 1024 + 12  # elements before the tensor in its file

Place = Callable[[Path, Tensor], Tensor]


def mapped(mode: str) -> Place:
    def place(file: Path, values: Tensor) -> Tensor:
        np.concatenate([np.zeros(OFFSET, np.float32), values.detach().numpy().ravel()]).tofile(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is only read
            whole = torch.from_numpy(np.memmap(file, np.float32, mode=mode))  # type: ignore[call-overload]
        return whole[OFFSET:].view(values.shape)

    return place


def from_file(file: Path, values: Tensor) -> Tensor:
    mapped("r+")(file, values)
    whole = torch.from_file(str(file), shared=True, size=OFFSET + values.numel())
    return whole[OFFSET:].view(values.shape)


def sliced(file: Path, values: Tensor) -> Tensor:
    mapped("r+")(file, values)
    part = np.memmap(file, np.float32, mode="r+", offset=4 * OFFSET, shape=tuple(values.shape))
    return torch.from_numpy(part)


PRIVATE = mapped("c")
WRITABLE: dict[str, Place] = {"memmap": mapped("r+"), "from_file": from_file, "sliced": sliced}


class Model(nn.Module):
    def __init__(self, place: Place, file: Path, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))
        self.seen: Tensor | None = None
        if what == "parameter":
            self.layers[1].weight = nn.Parameter(place(file, self.layers[1].weight))
        if what == "frozen":
            self.layers[1].weight = nn.Parameter(place(file, self.layers[1].weight), requires_grad=False)
        if what == "buffer":
            self.mean = place(file, torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        self.mean.mul_(0.9).add_(y.detach(), alpha=0.1)
        return (y + self.mean.detach().clone()).square().mean()


def each_step(step: Callable[[Tensor], Tensor], x: Tensor, between: Callable[[Tensor], object]) -> list[float]:
    losses = []
    for _ in range(4):
        losses.append(step(x).item())
        between(x)
    return losses


Between = Callable[[Tensor], object]
Optimizers = list[torch.optim.Optimizer]


def step_of(model: Model, optimizers: Optimizers) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def plain(model: Model, x: Tensor, optimizers: Optimizers, between: Between = lambda x: None) -> list[float]:
    step = step_of(model, optimizers)
    return each_step(lambda x: step(x).detach(), x, between)


def followed(model: Model, x: Tensor, optimizers: Optimizers, between: Between = lambda x: None) -> list[float]:
    with outofcore.budget("1200KiB", model, home="host") as run:
        losses = plain(model, x, optimizers, between)
    assert run.stats.evictions > 0 or model.mean.is_shared()  # of which nothing is moved then
    return losses


def compiled(
    model: Model, x: Tensor, optimizers: Optimizers, between: Between = lambda x: None, **options: Any
) -> list[float]:
    made = outofcore.compile(
        step_of(model, optimizers), model, optimizers, budget="1800KiB", home="host", cache=False, **options
    )
    with made:
        return each_step(made, x, between)


def by_calls(model: Model, x: Tensor, optimizers: Optimizers, between: Between = lambda x: None) -> list[float]:
    return compiled(model, x, optimizers, between, dynamic=True)


def trained(train: Any, place: Place, file: Path, what: str) -> tuple[list[float], list[Tensor], bytes]:
    """What a loop gives and leaves, in the model and in the file; and what it saw there as it ran."""
    model = Model(place, file, what)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    x = torch.linspace(-1, 1, COUNT).view(WIDTH, WIDTH)
    if what == "input":
        x = place(file, x)
    if what == "state":
        weight = model.layers[1].weight
        optimizer.state[weight]["momentum_buffer"] = place(file, torch.ones_like(weight))
    addresses = [t.data_ptr() for t in (model.layers[1].weight, model.mean, x)]
    losses = train(model, x, [optimizer])
    which = {"parameter": 0, "frozen": 0, "buffer": 1, "input": 2}.get(what)
    if which is not None and place is not PRIVATE:  # it has not been moved
        assert (model.layers[1].weight, model.mean, x)[which].data_ptr() == addresses[which]
    left = [t.detach().clone() for t in model.state_dict().values()]
    left += [t.clone() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return losses, left, file.read_bytes()


@pytest.mark.parametrize("what", ["parameter", "frozen", "buffer", "input", "state"])
@pytest.mark.parametrize("train", [followed, compiled, by_calls])
def test_file_gets_the_bytes_of_plain_pytorch(tmp_path: Path, train: Any, what: str) -> None:
    for name, place in WRITABLE.items() if what == "parameter" else [("memmap", WRITABLE["memmap"])]:
        theirs = trained(plain, place, tmp_path / f"{name} of theirs", what)
        ours = trained(train, place, tmp_path / f"{name} of ours", what)
        assert ours[0] == theirs[0]
        assert all(map(torch.equal, ours[1], theirs[1]))
        assert ours[2] == theirs[2]


@pytest.mark.parametrize("train", [followed, compiled, by_calls])
@pytest.mark.parametrize(("place", "what"), [(PRIVATE, "parameter"), (mapped("r"), "frozen")], ids=["c", "r"])
def test_read_only_or_private_file_stays_unchanged(tmp_path: Path, train: Any, place: Place, what: str) -> None:
    theirs = trained(plain, place, tmp_path / "theirs", what)
    ours = trained(train, place, tmp_path / "ours", what)
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))
    assert ours[2] == theirs[2]
    assert not np.fromfile(tmp_path / "ours", np.float32)[:OFFSET].any()


def _other_process(model: nn.Module, asked: Any, told: Any) -> None:
    """Tell how the model is, whenever asked to, and change it then."""
    while asked.get():
        told.put([t.sum(0) for t in model.state_dict().values()])
        with torch.no_grad():
            model.layers[0].weight.mul_(0.5)  # type: ignore[index, union-attr]
        told.put(None)


@pytest.mark.parametrize("train", [followed, compiled, by_calls])
def test_other_process_reads_and_changes_a_shared_model(train: Any) -> None:
    results: list[list[Any]] = []
    for how in (plain, train):
        model = Model(lambda file, values: values, Path(), "nothing")
        model.share_memory()
        processes = torch.multiprocessing.get_context("spawn")
        asked, told = processes.SimpleQueue(), processes.SimpleQueue()
        other = processes.Process(target=_other_process, args=(model, asked, told))
        other.start()
        seen: list[Any] = []

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def ask(x: Tensor, asked: Any = asked, told: Any = told, seen: list[Any] = seen) -> None:
            asked.put(True)
            seen.extend(t.tolist() for t in told.get())
            told.get()

        x = torch.linspace(-1, 1, COUNT).view(WIDTH, WIDTH)
        seen.append(how(model, x, [optimizer], between=ask))
        asked.put(False)
        other.join()
        assert all(t.is_shared() for t in model.state_dict().values())
        results.append(seen)
    assert results[0] == results[1]


def test_tensor_moved_to_a_file_between_steps_is_trained_there(tmp_path: Path) -> None:
    left = []
    for how in (plain, compiled):
        model = Model(lambda file, values: values, Path(), "nothing")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        file, moved = tmp_path / how.__name__, []

        def move(x: Tensor, model: Model = model, file: Path = file, moved: list[Tensor] = moved) -> None:
            if not moved:
                moved.append(mapped("r+")(file, model.layers[1].weight.detach().clone()))
                model.layers[1].weight.data = moved[0]

        x = torch.linspace(-1, 1, COUNT).view(WIDTH, WIDTH)
        left.append((how(model, x, [optimizer], between=move), file.read_bytes()))
        assert model.layers[1].weight.data_ptr() == moved[0].data_ptr()
    assert left[0] == left[1]
