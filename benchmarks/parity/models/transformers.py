"""Cases: tiny transformers models from configs, with padded batches of random tokens, images and sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.parity.case import SAMPLES, Registry, adamw

CASES = Registry()
WORDS, LENGTH, LABELS = 64, 12, 3

TEXT = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ENCODER_DECODER = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "use_cache": False,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 8, "num_labels": LABELS,
}  # fmt: skip
SINGLE = {"dtype": torch.float32, "rounding": 1e-3}
"""The grouped matrix products of experts do not compute in double precision."""
STATE_SPACE = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}


def lengths() -> torch.Tensor:
    return torch.randint(3, LENGTH + 1, (SAMPLES, 1))


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape)


def padded(step: int) -> dict[str, torch.Tensor]:
    """Returns sentences of different lengths; labels of the padding are -100."""
    ids, mask = words(SAMPLES, LENGTH), (torch.arange(LENGTH) < lengths()).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unmasked(step: int) -> dict[str, torch.Tensor]:
    """Returns the same without a mask."""
    return {key: value for key, value in padded(step).items() if key != "attention_mask"}


def masked(step: int) -> dict[str, torch.Tensor]:
    """Returns sentences of which some words are to be guessed: their number differs from sample to sample."""
    batch = padded(step)
    hidden = torch.rand(SAMPLES, LENGTH) < torch.linspace(0.2, 0.9, SAMPLES)[:, None]
    hidden[:, 0] = True  # the parts of a batch without any label may be left out, which draws fewer numbers
    return {**batch, "labels": batch["labels"].masked_fill(~hidden, -100)}


def classified(step: int) -> dict[str, torch.Tensor]:
    batch = padded(step)
    return {**batch, "labels": torch.randint(LABELS, (SAMPLES,))}


def tagged(step: int) -> dict[str, torch.Tensor]:
    batch = padded(step)
    return {**batch, "labels": torch.randint(LABELS, (SAMPLES, LENGTH)).masked_fill(batch["attention_mask"] == 0, -100)}


def answered(step: int) -> dict[str, torch.Tensor]:
    batch = padded(step)
    del batch["labels"]
    return {**batch, "start_positions": torch.randint(3, (SAMPLES,)), "end_positions": torch.randint(3, (SAMPLES,))}


def pictures(step: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16), "labels": torch.randint(LABELS, (SAMPLES,))}


def captioned(step: int) -> dict[str, Any]:
    ids = words(SAMPLES, LENGTH)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, 16, 16), "return_loss": True}


def heard(step: int) -> dict[str, torch.Tensor]:
    labels = words(SAMPLES, LENGTH).masked_fill(torch.arange(LENGTH) >= lengths(), -100)
    return {"input_features": torch.randn(SAMPLES, 8, 32), "labels": labels}


def shifted(batch: dict[str, torch.Tensor]) -> float:
    """Returns the number of labels of a causal model."""
    return float((batch["labels"][:, 1:] != -100).sum())


def counted(batch: dict[str, torch.Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


def add(
    name: str, head: str, settings: dict[str, Any], batch: Callable[[int], Any], *, kind: str | None = None,
    fields: dict[str, Any] | None = None, dropout: float = 0.0, **more: Any,
) -> None:  # fmt: skip
    """Adds a model from its config. The judge weights micro-batches by labels where a random case is split."""

    def build() -> torch.nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind or name, **{**settings, **more})
        for part in [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]:
            for key, value in vars(part).items():
                if isinstance(value, float) and any(word in key for word in ("drop", "pdrop")):
                    setattr(part, key, dropout)
        if hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False
        return getattr(transformers, head)(config)

    is_causal = any(part in head for part in ("CausalLM", "LMHead"))
    terms = shifted if is_causal else counted if batch in (padded, masked, tagged, heard) else None
    # Some layers compute in fp32 whatever the dtype of the model is.
    CASES.add(f"transformers: {name}", build, batch, **{"rounding": 2e-4, "steps": 3, "terms": terms, **(fields or {})})


add("gpt2", "GPT2LMHeadModel", {**TEXT, "use_cache": False}, padded, n_embd=16, n_layer=2, n_head=2)
add("gpt2 with dropout", "GPT2LMHeadModel", {**TEXT, "use_cache": False}, padded, kind="gpt2", dropout=0.1,
    n_embd=16, n_layer=2, n_head=2, fields={"draws": True})  # fmt: skip
add("gpt2, key-value cache on", "GPT2LMHeadModel", TEXT, padded, kind="gpt2", n_embd=16, n_layer=2, n_head=2)
add("gpt_neo", "GPTNeoForCausalLM", {**TEXT, "use_cache": False}, padded, num_layers=2, num_heads=2,
    attention_types=[[["global", "local"], 1]])  # fmt: skip
add("gpt_neox", "GPTNeoXForCausalLM", {**TEXT, "use_cache": False}, padded)
add("gptj", "GPTJForCausalLM", {**TEXT, "use_cache": False}, padded, n_embd=16, n_layer=2, n_head=2, rotary_dim=4)
add("opt", "OPTForCausalLM", {**TEXT, "use_cache": False}, padded, ffn_dim=32, word_embed_proj_dim=16)
add("bloom", "BloomForCausalLM", {**TEXT, "use_cache": False}, padded, n_layer=2, n_head=2)
add("falcon", "FalconForCausalLM", {**TEXT, "use_cache": False}, padded)
add("llama", "LlamaForCausalLM", DECODER, padded)
add("llama, adamw", "LlamaForCausalLM", DECODER, padded, kind="llama", fields={"optimizer": adamw, "clip": 0.5})
add("mistral", "MistralForCausalLM", DECODER, padded, sliding_window=4)
add("qwen2", "Qwen2ForCausalLM", DECODER, padded)
add("qwen3", "Qwen3ForCausalLM", DECODER, padded)
add("gemma2", "Gemma2ForCausalLM", DECODER, unmasked, sliding_window=4)
add("gemma3_text", "Gemma3ForCausalLM", DECODER, padded, sliding_window=4)
add("phi3", "Phi3ForCausalLM", DECODER, padded)
add("olmo2", "Olmo2ForCausalLM", DECODER, padded)
add("mixtral", "MixtralForCausalLM", EXPERTS, padded, num_local_experts=4, fields=SINGLE)
add("mixtral with router loss", "MixtralForCausalLM", EXPERTS, padded, kind="mixtral", num_local_experts=4,
    output_router_logits=True, fields={"splits": False, **SINGLE})  # fmt: skip
add("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS, padded, fields=SINGLE)
add("deepseek_v3", "DeepseekV3ForCausalLM", EXPERTS, padded, n_routed_experts=4, n_shared_experts=1, n_group=1,
    topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, head_dim=4, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=8, num_key_value_heads=2, fields=SINGLE)  # fmt: skip
add("gpt_oss", "GptOssForCausalLM", EXPERTS, padded, num_local_experts=4, sliding_window=4,
    fields=SINGLE)  # fmt: skip
add("mamba", "MambaForCausalLM", STATE_SPACE, padded)
add("mamba2", "Mamba2ForCausalLM", STATE_SPACE, padded, head_dim=8, num_heads=4, n_groups=1, chunk_size=4)
add(
    "rwkv",
    "RwkvForCausalLM",
    {**TEXT, "use_cache": False},
    lambda step: {key: value[:, :4] for key, value in unmasked(step).items()},
    attention_hidden_size=16,
)
add("recurrent_gemma", "RecurrentGemmaForCausalLM", DECODER, padded, lru_width=16, attention_window_size=4,
    block_types=["recurrent", "attention"])  # fmt: skip
add("bert", "BertForMaskedLM", TEXT, masked)
add("bert with dropout", "BertForMaskedLM", TEXT, masked, kind="bert", dropout=0.1,
    fields={"draws": True})  # fmt: skip
add("bert for classes", "BertForSequenceClassification", TEXT, classified, kind="bert", num_labels=LABELS)
add("bert for tags", "BertForTokenClassification", TEXT, tagged, kind="bert", num_labels=LABELS)
add("bert for answers", "BertForQuestionAnswering", TEXT, answered, kind="bert")
add("bert for several labels", "BertForSequenceClassification", TEXT, lambda step: {
    **padded(step), "labels": torch.randint(2, (SAMPLES, LABELS)).to(torch.get_default_dtype())}, kind="bert",
    num_labels=LABELS, problem_type="multi_label_classification")  # fmt: skip
add("roberta", "RobertaForMaskedLM", TEXT, masked)
add("distilbert", "DistilBertForMaskedLM", TEXT, masked, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
add("albert", "AlbertForMaskedLM", TEXT, masked, embedding_size=8)
add(
    "electra",
    "ElectraForPreTraining",
    TEXT,
    lambda step: {**padded(step), "labels": torch.randint(2, (SAMPLES, LENGTH))},
    embedding_size=8,
)
add("deberta-v2", "DebertaV2ForMaskedLM", TEXT, masked, relative_attention=True, pos_att_type=["p2c", "c2p"])
add("modernbert", "ModernBertForMaskedLM", TEXT, masked, cls_token_id=1, sep_token_id=2)
add("t5", "T5ForConditionalGeneration", ENCODER_DECODER, padded, num_layers=2, num_heads=2, d_kv=8, d_ff=32)
add("bart", "BartForConditionalGeneration", ENCODER_DECODER, padded)
add("switch_transformers", "SwitchTransformersForConditionalGeneration", ENCODER_DECODER, padded, num_layers=2,
    num_heads=2, d_kv=8, d_ff=32, num_experts=2, num_sparse_encoder_layers=1, num_decoder_layers=2,
    num_sparse_decoder_layers=1, router_jitter_noise=0.0)  # fmt: skip
add("whisper", "WhisperForConditionalGeneration", ENCODER_DECODER, heard, num_mel_bins=8, max_source_positions=16,
    max_target_positions=32)  # fmt: skip
add("vit", "ViTForImageClassification", VISION, pictures)
add("swin", "SwinForImageClassification", {"image_size": 16, "num_labels": LABELS}, pictures, embed_dim=8,
    depths=[1, 1], num_heads=[1, 2], window_size=2, patch_size=4)  # fmt: skip
add("convnext", "ConvNextForImageClassification", VISION, pictures, hidden_sizes=[8, 16], depths=[1, 1],
    num_stages=2, patch_size=4)  # fmt: skip
add("resnet", "ResNetForImageClassification", VISION, pictures, embedding_size=8, hidden_sizes=[8, 16],
    depths=[1, 1], layer_type="basic")  # fmt: skip
add("vit_mae", "ViTMAEForPreTraining", VISION, lambda step: {"pixel_values": pictures(step)["pixel_values"]},
    decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32,
    fields={"draws": True})  # fmt: skip
add("clip", "CLIPModel", {}, captioned, projection_dim=8, text_config=TEXT, vision_config=VISION,
    fields={"splits": False})  # fmt: skip
add("siglip", "SiglipModel", {}, captioned, text_config=TEXT, vision_config=VISION, fields={"splits": False})
add("patchtst", "PatchTSTForPrediction", {}, lambda step: {
    "past_values": torch.randn(SAMPLES, 16, 2), "future_values": torch.randn(SAMPLES, 4, 2)}, num_input_channels=2,
    context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=16, num_hidden_layers=2,
    num_attention_heads=2, ffn_dim=32)  # fmt: skip
