"""Tests that unsupported arguments are refused by name before any tensor moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import outofcore
from outofcore.errors import CaptureError, InputError


def freed_tensor() -> torch.Tensor:
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "meta": (lambda: torch.ones(4, 4, device="meta"), InputError, "argument x is on the device meta"),
    "freed": (freed_tensor, InputError, "the memory of argument x has been released"),
    "sparse": (lambda: torch.eye(4).to_sparse(), CaptureError, "argument x is a sparse"),
    "compressed": (lambda: torch.eye(4).to_sparse_csr(), CaptureError, "argument x is a sparse"),
    "onednn": (lambda: torch.eye(4).to_mkldnn(), CaptureError, "argument x is a sparse"),
    "conjugate": (lambda: torch.ones(4, 4, dtype=torch.cfloat).conj(), CaptureError, "argument x is a sparse"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(4, 4), torch.ones(4, 4) > 0),
        CaptureError,
        "argument x is a MaskedTensor",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        CaptureError,
        "argument x is a NestedTensor",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("name", BAD)
def test_unsupported_argument_is_refused_by_name(name: str, after: bool) -> None:
    make, error, message = BAD[name]
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = outofcore.compile(train, model, optimizer, budget="16MiB")
    if after:
        step(x=torch.ones(4, 4))
        before = model.weight.clone()
    with pytest.raises(error, match=message):
        step(x=make())
    assert torch.equal(model.weight, before)
    step(x=torch.ones(4, 4))
    step.close()


def test_model_on_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(InputError, match="weight is on the device meta and has no memory yet"):
        outofcore.compile(model.forward, model, budget="16MiB")
