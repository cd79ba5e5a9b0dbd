"""Cases: arguments that change, and tensors that modules leave for their parent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import Registry
from benchmarks.parity.models.plain import CLASSES, WIDTH, Block, cross_entropy, vectors

CASES = Registry()


class Argument(nn.Module):
    """Passes a dict that it changes after the call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(WithOptions() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options: Any = {"scale": 1.0} if self.kind != "list" else [1.0]
        for block in self.blocks:
            x = block(x, options)
            if self.kind == "list":
                options[0] += 1.0
            elif self.kind == "dict":
                options["scale"] += 1.0
            else:
                options["hidden"] = x.detach().mean()
        return self.head(x)


class WithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        scale = options[0] if isinstance(options, list) else options["scale"] + options.get("hidden", 0.0)
        return x + self.out(torch.tanh(self.linear(x) * scale))


for kind in ("dict", "list", "dict with a tensor"):
    CASES.add(f"mutable argument: {kind}", lambda kind=kind: Argument(kind), vectors, loss=cross_entropy,
              splits=kind != "dict with a tensor")  # fmt: skip


class Popping(nn.Module):
    """The block takes its input out of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = PoppingBlock(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block({"x": x}) + x)


class PoppingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, values: dict) -> torch.Tensor:
        return self.inner(values.pop("x"))


CASES.add("argument that is popped", Popping, vectors, loss=cross_entropy)


class Cache(nn.Module):
    """Keeps the features of its last call for the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Keeper(), Block(), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.second(self.first(x)), self.first.features], 1))


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.features = Block(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = self.inner(x).tanh()
        return self.features * 2


CASES.add("features kept as an attribute", Cache, vectors, loss=cross_entropy)


class Auxiliary(nn.Module):
    """Submodules leave losses in attributes, which the parent adds up."""

    def __init__(self, in_list: bool) -> None:
        super().__init__()
        self.in_list = in_list
        self.blocks, self.head = nn.ModuleList(WithLoss() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses: list = []
        for block in self.blocks:
            x = block(x, losses if self.in_list else None)
        extra = sum(losses) if self.in_list else sum(block.loss for block in self.blocks)
        return F.cross_entropy(self.head(x), y) + 0.1 * extra


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.loss = Block(), None

    def forward(self, x: torch.Tensor, losses: list | None) -> torch.Tensor:
        x = self.inner(x)
        self.loss = x.square().mean()
        if losses is not None:
            losses.append(self.loss)
        return x


CASES.add("auxiliary losses in attributes", lambda: Auxiliary(False), vectors)
CASES.add("auxiliary losses in a list argument", lambda: Auxiliary(True), vectors)
