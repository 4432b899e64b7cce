"""Tests of ``build`` and ``materialize``, which create a model at its home."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import outofcore
from outofcore.errors import InputError, StateError
from outofcore.zoo import workload

GPT = {"layers": 1, "width": 192, "heads": 3, "context": 64}


class Initialised(nn.Module):
    """A model with users' ways of initialisation, on parameters above and below 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(160, 160)
        self.rnn = nn.GRU(96, 96)
        self.attention = nn.MultiheadAttention(128, 4)
        self.norm = nn.BatchNorm1d(160)
        values = torch.empty(200, 200)
        self.late = nn.Parameter(values)  # initialised through another tensor afterwards
        nn.init.orthogonal_(values)
        self.scaled = nn.Parameter(torch.randn(150, 150) * 0.02)
        self.register_buffer("table", torch.rand(130, 130))
        self.register_buffer("mask", torch.ones(180, 180).tril(), persistent=False)
        self.tied = nn.Linear(160, 160, bias=False)
        self.tied.weight = self.first.weight
        self.whole = nn.Parameter(torch.randn(2, 160, 160))
        self.part = nn.Parameter(self.whole.data[1])  # shares memory with ``whole``
        self.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.apply(self._reinitialise)

    def _reinitialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


@pytest.fixture
def home() -> Iterator[outofcore.OpenHome]:
    with outofcore.open_home() as store:
        yield store


def make_seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(11)
    return make(), torch.get_rng_state()


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    for (name, actual), (_, expected) in zip(
        [*ours.named_parameters(), *ours.named_buffers()],
        [*plain.named_parameters(), *plain.named_buffers()],
        strict=True,
    ):
        assert actual.stride() == expected.stride(), name
        assert torch.equal(actual, expected), name


def is_at_home(home: outofcore.OpenHome, tensor: torch.Tensor) -> bool:
    return home.home_tensors.find(tensor) is not None


def test_build_gives_the_bits_of_the_constructor(home: outofcore.OpenHome) -> None:
    plain, state = make_seeded(Initialised)
    ours, ours_state = make_seeded(lambda: outofcore.build(Initialised, home=home))
    assert_same(ours, plain)
    assert torch.equal(ours_state, state)
    for tensor in (*ours.parameters(), *ours.buffers()):
        assert is_at_home(home, tensor) == (tensor.untyped_storage().nbytes() >= 65536)
    assert isinstance(ours, Initialised)
    assert ours.tied.weight is ours.first.weight
    with torch.no_grad():
        ours.whole[1].fill_(7)
    assert (ours.part == 7).all()


def test_room_of_replaced_parameters_is_reused(home: outofcore.OpenHome) -> None:
    def make_and_replace() -> nn.Module:
        model = nn.Linear(1024, 1024, bias=False)
        for _ in range(20):
            model.weight = nn.Parameter(torch.ones(1024, 1024))
        return model

    outofcore.build(make_and_replace, home=home)
    assert home.bytes <= 8 * 1024 * 1024 * 4


def test_build_gives_the_bits_of_a_zoo_model(home: outofcore.OpenHome) -> None:
    work = workload("gpt", batch=1, **GPT)
    ours = outofcore.build(work.build, home=home)
    assert_same(ours, work.build())
    # The embedding, which the head shares, and the matrices of a block.
    assert sum(is_at_home(home, p) for p in ours.parameters()) == 1 + 4


def make_modules() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(300, 160, padding_idx=3),
        nn.LSTM(160, 160, num_layers=2),
        nn.MultiheadAttention(160, 4),
        nn.Sequential(nn.Linear(160, 160), nn.BatchNorm1d(160), nn.LayerNorm(160)),
        nn.Bilinear(20, 30, 160),
        nn.Transformer(64, 2, 1, 1, 64),
        nn.ConvTranspose2d(64, 64, 3),
    )


def test_meta_model_is_initialised_by_its_modules(home: outofcore.OpenHome) -> None:
    plain, state = make_seeded(make_modules)
    with torch.device("meta"):
        ours = make_modules()
    ours_state = make_seeded(lambda: outofcore.materialize(ours, home=home))[1]
    assert_same(ours, plain)
    assert torch.equal(ours_state, state)
    assert all(is_at_home(home, p) == (p.untyped_storage().nbytes() >= 65536) for p in ours.parameters())


def test_init_function_runs_after_the_modules(home: outofcore.OpenHome) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))

    plain, _ = make_seeded(lambda: make().apply(init))
    with torch.device("meta"):
        ours = make()
    optimizer = torch.optim.AdamW(ours.parameters())
    make_seeded(lambda: outofcore.materialize(ours, home=home, init=init))
    assert_same(ours, plain)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in ours.parameters()]


def test_parameter_without_an_initialiser_is_refused(home: outofcore.OpenHome) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(200, 200))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Bare())
    with pytest.raises(InputError, match=r"1\.weight .*outofcore\.build"):
        outofcore.materialize(model, home=home)
    with torch.device("meta"), pytest.raises(InputError, match=r"outofcore\.materialize"):
        outofcore.build(Bare, home=home)


def test_closed_home_is_refused(home: outofcore.OpenHome) -> None:
    home.close()
    with pytest.raises(StateError, match="closed"):
        outofcore.build(make_modules, home=home)


@pytest.mark.parametrize("layout", ["one", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_loaded_from_files(
    home: outofcore.OpenHome, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    plain = make_modules()
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    if layout == "one":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        names = sorted(tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, members in shards.items():
            save_file({name: tensors[name] for name in members}, tmp_path / file)
        index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        ours = make_modules()
    outofcore.materialize(ours, home=home, weights=tmp_path)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name


def test_weights_of_another_shape_are_refused(home: outofcore.OpenHome, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(5)}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = nn.Linear(5, 5)
    with pytest.raises(InputError, match=r"weight .*\(5, 5\).*\(3, 4\)"):
        outofcore.materialize(model, home=home, weights=tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"\x07\x00")
    with pytest.raises(InputError, match="cut off"):
        outofcore.materialize(model, home=home, weights=tmp_path / "w.safetensors")


class Wrapped(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, make_modules())


@pytest.mark.parametrize(
    ("name_format", "make", "advice"),
    [
        ("module.{}", make_modules, r"begin with 'module\.': .*removeprefix\('module\.'\)"),
        ("_orig_mod.{}", make_modules, r"begin with '_orig_mod\.'"),
        ("base.model.{}", make_modules, r"begin with 'base\.model\.'"),
        ("{}", partial(Wrapped, "model"), r"get_submodule\('model'\)"),
        ("model._orig_mod.{}", partial(Wrapped, "model"), r"differ by _orig_mod"),
        ("{}.other", make_modules, "pass the weights of this model"),
    ],
)
def test_weights_without_a_matching_name_are_refused(
    home: outofcore.OpenHome, tmp_path: Path, name_format: str, make: Callable[[], nn.Module], advice: str
) -> None:
    file = tmp_path / "w.safetensors"
    save_file({name_format.format(name): tensor for name, tensor in make_modules().state_dict().items()}, file)
    with torch.device("meta"):
        model = make()
    with pytest.raises(InputError, match=rf"is also in the model: the file has .* and \d+ more, .*{advice}"):
        outofcore.materialize(model, home=home, weights=file)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_names_without_a_counterpart_are_reported(
    home: outofcore.OpenHome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_modules().state_dict()
    omitted = sorted(name for name in plain if name.endswith("bias"))
    remaining = {name: tensor for name, tensor in plain.items() if name not in omitted}
    extra = {f"more.{number}": torch.zeros(2) for number in range(5)}
    save_file({**remaining, **extra}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = make_modules()
    outofcore.materialize(model, home=home, weights=tmp_path / "w.safetensors")
    (record,) = caplog.records
    assert omitted[0] in record.message
    assert "more.0, more.1, more.2 and 2 more" in record.message
    save_file(plain, tmp_path / "w.safetensors")
    caplog.clear()
    with torch.device("meta"):
        model = make_modules()
    outofcore.materialize(model, home=home, weights=tmp_path / "w.safetensors")
    assert not caplog.records


def test_weights_for_an_initialised_model_are_refused(home: outofcore.OpenHome, tmp_path: Path) -> None:
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"no weights of .*w\.safetensors would be read.*load_state_dict"):
        outofcore.materialize(nn.Linear(4, 4), home=home, weights=tmp_path / "w.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_an_incompatible_dtype_are_refused(
    home: outofcore.OpenHome, tmp_path: Path, dtype: torch.dtype
) -> None:
    save_file({"weight": torch.zeros(300, 300).to(dtype), "bias": torch.zeros(300)}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = nn.Linear(300, 300)
    with pytest.raises(InputError, match=f"weight is of torch.float32, and of {dtype}"):
        outofcore.materialize(model, home=home, weights=tmp_path / "w.safetensors")
    assert model.weight.is_meta


@pytest.mark.parametrize("home_kind", ["disk", "host"])
def test_model_built_at_home_trains_as_in_memory(home_kind: str) -> None:
    work = workload("gpt", batch=2, **GPT)

    def losses(model: nn.Module, run: Callable[..., Any]) -> list[str]:
        torch.manual_seed(1)
        batches = work.batches()
        return [run(*next(batches)).item().hex() for _ in range(3)]

    plain = work.build()
    expected = losses(plain, work.make_step(plain, work.optimizer(plain)))
    with outofcore.open_home(home_kind) as home:
        model = outofcore.build(work.build, home=home)
        optimizer = work.optimizer(model)
        step = work.make_step(model, optimizer)
        batch = next(work.batches())
        budget = outofcore.smallest_budget(step, model, optimizer, inputs=batch, split="off")
        with outofcore.compile(step, model, optimizer, budget=budget, home=home, policy="window") as compiled:
            assert losses(model, compiled) == expected
        # The model stays at home when the step is closed: it may not fit into memory.
        assert all(is_at_home(home, p) for p in model.parameters() if p.untyped_storage().nbytes() >= 65536)
    assert_same(model, plain)


# 40 parameters of 4 MiB take 160 MiB; Adam's state takes 320 MiB.
SCRIPT = """
import resource, sys, torch, outofcore
import torch.nn.functional as F
from outofcore.runtime.native import load_native
from outofcore.report.machine import peak_memory_bytes, resident_memory_bytes

torch.set_num_threads(1)
load_native()

def train(layers, folder):
    with outofcore.open_home() as home:
        make = lambda: torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)])
        model = outofcore.build(make, home=home)
        optimizer = torch.optim.AdamW(model.parameters())
        def step(x):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss
        with outofcore.compile(step, model, optimizer, budget="72MiB", home=home, policy="window") as run:
            x = torch.rand(16, 1024)
            run(x)
            run.save(folder)
            run.load(folder)
            run(x)

train(2, sys.argv[1])
before = resident_memory_bytes()
train(40, sys.argv[1])
print(peak_memory_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports peaks of memory")
def test_memory_from_build_to_checkpoint_stays_within_the_budget(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) <= 1.02 * (72 << 20) + (64 << 20)
