"""Keep transformers' `Trainer`: the plan changes the model and the arguments, and the Trainer goes on to take the step.

    rewritten = rewrite.apply_for_trainer(plan, model)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**rewrite.training_arguments(plan, output_dir="out", learning_rate=5e-5)),
        callbacks=[rewrite.trainer_callback(rewritten)],
        train_dataset=dataset,
    )

Arguments come as a dict, since they go into subclasses as well (`Seq2SeqTrainingArguments`, TRL's `SFTConfig`).

Micro-batches: the Trainer leaves it to the model to divide its loss by the number of labels of all micro-batches. Many
models take that number (`num_items_in_batch`) and ignore it: `RobertaForMaskedLM` of transformers 5.23 trains with
gradients that are as many times too large as there are micro-batches. Models that do not take it are averaged as if all
micro-batches had as many labels. Here the number never reaches the model: the mean that it returns is weighted by its
share of the labels, so that any model trains as the Trainer would on the whole batch (`rewrite/loss_share.py`).

What the Trainer holds beyond what the plan counts: its running loss and other single numbers, a block of 512 B each; a
byte for each label, where they are counted; the norms of the gradients, which it takes also where it does not clip,
when no activation is alive (rehearsed, `examples/roberta_84m` at 8 x 32 has the same peaks with them); and for bf16 and
fp16 a copy in fp32 of all that the model returns in them (of logits: as large as the one that the loss has made and
freed by then). Evaluation is not planned: it makes the logits of a whole evaluation batch.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from planner.calling import Calling
from planner.decisions import Accumulation, Decision, Optimizer, OptimizerKernel, Precision, StepInBackward
from planner.errors import DecisionError, WorkloadError
from planner.plan_file import Plan
from rewrite.apply import change_by_rules, one_of_each_kind, refuse_another_model, turns_cache_off
from rewrite.loss_share import LossShare
from rewrite.rewriting import Change, Rewriting
from rewrite.rules.optimizer_kernel import OPTIONS, optimizer_kernel

if TYPE_CHECKING:
    from rewrite.plan_callback import PlanCallback

_OF_THE_OPTIMIZER = (Optimizer, OptimizerKernel, StepInBackward)

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


@final
class RewrittenForTrainer:
    """A model that is rewritten but for its step. `undo()` gives the model back as it was; trained weights stay."""

    def __init__(self, plan: Plan, rewriting: Rewriting, share: LossShare | None) -> None:
        self.plan = plan
        self.module = rewriting.model
        self.share = share
        """How micro-batches are weighted; None where there is only one."""
        self.is_applied = True
        self._rewriting = rewriting

    def undo(self) -> None:
        """Restore forwards, hooks, flags and configuration as they were. Twice is once.

        For bf16 and fp16 accelerate puts a forward of its own around that of the whole model, and leaves it there.
        Where the plan has one too, which then lies inside, both are taken off.

        Raises:
            DecisionError: when something was replaced after `apply_for_trainer`. Nothing is changed then.
        """
        own = vars(self.module)
        inside = own.get("_original_forward")
        if inside is not None and self._rewriting.is_latest(self.module, "forward", inside):
            self.module.forward = own.pop("_original_forward")
        self._rewriting.undo()
        self.is_applied = False

    def use_kernel(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the Trainer's optimizer step as planned, where the Trainer itself did not choose so. Undone by `undo`.

        Raises:
            DecisionError: for an optimizer that cannot step so, or for which another kernel was chosen.
        """
        decision = self.plan.decision(OptimizerKernel)
        if decision is None:
            return
        option, value = OPTIONS[decision.kernel]
        if not all(group.get(option) is value for group in optimizer.param_groups):
            self._rewriting.optimizer = optimizer
            optimizer_kernel(self._rewriting, decision)


def apply_for_trainer(plan: Plan, model: torch.nn.Module) -> RewrittenForTrainer:
    """Rewrite `model` in place, before the Trainer is made, by all decisions of the plan that are about the model.

    What is about the loop and the optimizer is left to `training_arguments` and `trainer_callback`.

    Raises:
        PlanFileError: when the plan was made for another model.
        DecisionError: when the Trainer cannot do what was planned, or a decision cannot be applied. The model is then
            as it was.
        WorkloadError: for a plan with a loss function, or for batches that are not passed by keyword.
    """
    refuse_another_model(plan, model)
    _refuse_what_trainers_cannot_do(plan)
    if not plan.fits:
        warnings.warn("the plan does not fit its budget (plan.fits is False): it is applied all the same", stacklevel=2)
    by_kind = one_of_each_kind(plan.decisions)
    rewriting = Rewriting(
        model, optimizer=plan.workload.optimizer, calling=Calling.KEYWORDS, batch_size=plan.workload.batch_size,
        loss_fn=None, loss_weight=None,
    )  # fmt: skip
    try:
        change_by_rules(rewriting, {kind: by_kind[kind] for kind in by_kind if kind not in _OF_THE_OPTIMIZER})
        if turns_cache_off(plan):
            rewriting.turn_cache_off()
        share = _weighted_by_share(rewriting) if accumulates(plan) else None
    except BaseException:
        rewriting.restore()
        raise
    return RewrittenForTrainer(plan, rewriting, share)


def accumulates(plan: Plan) -> bool:
    return plan.decision(Accumulation) is not None or plan.workload.gradients_alive


def _weighted_by_share(rewriting: Rewriting) -> LossShare:
    """By hooks, which accelerate's autocast, a forward of its own, leaves alone."""
    share = LossShare.of(rewriting.model)
    rewriting.replace(rewriting.model, "accepts_loss_kwargs", True, place="accepts_loss_kwargs of the model")
    handles = share.hooks_on(rewriting.model)
    rewriting.changes.append(
        Change(place="hooks of the model", intact=lambda: True, restore=lambda: [handle.remove() for handle in handles])
    )
    return share


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
    _refuse_what_trainers_cannot_do(plan)
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
    precision = plan.decision(Precision)
    optim = planned_optim(plan)
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": count,
        "bf16": precision is not None and precision.dtype == "bf16",
        "fp16": precision is not None and precision.dtype == "fp16",
        **({} if optim is None else {"optim": optim}),
        **({"optim_args": "momentum=0.9"} if plan.workload.optimizer == "sgd-momentum" else {}),
        **({"weight_decay": 0.0} if plan.workload.optimizer == "adam" else {}),
        "activation_checkpointing": False,
    }


def planned_optim(plan: Plan) -> str | None:
    """The Trainer's word for the planned optimizer. None for one without a name: give the Trainer `optimizers=`."""
    if plan.decision(Optimizer) is not None:
        return _EIGHT_BIT
    name = _NAMES.get(plan.workload.optimizer)
    kernel = plan.decision(OptimizerKernel)
    fused = kernel is not None and kernel.kernel == "fused"
    return "adamw_torch_fused" if fused and name == "adamw_torch" else name


def micro_batches(plan: Plan) -> tuple[int, int]:
    """Samples in each of the Trainer's micro-batches, and how many make up the planned batch.

    Raises:
        DecisionError: where the batch can only be split into more than twice as many as planned.
    """
    accumulation, samples = plan.decision(Accumulation), plan.workload.batch_size
    if accumulation is None:
        return samples, 1
    count = next(n for n in range(accumulation.micro_batches, samples + 1) if samples % n == 0)
    if count > 2 * accumulation.micro_batches:
        whole = accumulation.micro_batches * accumulation.micro_batch_size
        raise DecisionError(
            f"accumulation plans {accumulation.describe()} for a batch of {samples}, and the Trainer's micro-batches "
            f"are all of one size: plan for a batch of {whole}, or use rewrite.apply, whose last one may be smaller"
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


def trainer_callback(
    rewritten: RewrittenForTrainer, *, steps: int = 3, on_broken: Literal["warn", "raise"] = "warn"
) -> PlanCallback:
    """A `transformers.TrainerCallback` that holds the Trainer to the plan.

    When training begins it refuses arguments, a model or an optimizer that were not planned, and in the first steps
    batches that are larger than planned or whose labels the Trainer counts otherwise than the model's loss. After them
    it says in one line of the log (`rewrite.plan_callback`; `.promise` is the same as an object) whether the card
    took more than promised; without CUDA, that it could not be measured. Let the Trainer evaluate later than that: what
    it takes then was not promised.

    Args:
        steps: how many optimizer steps are looked at; at least 2, since the optimizer's state is made in the first.
        on_broken: what to do when a promise is broken, or a later batch is larger than planned: "warn", or "raise" a
            `PromiseError`.
    """
    from rewrite.plan_callback import PlanCallback

    if steps < 2:
        raise DecisionError(f"steps={steps}: the optimizer's state is made in the first step, look at 2 or more")
    if on_broken not in ("warn", "raise"):
        raise DecisionError(f"on_broken={on_broken!r} is unknown: choose warn or raise")
    return PlanCallback(rewritten, steps=steps, on_broken=on_broken)


def _where_from(plan: Plan, name: str) -> str:
    kinds: dict[str, tuple[type[Decision], ...]] = {
        "per_device_train_batch_size": (Accumulation,),
        "gradient_accumulation_steps": (Accumulation,),
        "bf16": (Precision,),
        "fp16": (Precision,),
        "optim": (Optimizer, OptimizerKernel),
    }
    decided = [decision.describe() for decision in map(plan.decision, kinds.get(name, ())) if decision is not None]
    batch = f"a batch of {plan.workload.batch_size}, optimizer {plan.workload.optimizer}"
    return "; ".join([*decided, batch])


def _refuse_what_trainers_cannot_do(plan: Plan) -> None:
    if plan.decision(StepInBackward) is not None:
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


def _of_today(name: str) -> str:
    return next((today for today, before in _ONCE_CALLED.items() if name == before), name)


def _installed(name: str, names: set[str]) -> str:
    """The name that the class at hand has for an argument of today."""
    return name if name in names else _ONCE_CALLED.get(name, name)


def _plain(value: Any) -> Any:
    """Enumerations by their value, and one word for each optimizer."""
    value = getattr(value, "value", value)
    return _ALIASES.get(value, value) if isinstance(value, str) else value
