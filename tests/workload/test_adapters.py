"""LoRA on full and on 4-bit weights: a config is planned as the model that peft and `from_pretrained` make of it."""

from __future__ import annotations

import ast
import sys

import pytest
import torch

import planner
from planner import cli, rewrite
from planner.errors import WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import Plan
from planner.workload.loading import load_workload
from tests.support.training import imported

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes", exc_type=ImportError)

CONFIG = transformers.LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=500,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(path)
    return path


def loaded(folder, adapter, **options):
    return load_workload(str(folder), batch_size=2, seq_len=32, optimizer="adamw", adapter=adapter, **options)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["LoRA", "QLoRA"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "up_proj"), ("all-linear",)], ids=str)
def test_a_config_is_planned_as_the_users_model(folder, is_quantized, targets):
    adapter = Adapter(rank=8, targets=targets, is_quantized=is_quantized)
    options = {}
    if is_quantized:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    users = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    if is_quantized:
        users = peft.prepare_model_for_kbit_training(users, use_gradient_checkpointing=False)
    named = {"target_modules": "all-linear" if targets == ("all-linear",) else list(targets)} if targets else {}
    users = peft.get_peft_model(users, peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **named))
    for with_weights in (False, True):
        task = loaded(folder, adapter, with_weights=with_weights)
        assert fingerprint(task.model) == fingerprint(users)
        trained = {name for name, p in users.named_parameters() if p.requires_grad}
        assert {name for name, p in task.model.named_parameters() if p.requires_grad} == trained
        assert task.model_facts().trained_parameters == sum(p.numel() for p in users.parameters() if p.requires_grad)
    loss = task.model(**task.batch).loss
    loss.backward()
    assert loss.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--lora=8", "--qlora=8:q_proj,v_proj", "--lora=4 --dora"])
def test_the_command_plans_and_the_files_it_writes_build_the_same_model(folder, option, tmp_path, capsys):
    plan_path, emitted = tmp_path / "plan.json", tmp_path / "step.py"
    sizes = ["--batch-size", "2", "--seq-len", "32", "--gpu", "bare", "--vram", "100MiB"]
    files = ["--save", str(plan_path), "--emit", str(emitted)]
    assert cli.main([str(folder), *option.split(), *sizes, *files]) == 0
    shown = capsys.readouterr().out
    assert "them trained" in shown and ("DoRA" if "dora" in option else "LoRA") in shown
    plan = Plan.load(plan_path)
    model = imported(emitted).build(str(folder))
    assert fingerprint(model) == plan.model.fingerprint
    assert all(len(line) <= 120 for line in emitted.read_text().splitlines())
    ast.parse(emitted.read_text())
    assert cli.main([str(plan_path), "--vram", "100MiB"]) == 0  # the saved plan is rehearsed again
    batch = {"input_ids": torch.randint(500, (2, 32))}
    step = rewrite.apply(plan, model.train()).step
    before = {name: value.clone() for name, value in model.named_parameters()}
    step(batch | {"labels": batch["input_ids"]})
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed and all("lora" in name for name in changed)


def test_dora_on_4_bit_weights_is_planned_for_a_model_with_values(folder):
    adapter = Adapter(rank=4, is_quantized=True, is_dora=True)
    with pytest.raises(WorkloadError, match="plan your loaded model"):
        loaded(folder, adapter)
    task = loaded(folder, adapter, with_weights=True)
    batch = {name: value.cpu() for name, value in task.batch.items()}
    assert planner.plan(task.model, batch, vram="100MiB", gpu="bare").fits


def test_4_bit_weights_count_packed(folder):
    full = loaded(folder, Adapter(rank=8)).model_facts()
    packed = loaded(folder, Adapter(rank=8, is_quantized=True)).model_facts()
    assert packed.parameters == full.parameters
    assert packed.dtype == full.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(rank=8, targets=("nope",)), "give the names of its layers, as in 8:"),
    ],
)
def test_unknown_layers_are_refused_with_the_names_that_exist(folder, adapter, message):
    with pytest.raises(WorkloadError, match=message) as refused:
        loaded(folder, adapter)
    assert "q_proj" in str(refused.value)


@pytest.mark.parametrize("text", ["", "x", "0", "-4", "8:", "8:,", "1.5"])
def test_a_rank_is_a_positive_number(text):
    with pytest.raises(WorkloadError, match="is not a value of --lora: give a positive rank"):
        Adapter.parsed(text, is_quantized=False, is_dora=False)


def test_without_peft_the_message_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(WorkloadError, match="LoRA needs peft, which is not installed: pip install peft"):
        loaded(folder, Adapter(rank=8))


def test_adapters_need_a_transformers_model():
    with pytest.raises(WorkloadError, match="--lora and --qlora do not apply"):
        loaded("tests.fixtures.models:flat", Adapter(rank=8))
