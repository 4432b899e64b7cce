"""Vision models: residual networks of any depth, VGG-16, DenseNet-121 and 3D U-Net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outofcore.errors import InputError


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """The number of residual blocks in each of four stages, and their kind."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool


def choose_resnet_shape(depth: int) -> ResNetShape:
    """Distribute ``depth`` layers over four stages; raises ``InputError`` for an invalid depth.

    Depths 18, 34, 50, 101 and 152 follow table 1 of ResNet's paper. Others have ``3 (n1 + n2 + n3 + n4) + 2`` layers,
    as in SuperNeurons (Wang et al., PPoPP 2018, section 4), with (3, 4, n, 3) blocks, or (6, 32, n, 6) above 152.
    """
    match depth:
        case 18:
            return ResNetShape((2, 2, 2, 2), bottleneck=False)
        case 34:
            return ResNetShape((3, 4, 6, 3), bottleneck=False)
        case 152:
            return ResNetShape((3, 8, 36, 3), bottleneck=True)
    blocks, remainder = divmod(depth - 2, 3)
    first, second, last = (3, 4, 3) if depth <= 152 else (6, 32, 6)
    third = blocks - first - second - last
    if remainder or third < 1:
        below = max(2 + 3 * blocks, 35)
        raise InputError(
            f"there is no resnet of {depth} layers: the depth must be 18, 34 or 3 n + 2 with n of at least 11; "
            f"use {below} or {below + 3}"
        )
    return ResNetShape((first, second, third, last), bottleneck=True)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut: (N, in, H, W) to (N, width, H/stride, W/stride)."""

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
    """1×1, 3×3 and 1×1 convolutions and a shortcut: (N, in, H, W) to (N, 4 width, H/stride, W/stride)."""

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
    """(N, 3, H, W) images to (N, classes) logits (He et al., arXiv 1512.03385); 3×3 convolutions have the stride."""

    def __init__(self, depth: int = 50, classes: int = 1000) -> None:
        super().__init__()
        shape = choose_resnet_shape(depth)
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


_VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions


class VGG16(nn.Module):
    """(N, 3, size, size) images to (N, classes) logits (Simonyan, Zisserman, arXiv 1409.1556, table 1, D)."""

    def __init__(self, size: int = 224, classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in _VGG_STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (size // 2 ** len(_VGG_STAGES)) ** 2, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


# New channels per layer of a DenseNet (the paper's table 1).
_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH


class DenseLayer(nn.Module):
    """A layer that makes `_GROWTH` new channels from all earlier features of its block, each (N, c, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, _BOTTLENECK, 1, bias=False),
            nn.BatchNorm2d(_BOTTLENECK),
            nn.ReLU(inplace=True),
            nn.Conv2d(_BOTTLENECK, _GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.body(torch.cat(features, 1))


class DenseBlock(nn.Module):
    """A block of ``DenseLayer``: (N, c, H, W) to (N, c + layers * growth, H, W)."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + index * _GROWTH) for index in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet121(nn.Module):
    """(N, 3, H, W) images to (N, classes) logits (Huang et al., arXiv 1608.06993, table 1)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * _GROWTH
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        blocks = (6, 12, 24, 16)
        for index, count in enumerate(blocks):
            layers.append(DenseBlock(channels, count))
            channels += count * _GROWTH
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if index < len(blocks) - 1:
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU(inplace=True))


class UNet3d(nn.Module):
    """(N, channels, D, H, W) volumes to (N, classes, D, H, W) logits; D, H and W are multiples of 8.

    Çiçek et al.: 3D U-Net, arXiv 1606.06650, section 2 and figure 2. With ``base`` 32 it has the paper's 19,069,955
    parameters, without the normalisations. Unlike there, convolutions are padded, and classes have equal weights. On
    CUDA ``torch.use_deterministic_algorithms(True)`` needs ``warn_only`` for the backward pass of the pooling.
    """

    def __init__(self, base: int = 32, channels: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        previous = channels
        for level in range(4):
            width = base << level
            self.down.append(
                nn.Sequential(
                    _convolution(previous, max(width, previous)), _convolution(max(width, previous), 2 * width)
                )
            )
            previous = 2 * width
        self.pool = nn.MaxPool3d(2)
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for level in range(2, -1, -1):
            width = (2 * base) << level
            self.up.append(nn.ConvTranspose3d(2 * width, 2 * width, 2, stride=2, bias=False))
            self.merge.append(nn.Sequential(_convolution(3 * width, width), _convolution(width, width)))
        self.classifier = nn.Conv3d(2 * base, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        return self.classifier(x)
