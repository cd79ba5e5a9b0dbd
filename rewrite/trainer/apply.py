"""Apply a plan under transformers' `Trainer`: the plan changes the model and the arguments, and the Trainer trains.

    rewritten = rewrite.apply_for_trainer(plan, model)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**rewrite.training_arguments(plan, output_dir="out", learning_rate=5e-5)),
        callbacks=[rewrite.trainer_callback(rewritten)],
        train_dataset=dataset,
    )

Arguments are returned as a dict, because they go into subclasses as well (`Seq2SeqTrainingArguments`, TRL's
`SFTConfig`).

Micro-batches: the Trainer expects the model to divide its loss by the number of labels of all micro-batches, which it
passes as `num_items_in_batch`. Many models accept that number and ignore it: `RobertaForMaskedLM` of transformers 5.23
trains with gradients that are too large by a factor of the number of micro-batches. For models that do not accept it,
the Trainer averages the micro-batches as if all had the same number of labels. After `apply_for_trainer` the number
never reaches the model: the mean that the model returns is weighted by its share of the labels, so that any model
trains as on the whole batch (`loss_weighting.py`).

The Trainer takes some memory that the plan does not count:

- its running loss and other scalars, a block of 512 B each;
- one byte per label while labels are counted;
- the norms of the gradients, which it computes even if it does not clip. No activation is alive then, so that this does
  not change the peaks (in a rehearsal of `examples/roberta_84m` at 8 x 32);
- with bf16 and fp16, an fp32 copy of all outputs of the model. For logits it is as large as a copy that the loss has
  made and already freed.

Evaluation is not planned: it computes the logits of a whole evaluation batch.
"""

from __future__ import annotations

import functools
import warnings
from typing import Literal, final

import torch

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import Role, micro_batches_of
from planner.plan_types.decisions import OptimizerKernel
from planner.plan_types.fingerprint import refuse_another_model
from planner.plan_types.plan import Plan
from planner.rewrite.application import (
    DOES_NOT_FIT,
    change_by_rules,
    is_check_on,
    one_of_each_kind,
    turns_cache_off,
)
from planner.rewrite.first_step_check import FirstStepCheck
from planner.rewrite.rewriting import Rewriting
from planner.rewrite.rules.allocator import set_options
from planner.rewrite.rules.optimizer_kernel import OPTIONS, optimizer_kernel
from planner.rewrite.trainer.arguments import refuse_what_trainers_cannot_do
from planner.rewrite.trainer.loss_weighting import LossWeighting, full_precision_loss
from planner.rewrite.trainer.on_cards import is_on_cards
from planner.workload.call_convention import Calling
from planner.workload.model_loss import takes_the_loss
from planner.workload.torch_optimizers import sparse_lookups

_OPTIMIZER_ROLES = (Role.OPTIMIZER, Role.UPDATE_TIME)
"""Roles of the decisions that `apply_for_trainer` leaves to the Trainer's arguments and the callback, or refuses."""


@final
class RewrittenForTrainer:
    """A rewritten model that the Trainer trains. `undo()` restores the model; trained weights stay."""

    def __init__(
        self, plan: Plan, rewriting: Rewriting, share: LossWeighting | None, *, makes_checks: bool = True
    ) -> None:
        self.plan = plan
        self.module = rewriting.model
        self.share = share
        """Weights the losses of micro-batches; None if each step has only one micro-batch."""
        self.recompute_check = rewriting.recompute_check if makes_checks else None
        """Compares the values that backward uses with those of the forward; None if no module is recomputed."""
        self.makes_checks = makes_checks
        """False to make no checks of the training itself (`apply_for_trainer(..., check="off")`)."""
        self.is_applied = True
        self._rewriting = rewriting

    def undo(self) -> None:
        """Restore forwards, hooks, flags and configuration to what they were. May be called several times.

        With bf16 and fp16, accelerate wraps the forward of the whole model, and does not remove its wrapper. If the
        plan had replaced this forward before, `undo` removes the wrapper too.

        Raises:
            DecisionError: if something was replaced after `apply_for_trainer`. Nothing is changed then.
        """
        attributes = vars(self.module)
        wrapped = attributes.get("_original_forward")
        if wrapped is not None and self._rewriting.is_latest(self.module, "forward", wrapped):
            self.module.forward = attributes.pop("_original_forward")
        self._rewriting.undo()
        self.is_applied = False

    def add_hook(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Let `undo` remove this hook of the model, in case training fails before the callback removes it."""
        self._rewriting.add_hooks([handle])

    def first_step_check(self, optimizer: torch.optim.Optimizer) -> FirstStepCheck | None:
        """Returns the comparison of the first step with the original model; None if checks are off."""
        if not self.makes_checks:
            return None
        loss_of = functools.partial(full_precision_loss, self.module)
        return FirstStepCheck(self.plan, self._rewriting, optimizer, loss_of)

    def use_kernel(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the planned kernel, such as fused, on the Trainer's optimizer, unless it is set already.

        `undo` resets the kernel.

        Raises:
            DecisionError: if the optimizer does not have that kernel, or another kernel was chosen for it.
        """
        decision = self.plan.decision(OptimizerKernel)
        if not isinstance(decision, OptimizerKernel):
            return
        option, value = OPTIONS[decision.kernel]
        if not all(group.get(option) is value for group in optimizer.param_groups):
            self._rewriting.optimizers = {"": optimizer}
            optimizer_kernel(self._rewriting, decision)


def apply_for_trainer(
    plan: Plan, model: torch.nn.Module, *, check: Literal["first-step", "off"] = "first-step"
) -> RewrittenForTrainer:
    """Rewrite `model` in place by all decisions of the plan that concern the model. Call this before making a Trainer.

    Decisions on the loop and the optimizer are left to `training_arguments` and `trainer_callback`.

    Args:
        check: "first-step" checks the first step and some later ones; "off" makes no checks (see `rewrite.apply`).

    Returns:
        The rewritten model, for `trainer_callback`. Its `undo()` restores the model.

    Raises:
        PlanFileError: if the plan was made for another model.
        DecisionError: if the Trainer cannot follow the plan, or a decision cannot be applied. The model is unchanged
            then.
        WorkloadError: for a plan with a loss function, for batches that are not passed by keyword, and for sparse
            gradients.
    """
    makes_checks = is_check_on(check)
    refuse_another_model(plan, model)
    refuse_what_trainers_cannot_do(plan)
    if is_on_cards(plan):
        raise DecisionError(
            "the Trainer itself prepares the model for several cards: give it the unchanged model and the arguments of "
            "rewrite.training_arguments(plan), without apply_for_trainer"
        )
    if lookups := sparse_lookups(model):
        raise WorkloadError(
            f"'{next(iter(lookups))}' makes sparse gradients, and the Trainer computes the norm of all gradients by a "
            "function that does not support them: create this module with sparse=False, or use rewrite.apply"
        )
    if not plan.fits:
        warnings.warn(DOES_NOT_FIT, stacklevel=2)
    if plan.alloc_conf and torch.cuda.is_available():
        set_options(plan.decisions, plan.alloc_conf)
    by_kind = one_of_each_kind(plan.decisions)
    rewriting = Rewriting(
        model, optimizer=plan.workload.optimizer, calling=Calling.KEYWORDS, batch_size=plan.workload.batch_size,
        loss_fn=None, loss_weight=None,
    )  # fmt: skip
    try:
        change_by_rules(rewriting, {kind: by_kind[kind] for kind in by_kind if kind.role not in _OPTIMIZER_ROLES})
        if turns_cache_off(plan):
            rewriting.turn_cache_off()
        share = _weighted_by_share(rewriting, plan, makes_checks) if accumulates(plan) else None
    except BaseException:
        rewriting.restore()
        raise
    return RewrittenForTrainer(plan, rewriting, share, makes_checks=makes_checks)


def accumulates(plan: Plan) -> bool:
    """True if the Trainer may accumulate gradients: the plan splits batches, or is for a loop that accumulates."""
    return micro_batches_of(plan.decisions) > 1 or plan.workload.gradients_alive


def _weighted_by_share(rewriting: Rewriting, plan: Plan, makes_checks: bool) -> LossWeighting:
    """Weight the losses of micro-batches by hooks of the model, and let the Trainer pass its label count to the model.

    Hooks are used, and not a new forward of the model, because accelerate wraps the forward.
    """
    share = LossWeighting.of(rewriting.model, plan, rewriting.chunked_head, makes_checks=makes_checks)
    for model in {rewriting.model: None, takes_the_loss(rewriting.model): None}:
        rewriting.replace(model, "accepts_loss_kwargs", True, place="accepts_loss_kwargs of the model")
    rewriting.add_hooks(share.hooks_on(rewriting.model))
    return share
