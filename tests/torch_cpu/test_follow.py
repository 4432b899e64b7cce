"""Tensors of a followed loop: whatever is done to them between ops and in ops gives what plain PyTorch gives."""

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


def where(tensor: Tensor) -> str:
    return ("outside", "arena", "away", "loose")[load_paging().follow_where(tensor.untyped_storage()._cdata)]


def send_away(tensor: Tensor) -> None:
    assert load_paging().follow_evict(tensor.untyped_storage()._cdata) == 1
    assert where(tensor) == "away"


def everything_leaves(run: outofcore.Loop) -> None:
    assert load_paging().follow_evict_all(run._space) == 0


def overwrite_the_arena() -> None:
    """Use all of it for something else."""
    for _ in range(2):
        torch.full((14 * MIB // 4,), 7.0)


def test_what_left_comes_back_when_an_op_needs_it(run: outofcore.Loop) -> None:
    x = torch.randn(256, 256)
    total = x.sum()
    send_away(x)
    overwrite_the_arena()
    assert x.sum() == total
    assert where(x) == "arena"


def test_what_is_away_is_read_where_it_is(run: outofcore.Loop) -> None:
    x = torch.arange(40000.0) + 0
    send_away(x)
    overwrite_the_arena()
    assert x.tolist()[39999] == 39999.0
    file = io.BytesIO()
    torch.save(x, file)
    assert where(x) == "away"
    assert torch.load(io.BytesIO(file.getvalue())).equal(x)
    assert pickle.loads(pickle.dumps(x)).equal(x)
    assert copy.deepcopy(x).equal(x)


def test_views_follow_their_base(run: outofcore.Loop) -> None:
    base = torch.randn(256, 256)
    wanted, part = base.clone(), base[3:9, ::2]
    send_away(base)
    part.mul_(2)
    wanted[3:9, ::2] *= 2
    send_away(base)
    overwrite_the_arena()
    assert base.equal(wanted)
    assert base.t().contiguous().equal(wanted.t())


def test_gradients_are_added_up_where_they_are(run: outofcore.Loop) -> None:
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(64, 256)
    (x @ weight).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    once = gradient.clone()
    send_away(gradient)
    (x @ weight).sum().backward()
    assert weight.grad is gradient
    assert gradient.equal(once * 2)


def test_storages_that_change_their_size(run: outofcore.Loop) -> None:
    x = torch.arange(40000.0) + 0
    send_away(x)
    x.resize_(80000)
    assert x[:40000].equal(torch.arange(40000.0))
    send_away(x)
    x.resize_(30000)
    assert x.equal(torch.arange(30000.0))
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    assert out.equal(torch.arange(1.0, 30001.0))
    out.untyped_storage().resize_(0)
    out.untyped_storage().resize_(120000)
    out.fill_(3)
    send_away(out)
    assert out.sum() == 90000


def test_data_that_moves_to_another_tensor(run: outofcore.Loop) -> None:
    parameter, new = nn.Parameter(torch.randn(200, 200)), torch.randn(200, 200)
    wanted = new.clone()
    send_away(new)
    parameter.data = new
    del new
    assert parameter.equal(wanted)
    send_away(parameter)
    shared = torch.empty(0).set_(parameter.untyped_storage(), 0, (200, 200), (200, 1))
    assert shared.equal(wanted)
    torch.utils.swap_tensors(shared, other := torch.zeros(200, 200))
    send_away(other)
    overwrite_the_arena()
    assert other.equal(wanted)
    assert shared.eq(0).all()


def test_memory_goes_with_the_last_reference(run: outofcore.Loop) -> None:
    gc.collect()
    before = run.stats
    tensors = [torch.randn(128, 256) for _ in range(20)]
    everything_leaves(run)
    assert run.stats.away_bytes >= before.away_bytes + 20 * 128 * 256 * 4
    del tensors
    tensors = [torch.randn(128, 256) for _ in range(20)]
    del tensors
    gc.collect()
    assert run.stats.away_bytes == before.away_bytes
    assert run.stats.bytes_in_use == before.bytes_in_use


def test_an_array_over_a_tensor_stays_valid_both_ways(run: outofcore.Loop) -> None:
    x = torch.zeros(40000) + 1
    array = x.numpy()
    everything_leaves(run)
    overwrite_the_arena()
    assert (array == 1).all()
    array[:] = 9
    assert x.add(0).eq(9).all()
    array[:] = 8  # in the arena again, and not by an op
    everything_leaves(run)
    overwrite_the_arena()
    assert x.add(0).eq(8).all()
    x.fill_(5)
    everything_leaves(run)
    assert (array == 5).all()


def test_a_tensor_that_is_away_when_its_address_is_taken(run: outofcore.Loop) -> None:
    x = torch.arange(40000.0) + 0
    send_away(x)
    array = np.from_dlpack(x)
    x.add_(1)
    everything_leaves(run)
    overwrite_the_arena()
    assert array[-1] == 40000.0
    x.mul_(2)
    assert array[-1] == 80000.0


def test_addresses_that_were_taken_stay(run: outofcore.Loop) -> None:
    x, y = torch.zeros(40000) + 1, torch.zeros(40000) + 2
    addresses = x.data_ptr(), y.untyped_storage().data_ptr()
    everything_leaves(run)
    overwrite_the_arena()
    x.add_(1)
    y.add_(1)
    assert (x.data_ptr(), y.untyped_storage().data_ptr()) == addresses
    assert run.stats.fixed == 2


def test_memory_of_others_stays_where_it_is(run: outofcore.Loop) -> None:
    array = np.zeros(40000, np.float32)
    x = torch.from_numpy(array)
    x.add_(1)
    assert (array == 1).all()
    assert where(x) == "outside"
    assert run.stats.foreign > 0
    shared = torch.zeros(40000).add_(5).share_memory_()
    shared.add_(1)
    assert shared.is_shared()
    assert shared.eq(6).all()


def test_a_model_is_taken_over_whosever_memory_it_lies_in(tmp_path: Path) -> None:
    plain = nn.Linear(256, 256)
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    mapped, buffered, shared = nn.Linear(256, 256), nn.Linear(256, 256), copy.deepcopy(plain).share_memory()
    mapped.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    weights = bytearray(plain.weight.detach().numpy().tobytes())
    buffered.weight = nn.Parameter(torch.frombuffer(weights, dtype=torch.float32).view(256, 256))
    with outofcore.budget("2MiB", [mapped, buffered, shared]):
        assert where(mapped.weight) == where(buffered.weight) == "away"
        assert where(shared.weight) == "outside"
        for model in (mapped, buffered, shared):
            assert model.weight.equal(plain.weight)


def test_what_another_thread_writes_is_not_lost(run: outofcore.Loop) -> None:
    x = torch.randn(256, 256)
    send_away(x)
    x.sum()  # in the arena now, and the same as at home
    thread = threading.Thread(target=x.fill_, args=(3.0,))
    thread.start()
    thread.join()
    send_away(x)
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
    wanted = -weight
    with outofcore.budget(16 * MIB, model, check=check) as run:
        if fixed:
            weight.view(torch.int16).numpy()
        weight.sum()
        send_away(weight)
        weight.sum()  # in the arena now, and the same as at home
        address = load_paging().follow_memory(weight.untyped_storage()._cdata)
        signs = np.ctypeslib.as_array((ctypes.c_uint8 * weight.nbytes).from_address(address))
        signs[dtype.itemsize - 1 :: dtype.itemsize] ^= 0x80
        send_away(weight)
        overwrite_the_arena()
        assert weight.equal(wanted)
        assert run.stats.unseen_writes == 1


def test_running_statistics_are_those_of_plain_pytorch_without_checks() -> None:
    """Batch norm writes them, and its schema does not say so."""

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
    write(wanted := make())
    assert not torch.equal(wanted, make())
    with outofcore.budget(16 * MIB, check="off"):
        x = make()
        send_away(x)
        x.clone()  # in the arena now, and the same as at home
        write(x)
        x.clone()
        send_away(x)
        overwrite_the_arena()
        assert torch.equal(x, wanted)


def test_other_threads_read_what_is_away(run: outofcore.Loop) -> None:
    x, seen = torch.randn(256, 256), []
    total = x.sum().item()
    send_away(x)
    thread = threading.Thread(target=lambda: seen.append((x.sum().item(), x.clone())))
    thread.start()
    thread.join()
    assert seen[0][0] == total
    assert seen[0][1].equal(x)


def test_backward_in_another_thread(run: outofcore.Loop) -> None:
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(64, 256)
    loss = (x @ weight).square().sum()
    everything_leaves(run)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert weight.grad is not None
    ours, weight.grad = weight.grad.clone(), None
    (x @ weight).square().sum().backward()
    assert weight.grad is not None
    assert ours.equal(weight.grad)


def test_a_child_sees_the_bytes_of_its_moment_and_changes_none(run: outofcore.Loop) -> None:
    away, here = torch.zeros(40000) + 1, torch.zeros(40000) + 1
    send_away(away)
    begin, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin[0], 1)
        seen = {*np.unique(away.tolist()), *np.unique(here.tolist())}
        away.untyped_storage()[0] = 77
        os.write(end[1], b"y" if seen == {1.0} else b"n")
        os._exit(0)
    away.add_(5)
    send_away(away)  # another slot: the child may look at the old one
    here.add_(5)
    send_away(here)
    os.write(begin[1], b"!")
    assert os.read(end[0], 1) == b"y"
    os.waitpid(child, 0)
    for descriptor in (*begin, *end):
        os.close(descriptor)
    assert away.eq(6).all()
    assert here.eq(6).all()


def test_a_child_frees_what_it_has_and_follows_a_loop_of_its_own(run: outofcore.Loop) -> None:
    away, here, model = torch.zeros(40000) + 1, torch.zeros(40000) + 1, nn.Linear(256, 256)
    send_away(away)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it where it waits for ever
        code = 1
        try:
            del away, here
            run.stop()
            with outofcore.budget("1MiB", model) as own:
                for _ in range(4):
                    model(torch.ones(256, 256)).square().mean().backward()
            code = 0 if own.stats.evictions > 0 else 2
        except RuntimeError as error:
            # Once autograd has threads for devices, as in PyTorch's CUDA build, it refuses to run in children.
            code = 3 if "fork-based multiprocessing" in str(error) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 3)
    assert away.eq(1).all()
    assert here.eq(1).all()


def test_other_kinds_of_tensors_pass(run: outofcore.Loop) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 20000), (2, 3, 20000))
    dense = sparse.to_dense()
    everything_leaves(run)
    assert sparse.to_dense().equal(dense)
    opaque = torch.randn(256, 256).to_mkldnn()
    everything_leaves(run)
    assert opaque.to_dense().shape == (256, 256)
    assert (torch.empty(1000, 1000, device="meta") + 1).device.type == "meta"
    quantized = torch.quantize_per_tensor(torch.randn(300, 300), 0.1, 0, torch.qint8)
    plain = quantized.dequantize()
    everything_leaves(run)
    assert quantized.dequantize().equal(plain)


def test_an_op_that_is_written_in_python(run: outofcore.Loop) -> None:
    """What it does is made of ops of its own, which need not fit all at once."""

    @torch.library.custom_op("outofcore_tests::piled", mutates_args=())
    def piled(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x + torch.ones(MIB // 2)).sqrt()
        return x

    def plain(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x + torch.ones(MIB // 2)).sqrt()
        return x

    x = torch.rand(MIB // 2)
    kept = [torch.full((MIB // 2,), float(i)) for i in range(7)]
    assert piled(x).equal(plain(x))
    assert all(t.eq(i).all() for i, t in enumerate(kept))


def test_an_op_that_fails_leaves_all_as_it_was(run: outofcore.Loop) -> None:
    x, y = torch.randn(200, 300), torch.randn(200, 300)
    wanted = x.clone()
    for _ in range(50):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ y
    everything_leaves(run)
    assert x.equal(wanted)


def test_a_lazy_module_and_its_first_step(run: outofcore.Loop) -> None:
    model = nn.Sequential(nn.LazyLinear(300), nn.ReLU(), nn.LazyLinear(200))
    model(torch.randn(64, 300)).sum().backward()
    everything_leaves(run)
    assert all(p.grad is not None for p in model.parameters())


def test_tensors_outlive_the_loop() -> None:
    with outofcore.budget(4 * MIB) as run:
        tensors = [torch.full((MIB // 4,), float(i)) for i in range(12)]  # three times the budget
    assert run.stats.peak_bytes <= 4 * MIB
    assert all(t.eq(i).all() for i, t in enumerate(tensors))
    for t in tensors:
        t.add_(1)
    # And go on in another loop.
    with outofcore.budget(3 * MIB) as again:
        total = sum(t.sum().item() for t in tensors)
        assert again.stats.peak_bytes <= 3 * MIB
    assert total == sum((i + 1) * (MIB // 4) for i in range(12))
    del tensors
    gc.collect()


def test_what_does_not_fit_is_told_with_op_line_and_bytes() -> None:
    x = torch.randn(512, 512)
    where_it_was = pytest.raises(outofcore.BudgetError, match=r"aten::mm at .*test_follow\.py:\d+")
    with where_it_was as caught, outofcore.budget("1.5MiB"):
        x = x.clone()  # in the arena
        x @ x
    assert caught.value.smallest_budget == 2 * MIB
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert x.sum().isfinite()
    least = caught.value.smallest_budget
    assert least is not None
    with outofcore.budget(least + MIB, home="host"):
        product = x @ x
    assert product.equal(x @ x)


@pytest.mark.filterwarnings("ignore:.*overriding a previously registered kernel")
def test_what_an_op_was_refused_is_raised_though_it_went_another_way() -> None:
    caught: list[type[BaseException]] = []

    def with_less_memory(x: Tensor) -> Tensor:
        try:
            torch.empty(4 * MIB)
        except RuntimeError as error:  # as cuDNN does, for which there are slower algorithms
            caught.append(type(error))
        return x.clone()

    library = torch.library.Library("aten", "IMPL")
    library.impl("frac", with_less_memory, "CPU")
    try:
        with outofcore.budget("4MiB", policy=None):
            x = torch.ones(MIB // 8)
            with pytest.raises(torch.OutOfMemoryError, match="cannot hold aten::frac, which asks for 16777216 bytes"):
                x.frac()
            assert caught == [RuntimeError]  # which those do not catch that look for a lack of memory
            assert (x + 1).sum().item() == MIB // 4
    finally:
        del library


def test_one_loop_at_a_time_and_none_beside_a_compiled_step() -> None:
    run = outofcore.budget("4MiB").start()
    try:
        with pytest.raises(outofcore.StateError, match="running already"):
            outofcore.budget("4MiB").start()
        with pytest.raises(outofcore.StateError, match="running already"):
            run.start()
        thread_saw: list[BaseException] = []

        def stop() -> None:
            try:
                run.stop()
            except outofcore.StateError as error:
                thread_saw.append(error)

        thread = threading.Thread(target=stop)
        thread.start()
        thread.join()
        assert "the thread that started a loop" in str(thread_saw[0])
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
    left_behind = outofcore.compile(step, model, budget="4MiB")
    left_behind(torch.ones(64, 256))
    itself = [left_behind]
    itself.append(itself)  # type: ignore[arg-type]
    del left_behind, itself, compiled
    with outofcore.budget("4MiB"):  # nobody refers to it any more
        pass
    within = outofcore.budget("4MiB")
    refused = pytest.raises(outofcore.StateError, match=r"outofcore\.budget")
    with within, outofcore.compile(step, model, budget="4MiB") as compiled, refused:
        compiled(torch.ones(64, 256))


def test_a_home_without_room_says_so() -> None:
    within = outofcore.budget("1MiB", home="host", host_budget="2MiB")
    with pytest.raises(outofcore.SpillError, match="no home has room"), within:
        [torch.zeros(MIB // 8) for _ in range(20)]


def test_bad_arguments_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with pytest.raises(outofcore.UnitError):
        outofcore.budget("six", model)
    with pytest.raises(outofcore.InputError, match="model must be"):
        outofcore.budget("1MiB", [3])  # type: ignore[list-item]
    with pytest.raises(outofcore.InputError, match="no check"):
        outofcore.budget("1MiB", model, check="some")  # type: ignore[arg-type]
    with pytest.raises(outofcore.SpillError):
        outofcore.budget("1MiB", model, home=tmp_path / "nowhere").start()
    assert where(model.weight) == "outside"


def test_nothing_grows_over_many_steps_of_many_lengths() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    with outofcore.budget("3MiB", model, home="host") as run:
        seen = []
        for step in range(400):
            loss = model(torch.randn(100 + step * 37 % 150, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            if step in (100, 399):
                gc.collect()
                everything_leaves(run)
                seen.append((run.stats.bytes_in_use, run.stats.away_bytes, run.stats.peak_home_bytes))
    assert seen[0][:2] == seen[1][:2]
    assert seen[1][2] <= seen[0][2] * 1.5  # other lengths were at home by then
    assert run.stats.evictions > 100
