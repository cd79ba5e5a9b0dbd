"""A recording that is lengthened by the layers that were left out is what a recording of all layers is."""

from __future__ import annotations

import pytest
import torch

from planner.derive.graft_optimizer import graft_update
from planner.derive.shortening import runs_to_shorten
from planner.plan_types.decisions import Accumulation, Optimizer, Precision, ShardedPrecision, StepInBackward
from planner.recording.repeats.layer_runs import KEPT, KEPT_WHEN_GATHERED, layer_runs
from planner.rewrite.rehearse import start_update
from planner.sharded import smallest_way
from planner.space.sharding import Cards
from planner.workload.workload import Workload
from tests.support.lengthening import LAYERS, assert_equal, layers, shortened, shortening, with_all_layers
from tests.support.workloads import BARE, transformer, what_if

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "num_hidden_layers": LAYERS,
}
GPT2 = {"n_layer": LAYERS, "n_embd": 64, "n_head": 4, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1}
MODELS = {
    "llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "roberta": ("RobertaForMaskedLM", SMALL),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **SMALL,
            "num_hidden_layers": LAYERS + 2,
            "first_k_dense_replace": 2,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "d_model": 64,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": 128,
        },
    ),
}
SPLIT = Accumulation(micro_batch_size=2, micro_batches=2)
CASES = {
    "fp32": ((), (4,)),
    "bf16": ((Precision(dtype="bf16"),), (4,)),
    "fp16": ((Precision(dtype="fp16"),), (4,)),
    "micro-batches": ((SPLIT,), (2, 2)),
    "step in backward": ((Precision(dtype="bf16"), StepInBackward()), (4,)),
    "8-bit step in backward": ((StepInBackward(), Optimizer()), (4,)),
}


def model(name: str, batch_size: int = 4, **others) -> Workload:
    head, settings = MODELS[name]
    return transformer(name, head, batch_size=batch_size, seq_len=32, **(settings | others))


def on_cards(work: Workload, cards: Cards) -> Workload:
    """Returns the step of one of the cards, with the sharding that divides the most."""
    return smallest_way(work, BARE, cards)[0]


@pytest.mark.slow
@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_the_lengthened_recording_is_the_recorded_one(name, case):
    assert_lengthened(model(name), *CASES[case])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("decisions", "sizes"),
    [((), (4,)), ((ShardedPrecision(),), (4,)), ((SPLIT,), (2, 2))],
    ids=["fp32", "bf16", "micro-batches"],
)
@pytest.mark.parametrize("cards", [Cards(count=8), Cards(count=8, mesh=(2, 4))], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["llama", "roberta"])
def test_a_recording_under_fsdp2_is_lengthened(name, cards, decisions, sizes):
    work = on_cards(model(name, batch_size=32, num_hidden_layers=2 * KEPT_WHEN_GATHERED + 1), cards)
    assert_lengthened(work, decisions, sizes)


def assert_lengthened(work: Workload, decisions, sizes) -> None:
    runs = runs_to_shorten(work)
    assert runs
    assert shortening(work).is_right()
    longer = with_all_layers(shortened(work, decisions, sizes=sizes), work)
    full = what_if(work, decisions, sizes=sizes)
    assert longer is not None
    if full.update_tick is None:  # the updates are inside of the backward
        assert longer.update_tick is None
        assert_equal(longer, full)
    else:
        update = start_update(work, [d for d in decisions if d is not SPLIT], BARE, full.trained).result()
        assert_equal(graft_update(longer, update), graft_update(full, update))
    assert longer.module_types == full.module_types
    assert set(longer.trained) == set(full.trained)


# ---- models that cannot be shortened ----------------------------------------------------------------------------


def test_a_model_of_plain_layers_is_lengthened():
    work = layers("one after the other")
    longer, full = with_all_layers(shortened(work), work), what_if(work)
    assert longer is not None
    update = start_update(work, (), BARE, full.trained).result()
    assert_equal(graft_update(longer, update), graft_update(full, update))


@pytest.mark.parametrize("way", ["every third is doubled", "every other is wider inside", "all outputs are summed"])
def test_layers_that_are_used_differently_or_together_are_not_lengthened(way):
    work = layers(way)
    assert with_all_layers(shortened(work), work) is None


def test_runs_are_found_by_structure():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            same = torch.nn.Linear(8, 8)
            self.shared = torch.nn.ModuleList([same] * LAYERS)
            self.few = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2 * KEPT - 1))
            self.mixed = torch.nn.Sequential(
                torch.nn.Linear(8, 16), *(torch.nn.Linear(16, 16) for _ in range(2 * KEPT)), torch.nn.Linear(16, 8)
            )

    (run,) = layer_runs(Net())
    assert (run.container, run.first, run.layers) == ("mixed", 1, 2 * KEPT)
    assert run.left_out == KEPT


def test_recordings_with_buckets_of_gradients_have_all_layers():
    work = model("gpt2", batch_size=16)
    assert not runs_to_shorten(on_cards(work, Cards(count=8, way="ddp")))
    assert not runs_to_shorten(on_cards(work, Cards(count=8, way="zero1")))
