"""Models of SpeechBrain with small settings."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Case, mean_square, single

BATCH, FRAMES, MELS = 2, 40, 16


def _features() -> tuple[torch.Tensor, ...]:
    return (torch.randn(BATCH, FRAMES, MELS),)


_LOBES = "speechbrain.lobes.models"
TABLE: tuple[tuple[str, str, dict[str, Any], Any], ...] = (
    (
        f"{_LOBES}.ECAPA_TDNN",
        "ECAPA_TDNN",
        {
            "input_size": MELS,
            "channels": [16] * 4 + [48],
            "lin_neurons": 8,
            "attention_channels": 8,
            "se_channels": 8,
            "res2net_scale": 4,
        },
        _features,
    ),
    (
        f"{_LOBES}.Xvector",
        "Xvector",
        {"in_channels": MELS, "tdnn_channels": [16] * 4 + [32], "lin_neurons": 8},
        _features,
    ),
    (
        f"{_LOBES}.CRDNN",
        "CRDNN",
        {
            "input_shape": [None, None, MELS],
            "cnn_channels": [8, 8],
            "rnn_neurons": 16,
            "rnn_layers": 1,
            "dnn_neurons": 16,
            "dnn_blocks": 1,
        },
        _features,
    ),
    (f"{_LOBES}.VanillaNN", "VanillaNN", {"input_shape": [None, None, MELS], "dnn_neurons": 16}, _features),
    (
        f"{_LOBES}.ContextNet",
        "ContextNet",
        {
            "input_shape": [None, None, MELS],
            "out_channels": [16] * 3,
            "conv_channels": None,
            "kernel_size": 3,
            "strides": [1, 2, 1],
            "num_blocks": 3,
            "num_layers": 1,
            "alpha": 1,
        },
        _features,
    ),
    (
        f"{_LOBES}.ResNet",
        "ResNet",
        {
            "input_size": MELS,
            "channels": [8, 8, 16, 16],
            "strides": [1, 2, 2, 2],
            "block_sizes": [1, 1, 1, 1],
            "lin_neurons": 8,
        },
        _features,
    ),
    (
        f"{_LOBES}.convolution",
        "ConvolutionFrontEnd",
        {
            "input_shape": [None, None, MELS],
            "num_blocks": 2,
            "num_layers_per_block": 1,
            "out_channels": [8, 8],
            "kernel_sizes": [3, 3],
            "strides": [2, 2],
            "residuals": [False, False],
        },
        _features,
    ),
    (
        f"{_LOBES}.conv_tasnet",
        "MaskNet",
        {"N": 16, "B": 8, "H": 16, "P": 3, "X": 2, "R": 1, "C": 2, "norm_type": "gLN", "causal": False},
        lambda: (torch.randn(BATCH, 16, FRAMES),),
    ),
    (
        f"{_LOBES}.RNNLM",
        "RNNLM",
        {
            "output_neurons": 30,
            "embedding_dim": 8,
            "rnn_layers": 1,
            "rnn_neurons": 16,
            "dnn_blocks": 1,
            "dnn_neurons": 16,
        },
        lambda: (torch.randint(30, (BATCH, 12)),),
    ),
    (
        f"{_LOBES}.HifiGAN",
        "HifiganGenerator",
        {
            "in_channels": MELS,
            "out_channels": 1,
            "resblock_type": "1",
            "resblock_dilation_sizes": [[1, 3, 5]],
            "resblock_kernel_sizes": [3],
            "upsample_kernel_sizes": [4, 4],
            "upsample_initial_channel": 16,
            "upsample_factors": [2, 2],
        },
        lambda: (torch.randn(BATCH, MELS, FRAMES),),
    ),
    (f"{_LOBES}.Cnn14", "Cnn14", {"mel_bins": 64, "emb_dim": 32}, lambda: (torch.randn(BATCH, 1, 64, 64),)),
    (
        f"{_LOBES}.transformer.TransformerASR",
        "TransformerASR",
        {
            "tgt_vocab": 20,
            "input_size": MELS,
            "d_model": 32,
            "nhead": 4,
            "num_encoder_layers": 2,
            "num_decoder_layers": 1,
            "d_ffn": 64,
        },
        lambda: (torch.randn(BATCH, FRAMES, MELS), torch.randint(1, 20, (BATCH, 6))),
    ),
    (
        f"{_LOBES}.transformer.TransformerASR",
        "TransformerASR with conformer",
        {
            "tgt_vocab": 20,
            "input_size": MELS,
            "d_model": 32,
            "nhead": 4,
            "num_encoder_layers": 2,
            "num_decoder_layers": 1,
            "d_ffn": 64,
            "encoder_module": "conformer",
            "normalize_before": True,
            "attention_type": "RelPosMHAXL",
            "kernel_size": 5,
        },
        lambda: (torch.randn(BATCH, FRAMES, MELS), torch.randint(1, 20, (BATCH, 6))),
    ),
    (
        f"{_LOBES}.transformer.TransformerLM",
        "TransformerLM",
        {"vocab": 30, "d_model": 32, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 0, "d_ffn": 64},
        lambda: (torch.randint(1, 30, (BATCH, 12)),),
    ),
)
"""(module, class, settings, function that returns the arguments of its forward)"""


def cases() -> Iterator[Case]:
    """Yields one case for each row of the table."""
    for module, name, settings, batch in TABLE:
        build = lambda m=module, n=name, s=settings, b=batch: _built(m, n.split(" ")[0], s, b)
        yield Case(library="speechbrain", name=name, candidates=single(build))


def _built(module: str, name: str, settings: dict[str, Any], batch: Any) -> tuple[torch.nn.Module, Any, Any]:
    model = getattr(importlib.import_module(module), name)(**settings)
    return model, (*batch(), torch.zeros(BATCH)), mean_square
