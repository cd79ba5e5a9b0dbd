"""Recommender models: embeddings of categories, bags of them, and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.case import Case, single

BATCH, USERS, ITEMS, FIELDS, WIDTH, HISTORY = 8, 50, 80, 5, 16, 6


class Factors(nn.Module):
    """Matrix factorization with biases."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH, sparse=sparse), nn.Embedding(ITEMS, WIDTH, sparse=sparse)
        self.bias = nn.Embedding(ITEMS, 1, sparse=sparse)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).sum(-1) + self.bias(item).squeeze(-1)


class FactorizationMachine(nn.Module):
    """DeepFM: linear terms, second-order interactions, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Embedding(ITEMS, 1), nn.Embedding(ITEMS, WIDTH)
        self.deep = nn.Sequential(nn.Linear(FIELDS * WIDTH, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        x = self.embedding(fields)
        pairs = (x.sum(1).square() - x.square().sum(1)).sum(-1) / 2
        return self.linear(fields).sum((1, 2)) + pairs + self.deep(x.flatten(1)).squeeze(-1)


class WideAndDeep(nn.Module):
    """A wide linear part over a bag of categories, and a deep part over dense features."""

    def __init__(self, *, sparse: bool, mode: str = "sum") -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(ITEMS, 8, mode=mode, sparse=sparse)
        self.deep = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, history: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return (self.wide(history) + self.deep(dense)).sum(-1)


class Offsets(nn.Module):
    """DLRM's use of `nn.EmbeddingBag`: one flat list of categories, with the offsets of the samples in it."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", sparse=sparse)
        self.bottom = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.top = nn.Linear(2 * WIDTH + 1, 1)

    def forward(self, offsets: torch.Tensor, dense: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        x, y = self.bottom(dense), self.bags(flat, offsets)
        return self.top(torch.cat([x, y, (x * y).sum(-1, keepdim=True)], 1)).squeeze(-1)


class Cross(nn.Module):
    """A deep and cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ITEMS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(FIELDS * WIDTH, FIELDS * WIDTH) for _ in range(3))
        self.head = nn.Linear(FIELDS * WIDTH, 1)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(fields).flatten(1)
        for layer in self.layers:
            x = first * layer(x) + x
        return self.head(x).squeeze(-1)


class Towers(nn.Module):
    """Two towers whose scores for all pairs of the batch are a softmax (in-batch negatives)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        scores = self.left(self.users(user)) @ self.right(self.items(item)).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class Sequential(nn.Module):
    """SASRec: a causal transformer over the history of a user; the loss is over all items."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(ITEMS, WIDTH, padding_idx=0), nn.Embedding(HISTORY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        x = self.items(history) + self.positions(torch.arange(HISTORY, device=history.device))
        mask = nn.Transformer.generate_square_subsequent_mask(HISTORY, device=history.device)
        x = self.layers(x, mask=mask, is_causal=True)
        return F.cross_entropy((x @ self.items.weight.T)[:, :-1].flatten(0, 1), history[:, 1:].flatten())


class Sessions(nn.Module):
    """GRU4Rec: a recurrent network over sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.cells = nn.Embedding(ITEMS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, ITEMS)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.items(history))[0][:, -1])


class Autoencoder(nn.Module):
    """A variational autoencoder over rows of the matrix of clicks (MultVAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Dropout(0.5), nn.Linear(ITEMS, 32), nn.Tanh(), nn.Linear(32, 2 * WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, ITEMS))

    def forward(self, clicks: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(F.normalize(clicks)).chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return -(self.decoder(sample).log_softmax(-1) * clicks).sum(-1).mean() + divergence


def clicked(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, batch[-1])


def next_item(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def _ids(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, count, (BATCH, *shape))


def _pairs() -> tuple[torch.Tensor, ...]:
    return _ids(USERS), _ids(ITEMS), torch.rand(BATCH).round()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.1)


def _adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def cases() -> Iterator[Case]:
    """Yields models with dense gradients, and the same with sparse ones."""
    bags = lambda: (_ids(ITEMS, HISTORY), torch.randn(BATCH, WIDTH), torch.rand(BATCH).round())
    flat = lambda: (
        torch.arange(0, 3 * BATCH, 3),
        torch.randn(BATCH, WIDTH),
        torch.randint(ITEMS, (3 * BATCH,)),
        torch.rand(BATCH).round(),
    )
    fields = lambda: (_ids(ITEMS, FIELDS), torch.rand(BATCH).round())
    histories = lambda: (_ids(ITEMS, HISTORY), _ids(ITEMS))
    table: tuple[tuple[str, Callable[[], nn.Module], Callable[[], Any], Any, Any], ...] = (
        ("matrix factorization", lambda: Factors(sparse=False), _pairs, clicked, "adamw"),
        ("matrix factorization, sparse, sgd", lambda: Factors(sparse=True), _pairs, clicked, _sgd),
        ("matrix factorization, sparse, SparseAdam", lambda: Factors(sparse=True), _pairs, clicked, _sparse_adam),
        ("matrix factorization, sparse, Adagrad", lambda: Factors(sparse=True), _pairs, clicked, _adagrad),
        ("deep factorization machine", FactorizationMachine, fields, clicked, "adamw"),
        ("wide and deep", lambda: WideAndDeep(sparse=False), bags, clicked, "adamw"),
        ("wide and deep, mean", lambda: WideAndDeep(sparse=False, mode="mean"), bags, clicked, "adamw"),
        ("wide and deep, max", lambda: WideAndDeep(sparse=False, mode="max"), bags, clicked, "adamw"),
        ("wide and deep, sparse, sgd", lambda: WideAndDeep(sparse=True), bags, clicked, _sgd),
        ("wide and deep, sparse, Adagrad", lambda: WideAndDeep(sparse=True), bags, clicked, _adagrad),
        ("dlrm with offsets", Offsets, flat, clicked, "adamw"),
        ("dlrm with offsets, sparse, sgd", lambda: Offsets(sparse=True), flat, clicked, _sgd),
        ("deep and cross network", Cross, fields, clicked, "adamw"),
        ("two towers", Towers, lambda: _pairs()[:2], None, "adamw"),
        ("sequential transformer", Sequential, lambda: _ids(ITEMS, HISTORY), None, "adamw"),
        ("sessions by gru", Sessions, histories, next_item, "adamw"),
        ("variational autoencoder", Autoencoder, lambda: torch.rand(BATCH, ITEMS).round(), None, "adamw"),
    )
    for name, model, batch, loss_fn, optimizer in table:
        build = lambda model=model, batch=batch, loss_fn=loss_fn: (model(), batch(), loss_fn)
        yield Case(library="recommenders", name=name, candidates=single(build, optimizer=optimizer))
