"""Tests of ONNX's own operator cases: equal results, or an error that names the operator."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outofcore
from outofcore.errors import InputError

onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.exhaustive

# Results are random, or ONNX's reference gives them in another order.
UNDEFINED = ("bernoulli", "training_dropout")


class UnavailableError(Exception):
    """Raised for a case with elements of a type that PyTorch lacks."""


def collect_cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases  # noqa: PLC0415 - it makes thousands of models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(collect_testcases())


def tensor_of(value: Any) -> Any:
    if isinstance(value, list):
        return [tensor_of(item) for item in value]
    array = np.asarray(onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)
    if array.dtype.type.__module__ != "numpy":  # NumPy lacks the type
        if not hasattr(torch, array.dtype.name):
            raise UnavailableError(array.dtype.name)
        return torch.from_numpy(array.view(f"u{array.dtype.itemsize}").copy()).view(getattr(torch, array.dtype.name))
    if array.dtype.kind == "O":
        raise UnavailableError("text")
    return torch.from_numpy(array.copy())


def are_close(case: Any, result: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(result) == len(expected) and all(map(are_close, [case] * len(expected), result, expected))
    if result.dtype in (torch.float16, torch.bfloat16):  # ONNX's reference rounds after other ops
        tolerance = 4 * torch.finfo(result.dtype).eps
        return torch.allclose(result.float(), expected.float(), tolerance, tolerance, equal_nan=True)
    return result.shape == expected.shape and torch.allclose(
        result.double(), expected.double(), case.rtol, max(case.atol, 1e-6), equal_nan=True
    )


def describe_difference(case: Any, path: Path) -> str:
    """Return a message if results differ from ONNX's, and else an empty string."""
    onnx.save(case.model, path)
    model = outofcore.onnx.load(path)
    for inputs, expected in case.data_sets:
        with torch.no_grad():
            results = model(*map(tensor_of, inputs))
        results = results if isinstance(results, tuple) else (results,)
        if not all(are_close(case, *pair) for pair in zip(results, map(tensor_of, expected), strict=True)):
            return f"{case.name}: results differ"
    return ""


def test_operators_have_onnx_results_or_are_refused_by_name(tmp_path: Path) -> None:
    counts, faults = Counter[str](), list[str]()
    for case in collect_cases():
        if any(word in case.name for word in UNDEFINED):
            continue
        try:
            fault = describe_difference(case, tmp_path / "node.onnx")
        except (InputError, UnavailableError) as error:
            counts["refused" if isinstance(error, InputError) else "not in PyTorch"] += 1
            continue
        except Exception as error:
            fault = f"{case.name}: {type(error).__name__}: {error}"
        counts["different" if fault else "same"] += 1
        faults += [fault] if fault else []
    assert faults == [], counts
    assert counts["same"] > 500
