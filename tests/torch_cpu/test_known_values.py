"""What does not depend on data may be looked at in a step, which then goes the way that plain PyTorch goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

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

    return capture_step(step, [model], [], (torch.ones(6, 4),), {})


def last_position(x: torch.Tensor) -> int:
    positions = torch.arange(x.shape[0], device=x.device)[None].expand(2, -1)
    return int((positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)[:, -1].max())


KNOWN: list[tuple[Callable[[torch.Tensor], Any], Any]] = [
    (last_position, 0),
    (lambda x: torch.ones_like(x, dtype=torch.long).sum().item(), 24),
    (lambda x: bool((torch.tensor([3, 1, 2]).sort()[0] == torch.arange(1, 4)).all()), True),
    (lambda x: x.new_full((2,), 7, dtype=torch.int32)[1].item(), 7),
    (lambda x: [1, 2, 3][torch.tensor(2)], 3),
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
    lambda x: torch.arange(4).float().mean().item(),
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
