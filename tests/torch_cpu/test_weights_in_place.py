"""Tests of weights read directly from a file, without a copy and without writing to it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import outofcore
from outofcore.checkpoint.tensor_files import read_header
from outofcore.errors import InputError, TransferError
from outofcore.runtime.file_ranges import ReadFile, Stamp, can_detect_writes
from outofcore.runtime.mapped_files import MappedFiles
from outofcore.runtime.memory import Region, map_anonymous
from outofcore.units import KIB, MIB, PAGE_BYTES

WIDTH = 192
BYTES = WIDTH * WIDTH * 4

pytestmark = pytest.mark.skipif(not can_detect_writes(), reason="the kernel does not report written pages")


@pytest.fixture
def home() -> Iterator[outofcore.OpenHome]:
    with outofcore.open_home("disk") as opened:
        yield opened


def model_of(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def save_weights(folder: Path, seed: int = 5) -> dict[str, torch.Tensor]:
    """Save weights to a file in which no tensor begins at a multiple of the page size."""
    torch.manual_seed(seed)
    weights = {name: tensor.detach().clone() for name, tensor in model_of().named_parameters()}
    save_file({"0": torch.zeros(3), **weights}, folder / "model.safetensors")
    return weights


def read_in_place(folder: Path, home: outofcore.OpenHome) -> nn.Sequential:
    with torch.device("meta"):
        model = model_of()
    outofcore.materialize(model, home=home, weights=folder)
    return model


def is_in_file(home: outofcore.OpenHome, tensor: torch.Tensor) -> bool:
    home_tensor = home.home_tensors.find(tensor)
    return home_tensor is not None and home.home_tensors.slots[home_tensor.home].is_in_file(home_tensor.offset)


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def assert_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, weights[name]), name


def test_weights_in_a_file_are_not_copied_to_the_home(home: outofcore.OpenHome, tmp_path: Path) -> None:
    weights = save_weights(tmp_path)
    model = read_in_place(tmp_path, home)
    assert home.bytes == 0
    assert [is_in_file(home, model[i].weight) for i in range(3)] == [True] * 3
    assert not is_in_file(home, model[0].bias)
    assert_weights(model, weights)
    outofcore.save(tmp_path / "checkpoint", model)
    (copy,) = (tmp_path / "checkpoint").glob("model-*.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(copy).items())
    assert home.bytes == 0


def test_changed_weights_stay_private_and_are_saved(home: outofcore.OpenHome, tmp_path: Path) -> None:
    weights = save_weights(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = read_in_place(tmp_path, home)
    model[1].weight.data[7, 3] = 100.0
    weights["1.weight"][7, 3] = 100.0
    assert_weights(model, weights)
    home.home_tensors.drop_cache(model[1].weight)
    assert_weights(model, weights)
    outofcore.save(tmp_path / "checkpoint", model)
    (copy,) = (tmp_path / "checkpoint").glob("model-*.safetensors")
    assert torch.equal(load_file(copy)["1.weight"], weights["1.weight"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    outofcore.load(tmp_path / "checkpoint", model, home=home)
    assert_weights(model, weights)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_aliases_keep_showing_the_weights(home: outofcore.OpenHome, tmp_path: Path) -> None:
    save_weights(tmp_path)
    model = read_in_place(tmp_path, home)
    model.requires_grad_(False)
    alias = model[0].weight.data.view(-1)
    array = model[0].weight.numpy()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    x = torch.ones(2, WIDTH)
    budget = outofcore.smallest_budget(step, model, inputs=(x,))
    with outofcore.compile(step, model, budget=budget, home=home, dynamic=False) as compiled:
        for number in range(4):
            alias[number] = float(number)
            array[5, number] = -float(number)
            assert model[0].weight[0, number] == number
            assert torch.equal(compiled(x), model(x)), number
            assert is_in_file(home, model[0].weight) is False
            assert alias.data_ptr() == model[0].weight.data_ptr() == array.ctypes.data
        assert is_in_file(home, model[1].weight)


def _init_ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@pytest.mark.parametrize("change", ["a step learns it", "another dtype", "init", "its module lacks something"])
def test_changed_or_initialised_weights_are_exact(home: outofcore.OpenHome, tmp_path: Path, change: str) -> None:
    weights = save_weights(tmp_path)
    if change == "its module lacks something":
        del weights["1.bias"]
        save_file(weights, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = model_of()
    if change == "another dtype":
        model.double()
    outofcore.materialize(model, home=home, weights=tmp_path, init=_init_ones if change == "init" else None)
    assert is_in_file(home, model[1].weight) == (change != "another dtype")
    if change != "a step learns it":
        assert all(torch.equal(p, weights[n].to(p.dtype)) for n, p in model.named_parameters() if n in weights)
        return
    plain = model_of()
    plain.load_state_dict(weights)
    results = []
    for trained_model in (plain, model):
        optimizer = torch.optim.SGD(trained_model.parameters(), lr=0.1)

        def step(x: torch.Tensor, trained_model: nn.Module = trained_model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = (trained_model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        x = torch.ones(2, WIDTH)
        if trained_model is model:
            budget = outofcore.smallest_budget(step, model, optimizer, inputs=(x,))
            step = outofcore.compile(step, model, optimizer, budget=budget, home=home, dynamic=False)
        results.append([step(x).detach().item() for _ in range(3)])
    assert results[0] == results[1]
    assert_weights(model, dict(plain.named_parameters()))
    assert not is_in_file(home, model[1].weight)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - PAGE_BYTES)


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def _write(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("damage", [_cut, _touch, _write])
def test_change_of_the_file_between_steps_is_noticed(
    home: outofcore.OpenHome, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    save_weights(tmp_path)
    model = read_in_place(tmp_path, home).requires_grad_(False)
    x = torch.ones(2, WIDTH)
    with outofcore.compile(partial(_forward, model), model, budget="1MiB", home=home, dynamic=False) as compiled:
        compiled(x)
        damage(tmp_path / "model.safetensors")
        with pytest.raises(TransferError, match=r"model\.safetensors was changed"):
            compiled(x)


def test_renamed_file_is_still_read(home: outofcore.OpenHome, tmp_path: Path) -> None:
    weights = save_weights(tmp_path)
    model = read_in_place(tmp_path, home).requires_grad_(False)
    (tmp_path / "model.safetensors").rename(tmp_path / "other")
    save_weights(tmp_path, seed=6)
    assert_weights(model, weights)
    with outofcore.compile(partial(_forward, model), model, budget="1MiB", home=home, dynamic=False) as compiled:
        x = torch.ones(2, WIDTH)
        assert torch.equal(compiled(x), model(x))


def load_mapped(folder: Path, loader: str) -> nn.Sequential:
    weights = save_weights(folder)
    model = model_of()
    if loader == "safetensors":
        with safe_open(folder / "model.safetensors", "pt") as file:
            model.load_state_dict({name: file.get_tensor(name) for name in weights}, assign=True)
    else:
        torch.save(weights, folder / "weights.pt")
        model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)
    return model.requires_grad_(False)


@pytest.mark.parametrize("loader", ["safetensors", "torch.load"])
def test_mapped_weights_are_not_copied(home: outofcore.OpenHome, tmp_path: Path, loader: str) -> None:
    model = load_mapped(tmp_path, loader)
    expected = {name: tensor.clone() for name, tensor in model.named_parameters()}
    x = torch.ones(2, WIDTH)
    expected_output = model(x)
    budget = outofcore.smallest_budget(partial(_forward, model), model, inputs=(x,))
    with outofcore.compile(partial(_forward, model), model, budget=budget, home=home, dynamic=False) as compiled:
        assert torch.equal(compiled(x), expected_output)
        assert all(is_in_file(home, model[i].weight) for i in range(3))
        assert home.bytes == 0
        model[2].weight.data[0, 0] = expected["2.weight"][0, 0] = 9.0
        assert torch.equal(compiled(x), model(x))
        assert_weights(model, expected)
        assert [is_in_file(home, model[i].weight) for i in range(3)] == [True, True, False]
    assert_weights(model, expected)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["1.weight"], expected["1.weight"])


def test_weights_stay_mapped_after_a_step_with_its_own_home(tmp_path: Path) -> None:
    model = load_mapped(tmp_path, "safetensors")
    expected = {name: tensor.clone() for name, tensor in model.named_parameters()}
    x = torch.ones(2, WIDTH)
    budget = outofcore.smallest_budget(partial(_forward, model), model, inputs=(x,))
    for _ in range(2):
        with outofcore.compile(partial(_forward, model), model, budget=budget, home="disk", dynamic=False) as compiled:
            compiled(x)
            model[1].weight.data[0, 0] = expected["1.weight"][0, 0] = 5.0
        assert_weights(model, expected)
        addresses = MappedFiles()
        from_file = [addresses.find_unwritten(model[i].weight.data_ptr(), BYTES) is not None for i in range(3)]
        assert from_file == [True, False, True]


@pytest.mark.parametrize("reason", ["it was written", "shared", "another file has its name", "it is gone"])
def test_mapped_weights_unlike_their_file_are_copied(home: outofcore.OpenHome, tmp_path: Path, reason: str) -> None:
    model = load_mapped(tmp_path, "safetensors")
    if reason == "it was written":
        for layer in model:
            layer.weight.data[0, 0] = 3.0  # type: ignore[index, union-attr]
    elif reason == "shared":
        model.share_memory()
    elif reason == "another file has its name":
        (tmp_path / "model.safetensors").unlink()
        save_weights(tmp_path, seed=6)
    else:
        (tmp_path / "model.safetensors").unlink()
    expected = {name: tensor.clone() for name, tensor in model.named_parameters()}
    x = torch.ones(2, WIDTH)
    budget = outofcore.smallest_budget(partial(_forward, model), model, inputs=(x,))
    with outofcore.compile(partial(_forward, model), model, budget=budget, home=home, dynamic=False) as compiled:
        assert torch.equal(compiled(x), model(x))
        assert not any(is_in_file(home, model[i].weight) for i in range(3))
        assert_weights(model, expected)


def test_model_mapped_by_its_constructor_is_built_in_place(home: outofcore.OpenHome, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 500}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, tie_word_embeddings=True)
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path)
    load = partial(transformers.LlamaForCausalLM.from_pretrained, tmp_path)
    model = outofcore.build(load, home=home)
    assert home.bytes == 0
    large = [tensor for tensor in model.parameters() if tensor.nbytes >= 64 * KIB]
    assert len(large) > 5
    assert all(is_in_file(home, tensor) for tensor in large)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_weights(model, dict(plain.named_parameters()))


def test_meta_tensors_left_by_a_constructor_are_refused(home: outofcore.OpenHome) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return model_of()

    with pytest.raises(InputError, match="on the meta device"):
        outofcore.build(make, home=home)


def test_file_changed_before_opening_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path)
    file = read_header(tmp_path / "model.safetensors")
    os.utime(tmp_path / "model.safetensors", ns=(7, 7))
    with pytest.raises(InputError, match="while it was being read"):
        ReadFile(file.path, file.stamp)


def test_unaligned_reads_return_the_right_bytes(tmp_path: Path) -> None:
    draw = random.Random(3)
    data = draw.randbytes(5 * MIB + 1234)
    path = tmp_path / "data"
    path.write_bytes(data)
    with path.open("rb") as opened:
        file = ReadFile(path, Stamp.of(opened.fileno()))
    target = Region(map_anonymous(6 * MIB), 6 * MIB)
    spans = [(0, len(data), 0), (PAGE_BYTES, 4 * MIB, 0), (PAGE_BYTES, 4 * MIB + 5, 0), (len(data) - 1, 1, 3)]
    spans += [(8, 5 * MIB, 0), (4095, 2, 0), (2 * MIB - 8, 16, 64), (0, 0, 0)]
    for _ in range(100):
        begin = draw.randrange(len(data))
        spans.append((begin, draw.randrange(len(data) - begin + 1), draw.choice([0, 8, 512, PAGE_BYTES])))
    for begin, count, offset in spans:
        memory = target.memory(0, 6 * MIB)
        memory[offset : offset + count + 1] = b"\xaa" * (count + 1)
        file.read(begin, memory[offset : offset + count])
        assert memory[offset : offset + count] == data[begin : begin + count], (begin, count, offset)
        assert memory[offset + count] == 0xAA, (begin, count, offset)
    with pytest.raises(TransferError, match="ends there"):
        file.read(len(data) - 10, target.memory(0, 11))


def test_damaged_headers_are_refused_with_one_error(tmp_path: Path) -> None:
    """A damaged file is refused, or its entries cover each byte of the data exactly once."""
    draw = random.Random(11)
    weights = {"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.int8), "c": torch.ones((), dtype=torch.bfloat16)}
    path = tmp_path / "good.safetensors"
    save_file(weights, path)
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    invalid: list[Any] = [-1, 1.5, True, None, "1", 2**63, 10**400, [], {}, [[]], "F32", 0, float("nan"), float("inf")]
    refused = 0
    for number in range(400):
        changed = bytearray(good)
        match number % 5:
            case 0:
                for _ in range(draw.randrange(1, 4)):
                    changed[draw.randrange(8 + length)] = draw.randrange(256)
            case 1:
                del changed[draw.randrange(len(changed)) :]
            case 2:
                changed += draw.randbytes(draw.randrange(1, 9))
            case _:
                changed_header = json.loads(json.dumps(header))
                entry = changed_header[draw.choice("abc")]
                field = draw.choice(list(entry))
                if isinstance(entry[field], list) and entry[field] and draw.random() < 0.7:
                    place = draw.randrange(len(entry[field]))
                    entry[field][place] = draw.choice([*invalid, *range(80)])
                elif draw.random() < 0.3:
                    del entry[field]
                else:
                    entry[field] = draw.choice(invalid)
                text = json.dumps(changed_header).encode()
                changed = bytearray(len(text).to_bytes(8, "little") + text + data)
        path.write_bytes(changed)
        try:
            parsed = read_header(path)
        except InputError as error:
            assert "good.safetensors" in str(error) and len(str(error)) < KIB
            refused += 1
            continue
        spans = sorted((entry.begin, entry.end) for entry in parsed.entries.values())
        start = len(changed) - sum(end - begin for begin, end in spans)
        for begin, end in spans:
            assert begin == start <= end
            start = end
        assert start == len(changed)
    assert refused > 200
    for text in (
        b'{"a":1,"a":2}',
        b"[" * 5000,
        b"[]",
        b"{}x",
        b"\xff\xfe",
        b'{"a":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}}',
    ):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(InputError):
            read_header(path)
