"""3D U-Net.

Çiçek, Abdulkadir, Lienkamp, Brox, Ronneberger: 3D U-Net: Learning Dense Volumetric Segmentation from
Sparse Annotation, arXiv 1606.06650, section 2 and figure 2: three channels in, three classes out,
doubling before each pooling, batch normalisation before each ReLU. The up-convolutions have no bias:
so, without the scales and shifts of the normalisations, the parameters are the 19,069,955 of the paper.

Unlike there, convolutions are padded, so that the segmentation is as large as the volume (as has become
usual), and all classes weigh the same in the loss.

Limit: on CUDA PyTorch declares the backward of 3D max pooling non-deterministic, and
``torch.use_deterministic_algorithms(True)`` refuses it without ``warn_only``. The pooling windows here do
not overlap, so no two values are added up, and the result is deterministic all the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU(inplace=True))


class UNet3d(nn.Module):
    """(N, channels, D, H, W) volumes to (N, classes, D, H, W) logits; D, H and W are multiples of 8.

    Args:
        base: channels of the first convolution; 32 in the paper.
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
