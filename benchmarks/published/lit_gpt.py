"""LoRA with the allocations of Lit-GPT in October 2023 (github.com/Lightning-AI/litgpt, commit 8641822).

`finetune/lora.py` with `--precision bf16-true`: rank 8 on queries and values, dropout 0.05, everything else frozen, the
head and the loss in chunks of 128 tokens. Lightning Fabric turns the bf16 logits into fp32; the rotary tables are fp32,
so queries and keys are turned in fp32. RMSNorm is in bf16 at that commit and in fp32 from 6178c7cc (24 October) on.

With `--quantize bnb.nf4` or `bnb.nf4-dq` all linear layers are 4-bit layers of bitsandbytes 0.41, which keep the input
of each product until the backward has ended (`PackedProduct`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.rehearsing import making

RANK, ALPHA, DROPOUT, CHUNK = 8, 16, 0.05, 128
BLOCK, OUTER_BLOCK = 64, 256
"""Number of weights with one scale in 4-bit layers, and of scales with one scale if they are quantized, too."""
SAMPLES_A_STEP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """`lit_gpt/config.py`; `rotary` is the part of each head that is turned, `wide_norm` an RMSNorm in fp32."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    rotary: float
    llama: bool = False
    wide_norm: bool = False
    shared_norm: bool = False
    head_bias: bool = False
    gelu: str = "none"
    quantized: str = ""
    """Empty, 'nf4', or 'nf4-dq' for quantized scales."""


PHI = Sizes(
    width=2048,
    layers=24,
    heads=32,
    hidden=8192,
    vocabulary=51_200,
    rotary=0.5,
    shared_norm=True,
    head_bias=True,
    gelu="tanh",
)
STABLELM_3B = Sizes(width=4096, layers=16, heads=32, hidden=16_384, vocabulary=50_688, rotary=0.25)
LLAMA_7B = Sizes(width=4096, layers=32, heads=32, hidden=11_008, vocabulary=32_000, rotary=1.0, llama=True)
LLAMA_13B = Sizes(width=5120, layers=40, heads=40, hidden=13_824, vocabulary=32_000, rotary=1.0, llama=True)


class RootMeanSquareNorm(nn.Module):
    """RMSNorm in the dtype of its input, or computed in fp32 (`wide`)."""

    def __init__(self, width: int, *, wide: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float() if self.wide else x
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        return (self.weight * (x * torch.rsqrt(mean + 1e-5))).to(dtype)


class PackedProduct(torch.autograd.Function):
    """The product with a 4-bit weight in bitsandbytes 0.41 (`MatMul4Bit`): it holds its input outside of autograd."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.layer, ctx.kept = layer, x
        return F.linear(x, layer.unpacked(), layer.bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return torch.matmul(gradient, ctx.layer.unpacked()), None


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in 4 bits with a scale for each block."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, quantized_scales: bool) -> None:
        super().__init__()
        self.shape, blocks = (outputs, inputs), outputs * inputs // BLOCK
        self.out_features = outputs
        self.register_buffer("packed", torch.zeros(outputs * inputs // 2, 1, dtype=torch.uint8))
        self.register_buffer("code", torch.zeros(16, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.quantized_scales = quantized_scales
        self.register_buffer("scales", torch.zeros(blocks, dtype=torch.uint8 if quantized_scales else torch.float32))
        if quantized_scales:
            self.register_buffer("outer_scales", torch.zeros(-(-blocks // OUTER_BLOCK), dtype=torch.float32))
            self.register_buffer("outer_code", torch.zeros(256, dtype=torch.float32))

    def unpacked(self) -> torch.Tensor:
        """Returns the weight in bf16. It is unpacked in fp16, as `Params4bit.cuda` packed it, and then converted."""
        device = self.packed.device
        scales = torch.empty_like(self.scales, dtype=torch.float32) if self.quantized_scales else self.scales
        weight = torch.empty(self.shape, dtype=torch.float16, device=device)
        del scales
        return weight.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return PackedProduct.apply(x, self) if x.requires_grad else F.linear(x, self.unpacked(), self.bias)


def linear(sizes: Sizes, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
    if not sizes.quantized:
        return nn.Linear(inputs, outputs, bias=bias)
    return PackedLinear(inputs, outputs, bias=bias, quantized_scales=sizes.quantized == "nf4-dq")


class QueriesKeysValues(nn.Module):
    """One frozen projection; low-rank updates of queries and values, zeros where the keys are."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.linear = linear(sizes, width, 3 * width, bias=not sizes.llama)
        self.down = nn.Parameter(torch.zeros(2 * RANK, width))
        self.up = nn.Parameter(torch.zeros(2 * width, RANK))
        self.updated = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = self.linear(x)
        narrow = F.linear(F.dropout(x, DROPOUT), self.down).transpose(1, 2)
        update = F.conv1d(narrow, self.up.unsqueeze(-1), groups=2).transpose(1, 2)
        return frozen + self._among_zeros(update) * (ALPHA / RANK)

    def _among_zeros(self, update: torch.Tensor) -> torch.Tensor:
        by_token = update.transpose(0, 1)
        tokens, samples, updated = by_token.shape
        outputs = self.linear.out_features
        zeros = by_token.new_zeros(tokens, samples, outputs).view(-1, outputs)
        places = torch.tensor(self.updated, device=update.device)
        filled = zeros.index_copy(1, places, by_token.reshape(-1, updated))
        return filled.view(tokens, samples, outputs).transpose(0, 1)


def rotary_tables(tokens: int, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, elements] in fp32."""
    frequencies = 1.0 / (10_000 ** (torch.arange(0, elements, 2) / elements))
    angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2)
    return torch.cos(angles), torch.sin(angles)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `x` with rotary positions on the first elements of each head, computed in fp32."""
    rotary = cos.shape[-1]
    part = x[..., :rotary]
    halves = part[..., : rotary // 2], part[..., rotary // 2 :]
    rotated = torch.cat((-halves[1], halves[0]), dim=-1)
    result = ((part * cos) + (rotated * sin)).type_as(x)
    return torch.cat((result, x[..., rotary:]), dim=-1)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = QueriesKeysValues(sizes)
        self.proj = linear(sizes, sizes.width, sizes.width, bias=not sizes.llama)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        qkv = self.qkv(x).view(samples, tokens, self.heads, 3, width // self.heads).permute(0, 2, 3, 1, 4)
        query, key, value = (
            part.reshape(samples, self.heads, tokens, width // self.heads) for part in qkv.split(1, dim=2)
        )
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(attended.transpose(1, 2).reshape(samples, tokens, width))


class NeoxFeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = linear(sizes, sizes.width, sizes.hidden, bias=True)
        self.down = linear(sizes, sizes.hidden, sizes.width, bias=True)
        self.gelu = sizes.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.gelu))


class LlamaFeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (linear(sizes, sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = linear(sizes, sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        x = F.silu(gate) * up
        return self.down(x)


def norm_of(sizes: Sizes) -> nn.Module:
    return RootMeanSquareNorm(sizes.width, wide=sizes.wide_norm) if sizes.llama else nn.LayerNorm(sizes.width)


class Block(nn.Module):
    """A GPT-NeoX block (attention and feed-forward in parallel) or a Llama block (one after the other)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.llama = sizes.llama
        self.norm1, self.attention = norm_of(sizes), Attention(sizes)
        self.norm2 = None if sizes.shared_norm else norm_of(sizes)
        self.mlp = (LlamaFeedForward if sizes.llama else NeoxFeedForward)(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed, cos, sin)
        if self.llama:
            x = x + attended
            return x + self.mlp(self.norm2(x))
        return x + attended + self.mlp(normed if self.norm2 is None else self.norm2(x))


class LanguageModel(nn.Module):
    """Tokens [samples, tokens] -> bf16 logits, a list of [samples, up to 128, vocabulary]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = linear(sizes, sizes.width, sizes.vocabulary, bias=sizes.head_bias)
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = norm_of(sizes)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith(("qkv.down", "qkv.up")))

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return [self.head(chunk) for chunk in x.split(CHUNK, dim=1)]


def in_float(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    """Convert the logits to fp32 as Fabric does: the bf16 ones stay alive until all are converted."""
    return [chunk.float() for chunk in logits]


def next_token_loss(logits: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    flat = [chunk.reshape(-1, chunk.shape[-1]) for chunk in logits]
    labels = [chunk.reshape(-1) for chunk in targets.split(logits[0].shape[1], dim=1)]
    losses = [F.cross_entropy(*pair, ignore_index=-1, reduction="none") for pair in zip(flat, labels, strict=True)]
    return torch.cat(losses).mean()


def first_iteration(device: torch.device, sizes: Sizes, samples: int, tokens: int) -> None:
    """Run the first forward and backward, on the longest sample. The optimizer steps once in 128 samples."""
    with device, making(torch.bfloat16):
        model = LanguageModel(sizes)
    with device:
        cos, sin = rotary_tables(tokens, int(sizes.rotary * (sizes.width // sizes.heads)))
    ids, targets = (torch.zeros(samples, tokens, dtype=torch.int64).to(device) for _ in range(2))
    logits = in_float(model(ids, cos, sin))
    logits[-1] = logits[-1][:, :-1]
    loss = next_token_loss(logits, targets[:, 1:])
    (loss / (SAMPLES_A_STEP // samples)).backward()
