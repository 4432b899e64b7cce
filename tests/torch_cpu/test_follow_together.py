"""Tests of eager loops in distributed training, with compiled blocks, in notebooks and under interrupts."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from launching import run_together
from loops import Language, loss_of, sentences, tensors_in
from torch import Tensor, nn

import outofcore
from outofcore.follow.native import is_any_loop_running, load_paging

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("view", some_of([False, True], [True]), ids=["gradients", "views of buckets"])
def test_two_data_parallel_processes_are_exact(view: bool, tmp_path: Path) -> None:
    script = Path(__file__).with_name("eager_gloo_process.py")
    for status, output in run_together(script, str(int(view)), 2, tmp_path):
        assert status == 0, output
        assert output.endswith("same\n")


class PartlyCompiled(nn.Module):
    """A model with a compiled block of batch norms between two plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 16384), nn.Linear(16384, 10)
        self.block: Any = nn.Sequential(nn.BatchNorm1d(16384), nn.GELU(), nn.BatchNorm1d(16384), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


def test_compiled_batch_norm_block_is_exact() -> None:
    def train(budget: int | None, *, stress: bool = False) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        model, losses, peak = PartlyCompiled(), [], 0
        model.block = torch.compile(model.block)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def loop() -> None:
            for _ in range(3):
                loss = F.cross_entropy(model(torch.randn(32, 32)), torch.randint(0, 10, (32,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

        if budget is None:
            loop()
        else:
            with outofcore.budget(budget, model) as run:
                load_paging().follow_stress(run._space, int(stress))
                loop()
                peak = run.stats.peak_bytes
        return [*losses, *(t.clone() for t in (*model.state_dict().values(), *tensors_in(optimizer)))], peak

    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    theirs, _ = train(None)  # compiles the kernels that later runs reuse
    assert graphs["unique_graphs"] > before
    roomy, peak = train(1 << 30)
    runs = [roomy, *(train(int(share * peak), stress=s)[0] for share, s in ((0.5, False), (0.3, False), (0.5, True)))]
    for ours in runs:
        assert len(ours) == len(theirs)
        for number, (value, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(value, expected) if isinstance(expected, Tensor) else value == expected, number


def train_batches(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    losses = []
    for ids, targets in batches:
        optimizer.zero_grad()
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_training() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Language()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), list(sentences(9))


def assert_equal_models(ours: nn.Module, theirs: nn.Module) -> None:
    for value, expected in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert value.equal(expected)


def test_notebook_cells_can_start_and_stop_loops() -> None:
    """Start and stop loops between plain steps, with mistakes; the losses stay exact."""
    theirs, optimizer, batches = make_training()
    expected = train_batches(theirs, optimizer, batches)
    ours, optimizer, batches = make_training()
    losses = train_batches(ours, optimizer, batches[:2])
    run = outofcore.budget("12MiB", ours).start()
    losses += train_batches(ours, optimizer, batches[2:4])
    assert "running" in repr(run)
    assert run.stats.steps == 2
    with pytest.raises(outofcore.StateError, match=r"running already; stop\(\) it first"):
        run.start()
    with pytest.raises(outofcore.StateError, match="running already"):
        outofcore.budget("12MiB", ours).start()  # the cell is run again
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours.head(torch.ones(3, 5))  # type: ignore[operator]
    losses += train_batches(ours, optimizer, batches[4:6])
    run.stop()
    run.stop()
    assert not is_any_loop_running()
    losses += train_batches(ours, optimizer, batches[6:7])
    run.start()  # resumed
    losses += train_batches(ours, optimizer, batches[7:8])
    run.stop()
    with outofcore.budget("16MiB", ours):
        losses += train_batches(ours, optimizer, batches[8:])
    assert losses == expected
    assert_equal_models(ours, theirs)


@pytest.mark.parametrize("moment", ["forward", "backward", "update"])
def test_training_is_exact_after_ctrl_c_in_a_step(moment: str) -> None:

    def train(budget: int | None) -> tuple[list[float], nn.Module]:
        model, optimizer, batches = make_training()
        assert isinstance(model, Language)
        run = None if budget is None else outofcore.budget(budget, model).start()
        losses = train_batches(model, optimizer, batches[:3])

        def interrupt(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        hooks = {
            "forward": lambda: model.blocks[2].register_forward_hook(interrupt),
            "backward": lambda: model.blocks[2].register_full_backward_hook(interrupt),
            "update": lambda: optimizer.register_step_pre_hook(interrupt),
        }
        hook = hooks[moment]()
        with pytest.raises(KeyboardInterrupt):
            train_batches(model, optimizer, batches[3:])
        hook.remove()
        losses += train_batches(model, optimizer, batches[3:6])
        if run is not None:
            run.stop()
            assert run.stats.evictions > 0
        return losses + train_batches(model, optimizer, batches[6:7]), model

    ours, theirs = train(12 << 20), train(None)
    assert ours[0] == theirs[0]
    assert_equal_models(ours[1], theirs[1])
