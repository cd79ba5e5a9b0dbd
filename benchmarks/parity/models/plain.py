"""Cases: common networks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import SAMPLES, Registry, adamw

CASES = Registry()
WIDTH, CLASSES, LENGTH, WORDS = 12, 5, 6, 31


def vectors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns features [samples, width] and classes."""
    return torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, 3, 8, 8), torch.randint(CLASSES, (SAMPLES,))


def sentences(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and the next tokens."""
    ids = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def cross_entropy(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def of_tokens(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[-1].flatten())


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Perceptron(nn.Module):
    def __init__(self, dropout: float = 0.0, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(depth)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


CASES.add("perceptron", Perceptron, vectors, loss=cross_entropy)
CASES.add("perceptron, adamw, clipping", Perceptron, vectors, loss=cross_entropy, optimizer=adamw, clip=0.1)
CASES.add("perceptron, dropout", lambda: Perceptron(0.3), vectors, loss=cross_entropy, draws=True)
