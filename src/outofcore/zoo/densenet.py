"""DenseNet-121.

Huang, Liu, van der Maaten, Weinberger: Densely Connected Convolutional Networks, arXiv 1608.06993,
table 1: DenseNet-BC with growth rate 32 and compression 0.5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH


class DenseLayer(nn.Module):
    """All earlier features of the block, each (N, c, H, W), to `_GROWTH` new channels of the same size."""

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
    """(N, c, H, W) to (N, c + layers * growth, H, W)."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + index * _GROWTH) for index in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet121(nn.Module):
    """(N, 3, H, W) images to (N, classes) logits."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * _GROWTH
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for index, count in enumerate(_BLOCKS):
            layers.append(DenseBlock(channels, count))
            channels += count * _GROWTH
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if index < len(_BLOCKS) - 1:
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
