"""Tests of steps that read values which do not depend on their data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from effort import some_of

import outofcore
from outofcore._torch_internals import TorchDispatchMode
from outofcore.capture import capture_step
from outofcore.capture.captured import Captured
from outofcore.errors import CaptureError


def capture(change: Callable[[torch.Tensor], torch.Tensor]) -> Captured:
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = change(model(x)).square().mean()
        loss.backward()
        return loss.detach()

    captured = capture_step(step, [model], [], (torch.ones(6, 4),), {})
    for effect in captured.effects:  # the step's side effects on Python objects
        effect()
    return captured


def last_position(x: torch.Tensor) -> int:
    positions = torch.arange(x.shape[0], device=x.device)[None].expand(2, -1)
    return int((positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)[:, -1].max())


KNOWN: list[tuple[Callable[[torch.Tensor], Any], Any]] = [
    (last_position, 0),
    (lambda x: torch.ones_like(x, dtype=torch.long).sum().item(), 24),
    (lambda x: bool((torch.tensor([3, 1, 2]).sort()[0] == torch.arange(1, 4)).all()), True),
    (lambda x: x.new_full((2,), 7, dtype=torch.int32)[1].item(), 7),
    (lambda x: [1, 2, 3][torch.tensor(2)], 3),
    (lambda x: torch.arange(2, x.dim() + 3).tolist(), [2, 3, 4]),
    (lambda x: torch.zeros(3).sum().item(), 0.0),
    (lambda x: torch.tensor([1.5, 2.5]).tolist(), [1.5, 2.5]),
    (lambda x: [rate.item() for rate in torch.linspace(0, 0.3, 4)], torch.linspace(0, 0.3, 4).tolist()),
    (lambda x: float(torch.arange(x.shape[0]).float().mean()), 2.5),
    (lambda x: int((torch.tensor(x.shape[0]) / 4).floor()), 1),
    (lambda x: 1 if torch.ones_like(x).sum() > 23.5 else 2, 1),
    (lambda x: [int(i) for i in torch.arange(3)], [0, 1, 2]),
    (lambda x: 2 in torch.arange(3), True),
    (lambda x: list(range(torch.tensor(3))), [0, 1, 2]),
    (lambda x: torch.arange(3).numpy().tolist(), [0, 1, 2]),
    (lambda x: np.asarray(torch.eye(2)).sum(), 2.0),
    (lambda x: f"{torch.tensor(3.25):.1f}", "3.2"),
    (lambda x: repr(torch.arange(3)), "tensor([0, 1, 2])"),
    (lambda x: complex(torch.tensor(1 + 2j)), 1 + 2j),
    (lambda x: torch.equal(torch.arange(2), torch.tensor([0, 1])), True),
    (lambda x: torch.allclose(torch.ones(3), torch.ones(3) + 1e-9), True),
    (lambda x: torch.zeros(4, dtype=torch.long).add_(3).sum().item(), 12),
    (lambda x: torch.empty(3).fill_(2).tolist(), [2.0, 2.0, 2.0]),
    (lambda x: torch.add(torch.ones(2), torch.ones(2), out=torch.empty(2)).tolist(), [2.0, 2.0]),
    (lambda x: torch.tensor([0, 1, 1]).nonzero().tolist(), [[1], [2]]),
    (lambda x: torch.arange(4)[torch.arange(4) > 1].tolist(), [2, 3]),
    (lambda x: torch.tensor([3, 1, 3]).unique().tolist(), [1, 3]),
    (lambda x: torch.arange(2).repeat_interleave(torch.tensor([1, 2])).tolist(), [0, 1, 1]),
    (lambda x: x.new_tensor([1.0, 2.0]).tolist(), [1.0, 2.0]),
    (lambda x: torch.full((2,), x.shape[1]).tolist(), [4, 4]),
]


@pytest.mark.parametrize(("look", "value"), KNOWN)
def test_values_independent_of_data_are_known(look: Callable[[torch.Tensor], Any], value: Any) -> None:
    values: list[Any] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        values.append(look(x))
        return x * 2 if values[-1] == value else x

    captured = capture(change)
    assert values == [value]
    # Ops whose results were only read are no part of the step.
    assert all("arange" not in op.name and "cumsum" not in op.name for op in captured.graph.ops)


UNKNOWN: list[Callable[[torch.Tensor], Any]] = [
    lambda x: (x > 0).any().item(),
    lambda x: (torch.ones(3) * x.mean()).sum().item(),
    lambda x: x.tolist()[0][0],
    lambda x: torch.empty(3)[:2].fill_(1).sum().item(),
    lambda x: torch.rand(2).tolist()[0],
    lambda x: torch.nn.functional.dropout(torch.ones(3)).tolist()[0],
    lambda x: float(torch.arange(3).data_ptr()),
    lambda x: torch.zeros(2).copy_(x[0, :2]).tolist()[0],
    lambda x: torch.ones(2, device="meta").sum().item(),
    lambda x: torch.randint(0, 3, (2,)).max().item(),
    lambda x: torch.arange(6).mul_((x[:, 0] > 0).long()).sum().item(),
    lambda x: torch.zeros(4, dtype=torch.long).random_(0, 5)[0].item(),
    lambda x: torch.empty(3, dtype=torch.long).sum().item(),
    lambda x: (torch.arange(6) + x.argmax()).max().item(),
]


@pytest.mark.parametrize("look", UNKNOWN)
def test_values_dependent_on_data_or_chance_are_refused(look: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(lambda x: x * look(x))


def test_written_values_are_no_longer_known() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(6, dtype=torch.long)
        view = counts[2:]
        assert view.sum().item() == 0
        counts.add_((x[:, 0] > 0).long())
        return x * view.sum().item()

    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(change)


def changed_by_data(x: torch.Tensor) -> float:
    tensor = torch.zeros(2)
    tensor.data = x[0, :2].detach()
    return tensor.sum().item()


class Halving(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.div_(2)
            parameter.grad.mul_(2)


def test_value_of_assigned_data_is_not_known() -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(lambda x: x * changed_by_data(x))


def test_gradients_are_not_known_after_an_optimizer_step() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = Halving(model.parameters())
    read: list[str] = []

    def step(x: torch.Tensor) -> None:
        model.bias.grad = torch.ones(4)
        assert model.bias.grad[0].item() == 1.0
        optimizer.step()
        read.append(f"{model.bias.grad[0].item()}")

    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture_step(step, [model], [optimizer], (torch.ones(6, 4),), {})
    assert read == []


@pytest.mark.parametrize("changes", ["the array", "the tensor"])
def test_write_to_memory_shared_with_numpy_is_refused(changes: str) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(3)
        array = counts.numpy()  # shares memory
        if changes == "the array":
            array[0] = 1
        else:
            counts.add_(1)
        return x * counts.sum()

    with pytest.raises(
        CaptureError,
        match=r"the step writes to a tensor after \.numpy\(\), or to the array.*tensor.clone\(\)",
    ) as caught:
        capture(change)
    assert caught.value.location.startswith(__file__)


def random_program(seed: int) -> Callable[[], list[Any]]:
    """Return a random program of in-place ops, views and reads on known tensors."""

    def run() -> list[Any]:
        choose = random.Random(seed)
        tensors = [torch.arange(6.0), torch.ones(2, 3), torch.empty(4).fill_(3)]
        read: list[Any] = []
        for _ in range(40):
            target, source = choose.choice(tensors), choose.choice(tensors)
            match choose.randrange(9):
                case 0:
                    tensors.append(target + 1)
                case 1:
                    tensors.append(target[choose.randrange(2) :])
                case 2:
                    tensors.append(target.t() if target.dim() == 2 else target.flip(0))
                case 3:
                    target.add_(choose.randrange(5))
                case 4:
                    target.mul_(source.sum() / 8)
                case 5:
                    target.fill_(choose.randrange(5))
                case 6:
                    target[0] = source.sum() if choose.random() < 0.5 else 7
                case 7:
                    torch.add(target, 1, out=target)
                case _:
                    read.append(target.tolist())
        return [*read, *[tensor.tolist() for tensor in tensors]]

    return run


@pytest.mark.parametrize("seed", some_of(range(30), range(8)))
def test_known_values_match_plain_pytorch_after_writes(seed: int) -> None:
    results: list[str] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        results.append(repr(random_program(seed)()))
        return x

    capture(change)
    assert results == [repr(random_program(seed)())]


class Dice(torch.nn.Module):
    """A Dice loss as image models write it, with axes from a tensor and sizes from known masks."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.deep = torch.nn.Conv1d(1, 3, 3, padding=1), torch.nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.flat if x.dim() == 3 else self.deep)(x)
        y = y[:, torch.tensor([0, 1, 1]).nonzero().flatten()] * (1 + torch.linspace(0, 0.3, 4).tolist()[2])
        if torch.tensor(y.shape).prod() > 100:
            y = y.sigmoid()
        axes = torch.arange(2, len(y.shape)).tolist()
        return (1 - y.sum(dim=axes) / (y.square().sum(dim=axes) + 1e-5)).mean()


def test_shape_dependent_step_is_exact_for_several_shapes() -> None:
    def run(*, compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Dice()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            return loss.detach()

        function = outofcore.compile(step, model, budget="8MiB", home="host") if compiled else step
        losses = [function(torch.randn(shape)) for shape in ((2, 1, 9), (2, 1, 8, 8), (2, 1, 40), (2, 1, 9))]
        if isinstance(function, outofcore.Step):
            function.close()
        return [*losses, *[parameter.grad for parameter in model.parameters() if parameter.grad is not None]]

    assert all(map(torch.equal, run(compiled=True), run(compiled=False)))


def test_known_tensors_do_not_look_like_fake_tensors() -> None:
    answers: list[bool] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        for tensor in (torch.arange(3), x):
            answers.append(isinstance(tensor, torch._subclasses.FakeTensor))
        return x

    fake_class = torch._subclasses.FakeTensor
    capture(change)
    assert answers == [False, True]
    assert torch._subclasses.FakeTensor is fake_class


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_transformers_model_is_captured_with_its_own_attention() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 64, (2, 16))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    with _Count() as count:
        step(ids)
    captured = capture_step(step, [model], [], (ids,), {})
    ops = Counter(op.name for op in captured.graph.ops)
    for names in ("scaled_dot_product", "repeat", "where", "masked", "expand", "logical"):
        plain = {name: number for name, number in count.calls.items() if names in name and "expand" not in name}
        assert {name: ops[name] for name in plain} == plain
    assert any("scaled_dot_product" in name for name in ops)
