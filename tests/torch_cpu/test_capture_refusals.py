"""Tests that refusals of captures name the user's line, give advice and leave the user's objects unchanged."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_world import World, assert_same_snapshot, snapshot
from torch import nn

from outofcore.capture import recorder
from outofcore.errors import CaptureError

MakeStep = Callable[[World], Callable[..., Any]]


def line_of(mark: str) -> int:
    """Return the line of this file that ends with the comment ``# <mark>``."""
    lines = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def item(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x).item()  # item

    return step


def as_float(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return float(w.learn(x))  # as_float

    return step


def branch(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        if (x > 0).all():  # branch
            return w.learn(x)
        return None

    return step


def tolist(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.learn(x)
        return x.tolist()  # tolist

    return step


def numpy(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x).detach().numpy()  # numpy

    return step


def print_tensor(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        print(w.learn(x))  # print_tensor

    return step


def format_tensor(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return f"{w.learn(x):.3f}"  # format_tensor

    return step


def in_model(w: World) -> Any:
    w.model.linear.register_forward_hook(
        lambda module, args, out: out * out.mean().item()  # in_model
    )
    return w.learn


def use_outside_tensor(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x * 2) + w.outside  # use_outside_tensor

    return step


def use_outside_module(w: World) -> Any:
    outside = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> Any:
        return w.learn(outside(x))  # use_outside_module

    return step


def use_outside_optimizer(w: World) -> Any:
    outside = torch.optim.SGD(w.model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        w.model(x).sum().backward()
        outside.step()  # use_outside_optimizer

    return step


def call_saved_step(w: World) -> Any:
    update = w.optimizer.step

    def step(x: torch.Tensor) -> Any:
        w.model(x).sum().backward()
        update()  # call_saved_step

    return step


def mask(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x[x.sum(1) > 0])  # mask

    return step


def from_array(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x) + torch.from_numpy(w.array)  # from_array

    return step


def tensor_of_array(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x) + torch.tensor(w.array)  # tensor_of_array

    return step


def long_list(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x) + torch.tensor([0.0] * 100).sum()  # long_list

    return step


def closure(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        w.optimizer.step(lambda: w.learn(x))  # closure

    return step


def product(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = w.model(x).prod(1).sum()  # product
        loss.backward()
        return loss

    return step


def complex_product(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = torch.complex(w.model(x), x.sum()).cumprod(1).abs().sum()  # complex_product
        loss.backward()
        return loss

    return step


def zero(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = w.model(x).sgn().sum()  # zero
        loss.backward()
        return loss

    return step


def split_by_tensor(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        ends = torch.ones(2, dtype=torch.int64).cumsum(0)
        first, *_ = torch.tensor_split(x, ends)  # split_by_tensor
        return first

    return step


def scaler(w: World) -> Any:
    scale = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> Any:
        scale.scale(w.model(x).sum()).backward()  # scaler
        scale.step(w.optimizer)
        scale.update()

    return step


def sparse(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        return w.learn(x.to_sparse().to_dense())  # sparse

    return step


def swallow_refusal(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        loss = w.learn(x)
        try:
            return loss.item()  # swallow_refusal
        except Exception:
            return 0.0

    return step


def resize_memory(w: World) -> Any:
    def step(x: torch.Tensor) -> Any:
        y = x * 2
        y.resize_(100)  # resize_memory
        return w.learn(x)

    return step


def set_generator_state(w: World) -> Any:
    state = torch.get_rng_state()

    def step(x: torch.Tensor) -> Any:
        torch.set_rng_state(state)  # set_generator_state
        return w.learn(x)

    return step


WITH_LINE = [
    (item, ".item()", "return the tensor"),
    (as_float, "float(tensor)", "return the tensor"),
    (branch, "branch on a tensor", "torch.where"),
    (tolist, ".tolist()", "return the tensor"),
    (numpy, ".numpy()", "return the tensor"),
    (print_tensor, "printing a tensor", "return the tensor"),
    (format_tensor, "formatting a tensor", "return the tensor"),
    (in_model, ".item()", "keep the arithmetic in tensors"),
    (use_outside_tensor, "float32 tensor of shape (3,) from outside", "pass it as an argument"),
    (use_outside_module, "from outside", "add its module to the list of models"),
    (use_outside_optimizer, "an optimizer (SGD) that was not given", "add it to the list"),
    (call_saved_step, "through a saved reference", "call optimizer.step()"),
    (mask, "depends on the values", "torch.where"),
    (from_array, "NumPy array", "pass it as an argument"),
    (tensor_of_array, "NumPy array", "pass it as an argument"),
    (long_list, "100 elements from Python data", "register it as a buffer"),
    (closure, "with a closure", "loss.backward()"),
    (product, "whether there are zeros", "torch.cumprod"),
    (complex_product, "the gradient formula of cumprod depends on whether there are zeros", "real numbers"),
    (zero, "zero throughout", "torch.sign"),
    (split_by_tensor, "tensor_split reads the memory", "in tensors"),
    (scaler, "GradScaler", "bfloat16"),
    (sparse, "sparse", "dense"),
    (swallow_refusal, ".item()", "return the tensor"),
    (resize_memory, "size of a tensor's memory", "create a new tensor"),
    (set_generator_state, "state from outside", "before the step"),
]


@pytest.mark.parametrize(("make", "phrase", "advice"), WITH_LINE, ids=lambda value: getattr(value, "__name__", None))
def test_refusal_names_line_and_advice(make: MakeStep, phrase: str, advice: str) -> None:
    world = World()
    step = make(world)
    before = snapshot(world)
    with pytest.raises(CaptureError) as caught:
        world.capture(step)
    expected = f"{__file__}:{line_of(make.__name__)}"
    assert caught.value.location == expected
    assert str(caught.value).startswith(expected)
    assert phrase in str(caught.value)
    assert advice in str(caught.value)
    assert_same_snapshot(before, snapshot(world))


def test_fused_operators_are_refused_if_they_take_tensor_lists() -> None:
    """The RMS norm of a GPU also has a fused kernel, but it is one op and is not refused."""
    prefixes = next(prefixes for prefixes in recorder._REFUSED if any("_fused_" in name for name in prefixes))
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::_fused_")]
    assert len(schemas) > 10
    for schema in schemas:
        many = any("List[Tensor]" in str(argument.type) for argument in schema.arguments)
        assert schema.name.startswith(prefixes) == many, schema.name


READS_BYTES: dict[str, Callable[[torch.Tensor], object]] = {
    "DLPack": lambda t: np.from_dlpack(t.detach()),
    "DLPack of PyTorch": lambda t: torch.utils.dlpack.to_dlpack(t.detach()),
    "address of a storage": lambda t: t.untyped_storage().data_ptr(),
    "item of a storage": lambda t: t.untyped_storage()[0],
    "items of a typed storage": lambda t: t.storage().tolist(),
    "copy of a storage": lambda t: t.untyped_storage().clone(),
    "write to a storage": lambda t: t.detach().untyped_storage().fill_(0),
    "saved": lambda t: torch.save(t, io.BytesIO()),
    "pickled": lambda t: pickle.dumps(t.detach()),
    "copied": lambda t: copy.deepcopy(t.detach()),
    "shared": lambda t: t.detach().share_memory_(),
    "applied": lambda t: t.detach().clone().apply_(abs),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("name", READS_BYTES)
def test_reading_the_bytes_of_a_tensor_is_refused(name: str) -> None:
    world = World()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = world.learn(x)
        READS_BYTES[name](loss)
        return loss

    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        world.capture(step)


def test_untraced_storage_can_be_used_in_a_step() -> None:
    world = World()

    def step(x: torch.Tensor) -> torch.Tensor:
        assert torch.UntypedStorage(4).data_ptr()
        return world.learn(x * (x.untyped_storage().nbytes() // 4))

    assert world.capture(step).calls


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_non_strided_tensor_is_refused(kind: str) -> None:
    world = World()

    def step(x: torch.Tensor) -> torch.Tensor:
        world.learn(x)
        return getattr(x, kind)()

    with pytest.raises(CaptureError, match="use dense tensors"):
        world.capture(step)
