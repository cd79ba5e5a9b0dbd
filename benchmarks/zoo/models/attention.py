"""Variants of transformers of the library x-transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Case, mean_square, single

BATCH, TOKENS, WORDS, WIDTH = 2, 16, 64, 32
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary positions": {"rotary_pos_emb": True},
    "alibi positions": {"alibi_pos_bias": True},
    "T5's relative positions": {"rel_pos_bias": True},
    "dynamic positions": {"dynamic_pos_bias": True},
    "flash attention": {"attn_flash": True},
    "one head of keys and values": {"attn_one_kv_head": True},
    "grouped keys and values": {"attn_kv_heads": 2},
    "normalized queries and keys": {"attn_qk_norm": True},
    "gated linear units": {"ff_glu": True, "ff_swish": True},
    "squared relu": {"ff_relu_squared": True},
    "root mean square norm": {"use_rmsnorm": True},
    "sandwich norm": {"sandwich_norm": True},
    "gated residuals": {"gate_residual": True},
    "memory keys and values": {"attn_num_mem_kv": 4},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "sparse top attention": {"attn_sparse_topk": 4},
    "macaron": {"macaron": True},
    "shifted tokens": {"shift_tokens": 1},
    "hybrid residual streams": {"num_residual_streams": 2},
}
"""Settings of a decoder, by name."""


def cases() -> Iterator[Case]:
    """Yields one language model for each variant, and other models of the library."""
    for name, settings in VARIANTS.items():
        build = lambda settings=settings: (_language_model(settings), _tokens(), None)
        yield Case(library="x_transformers", name=name, candidates=single(build))
    others = {"vision": _vision, "encoder and decoder": _translation, "continuous": _continuous}
    for name, build in others.items():
        yield Case(library="x_transformers", name=name, candidates=single(build))


def _tokens() -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, TOKENS))


def _language_model(settings: dict[str, Any]) -> torch.nn.Module:
    import x_transformers as x

    layers = x.Decoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8, **settings)
    return x.AutoregressiveWrapper(x.TransformerWrapper(num_tokens=WORDS, max_seq_len=TOKENS, attn_layers=layers))


def _vision() -> tuple[torch.nn.Module, Any, Any]:
    import x_transformers as x

    layers = x.Encoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8)
    model = x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=layers)
    return model, torch.randn(BATCH, 3, 32, 32), mean_square


def _translation() -> tuple[torch.nn.Module, Any, None]:
    import x_transformers as x

    model = x.XTransformer(
        dim=WIDTH,
        enc_num_tokens=WORDS,
        enc_depth=2,
        enc_heads=4,
        enc_max_seq_len=TOKENS,
        dec_num_tokens=WORDS,
        dec_depth=2,
        dec_heads=4,
        dec_max_seq_len=TOKENS,
        enc_attn_dim_head=8,
        dec_attn_dim_head=8,
    )
    return model, (_tokens(), _tokens()), None


def _continuous() -> tuple[torch.nn.Module, Any, Any]:
    import x_transformers as x

    layers = x.Encoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8)
    model = x.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=TOKENS, attn_layers=layers)
    return model, torch.randn(BATCH, TOKENS, 8), mean_square
