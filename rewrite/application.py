"""Apply a plan to a live model: the same object, patched in place, with a training step and a way back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import final

import torch

from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.plan_types.decision_base import Decision, Role, conflict, has_role, micro_batch_size_of
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import Plan
from planner.rewrite.accumulation_check.coupling_check import CouplingCheck
from planner.rewrite.optimizers import OPTIMIZERS, OptimizerChoice, SchedulerChoice, make_scheduler, refuse_closure
from planner.rewrite.rewriting import LossWeight, Rewriting
from planner.rewrite.rules import RULES
from planner.rewrite.step import TrainingStep
from planner.workload.call_convention import Calling, LossFn


@final
class Rewritten:
    """A rewritten model. `module` is the object that was given; `step(batch)` trains it by one optimizer step."""

    def __init__(self, rewriting: Rewriting, step: TrainingStep) -> None:
        self.module = rewriting.model
        self.step = step
        self.optimizer = step.optimizer
        self._rewriting = rewriting

    def undo(self) -> None:
        """Restore forwards, flags and configuration as they were before; trained weights stay. Twice is once.

        Raises:
            DecisionError: when something was replaced again after `apply`: restoring would silently drop it.
                Nothing is changed then.
        """
        self._rewriting.undo()
        self.step.close()


def apply(
    plan: Plan,
    model: torch.nn.Module,
    optimizer: OptimizerChoice | None = None,
    *,
    loss_fn: LossFn | None = None,
    max_grad_norm: float | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: SchedulerChoice | None = None,
) -> Rewritten:
    """Rewrite `model` in place as the plan says.

    A pickle or a deep copy can be made of it at any time: the copy is rewritten too, the pickle is not, and takes the
    plan anew. What `save_pretrained` writes is the model with `use_cache` as it is while rewritten: off.

    Args:
        plan: made for a model with these parameter names, shapes and dtypes.
        model: its class, parameters, hooks and `state_dict` keys stay as they are.
        optimizer: a torch optimizer over the model's parameters, a function from parameters to one, or a name;
            None takes the one the plan was made with. A plan with 8-bit state makes a new one from its groups:
            give learning-rate schedulers `Rewritten.optimizer`, or a function as `scheduler`.
        loss_fn: `loss_fn(output, batch)`, where the plan was made with one.
        max_grad_norm: clip the norm of all gradients to this before the optimizer steps.
        loss_weight: how many terms the mean loss of a batch is taken over, for accumulation over losses that are
            means over something else than samples or counted `labels`; 1 for losses that are sums. Without it, the
            first step holds its own weights against the means that `torch.nn.functional` takes in the loss.
        scheduler: a learning-rate scheduler over the optimizer, or a function from the optimizer to one. It is stepped
            once after each step that trained: in fp16 not after one that the gradient scaler skipped.

    Raises:
        PlanFileError: when the plan was made for another model.
        WorkloadError: when the loss function or the optimizer is not what was planned, or the scheduler not over it.
        DecisionError: when a decision cannot be applied. The model is then as it was.
    """
    optimizer = matched(plan, model, optimizer, loss_fn)
    if not plan.fits:
        warnings.warn("the plan does not fit its budget (plan.fits is False): it is applied all the same", stacklevel=2)
    rewritten = apply_decisions(
        plan.decisions,
        model,
        optimizer=optimizer,
        calling=Calling[plan.workload.calling],
        batch_size=plan.workload.batch_size,
        loss_fn=loss_fn,
        max_grad_norm=max_grad_norm,
        loss_weight=loss_weight,
        scheduler=scheduler,
    )
    rewritten.step.require_wrapper()
    if loss_weight is None:
        rewritten.step.check_weights(_tried_apart(plan, rewritten._rewriting))
    else:
        rewritten.step.check_splitting(_tried_apart(plan, rewritten._rewriting))
    if turns_cache_off(plan):
        rewritten._rewriting.turn_cache_off()
    return rewritten


def _tried_apart(plan: Plan, rewriting: Rewriting) -> CouplingCheck | None:
    """Not where a loss is taken in chunks, which needs all logits in evaluation; it is a mean over labels."""
    micro_batch_size = micro_batch_size_of(plan.decisions)
    if micro_batch_size is None or has_role(plan.decisions, Role.LOSS):
        return None
    return CouplingCheck(
        batch_size=rewriting.batch_size, micro_batch_size=micro_batch_size, terms_of=rewriting.loss_terms,
        loss_fn=rewriting.loss_fn, doubled=rewriting.autocast_dtype is not None,
        is_stated=rewriting.loss_weight is not None,
    )  # fmt: skip


def matched(
    plan: Plan, model: torch.nn.Module, optimizer: OptimizerChoice | None, loss_fn: LossFn | None
) -> OptimizerChoice:
    """The optimizer that was given or planned. Raises as `apply` does for another model, loss function or optimizer."""
    refuse_another_model(plan, model)
    if plan.workload.has_loss_fn != (loss_fn is not None):
        raise WorkloadError(
            "the plan was made with a loss function: give loss_fn=..."
            if plan.workload.has_loss_fn
            else "the plan was made without a loss function: leave loss_fn out, or make the plan again with it"
        )
    if optimizer is not None:
        return optimizer
    if plan.workload.optimizer not in OPTIMIZERS:
        raise WorkloadError(
            f"the plan was made with optimizer '{plan.workload.optimizer}', which is no name: give optimizer=..."
        )
    return plan.workload.optimizer


def turns_cache_off(plan: Plan) -> bool:
    """Models that are named by a reference are planned without a cache of keys and values; so is checkpointing."""
    if plan.workload.calling != Calling.KEYWORDS.name:
        return False
    return plan.model.reference is not None or any(decision.disables_kv_cache for decision in plan.decisions)


def apply_decisions(
    decisions: Sequence[Decision],
    model: torch.nn.Module,
    *,
    optimizer: OptimizerChoice,
    calling: Calling,
    batch_size: int,
    loss_fn: LossFn | None = None,
    max_grad_norm: float | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: SchedulerChoice | None = None,
) -> Rewritten:
    """Rewrite `model` in place by these decisions; without any, the step is the plain one.

    Raises:
        DecisionError: when a decision cannot be applied or a kind comes twice. The model is then as it was.
    """
    by_kind = one_of_each_kind(decisions)
    if any(kind.steps_in_backward for kind in by_kind) and max_grad_norm is not None:
        raise DecisionError(
            "step-in-backward never has all gradients at once, so that their norm cannot be clipped: leave "
            "max_grad_norm out, or plan with step-in-backward forbidden"
        )
    rewriting = Rewriting(
        model, optimizer=optimizer, calling=calling, batch_size=batch_size, loss_fn=loss_fn, loss_weight=loss_weight
    )
    try:
        change_by_rules(rewriting, by_kind)
        refuse_closure(rewriting.optimizer)
        step = TrainingStep(
            model,
            rewriting.optimizer,
            calling=calling,
            loss_fn=loss_fn,
            max_grad_norm=max_grad_norm,
            autocast_dtype=rewriting.autocast_dtype,
            scaler=rewriting.scaler,
            scheduler=None if scheduler is None else make_scheduler(scheduler, rewriting.optimizer),
            split=rewriting.split,
            backward=rewriting.backward,
            decisions=tuple(by_kind.values()),
        )
    except BaseException:
        rewriting.restore()
        raise
    return Rewritten(rewriting, step)


def change_by_rules(rewriting: Rewriting, by_kind: Mapping[type[Decision], Decision]) -> None:
    """Let the rule of each decision do its part, in the order of the rules."""
    for kind, rule in RULES.items():
        if kind in by_kind:
            rule(rewriting, by_kind[kind])
    if by_kind:
        rewriting.turn_cache_off()


def one_of_each_kind(decisions: Sequence[Decision]) -> dict[type[Decision], Decision]:
    """The decisions by kind. Raises `DecisionError` for two of one kind, and for two that cannot be done together."""
    if (why := conflict(decisions)) is not None:
        raise DecisionError(f"{why}: keep one of the two")
    by_kind: dict[type[Decision], Decision] = {}
    for decision in decisions:
        kind = type(decision)
        if kind not in RULES:
            raise DecisionError(f"decision {kind.__name__} has no rule: known are {', '.join(k.kind for k in RULES)}")
        if kind in by_kind:
            raise DecisionError(
                f"two decisions of kind {kind.kind}: '{by_kind[kind].describe()}' and '{decision.describe()}'; keep one"
            )
        by_kind[kind] = decision
    return by_kind


def refuse_another_model(plan: Plan, model: torch.nn.Module) -> None:
    """Raises `PlanFileError`, and says what differs, unless the plan was made for this model."""
    if fingerprint(model) == plan.model.fingerprint:
        return
    name = type(model).__name__
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if name != plan.model.name:
        difference = f"it is a {name}, the plan is for a {plan.model.name}"
    elif parameters != plan.model.parameters:
        difference = f"it has {parameters:,} parameters, the planned {name} has {plan.model.parameters:,}"
    else:
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        difference = f"a name, shape or dtype of a parameter or buffer differs (its parameters are {', '.join(dtypes)})"
    raise PlanFileError(f"the plan was made for another model: {difference}; make the plan again for this model")
