"""The models of the cases, built from their configs with random weights, each with a batch of random values.

Each function returns (model, batch, loss function or None) on torch's default device: `torch.device("meta")` computes
nothing, and on the CPU the values are suitable for a training step.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from examples import convnet as convnet_example
from examples import flat as flat_example
from examples import sequential as sequential_example
from examples import unet as unet_example
from planner.workload.call_convention import LossFn

Built = tuple[nn.Module, Any, LossFn | None]
Build = Callable[[], Built]

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def tokens(vocabulary: int, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Returns inputs and labels [batch, tokens], without the lowest ids, some of which mean padding."""
    return {name: torch.randint(5, vocabulary, (batch_size, seq_len)) for name in ("input_ids", "labels")}


def from_example(name: str, kind: str) -> nn.Module:
    """Returns a transformers model of class `kind`, with the config of an example folder."""
    config = transformers.AutoConfig.for_model(**json.loads((EXAMPLES / name / "config.json").read_text()))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return getattr(transformers, kind)(config).train()


def roberta_84m(batch_size: int = 64, seq_len: int = 128) -> Built:
    return from_example("roberta_84m", "RobertaForMaskedLM"), tokens(52_000, batch_size, seq_len), None


def gpt2(batch_size: int = 8, seq_len: int = 512) -> Built:
    return from_example("gpt2", "GPT2LMHeadModel"), tokens(50_257, batch_size, seq_len), None


def llama_1b(batch_size: int = 2, seq_len: int = 1024) -> Built:
    return from_example("llama_1b", "LlamaForCausalLM"), tokens(128_000, batch_size, seq_len), None


def llama_300m(batch_size: int = 4, seq_len: int = 1024) -> Built:
    """336 M parameters: 24 layers, 16 heads in groups of 4 that share keys and values."""
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train(), tokens(32_000, batch_size, seq_len), None


def vit_base(batch_size: int = 32) -> Built:
    model = from_example("vit_base", "ViTForImageClassification")
    labels = torch.randint(model.config.num_labels, (batch_size,))
    return model, {"pixel_values": torch.randn(batch_size, 3, 224, 224), "labels": labels}, None


def t5_small(batch_size: int = 16, seq_len: int = 128) -> Built:
    config = transformers.T5Config(
        d_model=512, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32_128, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config).train(), tokens(32_128, batch_size, seq_len), None


def bert_eager(batch_size: int = 16, seq_len: int = 256) -> Built:
    """BERT-base with eager attention, which saves the attention probabilities."""
    config = transformers.BertConfig(attn_implementation="eager")
    return transformers.BertForMaskedLM(config).train(), tokens(30_522, batch_size, seq_len), None


def whisper_tiny(batch_size: int = 8, seq_len: int = 64) -> Built:
    config = transformers.WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        use_cache=False,
    )
    model = transformers.WhisperForConditionalGeneration(config).train()
    labels = torch.randint(5, 50_000, (batch_size, seq_len))
    return model, {"input_features": torch.randn(batch_size, 80, 3000), "labels": labels}, None


def unet(batch_size: int = 16) -> Built:
    return unet_example.build(batch_size=batch_size)


def convnet(batch_size: int = 32) -> Built:
    return convnet_example.build(batch_size=batch_size)


def flat(batch_size: int = 2) -> Built:
    """A function of 43 M parameters without modules, in repeated segments of norm, activation, convolution and sum."""
    return flat_example.build(batch_size=batch_size)


def sequential(batch_size: int = 4096) -> Built:
    return sequential_example.build(batch_size=batch_size)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.across = nn.Sequential(
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        self.widen = nn.Sequential(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.last = nn.ReLU(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.widen(self.across(self.narrow(x))) + self.shortcut(x))


def resnet50(batch_size: int = 32, image: int = 224) -> Built:
    """ResNet-50, 25.6 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 << stage, stride=2 if stage and not block else 1))
            inputs = 256 << stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    batch = (torch.randn(batch_size, 3, image, image), torch.randint(1000, (batch_size,)))
    return model, batch, convnet_example.classification_loss


def mlp_batchnorm(batch_size: int = 4096, width: int = 2048, depth: int = 8) -> Built:
    widths = [512] + [width] * depth
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(width, 100))
    return model, (torch.randn(batch_size, 512), torch.randint(100, (batch_size,))), convnet_example.classification_loss


class Recurrent(nn.Module):
    """A language model around a two-layer LSTM: tokens [batch, tokens] -> logits [batch, vocabulary, tokens]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0]).transpose(1, 2)


def _next_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(logits, batch[-1])


def lstm(batch_size: int = 64, seq_len: int = 64, vocabulary: int = 10_000, width: int = 1024) -> Built:
    batch = tuple(torch.randint(vocabulary, (batch_size, seq_len)) for _ in range(2))
    return Recurrent(vocabulary, width), batch, _next_tokens
