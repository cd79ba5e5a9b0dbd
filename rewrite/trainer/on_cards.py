"""Settings with which transformers' `Trainer` and accelerate train on several cards as a plan says.

The `Trainer` prepares the model with accelerate, so that both train the same step: by FSDP2, or by
DistributedDataParallel. The settings are those of transformers 5.23 (`TrainingArguments._process_fsdp_args`) and
accelerate 1.15 (`accelerate.commands.launch`).

Two settings replace defaults under which the step would not be the planned one:

- Under FSDP2, accelerate keeps unsharded gradients until the last micro-batch (`no_sync`). With `sync_each_batch` it
  reduce-scatters them after each micro-batch.
- Under DistributedDataParallel, the `Trainer` searches for parameters without a gradient in each step. With
  `ddp_find_unused_parameters=False` it does not.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import (
    ALLOCATOR_VARIABLE,
    Role,
    allocator_conf,
    cards_of,
    forward_dtype_of,
    has_role,
    micro_batches_of,
    with_roles,
)
from planner.plan_types.decisions import Shard
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted

LIBRARY = "accelerate"


def is_on_cards(plan: Plan) -> bool:
    """True if the plan is for several cards, and accelerate prepares the model for them.

    Raises:
        DecisionError: the plan is for several cards, and accelerate would prepare the model in another way.
    """
    if cards_of(plan.decisions) == 1:
        return False
    if _shard(plan).preparing_library != LIBRARY:
        raise DecisionError(
            f"the plan divides the work among {cards_of(plan.decisions)} cards in another way than the Trainer and "
            "accelerate do: plan again with --for trainer or --for accelerate, or use rewrite.apply"
        )
    return True


def sharding_arguments(plan: Plan) -> dict[str, Any]:
    """Returns the arguments of `TrainingArguments` with which the Trainer trains on the planned cards.

    Args:
        plan: a plan for several cards that accelerate prepares.
    """
    if not is_fsdp(plan):
        recomputes = checkpoints(plan)
        return {
            "ddp_find_unused_parameters": False,
            "activation_checkpointing": recomputes,
            **({"activation_checkpointing_kwargs": {"use_reentrant": False}} if recomputes else {}),
        }
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, **_fsdp_settings(plan, _shard(plan))}}
    if micro_batches_of(plan.decisions) > 1:
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return arguments


def accelerate_config(plan: Plan, machines: int = 1) -> str:
    """Returns the text of the YAML file with which `accelerate launch --config_file` starts the planned processes.

    Args:
        plan: a plan that was made for accelerate, for one card or for several.
        machines: number of machines, with the same number of cards each.

    Raises:
        DecisionError: accelerate would not train on the cards as planned.
    """
    cards = cards_of(plan.decisions)
    is_sharded = is_on_cards(plan) and is_fsdp(plan)
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU" if cards > 1 else "NO",
        **({"fsdp_config": _launcher_settings(plan)} if is_sharded else {}),
        "machine_rank": 0,
        "main_training_function": "main",
        # A plan for one card sets the precision itself: see the lines of --for accelerate.
        "mixed_precision": (cards > 1 and forward_dtype_of(plan.decisions)) or "no",
        "num_machines": machines,
        "num_processes": cards,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    values = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())  # JSON is YAML
    return f"{_header(plan, machines)}\n{values}"


def _launcher_settings(plan: Plan) -> dict[str, Any]:
    """Returns the settings of FSDP2 by the names of the launcher, which reads the classes as one text."""
    settings = {"version": 2, **_fsdp_settings(plan, _shard(plan)), "offload_params": False}
    classes = "transformer_layer_cls_to_wrap"
    if classes in settings:
        settings[classes] = ",".join(settings[classes])
    return {f"fsdp_{name}": value for name, value in settings.items()}


def _fsdp_settings(plan: Plan, shard: Shard) -> dict[str, Any]:
    """Returns the settings of FSDP2 by the names of the Trainer."""
    return {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if shard.classes else "NO_WRAP",
        **({"transformer_layer_cls_to_wrap": list(shard.classes)} if shard.classes else {}),
        "reshard_after_forward": not shard.kept,
        "activation_checkpointing": checkpoints(plan),
        "cpu_ram_efficient_loading": True,
    }


def _header(plan: Plan, machines: int) -> str:
    """Returns comment lines: the plan, its memory, and how to start."""
    workload, cards = plan.workload, cards_of(plan.decisions)
    size = f"batch {workload.batch_size}" + (f" x {counted(workload.seq_len, 'token')}" if workload.seq_len else "")
    budget = "" if plan.vram_bytes is None else f" of {format_size(plan.vram_bytes)}"
    planned = allocator_conf(plan.decisions, plan.alloc_conf)
    lines = [
        f"Config for accelerate: {plan.model.architecture or plan.model.name}, {size} on each card, "
        f"{workload.optimizer}, {counted(cards, 'card')}.",
        f"Memory of a training step on each card: {format_size(plan.peak.total_bytes)} predicted{budget}, certified by "
        "rehearsal; evaluation is not planned.",
        *([] if plan.fits else ["THE PLAN DOES NOT FIT into the budget."]),
        f"{f'{ALLOCATOR_VARIABLE}={planned} ' if planned else ''}accelerate launch --config_file FILE train.py",
        *(
            ["To add on each machine: its machine_rank, and main_process_ip and main_process_port."]
            if machines > 1
            else []
        ),
    ]
    return "".join(f"# {part}\n" for line in lines for part in textwrap.wrap(line, 110))


def checkpoints(plan: Plan) -> bool:
    """True if all blocks are checkpointed."""
    return has_role(plan.decisions, Role.RECOMPUTE)


def is_fsdp(plan: Plan) -> bool:
    """True if parameters are divided among the cards."""
    return any(decision.divides_parameters_by > 1 for decision in plan.decisions)


def _shard(plan: Plan) -> Shard:
    """Returns the decision by which several cards train together."""
    shard = next(iter(with_roles(plan.decisions, Role.SHARDING)), None)
    if not isinstance(shard, Shard):
        raise WorkloadError("the plan is for one card: plan with --cards")
    return shard
