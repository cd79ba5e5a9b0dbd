"""Which arguments of transformers' `Trainer` a plan sets, and which contradict it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import (
    Role,
    forward_dtype_of,
    micro_batch_size_of,
    micro_batches_of,
    optimizer_kernel_of,
    with_roles,
)
from planner.plan_types.plan import Plan
from planner.rewrite.trainer.on_cards import is_on_cards, sharding_arguments
from planner.workload.call_convention import Calling
from planner.workload.optimizer_choice import OPTIMIZERS

_FORMER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "eval_strategy": "evaluation_strategy",
    "use_cpu": "no_cuda",
}
"""Present name of an argument -> former name. A version of transformers has one of the two names, or both."""

_ANOTHER_STEP = {
    "activation_checkpointing": "the rewritten model already recomputes what the plan says",
    "auto_find_batch_size": "it would change the micro-batches and the effective batch size",
    "deepspeed": "the plan is for one card that holds the whole model",
    "fsdp": "the plan is for one card that holds the whole model",
    "label_smoothing_factor": "the Trainer then computes another loss than the model's, from all logits",
    "neftune_noise_alpha": "it adds noise to the embeddings, which was not planned",
    "torch_compile": "a compiled step takes other memory and time than the planned step",
    "use_liger_kernel": "it replaces parts of the model, its loss among them: plan with the patched model",
}
"""Arguments of the Trainer that must be off, each with the reason, because they change the step that was planned."""

_EIGHT_BIT = "adamw_bnb_8bit"
_ALIASES = {"adamw_8bit": _EIGHT_BIT}


def training_arguments(plan: Plan, *, kind: type | None = None, **overrides: Any) -> dict[str, Any]:
    """Returns keyword arguments for `transformers.TrainingArguments` that follow the plan.

    The plan sets the optimizer, its kernel and the precision of its state. Learning rate, betas, weight decay, schedule
    and `max_grad_norm` are the Trainer's defaults, or set by `overrides`.

    If the batch is not a multiple of the planned number of micro-batches, it is split further, because the Trainer's
    micro-batches all have the same size. The effective batch does not change, and memory is below the promise.

    Args:
        plan: the plan.
        kind: the class that takes the arguments; None for `transformers.TrainingArguments`.
        overrides: further arguments, by their present or former names in transformers.

    Raises:
        DecisionError: for an override that contradicts the plan, and for plans that the Trainer cannot follow.
        WorkloadError: for an argument that the class does not have.
    """
    refuse_what_trainers_cannot_do(plan)
    arguments_class: Any = kind
    if arguments_class is None:
        from transformers import TrainingArguments

        arguments_class = TrainingArguments
    names = {field.name for field in dataclasses.fields(arguments_class) if field.init}
    renamed = {_present_name(name): value for name, value in overrides.items()}
    if len(renamed) < len(overrides):
        raise DecisionError(
            f"two of these are names of the same argument: {', '.join(sorted(overrides))}; give only one of them"
        )
    if unknown := [name for name in overrides if _installed_name(_present_name(name), names) not in names]:
        raise WorkloadError(
            f"{arguments_class.__name__} has no argument '{unknown[0]}': correct the name or leave it out"
        )
    refuse_contradictions(plan, renamed)
    arguments = {**planned_arguments(plan), **renamed}
    if "train_sampling_strategy" not in names and "train_sampling_strategy" not in renamed:
        # Versions without this argument have `group_by_length`, and draw samples at random unless it is set.
        arguments.pop("train_sampling_strategy", None)
    return {_installed_name(name, names): value for name, value in arguments.items()}


def planned_arguments(plan: Plan) -> dict[str, Any]:
    """The arguments that the plan sets, by their present names."""
    size, count = micro_batches(plan)
    precision = forward_dtype_of(plan.decisions)
    optim = planned_optim(plan)
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": count,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **({} if optim is None else {"optim": optim}),
        **({"optim_args": "momentum=0.9"} if plan.workload.optimizer == "sgd-momentum" else {}),
        **({"weight_decay": 0.0} if plan.workload.optimizer == "adam" else {}),
        "activation_checkpointing": False,
        **(sharding_arguments(plan) if is_on_cards(plan) else {}),
        **_arguments_of_run(plan),
    }


def _arguments_of_run(plan: Plan) -> dict[str, Any]:
    """The arguments with which the Trainer's run is the planned one, by their present names; empty for a single step.

    The planned evaluation drops the logits of each batch, or keeps those of some samples on the card. With
    `prediction_loss_only` the Trainer drops them even if it has a function `compute_metrics`, and without
    `eval_accumulation_steps` it keeps them on the card.
    """
    source = None if plan.run is None else plan.run.source
    if source is None:
        return {}
    arguments: dict[str, Any] = {"train_sampling_strategy": "random"} if source.lengths else {}
    if source.eval_batch_size is not None:
        arguments["per_device_eval_batch_size"] = source.eval_batch_size
        arguments["prediction_loss_only"] = not source.eval_samples
        if source.eval_samples:
            arguments["eval_accumulation_steps"] = None
    return arguments


def planned_optim(plan: Plan) -> str | None:
    """Return the Trainer's name of the planned optimizer; None if it has none and the user passes `optimizers=`."""
    if any(decision.eight_bit_state for decision in plan.decisions):
        return _EIGHT_BIT
    known = OPTIMIZERS.get(plan.workload.optimizer)
    name = None if known is None else known.optim
    fused = optimizer_kernel_of(plan.decisions) == "fused"
    return "adamw_torch_fused" if fused and name == "adamw_torch" else name


def micro_batches(plan: Plan) -> tuple[int, int]:
    """Returns the number of samples in each of the Trainer's micro-batches, and the number of micro-batches.

    Raises:
        DecisionError: if the batch can be split evenly only into more than twice the planned number of micro-batches.
    """
    planned, size = micro_batches_of(plan.decisions), micro_batch_size_of(plan.decisions)
    samples = plan.workload.batch_size
    if size is None:
        return samples, 1
    count = next(n for n in range(planned, samples + 1) if samples % n == 0)
    if count > 2 * planned:
        whole = planned * size
        raise DecisionError(
            f"the plan splits a batch of {samples} into {planned} micro-batches of {size} (the last is smaller), "
            f"and the Trainer's micro-batches all have the same size: plan for a batch of {whole}, or use rewrite.apply"
        )
    return samples // count, count


def refuse_contradictions(plan: Plan, arguments: Mapping[str, Any]) -> None:
    """Raise `DecisionError` if an argument contradicts the plan. Former names of arguments are not looked up."""
    planned = planned_arguments(plan)
    for name, reason in _ANOTHER_STEP.items():
        if arguments.get(name) and not planned.get(name):
            raise DecisionError(f"{name}={arguments[name]!r} contradicts the plan: {reason}; leave it out")
    for name, value in planned.items():
        if name not in arguments or _plain(arguments[name]) == value:
            continue
        if name == "gradient_accumulation_steps" and plan.workload.gradients_alive and not arguments[name] % value:
            continue  # the plan is for a loop that accumulates over any number of batches
        raise DecisionError(
            f"{name}={_plain(arguments[name])!r} contradicts the plan, which has {value!r} ({_set_by(plan, name)}): "
            "leave it out, or make the plan again for this value"
        )


def arguments_of(args: Any) -> dict[str, Any]:
    """Return the arguments in a `TrainingArguments` that concern a plan, except `optim`, by their present names."""
    loop = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16")
    names = set(vars(args))
    return {name: getattr(args, _installed_name(name, names), None) for name in (*loop, *_ANOTHER_STEP)}


def refuse_what_trainers_cannot_do(plan: Plan) -> None:
    """Raise `DecisionError` or `WorkloadError` for a plan that the Trainer cannot follow, whatever its arguments."""
    is_on_cards(plan)
    if any(decision.steps_in_backward for decision in plan.decisions):
        raise DecisionError(
            "the Trainer cannot do step-in-backward, because it steps after backward: plan with step-in-backward "
            "forbidden (--forbid step-in-backward), or use rewrite.apply"
        )
    if plan.workload.has_loss_fn:
        raise WorkloadError(
            "the plan was made with a loss function, and the Trainer uses the loss that the model returns: let "
            "the model return it and plan without loss_fn, or use rewrite.apply"
        )
    if plan.workload.calling != Calling.KEYWORDS.name:
        raise WorkloadError(
            "the Trainer passes batches by keyword, and the plan was made with another kind of batch: plan with a dict "
            "as batch, or use rewrite.apply"
        )


def _set_by(plan: Plan, name: str) -> str:
    """Return text for an error message: the part of the plan that sets an argument."""
    roles = {
        "per_device_train_batch_size": (Role.MICRO_BATCHING,),
        "gradient_accumulation_steps": (Role.MICRO_BATCHING,),
        "bf16": (Role.PRECISION,),
        "fp16": (Role.PRECISION,),
        "optim": (Role.OPTIMIZER,),
    }
    decided = [decision.describe() for decision in with_roles(plan.decisions, *roles.get(name, ()))]
    batch = f"a batch of {plan.workload.batch_size}, optimizer {plan.workload.optimizer}"
    return "; ".join([*decided, batch])


def _present_name(name: str) -> str:
    return next((present for present, former in _FORMER_NAMES.items() if name == former), name)


def _installed_name(name: str, names: set[str]) -> str:
    """Return the name, out of `names`, that the installed class of arguments uses for an argument."""
    return name if name in names else _FORMER_NAMES.get(name, name)


def _plain(value: Any) -> Any:
    """Replace a member of an enumeration by its value, and an alias of an optimizer by the optimizer's usual name."""
    value = getattr(value, "value", value)
    return _ALIASES.get(value, value) if isinstance(value, str) else value
