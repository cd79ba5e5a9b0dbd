"""accelerate's benchmark of FSDP2: Qwen2.5-1.5B on eight cards.

Source: github.com/huggingface/accelerate, `benchmarks/fsdp2` (March 2025), which shows its code and a plot of reserved
memory over time on 8 x H100. Weights in fp32, gathered in bf16, gradients reduced in bf16, bf16 autocast, outputs
converted to fp32, AdamW, 2 x 128 tokens on each card (the script's defaults). Units are decoder layers and the rest.

The figures are read from the plot, whose axis says GB and means MiB, within 20 MiB. The script trains four times in one
process. The first training starts with an empty allocator; the one with accelerate is the last, and starts with 200 MiB
that are still reserved. The plot of allocated memory is left out: it has a point every 10 ms, and can miss the peak.
Not known: the version of torch, and whether the run that was plotted used the script's defaults.
"""

from __future__ import annotations

import torch

from benchmarks.published.several_cards.rows import MIB, Measure, Row

CARDS, SAMPLES, TOKENS, STEPS = 8, 2, 128, 3


def sharded(device: torch.device) -> torch.nn.Module:
    """Returns the model with the shards of one rank on the device."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model: torch.nn.Module = Qwen2ForCausalLM(config)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16
    )  # fmt: skip
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model.to_empty(device=device)


def train(device: torch.device) -> None:
    """Takes some steps of the first rank."""
    model = sharded(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for _ in range(STEPS):
        ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            output = model(input_ids=ids, labels=ids)
        output.logits, loss = output.logits.float(), output.loss.float()
        loss.backward()
        optimizer.step()


ROWS = tuple(
    Row(
        setting=f"Qwen2.5-1.5B, FSDP2, bf16, {name}",
        cards=CARDS,
        card="h100",
        measure=Measure.RESERVED,
        published=published,
        unit_bytes=MIB,
        program=train,
    )
    for name, published in (("torch", 6_630), ("accelerate", 7_055))
)
