"""Published instances, and reading their files from git clones."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from outofcore.graphfile import GraphFile


@dataclass(frozen=True)
class Instance:
    """A published step with a budget, and step seconds by publisher; the first publisher is the reference."""

    name: str
    budget: int
    file: GraphFile
    published: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Clone:
    """A git clone, bare or not, whose committed files are read."""

    path: Path

    def read(self, name: str, commit: str = "HEAD") -> bytes:
        """Return the content of a committed file; raise FileNotFoundError if it does not exist."""
        command = ["git", "-C", str(self.path), "show", f"{commit}:{name}"]
        process = subprocess.run(command, capture_output=True, check=False)
        if process.returncode:
            raise FileNotFoundError(f"{self.path} has no {name} at {commit}: {process.stderr.decode().strip()}")
        return process.stdout
