"""The models of the cases, made from their configs with random weights, each with a batch of random values.

A function here returns (model, batch, loss function or None) on torch's default device: under `torch.device("meta")`
nothing is computed, on the CPU the values are such that a step can be taken.
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
from planner.calling import LossFn

Built = tuple[nn.Module, Any, LossFn | None]
Build = Callable[[], Built]

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs and labels [batch, length]; the lowest ids are left out, some of them mean padding."""
    return {name: torch.randint(5, vocabulary, (batch, length)) for name in ("input_ids", "labels")}


def _from_example(name: str, kind: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(**json.loads((EXAMPLES / name / "config.json").read_text()))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return getattr(transformers, kind)(config).train()


def roberta_84m(batch: int = 64, length: int = 128) -> Built:
    return _from_example("roberta_84m", "RobertaForMaskedLM"), _tokens(52_000, batch, length), None


def gpt2(batch: int = 8, length: int = 512) -> Built:
    return _from_example("gpt2", "GPT2LMHeadModel"), _tokens(50_257, batch, length), None


def llama_1b(batch: int = 2, length: int = 1024) -> Built:
    return _from_example("llama_1b", "LlamaForCausalLM"), _tokens(128_000, batch, length), None


def llama_300m(batch: int = 4, length: int = 1024) -> Built:
    """336 M parameters: 24 layers, 16 heads of which groups of 4 share keys and values."""
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train(), _tokens(32_000, batch, length), None


def vit_base(batch: int = 32) -> Built:
    model = _from_example("vit_base", "ViTForImageClassification")
    labels = torch.randint(model.config.num_labels, (batch,))
    return model, {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": labels}, None


def t5_small(batch: int = 16, length: int = 128) -> Built:
    config = transformers.T5Config(
        d_model=512, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32_128, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config).train(), _tokens(32_128, batch, length), None


def bert_eager(batch: int = 16, length: int = 256) -> Built:
    """BERT-base that keeps its attention probabilities."""
    config = transformers.BertConfig(attn_implementation="eager")
    return transformers.BertForMaskedLM(config).train(), _tokens(30_522, batch, length), None


def whisper_tiny(batch: int = 8, length: int = 64) -> Built:
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
    labels = torch.randint(5, 50_000, (batch, length))
    return model, {"input_features": torch.randn(batch, 80, 3000), "labels": labels}, None


def unet(batch: int = 16) -> Built:
    return unet_example.build(batch_size=batch)


def convnet(batch: int = 32) -> Built:
    return convnet_example.build(batch_size=batch)


def flat(batch: int = 2) -> Built:
    """A function of 43 M parameters without modules, in stretches of norm, activation, convolution and sum."""
    return flat_example.build(batch_size=batch)


def sequential(batch: int = 4096) -> Built:
    return sequential_example.build(batch_size=batch)


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


def resnet50(batch: int = 32, image: int = 224) -> Built:
    """ResNet-50, 25.6 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 << stage, stride=2 if stage and not block else 1))
            inputs = 256 << stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    batch_of = (torch.randn(batch, 3, image, image), torch.randint(1000, (batch,)))
    return model, batch_of, convnet_example.classification_loss


def mlp_batchnorm(batch: int = 4096, width: int = 2048, depth: int = 8) -> Built:
    widths = [512] + [width] * depth
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(width, 100))
    return model, (torch.randn(batch, 512), torch.randint(100, (batch,))), convnet_example.classification_loss


class Recurrent(nn.Module):
    """A language model around a two-layer LSTM: tokens [batch, length] -> logits [batch, vocabulary, length]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0]).transpose(1, 2)


def _next_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(logits, batch[-1])


def lstm(batch: int = 64, length: int = 64, vocabulary: int = 10_000, width: int = 1024) -> Built:
    tokens = tuple(torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return Recurrent(vocabulary, width), tokens, _next_tokens
