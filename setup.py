"""Compile the C++ that does not need CUDA into wheels; everything else is in pyproject.toml.

The library that needs PyTorch is compiled only if PyTorch can be imported, as in a build without isolation. It is used
only with the same PyTorch version. A wheel built without a compiler, and an editable installation, contain only
sources, which are compiled on first use.
"""

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from outofcore.compiling import COMPILERS, compile_library, wheel_library

SOURCES = ("capture/reads.cpp", "planning/placement/placement.cpp", "planning/remat/remat.cpp")


class Package(Distribution):
    """A package that contains libraries if there is a compiler."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel is platform-specific."""
        return any(map(shutil.which, COMPILERS))


class BuildLibraries(build_py):
    """Builds the libraries next to their sources."""

    def run(self) -> None:
        """Copy the package and compile."""
        super().run()
        if self.editable_mode or not self.distribution.has_ext_modules():
            return
        package = Path(self.build_lib, "outofcore")
        for earlier in package.rglob("*.so"):
            earlier.unlink()
        for source in (package / name for name in SOURCES):
            compile_library({source: ()}, wheel_library(source)).chmod(0o644)
        if importlib.util.find_spec("torch") is not None:
            native = importlib.import_module("outofcore.runtime.native")
            native.build(package / "runtime" / "csrc" / native.library_file().name).chmod(0o644)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python version: the libraries are loaded with ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags for Python, its ABI and the platform."""
        return "py3", "none", super().get_tag()[2]


setup(distclass=Package, cmdclass={"build_py": BuildLibraries, "bdist_wheel": PlatformWheel})
