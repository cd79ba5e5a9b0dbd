"""Makes configs of transformers models small, by the names of their attributes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

VOCABULARY = 128
LAYERS, HEADS, KEY_HEADS, HEAD_WIDTH = 2, 4, 2, 8
WIDTH, INNER = HEADS * HEAD_WIDTH, 64
POSITIONS = 128
PATCHES = 4
"""Patches along each side of an image."""


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


_COUNTS: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r".*vocab_size|vocab_size_.*|codebook_size|num_semantic_tokens|entity_vocab_size", _at_most(VOCABULARY)),
    (r"num_feat_extract_layers|num_conv_layers", lambda value: value),  # as many as the lists of their settings have
    (r"(num|n|encoder|decoder|num_encoder|num_decoder)?_?(hidden_)?layers?", _at_most(LAYERS)),
    (r".*(_num_hidden_layers|_n_layers?|_num_layers|_depth|_num_blocks)|(num|n)_(.*_)?layers|depth", _at_most(LAYERS)),
    (r"n_routed_experts|(moe_)?num_(local_|routed_)?experts|moe_num_experts|n_shared_experts", _at_most(4)),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|.*_experts_per_tok|top_k_experts", _at_most(2)),
    (r"num_kv_shared_layers", _at_most(0)),
    (r"hidden_size_per_layer_input", _at_most(8)),
    (r"n_group|topk_group|num_expert_group", _at_most(1)),
    (r"max_position_embeddings|n_positions|max_target_positions|.*max_.*position_embeddings", _at_most(POSITIONS)),
    (r"max_source_positions", _at_most(64)),
    (r"first_k_dense_replace|moe_layer_start_index|num_nextn_predict_layers|num_mtp_layers", _at_most(1)),
    (r"num_queries|num_query_tokens|num_latents|num_denoising", _at_most(8)),
)
"""Settings whose size has no relation to the width of a layer: (pattern of the name, new value)."""

_WIDTHS: tuple[tuple[str, Callable[[int], int]], ...] = (
    (
        r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|(attention_|mamba_)?head_dim|d_kv|mamba_d_head",
        _at_most(HEAD_WIDTH),
    ),
    (r"qk_head_dim", _at_most(2 * HEAD_WIDTH)),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|index_head_dim|linear_(key|value)_head_dim", _at_most(HEAD_WIDTH)),
    (r"(.*_)?num_key_value_heads|num_kv_heads|multi_query_group_num|index_n_heads", _at_most(KEY_HEADS)),
    (r"(.*_)?(num_attention_heads|num_heads|attention_heads|n_heads?)", _at_most(HEADS)),
    (r"(.*_)?(intermediate_size|intermediate_dim|ffn_dim|d_ff|n_inner|mlp_dim|dff|ffn_hidden_size)", _at_most(INNER)),
    (r"d_inner", _at_most(INNER)),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|d_embed|word_embed_proj_dim)",
        _at_most(WIDTH),
    ),
    (
        r"dim|(.*_)?(projection_dim|proj_dim|output_dim|classifier_proj_size|feature_size|d_latents|lru_width)",
        _at_most(WIDTH),
    ),
    (r"state_size|mamba_d_state|ssm_state_size", _at_most(4)),
)
"""Settings of the width of layers."""
_IDS = re.compile(r".*_token_id|.*_token_index|.*_token_ids|boi_.*|eoi_.*")


def small_settings(config: Any, *, widths: bool) -> dict[str, Any]:
    """Returns the settings of a small version of a config, for its class.

    Args:
        config: a transformers config with its default values.
        widths: True to make layers narrow, too; False to change only numbers of layers, tokens, experts and pixels.
    """
    return _small(config.to_dict(), widths, {})


def _small(settings: dict[str, Any], widths: bool, ids: dict[int, int]) -> dict[str, Any]:
    rules = (*_COUNTS, *_WIDTHS) if widths else _COUNTS
    layers = next(
        (settings[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if _is_count(settings.get(n))), 0
    )
    kinds = [
        value for value in settings.values() if isinstance(value, list) and layers > LAYERS and len(value) == layers
    ]
    chosen = _chosen_layers(kinds, layers)
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and "model_type" in value:
            value = _small(value, widths, ids)
        elif isinstance(value, list) and layers > LAYERS and len(value) == layers:
            value = [value[index] for index in chosen]
        elif _IDS.fullmatch(name):
            value = _token(value, ids)
        elif _is_count(value):
            value = next((change(value) for pattern, change in rules if re.fullmatch(pattern, name)), value)
        small[name] = value
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if kinds and name in small:
            small[name] = len(chosen)
    if widths and isinstance(small.get("layerdrop"), float):
        small["layerdrop"] = 0.0
    if widths:
        _let_widths_agree(small)
    _shrink_image(small)
    _drop_derived(small)
    return small


def _let_widths_agree(small: dict[str, Any]) -> None:
    """Changes settings that follow from others, but that configs state."""
    if _is_count(small.get("kv_lora_rank")):  # latent attention has as many heads of keys as of queries
        for name in ("num_key_value_heads", "num_attention_heads"):
            small[name] = HEADS
    if _is_count(small.get("mamba_n_heads")):
        small["mamba_n_heads"], small["mamba_d_head"], small["mamba_d_ssm"] = HEADS * 2, HEAD_WIDTH, 2 * WIDTH
    if isinstance(small.get("num_heads"), list) and _is_count(small.get("embed_dim")):  # stages of growing width
        stages = len(small["num_heads"])
        small |= {"num_heads": [2**stage for stage in range(stages)], "embed_dim": 8}
        small.pop("hidden_size", None)
    if "rotary_dim" in small:
        small["rotary_dim"] = HEAD_WIDTH // 2


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _chosen_layers(lists: list[list[Any]], layers: int) -> list[int]:
    """Returns the layers to keep: the first of each kind of layer, and at least `LAYERS`."""
    seen: dict[str, int] = {}
    for index in range(layers):
        seen.setdefault(str([values[index] for values in lists]), index)
    return (
        sorted({*list(seen.values())[:4], *range(LAYERS)})[: max(LAYERS, len(seen))] if lists else list(range(LAYERS))
    )


def _token(value: Any, ids: dict[int, int]) -> Any:
    """Returns an id of a special token inside the small vocabulary; equal ids stay equal, others stay different."""
    if isinstance(value, list):
        return [_token(item, ids) for item in value]
    if not _is_count(value) or value < VOCABULARY - 32:
        return value
    return ids.setdefault(value, VOCABULARY - 1 - len(ids) % 32)


def _shrink_image(small: dict[str, Any]) -> None:
    """Makes images `PATCHES` patches wide and high."""
    patch, image = small.get("patch_size"), small.get("image_size")
    if _is_count(patch) and _is_count(image) and image > PATCHES * patch:
        small["image_size"] = PATCHES * patch if patch > 4 else 64
    elif _is_count(image) and patch is None and image > 64:
        small["image_size"] = 64
    if isinstance(image, list) and len(image) == 2 and _is_count(patch):
        small["image_size"] = [PATCHES * patch] * 2


def _drop_derived(small: dict[str, Any]) -> None:
    """Removes settings that describe how a checkpoint was saved, or that name stages and layers."""
    stages = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices", "per_layer_config")
    for name in ("transformers_version", "dtype", "architectures", "_name_or_path", *stages):
        small.pop(name, None)
    for name, value in (("vocab_size", VOCABULARY), ("mask_token_id", 4)):
        if name in small and small[name] is None:
            small[name] = value
    if "use_cache" in small:
        small["use_cache"] = False
    for name, value in list(small.items()):
        if re.fullmatch(r".*layer_?drop", name) and isinstance(value, float):
            small[name] = 0.0


def levels() -> Iterator[tuple[str, bool]]:
    """Yields (description, whether widths change) of the ways to make a config small, the smallest first."""
    yield "narrow", True
    yield "few layers", False
