"""What torch.compile has wrapped runs in a step as plain PyTorch: no plan can divide compiled code."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from torch import nn

from outofcore._torch_internals import is_compiled, without_compiled_code

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def uncompiled(models: Sequence[nn.Module]) -> Iterator[None]:
    """Let the code of compiled functions and modules run as it was written, and say which modules that concerns.

    A compiled function that is no module is run as it was written as well, but not spoken of: nothing tells of it.
    """
    names = [
        f"'{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        for model in models
        for name, module in model.named_modules()
        if is_compiled(module)
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _log.warning(
            "%s%s: wrapped by torch.compile; in this step it runs as plain PyTorch, with the numbers of plain PyTorch",
            names[0],
            more,
        )
    with without_compiled_code():
        yield
