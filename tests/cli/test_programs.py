"""`--for axolotl` and `--for llama-factory` write configs with which these programs train by the plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
import yaml

from planner import for_program, pipeline
from planner.cli.command import main
from planner.errors import PlanFileError, WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decision_base import micro_batches_of
from planner.plan_types.plan import Plan, TrainingProgram
from planner.progress import Watch
from planner.rewrite import apply, emit
from planner.rewrite.on_gpu.worker import workload_of
from planner.workload.cards import resolve_card
from planner.workload.loading import load_workload
from planner.workload.programs import PROGRAMS
from planner.workload.programs.program import Wish

pytestmark = pytest.mark.slow

KEYS = {
    "axolotl": """
        activation_offloading adapter attn_implementation base_model bf16 embeddings_skip_upcast fp16
        gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs load_in_4bit lora_alpha
        lora_dropout lora_embedding_kernel lora_mlp_kernel lora_o_kernel lora_qkv_kernel lora_r lora_target_modules
        micro_batch_size optim_args optimizer pad_to_sequence_len peft_use_dora sample_packing sequence_len tf32
        weight_decay
    """.split(),
    "llama-factory": """
        bf16 cutoff_len disable_gradient_checkpointing do_train double_quantization enable_liger_kernel finetuning_type
        flash_attn fp16 gradient_accumulation_steps lora_alpha lora_dropout lora_rank lora_target model_name_or_path
        optim optim_args packing per_device_train_batch_size pure_bf16 quantization_bit quantization_method
        quantization_type stage upcast_layernorm upcast_lmhead_output use_dora use_reentrant_gc use_unsloth weight_decay
    """.split(),
}
"""Keys of the programs: axolotl 0.19.0, `AxolotlInputConfig.model_fields` (src/axolotl/utils/schemas/config.py);
LLaMA-Factory 0.9.5, the fields of `_TRAIN_ARGS` (src/llamafactory/hparams/parser.py)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the bfloat16 weights of a small language model."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def loaded(folder, name, *, gradient_checkpointing=False, adapter=None, **settings):
    return load_workload(
        str(folder),
        batch_size=4,
        seq_len=16,
        optimizer="adamw",
        adapter=adapter,
        program=None if name is None else TrainingProgram(name=name, gradient_checkpointing=gradient_checkpointing),
        **settings,
    )


ONLY = ("--optimizer", "adamw_torch_fused", "--only", "accumulation,mixed-precision,optimizer-kernel")
CASES = {
    "axolotl": (
        ["--lora", "4", *ONLY, "--vram", "750KiB"],
        "because no plan without it fits",
    ),
    "llama-factory": (["--dtype", "bfloat16", "--vram", "3MiB"], "which is faster"),
}
"""The options by program, and why the plan has gradient checkpointing."""
CHECKPOINTING = {
    "axolotl": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "llama-factory": {"disable_gradient_checkpointing": False, "use_reentrant_gc": False},
}
OTHERS = {
    "axolotl": {
        "bf16": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "optimizer": "adamw_torch_fused",
        "sequence_len": 67,
    },
    "llama-factory": {"bf16": False, "pure_bf16": True, "optim": "adamw_torch", "cutoff_len": 64},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough
def test_the_config_has_what_was_planned(name, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options, why = CASES[name]
    if "--lora" in options:
        pytest.importorskip("peft")
    sizes = ["--batch-size", "4", "--seq-len", "67", "--gpu", "bare"]
    outputs = ["--for", name, "--emit", "config.yaml", "--save", "plan.json", "--json"]
    assert main([str(folder), *sizes, *options, *outputs]) == 0
    plan, config = Plan.load("plan.json"), yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert plan.certified
    assert why in plan.notes[0]
    assert plan.model.program is not None
    assert plan.model.program.gradient_checkpointing
    assert config.keys() <= set(KEYS[name])
    assert config.items() >= (CHECKPOINTING[name] | OTHERS[name]).items()
    size = config["micro_batch_size" if name == "axolotl" else "per_device_train_batch_size"]
    assert config["gradient_accumulation_steps"] == micro_batches_of(plan.decisions) == 4 // size
    assert workload_of(plan, with_weights=False).model_facts() == plan.model  # what --verify trains
    data = plan.to_json()
    data["model"]["program"]["name"] = "unsloth"
    with pytest.raises(PlanFileError, match=r"model\.program\.name is 'unsloth'"):
        Plan.from_json(data)
    with pytest.raises(PlanFileError, match="config"):
        emit(plan, tmp_path / "step.py")
    with pytest.raises(PlanFileError, match="gradient checkpointing"):
        apply(plan, transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert main(["plan.json", "--emit", "step.py"]) == main(["plan.json", "--for", "trainer"]) == 2
    capsys.readouterr()


@pytest.mark.thorough
def test_without_a_batch_size_the_batch_is_as_large_as_its_baseline_fits(folder, tmp_path, capsys):
    path = tmp_path / "plan.json"
    options = ["--seq-len", "8", "--gpu", "bare", "--vram", "4MiB", "--for", "axolotl", "--save", str(path), "--json"]
    assert main([str(folder), *options]) == 0
    plan = Plan.load(path)
    samples = plan.workload.batch_size
    assert samples > 1 and plan.baseline.total_bytes <= 4 << 20
    notes = [note for note in plan.notes if "no size was given" in note]
    assert len(notes) == 1 and notes[0].startswith(f"the batch has {samples} samples")
    assert "--largest-batch" not in notes[0]  # which is refused with --for axolotl
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "frozen"), [("axolotl", torch.bfloat16), ("llama-factory", torch.bfloat16), (None, torch.float32)]
)
def test_the_model_is_prepared_as_by_the_program(name, frozen, folder):
    """Only axolotl calls peft's `prepare_model_for_kbit_training`; it then converts most weights back to 16 bits."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    adapter = Adapter(rank=4, is_quantized=True)
    work = loaded(folder, name, adapter=adapter, gradient_checkpointing=True)
    named = dict(work.model.named_parameters())
    trained = {parameter.dtype for parameter in named.values() if parameter.requires_grad}
    whole = {
        parameter.dtype for part, parameter in named.items() if "norm" in part or "embed" in part or "head" in part
    }
    assert (trained, whole) == ({torch.float32}, {frozen})
    layers = work.model.get_base_model().model.layers
    assert all(layer.gradient_checkpointing is (name is not None) for layer in layers)
    assert bool(work.model.get_input_embeddings()._forward_hooks) is (name is not None)
    assert ("attention_mask" in work.batch) is (name is not None)
    assert work.model_facts().program == work.program
    assert work.program is None or work.program.targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("name", "wish", "message"),
    [
        ("axolotl", {"dtype": "bfloat16", "adapter": None}, "--dtype float32"),
        ("axolotl", {"dtype": "float16"}, "give --dtype bfloat16"),
        ("axolotl", {"dtype": "float32", "adapter": Adapter(rank=4, is_quantized=True)}, "leave --dtype out"),
        ("axolotl", {"adapter": Adapter(rank=4, folder="saved")}, "saved adapters"),
        ("axolotl", {"optimizer": "adafactor"}, "--optimizer"),
        ("llama-factory", {"dtype": "bfloat16", "adapter": None}, "--dtype float32"),
        ("llama-factory", {"dtype": "bfloat16"}, "leave --dtype out"),
    ],
)
def test_what_a_program_cannot_train_is_refused(name, wish, message):
    usual = {
        "adapter": Adapter(rank=4),
        "optimizer": "adamw",
        "dtype": None,
        "stored": "float32",
        "autocast": "bfloat16",
    }
    with pytest.raises(WorkloadError, match=message):
        PROGRAMS[name].terms(Wish(**{**usual, **wish}))


def test_only_language_models_are_trained(tmp_path):
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match="RobertaForMaskedLM"):
        loaded(tmp_path, "axolotl")


@pytest.mark.parametrize(
    ("plain", "checkpointed", "is_checkpointed", "note"),
    [(7, 9, False, "faster: 7.0 ms without"), (9, 7, True, "7.0 ms with it"), (7, None, False, "no plan with it fits")],
)
def test_the_faster_plan_is_taken(plain, checkpointed, is_checkpointed, note, folder, monkeypatch):
    monkeypatch.setattr(for_program, "micro_batches_of", lambda decisions: 2)
    work = loaded(folder, "axolotl")
    card = resolve_card("bare", None)
    constraints = parse_constraints(fidelity="rounded", force=(), forbid=())
    template = pipeline.plan_workload(work, card, vram_bytes=None, constraints=constraints)

    def plan_that_fits(workload, *_, **__):
        milliseconds = checkpointed if workload.program.gradient_checkpointing else plain
        if milliseconds is None:
            return None
        return dataclasses.replace(template, peak=dataclasses.replace(template.peak, step_ns=milliseconds * 10**6))

    monkeypatch.setattr(for_program, "plan_that_fits", plan_that_fits)
    plan, chosen = for_program.plan_for_program(
        "axolotl",
        lambda program: dataclasses.replace(work, program=program),
        card,
        vram_bytes=1 << 30,
        constraints=constraints,
        watch=Watch(),
    )
    assert note in plan.notes[0]
    assert chosen.program.gradient_checkpointing is is_checkpointed
