"""Run the Python blocks of the README in order; blocks with the fence ``python {.no-run}`` are only compiled.

Usage: python tools/readme_blocks.py [FILE...]
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path

_BLOCK = re.compile(r"^```python(?P<skip> \{\.no-run\})?[ \t]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def run_blocks(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for block in _BLOCK.finditer(text):
        # Leading empty lines give tracebacks the line numbers of the file.
        before = text.count("\n", 0, block.start("code"))
        code = compile("\n" * before + block["code"], str(path), "exec")
        if not block["skip"]:
            exec(code, namespace)
            count += 1
    return count


def main(names: list[str]) -> None:
    paths = [Path(name).resolve() for name in names or ["README.md"]]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for path in paths:
            print(f"{path.name}: {run_blocks(path)} blocks ran")


if __name__ == "__main__":
    main(sys.argv[1:])
