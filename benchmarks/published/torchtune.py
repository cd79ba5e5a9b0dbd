"""Llama-3.2-3B as trained by torchtune's `full_finetune_single_device` (github.com/pytorch/torchtune, 1814feb17).

All in bf16, AdamW; norms and rotary positions go through fp32, and so do the logits. Of a packed data set the positions
come with the batch. torchtune took compiled FlexAttention there: it saves what flash attention does (queries, keys,
values, output, one fp32 number a row) and lays its output out like its queries, so flash attention stands in for it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.rehearsing import making

WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, VOCABULARY = 3072, 28, 24, 8, 8192, 128_256
POSITIONS, HEAD = 131_072, WIDTH // HEADS
STEPS = 2


class RootMeanSquareNorm(nn.Module):
    """RMSNorm in fp32, scaled in the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Rotary(nn.Module):
    """One table of cosines and sines in fp32, [positions, half a head, 2], shared by all layers."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / (500_000 ** (torch.arange(0, HEAD, 2).float() / HEAD))
        angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float32), frequencies)
        self.register_buffer("table", torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        samples, tokens = positions.shape
        table = self.table[positions].view(samples, tokens, 1, HEAD // 2, 2)
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turned = [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ]
        return torch.stack(turned, -1).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.rotary = rotary

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        query = self.query(x).view(samples, tokens, HEADS, HEAD)
        query = self.rotary(query, positions).transpose(1, 2)
        key, value = self.key(x), self.value(x)
        key = self.rotary(key.view(samples, tokens, KEY_HEADS, HEAD), positions).transpose(1, 2)
        value = value.view(samples, tokens, KEY_HEADS, HEAD).transpose(1, 2)
        key, value = for_each_query(key), for_each_query(value)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).contiguous().view(samples, tokens, width))


def for_each_query(x: torch.Tensor) -> torch.Tensor:
    samples, _, tokens, _ = x.shape
    shape = (samples, KEY_HEADS, HEADS // KEY_HEADS, tokens, HEAD)
    return x.unsqueeze(2).expand(shape).flatten(1, 2)


class Layer(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = RootMeanSquareNorm(), Attention(rotary), RootMeanSquareNorm()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.norm1(x), positions) + x
        return x + self._feed_forward(self.norm2(x))

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate(x))
        hidden = hidden * self.up(x)
        return self.down(hidden)


class LanguageModel(nn.Module):
    """Tokens, positions [samples, tokens] -> fp32 logits [samples, tokens, vocabulary]; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        rotary = Rotary()
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(LAYERS))
        self.norm = RootMeanSquareNorm()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight).float()


def loss_of(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, positions)
    ignored = torch.full_like(labels[:, :1], -100)
    shifted = torch.hstack((labels[:, 1:], ignored)).reshape(-1)
    logits = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(logits, shifted)


def packed_steps(device: torch.device, samples: int, tokens: int) -> None:
    """Train steps over full packs. AdamW has its state from the second step on."""
    with device, making(torch.bfloat16):
        model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for _ in range(STEPS):
        batch = [torch.zeros(samples, tokens, dtype=torch.int64).to(device) for _ in range(3)]
        counted = (batch[2] != -100).sum()
        loss = loss_of(model, *batch) * counted
        loss.backward()
        for parameter in model.parameters():
            parameter.grad *= 1 / counted
        optimizer.step()
        optimizer.zero_grad()
