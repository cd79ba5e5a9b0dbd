"""An image restorer of 43 M parameters that is one function: its forward has no submodules to checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Restorer(nn.Module):
    """Residual 3 x 3 convolutions at full resolution, over tensors of weights."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.last = nn.Parameter(_weights(width, 3)), nn.Parameter(_weights(3, width))
        self.convolutions = nn.ParameterList(_weights(width, width) for _ in range(depth))
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(depth))
        self.shifts = nn.ParameterList(torch.zeros(width) for _ in range(depth))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Maps float[N, 3, H, W] to the same shape."""
        x = F.conv2d(image, self.first, padding=1)
        for weight, scale, shift in zip(self.convolutions, self.scales, self.shifts, strict=True):
            y = F.silu(F.group_norm(x, 8, scale, shift))
            x = x + F.conv2d(y, weight, padding=1)
        return image + F.conv2d(x, self.last, padding=1)


def _weights(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, 3, 3) / (3 * inputs**0.5)


def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.mse_loss(output, batch[1])


def build(
    *, batch_size: int = 64, image_size: int = 256, depth: int = 72, width: int = 256
) -> tuple[Restorer, Batch, Callable[[torch.Tensor, Batch], torch.Tensor]]:
    """Returns the network, a batch of damaged and of whole images, and its loss function."""
    damaged, whole = (torch.rand(batch_size, 3, image_size, image_size) for _ in range(2))
    return Restorer(depth, width), (damaged, whole), loss
