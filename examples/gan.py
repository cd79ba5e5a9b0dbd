"""A small image GAN whose training step is a function of its own: two updates, two optimizers, one call.

    plan examples/gan.py:build --vram 1GiB --gpu rtx-2060

The function gets the modules, the optimizers and the batch. `planner.plan(**build(), vram="1GiB")` does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LATENT = 128


def generator(channels: int) -> nn.Sequential:
    """(batch, LATENT) -> (batch, 3, 64, 64)."""

    def up(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    first = nn.Sequential(nn.Linear(LATENT, 8 * channels * 16), nn.Unflatten(1, (8 * channels, 4, 4)))
    blocks = [up(8 * channels, 4 * channels), up(4 * channels, 2 * channels), up(2 * channels, channels)]
    return nn.Sequential(first, *blocks, up(channels, channels), nn.Conv2d(channels, 3, 3, padding=1), nn.Tanh())


def discriminator(channels: int) -> nn.Sequential:
    """(batch, 3, 64, 64) -> (batch, 1)."""

    def down(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 4, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.LeakyReLU(0.2)
        )

    blocks = [down(3, channels), down(channels, 2 * channels), down(2 * channels, 4 * channels)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * channels * 64, 1))


def step(model: nn.ModuleDict, optimizer: dict[str, torch.optim.Optimizer], images: torch.Tensor) -> dict[str, float]:
    """Updates the discriminator on real and generated images, then the generator."""
    noise = torch.randn(len(images), LATENT, device=images.device)
    with torch.no_grad():
        generated = model["generator"](noise)
    real, fake = model["discriminator"](images), model["discriminator"](generated)
    of_discriminator = F.softplus(-real).mean() + F.softplus(fake).mean()
    optimizer["discriminator"].zero_grad()
    of_discriminator.backward()
    optimizer["discriminator"].step()

    noise = torch.randn(len(images), LATENT, device=images.device)
    of_generator = F.softplus(-model["discriminator"](model["generator"](noise))).mean()
    optimizer["generator"].zero_grad()
    of_generator.backward()
    optimizer["generator"].step()
    return {"discriminator": of_discriminator.item(), "generator": of_generator.item()}


def build(batch_size: int = 64, channels: int = 64) -> dict[str, Any]:
    """Returns what `planner.plan` takes: the modules, a batch of images, the step, and an optimizer for each module."""
    model = {"generator": generator(channels), "discriminator": discriminator(channels)}
    optimizer = {
        name: torch.optim.Adam(module.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, module in model.items()
    }
    return {"model": model, "batch": torch.randn(batch_size, 3, 64, 64), "step": step, "optimizer": optimizer}
