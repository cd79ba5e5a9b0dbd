"""A residual convolutional classifier with BatchNorm, in the shape of ResNet-18 (He et al., arXiv 1512.03385)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        if stride == 1 and in_channels == out_channels:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of residual blocks that halve the resolution and double the width, and a linear head."""

    def __init__(self, *, width: int, blocks_per_stage: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = []
        in_channels = width
        for stage, blocks in enumerate(blocks_per_stage):
            out_channels = width * 2**stage
            first = BasicBlock(in_channels, out_channels, stride=1 if stage == 0 else 2)
            rest = [BasicBlock(out_channels, out_channels) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(first, *rest))
            in_channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stages(self.stem(images))
        return self.head(features.mean(dim=(2, 3)))


def classification_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the mean cross entropy of `logits` (batch, classes); the labels are the last entry of the batch."""
    return F.cross_entropy(logits, batch[-1])


def build(
    *,
    batch_size: int = 32,
    image_size: int = 128,
    width: int = 64,
    blocks_per_stage: tuple[int, ...] = (2, 2, 2, 2),
    classes: int = 1000,
) -> tuple[ResNet, Batch, Callable[[torch.Tensor, Batch], torch.Tensor]]:
    """Returns the network, a batch of (images, labels), and its loss function."""
    model = ResNet(width=width, blocks_per_stage=blocks_per_stage, classes=classes)
    batch = (torch.randn(batch_size, 3, image_size, image_size), torch.randint(classes, (batch_size,)))
    return model, batch, classification_loss
