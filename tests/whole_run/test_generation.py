"""Generations between the steps of a run, with `generate` of transformers in inference mode."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import planner

NEW_TOKENS = 6
OPTIONS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beam search": {"num_beams": 2, "early_stopping": True, "do_sample": False},
}


def model() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.thorough_after(1)
def test_texts_are_generated_to_their_largest_length(name):
    tokens = torch.randint(1, 500, (4, 16))
    prompt = torch.randint(1, 500, (4, 8))

    def generate(model: nn.Module) -> None:
        model.eval()
        with torch.inference_mode():
            made = model.generate(prompt.to("cuda"), max_new_tokens=NEW_TOKENS, **OPTIONS[name])
        if made.shape[1] != 8 + NEW_TOKENS:
            raise ValueError(f"ends after {made.shape[1]} tokens")
        model.train()

    plan = planner.plan(
        model(),
        {"input_ids": tokens, "labels": tokens},
        vram="1GiB",
        gpu="rtx-3060",
        between=[generate],
        progress=False,
    )
    assert plan.run.moments[-1].name == "generate"
    assert any("generated texts have the largest length" in note for note in plan.notes)
