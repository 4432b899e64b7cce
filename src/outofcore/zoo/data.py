"""Endless, reproducible batches for the zoo on the CPU: local or generated data, no downloads."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outofcore.errors import InputError
from outofcore.units import MIB, format_bytes

Batches = Iterator[tuple[Tensor, ...]]

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class ImageSource(StrEnum):
    PHOTOS = "photos"  # crops of scikit-learn's two sample photographs; needs scikit-learn and Pillow
    DIGITS = "digits"  # scikit-learn's 1,797 handwritten digits, enlarged; needs scikit-learn
    GENERATED = "generated"  # gratings made from the seed; needs no package


def library_text(limit: int = 8 * MIB) -> Tensor:
    """Return up to ``limit`` bytes of source text of Python's standard library, as a uint8 tensor (n,)."""
    root = sysconfig.get_paths()["stdlib"]
    paths: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_STDLIB]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    text = bytearray()
    for path in sorted(paths):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise InputError(
            f"there is no text to train on: {root} has no .py files; "
            "use a Python that comes with the source of its standard library"
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def text_batches(batch: int, context: int, seed: int) -> Batches:
    """Yield random passages of `library_text`, and the same passages shifted by a byte: int64 (batch, context)."""
    text = library_text()
    starts = len(text) - context
    if starts < 1:
        raise InputError(
            f"a context of {context} is longer than the text ({format_bytes(len(text))}); use a smaller one"
        )
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context + 1)
    while True:
        first = torch.randint(starts, (batch, 1), generator=generator)
        passages = text[first + within].long()
        yield passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


def image_source(size: int, requested: ImageSource | None = None) -> ImageSource:
    """Return ``requested``, by default the best available source; raises ``InputError`` if a package is missing."""
    needs = {ImageSource.PHOTOS: ("sklearn", "PIL"), ImageSource.DIGITS: ("sklearn",), ImageSource.GENERATED: ()}
    if requested is not None:
        missing = [package for package in needs[requested] if find_spec(package) is None]
        if missing:
            raise InputError(
                f"images {requested.value!r} need {' and '.join(missing)}, which is not installed; "
                "run pip install 'outofcore[data]' or use images 'generated'"
            )
        return requested
    # Smaller crops of a photograph cannot be distinguished.
    fitting = [source for source in needs if source is not ImageSource.PHOTOS or size >= 64]
    return next(source for source in fitting if all(find_spec(package) for package in needs[source]))


def image_batches(batch: int, size: int, classes: int, seed: int, source: ImageSource) -> Batches:
    """Yield images (batch, 3, size, size) float32 of about zero mean, with labels (batch,) int64 below ``classes``.

    A label (modulo ``classes``) stands for a quarter of a photograph, a digit, or the stripes' direction and colour.
    """
    draw = _image_sampler(source, batch, size, torch.Generator().manual_seed(seed))
    while True:
        images, labels = draw()
        yield ((images - 0.5) / 0.25).contiguous(), labels % classes


def _image_sampler(
    source: ImageSource, batch: int, size: int, generator: torch.Generator
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws a random batch: images (batch, 3, size, size) in 0..1, and labels."""
    match source:
        case ImageSource.PHOTOS:
            photographs = _photographs()
            return lambda: _crop_photographs(photographs, batch, size, generator)
        case ImageSource.DIGITS:
            digits, names = _digits()
            return lambda: _enlarge_digits(digits, names, batch, size, generator)
        case ImageSource.GENERATED:
            return lambda: _draw_gratings(batch, size, generator)


def _photographs() -> list[Tensor]:
    """Return two photographs, each (3, 427, 640) float32 in 0..1."""
    from sklearn.datasets import load_sample_images  # noqa: PLC0415  scikit-learn is optional

    return [torch.tensor(image).permute(2, 0, 1).float() / 255 for image in load_sample_images().images]


def _digits() -> tuple[Tensor, Tensor]:
    """Return digits (1797, 1, 8, 8) float32 in 0..1, and their labels."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  scikit-learn is optional

    pixels, names = load_digits(return_X_y=True)
    return torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(names)


def _crop_photographs(
    photographs: list[Tensor], batch: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    labels = torch.randint(4 * len(photographs), (batch,), generator=generator)
    positions = torch.rand(batch, 3, generator=generator)
    images = torch.empty(batch, 3, size, size)
    for index, (label, (scale, down, right)) in enumerate(zip(labels.tolist(), positions.tolist(), strict=True)):
        photograph = photographs[label // 4]
        height, width = photograph.shape[1] // 2, photograph.shape[2] // 2
        edge = int(height * (0.5 + scale / 2))
        top_edge = label % 4 // 2 * height + int(down * (height - edge + 1))
        left_edge = label % 2 * width + int(right * (width - edge + 1))
        crop = photograph[None, :, top_edge : top_edge + edge, left_edge : left_edge + edge]
        images[index] = F.interpolate(crop, (size, size), mode="bilinear", align_corners=False, antialias=True)[0]
    return images, labels


def _enlarge_digits(
    digits: Tensor, names: Tensor, batch: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(len(names), (batch,), generator=generator)
    images = F.interpolate(digits[drawn], (size, size), mode="bilinear", align_corners=False)
    return images.expand(-1, 3, -1, -1), names[drawn]


def _draw_gratings(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(10, (batch,), generator=generator)
    angle = (labels % 5 * (torch.pi / 5)).view(-1, 1, 1)
    phase = torch.rand(batch, 1, 1, generator=generator) * (2 * torch.pi)
    across = torch.linspace(0, 8 * torch.pi, size)
    wave = torch.sin(across * angle.cos() + across[:, None] * angle.sin() + phase)
    colour = torch.where((labels < 5)[:, None], torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.2, 0.6, 1.0]))
    images = 0.5 + 0.25 * wave[:, None] * colour[:, :, None, None]
    return images + 0.1 * torch.randn(images.shape, generator=generator), labels


def volume_batches(batch: int, size: int, classes: int, seed: int) -> Batches:
    """Yield noisy volumes (batch, 3, size, size, size) of ellipsoids, and each voxel's class as int64 (0: outside)."""
    generator = torch.Generator().manual_seed(seed)
    brightness = torch.randn(classes, 3, generator=generator)
    ticks = torch.linspace(-1, 1, size)
    while True:
        masks = torch.zeros(batch, size, size, size, dtype=torch.int64)
        for mask in masks:
            for kind in range(1, classes):
                for _ in range(int(torch.randint(1, 4, (1,), generator=generator))):
                    centre = torch.rand(3, generator=generator) * 1.4 - 0.7
                    radius = torch.rand(3, generator=generator) * 0.3 + 0.15
                    z, y, x = (((ticks - c) / r) ** 2 for c, r in zip(centre, radius, strict=True))
                    mask[z[:, None, None] + y[:, None] + x < 1] = kind
        volumes = brightness[masks].movedim(-1, 1).contiguous()
        volumes += 0.5 * torch.randn(volumes.shape, generator=generator)
        yield volumes, masks
