"""The units and the settings of accelerate and the Trainer: ours, compared with what their own code makes of them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from planner import pipeline, profiles
from planner.checkpointed_ways import with_checkpointed
from planner.cli.training_lines import training_lines
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Accumulation, Decision, OptimizerKernel, Precision, Shard, ShardedPrecision
from planner.plan_types.plan import Plan
from planner.recompute.units import whole_modules
from planner.rewrite.trainer.apply import apply_for_trainer
from planner.rewrite.trainer.arguments import training_arguments
from planner.rewrite.trainer.on_cards import accelerate_config
from planner.space.accelerate_units import blocks_of
from planner.space.search_space import search_space
from planner.space.sharding import Cards, repeated_blocks, shardings
from planner.workload.workload import Workload, workload
from tests.support.accelerate_ranks import launcher_environment, plugin, wrapped_by_accelerate

ANYTHING = parse_constraints(fidelity="rounded", force=(), forbid=(), only=None, max_slowdown=None, margin=None)
SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "d_model": 16, "num_key_value_heads": 2, "n_layer": 2, "n_head": 2, "n_embd": 16, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_layers": 2, "num_heads": 2,
    "d_kv": 8, "d_ff": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "ffn_dim": 32, "head_dim": 8, "dim": 16,
    "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 8,
    "max_position_embeddings": 32, "word_embed_proj_dim": 16, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "bart": "BartForConditionalGeneration", "bert": "BertForMaskedLM", "bloom": "BloomForCausalLM",
    "distilbert": "DistilBertForMaskedLM", "gemma2": "Gemma2ForCausalLM", "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM",
    "opt": "OPTForCausalLM", "phi": "PhiForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "roberta": "RobertaForSequenceClassification", "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
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


def test_units_of_a_model_with_adapters_are_those_that_accelerate_makes():
    model = peft.get_peft_model(built("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    shard = planned(model)
    *units, tail, last = wrapped_by_accelerate(model, shard.classes)
    assert units == [((name,), True) for name in shard.units]
    assert (tail, last) == ((shard.tail, False), (("",), None))


@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_checkpointed_modules_are_those_that_accelerate_wraps(name):
    model = built(name)
    shard = planned(model)
    blocks = blocks_of(model, shard.classes)
    state = SimpleNamespace(fsdp_plugin=plugin(shard.classes))
    fsdp2_apply_ac(SimpleNamespace(state=state), model)
    inner = "._checkpoint_wrapped_module"
    assert sorted(blocks) == sorted(
        path.removesuffix(inner) for path, _ in model.named_modules() if path.endswith(inner)
    )


def test_a_model_without_repeated_blocks_has_the_units_of_a_policy_that_wraps_nothing():
    model = torch.nn.Linear(4, 4)
    shard = planned(model)
    assert (shard.classes, shard.units, shard.tail) == ((), (), ())
    assert wrapped_by_accelerate(model, ()) == [(("",), None)]


def test_a_model_that_has_no_embeddings_to_ask_for_is_refused():
    class Odd(torch.nn.Linear):
        def get_input_embeddings(self):
            raise NotImplementedError

    with pytest.raises(WorkloadError, match="accelerate asks Odd for its embeddings"):
        shardings(Odd(4, 4), Cards(count=2, prepared_by="accelerate"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"way": "zero1"}, "accelerate offers ZeRO-1 only by DeepSpeed"),
        ({"mesh": (2, 2)}, "a mesh"),
        ({"offload": True}, "shards in host"),
    ],
)
def test_ways_that_accelerate_does_not_have_or_that_are_not_planned_are_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        Cards(count=4, prepared_by="accelerate", **arguments)


# ---- activation checkpointing -------------------------------------------------------------------------------------


def ways(dropout: float, **options: bool) -> tuple[Workload, ...]:
    config = transformers.AutoConfig.for_model("llama", **SMALL, attention_dropout=dropout)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.zeros(2, 8, dtype=torch.long)
    work = workload(model, {"input_ids": ids, "labels": ids})
    return with_checkpointed(
        [
            dataclasses.replace(work, sharding=(way,))
            for way in shardings(model, Cards(count=2, prepared_by="accelerate"))
        ],
        profiles.bare(),
        None,
        **options,
    )


def test_each_way_is_tried_without_and_with_activation_checkpointing():
    kinds = [tuple(decision.kind for decision in work.sharding) for work in ways(0.0)]
    assert kinds == 3 * [("shard",), ("shard", "checkpoint")]


def test_blocks_with_dropout_are_not_checkpointed_with_fsdp():
    found = ways(0.1)
    assert [len(work.sharding) for work in found] == [1, 2, 1, 1]  # only copies of the model are checkpointed
    assert "in its forward, and 'model.layers.0.self_attn' draws random numbers" in found[-1].notes[-1]


def test_forced_activation_checkpointing_is_the_only_way_or_refused():
    assert [work.sharding[0].way for work in ways(0.1, is_forced=True)] == ["ddp"]
    work = dataclasses.replace(ways(0.1)[-1], notes=())
    with pytest.raises(DecisionError, match="forced, but there is no activation checkpointing with FSDP2"):
        with_checkpointed([work], profiles.bare(), None, is_forced=True)


# ---- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "card", "expected"), [
    ("fsdp", "a100-80gb", ShardedPrecision(reduce_dtype="bf16", without_autocast=True)),
    ("fsdp", "t4", None),
    ("ddp", "a100-80gb", Precision(dtype="bf16")),
    ("ddp", "t4", Precision(dtype="fp16")),
])  # fmt: skip
def test_precision_is_that_of_accelerate(way, card, expected):
    work = divided_in(way)
    space = search_space(work, profiles.load(card), ANYTHING, batch_statistics=(), chunks=None)
    assert {decision for choice in space.precisions for decision in choice} == ({expected} if expected else set())
    assert (expected is not None) or "accelerate uses no autocast with FSDP2" in " ".join(space.notes)


def test_autocast_that_is_forced_with_fsdp_is_refused():
    forced = dataclasses.replace(ANYTHING, forced=(*ANYTHING.forced, "mixed-precision"))
    with pytest.raises(DecisionError, match="accelerate uses no autocast with FSDP2"):
        search_space(divided_in("fsdp"), profiles.load("a100-80gb"), forced, batch_statistics=(), chunks=None)


def divided_in(way: str) -> Workload:
    model = built("llama")
    ids = torch.zeros(2, 8, dtype=torch.long)
    work = workload(model, {"input_ids": ids, "labels": ids})
    return dataclasses.replace(work, sharding=shardings(model, Cards(count=2, way=way, prepared_by="accelerate")))


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = built("llama")
    ids = torch.zeros(2, 8, dtype=torch.long)
    work = workload(model, {"input_ids": ids, "labels": ids})
    divided = dataclasses.replace(work, sharding=(planned(model),))
    return pipeline.plan_workload(divided, profiles.bare(), vram_bytes=None, constraints=ANYTHING)


def with_decisions(plan: Plan, shard: Shard, *more: Decision) -> Plan:
    return dataclasses.replace(plan, decisions=(shard, *more))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_both_libraries_read_what_the_plan_says(plan, keeps, checkpoints, is_bf16, monkeypatch):
    shard = planned(built("llama"))
    shard = dataclasses.replace(shard, kept=shard.units if keeps else ())
    more = [Accumulation(micro_batch_size=1, micro_batches=2)]
    more += [whole_modules(("model.layers.0", "model.layers.1"))] if checkpoints else []
    more += [ShardedPrecision(reduce_dtype="bf16", without_autocast=True)] if is_bf16 else []
    chosen = with_decisions(plan, shard, *more)
    # transformers' Trainer, whose arguments set a variable of the environment
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    arguments = transformers.TrainingArguments(**training_arguments(chosen, output_dir="out"), use_cpu=True)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (1, 2)
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert (arguments.mixed_precision, arguments.use_cache) == ("bf16" if is_bf16 else "no", False)
    by_trainer = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    # accelerate's launcher
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "accelerate.yaml")
        path.write_text(accelerate_config(chosen))
        config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes, config.num_machines) == ("FSDP", 2, 1)
    assert set(config.fsdp_config) == {f"fsdp_{name}" for name in (*LAUNCHED, "version", "offload_params")}
    for name, value in launcher_environment(accelerate_config(chosen)).items():
        if name.startswith(("FSDP", "ACCELERATE")):
            monkeypatch.setenv(name, value)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == ("bf16" if is_bf16 else "no")
    by_launcher = FullyShardedDataParallelPlugin()
    for read in (by_trainer, by_launcher):
        assert read.fsdp_version == 2 and read.reshard_after_forward is not keeps
        assert read.activation_checkpointing is checkpoints and read.cpu_ram_efficient_loading
        assert read.auto_wrap_policy is transformer_auto_wrap_policy
        assert read.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
        assert read.cpu_offload == OffloadPolicy()
    # AcceleratorState.__init__ sets the policy from the precision
    if is_bf16:
        by_trainer.set_mixed_precision("bf16")
        assert dataclasses.astuple(by_trainer.mixed_precision_policy)[:3] == 3 * (torch.bfloat16,)


LAUNCHED = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "reshard_after_forward", "activation_checkpointing",
    "cpu_ram_efficient_loading",
)  # fmt: skip


def test_copies_of_the_model_have_settings_of_their_own(plan):
    shard = Shard(way="ddp", mesh=(16,), prepared_by="accelerate")
    chosen = with_decisions(plan, shard, Precision(dtype="bf16"), whole_modules(("model.layers.0", "model.layers.1")))
    settings = training_arguments(chosen, output_dir="out")
    arguments = transformers.TrainingArguments(**settings, use_cpu=True)
    assert arguments.activation_checkpointing and arguments.activation_checkpointing_kwargs == {"use_reentrant": False}
    assert arguments.ddp_find_unused_parameters is False and arguments.fsdp_plugin_args is None and arguments.bf16
    config = yaml.safe_load(accelerate_config(chosen, machines=2))
    assert "fsdp_config" not in config and config["distributed_type"] == "MULTI_GPU"
    assert "# To add on each machine: its machine_rank" in accelerate_config(chosen, machines=2)
    assert (config["num_processes"], config["num_machines"], config["mixed_precision"]) == (16, 2, "bf16")


def test_a_plan_that_neither_library_follows_is_refused(plan):
    other = with_decisions(plan, Shard(way="fsdp", mesh=(2,), units=("model.layers.0",)))
    for use in (accelerate_config, training_arguments):
        with pytest.raises(DecisionError, match="2 cards in another way than the Trainer and accelerate do"):
            use(other)
    with pytest.raises(DecisionError, match="the Trainer itself prepares the model for several cards"):
        apply_for_trainer(with_decisions(plan, planned(built("llama"))), built("llama"))


def test_an_argument_that_contradicts_the_plan_is_refused(plan):
    chosen = with_decisions(plan, planned(built("llama")))
    with pytest.raises(DecisionError, match="fsdp=False contradicts the plan"):
        training_arguments(chosen, fsdp=False)


def test_lines_train_on_the_planned_cards(plan):
    fused = OptimizerKernel(kernel="fused")
    chosen = with_decisions(plan, planned(built("llama")), Accumulation(micro_batch_size=1, micro_batches=2), fused)
    trainer, accelerate = (training_lines(chosen, loop, None) for loop in ("trainer", "accelerate"))
    for text in (trainer, accelerate):
        compile(text, "lines", "exec")
    assert 'os.environ["ACCELERATE_USE_FSDP"] = "true"' in trainer and "torchrun --nproc-per-node 2" in trainer
    assert "'transformer_layer_cls_to_wrap': ['LlamaDecoderLayer']" in trainer and "apply_for_trainer" not in trainer
    assert "num_steps=2, sync_each_batch=True" in accelerate and "lr=1e-4, fused=True" in accelerate
    with pytest.raises(DecisionError, match="loop does not prepare a model for several cards"):
        training_lines(chosen, "loop", None)
