"""A small model of tokens with logits that are large compared with its weights."""

from __future__ import annotations

import torch
from torch import nn


class Tagger(nn.Module):
    """Scores 5,000 labels for each token. Called with tokens of shape [samples, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in "ab"))
        self.head = nn.Linear(256, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))
