"""GPT-2 small as `ch05/10_llm-training-speed` of github.com/rasbt/LLMs-from-scratch trains it, step by step faster.

The book's script (commit 908dd2f, February 2025) trains on batches of 8 samples of 1024 tokens with AdamW, computes the
loss of one training and one validation batch after the first and then every fifteenth step, and generates 50 tokens
after each epoch. Then it prints `torch.cuda.memory_reserved()`. The README adds one change after another.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, VOCABULARY, TOKENS, SAMPLES = 768, 12, 12, 50_257, 1024, 8
DROPOUT = 0.1
STEPS, EVALUATED_EVERY, GENERATED = 17, 15, 50
"""Steps of the first epoch that are rehearsed (of 51), steps between evaluations, and generated tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that the README makes, in its order."""

    mask_on_the_fly: bool = False
    fused_optimizer: bool = False
    bfloat16: bool = False
    own_modules: bool = True
    """The book's LayerNorm and GELU instead of PyTorch's."""
    flash_attention: bool = False


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class OwnGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class OwnAttention(nn.Module):
    """Three projections, and the matrix of scores."""

    def __init__(self, *, keeps_mask: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        self.keeps_mask = keeps_mask
        if keeps_mask:
            self.register_buffer("mask", torch.empty(TOKENS, TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        shape = (samples, tokens, HEADS, WIDTH // HEADS)
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, values, queries = keys.view(shape), values.view(shape), queries.view(shape)
        keys, queries, values = keys.transpose(1, 2), queries.transpose(1, 2), values.transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self._hidden(tokens, x.device), -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        attended = (weights @ values).transpose(1, 2)
        attended = attended.reshape(samples, tokens, WIDTH)
        return self.out(attended)

    def _hidden(self, tokens: int, device: torch.device) -> torch.Tensor:
        if self.keeps_mask:
            return self.get_buffer("mask").bool()[:tokens, :tokens]
        return torch.triu(torch.ones(tokens, tokens, device=device), diagonal=1).bool()


class FlashAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        qkv = self.qkv(x)
        qkv = qkv.view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        attended = attended.transpose(1, 2).contiguous().view(samples, tokens, WIDTH)
        return self.out(attended)


class Block(nn.Module):
    def __init__(self, changes: Changes) -> None:
        super().__init__()
        if changes.flash_attention:
            self.attention: nn.Module = FlashAttention()
        else:
            self.attention = OwnAttention(keeps_mask=not changes.mask_on_the_fly)
        gelu = OwnGelu() if changes.own_modules else nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norm1, self.norm2 = norm(changes), norm(changes)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.mlp(x)
        x = self.dropout(x)
        return x + shortcut


def norm(changes: Changes) -> nn.Module:
    return OwnNorm() if changes.own_modules else nn.LayerNorm(WIDTH)


class LanguageModel(nn.Module):
    """Tokens [samples, tokens] -> logits [samples, tokens, vocabulary]."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(changes) for _ in range(LAYERS)))
        self.norm = norm(changes)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(ids)
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = embedded + positions
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


def loss_of(model: nn.Module, device: torch.device) -> torch.Tensor:
    ids, targets = (torch.zeros(SAMPLES, TOKENS, dtype=torch.int64).to(device) for _ in range(2))
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def evaluate(model: nn.Module, device: torch.device) -> None:
    model.eval()
    with torch.no_grad():
        for _ in ("training", "validation"):
            loss = loss_of(model, device)
    model.train()
    del loss


def generate(model: nn.Module, device: torch.device, prompt_tokens: int = 4) -> None:
    model.eval()
    ids = torch.zeros(1, prompt_tokens, dtype=torch.int64).to(device)
    with torch.no_grad():
        for _ in range(GENERATED):
            logits = model(ids[:, -TOKENS:])
            logits = logits[:, -1, :]
            following = torch.argmax(logits, dim=-1, keepdim=True)
            ids = torch.cat((ids, following), dim=1)
    model.train()


def first_epoch(device: torch.device, changes: Changes) -> None:
    """Run the beginning of the first epoch with two evaluations, and the generation at its end."""
    with device:
        model = LanguageModel(changes)
    if changes.bfloat16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=changes.fused_optimizer or None)
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, device)
        loss.backward()
        optimizer.step()
        if step % EVALUATED_EVERY == 0:
            evaluate(model, device)
    generate(model, device)
