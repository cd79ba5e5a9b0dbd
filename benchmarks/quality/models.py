"""Models whose memory is mostly activations: with blocks to checkpoint, and one without any."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.vision import Residual, resnet
from benchmarks.quality import vision_models

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model that returns its loss when called with the batch's tensors."""

    build: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    is_block: Callable[[nn.Module], bool]
    """True for the modules that users would checkpoint."""
    is_attention_fused: bool = True
    """False if the CPU or the planned card has no fused kernel for the attention of this model. Then the attention runs
    as matrix products and a softmax on both, so that the ops that are planned are the ops that run."""


class Classifier(nn.Module):
    """A network with a cross-entropy loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x).flatten(0, -2), labels.flatten())


class Block(nn.Module):
    """A GPT block: causal attention and a perceptron, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm, a head."""

    def __init__(self, *, depth: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(places))))


class Flat(nn.Module):
    """The same kind of network as one long function over a dict of parameters."""

    def __init__(self, *, depth: int, width: int) -> None:
        super().__init__()
        self.depth = depth
        for number in range(depth):
            for name, shape in {"up": (4 * width, width), "down": (width, 4 * width)}.items():
                self.register_parameter(f"{name}{number}", nn.Parameter(torch.randn(shape) / shape[1] ** 0.5))
            for name in ("scale", "shift"):
                value = torch.ones(width) if name == "scale" else torch.zeros(width)
                self.register_parameter(f"{name}{number}", nn.Parameter(value))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        weights = dict(self.named_parameters())
        for number in range(self.depth):
            scale, shift, up, down = (weights[f"{name}{number}"] for name in ("scale", "shift", "up", "down"))
            y = F.layer_norm(x, scale.shape, scale, shift)
            x = x + F.linear(F.gelu(F.linear(y, up)), down)
        return (x - wanted).square().mean()


def _resnet50() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Classifier(resnet((3, 4, 6, 3), bottleneck=True)), (torch.randn(4, 3, 224, 224), torch.arange(4))


def _gpt24() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    ids = torch.randint(1000, (4, 256))
    return Classifier(GPT(depth=24, width=256, heads=4, vocabulary=1000, length=256)), (ids, ids.roll(-1, 1))


class Loss(nn.Module):
    """A transformers model that computes its loss from its own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def _gpt2() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(50257, (2, 256))
    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return Loss(GPT2LMHeadModel(config)), (ids, ids)


def _roberta() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import RobertaConfig, RobertaForMaskedLM

    ids = torch.randint(3, 50265, (4, 128))
    config = RobertaConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False)
    return Loss(RobertaForMaskedLM(config)), (ids, ids)


def _llama80() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A narrow Llama with 80 layers: deep enough to test the search, and small enough for a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.randint(1000, (2, 128))
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=80, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return Loss(LlamaForCausalLM(config)), (ids, ids)


def _unet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    spec = importlib.util.spec_from_file_location("unet", EXAMPLES / "unet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, batch, loss_fn = module.build(batch_size=4)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return loss_fn(self.model(*tensors[:-1]), tensors)

    return WithLoss(), tuple(batch)


def _flat() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Flat(depth=24, width=256), (torch.randn(1024, 256), torch.randn(1024, 256))


class MambaBlock(nn.Module):
    """A selective state space model with a shortcut, computed token by token (Gu and Dao, arXiv 2312.00752)."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.mix = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.parameters_of = nn.Linear(inner, 1 + 2 * states)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().expand(inner, -1).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, gate = self.into(self.norm(x)).chunk(2, dim=-1)
        inner = F.silu(self.mix(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, write, read = self.parameters_of(inner).split((1, self.decay.shape[1], self.decay.shape[1]), dim=-1)
        step = F.softplus(step)
        kept = torch.exp(-step[..., None] * self.decay.exp())
        written = (step * inner)[..., None] * write[:, :, None]
        state, outputs = torch.zeros_like(written[:, 0]), []
        for number in range(x.shape[1]):
            state = kept[:, number] * state + written[:, number]
            outputs.append((state * read[:, number, None]).sum(-1))
        return x + self.out(torch.stack(outputs, dim=1) * F.silu(gate))


class Mamba(nn.Module):
    """Token embeddings, blocks, a norm, a head."""

    def __init__(self, *, depth: int, width: int, states: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(MambaBlock(width, states) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def _mamba() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    ids = torch.randint(500, (8, 16))
    return Classifier(Mamba(depth=4, width=64, states=8, vocabulary=500)), (ids, ids.roll(-1, 1))


def _mixtral() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    ids = torch.randint(1000, (2, 128))
    config = MixtralConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return Loss(MixtralForCausalLM(config)), (ids, ids)


def _convnext() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Classifier(vision_models.convnext((3, 3, 9, 3), (48, 96, 192, 384))), (
        torch.randn(2, 3, 160, 160),
        torch.arange(2),
    )


def _efficientnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    stages = ((1, 16, 1), (2, 24, 2), (2, 40, 2), (3, 80, 2), (3, 112, 1), (4, 192, 2))
    return Classifier(vision_models.efficientnet(stages)), (torch.randn(2, 3, 160, 160), torch.arange(2))


def _dit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    latent, noise = torch.randn(2, 4, 32, 32), torch.randn(2, 4, 32, 32)
    return vision_models.DiT(depth=12, width=192, heads=3), (latent, torch.rand(2), noise)


def _detector() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    positions = sum((128 // stride) ** 2 for stride in (8, 16, 32))
    targets = torch.rand(2, 20, positions), torch.rand(2, 4, positions)
    return vision_models.Detector(), (torch.randn(2, 3, 128, 128), *targets)


def _is(name: str) -> Callable[[nn.Module], bool]:
    return lambda module: type(module).__name__ == name


CASES = {
    "ResNet-50, 4 x 224": Case(build=_resnet50, is_block=lambda module: isinstance(module, Residual)),
    "GPT, 24 layers of 256, 4 x 256": Case(build=_gpt24, is_block=lambda module: isinstance(module, Block)),
    "GPT-2 small, 2 x 256": Case(build=_gpt2, is_block=_is("GPT2Block")),
    "RoBERTa, 12 layers, 4 x 128": Case(build=_roberta, is_block=_is("RobertaLayer")),
    "Llama, 80 layers of 128, 2 x 128": Case(
        build=_llama80, is_block=_is("LlamaDecoderLayer"), is_attention_fused=False
    ),
    "U-Net, 4 images": Case(build=_unet, is_block=_is("ResidualBlock"), is_attention_fused=False),
    "ConvNeXt, 2 x 160": Case(build=_convnext, is_block=_is("ConvNextBlock")),
    "EfficientNet, 2 x 160": Case(build=_efficientnet, is_block=_is("InvertedResidual")),
    "DiT, 12 layers of 192, 2 x 256": Case(build=_dit, is_block=_is("DiTBlock")),
    "detector, 2 x 128": Case(build=_detector, is_block=lambda module: isinstance(module, Residual)),
    "Mamba, 4 layers of 64, 8 x 16": Case(build=_mamba, is_block=_is("MambaBlock")),
    "Mixtral, 8 layers of 128, 2 x 128": Case(
        build=_mixtral, is_block=_is("MixtralDecoderLayer"), is_attention_fused=False
    ),
    "flat function, 1024 x 256": Case(build=_flat, is_block=lambda module: False),
}
