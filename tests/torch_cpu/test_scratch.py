"""Tests of the inputs of measured ops: indices spread over their range, and numbers that vary on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outofcore.capture import capture_step
from outofcore.execution.binding import BoundRun, GeneratorUse
from outofcore.profiling.ops import profile_ops
from outofcore.profiling.scratch import HALVES, ScratchContents

aten: Any = torch.ops.aten
ROWS, WIDTH, COUNT = 12, 8, 60


def fill(func: Any, args: tuple[Any, ...], contents: ScratchContents = HALVES) -> None:
    contents.fill(BoundRun(0, 0, func, args, {}, (), (), 1, False, GeneratorUse.UNTOUCHED))


def rows() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH)


def indices(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# An op, its arguments, its index tensor, and the number of distinct indices expected.
CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...], torch.Tensor, int]]] = {
    "embedding": lambda: (aten.embedding.default, (rows(), p := indices(COUNT)), p, ROWS),
    "embedding backward": lambda: (
        aten.embedding_dense_backward.default,
        (torch.ones(COUNT, WIDTH), p := indices(COUNT), ROWS, -1, False),
        p,
        ROWS,
    ),
    "gather": lambda: (aten.gather.default, (rows(), 1, p := indices(ROWS, COUNT)), p, WIDTH),
    "scatter_add": lambda: (
        aten.scatter_add.default,
        (rows(), 0, p := indices(COUNT, WIDTH), torch.ones(COUNT, WIDTH)),
        p,
        ROWS,
    ),
    "index_add": lambda: (aten.index_add.default, (rows(), 0, p := indices(COUNT), torch.ones(COUNT, WIDTH)), p, ROWS),
    "index": lambda: (aten.index.Tensor, (rows(), [None, p := indices(COUNT)]), p, WIDTH),
    "index_put": lambda: (
        aten.index_put.default,
        (rows(), [p := indices(COUNT)], torch.ones(COUNT, WIDTH), True),
        p,
        ROWS,
    ),
    "classes": lambda: (
        aten.nll_loss_forward.default,
        (torch.ones(COUNT, WIDTH), p := indices(COUNT), None, 1, -100),
        p,
        WIDTH,
    ),
    "pooling": lambda: (
        aten.max_pool2d_with_indices_backward.default,
        (
            torch.ones(1, 2, 4, 4),
            torch.ones(1, 2, 8, 8),
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            p := indices(1, 2, 4, 4),
        ),
        p,
        32,  # one per element, of 64 possible
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_indices_are_spread_over_the_whole_range(name: str) -> None:
    func, args, index, count = CASES[name]()
    fill(func, args)
    assert len(index.unique()) == count
    assert 0 <= int(index.min()) <= int(index.max()) < 64
    repeated = torch.bincount(index.flatten())
    assert repeated.max() - repeated[repeated > 0].min() <= 1
    func(*args)  # the indices are valid


def test_masks_and_expanded_indices_are_not_filled() -> None:
    mask, wide = torch.zeros(ROWS, dtype=torch.bool), indices(1).expand(COUNT)
    fill(aten.index.Tensor, (rows(), [mask]))
    fill(aten.index.Tensor, (rows(), [wide]))
    assert not mask.any()
    assert int(wide.sum()) == 0


def test_index_on_another_device_is_not_filled() -> None:
    index = indices(COUNT)
    run = BoundRun(0, 0, aten.index.Tensor, (rows().to("meta"), [index]), {}, (), (), 1, False, GeneratorUse.UNTOUCHED)
    for contents in (HALVES, ScratchContents(random=True)):
        contents.fill(run, torch.device("meta"))
    assert int(index.sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_numbers_vary_only_in_varied_contents(dtype: torch.dtype) -> None:
    buffer = torch.empty(4096, dtype=torch.uint8)
    HALVES.fill_bytes(buffer, dtype)
    assert buffer.view(dtype).to(torch.complex64).eq(0.5).all()
    ScratchContents(varied=True).fill_bytes(buffer, dtype)
    numbers = buffer.view(dtype).to(torch.complex64).real
    assert float(numbers.min()) >= 0.25
    assert float(numbers.max()) <= 0.75
    assert (len(numbers.unique()) > 30) == (dtype in (torch.float32, torch.bfloat16, torch.float64))


def test_captured_ops_are_measured_with_spread_indices() -> None:
    unique_counts: list[int] = []

    @torch.library.custom_op("outofcore_test::rows_seen", mutates_args=())
    def rows_seen(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    rows_seen.register_fake(torch.empty_like)
    model = torch.nn.Embedding(ROWS, WIDTH)

    def step(index: torch.Tensor) -> torch.Tensor:
        return rows_seen(model(index)).sum()

    captured = capture_step(step, [model], [], (indices(COUNT),), {})
    call = next(c for op, c in zip(captured.graph.ops, captured.calls, strict=True) if op.name.startswith("aten.embed"))

    kernel = aten.embedding.default._op

    def record_call(weight: torch.Tensor, index: torch.Tensor, *args: Any) -> torch.Tensor:
        unique_counts.append(len(index.unique()))
        return kernel(weight, index, *args)

    assert call.func is aten.embedding.default
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten.embedding.default, "_op", record_call)
        profile_ops(captured, measure_time=False)
    assert set(unique_counts) == {ROWS}
