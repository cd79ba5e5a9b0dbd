"""The program behind the public histories `NiuHuangxiaozi_*`: a language model made of einsums, and its own Adam.

Settings (their repository's script): vocabulary 10000, width 512, 4 layers, 16 heads, inner width 1344, batch 10, three
steps, on CUDA with torch 2.6; the history begins before the model is made. (The last token's logits are taken by three
views here, as torch 2.6 does for `logits[:, -1, :]`: it made a slice of every `:`, which later versions skip.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, INNER, LONGEST, BATCH, STEPS = 10_000, 512, 4, 16, 1344, 256, 10, 3


def program(*, length: int, backward: bool, mixed: bool) -> Callable[[torch.device], None]:
    """Returns the program for sequences of `length` tokens."""

    def run(device: torch.device) -> None:
        cast = torch.autocast(device.type, dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
        model = LanguageModel(device)
        if not backward:
            tokens = torch.randint(0, VOCABULARY, (BATCH, length)).to(device)
            for _ in range(STEPS):
                with cast:
                    model(tokens)
            return
        optimizer = Adam(model.parameters())
        tokens = torch.randint(0, VOCABULARY, (BATCH, length)).to(device)
        labels = torch.randint(0, VOCABULARY, (BATCH,)).to(device)
        with cast:
            for _ in range(STEPS):
                optimizer.zero_grad()
                logits = model(tokens)
                last = logits.narrow(0, 0, BATCH).select(1, -1).narrow(1, 0, VOCABULARY)
                loss = cross_entropy(last, labels)
                loss.backward()
                optimizer.step()

    return run


class Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class Norm(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        result = x / root * self.weight
        return result.to(given)


class Rotary(nn.Module):
    """Rotary positions whose tables stay in host memory; the rows in use are copied each time."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.zeros(LONGEST, WIDTH // HEADS // 2)
        self.register_buffer("sines", torch.sin(angles), persistent=False)
        self.register_buffer("cosines", torch.cos(angles), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-2])
        sines, cosines = (table[places].to(x.device) for table in (self.sines, self.cosines))
        sines, cosines = (table[None, :, :, None] for table in (sines, cosines))
        x = x.unflatten(-1, (-1, 2))
        first = cosines * x[..., :1] - sines * x[..., 1:]
        second = sines * x[..., :1] + cosines * x[..., 1:]
        return torch.cat([first, second], dim=-1).flatten(-2)


def softmax(x: torch.Tensor) -> torch.Tensor:
    most, _ = torch.max(x, dim=-1, keepdim=True)
    return torch.exp(x - most) / torch.sum(torch.exp(x - most), dim=-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.query, self.key, self.value, self.out = (Projection(WIDTH, WIDTH, device) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        mask = torch.tril(torch.ones(length, length))
        return self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(-2))

    def attend(self, query, key, value, mask):
        mask = mask.to(query.device)
        products = torch.einsum("bhqd,bhkd->bhqk", query, key)
        scores = products / torch.sqrt(torch.tensor(query.shape[-1], device=products.device))
        scores = scores.masked_fill_(~mask.bool(), -float("inf"))
        return torch.einsum("bhqk,bhkd->bhqd", softmax(scores), value)


class FeedForward(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.gate = Projection(WIDTH, INNER, device)
        self.down = Projection(INNER, WIDTH, device)
        self.up = Projection(WIDTH, INNER, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        activated = self.activate(gate)
        up = self.up(x)
        product = activated * up
        return self.down(product)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first_norm, self.second_norm = Norm(device), Norm(device)
        self.attention = Attention(device)
        self.feed_forward = FeedForward(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first_norm(x)
        attended = self.attention(normed)
        middle = attended + x
        normed_middle = self.second_norm(middle)
        fed = self.feed_forward(normed_middle)
        return fed + middle


class LanguageModel(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device=device))
        self.blocks = nn.ModuleList([Block(device) for _ in range(LAYERS)])
        self.norm = Norm(device)
        self.head = Projection(WIDTH, VOCABULARY, device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of the last token of each sample."""
    most, _ = torch.max(x, dim=-1, keepdim=True)
    log_softmax = x - most - torch.log(torch.sum(torch.exp(x - most), dim=-1, keepdim=True))
    one_hot = torch.zeros_like(log_softmax)
    one_hot.scatter_(-1, target.unsqueeze(-1), 1)
    return -torch.sum(one_hot * log_softmax) / x.shape[0]


class Adam(torch.optim.Optimizer):
    """Adam that computes out of place, tensor by tensor."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"m": torch.zeros_like(p.data), "v": torch.zeros_like(p.data), "t": 0}

    def step(self) -> None:
        for group in self.param_groups:
            (beta_1, beta_2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                t = self.state[p]["t"] + 1
                new_rate = rate * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
                grad = p.grad.data
                m = self.state[p]["m"]
                new_m = beta_1 * m + (1 - beta_1) * grad
                self.state[p]["m"] = new_m
                v = self.state[p]["v"]
                new_v = beta_2 * v + (1 - beta_2) * grad**2
                self.state[p]["v"] = new_v
                self.state[p]["t"] = t
                p.data = p.data - new_rate * (new_m / (torch.sqrt(new_v) + group["eps"]))
                p.data = p.data - rate * group["weight_decay"] * p.data
