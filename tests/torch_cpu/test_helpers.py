"""Tests of helper processes: their work, output and PyTorch settings."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from outofcore.capture.helpers import pack_work, receive_work
from outofcore.child_processes import start_process


@pytest.fixture
def _restore_settings() -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.backends.mkldnn.enabled
    operations = torch.backends.mkldnn.matmul, torch.backends.mkldnn.rnn
    precisions = [operation.fp32_precision for operation in operations]
    yield
    torch.set_num_threads(before[0])
    torch.set_default_dtype(before[1])
    torch.backends.mkldnn.set_flags(before[2])
    for operation, precision in zip(operations, precisions, strict=True):
        operation.fp32_precision = precision
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_restore_settings")
def test_helper_has_the_settings_of_its_parent_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.backends.mkldnn.set_flags(False)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.rnn.fp32_precision = "bf16"
    work = pack_work((torch.ops.aten.mm.default, torch.float16))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.backends.mkldnn.set_flags(True)
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.rnn.fp32_precision = "ieee"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(work)))
    assert receive_work() == (torch.ops.aten.mm.default, torch.float16)
    assert torch.get_num_threads() == 3
    assert torch.get_default_dtype() is torch.float64
    assert not torch.backends.mkldnn.enabled
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.mkldnn.matmul.fp32_precision == torch.backends.mkldnn.rnn.fp32_precision == "bf16"


def test_helper_can_have_another_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pack_work("work", before + 1))))
    try:
        assert receive_work() == "work"
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_output_of_a_helper_is_returned() -> None:
    with tempfile.TemporaryFile() as answer:
        helper = start_process(f"{__name__}:print_work", pack_work(torch.ops.aten.add.Tensor), answer)
        assert helper.wait() == 0
        answer.seek(0)
        assert answer.read() == b"aten.add.Tensor\n"


def test_missing_executable_raises_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        start_process("module:name", b"")


def print_work() -> None:
    print(receive_work())
