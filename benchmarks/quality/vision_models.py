"""Networks for images: two convolutional classifiers, a diffusion transformer, and a detector."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.vision import resnet


class LayerNorm2d(nn.LayerNorm):
    """Normalizes the channels of each pixel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A depthwise convolution and a perceptron for each pixel, with a shortcut (Liu et al., arXiv 2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(depths: tuple[int, ...], widths: tuple[int, ...], classes: int = 1000) -> nn.Module:
    """Returns a ConvNeXt: a stem, and stages of blocks with a strided convolution between them."""
    stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0])]
    for depth, width, following in zip(depths, widths, (*widths[1:], None), strict=True):
        stages += [ConvNextBlock(width) for _ in range(depth)]
        if following is not None:
            stages += [LayerNorm2d(width), nn.Conv2d(width, following, 2, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, classes))


class InvertedResidual(nn.Module):
    """Widens, convolves each channel, weighs the channels, and narrows again (Tan and Le, arXiv 1905.11946)."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, ratio: int = 6) -> None:
        super().__init__()
        width = ratio * inputs
        self.widen = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        depthwise = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(width), nn.SiLU())
        squeezed = max(1, inputs // 4)
        self.squeeze, self.excite = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.narrow = nn.Sequential(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.widen(x))
        weights = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.narrow(y * weights)
        return x + y if self.has_shortcut else y


def efficientnet(stages: tuple[tuple[int, int, int], ...], classes: int = 1000) -> nn.Module:
    """Returns an EfficientNet of stages (number of blocks, width, stride)."""
    width = stages[0][1]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU()]
    for depth, following, stride in stages:
        for number in range(depth):
            layers.append(InvertedResidual(width, following, stride=stride if number == 0 else 1))
            width = following
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class DiTBlock(nn.Module):
    """Attention and a perceptron, each scaled and shifted by the condition (Peebles and Xie, arXiv 2212.09748)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        y = self.norm1(x) * (1 + scale1) + shift1
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        x = x + gate1 * self.proj(y)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiT(nn.Module):
    """A diffusion transformer over patches of a latent image; returns the error of the predicted noise."""

    def __init__(self, *, depth: int, width: int, heads: int, channels: int = 4, size: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.positions = nn.Parameter(torch.zeros(1, (size // 2) ** 2, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4 * channels)

    def forward(self, x: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        condition = self.time(times[:, None])
        y = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            y = block(y, condition)
        y = self.head(self.norm(y)).transpose(1, 2)
        return F.mse_loss(F.fold(y, x.shape[-2:], 2, stride=2), noise)


class Detector(nn.Module):
    """A one-stage detector: ResNet-50, a feature pyramid, and heads for classes and boxes (arXiv 1708.02002).

    The targets are given for each position, so that no values decide what is computed.
    """

    def __init__(self, *, width: int = 64, classes: int = 20, convolutions: int = 4) -> None:
        super().__init__()
        layers = resnet((3, 4, 6, 3), bottleneck=True)
        self.stages = nn.ModuleList((layers[:11], layers[11:17], layers[17:20]))
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.classes, self.boxes = (_head(width, convolutions, outputs) for outputs in (classes, 4))

    def forward(self, images: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        levels = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            images = stage(images)
            levels.append(lateral(images))
        merged = [levels[2]]
        for level in (levels[1], levels[0]):
            merged.append(level + F.interpolate(merged[-1], scale_factor=2.0))
        features = [smooth(level) for smooth, level in zip(self.smooth, merged, strict=True)]
        found = torch.cat([self.classes(level).flatten(2) for level in features], dim=2)
        placed = torch.cat([self.boxes(level).flatten(2) for level in features], dim=2)
        return F.binary_cross_entropy_with_logits(found, classes) + F.smooth_l1_loss(placed, boxes)


def _head(width: int, convolutions: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(convolutions):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, outputs, 3, padding=1))
