"""What converters of published instances share: an instance, and reading files from clones of repositories."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from outofcore.graphfile import GraphFile


@dataclass(frozen=True)
class Instance:
    """A step from elsewhere, a budget, and what others publish for it.

    Attributes:
        name: for people.
        budget: bytes.
        file: the step with its costs.
        published: seconds of a step by who found them; the first is what we compare with.
    """

    name: str
    budget: int
    file: GraphFile
    published: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Clone:
    """A git clone, bare or not, of which files are read as they are committed."""

    path: Path

    def read(self, name: str, commit: str = "HEAD") -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: the commit or the file is not there.
        """
        command = ["git", "-C", str(self.path), "show", f"{commit}:{name}"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise FileNotFoundError(f"{self.path} has no {name} at {commit}: {done.stderr.decode().strip()}")
        return done.stdout
