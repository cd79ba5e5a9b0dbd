"""Cases: convolutions, normalisation, recurrence and attention, by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import SAMPLES, Registry, adamw
from benchmarks.parity.models.plain import (
    CLASSES,
    LENGTH,
    WIDTH,
    WORDS,
    Block,
    Perceptron,
    cross_entropy,
    images,
    of_tokens,
    sentences,
)

CASES = Registry()

# ---- convolutions and normalisation ----------------------------------------------------------------------------------


class Convolutional(nn.Module):
    """Convolutions with a normalisation."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU())
        self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.body:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


NORMS: dict[str, Any] = {
    "batch norm": nn.BatchNorm2d,
    "batch norm, cumulative": lambda n: nn.BatchNorm2d(n, momentum=None),
    "batch norm, no statistics": lambda n: nn.BatchNorm2d(n, track_running_stats=False),
    "batch norm, not affine": lambda n: nn.BatchNorm2d(n, affine=False),
    "instance norm": lambda n: nn.InstanceNorm2d(n, affine=True),
    "instance norm, running": lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True),
    "group norm": lambda n: nn.GroupNorm(2, n),
    "local response norm": lambda n: nn.LocalResponseNorm(3),
    "no norm": lambda n: nn.Identity(),
}
for name, norm in NORMS.items():
    CASES.add(f"convolutions, {name}", lambda norm=norm: Convolutional(norm), images, loss=cross_entropy)


class FrozenNorm(Convolutional):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


CASES.add("convolutions, batch norm in evaluation", FrozenNorm, images, loss=cross_entropy)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _conv(3, 8), _conv(8, 16)
        self.middle, self.up = _conv(16, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last, self.out = _conv(16, 8), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        x = self.middle(self.down2(F.max_pool2d(first, 2)))
        return self.out(self.last(torch.cat([self.up(x), first], 1)))


def _conv(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())


def segmented(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, 3, 8, 8), torch.randint(CLASSES, (SAMPLES, 8, 8))


CASES.add("u-net", UNet, segmented, loss=cross_entropy)


class Diffusion(nn.Module):
    """Draws times and noise in forward, embeds the time, and sets it on shared blocks."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.sets, self.embed = sets, nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.block, self.out = Conditioned(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = torch.rand(len(x), 1, device=x.device)
        noise = torch.randn_like(x)
        angles = time * torch.arange(1, 5, device=x.device)
        embedded = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        y = x * (1 - time) + noise * time
        for scale in (1.0, 0.5):
            if self.sets:
                self.block.condition = embedded * scale
                y = self.block(y)
            else:
                y = self.block(y, embedded * scale)
        return F.mse_loss(self.out(y), noise)


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out, self.condition = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        condition = self.condition if condition is None else condition
        return x + self.out(F.silu(self.linear(x) * (1 + condition)))


CASES.add("diffusion, time as an argument", lambda: Diffusion(False), lambda step: torch.randn(SAMPLES, WIDTH),
          draws=True)  # fmt: skip
CASES.add("diffusion, time set on a shared block", lambda: Diffusion(True), lambda step: torch.randn(SAMPLES, WIDTH),
          draws=True)  # fmt: skip

# ---- recurrence ------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


CASES.add("lstm", lambda: Recurrent(nn.LSTM), sentences, loss=of_tokens)
CASES.add(
    "lstm, bidirectional", lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2), sentences, loss=of_tokens
)
CASES.add("lstm, dropout", lambda: Recurrent(nn.LSTM, dropout=0.3, num_layers=2), sentences, loss=of_tokens, draws=True)
CASES.add("gru", lambda: Recurrent(nn.GRU), sentences, loss=of_tokens)
CASES.add("rnn", lambda: Recurrent(nn.RNN), sentences, loss=of_tokens)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, hidden, found = self.embedding(ids), ids.new_zeros(len(ids), WIDTH).to(self.head.weight.dtype), []
        for position in range(x.shape[1]):
            hidden = self.cell(x[:, position], hidden)
            found.append(hidden)
        return self.head(torch.stack(found, 1))


CASES.add("gru cell, shared over time", Cells, sentences, loss=of_tokens)


class Carried(nn.Module):
    """Truncated backpropagation: the hidden state is carried to the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.hidden = Cells(), None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.rnn.embedding(ids)
        hidden = torch.zeros_like(x[:, 0]) if self.hidden is None or len(self.hidden) != len(x) else self.hidden
        found = []
        for position in range(x.shape[1]):
            hidden = self.rnn.cell(x[:, position], hidden)
            found.append(hidden)
        self.hidden = hidden.detach()
        return self.rnn.head(torch.stack(found, 1))


CASES.add("hidden state carried to the next batch", Carried, sentences, loss=of_tokens, splits=False)

# ---- attention -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0) if self.kind != "unsafe_chunk" else (t[0] for t in parts.unsafe_chunk(3))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH / 2)
            seen = self.mask[: x.shape[1], : x.shape[1]] if mask is None else mask
            if self.kind == "in place":
                scores.masked_fill_(~seen, -1e4)
            else:
                scores = scores.masked_fill(~seen, -1e4)
            y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(1, 16, WIDTH) * 0.1)
        self.layers = nn.ModuleList(nn.ModuleList([Attention(kind), Block(dropout=dropout)]) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids) + self.positions[:, : ids.shape[1]]
        for attention, block in self.layers:
            x = block(attention(x, mask))
        return self.head(x)


for kind in ("by hand", "sdpa", "in place", "unsafe_chunk"):
    CASES.add(f"transformer, {kind}", lambda kind=kind: Transformer(kind), sentences, loss=of_tokens)
CASES.add("transformer, dropout", lambda: Transformer("sdpa", 0.2), sentences, loss=of_tokens, draws=True)
CASES.add(
    "transformer, tied weights",
    lambda: Transformer("sdpa", tied=True),
    sentences,
    loss=of_tokens,
    optimizer=adamw,
    rounding=1e-7,
)


def as_long_as_the_batch(step: int) -> tuple:
    """Returns sentences as long as the batch has samples, and a mask [length, length]."""
    ids = torch.randint(WORDS, (SAMPLES, SAMPLES))
    mask = torch.tril(torch.ones(SAMPLES, SAMPLES, dtype=torch.bool))
    return ids, mask, ids.roll(-1, 1)


CASES.add(
    "mask [T, T] with T samples", lambda: Transformer("by hand"), as_long_as_the_batch, loss=of_tokens, splits=False
)


class Weighted(nn.Module):
    """Weights features by a tensor of the batch that has as many elements as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SAMPLES, WIDTH), Perceptron()

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * weights))


CASES.add("weights [D] with D samples", Weighted,
          lambda step: (torch.randn(SAMPLES, SAMPLES), torch.rand(SAMPLES), torch.randint(CLASSES, (SAMPLES,))),
          loss=cross_entropy, splits=False)  # fmt: skip
CASES.add("class weights [C] with C samples in the batch", lambda: Head(SAMPLES),
          lambda step: (
              torch.randn(SAMPLES, WIDTH), (torch.randint(SAMPLES, (SAMPLES,)), torch.linspace(0.1, 2, SAMPLES)),
          ),
          loss=lambda o, b: F.cross_entropy(o, b[-1][0], weight=b[-1][1]), splits=False)  # fmt: skip


class Head(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


class TorchTransformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids)))


CASES.add("torch's transformer", lambda: TorchTransformer(0.0), sentences, loss=of_tokens)
CASES.add("torch's transformer, dropout", lambda: TorchTransformer(0.2), sentences, loss=of_tokens, draws=True)
