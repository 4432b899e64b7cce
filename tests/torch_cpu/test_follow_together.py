"""Followed loops beside others: processes that train together, compiled blocks, cells of a notebook, interrupts."""

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
from outofcore.follow.native import is_followed, load_paging

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("view", some_of([False, True], [True]), ids=["gradients", "views of buckets"])
def test_two_processes_that_train_together(view: bool, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ranks.py")
    for status, output in run_together(script, str(int(view)), 2, tmp_path):
        assert status == 0, output
        assert output.endswith("same\n")


class Parts(nn.Module):
    """A block to compile, with statistics that it writes in place, between two that are not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 16384), nn.Linear(16384, 10)
        self.block: Any = nn.Sequential(nn.BatchNorm1d(16384), nn.GELU(), nn.BatchNorm1d(16384), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


def test_a_compiled_block_with_statistics() -> None:
    def train(budget: int | None, *, stress: bool = False) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        model, seen, peak = Parts(), [], 0
        model.block = torch.compile(model.block)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def loop() -> None:
            for _ in range(3):
                loss = F.cross_entropy(model(torch.randn(32, 32)), torch.randint(0, 10, (32,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())

        if budget is None:
            loop()
        else:
            with outofcore.budget(budget, model) as run:
                load_paging().follow_stress(run._space, int(stress))
                loop()
                peak = run.stats.peak_bytes
        return [*seen, *(t.clone() for t in (*model.state_dict().values(), *tensors_in(optimizer)))], peak

    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    theirs, _ = train(None)  # compiled here: the kernels are kept
    assert graphs["unique_graphs"] > before
    roomy, peak = train(1 << 30)
    runs = [roomy, *(train(int(share * peak), stress=s)[0] for share, s in ((0.5, False), (0.3, False), (0.5, True)))]
    for ours in runs:
        assert len(ours) == len(theirs)
        for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(left, right) if isinstance(right, Tensor) else left == right, number


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    seen = []
    for ids, wanted in batches:
        optimizer.zero_grad()
        loss = loss_of(model, ids, wanted)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def begun() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Language()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), list(sentences(9))


def assert_equal_models(ours: nn.Module, theirs: nn.Module) -> None:
    for left, right in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert left.equal(right)


def test_cells_of_a_notebook() -> None:
    """Loops that are started and stopped in between, with others before and after them, and mistakes."""
    theirs, optimizer, batches = begun()
    wanted = steps(theirs, optimizer, batches)
    ours, optimizer, batches = begun()
    seen = steps(ours, optimizer, batches[:2])
    run = outofcore.budget("12MiB", ours).start()
    seen += steps(ours, optimizer, batches[2:4])
    assert "running" in repr(run)
    assert run.stats.steps == 2
    with pytest.raises(outofcore.StateError, match=r"running already; stop\(\) it first"):
        run.start()
    with pytest.raises(outofcore.StateError, match="running already"):
        outofcore.budget("12MiB", ours).start()  # the cell is run again
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours.head(torch.ones(3, 5))  # type: ignore[operator]
    seen += steps(ours, optimizer, batches[4:6])
    run.stop()
    run.stop()
    assert not is_followed()
    seen += steps(ours, optimizer, batches[6:7])
    run.start()  # and on
    seen += steps(ours, optimizer, batches[7:8])
    run.stop()
    with outofcore.budget("16MiB", ours):
        seen += steps(ours, optimizer, batches[8:])
    assert seen == wanted
    assert_equal_models(ours, theirs)


@pytest.mark.parametrize("moment", ["forward", "backward", "update"])
def test_an_interrupt_in_the_middle_of_a_step(moment: str) -> None:
    """Ctrl-C comes between two ops; then the step is done again, or goes on."""

    def train(budget: int | None) -> tuple[list[float], nn.Module]:
        model, optimizer, batches = begun()
        assert isinstance(model, Language)
        run = None if budget is None else outofcore.budget(budget, model).start()
        seen = steps(model, optimizer, batches[:3])

        def interrupt(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        hooks = {
            "forward": lambda: model.blocks[2].register_forward_hook(interrupt),
            "backward": lambda: model.blocks[2].register_full_backward_hook(interrupt),
            "update": lambda: optimizer.register_step_pre_hook(interrupt),
        }
        hook = hooks[moment]()
        with pytest.raises(KeyboardInterrupt):
            steps(model, optimizer, batches[3:])
        hook.remove()
        seen += steps(model, optimizer, batches[3:6])
        if run is not None:
            run.stop()
            assert run.stats.evictions > 0
        return seen + steps(model, optimizer, batches[6:7]), model

    ours, theirs = train(12 << 20), train(None)
    assert ours[0] == theirs[0]
    assert_equal_models(ours[1], theirs[1])
