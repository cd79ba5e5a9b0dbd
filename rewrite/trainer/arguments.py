"""The arguments of transformers' `Trainer` that follow from a plan, and those that contradict it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import (
    Role,
    autocast_dtype_of,
    micro_batch_size_of,
    micro_batches_of,
    optimizer_kernel_of,
    with_roles,
)
from planner.plan_types.plan import Plan
from planner.workload.call_convention import Calling

_ONCE_CALLED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "eval_strategy": "evaluation_strategy",
    "use_cpu": "no_cuda",
}
"""Arguments by their name of today, with the one before. The Trainer that is installed has one of the two, or both."""

_ANOTHER_STEP = {
    "activation_checkpointing": "the rewritten model recomputes what the plan says by itself",
    "auto_find_batch_size": "it would train with other micro-batches than planned, and another effective batch",
    "deepspeed": "the plan is for one card that holds the whole model",
    "fsdp": "the plan is for one card that holds the whole model",
    "label_smoothing_factor": "the Trainer then takes another loss than the model's, from all logits",
    "neftune_noise_alpha": "it adds noise to the embeddings, which was not planned",
    "torch_compile": "it makes another step than the planned one",
    "use_liger_kernel": "it replaces parts of the model, its loss among them: plan with the patched model",
}
"""Arguments that must be off, and why."""

_NAMES = {"adamw": "adamw_torch", "adam": "adamw_torch", "sgd": "sgd", "sgd-momentum": "sgd", "adagrad": "adagrad",
          "rmsprop": "rmsprop"}  # fmt: skip
"""The Trainer's word (`optim`) by ours."""

_EIGHT_BIT = "adamw_bnb_8bit"
_ALIASES = {"adamw_8bit": _EIGHT_BIT}


def training_arguments(plan: Plan, *, kind: type | None = None, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments for `transformers.TrainingArguments` that train as planned.

    Of the optimizer the plan decides the kind, its kernel and the size of its state; learning rate, betas, decay and
    schedule are the Trainer's as ever. So is `max_grad_norm`.

    Where the batch is no multiple of the planned number of micro-batches it is split further, since the Trainer's
    micro-batches are all of one size: the effective batch stays, and memory is below what was promised.

    Args:
        plan: by Python or from a file.
        kind: the class that takes the arguments; None takes `transformers.TrainingArguments`.
        overrides: further arguments, under the names that transformers has for them today or had before.

    Raises:
        DecisionError: for an override that contradicts the plan, and for plans that the Trainer cannot follow.
        WorkloadError: for an argument that the class does not have.
    """
    refuse_what_trainers_cannot_do(plan)
    if kind is None:
        from transformers import TrainingArguments as kind
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    given = {_of_today(name): value for name, value in overrides.items()}
    if len(given) < len(overrides):
        raise DecisionError(f"an argument is given under both of its names: {', '.join(sorted(overrides))}")
    if unknown := [name for name in overrides if _installed(_of_today(name), names) not in names]:
        raise WorkloadError(f"{kind.__name__} has no argument '{unknown[0]}'")
    refuse_contradictions(plan, given)
    arguments = {**planned_arguments(plan), **given}
    return {_installed(name, names): value for name, value in arguments.items()}


def planned_arguments(plan: Plan) -> dict[str, Any]:
    """What the plan leaves no choice about, under today's names."""
    size, count = micro_batches(plan)
    precision = autocast_dtype_of(plan.decisions)
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
    }


def planned_optim(plan: Plan) -> str | None:
    """The Trainer's word for the planned optimizer. None for one without a name: give the Trainer `optimizers=`."""
    if any(decision.eight_bit_state for decision in plan.decisions):
        return _EIGHT_BIT
    name = _NAMES.get(plan.workload.optimizer)
    fused = optimizer_kernel_of(plan.decisions) == "fused"
    return "adamw_torch_fused" if fused and name == "adamw_torch" else name


def micro_batches(plan: Plan) -> tuple[int, int]:
    """Samples in each of the Trainer's micro-batches, and how many make up the planned batch.

    Raises:
        DecisionError: where the batch can only be split into more than twice as many as planned.
    """
    planned, size = micro_batches_of(plan.decisions), micro_batch_size_of(plan.decisions)
    samples = plan.workload.batch_size
    if size is None:
        return samples, 1
    count = next(n for n in range(planned, samples + 1) if samples % n == 0)
    if count > 2 * planned:
        whole = planned * size
        raise DecisionError(
            f"accumulation plans {planned} micro-batches of {size} samples for a batch of {samples}, and the "
            f"Trainer's micro-batches are all of one size: plan for a batch of {whole}, or use rewrite.apply, whose "
            "last one may be smaller"
        )
    return samples // count, count


def refuse_contradictions(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raises `DecisionError` for the first argument, under today's name, that the plan says otherwise about."""
    for name, why in _ANOTHER_STEP.items():
        if given.get(name):
            raise DecisionError(f"{name}={given[name]!r} contradicts the plan: {why}; leave it out")
    for name, planned in planned_arguments(plan).items():
        if name not in given or _plain(given[name]) == planned:
            continue
        if name == "gradient_accumulation_steps" and plan.workload.gradients_alive and not given[name] % planned:
            continue  # planned for a loop that accumulates as often as it likes
        raise DecisionError(
            f"{name}={_plain(given[name])!r} contradicts the plan, which has {planned!r} ({_where_from(plan, name)}): "
            "leave it out, or plan again for it"
        )


def arguments_of(args: Any) -> dict[str, Any]:
    """Of a `TrainingArguments`, what a plan has a say in, under today's names. The optimizer is looked at itself."""
    loop = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16")
    names = set(vars(args))
    return {name: getattr(args, _installed(name, names), None) for name in (*loop, *_ANOTHER_STEP)}


def refuse_what_trainers_cannot_do(plan: Plan) -> None:
    """Raises `DecisionError` or `WorkloadError` for plans that no arguments make the Trainer follow."""
    if any(decision.steps_in_backward for decision in plan.decisions):
        raise DecisionError(
            "step-in-backward cannot be done by the Trainer, which steps after backward: plan with step-in-backward "
            "forbidden (--forbid step-in-backward), or use rewrite.apply"
        )
    if plan.workload.has_loss_fn:
        raise WorkloadError(
            "the plan was made with a loss function, and the Trainer takes the loss that the model returns: let the "
            "model return it and plan without loss_fn, or use rewrite.apply"
        )
    if plan.workload.calling != Calling.KEYWORDS.name:
        raise WorkloadError(
            "the Trainer passes batches by keyword, and the plan was made with another kind of batch: plan with a dict"
        )


def _where_from(plan: Plan, name: str) -> str:
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


def _of_today(name: str) -> str:
    return next((today for today, before in _ONCE_CALLED.items() if name == before), name)


def _installed(name: str, names: set[str]) -> str:
    """The name that the class at hand has for an argument of today."""
    return name if name in names else _ONCE_CALLED.get(name, name)


def _plain(value: Any) -> Any:
    """Enumerations by their value, and one word for each optimizer."""
    value = getattr(value, "value", value)
    return _ALIASES.get(value, value) if isinstance(value, str) else value
