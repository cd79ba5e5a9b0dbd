"""Cases: parametrizations, functional calls, checkpoints of the user's, autocast, autograd functions, views."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from benchmarks.parity.case import Registry
from benchmarks.parity.models.plain import CLASSES, WIDTH, Block, Perceptron, cross_entropy, vectors

CASES = Registry()


def of_blocks(change: Any) -> Any:
    """Returns a builder of a perceptron whose blocks were changed."""

    def build() -> nn.Module:
        model = Perceptron()
        for block in model.blocks:
            change(block)
        return model

    return build


def add(name: str, build: Any, **fields: Any) -> None:
    CASES.add(name, build, vectors, loss=cross_entropy, **fields)


# ---- parametrizations ------------------------------------------------------------------------------------------------

add("weight norm", of_blocks(lambda block: parametrizations.weight_norm(block.up)))
add("spectral norm", of_blocks(lambda block: parametrizations.spectral_norm(block.up)), draws=True)
add("spectral norm with hooks", of_blocks(lambda block: nn.utils.spectral_norm(block.up)), draws=True)
add("weight norm with hooks", of_blocks(lambda block: nn.utils.weight_norm(block.up)))
add("orthogonal", of_blocks(lambda block: parametrizations.orthogonal(block.up, orthogonal_map="cayley")), single=False)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    model = Perceptron()
    model.mix = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(model.mix, "weight", Symmetric())
    model.blocks.append(model.mix)
    return model


add("parametrization of the user's", symmetric)


class HyperNetwork(nn.Module):
    """One network makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH * WIDTH))
        self.code, self.main, self.head = nn.Parameter(torch.randn(4)), Generated(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.main.weight = self.hyper(self.code).view(WIDTH, WIDTH)
        return self.head(self.main(x))


class Generated(nn.Module):
    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight.T)


add("hyper-network, weights set as an attribute", HyperNetwork)


class HyperByCall(nn.Module):
    """One network makes the weights of another for `functional_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.code = nn.Linear(4, WIDTH * WIDTH), nn.Parameter(torch.randn(4))
        self.main, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.main.weight + 0.1 * self.hyper(self.code).view(WIDTH, WIDTH)
        return self.head(torch.func.functional_call(self.main, {"weight": weight}, (x,)).tanh())


add("hyper-network by functional_call", HyperByCall)


class Meta(nn.Module):
    """MAML: one inner step on half of the features, by `functional_call`, and the outer loss on the other half."""

    def __init__(self, first_order: bool) -> None:
        super().__init__()
        self.net, self.first_order = Perceptron(), first_order

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = dict(self.net.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(self.net, weights, (x * 0.9,)), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=not self.first_order)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, fast, (x,)), y)


CASES.add("MAML by functional_call", lambda: Meta(False), vectors, splits=False)
CASES.add("MAML, first order", lambda: Meta(True), vectors, splits=False)


class Penalty(nn.Module):
    """A penalty on the gradient by the input, as in WGAN-GP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        logits = self.net(x)
        (gradient,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + 0.01 * gradient.square().sum(1).mean()


CASES.add("gradient penalty", Penalty, vectors)


class Mapped(nn.Module):
    """vmap over an ensemble of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weights = Block(), nn.Parameter(torch.randn(3, CLASSES, WIDTH) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return torch.func.vmap(lambda w: F.linear(x, w).tanh())(self.weights).mean(0)


add("vmap over heads", Mapped)


class DoubleBackward(nn.Module):
    """Calls the same block under no_grad first, and detaches a part."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            anchor = self.block(x)
        return self.head(self.block(x) - anchor.tanh())


add("block called without gradients first", DoubleBackward)

# ---- the user's own checkpoints, autocast, functions -----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(dropout=dropout) for _ in range(3)), nn.Linear(WIDTH, CLASSES)
        self.first, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class NestedCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Checkpointed(False, 0.2), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


add("checkpoints of the user's", lambda: Checkpointed(False))
add("reentrant checkpoints of the user's", lambda: Checkpointed(True))
add("checkpoints of the user's, dropout", lambda: Checkpointed(False, 0.3), draws=True)
add("nested checkpoints", NestedCheckpoint, draws=True)


class OwnAutocast(nn.Module):
    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.body, self.block, self.enabled = Perceptron(), Block(), enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.enabled):
            x = self.block(x)
        return self.body(x.to(self.body.head.weight.dtype))


add("autocast inside of forward", lambda: OwnAutocast(True), rounding=5e-2, dtype=torch.float32)
add("autocast switched off inside of forward", lambda: OwnAutocast(False), single=False)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = torch.exp(x * scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y * ctx.scale, None


class ByAttribute(torch.autograd.Function):
    """Keeps a tensor on the context instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x.sigmoid()
        return x * ctx.kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.kept * 1.5


class Rounded(torch.autograd.Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class WithFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = Block(), Perceptron(), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


add("autograd function", lambda: WithFunction(lambda x: Exponential.apply(x, 0.3)))
add("autograd function, attribute", lambda: WithFunction(ByAttribute.apply))
add("autograd function, straight through", lambda: WithFunction(Rounded.apply))


class Reversed(nn.Module):
    """Gradient reversal by a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = Perceptron(), nn.Linear(WIDTH, CLASSES)
        self.block = HookedBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.block(x))


class HookedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: -0.5 * gradient)
        return y * 2


add("hook on a tensor", Reversed)


class Views(nn.Module):
    """Views, in-place operations, slices that are written to, and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = ViewBlock(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        y += 1
        return self.head(y)


class ViewBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        half, rest = y.chunk(2, 1)
        z = torch.empty_like(y)
        z[:, : WIDTH // 2] = self.other(half).tanh()
        z[:, WIDTH // 2 :] = rest.sigmoid()
        z.mul_(0.5).add_(x)
        return z.view(len(x), 2, -1).transpose(1, 2).flatten(1)


add("views and in-place operations", Views)


class InPlace(nn.Module):
    """Writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(WIDTH, WIDTH), WritesArgument(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.block(x) + x)


class WritesArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.clone())
        x.mul_(2.0)
        return y.relu_()


add("block that writes to its argument", InPlace)
