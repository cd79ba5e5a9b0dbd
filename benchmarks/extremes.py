"""Networks with very many modules, for `python -m benchmarks.planning --extremes`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Workload = tuple[nn.Module, tuple[torch.Tensor], Callable[[torch.Tensor, object], torch.Tensor]]
"""A model, a batch and a loss function."""


def mean_square(output: torch.Tensor, batch: object) -> torch.Tensor:
    """Returns the mean of the squared outputs."""
    return output.square().mean()


class Experts(nn.Module):
    """A layer of experts, each of which is a module and computes its part of the features of all samples."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self.width, dim=1)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], dim=1)


def experts(*, batch_size: int = 256) -> Workload:
    """Returns a network with 2 layers of 1,024 experts, and a batch: float32[batch_size, 16384]."""
    layers = [Experts(1024, 16) for _ in range(2)]
    return nn.Sequential(*layers), (torch.zeros(batch_size, 16384),), mean_square


def modules(*, batch_size: int = 256) -> Workload:
    """Returns a network with 100,000 modules in 2,500 blocks, and a batch: float32[batch_size, 64].

    Neighbors differ, in their widths or in their types, so that all modules are recorded.
    """
    blocks = []
    for number in range(2500):
        width = 64 + number % 2
        nothing = [nn.Identity() if position % 2 else nn.Flatten() for position in range(36)]
        blocks.append(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), *nothing))
    return nn.Sequential(*blocks), (torch.zeros(batch_size, 64),), mean_square
