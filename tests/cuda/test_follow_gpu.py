"""Tests of eager loops on a GPU: all values and the final state equal plain PyTorch's."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from following import TrainingResult, budget_for, peak_of, train_loop
from foreground_planning import WITHOUT_RECOMPUTATION, ForegroundPlanner
from gpu_loops import LOOPS, OPTIMIZERS, train_from_pinned_memory
from loops import adamw
from torch import nn

import outofcore
from outofcore._torch_internals import storage_address
from outofcore.errors import BudgetError, InputError, SpillError, StateError
from outofcore.follow import devices, loop_planner, records
from outofcore.follow.gpu import BudgetShares, make_workspaces, measure_shares
from outofcore.follow.native import call, is_any_loop_running, load_paging
from outofcore.follow.recipes import Recipes
from outofcore.planning import QUICK
from outofcore.policies import Auto
from outofcore.runtime.native import Flavor
from outofcore.units import KIB, MIB

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop_planner, "BackgroundPlanner", ForegroundPlanner)
    # Budgets here are for tensors only; the other memory of these loops would exceed them.
    monkeypatch.setattr(devices, "measure_shares", lambda budget, device: BudgetShares(budget, 0, 8 * MIB))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def run_within(
    name: str, budget: int, optimizer: str = "", **options: Any
) -> tuple[TrainingResult, outofcore.LoopStats]:
    make = OPTIMIZERS.get(optimizer, adamw)
    result, stats = train_loop(*LOOPS[name], make, budget, **{"policy": None, "cache": False, **options})
    assert stats is not None
    return result, stats


@functools.cache
def run_plain(name: str, optimizer: str = "") -> TrainingResult:
    return train_loop(*LOOPS[name], OPTIMIZERS.get(optimizer, adamw))[0]


@functools.cache
def peak(name: str) -> int:
    return peak_of(*LOOPS[name])


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LOOPS[name][1]()


@pytest.mark.parametrize("name", LOOPS)
def test_loops_run_unchanged_with_the_same_numbers(name: str) -> None:
    for share, stress in ((1.5, False), (0.5, False), (0.4, False), (0.5, True)):
        budget = int(share * peak(name))
        ours, stats = run_within(name, budget, stress=stress)
        assert ours.differs_from(run_plain(name)) == "", (share, stress)
        assert stats.peak_bytes <= budget
        assert (stats.evictions > 0) == (share < 1)


@pytest.mark.parametrize("name", ["dense", "language"])
def test_growing_loop_has_the_bits_of_one_with_room(name: str) -> None:
    budget = max(int(0.05 * peak(name)), 256 * KIB)
    ours, stats = run_within(name, budget, grow=True)
    assert ours.differs_from(run_plain(name)) == ""
    assert stats.exceedances > 0
    assert stats.peak_bytes > budget


@pytest.mark.parametrize("name", ["dense", "language"])
def test_measured_smallest_budget_fits_the_loop(name: str) -> None:
    runs: list[outofcore.Loop] = []
    run_within(name, int(1.5 * peak(name)), measure=True, prepare=runs.append)
    measured = runs[0].measurement()
    # Fragmentation may leave no hole for an operand; then the op uses it at home.
    ours, stats = run_within(name, measured.smallest_budget)
    assert ours.differs_from(run_plain(name)) == ""
    assert stats.peak_bytes <= measured.smallest_budget < measured.in_core_bytes


def test_default_budget_is_the_free_gpu_memory() -> None:
    run = outofcore.budget(device="cuda")
    free, _ = torch.cuda.mem_get_info()
    assert 0 < run._limit <= free
    assert outofcore.budget("50%", device="cuda")._limit <= free // 2 + MIB


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_variant_keeps_the_bits(name: str) -> None:
    ours, stats = run_within("dense", int(0.4 * peak("dense")), name)
    assert ours.differs_from(run_plain("dense", name)) == ""
    assert stats.evictions > 0


@pytest.mark.parametrize("name", ["dense", "language", "lengths", "autocast"])
def test_planned_steps_keep_the_bits(name: str) -> None:
    budget = int(0.5 * peak(name))
    ours, stats = run_within(name, budget, policy=WITHOUT_RECOMPUTATION)
    assert ours.differs_from(run_plain(name)) == ""
    assert stats.plans > 0
    assert stats.planned_ops > 0
    assert stats.fetches_ahead > 0
    assert stats.peak_bytes <= budget


@pytest.mark.parametrize("name", LOOPS)
def test_recomputation_keeps_every_bit(name: str) -> None:
    def recompute(run: outofcore.Loop) -> None:
        assert run._space is not None
        Recipes(run._space).recompute_all()

    for share, stress in ((1.5, False), (0.5, False), (0.5, True)):
        budget = int(share * peak(name)) + 256 * KIB
        ours, stats = run_within(name, budget, stress=stress, prepare=recompute)
        assert ours.differs_from(run_plain(name)) == "", (share, stress)
        assert stats.peak_bytes <= budget
        assert stats.reruns > 0
        assert stats.dropped_bytes > 0


def test_matrix_products_are_not_recomputed() -> None:
    """Their libraries may choose another kernel when less memory is free."""
    with outofcore.budget(64 * MIB, device="cuda", policy=None, cache=False) as run:
        assert run._space is not None
        Recipes(run._space).recompute_all()
        x, weight = (torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(2))
        product = (x @ weight) @ weight
        product.sum().backward()
        assert run.stats.recipes == 0
        (x * 2 @ weight).sum().backward()
        assert run.stats.recipes == 1


def test_trial_recomputes_if_copies_stall_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_ENOUGH_BYTES", 1 << 60)  # the link is not measured
    slow = replace(records._USUAL_HOME, bytes_per_s_out=1e7, bytes_per_s_in=1e7)
    monkeypatch.setattr(records, "_USUAL_HOME", slow)
    loop = functools.partial(train_from_pinned_memory, steps=12, shape=(2048, 256)), LOOPS["tall"][1]
    plain, _ = train_loop(*loop)
    budget = int(0.4 * peak("tall"))
    ours, stats = train_loop(*loop, budget=budget, policy=Auto(QUICK), cache=False)
    assert ours.differs_from(plain) == ""
    assert stats is not None
    assert stats.plans >= 2  # of the step without and with recomputation
    assert stats.reruns > 0
    assert stats.peak_bytes <= budget


def test_too_small_budget_is_refused_and_leaves_the_model_intact() -> None:
    model = model_of("dense")
    before = [p.detach().cpu() for p in model.parameters()]
    with pytest.raises(BudgetError, match="is too small"), outofcore.budget(MIB, model, policy=None):
        model(torch.ones(1024, 256, device="cuda"))
    assert all(torch.equal(a, p.detach().cpu()) for a, p in zip(before, model.parameters(), strict=True))
    assert not is_any_loop_running()


@contextlib.contextmanager
def limit_allocator(budget: int) -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
        assert torch.cuda.max_memory_reserved() <= budget
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("policy", [None, WITHOUT_RECOMPUTATION], ids=["on_demand", "planned"])
@pytest.mark.parametrize("name", ["tall", "language", "lengths", "rich"])
def test_all_device_memory_is_within_the_budget(name: str, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_shares", measure_shares)
    plain = run_plain(name)
    budget = budget_for(int(0.5 * peak(name)), DEVICE)
    with limit_allocator(budget):
        ours, stats = run_within(name, budget, policy=policy)
    assert ours.differs_from(plain) == ""
    assert stats.evictions > 0
    assert stats.outside_bytes == stats.peak_outside_bytes == 0


def test_many_small_tensors_are_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_shares", measure_shares)
    budget = budget_for(48 * MIB, DEVICE)
    with limit_allocator(budget), outofcore.budget(budget, device="cuda", policy=None, cache=False) as run:
        small = [torch.full((8 * KIB,), float(i), device="cuda") for i in range(1000)]  # 32 KiB each
        assert run.stats.bytes_in_use > 16 * MIB
        assert [t.mean().item() for t in small] == [float(i) for i in range(1000)]
        del small
        assert run.stats.bytes_in_use == 0


def test_existing_device_memory_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_shares", measure_shares)
    make_workspaces(DEVICE)
    before = measure_shares(128 * MIB, DEVICE)
    data = torch.ones(16 * MIB, device="cuda")
    assert measure_shares(128 * MIB, DEVICE) == before
    with outofcore.budget(128 * MIB, device="cuda", policy=None, cache=False):
        assert data[:3].sum().item() == 3


def test_budget_without_room_for_an_arena_names_the_smallest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_shares", measure_shares)
    with pytest.raises(BudgetError, match="leaves no room for a loop") as caught:
        outofcore.budget(8 * MIB, model_of("dense"), policy=None).start()
    assert not is_any_loop_running()
    assert caught.value.smallest_budget is not None
    with (
        limit_allocator(caught.value.smallest_budget),
        outofcore.budget(caught.value.smallest_budget, device="cuda", policy=None),
    ):
        assert torch.ones(MIB, device="cuda").sum().item() == MIB


def test_budget_in_a_refusal_suffices_for_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_shares", measure_shares)
    budget, refusals = budget_for(8 * MIB, DEVICE), 0
    while refusals < 3:
        try:
            with limit_allocator(budget), outofcore.budget(budget, device="cuda", policy=None, cache=False):
                x = torch.ones(3 * MIB, device="cuda")
                assert (x + x).sum().item() == 6 * MIB
            break
        except BudgetError as error:
            assert error.smallest_budget is not None
            budget = error.smallest_budget
            refusals += 1
        x = None
    assert refusals == 2  # for ones, and for the sum


def test_operands_around_the_free_memory_are_compacted() -> None:
    with outofcore.budget(8 * MIB, device="cuda", policy=None, cache=False) as run:
        first = torch.full((3 * MIB // 4,), 1.0, device="cuda")
        part = torch.arange(MIB / 4, device="cuda")
        second = torch.full((3 * MIB // 4,), 2.0, device="cuda")
        last = torch.full((MIB // 4,), 3.0, device="cuda")
        joined = torch.cat([part] * 6)
        assert run.stats.peak_outside_bytes == 0
        assert run.stats.peak_bytes <= 8 * MIB
        assert torch.equal(joined.cpu(), torch.arange(MIB / 4).repeat(6))
        assert [t.mean().item() for t in (first, second, last)] == [1.0, 2.0, 3.0]


def test_operands_used_at_home_are_counted() -> None:
    model = nn.Linear(1024, 1536, bias=False, device="cuda")  # 6 MiB
    nn.init.constant_(model.weight, 2.0)
    with outofcore.budget(8 * MIB, model, policy=None, cache=False) as run:
        before = torch.ones(3 * MIB // 4, device="cuda")
        fixed = torch.ones(MIB // 4, device="cuda")
        assert fixed.__cuda_array_interface__["data"][0] % 512 == 0
        del before
        assert run.stats.at_home_bytes == 0
        assert model.weight.sum().item() == 2.0 * 1024 * 1536
        assert run.stats.at_home_bytes == 6 * MIB


def test_exported_addresses_stay_valid() -> None:
    with outofcore.budget(4 * MIB, device="cuda", policy=None) as run:
        exported = torch.arange(65536.0, device="cuda")
        address = exported.__cuda_array_interface__["data"][0]
        assert run.stats.fixed == 1
        fillers = [torch.full((65536,), float(i), device="cuda") for i in range(40)]
        assert [float(t[9]) for t in fillers] == [float(i) for i in range(40)]
        assert exported.data_ptr() == address
        assert exported.sum().item() == torch.arange(65536.0).sum().item()


def _evict_tensors() -> list[torch.Tensor]:
    tensors = [torch.full((65536,), float(i), device="cuda") for i in range(8)]
    for tensor in tensors:
        call(load_paging(Flavor.CUDA), "follow_evict", storage_address(tensor.untyped_storage()))
    return tensors


def _check_sums_after_increment(tensors: list[torch.Tensor]) -> None:
    sums = [tensor.sum() for tensor in tensors]
    assert [total.item() / 65536 for total in sums] == [i + 1.0 for i in range(8)]


@pytest.mark.parametrize("first", [True, False])
def test_write_of_another_thread_at_home_is_fetched(first: bool) -> None:
    with outofcore.budget(8 * MIB, device="cuda", policy=None):
        evicted, side = _evict_tensors(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def write(tensors: list[torch.Tensor]) -> None:
            with torch.cuda.stream(side):
                if not first:
                    torch.zeros(1, device="cuda")
                for tensor in tensors:
                    tensor.add_(1)

        # The first op of each thread is not tracked.
        for tensors in [[tensor] for tensor in evicted] if first else [evicted]:
            thread = threading.Thread(target=write, args=(tensors,))
            thread.start()
            thread.join()
        torch.cuda.current_stream().wait_stream(side)
        _check_sums_after_increment(evicted)


def test_untracked_write_at_home_is_fetched() -> None:
    library = load_paging(Flavor.CUDA)
    with outofcore.budget(8 * MIB, device="cuda", policy=None):
        evicted = _evict_tensors()
        memory = torch.UntypedStorage(MIB, device="cuda")  # requested outside of an op
        library.follow_thread(0)
        for tensor in evicted:
            tensor.add_(1)
        library.follow_thread(1)
        _check_sums_after_increment(evicted)
        assert memory.nbytes() == MIB


def test_pytorch_memory_tools_work_in_a_loop() -> None:
    model = model_of("dense")
    with outofcore.budget(8 * MIB, model, policy=None):
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() >= 8 * MIB
        torch.cuda.memory_stats()
        torch.cuda.synchronize()
        with pytest.raises(StateError, match="CUDA graph"):
            torch.cuda.CUDAGraph().capture_begin()


def test_tensors_stay_valid_after_the_loop() -> None:
    model = model_of("dense")
    before = {name: t.detach().cpu() for name, t in model.state_dict().items()}
    with outofcore.budget(MIB, model, policy=None) as run:
        assert run.stats.bytes_evicted > MIB
        tensors = [torch.full((65536,), float(i), device="cuda") for i in range(9)]
    assert [t.mean().item() for t in tensors] == [float(i) for i in range(9)]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name])
    assert not is_any_loop_running()


def test_loops_on_both_devices_alternate() -> None:
    for _ in range(2):
        on_gpu, on_cpu = model_of("dense"), model_of("dense").cpu()
        with outofcore.budget(8 * MIB, on_gpu, policy=None) as run:
            with pytest.raises(StateError, match="running already"), outofcore.budget(8 * MIB, on_cpu, policy=None):
                pass
            on_gpu(torch.ones(64, 256, device="cuda")).sum().backward()
        assert run.stats.fetches > 0
        with outofcore.budget(8 * MIB, on_cpu, policy=None) as run:
            on_cpu(torch.ones(64, 256)).sum().backward()
        assert run.stats.fetches > 0


def test_homes_other_than_pinned_memory_are_refused() -> None:
    with pytest.raises(InputError, match="pinned host memory"):
        outofcore.budget("8MiB", model_of("dense"), home="disk")
    with pytest.raises(SpillError, match="no home has room"):
        outofcore.budget("8MiB", model_of("dense"), host_budget="256KiB").start()
    assert not is_any_loop_running()
