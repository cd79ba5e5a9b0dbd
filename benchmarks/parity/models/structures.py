"""Cases: experts, graphs, embeddings, and unusual batches, outputs and dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import SAMPLES, Registry
from benchmarks.parity.models.nets import Head
from benchmarks.parity.models.plain import (
    CLASSES,
    LENGTH,
    WIDTH,
    WORDS,
    Block,
    Perceptron,
    cross_entropy,
    vectors,
)

CASES = Registry()

# ---- experts, graphs, embeddings -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Top-2 routing, dense or by index, and a loss that balances the experts over the batch."""

    def __init__(self, balances: bool) -> None:
        super().__init__()
        self.balances, self.router = balances, nn.Linear(WIDTH, 4)
        self.experts, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(1)
        top, chosen = shares.topk(2, 1)
        weights = torch.zeros_like(shares).scatter(1, chosen, top / top.sum(1, keepdim=True))
        mixed = sum(expert(x) * weights[:, number, None] for number, expert in enumerate(self.experts))
        loss = F.cross_entropy(self.head(mixed), y)
        if self.balances:
            loss = loss + 0.1 * 4 * (shares.mean(0) * (weights > 0).to(x.dtype).mean(0)).sum()
        return loss


CASES.add("experts, top-2", lambda: Experts(False), vectors)
CASES.add("experts, balanced over the batch", lambda: Experts(True), vectors, splits=False)


class Graph(nn.Module):
    """Messages along the edges of one graph for each sample, added with index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(2 * WIDTH, WIDTH), Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        n = nodes.shape[1]
        offset = torch.arange(len(nodes), device=nodes.device)[:, None] * n
        flat, a, b = nodes.flatten(0, 1), (sources + offset).flatten(), (targets + offset).flatten()
        for _ in range(2):
            messages = self.message(torch.cat([flat[a], flat[b]], 1)).relu()
            flat = self.update(flat + torch.zeros_like(flat).index_add(0, b, messages.to(flat.dtype)))
        return self.head(flat.view_as(nodes).mean(1))


def graphs(step: int) -> tuple:
    edges = [torch.randint(4, (SAMPLES, 9)) for _ in range(2)]
    return torch.randn(SAMPLES, 4, WIDTH), *edges, torch.randint(CLASSES, (SAMPLES,))


CASES.add("graph network", Graph, graphs, loss=cross_entropy)


def joined_graphs(step: int) -> tuple:
    """Returns one graph of all nodes: edges are [2, edges], so that samples cannot be sliced."""
    return torch.randn(SAMPLES, WIDTH), torch.randint(SAMPLES, (2, 15)), torch.randint(CLASSES, (SAMPLES,))


class JoinedGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(2 * WIDTH, WIDTH), Head(CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        messages = self.message(torch.cat([x[edges[0] % len(x)], x[edges[1] % len(x)]], 1)).relu()
        return self.head(x + torch.zeros_like(x).index_add(0, edges[1] % len(x), messages.to(x.dtype)))


CASES.add("one graph of all samples", JoinedGraph, joined_graphs, loss=cross_entropy, splits=False)


class Bag(nn.Module):
    def __init__(self, sparse: bool, kind: Any = nn.EmbeddingBag) -> None:
        super().__init__()
        self.embedding, self.head = kind(WORDS, WIDTH, sparse=sparse), Head(CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(x.mean(1) if x.dim() == 3 else x)


def bags(step: int) -> tuple:
    return torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randint(CLASSES, (SAMPLES,))


def plain_sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


CASES.add("embedding bag", lambda: Bag(False), bags, loss=cross_entropy)
CASES.add("sparse embedding", lambda: Bag(True, nn.Embedding), bags, loss=cross_entropy, optimizer=plain_sgd)
CASES.add("sparse embedding bag", lambda: Bag(True), bags, loss=cross_entropy, optimizer=plain_sgd)
CASES.add("sparse embedding, clipping", lambda: Bag(True, nn.Embedding), bags, loss=cross_entropy,
          optimizer=lambda model, **o: torch.optim.Adagrad(model.parameters(), lr=0.1, **o))  # fmt: skip
CASES.add("embedding with max_norm", lambda: Bag(False, lambda n, w, sparse: nn.Embedding(n, w, max_norm=1.0)), bags,
          loss=cross_entropy, draws=True)  # fmt: skip
CASES.add("embedding with frequency scaling",
          lambda: Bag(False, lambda n, w, sparse: nn.Embedding(n, w, scale_grad_by_freq=True)), bags,
          loss=cross_entropy, splits=False)  # fmt: skip


# ---- unusual outputs and batches -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "data"


class Returning(nn.Module):
    """Returns its loss in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = Perceptron(), kind

    def forward(self, x: Any, y: torch.Tensor | None = None) -> Any:
        if isinstance(x, Batch):
            x, y = x.x, x.y
        logits = self.body(x)
        loss = F.cross_entropy(logits, y)
        return {"dict": {"loss": loss, "logits": logits}, "tuple": (loss, logits), "object": Output(loss, logits)}[
            self.kind
        ]


CASES.add("output: dict with a loss", lambda: Returning("dict"), vectors)
CASES.add("output: tuple with a loss", lambda: Returning("tuple"), vectors)
CASES.add("output: dataclass with a loss", lambda: Returning("object"), vectors)
CASES.add("batch: keywords", lambda: Returning("dict"), lambda step: dict(zip("xy", vectors(step), strict=True)))
CASES.add("batch: dataclass", lambda: Returning("object"), lambda step: Batch(*vectors(step)))


class Several(nn.Module):
    """Blocks that return dicts, tuples and dataclasses, and a parent that checks their types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = InDict(), InTuple(), InObject()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> dict:
        found = self.first(x)
        assert isinstance(found, dict) and isinstance(found["x"], torch.Tensor)
        pair = self.second(x=found["x"], skip=found["skip"])
        assert isinstance(pair, tuple) and len(pair) == 2
        result = self.third(pair)
        assert isinstance(result, Output)
        return {"logits": self.head(result.logits), "hidden": result.loss}


class InDict(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": super().forward(x), "skip": x * 2, "none": None, "number": 3}


class InTuple(Block):
    def forward(self, *, x: torch.Tensor, skip: torch.Tensor) -> Any:
        return super().forward(x), skip.tanh()


class InObject(Block):
    def forward(self, pair: tuple) -> Any:
        return Output(loss=pair[1].mean(), logits=super().forward(pair[0] + pair[1]))


CASES.add("blocks that return dict, tuple, dataclass", Several, vectors,
          loss=lambda o, b: F.cross_entropy(o["logits"], b[-1]) + 0.1 * o["hidden"])  # fmt: skip


def uneven(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch that is smaller in the last two steps."""
    x, y = vectors(step)
    return (x, y) if step < 3 else (x[: 8 - step], y[: 8 - step])


CASES.add("last batches are smaller", Perceptron, uneven, loss=cross_entropy)


class Wavelets(nn.Module):
    """Complex numbers: a transform, complex weights, and the absolute value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cdouble))
        self.block, self.head = Spectral(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)
        return self.head(self.block(y))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.linear(x), x)
        return (z * z.conj().exp()).abs()


CASES.add("complex numbers", Wavelets, vectors, loss=cross_entropy, single=False)
