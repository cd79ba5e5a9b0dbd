"""Models of torchaudio with small settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Case, mean_square, single

BATCH, FRAMES, MELS = 2, 40, 16


def cases() -> Iterator[Case]:
    """Yields one case for each architecture of torchaudio."""
    from torchaudio import models

    lengths = lambda: torch.full((BATCH,), FRAMES)
    frames = lambda: torch.randn(BATCH, FRAMES, MELS)
    speech = {
        "extractor_mode": "group_norm",
        "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
        "extractor_conv_bias": False,
        "encoder_embed_dim": 32,
        "encoder_projection_dropout": 0.0,
        "encoder_pos_conv_kernel": 8,
        "encoder_pos_conv_groups": 4,
        "encoder_num_layers": 2,
        "encoder_num_heads": 4,
        "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 64,
        "encoder_ff_interm_dropout": 0.0,
        "encoder_dropout": 0.1,
        "encoder_layer_norm_first": False,
        "encoder_layer_drop": 0.0,
        "aux_num_out": 8,
    }
    wavlm = {**speech, "encoder_num_buckets": 16, "encoder_max_distance": 32}
    table: dict[str, tuple[Any, Any]] = {
        "Conformer": (lambda: models.Conformer(MELS, 4, 32, 2, 3), lambda: (frames(), lengths())),
        "Emformer": (
            lambda: models.Emformer(MELS, 4, 32, 2, segment_length=4, right_context_length=1),
            lambda: (frames(), torch.full((BATCH,), FRAMES - 1)),
        ),
        "ConvTasNet": (
            lambda: models.ConvTasNet(2, 16, 32, 3, 16, 32, 2, 2),
            lambda: (torch.randn(BATCH, 1, 800),),
        ),
        "DeepSpeech": (lambda: models.DeepSpeech(MELS, 32, 8), lambda: (torch.randn(BATCH, 1, FRAMES, MELS),)),
        "Wav2Letter": (lambda: models.Wav2Letter(8, "mfcc", MELS), lambda: (torch.randn(BATCH, MELS, 400),)),
        "Wav2Vec2": (lambda: models.wav2vec2_model(**speech), lambda: (torch.randn(BATCH, 1600),)),
        "WavLM": (lambda: models.wavlm_model(**wavlm), lambda: (torch.randn(BATCH, 1600),)),
        "Tacotron2": (
            lambda: models.Tacotron2(
                n_mels=MELS,
                n_symbol=20,
                symbol_embedding_dim=16,
                encoder_embedding_dim=16,
                decoder_rnn_dim=32,
                attention_rnn_dim=32,
                prenet_dim=16,
                postnet_embedding_dim=16,
                attention_hidden_dim=16,
            ),
            lambda: (
                torch.randint(20, (BATCH, 8)),
                torch.full((BATCH,), 8),
                torch.randn(BATCH, MELS, 6),
                torch.full((BATCH,), 6),
            ),
        ),
        "WaveRNN": (
            lambda: models.WaveRNN([2, 2], 16, 4, 1, 16, 16, 5, 16, 8, 16),
            lambda: (torch.randn(BATCH, 1, 4 * (12 - 4)), torch.randn(BATCH, 1, 16, 12)),
        ),
        "HDemucs": (
            lambda: models.HDemucs(["a", "b"], 2, channels=4, nfft=256, depth=3),
            lambda: (torch.randn(BATCH, 2, 8192),),
        ),
        "RNNT": (
            lambda: models.rnnt.emformer_rnnt_model(
                input_dim=MELS,
                encoding_dim=16,
                num_symbols=10,
                segment_length=8,
                right_context_length=2,
                time_reduction_input_dim=8,
                time_reduction_stride=2,
                transformer_num_heads=2,
                transformer_ffn_dim=32,
                transformer_num_layers=2,
                transformer_dropout=0.1,
                transformer_activation="gelu",
                transformer_left_context_length=8,
                transformer_max_memory_size=0,
                transformer_weight_init_scale_strategy="depthwise",
                transformer_tanh_on_mem=True,
                symbol_embedding_dim=8,
                num_lstm_layers=1,
                lstm_layer_norm=True,
                lstm_layer_norm_epsilon=1e-5,
                lstm_dropout=0.1,
            ),
            lambda: (frames(), lengths(), torch.randint(10, (BATCH, 6)), torch.full((BATCH,), 6)),
        ),
        "SquimObjective": (
            lambda: models.squim_objective_model(
                feat_dim=16, win_len=16, d_model=16, nhead=2, hidden_dim=16, num_blocks=1, rnn_type="LSTM", chunk_size=8
            ),
            lambda: (torch.randn(BATCH, 800),),
        ),
    }
    for name, (model, batch) in table.items():
        build = lambda model=model, batch=batch: (model(), (*batch(), torch.zeros(BATCH)), mean_square)
        yield Case(library="torchaudio", name=name, candidates=single(build))
