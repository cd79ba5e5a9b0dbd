"""One optimizer step on a full batch. Without any decision it is the plain loop that everyone writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import Decision
from planner.rewrite import step_state
from planner.rewrite.accumulation_check.coupling_check import CouplingCheck
from planner.rewrite.accumulation_check.reduction_check import ReductionWatcher
from planner.rewrite.portable.loss_and_clipping import clip_gradients, weighted
from planner.workload.call_convention import Calling, LossFn, loss_of
from planner.workload.torch_optimizers import why_not_dense, why_not_sparse
from planner.workload.workload import several_processes

BatchSplitter = Callable[[Any], Iterator[tuple[Any, "torch.Tensor | float | None"]]]
"""A batch -> its parts, each with the weight of its loss (None: the part is the whole batch)."""


@final
class TrainingStep:
    """Call it with a batch on the model's device; the loss of that batch comes back, detached, as a 0-dim tensor.

    Order: split the batch; for each part forward and loss (under autocast), weight, scale, backward; then
    unscale, clip, optimizer step, scaler update, scheduler, zero (where backward takes the optimizer's steps: scheduler
    and zero alone). A step whose gradients are not finite is skipped by the scaler, and the scheduler with it.
    Outputs die before backward, and nothing but gradients and the running loss lives from one part to the next.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        calling: Calling,
        loss_fn: LossFn | None = None,
        max_grad_norm: float | None = None,
        autocast_dtype: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        split: BatchSplitter | None = None,
        backward: Callable[[], contextlib.AbstractContextManager] | None = None,
        decisions: Sequence[Decision] = (),
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.calling = calling
        self.loss_fn = loss_fn
        self.max_grad_norm = max_grad_norm
        self.autocast_dtype = autocast_dtype
        self.scaler = scaler
        self.scheduler = scheduler
        self._split = split
        self._backward = backward
        self._decisions = tuple(decisions)
        self._closed = False
        self._means: ReductionWatcher | None = None
        self._later: Callable[[], ReductionWatcher] | None = None
        """What watches later steps, where the labels of any batch may make its loss a mean over other terms."""
        self._tried: CouplingCheck | None = None
        self._called = module
        self._asks_for_wrapper = False

    def __call__(self, batch: Any) -> torch.Tensor:
        """Train by a batch.

        Raises:
            DecisionError: after `undo`; where micro-batches are weighted by other shares than the loss has terms
                (`hold_weights`); among several processes that nothing brings together (`through`). Nothing is
                trained then.
        """
        self._refuse_if_closed()
        if self._asks_for_wrapper and several_processes():
            raise DecisionError(
                "several processes train here, and this step would train the model of each by its own gradients: "
                "step.through(torch.nn.parallel.DistributedDataParallel(rewritten.module)) adds them up; "
                "step.through(rewritten.module) trains each by itself, or as something else brings them together"
            )
        watch, self._means = self._means, None
        if watch is None and self._later is not None:
            watch = self._later()
        try:
            total = self._backward_of(batch, watch)
            if watch is not None:
                self._check_weights(watch, batch)
            if self._tried is not None:
                self._tried.refuse_coupled_samples(self.module, batch, self._loss_in_full)
        except BaseException:
            if watch is not None and watch.first:
                self._means = ReductionWatcher()
            if self._split is not None:  # gradients of some parts
                self.optimizer.zero_grad(set_to_none=True)
            raise
        self.update()
        return total

    def _backward_of(self, batch: Any, watch: ReductionWatcher | None) -> torch.Tensor:
        """Forward and backward of each part; returns the loss of the batch."""
        total = None
        for part, weight, together in self._parts(batch):
            with together:
                loss = self._loss(part) if watch is None or weight is None else self._watched_loss(part, weight, watch)
                if weight is not None:
                    loss = weighted(loss, weight)
                with contextlib.nullcontext() if self._backward is None else self._backward():
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        return total

    def through(self, wrapper: torch.nn.Module) -> None:
        """Call the model through a wrapper from now on, such as `DistributedDataParallel(rewritten.module)`.

        What has `no_sync`, as that has, is asked for the gradients of all processes once, with the last micro-batch.
        The model itself as a wrapper: each process trains by itself, as far as the step knows.

        Raises:
            DecisionError: for what does not wrap this model, and under a plan with a step in backward, which uses a
                gradient before those of other processes are added to it.
        """
        if wrapper is not self.module and getattr(wrapper, "module", None) is not self.module:
            raise DecisionError(
                f"this {type(wrapper).__name__} does not wrap the rewritten {type(self.module).__name__}: give what "
                "was made of rewritten.module"
            )
        if wrapper is not self.module and self._backward is not None:
            raise DecisionError(
                f"step-in-backward uses each gradient before {type(wrapper).__name__} has added up those of all "
                "processes: plan with step-in-backward forbidden"
            )
        self._called, self._asks_for_wrapper = wrapper, False

    def require_wrapper(self) -> None:
        """Refuse to step among several processes until `through` has said what brings them together."""
        self._asks_for_wrapper = True

    def check_weights(self, tried: CouplingCheck | None = None) -> None:
        """Hold the weights of micro-batches against what the loss is a mean over, in the next step that has any.

        Where that is by labels, each later step is held against it too.

        Args:
            tried: refuses a batch whose parts do not add up to it.
        """
        self._means, self._tried = ReductionWatcher(), tried

    def check_splitting(self, tried: CouplingCheck | None) -> None:
        """Look at some batches whether their parts add up to them, whatever means are taken."""
        self._tried = tried

    def _watched_loss(self, part: Any, weight: torch.Tensor | float, means: ReductionWatcher) -> torch.Tensor:
        with self._autocast(), contextlib.ExitStack() as watched:
            note = None
            if means.forward_too:
                note = watched.enter_context(means.part(weight))
            output = self.calling.call(self._called, part)
            means.forward_is_over()
            note = note or watched.enter_context(means.part(weight))
            loss = _scalar(loss_of(output, part, self.loss_fn))
        note(loss)
        return loss

    def _check_weights(self, means: ReductionWatcher, batch: Any) -> None:
        if not means.parts:  # a batch so small that it was not split
            self._means = means
            return
        try:
            means.refuse_other_weights()
        except DecisionError:
            options = {"parts": means.farthest_off, "among": means.parts}
            if self._tried is None or not self._tried.agrees(self.module, batch, self._loss_in_full, **options):
                raise
            self._later = None  # means that are no part of the loss, or of single samples
            return
        self._later = means.later() or self._later

    def update(self) -> None:
        """Train by the gradients that the parameters have, and drop them. Part of every call.

        Raises:
            WorkloadError: for a sparse gradient that the optimizer cannot take. Nothing is trained then.
        """
        refuse_layouts(self.module, self.optimizer)
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            clip_gradients(self.module, self.max_grad_norm)
        stepped = True
        if self.scaler is not None:
            scale = None if self.scheduler is None else self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            stepped = scale is not None and self.scaler.get_scale() >= scale
        elif self._backward is None:
            self.optimizer.step()
        if self.scheduler is not None and stepped:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on, for `torch.save`: optimizer state, gradient scaler, scheduler, and of which plan.

        Not in it: the model's weights (`model.state_dict()`), schedules that `apply` was not given, and the random
        state, which dropout goes on from (`torch.get_rng_state()`, `torch.cuda.get_rng_state()`). With all of them,
        training goes on to the same bits. As with torch's optimizers the tensors are the live ones, and go on to
        change.

        Raises:
            DecisionError: after `undo`.
        """
        self._refuse_if_closed()
        return step_state.saved(self.module, self.optimizer, self.scaler, self.scheduler, self._decisions)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, by the same plan for the same model.

        Load it with `torch.load(path, map_location="cpu")`: each tensor is then moved to its parameter by itself, and
        the card holds the optimizer's state once, as the plan promises. The state that was there is dropped first. What
        lies on the card already stays there as long as `state` does.

        Raises:
            PlanFileError: for a state of another plan, model or optimizer. Nothing is changed then.
            DecisionError: after `undo`.
        """
        self._refuse_if_closed()
        step_state.load(state, self.module, self.optimizer, self.scaler, self.scheduler, self._decisions)

    def close(self) -> None:
        """Refuse further calls: the module is no longer rewritten."""
        self._closed = True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise DecisionError("this training step was undone: apply the plan again to get a new one")

    def _parts(
        self, batch: Any
    ) -> Iterator[tuple[Any, torch.Tensor | float | None, contextlib.AbstractContextManager]]:
        """Parts, weights, and the context of forward and backward."""
        parts = iter(((batch, None),)) if self._split is None else self._split(batch)
        if self._called is self.module or not hasattr(self._called, "no_sync"):
            for part, weight in parts:
                yield part, weight, contextlib.nullcontext()
            return
        before = next(parts)
        for following in parts:
            yield *before, self._called.no_sync()
            before = following
        yield *before, contextlib.nullcontext()

    def _loss(self, batch: Any) -> torch.Tensor:
        with self._autocast():
            return self._loss_of(self._called, batch)

    def _loss_in_full(self, batch: Any) -> torch.Tensor:
        """In full precision, and past what brings several processes together."""
        return self._loss_of(self.module, batch)

    def _loss_of(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return _scalar(loss_of(self.calling.call(model, batch), batch, self.loss_fn))

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(next(self.module.parameters()).device.type, dtype=self.autocast_dtype)


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    return loss.reshape(()) if loss.dim() else loss


def refuse_layouts(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise for gradients that the optimizer cannot take, by name, before it has updated any other parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            sparse = parameter.grad.is_sparse
            why = why_not_sparse(optimizer, group) if sparse else why_not_dense(optimizer)
            if why is None:
                continue
            name = next((name for name, known in module.named_parameters() if known is parameter), "a parameter")
            optimizer.zero_grad(set_to_none=True)
            raise WorkloadError(
                f"{why}, and '{name}' has a {'sparse' if sparse else 'dense'} one: use SGD or Adagrad "
                "without weight_decay, which take both, or embeddings with sparse=False"
            )
