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
share of the labels, so that any model trains as the Trainer would on the whole batch (`loss_weighting.py`).

What the Trainer holds beyond what the plan counts: its running loss and other single numbers, a block of 512 B each; a
byte for each label, where they are counted; the norms of the gradients, which it takes also where it does not clip,
when no activation is alive (rehearsed, `examples/roberta_84m` at 8 x 32 has the same peaks with them); and for bf16 and
fp16 a copy in fp32 of all that the model returns in them (of logits: as large as the one that the loss has made and
freed by then). Evaluation is not planned: it makes the logits of a whole evaluation batch.
"""

from __future__ import annotations

import warnings
from typing import final

import torch

from planner.errors import WorkloadError
from planner.plan_types.decision_base import Role, micro_batches_of
from planner.plan_types.decisions import OptimizerKernel
from planner.plan_types.plan import Plan
from planner.rewrite.application import change_by_rules, one_of_each_kind, refuse_another_model, turns_cache_off
from planner.rewrite.rewriting import Rewriting
from planner.rewrite.rules.optimizer_kernel import OPTIONS, optimizer_kernel
from planner.rewrite.trainer.arguments import refuse_what_trainers_cannot_do
from planner.rewrite.trainer.loss_weighting import LossWeighting
from planner.workload.call_convention import Calling
from planner.workload.model_loss import takes_the_loss
from planner.workload.torch_optimizers import sparse_lookups

_OF_THE_OPTIMIZER = (Role.OPTIMIZER, Role.UPDATE_TIME)


@final
class RewrittenForTrainer:
    """A model that is rewritten but for its step. `undo()` gives the model back as it was; trained weights stay."""

    def __init__(self, plan: Plan, rewriting: Rewriting, share: LossWeighting | None) -> None:
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

    def add_hook(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Let `undo` remove a hook of the model too, where training ended before it was removed."""
        self._rewriting.add_hooks([handle])

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
        WorkloadError: for a plan with a loss function, batches that are not passed by keyword, or sparse gradients.
    """
    refuse_another_model(plan, model)
    refuse_what_trainers_cannot_do(plan)
    if lookups := sparse_lookups(model):
        raise WorkloadError(
            f"'{next(iter(lookups))}' makes sparse gradients, and the Trainer takes the norm of all by a function that "
            "cannot: give it sparse=False, or use rewrite.apply"
        )
    if not plan.fits:
        warnings.warn("the plan does not fit its budget (plan.fits is False): it is applied all the same", stacklevel=2)
    by_kind = one_of_each_kind(plan.decisions)
    rewriting = Rewriting(
        model, optimizer=plan.workload.optimizer, calling=Calling.KEYWORDS, batch_size=plan.workload.batch_size,
        loss_fn=None, loss_weight=None,
    )  # fmt: skip
    try:
        change_by_rules(rewriting, {kind: by_kind[kind] for kind in by_kind if kind.role not in _OF_THE_OPTIMIZER})
        if turns_cache_off(plan):
            rewriting.turn_cache_off()
        share = _weighted_by_share(rewriting, plan) if accumulates(plan) else None
    except BaseException:
        rewriting.restore()
        raise
    return RewrittenForTrainer(plan, rewriting, share)


def accumulates(plan: Plan) -> bool:
    return micro_batches_of(plan.decisions) > 1 or plan.workload.gradients_alive


def _weighted_by_share(rewriting: Rewriting, plan: Plan) -> LossWeighting:
    """By hooks, which accelerate's autocast, a forward of its own, leaves alone."""
    share = LossWeighting.of(rewriting.model, plan)
    for model in {rewriting.model: None, takes_the_loss(rewriting.model): None}:
        rewriting.replace(model, "accepts_loss_kwargs", True, place="accepts_loss_kwargs of the model")
    rewriting.add_hooks(share.hooks_on(rewriting.model))
    return share
