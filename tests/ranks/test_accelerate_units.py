"""The units and the settings of accelerate and the Trainer: ours, compared with what their own code makes of them."""

from __future__ import annotations

import pytest
import torch
import transformers
import yaml

from planner.errors import WorkloadError
from planner.plan_types.decisions import Shard
from planner.space.accelerate_units import blocks_of
from planner.space.sharding import Cards, repeated_blocks, shardings
from tests.support.accelerate_ranks import wrapped_by_accelerate

SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "d_model": 16, "num_key_value_heads": 2, "n_layer": 2, "n_head": 2, "n_embd": 16, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_layers": 2, "num_heads": 2,
    "d_kv": 8, "d_ff": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "ffn_dim": 32, "head_dim": 8, "dim": 16,
    "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 8,
    "max_position_embeddings": 32, "word_embed_proj_dim": 16, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "qwen2": "Qwen2ForCausalLM", "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "opt": "OPTForCausalLM", "gpt_neox": "GPTNeoXForCausalLM", "bert": "BertForMaskedLM",
    "roberta": "RobertaForSequenceClassification", "t5": "T5ForConditionalGeneration", "distilbert": "DistilBertForMaskedLM",
    "bart": "BartForConditionalGeneration", "bloom": "BloomForCausalLM", "phi": "PhiForCausalLM", "vit": "ViTForImageClassification",
}  # fmt: skip


def built(name: str, tied: bool = False) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(name, **SMALL, tie_word_embeddings=tied)
    with torch.device("meta"):
        return getattr(transformers, MODELS[name])(config)


def planned(model: torch.nn.Module) -> Shard:
    (shard,) = shardings(model, Cards(count=2, way="fsdp", prepared_by="accelerate"))
    return shard


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_units_are_those_that_accelerate_makes(name, tied):
    model = built(name, tied)
    shard = planned(model)
    assert shard.classes == tuple(sorted({type(model.get_submodule(path)).__name__ for path in repeated_blocks(model)}))
    calls = wrapped_by_accelerate(model, shard.classes)
    *units, last = calls
    tail = [units.pop()] if shard.tail else []
    assert [(names, keeps) for names, keeps in units] == [((name,), True) for name in shard.units]
    assert tail == ([(shard.tail, False)] if shard.tail else [])
    assert last == (("",), None)
