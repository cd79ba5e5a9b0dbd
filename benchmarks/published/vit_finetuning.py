"""Fine-tuning of torchvision's ViT-L/16 on images of 224 x 224 pixels (github.com/rasbt/pytorch-memory-optim, f6eddcd).

The scripts train one epoch on an A100, validate, and print `torch.cuda.max_memory_reserved()` (`logs.md`, June 2023,
torch 2.1.0.dev20230623). The first script is plain PyTorch, the others use Lightning Fabric: its data loader moves a
batch to the card while the loop still holds the batch before it, and its module wrapper converts inputs and outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, PATCH, PIXELS, CLASSES = 1024, 24, 16, 16, 224, 10
STEPS = 6
"""Training steps that are rehearsed. They repeat: all batches have one shape."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """Settings in which the scripts differ."""

    samples: int
    fabric: bool = True
    precision: str = "fp32"
    """'fp32', 'fp16' for autocast with a scaled loss, or 'bf16' for weights and inputs in bf16."""
    steps_a_update: int = 1
    """Micro-batches between two calls of `optimizer.step()`."""
    sgd: bool = False
    earlier_kernels: bool = False
    """Another reading of the nightly build of June 2023: what torch 2.0 does. Flash attention lays its output out by
    samples, so that reordering it for the output projection is a copy, and Adam's foreach form has one more temporary
    copy of its second moments."""


class EarlierAttention(nn.Module):
    """`nn.MultiheadAttention` around flash attention whose output is contiguous as [samples, tokens, heads, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        packed = self.inputs(x.transpose(0, 1))
        packed = packed.unflatten(-1, (3, WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        query, key, value = (
            part.view(tokens, samples, HEADS, WIDTH // HEADS).permute(1, 0, 2, 3).contiguous().transpose(1, 2)
            for part in packed
        )
        del packed
        attended = F.scaled_dot_product_attention(query, key, value)
        attended = attended.permute(2, 0, 1, 3).contiguous().view(samples * tokens, WIDTH)
        return self.output(attended).view(tokens, samples, WIDTH).transpose(0, 1)


class EarlierAdam(torch.optim.Optimizer):
    """Adam as torch 2.0 computes it: the root of the second moments and the divisor are both alive."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        gradients = [p.grad for p in trained]
        first, second = ([self.state[p][name] for p in trained] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, gradients, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(second)
        divisors = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(trained, first, divisors, -self.param_groups[0]["lr"])


class Block(nn.Module):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.is_earlier = script.earlier_kernels
        if script.earlier_kernels:
            self.attention: nn.Module = EarlierAttention()
        else:
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm1(tokens)
        x = self.attention(x) if self.is_earlier else self.attention(x, x, x, need_weights=False)[0]
        x = x + tokens
        y = self.norm2(x)
        y = self.mlp(y)
        return x + y


class VisionTransformer(nn.Module):
    """Images [samples, 3, pixels, pixels] -> logits [samples, classes]."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.empty(1, (PIXELS // PATCH) ** 2 + 1, WIDTH))
        self.layers = nn.Sequential(*(Block(script) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        samples = images.shape[0]
        x = self.patches(images)
        x = x.reshape(samples, WIDTH, -1).permute(0, 2, 1)
        x = torch.cat([self.token.expand(samples, -1, -1), x], dim=1)
        x = x + self.positions
        x = self.norm(self.layers(x))
        x = x[:, 0]
        return self.head(x)


def batches(device: torch.device, script: Script) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches on the CPU, or on the card as Fabric's data loader does."""
    for _ in range(STEPS):
        batch = torch.rand(script.samples, 3, PIXELS, PIXELS), torch.zeros(script.samples, dtype=torch.int64)
        yield (batch[0].to(device), batch[1].to(device)) if script.fabric else batch


def logits_of(model: nn.Module, images: torch.Tensor, script: Script) -> torch.Tensor:
    """Calls the model with the conversions of Fabric's precision plugins."""
    images = images.to(torch.bfloat16) if script.precision == "bf16" else images
    autocast = torch.autocast(images.device.type, torch.float16) if script.precision == "fp16" else None
    with autocast or contextlib.nullcontext():
        logits = model(images)
    return logits.float()


def one_epoch(device: torch.device, script: Script) -> None:
    """Run a few training steps, then as many validation batches."""
    with device:
        model = VisionTransformer(script)
    if script.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    optimizer: torch.optim.Optimizer
    if script.sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elif script.earlier_kernels:
        optimizer = EarlierAdam(model.parameters(), lr=5e-5)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    scale = torch.ones((), device=device)
    for step, (images, targets) in enumerate(batches(device, script)):
        images, targets = images.to(device), targets.to(device)
        model.train()
        logits = logits_of(model, images, script)
        loss = F.cross_entropy(logits, targets) / script.steps_a_update
        if script.steps_a_update == 1:
            optimizer.zero_grad()
        (loss * scale if script.precision == "fp16" else loss).backward()
        if step % script.steps_a_update == 0:
            optimizer.step()
            if script.steps_a_update > 1:
                optimizer.zero_grad()
        with torch.no_grad():
            predicted = torch.argmax(logits, 1)
    model.eval()
    with torch.no_grad():
        for images, targets in batches(device, script):
            images, targets = images.to(device), targets.to(device)
            outputs = logits_of(model, images, script)
            predicted = torch.argmax(outputs, 1)
    del predicted
