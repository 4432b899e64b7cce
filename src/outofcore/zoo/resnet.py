"""Residual networks of any depth.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, arXiv 1512.03385, section 4.1 and
table 1. As in today's usual configuration, a bottleneck block halves the resolution in its 3×3
convolution and not in its first 1×1, which changes no parameter count.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from outofcore.errors import InputError

_DEEPEST_PUBLISHED = 152


@dataclass(frozen=True, slots=True)
class Shape:
    """How many residual blocks stand in each of the four stages, and of which kind."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool


def resnet_shape(depth: int) -> Shape:
    """Spread ``depth`` layers over the four stages.

    18, 34, 50, 101 and 152 are those of table 1. Any other depth is made of bottleneck blocks, three
    layers each, so that ``depth = 3 (n1 + n2 + n3 + n4) + 2`` as in SuperNeurons (Wang et al., PPoPP
    2018, section 4): 1001 and 2498 are such depths. How these spread is a rule of this module: up to
    152 layers the first, second and last stage have (3, 4, ., 3) blocks, beyond that (6, 32, ., 6), and
    the third stage takes the rest, as it does in the published networks.

    Raises:
        InputError: no network has this depth; the message names the nearest that exist.
    """
    match depth:
        case 18:
            return Shape((2, 2, 2, 2), bottleneck=False)
        case 34:
            return Shape((3, 4, 6, 3), bottleneck=False)
        case 152:
            return Shape((3, 8, 36, 3), bottleneck=True)
    blocks, rest = divmod(depth - 2, 3)
    first, second, last = (3, 4, 3) if depth <= _DEEPEST_PUBLISHED else (6, 32, 6)
    third = blocks - first - second - last
    if rest or third < 1:
        below = max(2 + 3 * blocks, 35)
        raise InputError(
            f"there is no resnet of {depth} layers: the depth must be 18, 34 or 3 n + 2 with n of at least 11; "
            f"take {below} or {below + 3}"
        )
    return Shape((first, second, third, last), bottleneck=True)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut: (N, in, H, W) to (N, width, H/stride, W/stride)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = _shortcut(channels, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut: (N, in, H, W) to (N, 4 width, H/stride, W/stride)."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width * self.expansion, 1, bias=False),
            nn.BatchNorm2d(width * self.expansion),
        )
        self.shortcut = _shortcut(channels, width * self.expansion, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def _shortcut(channels: int, out: int, stride: int) -> nn.Module:
    if channels == out and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """(N, 3, H, W) images to (N, classes) logits.

    Raises:
        InputError: there is no network of that depth; see `resnet_shape`.
    """

    def __init__(self, depth: int = 50, classes: int = 1000) -> None:
        super().__init__()
        shape = resnet_shape(depth)
        kind = Bottleneck if shape.bottleneck else BasicBlock
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(shape.blocks):
            width = 64 << stage
            blocks: list[nn.Module] = []
            for index in range(count):
                blocks.append(kind(channels, width, stride=2 if stage > 0 and index == 0 else 1))
                channels = width * kind.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))
