"""The zoo: one entry an architecture, each with the state that a rehearsal of it is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.plain_models import (
    Tied,
    a_check_of_values,
    batch_norm,
    cells,
    control_flow_on_shapes,
    control_flow_on_values,
    ctc,
    custom_function,
    embedded,
    failing_hook,
    full_backward_hook,
    in_place,
    known_values,
    multihead_attention,
    nested,
    numbers_of_the_batch,
    packed,
    packed_by_batch,
    plain_linear,
    recurrent,
    simple,
    torch_transformer,
    u_net,
)

BATCH = 2
TOKENS = 16
VOCABULARY = 64
LABELS = 3

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WITHOUT_LAYERS = {key: value for key, value in TEXT.items() if key != "num_hidden_layers"}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": LABELS,
}
IMAGES = {"image_size": 32, "num_labels": LABELS}
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": LABELS,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One model with a batch, and what a rehearsal of it must do."""

    name: str
    build: Callable[[], tuple[Any, ...]]
    """-> (model, batch) or (model, batch, loss_fn)."""
    refused: str | None = None
    """Pattern of the one line that refuses it; None: it runs."""
    assumes: str | None = None
    """Pattern of an assumption that the rehearsal must tell; None: it assumes nothing."""
    refused_bf16: str | None = None
    """The same for bf16 autocast alone."""
    caches: bool = False
    """The model keeps constants that it made in its first step."""
    optimizer: Any = "adamw"


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(shape or (BATCH, TOKENS), dtype=torch.long)


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def masked_text() -> dict[str, torch.Tensor]:
    return {**text(), "attention_mask": tokens()}


def padded_text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "attention_mask": tokens(), "labels": tokens(BATCH)}


def answers() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "start_positions": tokens(BATCH), "end_positions": tokens(BATCH)}


def image(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(BATCH, 3, size, size), "labels": tokens(BATCH)}


def segmented(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(BATCH, 3, size, size), "labels": tokens(BATCH, size, size)}


def detected(size: int = 64) -> dict[str, Any]:
    one = {"class_labels": tokens(2), "boxes": torch.zeros(2, 4)}
    return {
        "pixel_values": torch.zeros(BATCH, 3, size, size),
        "labels": [dict(one) for _ in range(BATCH)],
    }


def sound(samples: int = 400) -> dict[str, torch.Tensor]:
    return {"input_values": torch.zeros(BATCH, samples), "labels": tokens(BATCH)}


def few_words() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(BATCH, 4), "labels": tokens(BATCH, 4)}


def spoken(samples: int = 400) -> dict[str, torch.Tensor]:
    return {"input_values": torch.zeros(BATCH, samples), "labels": tokens(BATCH, 4)}


def captioned(size: int = 32) -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": torch.zeros(BATCH, 3, size, size), "return_loss": True}


def transformer(kind: str, head: str, settings: dict[str, Any], batch: Callable[[], Any], **more: Any):
    """A builder of a transformers model on the meta device."""

    def build() -> tuple[torch.nn.Module, Any]:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **{**settings, **more})
        with torch.device("meta"):
            model = getattr(transformers, head)(config)
        model.train()
        return model, batch()

    return build


def hf(name: str, head: str, settings: dict[str, Any], batch: Callable[[], Any], **more: Any) -> Entry:
    """An entry that runs; `refused` and `assumes` say otherwise, `kind` is the configuration's name if not `name`."""
    states = {
        key: more.pop(key) for key in ("refused", "refused_bf16", "assumes", "caches", "optimizer") if key in more
    }
    kind = more.pop("kind", name)
    return Entry(name=name, build=transformer(kind, head, settings, batch, **more), **states)


MOE = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

RESERVE = "cuDNN saves"
PADDING = "every sample of the batch has one position of padding"
DROPS = "random numbers that the code branches on are all 0.5"
LABELLED = "no label of the batch is ignored"
CHECKS = "every check on tensor values .* passes"
DRAWS = "return their possible values in ascending order"
MATCHED = "predictions are matched to targets in order"
BALANCED = "experts that receive equal numbers of tokens"
TRANSFORMERS = (
    # encoders
    hf("bert", "BertForMaskedLM", TEXT, text),
    hf("roberta", "RobertaForMaskedLM", TEXT, text),
    hf("xlm-roberta", "XLMRobertaForSequenceClassification", TEXT, padded_text, assumes=PADDING),
    hf("camembert", "CamembertForTokenClassification", TEXT, text),
    hf("albert", "AlbertForMaskedLM", TEXT, text, embedding_size=16),
    hf("electra", "ElectraForMaskedLM", TEXT, text, embedding_size=16),
    hf("deberta", "DebertaForMaskedLM", TEXT, text, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    hf("deberta-v2", "DebertaV2ForMaskedLM", TEXT, text, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    hf("distilbert", "DistilBertForMaskedLM", TEXT, text, dim=16, n_heads=2, n_layers=2, hidden_dim=32),
    hf("mpnet", "MPNetForMaskedLM", TEXT, text),
    hf(
        "modernbert",
        "ModernBertForMaskedLM",
        TEXT,
        masked_text,
        local_attention=8,
        cls_token_id=1,
        sep_token_id=2,
        assumes=PADDING,
    ),
    hf("layoutlm", "LayoutLMForTokenClassification", TEXT, text),
    hf("mobilebert", "MobileBertForMaskedLM", TEXT, text, embedding_size=16, intra_bottleneck_size=16),
    hf("squeezebert", "SqueezeBertForMaskedLM", TEXT, text, embedding_size=16),
    hf("convbert", "ConvBertForMaskedLM", TEXT, text, embedding_size=16),
    hf("roformer", "RoFormerForMaskedLM", TEXT, text, embedding_size=16),
    hf("nystromformer", "NystromformerForMaskedLM", TEXT, text, num_landmarks=16, segment_means_seq_len=16),
    hf("longformer", "LongformerForMaskedLM", TEXT, masked_text, attention_window=4, assumes=PADDING),
    hf("big_bird", "BigBirdForMaskedLM", TEXT, text, block_size=2, num_random_blocks=1),
    hf("esm", "EsmForMaskedLM", TEXT, text, mask_token_id=3),
    hf("fnet", "FNetForMaskedLM", TEXT, text, refused_bf16="Unsupported dtype BFloat16"),
    hf(
        "funnel",
        "FunnelForMaskedLM",
        WITHOUT_LAYERS,
        text,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        block_sizes=[1, 1],
    ),
    hf(
        "xlnet",
        "XLNetForQuestionAnsweringSimple",
        {key: TEXT[key] for key in ("vocab_size", "pad_token_id")},
        answers,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=32,
    ),
    hf("canine", "CanineForTokenClassification", TEXT, text, downsampling_rate=4, local_transformer_stride=8),
    hf(
        "perceiver",
        "PerceiverForMaskedLM",
        TEXT,
        lambda: {"inputs": tokens(), "labels": tokens()},
        d_model=16,
        d_latents=16,
        num_latents=4,
        max_position_embeddings=TOKENS,
        num_self_attends_per_block=2,
        num_cross_attention_heads=2,
        num_self_attention_heads=2,
        qk_channels=16,
        v_channels=16,
    ),
    # decoders
    hf("gpt2", "GPT2LMHeadModel", DECODER, text),
    hf("gpt_bigcode", "GPTBigCodeForCausalLM", DECODER, text),
    hf("gpt_neo", "GPTNeoForCausalLM", DECODER, text, attention_types=[[["global", "local"], 1]], window_size=8),
    hf("gpt_neox", "GPTNeoXForCausalLM", DECODER, text),
    hf("gptj", "GPTJForCausalLM", DECODER, text, rotary_dim=4),
    hf("codegen", "CodeGenForCausalLM", DECODER, text, rotary_dim=4, n_head=4, num_attention_heads=4),
    hf("opt", "OPTForCausalLM", DECODER, text, ffn_dim=32, word_embed_proj_dim=16),
    hf("bloom", "BloomForCausalLM", DECODER, text),
    hf("mpt", "MptForCausalLM", DECODER, text, d_model=16, n_heads=2, n_layers=2, max_seq_len=64),
    hf("falcon", "FalconForCausalLM", {**TEXT, "use_cache": False}, text),
    hf("llama", "LlamaForCausalLM", DECODER, text),
    hf("mistral", "MistralForCausalLM", DECODER, masked_text, sliding_window=8),
    hf("qwen2", "Qwen2ForCausalLM", DECODER, text),
    hf("qwen3", "Qwen3ForCausalLM", DECODER, text),
    hf("gemma", "GemmaForCausalLM", DECODER, text),
    hf("gemma2", "Gemma2ForCausalLM", DECODER, text, sliding_window=8),
    hf("gemma3_text", "Gemma3ForCausalLM", DECODER, text, sliding_window=8),
    hf("phi", "PhiForCausalLM", DECODER, text),
    hf("phi3", "Phi3ForCausalLM", DECODER, text),
    hf("stablelm", "StableLmForCausalLM", DECODER, text),
    hf("olmo", "OlmoForCausalLM", DECODER, text),
    hf("olmo2", "Olmo2ForCausalLM", DECODER, text),
    hf("cohere", "CohereForCausalLM", DECODER, text),
    hf("starcoder2", "Starcoder2ForCausalLM", DECODER, text),
    hf("granite", "GraniteForCausalLM", DECODER, text),
    hf("glm", "GlmForCausalLM", DECODER, text),
    hf("smollm3", "SmolLM3ForCausalLM", DECODER, text),
    hf("xglm", "XGLMForCausalLM", DECODER, text, d_model=16, attention_heads=2, num_layers=2, ffn_dim=32),
    hf("biogpt", "BioGptForCausalLM", DECODER, text),
    hf("nemotron", "NemotronForCausalLM", DECODER, text),
    hf("ctrl", "CTRLLMHeadModel", DECODER, text, n_embd=16, n_layer=2, n_head=2, dff=32),
    # encoder-decoder
    hf("t5", "T5ForConditionalGeneration", ENCODER_DECODER, text, num_layers=2, num_heads=2, d_kv=8, d_ff=32),
    hf("umt5", "UMT5ForConditionalGeneration", ENCODER_DECODER, text, num_layers=2, num_heads=2, d_kv=8, d_ff=32),
    hf(
        "longt5",
        "LongT5ForConditionalGeneration",
        ENCODER_DECODER,
        text,
        num_layers=2,
        num_heads=2,
        d_kv=8,
        d_ff=32,
        local_radius=3,
    ),
    hf("bart", "BartForConditionalGeneration", ENCODER_DECODER, text),
    hf("mbart", "MBartForConditionalGeneration", ENCODER_DECODER, text),
    hf("pegasus", "PegasusForConditionalGeneration", ENCODER_DECODER, text),
    hf("marian", "MarianMTModel", ENCODER_DECODER, text, decoder_vocab_size=VOCABULARY),
    hf("blenderbot", "BlenderbotForConditionalGeneration", ENCODER_DECODER, text),
    hf("m2m_100", "M2M100ForConditionalGeneration", ENCODER_DECODER, text, assumes=DROPS),
    hf(
        "led",
        "LEDForConditionalGeneration",
        ENCODER_DECODER,
        text,
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    hf(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        {**PLAIN, "use_cache": False},
        text,
        hidden_size=16,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        assumes=LABELLED,
    ),
    hf(
        "nllb-moe",
        "NllbMoeForConditionalGeneration",
        ENCODER_DECODER,
        text,
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        assumes="all elements are selected, which is an upper bound",
    ),
    hf(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        ENCODER_DECODER,
        text,
        num_layers=2,
        num_heads=2,
        d_kv=8,
        d_ff=32,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        assumes=BALANCED,
    ),
    # vision
    hf("vit", "ViTForImageClassification", VISION, image),
    hf("deit", "DeiTForImageClassification", VISION, image),
    hf("beit", "BeitForImageClassification", VISION, image),
    hf(
        "swin",
        "SwinForImageClassification",
        IMAGES,
        image,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
        patch_size=4,
    ),
    hf(
        "swinv2",
        "Swinv2ForImageClassification",
        IMAGES,
        image,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
        patch_size=4,
    ),
    hf(
        "convnext",
        "ConvNextForImageClassification",
        VISION,
        image,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        patch_size=4,
    ),
    hf(
        "resnet",
        "ResNetForImageClassification",
        VISION,
        image,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    hf(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        VISION,
        image,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        patch_size=4,
    ),
    hf("dinov2", "Dinov2ForImageClassification", VISION, image),
    hf(
        "mobilevit",
        "MobileViTForImageClassification",
        VISION,
        image,
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16],
        patch_size=2,
    ),
    hf("mobilenet_v2", "MobileNetV2ForImageClassification", VISION, image),
    hf(
        "efficientnet",
        "EfficientNetForImageClassification",
        IMAGES,
        image,
        hidden_dim=1280,
        in_channels=[32, 8],
        out_channels=[8, 8],
        kernel_sizes=[3, 3],
        strides=[1, 2],
        num_block_repeats=[1, 1],
        expand_ratios=[1, 2],
        depthwise_padding=[],
        width_coefficient=1.0,
        depth_coefficient=1.0,
    ),
    hf(
        "poolformer",
        "PoolFormerForImageClassification",
        VISION,
        image,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    hf(
        "pvt_v2",
        "PvtV2ForImageClassification",
        VISION,
        image,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    hf(
        "vit_mae",
        "ViTMAEForPreTraining",
        VISION,
        lambda: {"pixel_values": image()["pixel_values"]},
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    ),
    hf(
        "segformer",
        "SegformerForSemanticSegmentation",
        VISION,
        segmented,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    hf(
        "upernet",
        "UperNetForSemanticSegmentation",
        {},
        segmented,
        hidden_size=16,
        num_labels=LABELS,
        pool_scales=[1, 2],
        auxiliary_in_channels=16,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    ),
    # audio
    hf(
        "whisper",
        "WhisperForConditionalGeneration",
        ENCODER_DECODER,
        lambda: {"input_features": torch.zeros(BATCH, 8, 32), "labels": tokens()},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
    ),
    hf(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        ENCODER_DECODER,
        lambda: {"input_features": torch.zeros(BATCH, 32, 8), "labels": tokens()},
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=64,
        max_target_positions=32,
    ),
    hf("wav2vec2", "Wav2Vec2ForSequenceClassification", SPEECH, sound, apply_spec_augment=False, assumes=DROPS),
    hf(
        "wav2vec2 for ctc", "Wav2Vec2ForCTC", SPEECH, spoken, kind="wav2vec2", apply_spec_augment=True, assumes=LABELLED
    ),
    hf("hubert", "HubertForSequenceClassification", SPEECH, sound, assumes=DROPS),
    hf("wavlm", "WavLMForSequenceClassification", SPEECH, sound, assumes=DROPS),
    hf("unispeech-sat", "UniSpeechSatForSequenceClassification", SPEECH, sound, assumes=DROPS),
    hf("sew", "SEWForSequenceClassification", SPEECH, sound, assumes=DROPS),
    hf(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        VISION,
        lambda: {"input_values": torch.zeros(BATCH, 32, 16), "labels": tokens(BATCH)},
        max_length=32,
        num_mel_bins=16,
    ),
    # multimodal
    hf("clip", "CLIPModel", {}, captioned, projection_dim=8, text_config=TEXT, vision_config=VISION),
    hf("siglip", "SiglipModel", {}, captioned, text_config=TEXT, vision_config=VISION),
    hf(
        "altclip",
        "AltCLIPModel",
        {},
        captioned,
        projection_dim=8,
        text_config={**TEXT, "project_dim": 8},
        vision_config=VISION,
    ),
    hf(
        "blip",
        "BlipForConditionalGeneration",
        {},
        lambda: {**text(), "pixel_values": torch.zeros(BATCH, 3, 32, 32)},
        text_config={**TEXT, "encoder_hidden_size": 16},
        vision_config=VISION,
        image_text_hidden_size=8,
    ),
    hf(
        "git",
        "GitForCausalLM",
        TEXT,
        lambda: {**text(), "pixel_values": torch.zeros(BATCH, 3, 32, 32)},
        vision_config=VISION,
    ),
    hf(
        "llava",
        "LlavaForConditionalGeneration",
        {},
        lambda: {**text(), "pixel_values": torch.zeros(BATCH, 3, 32, 32)},
        text_config={"model_type": "llama", **DECODER},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_id=5,
        assumes=CHECKS,
    ),
    hf(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {},
        lambda: {**masked_text(), "token_type_ids": tokens(), "pixel_values": torch.zeros(BATCH, 3, 32, 32)},
        text_config={"model_type": "gemma", **DECODER},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        projection_dim=16,
        image_token_id=5,
        assumes=CHECKS,
    ),
    hf(
        "vilt",
        "ViltForImagesAndTextClassification",
        {**TEXT, **VISION},
        lambda: {"input_ids": tokens(), "pixel_values": torch.zeros(BATCH, 1, 3, 32, 32), "labels": tokens(BATCH)},
        num_images=1,
        modality_type_vocab_size=3,
        assumes=DRAWS,
    ),
    # mixtures of experts
    hf("mixtral", "MixtralForCausalLM", MOE, text, num_local_experts=4),
    hf("qwen2_moe", "Qwen2MoeForCausalLM", MOE, text, shared_expert_intermediate_size=16),
    hf("qwen3_moe", "Qwen3MoeForCausalLM", MOE, text),
    hf("olmoe", "OlmoeForCausalLM", MOE, text),
    hf("granitemoe", "GraniteMoeForCausalLM", MOE, text, num_local_experts=4),
    hf(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        MOE,
        text,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        head_dim=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    hf("gpt_oss", "GptOssForCausalLM", MOE, text, num_local_experts=4, sliding_window=8),
    # state space, recurrent
    hf(
        "mamba",
        "MambaForCausalLM",
        {},
        text,
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        use_cache=False,
    ),
    hf(
        "mamba2",
        "Mamba2ForCausalLM",
        {},
        text,
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        head_dim=8,
        num_heads=4,
        n_groups=1,
        chunk_size=8,
        use_cache=False,
    ),
    hf(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        {},
        text,
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        use_cache=False,
    ),
    hf(
        "rwkv",
        "RwkvForCausalLM",
        {},
        few_words,
        vocab_size=VOCABULARY,
        hidden_size=16,
        attention_hidden_size=16,
        num_hidden_layers=2,
        use_cache=False,
    ),
    hf(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        DECODER,
        text,
        lru_width=16,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        caches=True,
    ),
    hf(
        "jamba",
        "JambaForCausalLM",
        MOE,
        text,
        mamba_d_state=4,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
    # detection and segmentation by masks
    hf(
        "yolos",
        "YolosForObjectDetection",
        VISION,
        detected,
        image_size=[64, 64],
        num_detection_tokens=4,
        assumes=MATCHED,
    ),
    hf(
        "detr",
        "DetrForObjectDetection",
        ENCODER_DECODER,
        detected,
        num_queries=4,
        num_labels=LABELS,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "out_features": ["stage2"],
        },
        caches=True,
        assumes=MATCHED,
    ),
    hf(
        "maskformer",
        "MaskFormerForInstanceSegmentation",
        {},
        lambda: {
            "pixel_values": torch.zeros(BATCH, 3, 32, 32),
            "mask_labels": [torch.zeros(2, 32, 32) for _ in range(BATCH)],
            "class_labels": [tokens(2) for _ in range(BATCH)],
        },
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=LABELS,
        decoder_config={"model_type": "detr", **ENCODER_DECODER, "num_queries": 4},
        backbone_config={
            "model_type": "swin",
            "embed_dim": 8,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 1, 1],
            "window_size": 2,
            "patch_size": 4,
            "image_size": 32,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        caches=True,
        assumes=MATCHED,
    ),
    # series
    hf(
        "patchtst",
        "PatchTSTForPrediction",
        {},
        lambda: {"past_values": torch.zeros(BATCH, 16, 2), "future_values": torch.zeros(BATCH, 4, 2)},
        num_input_channels=2,
        context_length=16,
        prediction_length=4,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
    ),
)


def plain(name: str, build: Callable[[], tuple[Any, ...]], **states: Any) -> Entry:
    return Entry(name=name, build=build, **states)


def by_name(kind: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """A function from parameters to an optimizer of torch."""
    return lambda parameters: getattr(torch.optim, kind)(parameters, **settings)


TORCH = (
    plain("lstm", recurrent(nn.LSTM), assumes=RESERVE),
    plain("lstm, batch first", recurrent(nn.LSTM, batch_first=True), assumes=RESERVE),
    plain("lstm, bidirectional", recurrent(nn.LSTM, bidirectional=True, num_layers=2), assumes=RESERVE),
    plain("lstm, dropout", recurrent(nn.LSTM, num_layers=2, dropout=0.1), assumes=RESERVE),
    plain("lstm, projected", recurrent(nn.LSTM, proj_size=2), assumes=RESERVE),
    plain("lstm, no bias", recurrent(nn.LSTM, bias=False), assumes=RESERVE),
    plain("gru", recurrent(nn.GRU, num_layers=2, batch_first=True), assumes=RESERVE),
    plain("rnn", recurrent(nn.RNN, nonlinearity="relu"), assumes=RESERVE),
    plain("cells", cells),
    plain("packed sequence", packed, assumes="cuDNN saves the gates"),
    plain("packed sequence by the batch", packed_by_batch, assumes="every batch has the values of '1'"),
    plain("custom function", simple(custom_function)),
    plain("in place", simple(in_place)),
    plain("control flow on shapes", simple(control_flow_on_shapes)),
    plain("control flow on values", simple(control_flow_on_values), refused=r"plain_models.py:\d+; rewrite that line"),
    plain("a check of values", simple(a_check_of_values), assumes=CHECKS),
    plain("known values", simple(known_values)),
    plain("numbers of the batch", simple(numbers_of_the_batch), refused=r"plain_models.py:\d+; rewrite that line"),
    plain("full backward hook", full_backward_hook),
    plain("failing module hook", failing_hook(registered_first=True), refused="hook does not like this gradient"),
    plain("failing tensor hook", failing_hook(registered_first=False), refused="hook does not like this gradient"),
    plain("batch norm, cumulative", batch_norm),
    plain("embedding", embedded(sparse=False)),
    plain(
        "sparse embedding",
        embedded(sparse=True),
        assumes="sparse gradients are small",
        optimizer=by_name("SGD", lr=0.1),
    ),
    plain(
        "sparse embedding alone",
        embedded(sparse=True, head=False),
        assumes="sparse gradients are small",
        optimizer=by_name("SparseAdam"),
    ),
    plain("sparse embedding, adamw", embedded(sparse=True), refused="does not support sparse gradients"),
    plain("weight tying", lambda: (Tied(), torch.zeros(BATCH, TOKENS, dtype=torch.long))),
    plain("nested output, several losses", nested),
    plain("transformer of torch", torch_transformer),
    plain("multihead attention", multihead_attention),
    plain("ctc", ctc),
    plain("u-net", u_net),
    plain("sgd", plain_linear, optimizer=by_name("SGD", lr=0.1, momentum=0.9)),
    plain("adafactor", plain_linear, optimizer=by_name("Adafactor")),
    plain("asgd", plain_linear, optimizer=by_name("ASGD")),
    plain("adagrad", plain_linear, optimizer=by_name("Adagrad")),
    plain("rmsprop", plain_linear, optimizer=by_name("RMSprop")),
    plain("rprop", plain_linear, optimizer=by_name("Rprop")),
    plain("radam", plain_linear, optimizer=by_name("RAdam")),
    plain("nadam", plain_linear, optimizer=by_name("NAdam")),
    plain("adamax", plain_linear, optimizer=by_name("Adamax")),
    plain("adadelta", plain_linear, optimizer=by_name("Adadelta")),
    plain("adam, fused", plain_linear, optimizer=by_name("Adam", fused=True)),
    plain("adam, capturable", plain_linear, optimizer=by_name("Adam", capturable=True)),
    plain(
        "adamw, learning rate as a tensor",
        plain_linear,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1)),
    ),
    plain("lbfgs", plain_linear, optimizer=by_name("LBFGS"), refused="closure"),
)
"""Models in plain PyTorch, and optimizers."""
