"""Griffe extension (named in mkdocs.yml) that shows ``>>>`` examples of docstrings as code in the reference."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>>)|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(Extension):
    """Puts a fence around each run of ``>>>`` lines and their output."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", obj.docstring.value)
