"""A small diffusion U-Net that predicts the noise in an image (Ho et al., arXiv 2006.11239).

Residual blocks are conditioned on the timestep, the lowest resolution has self-attention, and every activation of the
way down is concatenated to its counterpart on the way up: the graph is not a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

GROUPS = 8
"""Groups of every GroupNorm; all channel counts are multiples of it."""


class TimeEmbedding(nn.Module):
    """Sines and cosines of the timestep, followed by a small network: (batch,) -> (batch, 4 * channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, 4 * channels), nn.SiLU()
        )

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        half = self.channels // 2
        exponents = torch.arange(half, device=timesteps.device) / half
        angles = timesteps[:, None] * torch.exp(-math.log(10_000) * exponents)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1))


class ResidualBlock(nn.Module):
    """Two normalized convolutions around a shortcut, with the time embedding added between them."""

    def __init__(self, in_channels: int, out_channels: int, time_channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_channels, out_channels)
        self.norm2 = nn.GroupNorm(GROUPS, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(time)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.shortcut(x)


class SelfAttention(nn.Module):
    """Attention of every position of the image to every other, around a shortcut."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, height * width)
        query, key, value = qkv.transpose(-1, -2).unbind(dim=1)
        h = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(h.transpose(-1, -2).reshape(batch, channels, height, width))


class UNet(nn.Module):
    """Two residual blocks per resolution on the way down, three on the way up, attention at the lowest resolution."""

    def __init__(self, *, channels: int, multipliers: tuple[int, ...], heads: int) -> None:
        super().__init__()
        time_channels = 4 * channels
        widths = [channels * multiplier for multiplier in multipliers]
        self.time_embedding = TimeEmbedding(channels)
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)

        self.down = nn.ModuleList()
        self.downsample = nn.ModuleList()
        skips = [channels]
        current = channels
        for level, width in enumerate(widths):
            self.down.append(
                nn.ModuleList(
                    [ResidualBlock(current, width, time_channels), ResidualBlock(width, width, time_channels)]
                )
            )
            skips += [width, width]
            current = width
            if level < len(widths) - 1:
                self.downsample.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)

        self.middle1 = ResidualBlock(current, current, time_channels)
        self.attention = SelfAttention(current, heads)
        self.middle2 = ResidualBlock(current, current, time_channels)

        self.up = nn.ModuleList()
        self.upsample = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            blocks = nn.ModuleList()
            for _ in range(3):
                blocks.append(ResidualBlock(current + skips.pop(), width, time_channels))
                current = width
            self.up.append(blocks)
            if level > 0:
                self.upsample.append(nn.Conv2d(width, width, 3, padding=1))

        self.norm_out = nn.GroupNorm(GROUPS, current)
        self.conv_out = nn.Conv2d(current, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        time = self.time_embedding(timesteps)
        h = self.conv_in(images)
        skips = [h]
        for level, blocks in enumerate(self.down):
            for block in blocks:
                h = block(h, time)
                skips.append(h)
            if level < len(self.downsample):
                h = self.downsample[level](h)
                skips.append(h)

        h = self.middle2(self.attention(self.middle1(h, time)), time)

        for level, blocks in enumerate(self.up):
            for block in blocks:
                h = block(torch.cat([h, skips.pop()], dim=1), time)
            if level < len(self.upsample):
                h = self.upsample[level](F.interpolate(h, scale_factor=2.0, mode="nearest"))

        return self.conv_out(F.silu(self.norm_out(h)))


def noise_loss(predicted: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the mean squared error of the predicted noise; the true noise is the last entry of the batch."""
    return F.mse_loss(predicted, batch[-1])


def build(
    *,
    batch_size: int = 16,
    image_size: int = 64,
    channels: int = 64,
    multipliers: tuple[int, ...] = (1, 2, 4, 4),
    heads: int = 4,
) -> tuple[UNet, Batch, Callable[[torch.Tensor, Batch], torch.Tensor]]:
    """Returns the network, a batch of (noisy images, timesteps, noise), and its loss function.

    `image_size` is divisible by two once for each multiplier but the last.
    """
    model = UNet(channels=channels, multipliers=multipliers, heads=heads)
    shape = (batch_size, 3, image_size, image_size)
    batch = (torch.randn(shape), torch.randint(1000, (batch_size,)), torch.randn(shape))
    return model, batch, noise_loss
