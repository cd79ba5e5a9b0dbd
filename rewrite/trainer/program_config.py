"""Configs for programs that train with transformers' `Trainer` in their own loop: axolotl and LLaMA-Factory.

A config names everything that changes the memory of the step: what the plan decides, and what the program would
otherwise choose. The keys are those of axolotl 0.19 (`src/axolotl/utils/schemas`) and LLaMA-Factory 0.9.5
(`src/llamafactory/hparams`).
"""

from __future__ import annotations

import json
import pathlib
import textwrap
from typing import Any

from planner.errors import WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.decision_base import ALLOCATOR_VARIABLE, allocator_conf
from planner.plan_types.plan import Plan, TrainingProgram
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.rewrite.emitter.quoted import remark
from planner.rewrite.trainer.arguments import planned_arguments

_MULTIPLE = 8
"""LLaMA-Factory pads samples to a multiple of this number of tokens."""


def program_config(plan: Plan) -> str:
    """Returns the text of a YAML config with which the program that the plan was made for trains by the plan.

    Raises:
        WorkloadError: the samples are too short for the program.
        DecisionError: the batch cannot be split as planned into micro-batches of the same size.
    """
    program = plan.model.program
    assert program is not None, "only a plan for a program has a config"
    settings, missing = (_axolotl if program.name == "axolotl" else _llama_factory)(plan, program)
    values = (f"{key}: {_value(value)}\n" for key, value in settings.items())
    return f"{_header(plan, program, missing)}\n{''.join(values)}"


def _value(value: Any) -> str:
    """Returns a value in JSON, which is YAML if characters that are not printable are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _header(plan: Plan, program: TrainingProgram, missing: str) -> str:
    """Returns comment lines: the plan, its memory, and what the user must add."""
    workload = plan.workload
    tokens = f" x {counted(workload.seq_len, 'token')}" if workload.seq_len else ""
    size = f"batch {workload.batch_size}{tokens}"
    total = f"{format_size(plan.peak.total_bytes)} predicted"
    budget = "" if plan.vram_bytes is None else f" of {format_size(plan.vram_bytes)}"
    lines = [
        f"Config for {program.name}: {plan.model.architecture or plan.model.name}, {size}, {workload.optimizer}.",
        f"Memory of a training step: {total}{budget}, certified by rehearsal; evaluation is not planned.",
        *([] if plan.fits else ["THE PLAN DOES NOT FIT into the budget."]),
        f"To add: {missing}.",
        *_environment(plan, program),
    ]
    return "".join(f"# {part}\n" for line in lines for part in textwrap.wrap(remark(line), 110))


def _environment(plan: Plan, program: TrainingProgram) -> list[str]:
    """Returns how to set the planned options of the allocator. axolotl chooses others unless its variable is set."""
    planned = allocator_conf(plan.decisions, plan.alloc_conf)
    if program.name == "axolotl":
        conf = planned or "expandable_segments:False"
        return [f"Start it with {ALLOCATOR_VARIABLE}={conf}, because axolotl otherwise sets expandable_segments:True."]
    return [f"Start it with {ALLOCATOR_VARIABLE}={planned}."] if planned else []


def _axolotl(plan: Plan, program: TrainingProgram) -> tuple[dict[str, Any], str]:
    """Returns the settings for axolotl, and what the user must add."""
    arguments, adapter = planned_arguments(plan), plan.model.adapter
    checkpointing = program.gradient_checkpointing
    settings: dict[str, Any] = {
        "base_model": _weights(plan),
        **({} if adapter is None else _axolotl_adapter(adapter, program)),
        "bf16": arguments["bf16"],
        "fp16": arguments["fp16"],
        "tf32": False,
        "attn_implementation": program.attention,
        "sequence_len": plan.workload.seq_len,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "micro_batch_size": arguments["per_device_train_batch_size"],
        "gradient_accumulation_steps": arguments["gradient_accumulation_steps"],
        "gradient_checkpointing": checkpointing,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpointing else {}),
        "activation_offloading": False,
        "optimizer": arguments["optim"],
        **_of_the_optimizer(arguments),
    }
    return settings, "datasets, learning_rate, num_epochs and output_dir"


def _axolotl_adapter(adapter: Adapter, program: TrainingProgram) -> dict[str, Any]:
    return {
        "adapter": "qlora" if adapter.is_quantized else "lora",
        "load_in_4bit": adapter.is_quantized,
        **({"embeddings_skip_upcast": False} if adapter.is_quantized else {}),
        "lora_r": adapter.rank,
        "lora_alpha": 2 * adapter.rank,
        "lora_dropout": 0.0,
        "lora_target_modules": list(program.targets),
        **({"peft_use_dora": True} if adapter.is_dora else {}),
        **{f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")},
    }


def _llama_factory(plan: Plan, program: TrainingProgram) -> tuple[dict[str, Any], str]:
    """Returns the settings for LLaMA-Factory, and what the user must add."""
    arguments, adapter = planned_arguments(plan), plan.model.adapter
    tokens = plan.workload.seq_len or _MULTIPLE
    if tokens < _MULTIPLE:
        raise WorkloadError(
            f"LLaMA-Factory pads samples to {_MULTIPLE} tokens: plan with --seq-len {_MULTIPLE} or more"
        )
    settings: dict[str, Any] = {
        "model_name_or_path": _weights(plan),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if adapter is None else "lora",
        **({} if adapter is None else _llama_factory_adapter(adapter, program)),
        "bf16": arguments["bf16"],
        "fp16": arguments["fp16"],
        "pure_bf16": adapter is None and plan.model.dtype == "bfloat16",
        "upcast_layernorm": False,
        "upcast_lmhead_output": False,
        "flash_attn": "disabled" if program.attention == "eager" else program.attention,
        "enable_liger_kernel": False,
        "use_unsloth": False,
        "cutoff_len": tokens - tokens % _MULTIPLE,
        "packing": False,
        "per_device_train_batch_size": arguments["per_device_train_batch_size"],
        "gradient_accumulation_steps": arguments["gradient_accumulation_steps"],
        "disable_gradient_checkpointing": not program.gradient_checkpointing,
        "use_reentrant_gc": False,
        "optim": arguments["optim"],
        **_of_the_optimizer(arguments),
    }
    return settings, "dataset, template, learning_rate, num_train_epochs and output_dir"


def _llama_factory_adapter(adapter: Adapter, program: TrainingProgram) -> dict[str, Any]:
    quantization = {
        "quantization_method": "bnb",
        "quantization_bit": 4,
        "quantization_type": "nf4",
        "double_quantization": True,
    }
    return {
        "lora_rank": adapter.rank,
        "lora_alpha": 2 * adapter.rank,
        "lora_dropout": 0.0,
        "lora_target": ",".join(program.targets),
        **({"use_dora": True} if adapter.is_dora else {}),
        **(quantization if adapter.is_quantized else {}),
    }


def _of_the_optimizer(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("optim_args", "weight_decay") if name in arguments}


def _weights(plan: Plan) -> str:
    """Returns the folder or hub id from which the weights are loaded."""
    assert plan.model.reference is not None, "a plan for a program is for a transformers model by name"
    path = pathlib.Path(plan.model.reference)
    return str(path.parent if path.suffix.lower() == ".json" else path)
