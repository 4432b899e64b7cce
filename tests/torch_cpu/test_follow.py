"""Tests of tensors in an eager loop: ops and other accesses give the results of plain PyTorch."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outofcore
from outofcore.follow.native import load_paging

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["disk", "host"])
def run(request: pytest.FixtureRequest) -> Iterator[outofcore.Loop]:
    with outofcore.budget(16 * MIB, home=request.param) as loop:
        yield loop


def location_of(tensor: Tensor) -> str:
    return ("outside", "arena", "away", "loose")[load_paging().follow_where(tensor.untyped_storage()._cdata)]


def evict(tensor: Tensor) -> None:
    assert load_paging().follow_evict(tensor.untyped_storage()._cdata) == 1
    assert location_of(tensor) == "away"


def evict_all(run: outofcore.Loop) -> None:
    assert load_paging().follow_evict_all(run._space) == 0


def overwrite_the_arena() -> None:
    for _ in range(2):
        torch.full((14 * MIB // 4,), 7.0)


def test_op_fetches_an_evicted_tensor(run: outofcore.Loop) -> None:
    x = torch.randn(256, 256)
    total = x.sum()
    evict(x)
    overwrite_the_arena()
    assert x.sum() == total
    assert location_of(x) == "arena"


def test_evicted_tensor_is_read_at_its_home(run: outofcore.Loop) -> None:
    x = torch.arange(40000.0) + 0
    evict(x)
    overwrite_the_arena()
    assert x.tolist()[39999] == 39999.0
    file = io.BytesIO()
    torch.save(x, file)
    assert location_of(x) == "away"
    assert torch.load(io.BytesIO(file.getvalue())).equal(x)
    assert pickle.loads(pickle.dumps(x)).equal(x)
    assert copy.deepcopy(x).equal(x)


def test_view_shares_data_with_its_evicted_base(run: outofcore.Loop) -> None:
    base = torch.randn(256, 256)
    expected, part = base.clone(), base[3:9, ::2]
    evict(base)
    part.mul_(2)
    expected[3:9, ::2] *= 2
    evict(base)
    overwrite_the_arena()
    assert base.equal(expected)
    assert base.t().contiguous().equal(expected.t())


def test_evicted_gradient_is_accumulated_in_place(run: outofcore.Loop) -> None:
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(64, 256)
    (x @ weight).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    once = gradient.clone()
    evict(gradient)
    (x @ weight).sum().backward()
    assert weight.grad is gradient
    assert gradient.equal(once * 2)


def test_evicted_storage_can_be_resized(run: outofcore.Loop) -> None:
    x = torch.arange(40000.0) + 0
    evict(x)
    x.resize_(80000)
    assert x[:40000].equal(torch.arange(40000.0))
    evict(x)
    x.resize_(30000)
    assert x.equal(torch.arange(30000.0))
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    assert out.equal(torch.arange(1.0, 30001.0))
    out.untyped_storage().resize_(0)
    out.untyped_storage().resize_(120000)
    out.fill_(3)
    evict(out)
    assert out.sum() == 90000


def test_evicted_data_moves_to_another_tensor(run: outofcore.Loop) -> None:
    parameter, new = nn.Parameter(torch.randn(200, 200)), torch.randn(200, 200)
    expected = new.clone()
    evict(new)
    parameter.data = new
    del new
    assert parameter.equal(expected)
    evict(parameter)
    shared = torch.empty(0).set_(parameter.untyped_storage(), 0, (200, 200), (200, 1))
    assert shared.equal(expected)
    torch.utils.swap_tensors(shared, swapped := torch.zeros(200, 200))
    evict(swapped)
    overwrite_the_arena()
    assert swapped.equal(expected)
    assert shared.eq(0).all()


def test_memory_is_freed_with_the_last_reference(run: outofcore.Loop) -> None:
    gc.collect()
    before = run.stats
    tensors = [torch.randn(128, 256) for _ in range(20)]
    evict_all(run)
    assert run.stats.bytes_evicted >= before.bytes_evicted + 20 * 128 * 256 * 4
    del tensors
    tensors = [torch.randn(128, 256) for _ in range(20)]
    del tensors
    gc.collect()
    assert run.stats.bytes_evicted == before.bytes_evicted
    assert run.stats.bytes_in_use == before.bytes_in_use


def test_array_and_tensor_share_data_across_evictions(run: outofcore.Loop) -> None:
    x = torch.zeros(40000) + 1
    array = x.numpy()
    evict_all(run)
    overwrite_the_arena()
    assert (array == 1).all()
    array[:] = 9
    assert x.add(0).eq(9).all()
    array[:] = 8  # written in the arena, without an op
    evict_all(run)
    overwrite_the_arena()
    assert x.add(0).eq(8).all()
    x.fill_(5)
    evict_all(run)
    assert (array == 5).all()


def test_dlpack_array_of_an_evicted_tensor_stays_valid(run: outofcore.Loop) -> None:
    x = torch.arange(40000.0) + 0
    evict(x)
    array = np.from_dlpack(x)
    x.add_(1)
    evict_all(run)
    overwrite_the_arena()
    assert array[-1] == 40000.0
    x.mul_(2)
    assert array[-1] == 80000.0


def test_exported_address_stays_fixed(run: outofcore.Loop) -> None:
    x, y = torch.zeros(40000) + 1, torch.zeros(40000) + 2
    addresses = x.data_ptr(), y.untyped_storage().data_ptr()
    evict_all(run)
    overwrite_the_arena()
    x.add_(1)
    y.add_(1)
    assert (x.data_ptr(), y.untyped_storage().data_ptr()) == addresses
    assert run.stats.fixed == 2


def test_memory_of_other_owners_is_not_moved(run: outofcore.Loop) -> None:
    array = np.zeros(40000, np.float32)
    x = torch.from_numpy(array)
    x.add_(1)
    assert (array == 1).all()
    assert location_of(x) == "outside"
    assert run.stats.untracked_uses > 0
    shared = torch.zeros(40000).add_(5).share_memory_()
    shared.add_(1)
    assert shared.is_shared()
    assert shared.eq(6).all()


def test_model_is_adopted_from_mapped_and_buffer_memory(tmp_path: Path) -> None:
    plain = nn.Linear(256, 256)
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    mapped, buffered, shared = nn.Linear(256, 256), nn.Linear(256, 256), copy.deepcopy(plain).share_memory()
    mapped.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    weights = bytearray(plain.weight.detach().numpy().tobytes())
    buffered.weight = nn.Parameter(torch.frombuffer(weights, dtype=torch.float32).view(256, 256))
    with outofcore.budget("2MiB", [mapped, buffered, shared]):
        assert location_of(mapped.weight) == location_of(buffered.weight) == "away"
        assert location_of(shared.weight) == "outside"
        for model in (mapped, buffered, shared):
            assert model.weight.equal(plain.weight)


def test_write_by_another_thread_is_not_lost(run: outofcore.Loop) -> None:
    x = torch.randn(256, 256)
    evict(x)
    x.sum()  # now in the arena, and clean
    thread = threading.Thread(target=x.fill_, args=(3.0,))
    thread.start()
    thread.join()
    evict(x)
    overwrite_the_arena()
    assert x.add(0).eq(3).all()
    assert run.stats.unseen_writes == 1


@pytest.mark.parametrize("check", ["sampled", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fixed", [False, True], ids=["by address", "by an array"])
def test_unseen_negation_of_a_clean_parameter_is_kept(
    check: Literal["sampled", "full"], dtype: torch.dtype, fixed: bool
) -> None:
    model = nn.Linear(512, 256, bias=False, dtype=dtype)
    weight = model.weight.detach()
    expected = -weight
    with outofcore.budget(16 * MIB, model, check=check) as run:
        if fixed:
            weight.view(torch.int16).numpy()
        weight.sum()
        evict(weight)
        weight.sum()  # now in the arena, and clean
        address = load_paging().follow_memory(weight.untyped_storage()._cdata)
        signs = np.ctypeslib.as_array((ctypes.c_uint8 * weight.nbytes).from_address(address))
        signs[dtype.itemsize - 1 :: dtype.itemsize] ^= 0x80
        evict(weight)
        overwrite_the_arena()
        assert weight.equal(expected)
        assert run.stats.unseen_writes == 1


def test_running_statistics_match_plain_pytorch_without_checks() -> None:
    """Batch norm writes them, which its schema does not declare."""

    def train(budget: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(20000), nn.Linear(20000, 4), nn.BatchNorm1d(4))

        def loop() -> None:
            for _ in range(8):
                model(torch.randn(8, 20000) * 2 + 1).square().mean().backward()

        if budget is None:
            loop()
        else:
            with outofcore.budget(budget, model, check="off") as run:
                load_paging().follow_stress(run._space, 1)
                loop()
        return [value.clone() for value in model.state_dict().values()]

    for ours, theirs in zip(train(16 * MIB), train(None), strict=True):
        assert ours.equal(theirs)


def write_by_relu6(x: Tensor) -> None:
    torch.ops.quantized.relu6(x, True)


def write_by_collective(x: Tensor) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_gather([x], x + 1)
    finally:
        dist.destroy_process_group()


def quantized_negatives() -> Tensor:
    return torch.quantize_per_tensor(torch.full((300, 300), -3.0), 0.1, 64, torch.quint8)


@pytest.mark.parametrize(
    ("make", "write"),
    [(lambda: torch.zeros(40000) + 1, write_by_collective), (quantized_negatives, write_by_relu6)],
    ids=["collective", "relu6"],
)
def test_silent_write_of_an_operator_is_kept_without_checks(
    make: Callable[[], Tensor], write: Callable[[Tensor], None]
) -> None:
    write(expected := make())
    assert not torch.equal(expected, make())
    with outofcore.budget(16 * MIB, check="off"):
        x = make()
        evict(x)
        x.clone()  # now in the arena, and clean
        write(x)
        x.clone()
        evict(x)
        overwrite_the_arena()
        assert torch.equal(x, expected)


def test_other_thread_reads_an_evicted_tensor(run: outofcore.Loop) -> None:
    x, results = torch.randn(256, 256), []
    total = x.sum().item()
    evict(x)
    thread = threading.Thread(target=lambda: results.append((x.sum().item(), x.clone())))
    thread.start()
    thread.join()
    assert results[0][0] == total
    assert results[0][1].equal(x)


def test_backward_runs_in_another_thread(run: outofcore.Loop) -> None:
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(64, 256)
    loss = (x @ weight).square().sum()
    evict_all(run)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert weight.grad is not None
    ours, weight.grad = weight.grad.clone(), None
    (x @ weight).square().sum().backward()
    assert weight.grad is not None
    assert ours.equal(weight.grad)


def test_forked_child_sees_a_snapshot_and_does_not_change_the_parent(run: outofcore.Loop) -> None:
    evicted, resident = torch.zeros(40000) + 1, torch.zeros(40000) + 1
    evict(evicted)
    begin, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin[0], 1)
        values = {*np.unique(evicted.tolist()), *np.unique(resident.tolist())}
        evicted.untyped_storage()[0] = 77
        os.write(end[1], b"y" if values == {1.0} else b"n")
        os._exit(0)
    evicted.add_(5)
    evict(evicted)  # to another slot, because the child may read the old one
    resident.add_(5)
    evict(resident)
    os.write(begin[1], b"!")
    assert os.read(end[0], 1) == b"y"
    os.waitpid(child, 0)
    for descriptor in (*begin, *end):
        os.close(descriptor)
    assert evicted.eq(6).all()
    assert resident.eq(6).all()


def test_forked_child_frees_tensors_and_runs_its_own_loop(run: outofcore.Loop) -> None:
    evicted, resident, model = torch.zeros(40000) + 1, torch.zeros(40000) + 1, nn.Linear(256, 256)
    evict(evicted)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        code = 1
        try:
            del evicted, resident
            run.stop()
            with outofcore.budget("1MiB", model) as child_run:
                for _ in range(4):
                    model(torch.ones(256, 256)).square().mean().backward()
            code = 0 if child_run.stats.evictions > 0 else 2
        except RuntimeError as error:
            # Autograd refuses to run in children once it has device threads, as in PyTorch's CUDA build.
            code = 3 if "fork-based multiprocessing" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 3)
    assert evicted.eq(1).all()
    assert resident.eq(1).all()


def test_sparse_opaque_meta_and_quantized_tensors_work(run: outofcore.Loop) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 20000), (2, 3, 20000))
    dense = sparse.to_dense()
    evict_all(run)
    assert sparse.to_dense().equal(dense)
    opaque = torch.randn(256, 256).to_mkldnn()
    evict_all(run)
    assert opaque.to_dense().shape == (256, 256)
    assert (torch.empty(1000, 1000, device="meta") + 1).device.type == "meta"
    quantized = torch.quantize_per_tensor(torch.randn(300, 300), 0.1, 0, torch.qint8)
    plain = quantized.dequantize()
    evict_all(run)
    assert quantized.dequantize().equal(plain)


def test_python_op_may_need_more_than_the_budget_in_total(run: outofcore.Loop) -> None:
    """Its inner ops fit one at a time, but not all at once."""

    @torch.library.custom_op("outofcore_tests::piled", mutates_args=())
    def pile_up(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x + torch.ones(MIB // 2)).sqrt()
        return x

    def plain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x + torch.ones(MIB // 2)).sqrt()
        return x

    x = torch.rand(MIB // 2)
    tensors = [torch.full((MIB // 2,), float(i)) for i in range(7)]
    assert pile_up(x).equal(plain(x))
    assert all(t.eq(i).all() for i, t in enumerate(tensors))


def test_failed_op_leaves_its_operands_unchanged(run: outofcore.Loop) -> None:
    x, y = torch.randn(200, 300), torch.randn(200, 300)
    expected = x.clone()
    for _ in range(50):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ y
    evict_all(run)
    assert x.equal(expected)


def test_lazy_modules_are_initialized_in_a_loop(run: outofcore.Loop) -> None:
    model = nn.Sequential(nn.LazyLinear(300), nn.ReLU(), nn.LazyLinear(200))
    model(torch.randn(64, 300)).sum().backward()
    evict_all(run)
    assert all(p.grad is not None for p in model.parameters())


def start_in_inference_mode(run: outofcore.Loop) -> None:
    with torch.inference_mode():
        run.start()


def start_in_backward_pass(run: outofcore.Loop) -> None:
    x = torch.ones(8, requires_grad=True)
    x.register_hook(lambda _: run.start() and None)
    x.sum().backward()


@pytest.mark.parametrize("start", [start_in_inference_mode, start_in_backward_pass])
def test_loop_keeps_its_budget_after_the_mode_at_its_start(start: Callable[[outofcore.Loop], None]) -> None:
    run = outofcore.budget(4 * MIB, home="host", policy=None)
    start(run)
    x = torch.ones(8)
    products = [x.expand(40000, -1) * number for number in range(8)]
    run.stop()
    assert run.stats.peak_bytes <= 4 * MIB
    assert run.stats.evictions > 0
    assert [tensor.sum().item() for tensor in products] == [320000.0 * number for number in range(8)]


def test_tensors_outlive_the_loop() -> None:
    with outofcore.budget(4 * MIB) as run:
        tensors = [torch.full((MIB // 4,), float(i)) for i in range(12)]  # three times the budget
    assert run.stats.peak_bytes <= 4 * MIB
    assert all(t.eq(i).all() for i, t in enumerate(tensors))
    for t in tensors:
        t.add_(1)
    # Another loop can use them.
    with outofcore.budget(3 * MIB) as second_run:
        total = sum(t.sum().item() for t in tensors)
        assert second_run.stats.peak_bytes <= 3 * MIB
    assert total == sum((i + 1) * (MIB // 4) for i in range(12))
    del tensors
    gc.collect()


def test_budget_error_names_op_line_and_smallest_budget() -> None:
    x = torch.randn(512, 512)
    expected_error = pytest.raises(outofcore.BudgetError, match=r"aten::mm at .*test_follow\.py:\d+")
    with expected_error as caught, outofcore.budget("1.5MiB"):
        x = x.clone()  # in the arena
        x @ x
    assert caught.value.smallest_budget == 2 * MIB
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert x.sum().isfinite()
    smallest = caught.value.smallest_budget
    assert smallest is not None
    with outofcore.budget(smallest + MIB, home="host"):
        product = x @ x
    assert product.equal(x @ x)


@pytest.mark.filterwarnings("ignore:.*overriding a previously registered kernel")
def test_refused_allocation_is_raised_when_the_op_caught_the_error() -> None:
    caught: list[type[BaseException]] = []

    def clone_with_less_memory(x: Tensor) -> Tensor:
        try:
            torch.empty(4 * MIB)
        except RuntimeError as error:  # as cuDNN does, which has slower algorithms
            caught.append(type(error))
        return x.clone()

    library = torch.library.Library("aten", "IMPL")
    library.impl("frac", clone_with_less_memory, "CPU")
    try:
        with outofcore.budget("4MiB", policy=None):
            x = torch.ones(MIB // 8)
            with pytest.raises(torch.OutOfMemoryError, match="cannot hold aten::frac, which asks for 16777216 bytes"):
                x.frac()
            assert caught == [RuntimeError]  # handlers for lack of memory do not catch it
            assert (x + 1).sum().item() == MIB // 4
    finally:
        del library


def test_loop_is_refused_during_another_loop_or_compiled_step() -> None:
    run = outofcore.budget("4MiB").start()
    try:
        with pytest.raises(outofcore.StateError, match="running already"):
            outofcore.budget("4MiB").start()
        with pytest.raises(outofcore.StateError, match="running already"):
            run.start()
        thread_errors: list[BaseException] = []

        def stop() -> None:
            try:
                run.stop()
            except outofcore.StateError as error:
                thread_errors.append(error)

        thread = threading.Thread(target=stop)
        thread.start()
        thread.join()
        assert "another thread started this loop" in str(thread_errors[0])
    finally:
        run.stop()
    run.stop()
    model = nn.Linear(256, 256)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with outofcore.compile(step, model, budget="4MiB") as compiled:
        compiled(torch.ones(64, 256))
        with pytest.raises(outofcore.StateError, match="compiled step"):
            outofcore.budget("4MiB").start()
    unclosed = outofcore.compile(step, model, budget="4MiB")
    unclosed(torch.ones(64, 256))
    cycle = [unclosed]
    cycle.append(cycle)  # type: ignore[arg-type]
    del unclosed, cycle, compiled
    with outofcore.budget("4MiB"):  # the step has no reference left
        pass
    within = outofcore.budget("4MiB")
    refused = pytest.raises(outofcore.StateError, match=r"outofcore\.budget")
    with within, outofcore.compile(step, model, budget="4MiB") as compiled, refused:
        compiled(torch.ones(64, 256))


def test_full_home_is_an_error() -> None:
    within = outofcore.budget("1MiB", home="host", host_budget="2MiB")
    with pytest.raises(outofcore.SpillError, match="no home has room"), within:
        [torch.zeros(MIB // 8) for _ in range(20)]


def test_bad_arguments_are_refused_before_any_change(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with pytest.raises(outofcore.UnitError):
        outofcore.budget("six", model)
    with pytest.raises(outofcore.InputError, match="model must be"):
        outofcore.budget("1MiB", [3])  # type: ignore[list-item]
    with pytest.raises(outofcore.InputError, match="no check"):
        outofcore.budget("1MiB", model, check="some")  # type: ignore[arg-type]
    with pytest.raises(outofcore.SpillError):
        outofcore.budget("1MiB", model, home=tmp_path / "nowhere").start()
    assert location_of(model.weight) == "outside"


def test_memory_is_bounded_over_steps_of_many_lengths() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    with outofcore.budget("3MiB", model, home="host") as run:
        usage = []
        for step in range(400):
            loss = model(torch.randn(100 + step * 37 % 150, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            if step in (100, 399):
                gc.collect()
                evict_all(run)
                usage.append((run.stats.bytes_in_use, run.stats.bytes_evicted, run.stats.peak_home_bytes))
    assert usage[0][:2] == usage[1][:2]
    assert usage[1][2] <= usage[0][2] * 1.5  # the last step has another length
    assert run.stats.evictions > 100
