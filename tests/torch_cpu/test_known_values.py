"""What does not depend on data may be looked at in a step, which then goes the way that plain PyTorch goes."""

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
    for effect in captured.effects:  # what the step has noted down outside of itself
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
def test_what_follows_from_shapes_is_known(look: Callable[[torch.Tensor], Any], value: Any) -> None:
    seen: list[Any] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        seen.append(look(x))
        return x * 2 if seen[-1] == value else x

    captured = capture(change)
    assert seen == [value]
    # What was only looked at is no part of the step.
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
def test_what_depends_on_data_or_chance_is_not(look: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(lambda x: x * look(x))


def test_what_was_written_is_known_no_more() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(6, dtype=torch.long)
        view = counts[2:]
        assert view.sum().item() == 0
        counts.add_((x[:, 0] > 0).long())
        return x * view.sum().item()

    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(change)


def changed_by_data(x: torch.Tensor) -> float:
    known = torch.zeros(2)
    known.data = x[0, :2].detach()
    return known.sum().item()


class Halving(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.div_(2)
            parameter.grad.mul_(2)


def test_other_memory_is_not_known() -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(lambda x: x * changed_by_data(x))


def test_gradients_are_not_known_once_an_optimizer_has_had_them() -> None:
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
def test_an_array_that_shares_memory_is_not_written(changes: str) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(3)
        array = counts.numpy()  # lent
        if changes == "the array":
            array[0] = 1
        else:
            counts.add_(1)
        return x * counts.sum()

    with pytest.raises(
        CaptureError, match=r"the step changes a tensor, or the NumPy array.*tensor.clone\(\)"
    ) as caught:
        capture(change)
    assert caught.value.location.startswith(__file__)


def program(seed: int) -> Callable[[], list[Any]]:
    """A random program of operators in place, views and reads, on tensors that are known."""

    def run() -> list[Any]:
        choose = random.Random(seed)
        tensors = [torch.arange(6.0), torch.ones(2, 3), torch.empty(4).fill_(3)]
        read: list[Any] = []
        for _ in range(40):
            one, other = choose.choice(tensors), choose.choice(tensors)
            match choose.randrange(9):
                case 0:
                    tensors.append(one + 1)
                case 1:
                    tensors.append(one[choose.randrange(2) :])
                case 2:
                    tensors.append(one.t() if one.dim() == 2 else one.flip(0))
                case 3:
                    one.add_(choose.randrange(5))
                case 4:
                    one.mul_(other.sum() / 8)
                case 5:
                    one.fill_(choose.randrange(5))
                case 6:
                    one[0] = other.sum() if choose.random() < 0.5 else 7
                case 7:
                    torch.add(one, 1, out=one)
                case _:
                    read.append(one.tolist())
        return [*read, *[tensor.tolist() for tensor in tensors]]

    return run


@pytest.mark.parametrize("seed", some_of(range(30), range(8)))
def test_values_are_those_of_plain_pytorch_whatever_was_written_in_between(seed: int) -> None:
    found: list[str] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        found.append(repr(program(seed)()))
        return x

    capture(change)
    assert found == [repr(program(seed)())]


class Dice(torch.nn.Module):
    """As losses over images write it, with axes from a tensor, and with sizes that follow from known masks."""

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


def test_a_step_that_looks_at_shapes_is_exact_and_captured_again_for_others() -> None:
    def run(*, compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Dice()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            return loss.detach()

        called = outofcore.compile(step, model, budget="8MiB", home="host") if compiled else step
        losses = [called(torch.randn(shape)) for shape in ((2, 1, 9), (2, 1, 8, 8), (2, 1, 40), (2, 1, 9))]
        if isinstance(called, outofcore.Step):
            called.close()
        return [*losses, *[parameter.grad for parameter in model.parameters() if parameter.grad is not None]]

    assert all(map(torch.equal, run(compiled=True), run(compiled=False)))


def test_others_that_ask_are_told_that_it_is_no_fake() -> None:
    asked: list[bool] = []

    def change(x: torch.Tensor) -> torch.Tensor:
        for tensor in (torch.arange(3), x):
            asked.append(isinstance(tensor, torch._subclasses.FakeTensor))
        return x

    kind = torch._subclasses.FakeTensor
    capture(change)
    assert asked == [False, True]
    assert torch._subclasses.FakeTensor is kind


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_model_of_transformers_is_captured_with_the_attention_that_it_runs_with() -> None:
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
        plain = {name: number for name, number in count.seen.items() if names in name and "expand" not in name}
        assert {name: ops[name] for name in plain} == plain
    assert any("scaled_dot_product" in name for name in ops)
