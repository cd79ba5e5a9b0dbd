"""Cases: hooks, patches, shared, frozen and unused parts, adapters, random layers."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import SAMPLES, Registry, adamw
from benchmarks.parity.models.plain import CLASSES, WIDTH, Block, Perceptron, cross_entropy, vectors

CASES = Registry()


def add(name: str, build: Any, **fields: Any) -> None:
    CASES.add(name, build, vectors, loss=cross_entropy, **fields)


# ---- hooks and patches -----------------------------------------------------------------------------------------------


def forward_hooks() -> nn.Module:
    model = Perceptron()
    model.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    model.blocks[2].register_forward_hook(lambda m, args, kwargs, output: output + args[0], with_kwargs=True)
    return model


def backward_hooks() -> nn.Module:
    model = Perceptron()
    model.blocks[0].register_full_backward_hook(lambda module, gi, go: (gi[0] * 0.5,) if gi[0] is not None else None)
    model.blocks[1].register_full_backward_pre_hook(lambda module, go: (go[0] * 2.0,))
    return model


def parameter_hooks() -> nn.Module:
    model = Perceptron()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


class Counted:
    """Counts calls in a forward hook."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0
        model.counted = self
        for block in model.blocks:
            block.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + 0.1 * (self.calls % 3))


def counting_hooks() -> nn.Module:
    model = Perceptron()
    Counted(model)
    return model


add("forward hooks that change values", forward_hooks)
add("backward hooks that change gradients", backward_hooks)
add("hooks on parameters", parameter_hooks, clip=0.05, splits=False)
add("forward hooks that count", counting_hooks, draws=True)


def patched() -> nn.Module:
    model = Perceptron()
    block = model.blocks[1]
    original = block.forward
    block.forward = lambda x: original(x) * 0.5
    model.blocks[2].forward = types.MethodType(lambda self, x: x + self.down(self.up(x).tanh()), model.blocks[2])
    return model


add("forward patched on instances", patched)


class Slots(Perceptron):
    """Calls a submodule by its forward, and through functions of a list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in [self.blocks[0].forward, self.blocks[1], self.blocks[2].__call__]:
            x = call(x)
        return self.head(x)


add("submodule called by its forward", Slots)


class OwnCall(Block):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x * 2) + 1


class WithOwnCall(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OwnCall(), OwnCall())


add("class with its own __call__", WithOwnCall)

# ---- shared, tied, frozen, unused, adapters --------------------------------------------------------------------------


class Shared(nn.Module):
    """One block three times, and a parameter that is used directly as well."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, CLASSES)
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.block, self.again, self.block):
            x = module(x)
        return self.head(x + self.block.down.bias)


add("block called three times", Shared)
add("block called three times, adamw", Shared, optimizer=adamw)


def half_frozen() -> nn.Module:
    model = Perceptron()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].norm.requires_grad_(False)
    return model


add("frozen parts", half_frozen)


class Unused(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.empty = Block(), nn.Parameter(torch.zeros(0))


add("unused parameters", Unused)


class Sometimes(Perceptron):
    """Uses one block in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.calls % 2:
                x = block(x)
        return self.head(x)


add("block used in every second step", Sometimes, draws=True)
add("block used in every second step, adamw", Sometimes, draws=True, optimizer=adamw)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(dropout)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.b(self.a(self.dropout(x)))


def lora(dropout: float) -> nn.Module:
    model = Perceptron().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Lora(block.up, dropout), Lora(block.down, dropout)
    return model


add("LoRA", lambda: lora(0.0))
add("LoRA, dropout", lambda: lora(0.3), draws=True)


class Dropouts(nn.Module):
    """All kinds of dropout, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.RReLU()])
        self.dropout1d, self.body = nn.Dropout1d(0.2), Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.dropout1d(x.view(len(x), 2, -1)).flatten(1)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.empty_like(x).bernoulli_(0.5)
        return self.body(F.dropout(x, 0.1, self.training)) + 0.1 * F.gumbel_softmax(x[:, :CLASSES])


add("dropouts and noise", Dropouts, draws=True)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(Block(), nn.Linear(WIDTH, 8)),
            nn.Sequential(nn.Linear(4, WIDTH), Block()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return F.mse_loss(self.decoder(z), x) + 0.1 * kl


CASES.add("variational autoencoder", Variational, lambda step: torch.randn(SAMPLES, WIDTH), draws=True)


class Quantised(nn.Module):
    """VQ-VAE with codes that are moving averages, which forward updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(Block(), Block()), nn.Sequential(Codes(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = F.one_hot(torch.cdist(x, self.codes.clone()).argmin(1), 5).to(x.dtype)
        chosen = nearest @ self.codes.clone()
        with torch.no_grad():
            means = (nearest.T @ x) / nearest.sum(0)[:, None].clamp(min=1)
            self.codes.lerp_(means, 0.1)
        return x + (chosen - x).detach()


CASES.add("codes as moving averages", Quantised, lambda step: torch.randn(SAMPLES, WIDTH), splits=False)
