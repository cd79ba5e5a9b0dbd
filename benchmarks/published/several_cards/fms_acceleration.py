"""fms-acceleration's benchmark: Mistral-7B with all weights and with LoRA, under FSDP on two cards.

Source: github.com/foundation-model-stack/fms-acceleration, `scripts/benchmarks/refs`, the rows without another
framework of `a100_80gb_update_cross_entropy_and_deps.csv` (February 2025: torch 2.4.1, transformers 4.48.1, accelerate
1.0.1, peft 0.13.2, flash-attn 2.7.3), and its `accelerate.yaml` (no mixed precision). Two A100 80GB; weights in bf16,
checkpointed blocks, AdamW. Each row has the peak of allocated bytes, as transformers' Trainer reports it.

All samples have 4096 tokens: between batches of 2 and of 4 the allocated bytes at the end differ by 196,608, which are
three int64 tensors of 2 x 4096. The loss is written after transformers 4.48, which copies the logits to fp32 and shifts
them. LoRA has rank 16 on the four projections of attention, dropout 0.1, and adapters in fp32, as peft makes them.

Not the same as in the source: FSDP2 instead of FSDP1 (one flat parameter for each block, and for each adapter matrix),
kernels of torch 2.13, its flash attention instead of that of flash-attn, non-reentrant checkpoints. Not known: why the
published runs on two cards take 0.40 GB more for each sample of LoRA than those on one card (3.41 and 3.01 GB). It may
be FSDP1 that holds the logits in the backward: they are 0.26 GB, and in an earlier file of the source, in which they
were fp32 and 0.52 GB, the difference is 0.71 GB.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.published.several_cards.rows import MB, Measure, Row

TOKENS, CARDS, STEPS = 4096, 2, 3
PUBLISHED = {
    (False, 2): 36_225.940,
    (False, 4): 36_226.137,
    (True, 2): 15_144.870,
    (True, 4): 21_959.828,
}
"""Whether adapters are trained, samples on each card -> peak of allocated MB."""


def mistral(*, is_lora: bool) -> Any:
    """Returns Mistral-7B-v0.1 in bf16 on the meta device, with checkpointed blocks."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32_768, sliding_window=4096, tie_word_embeddings=False,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = MistralForCausalLM(config).bfloat16()
        if is_lora:
            from peft import LoraConfig, get_peft_model

            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets))
            model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model.train()


class WithLoss(torch.nn.Module):
    """Tokens [samples, tokens] -> the loss of transformers 4.48 (`ForCausalLMLoss`), inside of FSDP's last unit."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=ids)
        logits = output.logits.float()
        shifted, targets = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), targets.view(-1))


def sharded(device: torch.device, *, is_lora: bool) -> torch.nn.Module:
    """Returns the model with the shards of one rank on the device."""
    from torch.distributed.fsdp import fully_shard
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

    model = WithLoss(mistral(is_lora=is_lora))
    for layer in [module for module in model.modules() if isinstance(module, MistralDecoderLayer)]:
        fully_shard(layer)
    fully_shard(model)
    return model.to_empty(device=device)


def train(device: torch.device, *, is_lora: bool, samples: int) -> None:
    """Takes some steps of the first rank."""
    model = sharded(device, is_lora=is_lora)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=2e-5)
    for _ in range(STEPS):
        ids = torch.zeros(samples, TOKENS, dtype=torch.long).to(device)
        model(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


ROWS = tuple(
    Row(
        setting=f"Mistral-7B, {'LoRA' if is_lora else 'all weights'}, {samples} x {TOKENS} on each card, FSDP",
        cards=CARDS,
        card="a100-80gb",
        measure=Measure.ALLOCATED,
        published=published,
        unit_bytes=MB,
        program=functools.partial(train, is_lora=is_lora, samples=samples),
        imported=("bitsandbytes", "peft") if is_lora else (),
    )
    for (is_lora, samples), published in PUBLISHED.items()
)
