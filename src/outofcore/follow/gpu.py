"""What following a loop on a GPU asks of PyTorch: what its libraries keep is made before, and CUDA graphs are refused.

A graph keeps the addresses that it was captured with, and its kernels run without an op that anybody sees: tensors that
it reads would have moved, and what it writes to would have been given to others.

It has never run on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outofcore.errors import StateError

# By name, what a graph does that cannot be followed.
_REFUSED = {"capture_begin": "captured", "replay": "replayed"}


def make_workspaces(device: torch.device) -> None:
    """Let cuBLAS make the workspaces that it keeps for this thread and for autograd's: they would stay in the arena."""
    with torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            with torch.autocast("cuda", enabled=False):
                torch.addmm(square[0], square, square @ square).sum().backward()
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def graphs_refused() -> Iterator[None]:
    """While in this context, no CUDA graph is captured or replayed.

    In it, ``torch.cuda.CUDAGraph.capture_begin`` and ``replay`` raise ``StateError``.
    """

    def refusing(done: str) -> Callable[..., Any]:
        def refuse(*_: object, **__: object) -> None:
            raise StateError(
                f"a CUDA graph cannot be {done} while a loop is followed, since tensors move; stop() the loop first, "
                "or run without graphs (with torch.compile: mode='default')"
            )

        return refuse

    with contextlib.ExitStack() as undo:
        kind = torch.cuda.CUDAGraph
        for name, done in _REFUSED.items():
            own = vars(kind).get(name)
            setattr(kind, name, refusing(done))
            if own is None:
                undo.callback(delattr, kind, name)
            else:
                undo.callback(setattr, kind, name, own)
        yield
