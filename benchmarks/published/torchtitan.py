"""Compares torchtitan's published memory of Llama 3.1 8B on 8 and on 128 cards with a rehearsal of one rank.

    python -m benchmarks.published.torchtitan

Source: github.com/pytorch/torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md`, tables 1 and 3, the rows without
torch.compile. It reports `reserved_bytes.all.peak` in GiB, for commit 9dec370 and a build of torch 2.6 of 23 December
2024, on H100 cards with 96 GB. The model, its activation checkpointing (every second matrix product is recomputed), its
sharding (bf16 compute, fp32 reduction, the last block is not resharded) and its optimizer are written here after that
commit.

Attention runs in the flash kernel, which that build of PyTorch prefers to cuDNN's; torch 2.13 prefers cuDNN's on an
H100. Not known: other kernels of that build (torch 2.13 is rehearsed). NCCL's memory is not part of the published
figure, and nothing is fitted.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner import profiles
from planner.assemble import versions
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream, streams_of_blocks
from planner.estimate.footprint import replayed
from planner.recording.rehearsal import rehearse_program
from planner.virtual_gpu.backend import Target

PUBLISHED = {8: 82.4, 128: 67.0}
"""Number of cards -> reserved memory in GiB."""
WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, VOCABULARY, SAMPLES, TOKENS = 4096, 32, 32, 8, 14336, 128_256, 2, 8192
HEAD, STEPS, CARD, GIB = WIDTH // HEADS, 2, "h100", 1 << 30


def rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Returns queries or keys [samples, tokens, heads, size] after multiplying pairs by complex numbers in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * rotations.view(1, TOKENS, 1, HEAD // 2)).flatten(3)
    return turned.type_as(x)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Returns keys or values with one copy for each query head of their group."""
    shape = (SAMPLES, TOKENS, KEY_HEADS, HEADS // KEY_HEADS, HEAD)
    return x.unsqueeze(3).expand(shape).reshape(SAMPLES, TOKENS, HEADS, HEAD)


class RootMeanSquareNorm(nn.Module):
    """RMSNorm in fp32, scaled in the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.output = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.view(SAMPLES, TOKENS, -1, HEAD) for part in (query, key, value))
        query, key = rotated(query, rotations), rotated(key, rotations)
        key, value = repeated(key), repeated(value)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).contiguous().view(SAMPLES, TOKENS, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.norm = RootMeanSquareNorm(), RootMeanSquareNorm()

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("rotations", torch.empty(TOKENS, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = RootMeanSquareNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))


_SAVED = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
)


def saving_contexts() -> tuple[Any, Any]:
    """Returns the contexts of a forward whose attention and every second matrix product, from the first, are saved."""
    counts: collections.Counter[bool] = collections.Counter()

    def policy(context: Any, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        counts[context.is_recompute] += is_product
        is_saved = op in _SAVED and not (is_product and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sharded(cards: int, device: torch.device) -> nn.Module:
    """Returns the model with the shards of one rank on the device, after an initialization on the meta device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=saving_contexts
        )
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (cards,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=layer is not model.layers[-1], **options)
    fully_shard(model, reshard_after_forward=True, **options)
    return model.to_empty(device=device)


def train(device: torch.device, *, cards: int) -> None:
    """Takes two steps of one of several ranks."""
    model = sharded(cards, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(STEPS):
            tokens, labels = (torch.zeros(SAMPLES, TOKENS, dtype=torch.long, device=device) for _ in range(2))
            optimizer.zero_grad()
            predicted = model(tokens)
            loss = F.cross_entropy(predicted.flatten(0, 1).float(), labels.flatten(0, 1))
            del predicted
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()


def reserved_gib(cards: int) -> tuple[float, float]:
    """Returns the predicted peaks of reserved and of allocated memory of one rank."""
    card = profiles.load(CARD)
    target = Target(compute_capability=card.compute_capability, sm_count=card.sm_count, cards=cards)
    graph = with_workspaces(rehearse_program(functools.partial(train, cards=cards), target), card, torch.__version__)
    ids, sizes, _ = allocation_stream(graph)
    outcome = replayed((ids, sizes), card, None, streams=streams_of_blocks(graph))
    return outcome.peak_reserved_bytes / GIB, outcome.peak_allocated_bytes / GIB


def main() -> None:
    console = Console(width=120)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    table = Table("cards", "published, GiB reserved", "predicted", "error", "predicted, GiB allocated")
    for cards, published in PUBLISHED.items():
        reserved, allocated = reserved_gib(cards)
        error = f"{reserved / published - 1:+.1%}"
        table.add_row(str(cards), f"{published:.1f}", f"{reserved:.2f}", error, f"{allocated:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
