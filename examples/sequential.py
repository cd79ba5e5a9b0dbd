"""A deep fully connected classifier as one flat `nn.Sequential`: its only submodules are single layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


def classification_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the mean cross entropy of `logits` (batch, classes); the labels are the last entry of the batch."""
    return F.cross_entropy(logits, batch[-1])


def build(
    *, batch_size: int = 4096, features: int = 512, width: int = 1024, depth: int = 24, classes: int = 10
) -> tuple[nn.Sequential, Batch, Callable[[torch.Tensor, Batch], torch.Tensor]]:
    """Returns the network with `depth` linear layers, a batch of (features, labels), and its loss function."""
    widths = [features] + [width] * (depth - 1)
    layers: list[nn.Module] = []
    for inputs in widths[:-1]:
        layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU()]
    layers.append(nn.Linear(widths[-1], classes))
    model = nn.Sequential(*layers)
    batch = (torch.randn(batch_size, features), torch.randint(classes, (batch_size,)))
    return model, batch, classification_loss
