"""Networks that classify video clips, with the layers of MMAction2: images with shifted channels, and 3D convolutions.

Written for this benchmark after the papers and the settings of MMAction2 0.24.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.convolutional.resnets import DEPTHS, FIRST_WITH_BOTTLENECKS, ResNet, normalized
from benchmarks.published.vision import unchanged

Triple = tuple[int, int, int]


class Shifted(nn.Module):
    """A convolution that gets an eighth of its channels from the next frame, and an eighth from the previous one."""

    def __init__(self, convolution: nn.Module, frames: int) -> None:
        super().__init__()
        self.convolution, self.frames = convolution, frames

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, channels, height, width = x.shape
        x = x.view(-1, self.frames, channels, height * width)
        fold = channels // 8
        left, middle, right = x[:, :, :fold], x[:, :, fold : 2 * fold], x[:, :, 2 * fold :]
        blank = (left - left)[:, :1]
        left = torch.cat((left[:, 1:], blank), 1)
        blank = (middle - middle)[:, :1]
        middle = torch.cat((blank, middle[:, :-1]), 1)
        shifted = torch.cat((left, middle, right), 2)
        return self.convolution(shifted.view(samples, channels, height, width))


class Inverted(nn.Module):
    """A block of MobileNetV2, with ReLU in place of ReLU6.

    In PyTorch 1.4, ReLU6 in place saved its result for the backward, as ReLU does. PyTorch 2.13 saves a copy of its
    input.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, expansion: int, frames: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.is_residual = stride == 1 and inputs == outputs
        widening: list[nn.Module] = [normalized(inputs, hidden, 1)] if expansion != 1 else []
        if self.is_residual and widening:
            widening = [Shifted(widening[0], frames)]
        self.body = nn.Sequential(
            *widening,
            normalized(hidden, hidden, 3, stride=stride, groups=hidden),
            normalized(hidden, outputs, 1, activation=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


def mobilenet_v2(frames: int) -> nn.Sequential:
    layers: list[nn.Module] = [normalized(3, 32, 3, stride=2)]
    inputs = 32
    for expansion, outputs, blocks, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for block in range(blocks):
            chosen = 1 if block else stride
            layers.append(Inverted(inputs, outputs, stride=chosen, expansion=expansion, frames=frames))
            inputs = outputs
    return nn.Sequential(*layers, normalized(inputs, 1280, 1))


def freeze_statistics(network: nn.Module) -> None:
    """Makes batch norms use their stored statistics."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            module.eval()


class FrameClassifier(nn.Module):
    """Clips [samples, frames, channels, height, width] and labels -> the loss of the mean over frames.

    Args:
        shifts: True for TSM, whose networks shift channels and whose head multiplies before the mean; False for TSN.
        freezes_statistics: True if batch norm uses its stored statistics.
    """

    def __init__(
        self,
        depth: int | None,
        classes: int,
        frames: int,
        *,
        channels: int = 3,
        shifts: bool = False,
        freezes_statistics: bool = False,
    ) -> None:
        super().__init__()
        self.frames, self.shifts, self.freezes_statistics = frames, shifts, freezes_statistics
        if depth is None:
            self.network: nn.Module = mobilenet_v2(frames)
            outputs = 1280
        else:
            wrap = functools.partial(Shifted, frames=frames) if shifts else unchanged
            self.network = ResNet(depth, channels=channels, wrap=wrap, wrap_every=2 if DEPTHS[depth][2] >= 23 else 1)
            outputs = self.network.outputs
        self.pool, self.dropout, self.head = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Linear(outputs, classes)

    def forward(self, clips: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.freezes_statistics:
            freeze_statistics(self)
        features = self.network(clips.flatten(0, 1))
        x = self.pool(features[-1] if isinstance(features, list) else features).flatten(1)
        if self.shifts:
            scores = self.head(self.dropout(x)).unflatten(0, (-1, self.frames)).mean(1)
        else:
            scores = self.head(self.dropout(x.unflatten(0, (-1, self.frames)).mean(1)))
        return F.cross_entropy(scores, labels)


def normalized3d(
    inputs: int,
    outputs: int,
    size: Triple,
    *,
    stride: Triple = (1, 1, 1),
    groups: int = 1,
    activation: bool = True,
) -> nn.Sequential:
    """Returns a 3D convolution that keeps the size (before the stride), batch norm and ReLU."""
    padding = tuple(each // 2 for each in size)
    layers = [nn.Conv3d(inputs, outputs, size, stride, padding, 1, groups, bias=False), nn.BatchNorm3d(outputs)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if activation else []))


def split3d(
    inputs: int, outputs: int, size: Triple, *, stride: Triple = (1, 1, 1), activation: bool = True
) -> nn.Sequential:
    """Returns a convolution over each image and one over time, with as many parameters as a 3D one (R(2+1)D)."""
    area = size[1] * size[2]
    hidden = 3 * inputs * outputs * area // (inputs * area + 3 * outputs)
    over_time = normalized3d(hidden, outputs, (size[0], 1, 1), stride=(stride[0], 1, 1), activation=activation)
    over_image = normalized3d(inputs, hidden, (1, size[1], size[2]), stride=(1, stride[1], stride[2]))
    return nn.Sequential(*over_image, *over_time)


Convolution = Callable[..., nn.Sequential]


class Residual3d(nn.Module):
    """A block of a 3D ResNet.

    Args:
        frames: number of frames that the first convolution of a bottleneck reads, or each one of a basic block.
        separated: True if the 3 x 3 x 3 convolution of a bottleneck reads one channel (ir-CSN).
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        *,
        bottleneck: bool,
        stride: Triple,
        frames: int,
        separated: bool,
        convolution: Convolution,
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if separated:
            layers = [
                convolution(inputs, width, (1, 1, 1)),
                convolution(width, width, (3, 3, 3), stride=stride, groups=width),
                convolution(width, outputs, (1, 1, 1), activation=False),
            ]
        elif bottleneck:
            layers = [
                convolution(inputs, width, (frames, 1, 1)),
                convolution(width, width, (1, 3, 3), stride=stride),
                convolution(width, outputs, (1, 1, 1), activation=False),
            ]
        else:
            layers = [
                convolution(inputs, width, (frames, 3, 3), stride=stride),
                convolution(width, outputs, (frames, 3, 3), activation=False),
            ]
        self.body = nn.Sequential(*layers)
        has_shortcut = stride != (1, 1, 1) or inputs != outputs
        self.shortcut = (
            convolution(inputs, outputs, (1, 1, 1), stride=stride, activation=False) if has_shortcut else None
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return self.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet3d(nn.Module):
    """A 3D ResNet: its stem and four stages.

    Args:
        inflated: 1 for each stage, or for each block, whose convolutions read three frames, else 0.
        lateral: number of times that this network has the channels of a fast network, whose results are joined to the
            input of each stage; 0 without a fast network.
    """

    def __init__(
        self,
        depth: int,
        *,
        channels: int = 3,
        width: int = 64,
        stem: Triple,
        stem_frames: int = 1,
        pools: tuple[int, ...] = (1,),
        inflated: tuple[int | tuple[int, ...], ...],
        frame_strides: tuple[int, ...] = (1, 1, 1, 1),
        separated: bool = False,
        lateral: int = 0,
        convolution: Convolution = normalized3d,
    ) -> None:
        super().__init__()
        self.stem = convolution(channels, width, stem, stride=(stem_frames, 2, 2))
        self.pool = nn.MaxPool3d((1, 3, 3), (pools[0], 2, 2), (0, 1, 1)) if pools else nn.Identity()
        self.second_pool = nn.MaxPool3d((2, 1, 1)) if pools[1:] else nn.Identity()
        bottleneck = depth >= FIRST_WITH_BOTTLENECKS
        inputs, stages = width, []
        for stage, blocks in enumerate(DEPTHS[depth]):
            layers = []
            if lateral:
                inputs += 2 * inputs // lateral
            each = inflated[stage]
            for block in range(blocks):
                space, time = (1, 1) if block or not stage else (2, frame_strides[stage])
                is_inflated = each if isinstance(each, int) else each[block]
                layers.append(
                    Residual3d(
                        *(inputs, width << stage),
                        bottleneck=bottleneck,
                        stride=(time, space, space),
                        frames=3 if is_inflated else 1,
                        separated=separated,
                        convolution=convolution,
                    )
                )
                inputs = (width << stage) * (4 if bottleneck else 1)
            stages.append(nn.Sequential(*layers))
        self.stages, self.outputs = nn.ModuleList(stages), inputs

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(clips))
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number == 0:
                x = self.second_pool(x)
        return x


class SlowFast(nn.Module):
    """A slow network of few frames and a fast one of few channels, whose results go to the slow one.

    Args:
        every: the slow network gets one of this number of frames, and the fast one gets all.
        fusion: number of frames from which a result of the fast network is passed to the slow one.
        slices: True if frames are selected by slicing, as before 15 September 2020; False for interpolation.
    """

    def __init__(self, slow_depth: int, fast_depth: int, *, every: int, fusion: int, slices: bool = False) -> None:
        super().__init__()
        self.every, self.slices = every, slices
        self.slow = ResNet3d(slow_depth, stem=(1, 7, 7), inflated=(0, 0, 1, 1), lateral=8)
        self.fast = ResNet3d(fast_depth, stem=(5, 7, 7), inflated=(1, 1, 1, 1), width=8)
        widths = (8, *(8 * 4 << stage for stage in range(3)))
        padding = (fusion // 2, 0, 0)
        self.lateral = nn.ModuleList(
            nn.Conv3d(each, 2 * each, (fusion, 1, 1), (every, 1, 1), padding, bias=False) for each in widths
        )
        self.outputs = self.slow.outputs + self.fast.outputs

    def forward(self, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slow = self.slow.pool(self.slow.stem(self._frames(clips, self.every)))
        fast = self.fast.pool(self.fast.stem(self._frames(clips, 1)))
        for number, lateral in enumerate(self.lateral):
            slow = torch.cat((slow, lateral(fast)), dim=1)
            slow, fast = self.slow.stages[number](slow), self.fast.stages[number](fast)
        return slow, fast

    def _frames(self, clips: torch.Tensor, every: int) -> torch.Tensor:
        return clips[:, :, ::every] if self.slices else F.interpolate(clips, scale_factor=(1 / every, 1.0, 1.0))


class ClipClassifier(nn.Module):
    """Clips [samples, channels, frames, height, width] and labels -> loss."""

    def __init__(self, network: nn.Module, classes: int, *, freezes_statistics: bool = False) -> None:
        super().__init__()
        self.network, self.freezes_statistics = network, freezes_statistics
        self.pool, self.dropout = nn.AdaptiveAvgPool3d(1), nn.Dropout(0.5)
        self.head = nn.Linear(network.outputs, classes)

    def forward(self, clips: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.freezes_statistics:
            freeze_statistics(self)
        features = self.network(clips)
        pooled = [self.pool(each) for each in (features if isinstance(features, tuple) else (features,))]
        x = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return F.cross_entropy(self.head(self.dropout(x).flatten(1)), labels)


class C3d(nn.Module):
    """C3D: eight convolutions with a bias and two linear layers, without normalization."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for stage, (width, depth) in enumerate(((64, 1), (128, 1), (256, 2), (512, 2), (512, 2))):
            for _ in range(depth):
                layers += [nn.Conv3d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            size = (2 if stage else 1, 2, 2)
            layers.append(nn.MaxPool3d(size, size, (0, 1, 1) if stage == 4 else 0))
        layers += [nn.Flatten(), nn.Linear(8192, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Dropout(), nn.Linear(4096, classes))

    def forward(self, clips: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(clips), labels)
