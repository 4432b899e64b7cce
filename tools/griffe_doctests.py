"""Show the examples of docstrings as code in the reference: an extension of Griffe, which mkdocs.yml names.

An example stands at the end of a docstring as ``>>>`` lines, which Markdown takes for nested quotations.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>>)|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(Extension):
    """Put a fence around each run of ``>>>`` lines and of what they print."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", obj.docstring.value)
