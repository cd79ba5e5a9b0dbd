"""Heads and networks for the segmentation of images, with the layers of MMSegmentation.

Written for this benchmark after the papers and the settings of MMSegmentation 0.5 to 0.10.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.convolutional.resnets import ResNet, normalized

IGNORED = 255


class Head(nn.Module, abc.ABC):
    """Features of an image -> scores of the classes, from features of one stage and a last 1 x 1 convolution.

    Args:
        stage: number of the stage whose features the head reads.
        channels: channels of `features`.
    """

    def __init__(self, stage: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stage, self.dropout = stage, nn.Dropout2d(0.1)
        self.scores = nn.Conv2d(channels, classes, 1)

    @abc.abstractmethod
    def features(self, stages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what the last convolution reads."""

    def forward(self, stages: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.scores(self.dropout(self.features(stages)))


class Plain(Head):
    """3 x 3 convolutions; with `concatenates`, one more that also reads their input (FCN)."""

    def __init__(
        self, stage: int, inputs: int, channels: int, classes: int, *, depth: int = 1, concatenates: bool = False
    ) -> None:
        super().__init__(stage, channels, classes)
        widths = [inputs] + [channels] * depth
        self.layers = nn.Sequential(*(normalized(*each, 3) for each in itertools.pairwise(widths)))
        self.last = normalized(inputs + channels, channels, 3) if concatenates else None

    def features(self, stages: Sequence[torch.Tensor]) -> torch.Tensor:
        x = stages[self.stage]
        y = self.layers(x)
        return y if self.last is None else self.last(torch.cat([x, y], dim=1))


class Pyramid(Head):
    """Means over 1, 4, 9 and 36 parts of the image (PSPNet)."""

    def __init__(self, stage: int, inputs: int, channels: int, classes: int, *, aligns: bool = False) -> None:
        super().__init__(stage, channels, classes)
        self.aligns = aligns
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(parts), *normalized(inputs, channels, 1)) for parts in (1, 2, 3, 6)
        )
        self.last = normalized(inputs + 4 * channels, channels, 3)

    def features(self, stages: Sequence[torch.Tensor]) -> torch.Tensor:
        x = stages[self.stage]
        pooled = [resized(pool(x), x.shape[2:], aligns=self.aligns) for pool in self.pools]
        return self.last(torch.cat([x, *pooled], dim=1))


def separable(inputs: int, outputs: int, *, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        normalized(inputs, inputs, 3, dilation=dilation, groups=inputs), normalized(inputs, outputs, 1)
    )


class Atrous(Head):
    """Convolutions of four dilations (DeepLabV3); with `shallow` channels of the first stage, DeepLabV3+."""

    def __init__(
        self, stage: int, inputs: int, channels: int, classes: int, *, shallow: int = 0, aligns: bool = False
    ) -> None:
        super().__init__(stage, channels, classes)
        self.aligns = aligns
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), *normalized(inputs, channels, 1))
        self.branches = nn.ModuleList([normalized(inputs, channels, 1)])
        for dilation in (12, 24, 36):
            branch = separable(inputs, channels, dilation=dilation)
            self.branches.append(branch if shallow else normalized(inputs, channels, 3, dilation=dilation))
        self.join = normalized(5 * channels, channels, 3)
        self.shallow = normalized(shallow, 48, 1) if shallow else None
        last = (separable(channels + 48, channels), separable(channels, channels)) if shallow else ()
        self.last = nn.Sequential(*last)

    def features(self, stages: Sequence[torch.Tensor]) -> torch.Tensor:
        x = stages[self.stage]
        parts = [resized(self.image(x), x.shape[2:], aligns=self.aligns)]
        parts += [branch(x) for branch in self.branches]
        y = self.join(torch.cat(parts, dim=1))
        if self.shallow is None:
            return y
        first = self.shallow(stages[0])
        return self.last(torch.cat([resized(y, first.shape[2:], aligns=self.aligns), first], dim=1))


def resized(x: torch.Tensor, size: Sequence[int], *, aligns: bool) -> torch.Tensor:
    return F.interpolate(x, tuple(size), mode="bilinear", align_corners=aligns)


class Segmenter(nn.Module):
    """Images and labels [samples, height, width] -> the loss of both heads.

    Each head's accuracy is computed, too, as MMSegmentation does in training.
    """

    def __init__(self, network: nn.Module, head: Head, auxiliary: Head, *, aligns: bool = False) -> None:
        super().__init__()
        self.network, self.head, self.auxiliary, self.aligns = network, head, auxiliary, aligns

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        stages = self.network(images)
        return self._loss(self.head(stages), labels) + 0.4 * self._loss(self.auxiliary(stages), labels)

    def _loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = resized(scores, labels.shape[1:], aligns=self.aligns)
        loss = F.cross_entropy(scores, labels, reduction="none", ignore_index=IGNORED).mean()
        _, best = scores.topk(1, dim=1)
        best.squeeze(1).eq(labels).float().sum()
        return loss


def dilated_resnet(depth: int, *, deep_stem: bool) -> ResNet:
    """Returns a ResNet whose last two stages are dilated and have no stride."""
    return ResNet(depth, deep_stem=deep_stem, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4))


def pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(normalized(inputs, outputs, 3), normalized(outputs, outputs, 3))


class UNet(nn.Module):
    """Images -> the results of the lowest stage and of the four stages of the way up."""

    WIDTHS = (64, 128, 256, 512, 1024)

    def __init__(self) -> None:
        super().__init__()
        inputs = (3, *self.WIDTHS)
        self.down = nn.ModuleList(pair(*each) for each in zip(inputs, self.WIDTHS, strict=False))
        self.pool = nn.MaxPool2d(2)
        lower = list(itertools.pairwise(self.WIDTHS))[::-1]
        self.narrow = nn.ModuleList(normalized(below, here, 1) for here, below in lower)
        self.up = nn.ModuleList(pair(2 * here, here) for here, _ in lower)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        skips = []
        for number, layers in enumerate(self.down):
            x = layers(self.pool(x) if number else x)
            skips.append(x)
        results = [x]
        for skip, narrow, up in zip(skips[-2::-1], self.narrow, self.up, strict=True):
            above = narrow(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))
            x = up(torch.cat([skip, above], dim=1))
            results.append(x)
        return results
