"""Denoisers and autoencoders of diffusers with small settings, trained to predict random targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Case, mean_square, single

BATCH, PIXELS, TOKENS, WIDTH = 2, 8, 6, 32


def _image(channels: int = 4) -> torch.Tensor:
    return torch.randn(BATCH, channels, PIXELS, PIXELS)


def _text(width: int = WIDTH, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(BATCH, tokens, width)


def _times() -> torch.Tensor:
    return torch.randint(1000, (BATCH,))


_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_COARSE = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": PIXELS,
}
_CODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    **_BLOCKS,
    "latent_channels": 4,
}
TABLE: tuple[tuple[str, dict[str, Any], Any], ...] = (
    (
        "UNet2DModel",
        {
            **_BLOCKS,
            "in_channels": 3,
            "out_channels": 3,
            "sample_size": PIXELS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": _image(3), "timestep": _times()},
    ),
    (
        "UNet2DConditionModel",
        {**_BLOCKS, **_COARSE},
        lambda: {"sample": _image(), "timestep": _times(), "encoder_hidden_states": _text()},
    ),
    ("AutoencoderKL", _CODER, lambda: {"sample": _image(3), "sample_posterior": True}),
    (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        lambda: {"sample": _image(3)},
    ),
    (
        "VQModel",
        {**_CODER, "num_vq_embeddings": 16, "in_channels": 3, "out_channels": 3, "vq_embed_dim": 4},
        lambda: {"sample": _image(3)},
    ),
    (
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 2,
            "sample_size": PIXELS,
            "patch_size": 2,
            "num_embeds_ada_norm": 1000,
            "out_channels": 4,
        },
        lambda: {"hidden_states": _image(), "timestep": _times(), "class_labels": torch.randint(1000, (BATCH,))},
    ),
    (
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "sample_size": PIXELS,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "use_additional_conditions": False,
        },
        lambda: {"hidden_states": _image(), "timestep": _times(), "encoder_hidden_states": _text()},
    ),
    (
        "SD3Transformer2DModel",
        {
            "sample_size": PIXELS,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
        lambda: {
            "hidden_states": _image(),
            "timestep": _times(),
            "encoder_hidden_states": _text(),
            "pooled_projections": torch.randn(BATCH, 16),
        },
    ),
    (
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 6, 6),
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 16, 16),
            "timestep": torch.rand(BATCH),
            "encoder_hidden_states": _text(),
            "pooled_projections": torch.randn(BATCH, 16),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(TOKENS, 3),
        },
    ),
    (
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "sample_size": PIXELS,
        },
        lambda: {"hidden_states": _image(), "timestep": _times(), "encoder_hidden_states": _text()},
    ),
    (
        "AuraFlowTransformer2DModel",
        {
            "sample_size": PIXELS,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        lambda: {"hidden_states": _image(), "timestep": torch.rand(BATCH), "encoder_hidden_states": _text()},
    ),
    (
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": WIDTH,
            "num_layers": 2,
            "sample_width": PIXELS,
            "sample_height": PIXELS,
            "sample_frames": 9,
            "max_text_seq_length": TOKENS,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 3, 4, PIXELS, PIXELS),
            "timestep": _times(),
            "encoder_hidden_states": _text(),
        },
    ),
    (
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": WIDTH,
            "num_layers": 2,
            "caption_channels": WIDTH,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 2 * 4 * 4, 4),
            "timestep": _times(),
            "encoder_hidden_states": _text(),
            "encoder_attention_mask": torch.ones(BATCH, TOKENS),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
    (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": WIDTH,
        },
        lambda: {
            "hidden_states": _image(),
            "timestep": torch.rand(BATCH),
            "encoder_hidden_states": _text(),
            "encoder_attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool),
        },
    ),
    (
        "HunyuanDiT2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "cross_attention_dim": WIDTH,
            "cross_attention_dim_t5": WIDTH,
            "pooled_projection_dim": 16,
            "text_len": TOKENS,
            "text_len_t5": TOKENS,
            "use_style_cond_and_image_meta_size": False,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 16, 16),
            "timestep": _times().float(),
            "encoder_hidden_states": _text(),
            "text_embedding_mask": torch.ones(BATCH, TOKENS),
            "encoder_hidden_states_t5": _text(),
            "text_embedding_mask_t5": torch.ones(BATCH, TOKENS),
            "image_rotary_emb": [torch.randn(64, 16), torch.randn(64, 16)],
        },
    ),
    (
        "PriorTransformer",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "embedding_dim": 16,
            "num_embeddings": TOKENS,
            "additional_embeddings": 4,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 16),
            "timestep": _times(),
            "proj_embedding": torch.randn(BATCH, 16),
            "encoder_hidden_states": _text(16),
        },
    ),
    (
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "audio_channels": 2,
        },
        lambda: {"sample": torch.randn(BATCH, 2, 256)},
    ),
    (
        "UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 1,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": (2, 4),
            "projection_class_embeddings_input_dim": 48,
            "addition_time_embed_dim": 16,
        },
        lambda: {
            "sample": torch.randn(BATCH, 2, 4, PIXELS, PIXELS),
            "timestep": _times(),
            "encoder_hidden_states": _text(tokens=1),
            "added_time_ids": torch.randn(BATCH, 3),
        },
    ),
)
"""(class, settings, function that returns the arguments of its forward)"""


def cases() -> Iterator[Case]:
    """Yields one case for each class in the table."""
    for name, settings, batch in TABLE:
        build = lambda name=name, settings=settings, batch=batch: _built(name, settings, batch)
        yield Case(library="diffusers", name=name, candidates=single(build))


def _built(name: str, settings: dict[str, Any], batch: Any) -> tuple[torch.nn.Module, Any, Any]:
    import diffusers

    return getattr(diffusers, name)(**settings), batch(), mean_square
