"""The detectors YOLOv5 (6.0) and YOLOv8, without their losses.

Written for this benchmark after the layers that Ultralytics lists for each model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

OUTPUTS_OF_BOX = 16
"""Number of values in the distribution that YOLOv8 predicts for each side of a box."""
Generation = Literal[5, 8]


def layer(inputs: int, outputs: int, size: int = 1, stride: int = 1, padding: int | None = None) -> nn.Sequential:
    padding = size // 2 if padding is None else padding
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, channels: int, *, adds: bool, size: int) -> None:
        super().__init__()
        self.body, self.adds = nn.Sequential(layer(channels, channels, size), layer(channels, channels, 3)), adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class Stage5(nn.Module):
    """Half of the channels pass through residual blocks (YOLOv5's C3)."""

    def __init__(self, inputs: int, outputs: int, depth: int, *, adds: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.second, self.last = layer(inputs, half), layer(inputs, half), layer(2 * half, outputs)
        self.blocks = nn.Sequential(*(Residual(half, adds=adds, size=1) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat((self.blocks(self.first(x)), self.second(x)), 1))


class Stage8(nn.Module):
    """The results of all residual blocks are joined (YOLOv8's C2f)."""

    def __init__(self, inputs: int, outputs: int, depth: int, *, adds: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.last = layer(inputs, 2 * half), layer((2 + depth) * half, outputs)
        self.blocks = nn.ModuleList(Residual(half, adds=adds, size=3) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Pools(nn.Module):
    """Maxima over growing areas (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = layer(channels, channels // 2), layer(2 * channels, channels)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        once = self.pool(x)
        twice = self.pool(once)
        return self.last(torch.cat((x, once, twice, self.pool(twice)), 1))


class Detector(nn.Module):
    """Images -> scores at an eighth, a sixteenth and a 32nd of their size.

    Args:
        generation: 5 for YOLOv5, 8 for YOLOv8.
        depth: factor of the number of blocks of each stage.
        width: factor of the number of channels.
    """

    def __init__(self, generation: Generation, *, depth: float, width: float, classes: int) -> None:
        super().__init__()
        self.generation: Generation = generation

        def channels(number: int) -> int:
            return math.ceil(number * width / 8) * 8

        def stage(inputs: int, outputs: int, blocks: int, *, adds: bool) -> nn.Module:
            count = max(round(blocks * depth), 1)
            kind = Stage5 if generation == 5 else Stage8
            return kind(inputs, channels(outputs), count, adds=adds)

        def halved(outputs: int, inputs: int) -> nn.Sequential:
            return layer(channels(inputs), channels(outputs), 3, 2)

        c64, c128, c256, c512, c1024 = (channels(number) for number in (64, 128, 256, 512, 1024))
        stem = layer(3, c64, 6, 2, 2) if generation == 5 else layer(3, c64, 3, 2)
        third = 9 if generation == 5 else 6
        self.low = nn.Sequential(stem, halved(128, 64), stage(c128, 128, 3, adds=True))
        self.low.extend([halved(256, 128), stage(c256, 256, 6, adds=True)])
        self.middle = nn.Sequential(halved(512, 256), stage(c512, 512, third, adds=True))
        self.high = nn.Sequential(halved(1024, 512), stage(c1024, 1024, 3, adds=True), Pools(c1024))
        self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")
        is_5 = generation == 5
        self.narrow = nn.ModuleList([layer(c1024, c512), layer(c512, c256)] if is_5 else [nn.Identity(), nn.Identity()])
        above, below = (c512, c256) if is_5 else (c1024, c512)
        self.up = nn.ModuleList([stage(above + c512, 512, 3, adds=False), stage(below + c256, 256, 3, adds=False)])
        self.halved = nn.ModuleList([halved(256, 256), halved(512, 512)])
        third_input = c256 + (c256 if is_5 else c512)
        fourth_input = c512 + (c512 if is_5 else c1024)
        self.down = nn.ModuleList([stage(third_input, 512, 3, adds=False), stage(fourth_input, 1024, 3, adds=False)])
        levels = (c256, c512, c1024)
        if is_5:
            self.heads = nn.ModuleList(nn.Conv2d(each, 3 * (5 + classes), 1) for each in levels)
        else:
            box, score = max(16, c256 // 4, 4 * OUTPUTS_OF_BOX), max(c256, min(classes, 100))
            self.boxes = nn.ModuleList(_head(each, box, 4 * OUTPUTS_OF_BOX) for each in levels)
            self.scores = nn.ModuleList(_head(each, score, classes) for each in levels)
            self.distribution = nn.Conv2d(OUTPUTS_OF_BOX, 1, 1, bias=False).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        low = self.low(images)
        middle = self.middle(low)
        high = self.narrow[0](self.high(middle))
        up = self.narrow[1](self.up[0](torch.cat((self.enlarge(high), middle), 1)))
        first = self.up[1](torch.cat((self.enlarge(up), low), 1))
        second = self.down[0](torch.cat((self.halved[0](first), up), 1))
        third = self.down[1](torch.cat((self.halved[1](second), high), 1))
        return [self._result(number, x) for number, x in enumerate((first, second, third))]

    def _result(self, level: int, x: torch.Tensor) -> torch.Tensor:
        if self.generation == 5:
            return self.heads[level](x).unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2).contiguous()
        return torch.cat((self.boxes[level](x), self.scores[level](x)), 1)


def _head(inputs: int, channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(layer(inputs, channels, 3), layer(channels, channels, 3), nn.Conv2d(channels, outputs, 1))
