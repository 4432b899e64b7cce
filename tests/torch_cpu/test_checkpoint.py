"""Tests of saving and loading checkpoints."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import outofcore
from outofcore.checkpoint import saving, tensor_files
from outofcore.errors import InputError, StateError, TransferError
from outofcore.runtime.file_io import Location

Sides = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]


class Model(nn.Module):
    """A model with tied weights, a changing non-persistent buffer, and several layouts and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(192, 192)
        self.conv = nn.Conv2d(3, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(64)
        self.out = nn.Linear(192, 192, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(20000), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = F.dropout(self.embed(x), 0.1)
        y = self.norm(self.wide(self.conv(x.view(-1, 3, 8, 8))))
        return self.out(x) + y.mean((1, 2, 3))[:, None]


def make(seed: int = 0, clear: bool = True) -> Sides:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(
        [{"params": [*model.embed.parameters()], "betas": (0.8, 0.99)}, {"params": [*model.conv.parameters()]}],
        lr=0.01,
        amsgrad=True,
    )
    optimizer.add_param_group({"params": [*model.wide.parameters(), *model.norm.parameters()], "lr": 0.002})

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        if clear:
            optimizer.zero_grad()
        return loss

    return model, optimizer, step


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 192, generator=torch.Generator().manual_seed(number))


def run(step: Callable[..., Any], numbers: range) -> list[torch.Tensor]:
    return [step(batch(k)) for k in numbers]


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *model.buffers()]
    tensors += [state[k][n] for k in sorted(state) for n in sorted(state[k])]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in tensors]


def assert_same_bits(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.fixture(scope="module")
def budget() -> int:
    model, optimizer, step = make()
    return outofcore.smallest_budget(step, model, optimizer, inputs=(batch(0),))


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("share", [1.0, 100])
def test_training_resumes_bit_for_bit(budget: int, tmp_path: Path, clear: bool, share: float) -> None:
    model, optimizer, step = make(clear=clear)
    with outofcore.compile(
        step, model, optimizer, budget=int(share * budget) + 2**20, policy="auto" if share > 1 else "window"
    ) as compiled:
        run(compiled, range(2))
        compiled.save(tmp_path / "deep" / "saved", extra={"epoch": 3, "history": [1.5, None]})
        numbers = random.random(), float(np.random.rand())
        expected = run(compiled, range(2, 4)) + bits(model, optimizer)
    model, optimizer, step = make(seed=5, clear=clear)
    with outofcore.compile(
        step, model, optimizer, budget=int(share * budget) + 2**20, policy="auto" if share > 1 else "window"
    ) as compiled:
        assert compiled.load(tmp_path / "deep" / "saved") == {"epoch": 3, "history": [1.5, None]}
        assert (random.random(), float(np.random.rand())) == numbers
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
        assert_same_bits(run(compiled, range(2, 4)) + bits(model, optimizer), expected)
        # The step has already run when this checkpoint is loaded.
        compiled.load(tmp_path / "deep" / "saved")
        assert_same_bits(run(compiled, range(2, 4)) + bits(model, optimizer), expected)


def test_plain_pytorch_and_compiled_steps_share_checkpoints(budget: int, tmp_path: Path) -> None:
    model, optimizer, step = make()
    run(step, range(2))
    outofcore.save(tmp_path, model, optimizer)
    expected = run(step, range(2, 4)) + bits(model, optimizer)
    with outofcore.open_home() as home:
        with torch.device("meta"):
            model, optimizer, step = make(seed=5)
        outofcore.load(tmp_path, model, optimizer, home=home)
        assert home.home_tensors.find(model.embed.weight) is not None
        with outofcore.compile(step, model, optimizer, budget=budget, home=home) as compiled:
            assert_same_bits(run(compiled, range(2, 4)) + bits(model, optimizer), expected)
            compiled.save(tmp_path)
            expected = run(compiled, range(4, 5)) + bits(model, optimizer)
    model, optimizer, step = make(seed=6)
    outofcore.load(tmp_path, model, optimizer)
    assert_same_bits(run(step, range(4, 5)) + bits(model, optimizer), expected)


def test_checkpoint_before_the_first_step_clears_optimizer_state(budget: int, tmp_path: Path) -> None:
    model, optimizer, step = make()
    with outofcore.compile(step, model, optimizer, budget=2 * budget) as compiled:
        compiled.save(tmp_path)
        expected = run(compiled, range(3)) + bits(model, optimizer)
        compiled.load(tmp_path)
        assert not optimizer.state
        assert_same_bits(run(compiled, range(3)) + bits(model, optimizer), expected)


def test_safetensors_reads_the_weights(tmp_path: Path) -> None:
    model, optimizer, step = make()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer)
    (path,) = tmp_path.glob("model-*.safetensors")
    tensors = load_file(path)
    state = model.state_dict()
    assert tensors.keys() == state.keys() - {"out.weight"}
    assert all(torch.equal(tensors[name], state[name]) for name in tensors)


def test_failed_step_resumes_from_a_checkpoint(budget: int, tmp_path: Path) -> None:
    model, optimizer, step = make()
    with outofcore.compile(step, model, optimizer, budget=2 * budget) as compiled:
        run(compiled, range(2))
        compiled.save(tmp_path)
        expected = run(compiled, range(2, 4)) + bits(model, optimizer)
        optimizer.param_groups[2]["betas"] = ("not a number", 0.9)
        with pytest.raises(TypeError):
            compiled(batch(4))
        compiled._session.torn = "TransferError: the disk is gone"
        with pytest.raises(StateError, match="half way"):
            compiled.save(tmp_path)
        compiled.load(tmp_path)
        assert_same_bits(run(compiled, range(2, 4)) + bits(model, optimizer), expected)


def test_load_without_a_model_returns_only_extra(tmp_path: Path) -> None:
    model, optimizer, step = make()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer, extra={"epoch": 3})
    run(step, range(1, 2))
    before, generator = bits(model, optimizer), torch.get_rng_state()
    assert outofcore.load(tmp_path) == {"epoch": 3}
    assert_same_bits(bits(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)


class Crash(BaseException):
    """Ends a save without cleanup, as the end of the process would."""


_CALLS = ("open", "write", "ftruncate", "fsync", "replace")


def test_crash_at_any_call_leaves_a_valid_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BUFFER_BYTES", 65536)  # many writes
    model, optimizer, step = make()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer, extra=0)
    states = [bits(model, optimizer)]
    run(step, range(1, 2))
    states.append(bits(model, optimizer))
    real = {name: getattr(os, name) for name in _CALLS} | {"transfer": tensor_files.transfer}
    countdown = 0

    def count_calls(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                if name in {"transfer", "write"}:
                    real[name](args[0], args[1][: len(args[1]) // 2 // 4096 * 4096], *args[2:], **kwargs)
                raise Crash
            return real[name](*args, **kwargs)

        return call

    crashes = 0
    loaded_extras = set()
    while True:
        countdown = crashes + 1
        with monkeypatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, count_calls(name))
            patch.setattr(tensor_files, "transfer", count_calls("transfer"))
            try:
                outofcore.save(tmp_path, model, optimizer, extra=1)
                completed = True
            except Crash:
                completed = False
        fresh, fresh_optimizer, _ = make(seed=9)
        extra = outofcore.load(tmp_path, fresh, fresh_optimizer)
        assert_same_bits(bits(fresh, fresh_optimizer), states[extra])
        loaded_extras.add(extra)
        if completed:
            break
        crashes += 1
    assert crashes > 20
    assert loaded_extras == {0, 1}
    outofcore.save(tmp_path, model, optimizer)
    assert len(list(tmp_path.iterdir())) == 3, "files of crashed saves are still there"


def test_save_syncs_each_file_before_the_index_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def record(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(target: Any, *args: Any) -> Any:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
            events.append((name, Path(path).name))
            return real(target, *args)

        return call

    model, optimizer, _ = make()
    with monkeypatch.context() as patch:
        for name in ("write", "ftruncate", "fsync", "replace"):
            patch.setattr(os, name, record(name))
        move = tensor_files.transfer

        def record_transfer(place: Location, *args: Any, **kwargs: Any) -> Any:
            events.append(("transfer", Path(f"/proc/self/fd/{place.descriptor}").readlink().name))
            return move(place, *args, **kwargs)

        patch.setattr(tensor_files, "transfer", record_transfer)
        outofcore.save(tmp_path, model, optimizer)
    renamed = events.index(("replace", "checkpoint.json.new"))
    before, after = events[:renamed], events[renamed:]
    last = {file: call for call, file in before}
    assert set(last.values()) == {"fsync"}
    assert len(last) == 4, "two data files, the index, and the folder that has their names"
    assert ("fsync", tmp_path.name) in after


KILLED = """
import os, sys, torch, outofcore
from outofcore.checkpoint import saving
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
saving.commit_index = lambda *_: os.kill(os.getpid(), 9)
outofcore.save(sys.argv[1], model)
"""


def test_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    def make_ones() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
        for p in model.parameters():
            nn.init.ones_(p)
        return model

    outofcore.save(tmp_path, make_ones())
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert process.returncode == -9
    assert len(list(tmp_path.iterdir())) > 3
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
    outofcore.load(tmp_path, model)
    assert all((p == 1).all() for p in model.parameters())
    outofcore.save(tmp_path, model)
    assert len(list(tmp_path.iterdir())) == 3


def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = make()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer)
    expected = bits(model, optimizer)
    before = sorted(tmp_path.iterdir())
    run(step, range(1, 2))
    real = tensor_files.transfer
    calls = 0

    def full(*args: Any, **kwargs: Any) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        return (0, errno.ENOSPC) if calls == 2 else real(*args, **kwargs)

    monkeypatch.setattr(tensor_files, "transfer", full)
    with pytest.raises(TransferError, match=r"No space left.*make room.*still whole"):
        outofcore.save(tmp_path, model, optimizer)
    assert sorted(tmp_path.iterdir()) == before
    outofcore.load(tmp_path, model, optimizer)
    assert_same_bits(bits(model, optimizer), expected)


def test_failed_sync_of_the_new_index_keeps_both_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = make()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer)
    states, indexes = [bits(model, optimizer)], [(tmp_path / saving.INDEX).read_bytes()]
    run(step, range(1, 2))
    states.append(bits(model, optimizer))
    sync, replaced = saving._sync, os.replace

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def replace_and_fail(*args: Any) -> None:
        replaced(*args)
        monkeypatch.setattr(saving, "_sync", fail)

    monkeypatch.setattr(os, "replace", replace_and_fail)
    with pytest.raises(TransferError, match=r"is complete, but a power failure .*Input/output error.*save again"):
        outofcore.save(tmp_path, model, optimizer)
    indexes.append((tmp_path / saving.INDEX).read_bytes())
    for state, index in zip(states, indexes, strict=True):  # after a power failure, either index may be there
        (tmp_path / saving.INDEX).write_bytes(index)
        outofcore.load(tmp_path, model, optimizer)
        assert_same_bits(bits(model, optimizer), state)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(saving, "_sync", sync)
    outofcore.save(tmp_path, model, optimizer)
    assert len(list(tmp_path.iterdir())) == 3


def damage(folder: Path, change: Callable[[bytearray], bytearray]) -> None:
    (path,) = folder.glob("model-*.safetensors")
    path.write_bytes(change(bytearray(path.read_bytes())))


def test_damaged_data_file_is_detected(budget: int, tmp_path: Path) -> None:
    model, optimizer, step = make()
    with outofcore.compile(step, model, optimizer, budget=2 * budget) as compiled:
        run(compiled, range(1))
        for name in ("good", "short", "changed"):
            compiled.save(tmp_path / name)
        damage(tmp_path / "short", lambda data: data[:-1])
        damage(tmp_path / "changed", lambda data: bytearray([*data[:-5], data[-5] ^ 1, *data[-4:]]))
        before = bits(model, optimizer)
        with pytest.raises(InputError, match="cut off"):
            compiled.load(tmp_path / "short")
        assert_same_bits(bits(model, optimizer), before)
        with pytest.raises(TransferError, match="checksum"):
            compiled.load(tmp_path / "changed")
        with pytest.raises(StateError, match="part old"):
            compiled(batch(1))
        compiled.load(tmp_path / "good")
        assert_same_bits(bits(model, optimizer), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["files"].popitem(), "checkpoint.json: .*no checksum"),
        (lambda index: index["names"].pop("model"), "checkpoint.json: .*no data file"),
        (lambda index: index["models"][0].update(stem=3), r"\$\.models\[0\]\.stem: expected str"),
        (lambda index: index["optimizers"][0]["groups"][1].pop("settings"), r"\$\.optimizers\[0\]\.groups\[1\]: "),
        (lambda index: index["generators"]["numpy"].update(key=[2**32]), r"numpy\.key\[0?.*\]: expected int"),
        (
            lambda index: index["models"][0].update(omitted={"a": {"shape": [-1], "dtype": ""}}),
            r"shape\[0?.*\]: expected",
        ),
        (lambda index: index.update(format="outofcore checkpoint 9"), r"\$\.format: .*newer version"),
    ],
)
def test_damaged_index_is_refused_naming_the_field(
    tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    model, optimizer, _ = make()
    outofcore.save(tmp_path, model, optimizer)
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    change(index)
    (tmp_path / "checkpoint.json").write_text(json.dumps(index))
    before = bits(model, optimizer)
    with pytest.raises(InputError, match=message):
        outofcore.load(tmp_path, model, optimizer)
    assert_same_bits(bits(model, optimizer), before)


def test_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer, step = make()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer)
    with pytest.raises(InputError, match=r"has no 0\.weight"):
        outofcore.load(tmp_path, nn.Sequential(nn.Linear(3, 3)), optimizer)
    with pytest.raises(InputError, match="1 optimizers, and 0"):
        outofcore.load(tmp_path, model)
    with pytest.raises(InputError, match=r"groups of \[8\] parameters"):
        outofcore.load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(InputError, match="there is no checkpoint"):
        outofcore.load(tmp_path / "nowhere", model, optimizer)
    untied = Model()
    untied.embed = nn.Linear(192, 192)
    with pytest.raises(InputError, match=r"one tensor when .* two tensors now"):
        outofcore.load(tmp_path, untied, optimizer)


def test_unsupported_extra_or_setting_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    with pytest.raises(StateError, match="extra is a set"):
        outofcore.save(tmp_path, model, optimizer, extra={1, 2})
    optimizer.param_groups[0]["thing"] = object()
    with pytest.raises(StateError, match="'thing' of group 0"):
        outofcore.save(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def test_tensor_setting_and_optimizer_only_parameter_are_saved(tmp_path: Path) -> None:
    def sides(value: float) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        model = nn.Linear(4, 4)
        standalone = nn.Parameter(torch.full((3,), value))
        lr = torch.tensor(value)
        return (
            model,
            torch.optim.AdamW([*model.parameters(), standalone], lr=lr, capturable=False, foreach=False),
            standalone,
        )

    model, optimizer, _ = sides(0.25)
    outofcore.save(tmp_path, model, optimizer)
    model, optimizer, standalone = sides(0.5)
    outofcore.load(tmp_path, model, optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert (standalone == 0.25).all()


def test_optimizer_only_parameter_without_its_saved_values_is_refused(tmp_path: Path) -> None:
    model, standalone = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
    outofcore.save(tmp_path, model, torch.optim.SGD([*model.parameters(), standalone], lr=0.1))
    model, standalone = nn.Linear(4, 4), nn.Parameter(torch.ones(5))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match=r"optimizer.0.parameter.2 has the shape \(5,\), and \(3,\) in"):
        outofcore.load(tmp_path, model, torch.optim.SGD([*model.parameters(), standalone], lr=0.1))
    outofcore.save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer_of_a_copy = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(InputError, match="parameter 0 of optimizer 0 is in no model"):
        outofcore.load(tmp_path, model, optimizer_of_a_copy)
    assert_same_bits(list(model.parameters()), before)


def test_scheduler_resumes_from_extra(budget: int, tmp_path: Path) -> None:
    def sides() -> tuple[Any, ...]:
        model, optimizer, step = make()
        return model, optimizer, step, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)

    def go(compiled: Any, scheduler: Any, numbers: range) -> None:
        for k in numbers:
            compiled(batch(k))
            scheduler.step()

    model, optimizer, step, scheduler = sides()
    with outofcore.compile(step, model, optimizer, budget=2 * budget) as compiled:
        go(compiled, scheduler, range(2))
        compiled.save(tmp_path, extra=scheduler.state_dict())
        go(compiled, scheduler, range(2, 4))
        expected = bits(model, optimizer)
    model, optimizer, step, scheduler = sides()
    with outofcore.compile(step, model, optimizer, budget=2 * budget) as compiled:
        scheduler.load_state_dict(compiled.load(tmp_path))
        go(compiled, scheduler, range(2, 4))
        assert_same_bits(bits(model, optimizer), expected)


def test_concurrent_saves_are_refused(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\nfrom outofcore.checkpoint.saving import lock_folder\n"
        "with lock_folder(pathlib.Path(sys.argv[1])):\n    print('in', flush=True)\n    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        with pytest.raises(StateError, match="another process is saving"):
            outofcore.save(tmp_path, nn.Linear(2, 2))
        process.communicate("\n")
    outofcore.save(tmp_path, nn.Linear(2, 2))
    assert json.loads((tmp_path / "checkpoint.json").read_text())["format"] == "outofcore checkpoint 1"


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(192, 192)
        self.tied = nn.Linear(192, 192, bias=False)
        self.tied.weight = self.base.weight
        self.norm = nn.BatchNorm1d(192)
        self.requires_grad_(False)
        self.adapter = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.tied(self.base(x)) + self.adapter(x))


BASE = ["base.bias", "base.weight", "norm.bias", "norm.weight"]


def make_adapted(seed: int = 0) -> Sides:
    torch.manual_seed(seed)
    model = Adapted()
    torch.manual_seed(1)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters())  # includes the frozen parameters

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def saved_names(folder: Path, stem: str = "model") -> list[str]:
    (file,) = folder.glob(f"{stem}-*.safetensors")
    return sorted(load_file(file))


def test_training_resumes_from_a_checkpoint_without_frozen_weights(tmp_path: Path) -> None:
    model, optimizer, step = make_adapted()
    run(step, range(2))
    model, optimizer, step = make_adapted()
    with outofcore.compile(step, model, optimizer, budget="2MiB", cache=False) as compiled:
        run(compiled, range(2))
        compiled.save(tmp_path / "small", extra=1, frozen=False)
        compiled.save(tmp_path / "whole")
        run(compiled, range(2, 4))
    expected = bits(model, optimizer)
    assert saved_names(tmp_path / "small")[:2] == ["adapter.bias", "adapter.weight"]
    assert not set(saved_names(tmp_path / "small")) & set(BASE)
    assert set(saved_names(tmp_path / "whole")) - set(saved_names(tmp_path / "small")) == set(BASE)
    model, optimizer, step = make_adapted()
    nn.init.zeros_(model.get_parameter("adapter.weight"))
    nn.init.zeros_(model.get_buffer("norm.running_mean"))
    with outofcore.compile(step, model, optimizer, budget="2MiB", cache=False) as compiled:
        assert compiled.load(tmp_path / "small") == 1
        run(compiled, range(2, 4))
    assert_same_bits(bits(model, optimizer), expected)


def test_frozen_parameters_are_saved_when_they_may_change(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("still", "state", "grad", "view", "a", "b")})
    parameters = {name: model.get_parameter(f"{name}.weight") for name in model}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters["state"].grad = torch.ones(8, 8)
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(False)
    parameters["grad"].grad = torch.ones(8, 8)
    model.register_buffer("rows", parameters["view"].detach()[:4])
    # Both parameters share memory, and only the second one is trained.
    model["b"].weight = nn.Parameter(parameters["a"].detach())
    outofcore.save(tmp_path, [model, nn.Linear(8, 8).requires_grad_(False)], optimizer, frozen=False)
    assert saved_names(tmp_path, "model0") == ["a.weight", "grad.weight", "rows", "state.weight", "view.weight"]
    assert saved_names(tmp_path, "model1") == []


def test_moving_average_written_by_the_step_is_saved(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("student", "teacher", "still")})
    student, teacher, still = (model.get_parameter(f"{name}.weight") for name in model)
    teacher.requires_grad_(False)
    still.requires_grad_(False)
    optimizer = torch.optim.SGD([student], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ student - x @ teacher @ still).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            teacher.lerp_(student, 0.1)
        return loss

    with outofcore.compile(step, model, optimizer, budget="1MiB", cache=False) as compiled:
        compiled(torch.ones(4, 8))
        compiled.save(tmp_path, frozen=False)
    assert saved_names(tmp_path) == ["student.weight", "teacher.weight"]


def test_checkpoint_without_frozen_weights_refuses_another_base(tmp_path: Path) -> None:
    model, optimizer, step = make_adapted()
    run(step, range(1))
    outofcore.save(tmp_path, model, optimizer, frozen=False)

    def refuses(message: str, change: Callable[[Adapted], object], make_model: Callable[[], Adapted] = Adapted) -> None:
        changed = make_model()
        change(changed)
        before = [(tensor.is_meta, tensor.clone()) for tensor in changed.state_dict().values()]
        with pytest.raises(InputError, match=message):
            outofcore.load(tmp_path, changed, torch.optim.AdamW(changed.parameters()))
        after = changed.state_dict().values()
        assert all(m == t.is_meta and (m or t.equal(b)) for (m, b), t in zip(before, after, strict=True))

    def on_meta() -> Adapted:
        with torch.device("meta"):
            return Adapted()

    refuses(r"base\.weight of model 0 requires gradients", lambda m: m.base.weight.requires_grad_())
    refuses(r"base\.weight of model 0 is on the device meta", lambda m: None, on_meta)
    refuses(r"is torch\.float64 \(192, 192\), and was torch\.float32", lambda m: m.double())
    refuses(r"is torch\.float32 \(96, 192\), and was", lambda m: setattr(m, "base", nn.Linear(192, 96)))
    refuses(r"has no base\.0\.weight", lambda m: setattr(m, "base", nn.Sequential(m.base)))
    refuses(r"has base\.bias, which model 0 does not have", lambda m: setattr(m.base, "bias", None))
    untied = nn.Linear(192, 192, bias=False).requires_grad_(False)
    refuses("were one tensor when .* two tensors now", lambda m: setattr(m, "tied", untied))


def test_adapter_on_the_meta_device_is_loaded(tmp_path: Path) -> None:
    model, _, _ = make_adapted()
    outofcore.save(tmp_path, model, frozen=False)
    loaded, _, _ = make_adapted()
    with torch.device("meta"):
        loaded.adapter = nn.Linear(192, 192)
    outofcore.load(tmp_path, loaded)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
