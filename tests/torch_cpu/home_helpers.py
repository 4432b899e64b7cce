"""Helpers of tests of homes: random bytes, a disk without direct I/O, and resources of this process."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from outofcore.runtime import spill
from outofcore.units import KIB, round_up


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(spill.os, "open", refuse)


def fill_with_noise(memory: memoryview, seed: int) -> bytes:
    data = torch.randint(0, 256, (len(memory),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    torch.frombuffer(memory, dtype=torch.uint8).copy_(data)
    return bytes(memory)


class file_size_limit:  # noqa: N801
    """A context manager that limits the size of written files to ``count`` bytes."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._count, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def open_files_in(directory: Path) -> list[os.stat_result]:
    """Return the open files of this process in a directory, including deleted ones."""
    statuses = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith(f"{directory}/"):
            statuses.append(os.fstat(int(descriptor.name)))
    return statuses


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resident_bytes_at(address: int) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            for detail in lines:
                if detail.startswith("Rss:"):
                    return round_up(int(detail.split()[1]) * KIB, KIB)
    raise AssertionError("not mapped")
