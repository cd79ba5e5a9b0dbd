"""Models that people try to fit: larger variants of those in `models`, with the same kinds of batches."""

from __future__ import annotations

import torch
import transformers

from benchmarks.card.models import Built, from_example, tokens


def roberta_1b(batch_size: int = 64, seq_len: int = 128) -> Built:
    """1.10 B parameters."""
    config = transformers.RobertaConfig(
        vocab_size=52_000,
        hidden_size=1500,
        num_hidden_layers=48,
        num_attention_heads=25,
        intermediate_size=4096,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    return transformers.RobertaForMaskedLM(config).train(), tokens(52_000, batch_size, seq_len), None


def gpt2_medium(batch_size: int = 8, seq_len: int = 512) -> Built:
    """355 M parameters."""
    return _gpt2(1024, 24, 16), tokens(50_257, batch_size, seq_len), None


def gpt2_xl(batch_size: int = 4, seq_len: int = 512) -> Built:
    """1.56 B parameters."""
    return _gpt2(1600, 48, 25), tokens(50_257, batch_size, seq_len), None


def _gpt2(width: int, layers: int, heads: int) -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def llama_8b(batch_size: int = 1, seq_len: int = 2048) -> Built:
    """8.03 B parameters."""
    return from_example("llama_8b", "LlamaForCausalLM"), tokens(128_000, batch_size, seq_len), None


def vit_large(batch_size: int = 64) -> Built:
    """304 M parameters."""
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    batch = {"pixel_values": torch.randn(batch_size, 3, 224, 224), "labels": torch.randint(1000, (batch_size,))}
    return transformers.ViTForImageClassification(config).train(), batch, None


def t5_base(batch_size: int = 16, seq_len: int = 512) -> Built:
    """223 M parameters."""
    config = transformers.T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32_128, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).train(), tokens(32_128, batch_size, seq_len), None


def whisper_small(batch_size: int = 8, seq_len: int = 128) -> Built:
    """242 M parameters; 30 seconds of audio per sample."""
    config = transformers.WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    labels = torch.randint(5, 50_000, (batch_size, seq_len))
    model = transformers.WhisperForConditionalGeneration(config).train()
    return model, {"input_features": torch.randn(batch_size, 80, 3000), "labels": labels}, None


def mixtral(batch_size: int = 8, seq_len: int = 512) -> Built:
    """522 M parameters, 8 experts, 2 of them active per token."""
    config = transformers.MixtralConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).train(), tokens(32_000, batch_size, seq_len), None
