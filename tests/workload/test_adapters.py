"""LoRA on full and on 4-bit weights: a config is planned as the model that peft and `from_pretrained` make of it."""

from __future__ import annotations

import ast
import json
import sys

import pytest
import torch

import planner
from planner import adapted as adapting
from planner import cli, profiles, rewrite
from planner.errors import TimeLimitError, WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import Plan
from planner.progress import Watch
from planner.workload.adapters import adapted
from planner.workload.loading import load_workload
from planner.workload.workload import workload
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
    """Returns the workload of a folder, or of a function."""
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


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}),
        ("BertForMaskedLM", {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}),
        ("T5ForConditionalGeneration", {"d_model": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}),
    ],
)
def test_models_with_transposed_layers_biases_and_other_tasks_get_adapters(kind, config, tmp_path):
    model_class = getattr(transformers, kind)
    model_class(model_class.config_class(vocab_size=100, **config)).to(torch.bfloat16).save_pretrained(tmp_path)
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    users = model_class.from_pretrained(tmp_path, quantization_config=options)
    users = peft.prepare_model_for_kbit_training(users, use_gradient_checkpointing=False)
    users = peft.get_peft_model(users, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for with_weights in (False, True):
        task = loaded(tmp_path, Adapter(rank=4, targets=("all-linear",), is_quantized=True), with_weights=with_weights)
        assert fingerprint(task.model) == fingerprint(users)
    assert task.model(**task.batch).loss.isfinite()


def test_4_bit_weights_of_transposed_layers_give_nearly_the_same_output():
    config = transformers.GPT2Config(n_embd=128, n_layer=1, n_head=4, n_positions=64, vocab_size=100)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(32)[None]
    full = model(input_ids=tokens).logits
    packed = adapted(model, Adapter(rank=4, targets=("all-linear",), is_quantized=True), dtype="float32").eval()
    assert torch.cosine_similarity(full.flatten(), packed(input_ids=tokens).logits.flatten(), 0) > 0.95


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"peft_type": "LORA", ', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"peft_type": ["LORA"]}', "'peft_type' is"),
        ('{"peft_type": "LORA", "r": "sixteen"}', "'r' is 'sixteen'"),
        ('{"peft_type": "LORA", "base_model_name_or_path": 7}', "'base_model_name_or_path' is 7"),
        ('{"peft_type": "NEW"}', "cannot be added to LlamaForCausalLM: KeyError"),
        ('{"r": 8}', "cannot be added to LlamaForCausalLM: TypeError"),
        ('{"peft_type": "LORA", "target_modules": "a(b"}', "cannot be added to LlamaForCausalLM: "),
    ],
)
def test_a_damaged_adapter_config_is_refused_with_the_reason(folder, text, message, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(WorkloadError, match=message):
        loaded(folder, Adapter.parsed(str(tmp_path), is_quantized=False, is_dora=False))


@pytest.mark.slow
@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("option", ["--qlora=8:q_proj,v_proj", "--lora=SAVED", "--lora=8", "--lora=4 --dora"])
def test_the_command_plans_and_the_files_it_writes_build_the_same_model(folder, saved, option, tmp_path, capsys):
    option = option.replace("SAVED", str(saved))
    plan_path, emitted = tmp_path / "plan.json", tmp_path / "step.py"
    sizes = ["--batch-size", "2", "--seq-len", "32", "--gpu", "bare", "--vram", "100MiB"]
    files = ["--save", str(plan_path), "--emit", str(emitted)]
    assert cli.main([str(folder), *option.split(), *sizes, *files]) == 0
    shown = capsys.readouterr().out
    assert "them trained" in shown and ("DoRA" if "dora" in option else "LoRA") in shown
    plan = Plan.load(plan_path)
    written = imported(emitted)
    model = written.build(str(folder))
    assert fingerprint(model) == plan.model.fingerprint
    written.check(model, written.synthetic_batch("cpu"))
    assert all(len(line) <= 120 for line in emitted.read_text().splitlines())
    ast.parse(emitted.read_text())
    assert cli.main([str(plan_path), "--vram", "100MiB"]) == 0  # the saved plan is rehearsed again
    batch = {"input_ids": torch.randint(500, (2, 32))}
    step = rewrite.apply(plan, model.train()).step
    before = {name: value.clone() for name, value in model.named_parameters()}
    step(batch | {"labels": batch["input_ids"]})
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed and all("lora" in name or "modules_to_save" in name for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["SequenceClassification", "QuestionAnswering"])
@pytest.mark.thorough_after(1)
def test_the_head_that_adapters_train_is_not_quantized(task, tmp_path):
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    getattr(transformers, f"BertFor{task}")(config).save_pretrained(tmp_path)
    plan_path, emitted = tmp_path / "plan.json", tmp_path / "step.py"
    files = ["--save", str(plan_path), "--emit", str(emitted)]
    assert (
        cli.main([str(tmp_path), "--qlora=8", "--seq-len=8", "--gpu=bare", "--vram=100MiB", "--fidelity=exact", *files])
        == 0
    )
    model = imported(emitted).build(str(tmp_path))
    assert fingerprint(model) == Plan.load(plan_path).model.fingerprint
    head = "classifier" if task.startswith("Sequence") else "qa_outputs"
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad and head in name}
    assert len(trained) == 2 and set(trained.values()) == {torch.float32}


@pytest.mark.parametrize("is_quantized", [False, True], ids=["LoRA", "QLoRA"])
def test_adapters_of_a_model_without_values_get_no_values(is_quantized, monkeypatch):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG)
    fill, devices = torch.nn.init.kaiming_uniform_, []

    def noted(tensor, *arguments, **options):
        devices.append(tensor.device.type)
        return fill(tensor, *arguments, **options)

    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", noted)
    adapted(model, Adapter(rank=8, targets=("all-linear",), is_quantized=is_quantized), dtype="float32")
    assert devices and set(devices) == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4},
        {"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj"]},
    ],
    ids=lambda settings: settings["peft_type"],
)
def test_saved_adapters_of_other_methods_keep_the_values_that_peft_reads(settings, folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM", **settings}))
    sizes = ["--batch-size", "2", "--seq-len", "32", "--gpu", "bare", "-q"]
    assert cli.main([str(folder / "config.json"), "--lora", str(tmp_path), *sizes]) == 0


@pytest.mark.slow
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


def small_llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(CONFIG)


@pytest.mark.parametrize(
    ("reference", "is_quantized", "message"),
    [
        ("tests.fixtures.models:flat", False, "is not a transformers model: add adapters yourself"),
        (f"{__name__}:small_llama", True, "--qlora does not apply: load the weights in 4 bits there"),
    ],
)
def test_a_function_of_the_users_can_be_given_adapters_if_it_returns_a_transformers_model(
    reference, is_quantized, message
):
    with pytest.raises(WorkloadError, match=message):
        loaded(reference, Adapter(rank=8, is_quantized=is_quantized))
    assert loaded(f"{__name__}:small_llama", Adapter(rank=8)).model_facts().architecture == "LlamaForCausalLM"


# ---- saved adapters ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """A folder of adapters whose settings the options of the command cannot state."""
    path = tmp_path_factory.mktemp("adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=8, lora_dropout=0.1, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(path)
    return path


def test_saved_adapters_are_planned_as_peft_loads_them(folder, saved):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    users = peft.PeftModel.from_pretrained(base, saved, is_trainable=True)
    trained = {name for name, p in users.named_parameters() if p.requires_grad}
    for reference, adapter in ((saved, None), (folder, Adapter.parsed(str(saved), is_quantized=False, is_dora=False))):
        task = loaded(reference, adapter)
        assert fingerprint(task.model) == fingerprint(users)
        assert {name for name, p in task.model.named_parameters() if p.requires_grad} == trained
    assert loaded(folder, Adapter.saved(str(saved), is_quantized=True)).adapter.option == ("--qlora", str(saved))


def test_saved_adapters_whose_model_is_not_found_are_refused(saved, tmp_path):
    config = json.loads((saved / "adapter_config.json").read_text())
    for base, message in (
        ("./nowhere", "are for './nowhere': .* give plan BASE_MODEL --lora"),
        ("", "plan BASE_MODEL"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(WorkloadError, match=message):
            loaded(tmp_path, None)


# ---- adapters that the planner chooses --------------------------------------------------------------------------

WIDE = transformers.LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=2000,
)  # fmt: skip


def wide_llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(WIDE)


@pytest.mark.parametrize(("vram", "quantized"), [("26MiB", False), pytest.param("18MiB", True, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_adapters_are_trained_if_nothing_else_fits(vram, quantized):
    """The budget is below what all weights, their gradients and states need, and above what adapters need."""
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "labels": torch.zeros(1, 8, dtype=torch.long)}
    options = {"vram": vram, "gpu": "bare", "only": ["checkpoint"]}
    plan = planner.plan(wide_llama(), batch, fidelity="adapted", **options)
    assert plan.fits and plan.fidelity == "adapted" and "adapters are trained instead" in plan.notes[0]
    assert plan.model.adapter.is_quantized == quantized
    if not quantized:
        refused = planner.plan(wide_llama(), batch, **options)
        step = refused.shortfall.next_step
        assert not refused.fits and step.relax == "--fidelity adapted, with LoRA of rank 16 for all-linear"
        assert step.total_bytes == plan.peak.total_bytes
        config = peft.LoraConfig(**plan.model.adapter.lora_options("LlamaForCausalLM"))
        users = peft.get_peft_model(wide_llama(), config)
        assert fingerprint(users) == plan.model.fingerprint
        rewrite.apply(plan, users).step(batch)
        other = peft.LoraConfig(**plan.model.adapter.lora_options("LlamaForCausalLM") | {"lora_alpha": 8})
        with pytest.warns(UserWarning, match="lora_alpha=8, and those of the plan lora_alpha=32"):
            rewrite.apply_for_trainer(plan, peft.get_peft_model(wide_llama(), other))


def test_a_search_that_finds_nothing_for_the_weights_leaves_time_for_both_adapters(monkeypatch):
    tried, watch = [], Watch(seconds=1000)

    def out_of_time(workload, *_, watch, **__):
        tried.append((workload.adapter and workload.adapter.is_quantized, watch.left_seconds))
        raise TimeLimitError("the time was up")

    monkeypatch.setattr(adapting, "plan_that_fits", out_of_time)
    monkeypatch.setattr(adapting.pipeline, "plan_workload", out_of_time)
    ids = torch.zeros(1, 8, dtype=torch.long)
    work = workload(wide_llama(), {"input_ids": ids, "labels": ids})
    constraints = parse_constraints(fidelity="adapted", force=(), forbid=())
    with pytest.raises(TimeLimitError):
        adapting.plan_or_adapt(work, profiles.load("bare"), vram_bytes=1 << 24, constraints=constraints, watch=watch)
    assert [adapter for adapter, _ in tried] == [None, False, True, None]
    assert [round(left, -2) for _, left in tried] == [500, 700, 1000, 1000]


def test_adapters_that_cannot_be_added_are_named_with_the_reason():
    model = wide_llama()
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "labels": torch.zeros(1, 8, dtype=torch.long)}
    plan = planner.plan(
        model, batch, vram="30MiB", gpu="bare", only=["checkpoint"], optimizer=torch.optim.AdamW(model.parameters())
    )
    rows = [row for row in plan.shortfall.relaxations if "adapted" in row.relax]
    assert [row.opens for row in rows] == [False]
    assert "name the optimizer instead" in rows[0].why
