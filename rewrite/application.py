"""Apply a plan to a live model: it is patched in place, gets a training step, and can be restored with `undo`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import torch

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import Decision, Role, conflict, has_role, micro_batch_size_of, micro_batches_of
from planner.plan_types.fingerprint import refuse_another_model
from planner.plan_types.plan import Plan
from planner.rewrite.accumulation_check import AccumulationCheck, CouplingCheck
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.first_step_check import REPLACE_FORWARDS, FirstStepCheck
from planner.rewrite.nondeterminism import nondeterministic_op
from planner.rewrite.optimizers import SchedulerChoice, make_scheduler, refuse_closure, refuse_mixed_lists
from planner.rewrite.own_step import OwnStep
from planner.rewrite.recompute_observer import RecomputeObserver
from planner.rewrite.rewriting import LossWeight, Rewriting, Uncopied
from planner.rewrite.rules import RULES
from planner.rewrite.rules.allocator import set_options
from planner.rewrite.step import TrainingStep
from planner.rewrite.step_observer import StepObserver
from planner.workload.call_convention import Calling, LossFn, Parallelize, StepFn, loss_of
from planner.workload.optimizer_choice import OPTIMIZERS, Optimizers, arranged
from planner.workload.own_step import as_module

logger = logging.getLogger(__name__)

DOES_NOT_FIT = (
    "the plan does not fit its budget (plan.fits is False), so that training may run out of memory: make the plan with "
    "a larger budget or a smaller batch. It is applied nevertheless"
)
"""Warning for a plan that exceeds its budget."""


@final
class Rewritten(Uncopied):
    """A rewritten model.

    Attributes:
        module: the model that was passed to `apply`, the same object; a `ModuleDict` of them for a dict of modules.
        step: `step(batch)` trains it by one optimizer step and returns the loss, or what the user's own step returns.
        optimizer: the optimizer of the step; for a step of your own, a dict or tuple if you gave one.
    """

    def __init__(self, rewriting: Rewriting, step: TrainingStep | OwnStep) -> None:
        self.module = rewriting.model
        self.step = step
        self.optimizer = step.optimizer
        self.optimizers = tuple(rewriting.optimizers.values())
        self._rewriting = rewriting

    def __repr__(self) -> str:
        return f"<Rewritten {type(self.module).__name__} with {type(self.optimizer).__name__}: step(batch) trains it>"

    def undo(self) -> None:
        """Restore forwards, flags and configuration to what they were. Trained weights stay. May be called again.

        Raises:
            DecisionError: if something that `apply` changed was replaced afterwards, because restoring would silently
                discard that. Nothing is changed then.
        """
        self._rewriting.undo()
        self.step.close()


def apply(
    plan: Plan,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: Optimizers | None = None,
    *,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    max_grad_norm: float | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: SchedulerChoice | None = None,
    parallelize: Parallelize | None = None,
    check: Literal["first-step", "off"] = "first-step",
) -> Rewritten:
    """Rewrite `model` in place as the plan says.

    The model can be pickled and deep-copied at any time. A copy is rewritten too; a pickle is not, so apply the plan
    again to the model that is loaded from it. `save_pretrained` writes `use_cache=False` while the model is rewritten.

    Args:
        plan: a plan that was made for a model with the same names, shapes and dtypes of parameters.
        model: the model. Its class, parameters, hooks and `state_dict` keys do not change.
        optimizer: a torch optimizer over the model's parameters, a function that takes parameters and returns an
            optimizer, or a name; None for the optimizer of the plan. A plan with 8-bit state creates a new optimizer
            from the parameter groups of this one: create learning-rate schedulers for `Rewritten.optimizer`, or pass a
            function as `scheduler`.
        loss_fn: `loss_fn(output, batch)`, if the plan was made with a loss function.
        step: `step(model, optimizer, batch)`, if the plan was made with a step of your own. `model` may then be a dict
            of modules, and `optimizer` a dict or tuple of optimizers.
            Your function also clips gradients, weights losses and steps schedulers.
        max_grad_norm: clip the norm of all gradients to this before the optimizer steps; None to clip nothing.
        loss_weight: `loss_weight(batch)` returns the number of terms over which the loss of a batch or micro-batch is a
            mean, or 1 if the loss is a sum. Accumulation needs it for means over anything but samples or `labels`. If
            it is None, the first step checks the weights that it computes itself (`AccumulationCheck`).
        scheduler: a learning-rate scheduler of the optimizer, or a function that takes the optimizer and returns a
            scheduler. It is stepped after each optimizer step, but not if the gradient scaler skipped that step.
        parallelize: `parallelize(model, mesh)`, if the plan was made with a function of yours that divides the model
            among cards. It gets the model where it is; tensors that it leaves on the host are moved to the card.
        check: "first-step" compares the gradient of a few samples with that of the original model before the first
            update (`FirstStepCheck`), and checks recomputed values (`RecomputeCheck`) and micro-batches
            (`AccumulationCheck`) in later steps too. "off" makes none of these checks.

    Returns:
        The model, its training step and its optimizer. `undo()` restores the model.

    Raises:
        PlanFileError: if the plan was made for another model.
        WorkloadError: if the loss function or the optimizer does not match the plan, or the scheduler was created for a
            different optimizer.
        DecisionError: if a decision cannot be applied. The model is unchanged then.
    """
    makes_checks = is_check_on(check)
    model = as_module(model)
    optimizer = matched(plan, model, optimizer, loss_fn, step)
    if step is not None and (max_grad_norm, loss_weight, scheduler) != (None, None, None):
        raise WorkloadError(
            "the step function clips gradients, weights losses and steps schedulers itself: leave max_grad_norm, "
            "loss_weight and scheduler out"
        )
    if not plan.fits:
        warnings.warn(DOES_NOT_FIT, stacklevel=2)
    if plan.alloc_conf and torch.cuda.is_available():
        set_options(plan.decisions, plan.alloc_conf)
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
        step=step,
        not_by_sample=plan.workload.not_by_sample,
        parallelize=parallelize,
    )
    is_sharded = has_role(plan.decisions, Role.SHARDING)
    if isinstance(rewritten.step, TrainingStep) and not is_sharded:
        rewritten.step.require_wrapper()
        rewritten.step.observers += _checks(plan, rewritten._rewriting)
    elif makes_checks and has_role(plan.decisions, *REPLACE_FORWARDS):
        logger.warning(
            "the first step is not compared with the original modules, because %s; what backward recomputes is "
            "compared with the forward in steps 1, 2, 4, 8 and 16",
            "the model is on several cards" if is_sharded else "only the step function knows the loss",
        )
    if not makes_checks:
        rewritten.step.observers = ()
    if turns_cache_off(plan):
        rewritten._rewriting.turn_cache_off()
    return rewritten


def is_check_on(check: str) -> bool:
    """Returns False for "off", True for "first-step", and raises `DecisionError` for anything else."""
    if check not in ("first-step", "off"):
        raise DecisionError(f'check={check!r} is unknown: give "first-step" or "off"')
    return check == "first-step"


def _recompute_checks(rewriting: Rewriting) -> tuple[RecomputeObserver, ...]:
    """Returns the check of recomputed and offloaded modules; empty if there are none."""
    if rewriting.recompute_check is None:
        return ()
    check = rewriting.recompute_check
    is_own = rewriting.calling is Calling.STEP
    check.at_once = rewriting.backward is not None or is_own  # an update may follow each backward

    def op_in_forward(batch: Any) -> str | None:
        """Returns a nondeterministic op in the forward of the first micro-batch."""
        if is_own:
            return None
        part = batch if rewriting.split is None else next(rewriting.split(batch))[0]

        def forward() -> torch.Tensor:
            device, dtype = next(rewriting.model.parameters()).device, rewriting.autocast_dtype
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                return loss_of(rewriting.calling.call(rewriting.model, part), part, rewriting.loss_fn)

        return nondeterministic_op(check, SideEffectGuard(rewriting.model, rewriting.loss_fn), forward)

    return (RecomputeObserver(check, op_in_forward),)


def _checks(plan: Plan, rewriting: Rewriting) -> tuple[StepObserver, ...]:
    """Returns the check of the first step and, if the plan splits the batch, the check of micro-batches."""

    def full_precision_loss(batch: Any) -> torch.Tensor:
        return loss_of(rewriting.calling.call(rewriting.model, batch), batch, rewriting.loss_fn)

    first_step = FirstStepCheck(plan, rewriting, rewriting.optimizer, full_precision_loss)
    micro_batch_size = micro_batch_size_of(plan.decisions)
    if micro_batch_size is None or rewriting.loss_terms is None:
        return (first_step,)
    coupling = None
    if micro_batches_of(plan.decisions) > 1:
        coupling = CouplingCheck(
            batch_size=rewriting.batch_size, micro_batch_size=micro_batch_size,
            terms_of=rewriting.loss_terms, loss_fn=rewriting.loss_fn,
            uses_autocast=rewriting.autocast_dtype is not None,
            has_stated_weights=rewriting.loss_weight is not None,
            chunked_head=rewriting.chunked_head,
            not_by_sample=rewriting.not_by_sample,
        )  # fmt: skip
    return (
        first_step,
        AccumulationCheck(
            rewriting.model, full_precision_loss, coupling, checks_weights=rewriting.loss_weight is None
        ),
    )  # fmt: skip


def matched(
    plan: Plan,
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    loss_fn: LossFn | None,
    step: StepFn | None = None,
) -> Optimizers:
    """Returns the optimizer to use: `optimizer`, or that of the plan if `optimizer` is None.

    Raises:
        PlanFileError: if the plan was made for another model.
        WorkloadError: if the plan was made with a loss function and `loss_fn` is None or the other way around, if the
            same holds for `step`, or if the plan's optimizer cannot be created by its name.
    """
    if (plan.workload.calling == Calling.STEP.name) != (step is not None):
        raise WorkloadError(
            "the plan was made with a step function of your own: pass it as step=..."
            if step is None
            else "the plan was made without a step function: leave step out, or make the plan again with it"
        )
    refuse_another_model(plan, model)
    if plan.workload.has_loss_fn != (loss_fn is not None):
        raise WorkloadError(
            "the plan was made with a loss function: pass it as loss_fn=..."
            if plan.workload.has_loss_fn
            else "the plan was made without a loss function: leave loss_fn out, or make the plan again with it"
        )
    if optimizer is not None:
        return optimizer
    if plan.workload.optimizer not in OPTIMIZERS:
        raise WorkloadError(
            f"the plan was made with optimizer '{plan.workload.optimizer}', which cannot be created by name: "
            "give optimizer=... as when the plan was made"
        )
    return plan.workload.optimizer


def turns_cache_off(plan: Plan) -> bool:
    """True if the plan assumes a model without key-value cache: it recomputes, or the model was given by its name."""
    if plan.workload.calling != Calling.KEYWORDS.name:
        return False
    return plan.model.reference is not None or any(decision.disables_kv_cache for decision in plan.decisions)


def apply_decisions(
    decisions: Sequence[Decision],
    model: torch.nn.Module,
    *,
    optimizer: Optimizers,
    calling: Calling,
    batch_size: int,
    loss_fn: LossFn | None = None,
    step: StepFn | None = None,
    max_grad_norm: float | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: SchedulerChoice | None = None,
    not_by_sample: tuple[str, ...] = (),
    parallelize: Parallelize | None = None,
) -> Rewritten:
    """Rewrite `model` in place by these decisions. Without decisions, the step of the result is the baseline.

    Raises:
        DecisionError: if a decision cannot be applied, or there are two of one kind. The model is unchanged then.
    """
    by_kind = one_of_each_kind(decisions)
    if any(kind.steps_in_backward for kind in by_kind) and max_grad_norm is not None:
        raise DecisionError(
            "step-in-backward never has all gradients at once, so their norm cannot be clipped: leave max_grad_norm "
            "out, or plan with step-in-backward forbidden"
        )
    rewriting = Rewriting(
        model,
        optimizer=optimizer,
        calling=calling,
        batch_size=batch_size,
        loss_fn=loss_fn,
        loss_weight=loss_weight,
        not_by_sample=not_by_sample,
        parallelize=parallelize,
    )
    try:
        change_by_rules(rewriting, by_kind)
        if rewriting.parallelize is not None:
            refuse_mixed_lists(model, rewriting.optimizers.values())
        if step is not None:
            own = arranged(optimizer, rewriting.optimizers)
            observers = _recompute_checks(rewriting)
            return Rewritten(
                rewriting,
                OwnStep(step, model, own, rewriting.optimizers, decisions=tuple(by_kind.values()), observers=observers),
            )
        refuse_closure(rewriting.optimizer)
        training_step = TrainingStep(
            model,
            rewriting.optimizer,
            calling=calling,
            loss_fn=loss_fn,
            max_grad_norm=max_grad_norm,
            autocast_dtype=rewriting.autocast_dtype,
            device_type=None if rewriting.rank_share is None else rewriting.device_type,
            scaler=rewriting.scaler,
            scheduler=None if scheduler is None else make_scheduler(scheduler, rewriting.optimizer),
            split=rewriting.split,
            rank_share=rewriting.rank_share,
            is_divided=rewriting.parallelize is not None,
            backward=rewriting.backward,
            decisions=tuple(by_kind.values()),
            observers=_recompute_checks(rewriting),
        )
        if rewriting.rank_share is not None:
            training_step.train_as_rank(rewriting.wrapper, rewriting.no_sync)
    except BaseException:
        rewriting.restore()
        raise
    return Rewritten(rewriting, training_step)


def change_by_rules(rewriting: Rewriting, by_kind: Mapping[type[Decision], Decision]) -> None:
    """Apply the rule of each decision, in the order of `RULES`."""
    for kind, rule in RULES.items():
        if kind in by_kind:
            rule(rewriting, by_kind[kind])
    if by_kind:
        rewriting.turn_cache_off()


def one_of_each_kind(decisions: Sequence[Decision]) -> dict[type[Decision], Decision]:
    """Returns the decisions by kind. Raises `DecisionError` for two of one kind, and for two that are incompatible."""
    if (reason := conflict(decisions)) is not None:
        raise DecisionError(f"{reason}: keep one of the two")
    by_kind: dict[type[Decision], Decision] = {}
    for decision in decisions:
        kind = type(decision)
        if kind not in RULES:
            raise DecisionError(
                f"decision {kind.__name__} has no rule that carries it out. Kinds with a rule: "
                f"{', '.join(k.kind for k in RULES)}"
            )
        if kind in by_kind:
            raise DecisionError(
                f"two decisions of kind {kind.kind}: '{by_kind[kind].describe()}' and '{decision.describe()}'; keep one"
            )
        by_kind[kind] = decision
    return by_kind
