"""ResNet for images, with the variants that segmentation and video recognition use."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.published.vision import Residual, Wrap, convolution, unchanged

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Number of blocks in each stage, by number of layers."""
FIRST_WITH_BOTTLENECKS = 50


def normalized(
    inputs: int,
    outputs: int,
    size: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    activation: bool = True,
) -> nn.Sequential:
    """Returns a convolution that keeps the size of the image (before the stride), batch norm and ReLU."""
    layers = convolution(inputs, outputs, size, stride, dilation=dilation, groups=groups)
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if activation else []))


class ResNet(nn.Module):
    """Images -> the results of the four stages.

    Args:
        deep_stem: three 3 x 3 convolutions in place of the 7 x 7 one ("V1c").
        strides: stride of each stage.
        dilations: dilation of each stage. The first block of a dilated stage has half of it.
        wrap: replaces the first convolution of every `wrap_every`-th block of a stage.
    """

    def __init__(
        self,
        depth: int,
        *,
        channels: int = 3,
        deep_stem: bool = False,
        strides: tuple[int, ...] = (1, 2, 2, 2),
        dilations: tuple[int, ...] = (1, 1, 1, 1),
        wrap: Wrap = unchanged,
        wrap_every: int = 1,
    ) -> None:
        super().__init__()
        if deep_stem:
            stem = [normalized(channels, 32, 3, stride=2), normalized(32, 32, 3), normalized(32, 64, 3)]
        else:
            stem = [normalized(channels, 64, 7, stride=2)]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        bottleneck = depth >= FIRST_WITH_BOTTLENECKS
        inputs, stages = 64, []
        for stage, blocks in enumerate(DEPTHS[depth]):
            width, layers = 64 << stage, []
            for block in range(blocks):
                layers.append(
                    Residual(
                        *(inputs, width, 1 if block else strides[stage]),
                        bottleneck=bottleneck,
                        dilation=dilations[stage] if block else max(1, dilations[stage] // 2),
                        wrap=unchanged if block % wrap_every else wrap,
                    )
                )
                inputs = 4 * width if bottleneck else width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.outputs = inputs

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        x, results = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            results.append(x)
        return results
