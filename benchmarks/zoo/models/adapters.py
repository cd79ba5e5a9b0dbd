"""Every method of peft on a small language model, and methods in combination with other layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Case, single

BATCH, TOKENS, WORDS = 2, 16, 96
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "POLY": {"r": 4, "n_tasks": 2, "n_skills": 2},
    "ADALORA": {"total_step": 10, "tinit": 1, "tfinal": 1},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5]},
    "FOURIERFT": {"n_frequency": 16},
    "VBLORA": {"num_vectors": 16, "vector_length": 4},
    "OFT": {"oft_block_size": 4},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "WAVEFT": {"n_frequency": 16},
    "PSOFT": {"r": 8},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "MISS": {"r": 4},
}
"""Settings that a method needs, by its name in `peft.PeftType`."""
TARGETS = ["q_proj", "v_proj"]


def cases() -> Iterator[Case]:
    """Yields one case for each method of peft, and some more for LoRA."""
    import peft

    for method in peft.PeftType:
        yield Case(library="peft", name=method.value.lower(), candidates=single(lambda m=method: adapted(m)))
    for name, more in LORA.items():
        yield Case(
            library="peft", name=f"lora, {name}", candidates=single(lambda s=more: adapted(peft.PeftType.LORA, **s))
        )


LORA: dict[str, dict[str, Any]] = {
    "all linear layers": {"target_modules": "all-linear"},
    "dropout": {"lora_dropout": 0.1},
    "weight decomposition": {"use_dora": True},
    "rank-stabilized": {"use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head trained": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "lora_only"},
}
"""Settings of LoRA that people use."""


def adapted(method: Any, **more: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a small Llama with adapters, and a batch of random tokens."""
    import transformers
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    settings = {**SETTINGS.get(method.value, {}), **more}
    if (
        method.value != "ADAPTION_PROMPT"
        and "target_modules" not in settings
        and "target_modules" in config_class.__dataclass_fields__
    ):
        settings["target_modules"] = TARGETS
    if method.value == "TRAINABLE_TOKENS":
        settings["target_modules"] = ["embed_tokens"]
    model = get_peft_model(model, config_class(task_type="CAUSAL_LM", **settings))
    tokens = torch.randint(3, WORDS, (BATCH, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if method.value in ("MULTITASK_PROMPT_TUNING", "POLY"):
        batch["task_ids"] = torch.tensor([0, 1])
    return model, batch
