"""Tests of logical workers: the bits of plain PyTorch on any number of processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import is_exhaustive
from stages import BATCH, WORKERS, Noisy, digest, model_of
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outofcore
from outofcore.errors import BudgetError, CaptureError, InputError, StateError
from outofcore.logical_workers.contexts import Context


def plain_digests(kind: str, steps: int) -> list[str]:
    """Return a digest after each step of a plain loop over all workers in one process."""
    model, optimizer, train_step = model_of(kind)
    contexts = [Context.initial(0, k, None) for k in range(WORKERS)]
    samplers = [DistributedSampler(Noisy(), WORKERS, k, seed=7, drop_last=True) for k in range(WORKERS)]
    digests: list[str] = []
    while len(digests) < steps:
        data = Noisy()
        for sampler in samplers:
            sampler.set_epoch(len(digests) // 3)
        orders = [list(sampler) for sampler in samplers]
        for step in range(3):
            begin = [buffer.clone() for buffer in model.buffers()]
            final_buffers = begin
            for k in range(WORKERS):
                set_buffers(model, begin)
                contexts[k].apply(None)
                samples = [data[number] for number in orders[k][step * BATCH : (step + 1) * BATCH]]
                train_step(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))
                contexts[k] = Context.capture(None)
                final_buffers = final_buffers if k else [buffer.clone() for buffer in model.buffers()]
            set_buffers(model, final_buffers)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= WORKERS
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model, optimizer))
    return digests[:steps]


def set_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def test_digests_match_plain_pytorch_on_any_number_of_processes(tmp_path: Path) -> None:
    """Kill a training twice and restart it on other numbers of processes; ``--exhaustive`` adds one on four."""
    changing, staying = tmp_path / "changing", tmp_path / "staying"
    stages = [(1, 2, "save:0"), (4, 3, ""), (2, 5, "step:1"), (3, 6, "")]
    trainings = [(changing, stages), *([(staying, [(4, 6, "")])] if is_exhaustive() else [])]
    lines = ["import stages"]
    for folder, folder_stages in trainings:
        folder.mkdir()
        lines.append(f"stages.drive({str(folder)!r}, {folder_stages!r})")
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert {path.name for path in changing.glob("died-*")} == {"died-save", "died-step"}
    for kind in ("sgd", "adamw"):
        expected = plain_digests(kind, 6)
        for folder, folder_stages in trainings:
            for processes, last, _ in folder_stages:
                for rank in range(processes):
                    assert (folder / f"{kind}-{last}-{rank}.bits").read_text() == expected[last - 1]


# One process


@pytest.fixture(autouse=True)
def _threads(one_thread: None) -> None:
    """Limit threads, because many tests share few cores."""


def elastic(kind: str = "sgd", **overrides: Any) -> tuple[outofcore.Elastic, nn.Module, torch.optim.Optimizer]:
    model, optimizer, train_step = model_of(kind)
    options: dict[str, Any] = {"workers": WORKERS, "budget": "8MiB", "home": "host", **overrides}
    return outofcore.elastic(train_step, model, optimizer, **options), model, optimizer


def batch_of(number: int, rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 64, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def batches_of(step: int) -> dict[int, Any]:
    return {k: batch_of(10 * step + k) for k in range(WORKERS)}


def test_step_leaves_the_generators_of_the_process_unchanged() -> None:
    run, _, _ = elastic()
    with run:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        run(batches_of(0))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]


def measure_update_norm(limit: float) -> float:
    model, optimizer, train_step = model_of("sgd")
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()

    with outofcore.elastic(
        train_step, model, optimizer, workers=WORKERS, budget="8MiB", home="host", update=update
    ) as run:
        run(batches_of(0))
    updates = [(a - b.detach()).norm() / 0.1 for a, b in zip(before, model.parameters(), strict=True)]
    return torch.stack(updates).norm().item()


def test_custom_update_gets_the_mean_of_all_gradients() -> None:
    assert measure_update_norm(0.1) == pytest.approx(0.1, rel=1e-3)
    assert 0.2 < measure_update_norm(1e9) < 10


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_summed_in_the_order_of_the_workers(twice: bool) -> None:
    """Workers add to one sum, unless a step runs backward twice, which would change the order."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if twice:
                model(x).square().mean().backward()
            return loss

        return model, optimizer, step

    model, optimizer, step = make()
    with outofcore.elastic(step, model, optimizer, workers=WORKERS, budget="8MiB", home="host") as run:
        run(batches_of(0))
        assert bool(run._gradients.stored) == twice
        elastic_digest = digest(model, optimizer)
    model, optimizer, step = make()
    worker_gradients: list[list[torch.Tensor]] = []
    for batch in batches_of(0).values():
        step(*batch)
        worker_gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        optimizer.zero_grad()
    for parameter, *gradients in zip(model.parameters(), *worker_gradients, strict=True):
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        parameter.grad = total / WORKERS
    optimizer.step()
    assert digest(model, optimizer) == elastic_digest


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    first, model, optimizer = elastic("adamw")
    data = Noisy()
    with first as run:
        loader = run.loader(data, batch_size=BATCH, seed=7)
        for batches in loader:
            run(batches)
            if run.steps == 2:
                run.save(tmp_path, extra=[1, 2])
        assert (loader.epoch, len(loader)) == (1, 3)
        expected = digest(model, optimizer)
    second, model, optimizer = elastic("adamw", seed=5)  # another seed, which the checkpoint replaces
    with second as run:
        assert run.load(tmp_path) == [1, 2]
        assert (run.steps, run.place.step) == (2, 2)
        with pytest.raises(InputError, match="in batches of 5"):
            run.loader(data, batch_size=5, seed=7)
        for batches in run.loader(data, batch_size=BATCH, seed=7):
            run(batches)
        assert digest(model, optimizer) == expected
    # Plain PyTorch can load its model and optimizer.
    model, optimizer, _ = model_of("adamw")
    assert outofcore.load(tmp_path, model, optimizer)["extra"] == [1, 2]


def test_training_resumes_without_frozen_weights(tmp_path: Path) -> None:
    def start() -> tuple[outofcore.Elastic, nn.Module, torch.optim.Optimizer]:
        model, optimizer, train_step = model_of("sgd")
        next(model.parameters()).requires_grad_(False)
        return outofcore.elastic(train_step, model, optimizer, workers=2, budget="8MiB"), model, optimizer

    first, model, optimizer = start()
    name = next(iter(dict(model.named_parameters())))
    with first as run:
        run({k: batch_of(k) for k in run.workers})
        run.save(tmp_path, frozen=False)
        run({k: batch_of(k + 2) for k in run.workers})
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    assert list(index["models"][0]["omitted"]) == [name]
    second, resumed_model, resumed_optimizer = start()
    with second as run:
        run.load(tmp_path)
        run({k: batch_of(k + 2) for k in run.workers})
    assert digest(resumed_model, resumed_optimizer) == digest(model, optimizer)


def test_unused_batches_are_drawn_again() -> None:
    run, _, _ = elastic()
    with run:
        loader = run.loader(Noisy(), batch_size=BATCH, seed=7)
        first = next(iter(loader))
        iterator = iter(loader)
        repeated = next(iterator)
        assert all(torch.equal(first[k][0], repeated[k][0]) for k in run.workers)
        third = next(iterator)  # the loop continues without a step, which uses up the second batch
        assert run.place.step == 1
        assert not torch.equal(third[0][0], repeated[0][0])


def test_workers_get_the_samples_of_a_distributed_sampler() -> None:
    data = TensorDataset(torch.arange(50))
    run, _, _ = elastic()
    with run:
        loader = run.loader(data, batch_size=BATCH, seed=3)
        for epoch in range(2):
            assert loader.epoch == epoch
            drawn = [{k: batch[0] for k, batch in batches.items()} for batches in loader]
            for k in run.workers:
                sampler = DistributedSampler(data, WORKERS, k, seed=3, drop_last=True)
                sampler.set_epoch(epoch)
                theirs = [rows for (rows,) in DataLoader(data, BATCH, sampler=sampler, drop_last=True)]
                assert len(theirs) == len(drawn) == 3
                assert all(torch.equal(a[k], b) for a, b in zip(drawn, theirs, strict=True))


def test_shares_of_workers_are_measured() -> None:
    run, _, _ = elastic()
    with run:
        with pytest.raises(StateError, match="make a step first"):
            run.balance()
        run(batches_of(0))
        assert run.balance() == range(4)
        run(batches_of(1))
        assert run.stats.least_bytes == 0
        assert len(run.stats.turn_seconds) == 4
        assert run.stats.gradient_bytes > 1 << 17


def test_failed_step_leaves_model_and_optimizer_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, model, optimizer = elastic()
    reference, reference_model, reference_optimizer = elastic()
    with failing, reference:
        for run in (failing, reference):
            run(batches_of(0))
        before = digest(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(Context, "capture", lambda _: (_ for _ in ()).throw(MemoryError("no more")))
            with pytest.raises(MemoryError):
                failing(batches_of(1))
        assert digest(model, optimizer) == before
        assert all(parameter.grad is None for parameter in model.parameters())
        for run in (failing, reference):
            run(batches_of(1))
        assert digest(model, optimizer) == digest(reference_model, reference_optimizer)


def test_too_small_budget_is_refused_before_any_change() -> None:
    run, model, optimizer = elastic(budget="100KiB")
    with run:
        before = digest(model, optimizer)
        with pytest.raises(BudgetError):
            run(batches_of(0))
        assert digest(model, optimizer) == before
        assert run.steps == 0


def assert_refused(match: str, **options: Any) -> None:
    with pytest.raises(InputError, match=match):
        elastic(**options)


def test_bad_arguments_are_refused() -> None:
    assert_refused("workers must be at least 1", workers=0)
    assert_refused("workers must be at least 1", workers=True)
    assert_refused("seed must be at least 0", seed=-1)
    assert_refused("above zero", timeout=0)
    model, optimizer, train_step = model_of("sgd")
    with pytest.raises(InputError, match="needs the optimizer"):
        outofcore.elastic(train_step, model, [], workers=4, budget="1MiB")
    wrapped = nn.DataParallel(model)
    with pytest.raises(InputError, match=r"wrapped in DataParallel.*model\.module"):
        outofcore.elastic(train_step, wrapped, optimizer, workers=4, budget="1MiB")
    lazy = nn.LazyLinear(3)
    with pytest.raises(InputError, match=r"the model \(LazyLinear\) has no shapes yet"):
        outofcore.elastic(train_step, lazy, torch.optim.SGD(lazy.parameters()), workers=4, budget="1MiB")


def test_bad_batches_and_datasets_are_refused() -> None:
    run, model, optimizer = elastic()
    with run:
        before = digest(model, optimizer)
        with pytest.raises(InputError, match="no batch for worker 3"):
            run({k: batch_of(k) for k in range(3)})
        with pytest.raises(InputError, match="a batch for 4, which is not a worker"):
            run({k: batch_of(k) for k in range(5)})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(InputError, match="clear them first"):
            run(batches_of(0))
        optimizer.zero_grad()
        with pytest.raises(InputError, match="lacks one of them"):
            run.loader(iter([]), batch_size=4)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="too few"):
            run.loader(Noisy(), batch_size=13)
        with pytest.raises(InputError, match="batch_size must be at least 1"):
            run.loader(Noisy(), batch_size=0)
        assert digest(model, optimizer) == before


def test_step_with_an_update_is_refused_naming_its_line() -> None:
    model, optimizer, _ = model_of("sgd")

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    before = digest(model, optimizer)
    with outofcore.elastic(train_step, model, optimizer, workers=4, budget="8MiB", home="host") as run:
        with pytest.raises(CaptureError, match=r"test_elastic\.py:\d+.*updates the parameters.*once they are summed"):
            run(batches_of(0))
        assert digest(model, optimizer) == before


def test_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    run, model, optimizer = elastic()
    with run:
        run(batches_of(0))
        run.save(tmp_path / "one")
    outofcore.save(tmp_path / "plain", model, optimizer)
    index = tmp_path / "one" / "checkpoint.json"
    written = json.loads(index.read_text())

    def change_facts(**facts: str) -> None:
        changed = json.loads(json.dumps(written))
        changed["extra"]["elastic"]["facts"] |= facts
        index.write_text(json.dumps(changed))

    run, model, optimizer = elastic(workers=2)
    before = digest(model, optimizer)
    with run, pytest.raises(InputError, match="has 4 logical workers, but this training has 2"):
        run.load(tmp_path / "one")
    run, model, optimizer = elastic()
    with run:
        with pytest.raises(InputError, match="not saved by an elastic training"):
            run.load(tmp_path / "plain")
        with pytest.raises(InputError, match="no checkpoint"):
            run.load(tmp_path / "none")
        change_facts(**{"threads (torch.get_num_threads)": "7"})
        with pytest.raises(InputError, match=r"has 7, but this process has 1; call torch\.set_num_threads"):
            run.load(tmp_path / "one")
        change_facts(PyTorch="1.0")
        with pytest.raises(InputError, match=r"PyTorch: .* has 1\.0.*exact=False"):
            run.load(tmp_path / "one")
        changed = json.loads(json.dumps(written))
        changed["extra"]["elastic"]["contexts"]["2"]["torch"] = "no number"
        index.write_text(json.dumps(changed))
        with pytest.raises(InputError, match="cannot be read"):
            run.load(tmp_path / "one")
        assert digest(model, optimizer) == before
        change_facts(PyTorch="1.0")
        run.load(tmp_path / "one", exact=False)
        assert run.steps == 1
    wider = nn.Linear(64, 8)
    with outofcore.elastic(
        lambda x: wider(x).sum().backward(), wider, torch.optim.SGD(wider.parameters()), workers=4, budget="1MiB"
    ) as run:
        change_facts()
        with pytest.raises(InputError, match="the checkpoint in"):
            run.load(tmp_path / "one")


def test_batch_may_be_a_mapping_a_tuple_or_a_tensor() -> None:
    losses = []
    for batch in ({"x": torch.ones(4, 8)}, (torch.ones(4, 8),), torch.ones(4, 8)):
        torch.manual_seed(0)
        model = nn.Linear(8, 2)

        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with outofcore.elastic(step, model, optimizer, workers=2, budget="1MiB", home="host") as run:
            losses.append([loss.item() for loss in run({0: batch, 1: batch}).values()])
            assert "workers 0 to 1 of 2 in process 0 of 1" in repr(run)
    assert losses[0] == losses[1] == losses[2]
