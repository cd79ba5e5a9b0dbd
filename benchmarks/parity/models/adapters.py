"""Cases: adapters of peft, if that is installed."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from benchmarks.parity.case import Registry, adamw
from benchmarks.parity.models.transformers import DECODER, padded, shifted

CASES = Registry()
SKIPPED: list[str] = []
"""Reasons why cases are missing."""

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, dropout": {"lora_dropout": 0.2},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "LoRA and a trained head": {"modules_to_save": ["lm_head"]},
}


def adapted(options: dict[str, Any]) -> torch.nn.Module:
    """Returns a tiny Llama with adapters."""
    import peft
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


if importlib.util.find_spec("peft") is None:
    SKIPPED.append(f"{len(KINDS)} cases with adapters: peft is not installed")
else:
    for name, options in KINDS.items():
        CASES.add(f"peft: {name}", functools.partial(adapted, options), padded, optimizer=adamw, steps=3,
                  rounding=2e-4, terms=shifted, draws="lora_dropout" in options)  # fmt: skip
