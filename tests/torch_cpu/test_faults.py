"""What goes wrong in or around a step ends in a clear error, and the model is as it was before or marked torn."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outofcore
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.costs import Home
from outofcore.errors import InputError, SpillError, StateError, TransferError
from outofcore.execution.checks import Check, CheckedHome, checked, checksum
from outofcore.execution.homes import DiskHome, HostHome
from outofcore.execution.interrupts import Deferred
from outofcore.program import CopyIn, CopyOut
from outofcore.units import GIB, KIB, MIB, PAGE_BYTES

Sides = tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]]


def sides() -> Sides:
    """Batch norm changes early in a step, large parameters late; dropout draws."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(64, 256), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (128,), generator=torch.Generator().manual_seed(number))


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": tensor.clone() for name, tensor in entries.items()}
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in right.items():
        assert torch.equal(left[key], tensor), key


@pytest.fixture(scope="module")
def smallest() -> int:
    model, optimizer, step = sides()
    return outofcore.minimum_budget(step, model, optimizer, inputs=(batch(0),))


@pytest.fixture(params=["offload-all", "streamed"])
def compiled(request: pytest.FixtureRequest, smallest: int, tmp_path: Path) -> Iterator[tuple[Sides, Any]]:
    """The plain sides, and others with a step of two homes; two steps have been made of both."""
    plain, (model, optimizer, step) = sides(), sides()
    budget = smallest if request.param == "offload-all" else smallest * 3 // 2
    with outofcore.compile(
        step, model, optimizer, budget=budget, home=tmp_path, host_budget="300KiB", policy=request.param
    ) as ours:
        torch.manual_seed(5)
        theirs = [plain[2](batch(k)) for k in range(2)]
        torch.manual_seed(5)
        assert [ours(batch(k)) for k in range(2)] == theirs
        yield plain, (model, optimizer, ours)


def goes_on(plain: Sides, ours: Any) -> None:
    """Both make the same steps from here on."""
    model, optimizer, step = ours
    for k in range(2, 4):
        torch.manual_seed(k)
        theirs = plain[2](batch(k))
        torch.manual_seed(k)
        assert torch.equal(step(batch(k)), theirs)
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


class FaultError(Exception):
    """Stands in for whatever may be raised."""


def fail_at(monkeypatch: pytest.MonkeyPatch, step: Any, kind: str, number: int, error: BaseException) -> None:
    """Let the ``number``-th read or write of a home fail, once."""
    count = [0]
    for home in step.homes:
        original = getattr(home, kind)

        def fails(*args: Any, original: Callable[..., Any] = original) -> Any:
            count[0] += 1
            if count[0] == number:
                raise error
            return original(*args)

        monkeypatch.setattr(home, kind, fails)


def test_a_wrong_index_leaves_the_model_as_it_was(compiled: Any) -> None:
    plain, ours = compiled
    before = contents(ours[0], ours[1])
    generator = torch.get_rng_state()
    with pytest.raises(Exception, match="index out of range") as caught:
        ours[2](batch(9) + 1000)
    assert any("as they were before" in note for note in caught.value.__notes__)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same(contents(ours[0], ours[1]), before)
    goes_on(plain, ours)


@pytest.mark.parametrize("room", [1.0, 1.5, 20.0])
def test_gradients_left_on_the_device_go_with_a_step_that_fails(smallest: int, tmp_path: Path, room: float) -> None:
    def renewing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(ids) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    (model, optimizer, _), (plain_model, plain_optimizer, _) = sides(), sides()
    plain = renewing(plain_model, plain_optimizer)
    budget = int(smallest * room)
    with outofcore.compile(renewing(model, optimizer), model, optimizer, budget=budget, home=tmp_path) as ours:
        for k in range(3):
            torch.manual_seed(k)
            theirs = plain(batch(k))
            torch.manual_seed(k)
            assert torch.equal(ours(batch(k)), theirs)
        before = contents(model, optimizer)
        held = model[1].weight.grad
        assert held is not None
        expected = held.clone()
        with pytest.raises(Exception, match="index out of range") as caught:
            ours(batch(9) + 1000)
        assert any("as they were before" in note for note in caught.value.__notes__)
        assert_same(contents(model, optimizer), before)
        assert torch.equal(held, expected)
        staying = {ours.captured.graph.storages[s].name for s in ours.planned.program.staying}
        assert room < 20 or len(staying) == len(list(model.parameters()))
        for (name, parameter), other in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            if f"{name}.grad" in staying and parameter is not model[1].weight:
                assert parameter.grad is None
            elif parameter is not model[1].weight:
                assert torch.equal(parameter.grad, other.grad)
        torch.manual_seed(3)
        theirs = plain(batch(3))
        torch.manual_seed(3)
        assert torch.equal(ours(batch(3)), theirs)
        for parameter, other in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
    assert_same(contents(model, optimizer), contents(plain_model, plain_optimizer))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_failing_copy_undoes_the_step_or_tears_it(compiled: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = compiled
    step = ours[2]
    before = contents(ours[0], ours[1])
    copies = [i for i in step.planned.program.instructions if isinstance(i, CopyIn if kind == "read" else CopyOut)]
    undone = 0
    for number in range(1, len(copies) + 1):
        with monkeypatch.context() as patch:
            fail_at(patch, step, kind, number, TransferError("the disk is gone"))
            try:
                step(batch(9))
            except TransferError as error:
                assert "the disk is gone" in str(error)
                if any("as they were before" in note for note in error.__notes__):
                    undone += 1
                    assert_same(contents(ours[0], ours[1]), before)
                    continue
                with pytest.raises(StateError, match=r"part old and part new .* the disk is gone"):
                    step(batch(9))
                break
            else:
                break  # so many copies are not made by the homes: the others are the caller's
    assert undone or step.policy != "offload-all"
    step.close()
    for tensor in ours[0].state_dict().values():
        assert torch.isfinite(tensor).all()  # it can be read, whatever it is
    if not step._torn:
        return
    with pytest.raises(StateError, match="closed"):
        step(batch(2))


def test_an_operator_that_fails_late_tears_the_step(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = compiled
    step = ours[2]
    calls = []
    plain_call = OptimizerUpdate.__call__

    def fails(self: OptimizerUpdate, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise FaultError("half way")
        plain_call(self, *args)

    monkeypatch.setattr(OptimizerUpdate, "__call__", fails)
    with pytest.raises(FaultError) as caught:
        step(batch(9))
    assert any("part old and part new" in note for note in caught.value.__notes__)
    with pytest.raises(StateError, match=r"checkpoint .* compile"):
        step(batch(9))


def test_an_exception_of_the_users_step_changes_nothing(smallest: int, tmp_path: Path) -> None:
    model, optimizer, plain = sides()
    before = contents(model, optimizer)

    def step(ids: torch.Tensor) -> torch.Tensor:
        plain(ids)
        raise FaultError("the user's own")

    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        with pytest.raises(FaultError, match="own"):
            ours(batch(0))
        assert_same(contents(model, optimizer), before)


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_a_damaged_slot_is_noticed(check: str, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = sides()
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all", check=check
    ) as ours:
        ours(batch(0))
        before = contents(model, optimizer)
        (home,) = ours.homes
        original = home.inner.write

        written: list[int] = []

        def damaging(offset: int, source: memoryview) -> None:
            original(offset, source)
            written.append(offset)
            if len(written) == 3:  # an activation: parameters leave first
                original(offset + len(source) - PAGE_BYTES, memoryview(os.urandom(PAGE_BYTES)))

        monkeypatch.setattr(home.inner, "write", damaging)
        with pytest.raises(TransferError, match="checksum differs") as caught:
            ours(batch(1))
        monkeypatch.undo()
        assert any("as they were before" in note for note in caught.value.__notes__)
        assert_same(contents(model, optimizer), before)


def test_what_cannot_be_undone_tears_the_step(smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = sides()
    with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
        ours(batch(0))
        (home,) = ours.homes
        original = home.inner.write
        monkeypatch.setattr(
            home.inner,
            "write",
            lambda offset, source: original(offset, memoryview(os.urandom(len(source)))),
        )
        with pytest.raises(TransferError, match="checksum differs") as caught:
            ours(batch(1))
        monkeypatch.undo()
        assert any("could not be undone: the 64.0 KiB" in note for note in caught.value.__notes__)
        with pytest.raises(StateError, match="part old and part new"):
            ours(batch(1))


def test_what_is_left_on_disk_is_read_back_when_all_is_checked(tmp_path: Path) -> None:
    home = CheckedHome(DiskHome(tmp_path), Check.FULL)
    source = memoryview(bytearray(os.urandom(3 * MIB)))
    offset = home.reserve(3 * MIB)
    home.write(offset, source)
    home.read_back(offset)
    home.inner.write(offset + 2 * MIB, memoryview(os.urandom(PAGE_BYTES)))
    with pytest.raises(TransferError, match="checksum"):
        home.read_back(offset)
    home.start()
    home.read_back(offset)


def test_a_truncated_spill_file_is_noticed(smallest: int, tmp_path: Path) -> None:
    model, optimizer, step = sides()
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all", check="off"
    ) as ours:
        ours(batch(0))
        (home,) = ours.homes
        os.ftruncate(home._file._descriptor, 0)
        with pytest.raises(TransferError, match="was cut off"):
            ours(batch(1))
        os.posix_fallocate(home._file._descriptor, 0, home.bytes)  # or else closing would read past the end


def test_checksums_cover_what_they_say() -> None:
    memory = bytearray(os.urandom(40 * PAGE_BYTES))
    for at in (0, 40 * PAGE_BYTES - 1):
        other = bytearray(memory)
        other[at] ^= 1
        assert checksum(memoryview(other), 0, Check.SAMPLED) != checksum(memoryview(memory), 0, Check.SAMPLED)
    for at in range(0, len(memory), PAGE_BYTES):
        other = bytearray(memory)
        other[at + 17] ^= 1
        assert checksum(memoryview(other), 0, Check.FULL) != checksum(memoryview(memory), 0, Check.FULL)
    host = HostHome(MIB)
    assert checked(host, Check.SAMPLED) is host
    assert isinstance(checked(host, Check.FULL), CheckedHome)


def test_a_check_that_there_is_none() -> None:
    with pytest.raises(InputError, match="sampled, full"):
        outofcore.compile(lambda: None, nn.Linear(1, 1), budget="1MiB", check="some")


def test_a_full_disk_is_refused_before_anything_changes(smallest: int, tmp_path: Path) -> None:
    plain, (model, optimizer, step) = sides(), sides()
    before = contents(model, optimizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with outofcore.compile(step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all") as ours:
            ours._links = (Home("disk", None, 1e9, 1e9),)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400 * KIB, hard))
            torch.manual_seed(1)
            with pytest.raises(SpillError, match="lift the limit"):
                ours(batch(0))
            assert_same(contents(model, optimizer), before)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            torch.manual_seed(1)
            first = ours(batch(0))
            torch.manual_seed(1)
            assert torch.equal(first, plain[2](batch(0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


def test_exhausted_host_memory_is_refused_before_anything_changes(
    smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, (model, optimizer, step) = sides(), sides()
    before = contents(model, optimizer)
    with outofcore.compile(
        step, model, optimizer, budget=smallest, home=tmp_path, policy="offload-all", host_budget=MIB
    ) as ours:
        with monkeypatch.context() as patch:
            original = HostHome.check

            def exhausted(self: HostHome, count: int) -> None:
                if self is ours.homes[0]:
                    patch.setattr("outofcore.execution.host._available_bytes", lambda: 8 * KIB)
                original(self, count)

            patch.setattr(HostHome, "check", exhausted)
            with pytest.raises(SpillError, match=r"host memory, and the system has 8.00 KiB available"):
                ours(batch(0))
        assert_same(contents(model, optimizer), before)
        torch.manual_seed(1)
        first = ours(batch(0))
        torch.manual_seed(1)
        assert torch.equal(first, plain[2](batch(0)))


def test_memory_that_the_system_refuses() -> None:
    home = HostHome(4 * GIB)
    home.ensure(MIB)
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * KIB
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + GIB, hard))
    try:
        with pytest.raises(SpillError, match=r"does not give 2.00 GiB more of host memory .*Cannot allocate"):
            home.ensure(2 * GIB + MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    home.write(0, memoryview(bytes(MIB)))
    assert home.bytes == MIB


def test_signals_wait_for_the_end_of_what_must_not_be_torn() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), Deferred("the test"):
        signal.raise_signal(signal.SIGINT)
        done.append("to the end")
    assert done == ["to the end"]
    with pytest.raises(KeyboardInterrupt), Deferred("the test"):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    told: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with Deferred("the test"):
            signal.raise_signal(signal.SIGTERM)
            assert not told
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)
    thread = threading.Thread(target=lambda: Deferred("nothing").__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_middle_of_a_step(compiled: Any, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = compiled
    step = ours[2]
    before = contents(ours[0], ours[1])
    home = step.homes[-1]
    original, sent, noted = home.read, [], threading.Semaphore(0)
    note = Deferred._note

    def noting(self: Deferred, *args: Any) -> None:
        noted.release()
        note(self, *args)

    def interrupting(*args: Any) -> None:
        if not sent:
            sent.append(1)
            for _ in range(times):  # one after the other: two that come at once are one
                os.kill(os.getpid(), signal.SIGINT)
                assert noted.acquire(timeout=60)
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Deferred, "_note", noting)
        patch.setattr(home, "read", interrupting)
        torch.manual_seed(9)
        with pytest.raises(KeyboardInterrupt) as caught:
            step(batch(9))
    if times == 1:
        torch.manual_seed(9)
        plain[2](batch(9))
        assert_same(contents(ours[0], ours[1]), contents(plain[0], plain[1]))
        goes_on(plain, ours)
    elif any("as they were before" in note for note in getattr(caught.value, "__notes__", ())):
        assert_same(contents(ours[0], ours[1]), before)
        goes_on(plain, ours)
    else:
        with pytest.raises(StateError, match="KeyboardInterrupt"):
            step(batch(9))


KILLED = """
import os, signal, sys
import torch
sys.path.insert(0, sys.argv[1])
import test_faults as here
import outofcore
model, optimizer, step = here.sides()
ours = outofcore.compile(
    step, model, optimizer, budget=int(sys.argv[3]), home=sys.argv[2], host_budget="300KiB", policy="offload-all"
)
ours(here.batch(0))
original = ours.homes[-1].read
count = []
def read(*args):
    count.append(1)
    if len(count) == 3:
        print("spilling", flush=True)
        os.kill(os.getpid(), int(sys.argv[4]))
    original(*args)
ours.homes[-1].read = read
ours(here.batch(1))
print("survived", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_killed_in_the_middle_of_a_step_leaves_nothing(
    number: signal.Signals, smallest: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), str(smallest), str(int(number))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -number, done.stderr
    assert done.stdout == "spilling\n"
    assert list(tmp_path.iterdir()) == []


def _in_child(step: Any, model: nn.Module, told: Any) -> None:
    torch.set_num_threads(1)  # as workers of a data loader do: the threads of OpenMP are not in a fork
    found: dict[str, str] = {"sum": repr(float(model[1].weight.double().sum()))}
    for name, act in (("call", lambda: step(batch(0))), ("close", step.close)):
        try:
            act()
            found[name] = "done"
        except StateError as error:
            found[name] = str(error)
    told.send(json.dumps(found))
    told.close()


def test_a_fork_cannot_run_the_step_and_leaves_it_alone(compiled: Any) -> None:
    plain, ours = compiled
    model, _, step = ours
    mine, its = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(step, model, its))
    child.start()
    try:
        assert mine.poll(60)
        found = json.loads(mine.recv())
        child.join()
    finally:
        child.kill()
    assert child.exitcode == 0
    assert found["sum"] == repr(float(model[1].weight.double().sum()))
    assert f"belongs to process {os.getpid()}" in found["call"]
    assert found["close"] == "done"
    goes_on(plain, ours)


def test_workers_of_a_data_loader_do_no_harm(compiled: Any) -> None:
    plain, (model, optimizer, step) = compiled
    data = torch.utils.data.TensorDataset(torch.cat([batch(k) for k in range(4)]))
    loader = torch.utils.data.DataLoader(data, batch_size=128, num_workers=1, multiprocessing_context="fork")
    torch.manual_seed(3)
    theirs = [plain[2](ids) for (ids,) in torch.utils.data.DataLoader(data, batch_size=128)]
    torch.manual_seed(3)
    assert [step(ids) for (ids,) in loader] == theirs
    assert_same(contents(model, optimizer), contents(plain[0], plain[1]))


def test_two_steps_over_one_model_take_turns(compiled: Any, smallest: int, tmp_path: Path) -> None:
    plain, (model, optimizer, step) = compiled

    def evaluate(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids)

    with outofcore.compile(evaluate, model, budget=smallest, home=tmp_path, policy="offload-all") as other:
        for k in range(2, 5):
            torch.manual_seed(k)
            theirs = plain[2](batch(k))
            torch.manual_seed(k)
            assert torch.equal(step(batch(k)), theirs)
            torch.manual_seed(k)
            with torch.no_grad():
                right = plain[0](batch(k))
            torch.manual_seed(k)
            assert torch.equal(other(batch(k)), right)
    goes_on(plain, (model, optimizer, step))


def test_two_steps_over_one_model_at_once_are_noticed(
    compiled: Any, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (model, _, step) = compiled
    home = step.homes[-1]
    original, done = home.read, []

    def meanwhile(*args: Any) -> None:
        original(*args)
        if not done:
            done.append(1)
            model[1].weight.data = model[1].weight.data.clone()  # as another step does when it takes the model

    monkeypatch.setattr(home, "read", meanwhile)
    with pytest.raises(StateError, match=r"1\.weight got other memory while the step ran"):
        step(batch(9))
    with pytest.raises(StateError, match="part old and part new"):
        step(batch(9))


def test_one_step_in_two_threads_is_refused(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = compiled
    step = ours[2]
    home = step.homes[-1]
    original, told = home.read, []

    def meanwhile(*args: Any) -> None:
        original(*args)
        if not told:
            try:
                step(batch(0))
            except StateError as error:
                told.append(str(error))

    torch.manual_seed(9)
    theirs = plain[2](batch(9))
    with monkeypatch.context() as patch:
        patch.setattr(home, "read", meanwhile)
        torch.manual_seed(9)
        assert torch.equal(step(batch(9)), theirs)
    assert "running already" in told[0]
    goes_on(plain, ours)


SECOND = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import test_faults as here
import outofcore
model, optimizer, step = here.sides()
with outofcore.compile(
    step, model, optimizer, budget=int(sys.argv[3]), home=sys.argv[2], host_budget="300KiB", policy="offload-all"
) as ours:
    torch.manual_seed(5)
    print([float(ours(here.batch(k))).hex() for k in range(3)])
"""


def test_a_second_process_with_the_same_spill_folder(smallest: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SECOND, str(Path(__file__).parent), str(tmp_path), str(smallest)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=300) for process in both]
    _, _, plain = sides()
    torch.manual_seed(5)
    right = str([float(plain(batch(k))).hex() for k in range(3)])
    for (out, errors), process in zip(told, both, strict=True):
        assert process.returncode == 0, errors
        assert out.strip() == right
    assert list(tmp_path.iterdir()) == []
