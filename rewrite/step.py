"""One optimizer step on a full batch. Without any decision it is one iteration of the usual training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decisions import Decision
from planner.rewrite import step_state
from planner.rewrite.portable.batch_slicing import marking_last
from planner.rewrite.portable.loss_and_clipping import clip_divided_gradients, clip_gradients, weighted
from planner.rewrite.portable.loss_terms import share_of_part
from planner.rewrite.rewriting import Uncopied
from planner.rewrite.step_observer import StepObserver
from planner.workload.call_convention import Calling, LossFn, loss_of
from planner.workload.torch_optimizers import several_processes, why_not_dense, why_not_sparse

BatchSplitter = Callable[[Any], Iterator[tuple[Any, "torch.Tensor | float | None"]]]
"""Function that splits a batch: yields micro-batches with the weights of their losses (None if there is only one)."""

NoSync = Callable[[], contextlib.AbstractContextManager]
"""Function that returns a context in which backwards reduce no gradients over the processes."""


@final
class TrainingStep(Uncopied):
    """Trains with one batch per call: `loss = step(batch)`. The batch has to be on the model's device.

    The loss of the batch is returned, detached, as a 0-dim tensor. The order is that of the emitted `training_step`:
    split the batch; for each micro-batch forward and loss under autocast, weight, scale, backward; then unscale, clip,
    optimizer step, scaler update, scheduler step, set gradients to None. If backward itself updates the parameters
    (step-in-backward), only the scheduler step and setting gradients to None follow it. If the gradient scaler skips a
    step because a gradient is not finite, the scheduler is not stepped either.

    The model's output is freed before backward. From one micro-batch to the next only gradients and the running loss
    stay in memory.

    Args:
        device_type: type of the device of forwards; None for that of the parameters when a forward begins.
        split: splits a batch into micro-batches; None to train on the whole batch at once.
        rank_share: returns the factor of this rank's loss for a batch; None for one process. The mean over the ranks of
            the loss that is returned is then the loss of the batches of all of them.
        is_divided: True if some parameters may be DTensors of different meshes, and others plain tensors.
        backward: returns the context of a backward that updates the parameters itself; None if the optimizer steps
            after backward.
        decisions: the plan's decisions, which are saved in `state_dict`.
        observers: called between the stages of each step (`StepObserver`).
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
        device_type: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        split: BatchSplitter | None = None,
        rank_share: Callable[[Any], torch.Tensor] | None = None,
        is_divided: bool = False,
        backward: Callable[[], contextlib.AbstractContextManager] | None = None,
        decisions: Sequence[Decision] = (),
        observers: tuple[StepObserver, ...] = (),
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.calling = calling
        self.loss_fn = loss_fn
        self.max_grad_norm = max_grad_norm
        self.autocast_dtype = autocast_dtype
        self._device_type = device_type
        self.scaler = scaler
        self.scheduler = scheduler
        self.observers = observers
        self._split = split
        self._rank_share = rank_share
        self._is_divided = is_divided
        self._backward = backward
        self._decisions = tuple(decisions)
        self._closed = False
        self._called = module
        """The object that is called for a forward: the module, or its wrapper (`wrap_with`)."""
        self._no_sync: NoSync | None = None
        self._requires_wrapper = False
        self._trained = _places(module, optimizer)
        """Parameters of the model that the optimizer updates, by path: (module that has it, name there, parameter)."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """Train with one batch, and return its loss. The errors of `compute_gradients` and `update` are raised."""
        total = self.compute_gradients(batch)
        self.update()
        return total

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """Run forward and backward of each micro-batch, and return the loss of the batch. `update` follows.

        Raises:
            DecisionError: after `undo`; if several processes train and `wrap_with` was not called; if the gradients of
                the micro-batches do not add up to that of the batch (`AccumulationCheck`); if backward computed with
                other values than the forward (`RecomputeCheck`); if parameters of the model were replaced since the
                optimizer was made. Nothing is trained then.
        """
        self._refuse_if_closed()
        self._refuse_separate_processes()
        self._refuse_replaced_parameters()
        try:
            for observer in self.observers:
                observer.before_step(batch)
            total = self._accumulate_gradients(batch)
            for observer in self.observers:
                observer.before_update(batch)
        except BaseException:
            for observer in self.observers:
                observer.after_error()
            self.optimizer.zero_grad(set_to_none=True)  # the next step must not add to gradients of this one
            raise
        return total

    def _accumulate_gradients(self, batch: Any) -> torch.Tensor:
        """Run forward and backward of each micro-batch, and return the loss of the batch."""
        total = None
        share = None if self._rank_share is None else self._rank_share(batch)
        for part, weight, no_sync in self._micro_batches(batch):
            if share is not None:
                weight = share_of_part(share, weight)
            with no_sync:
                loss = self._loss(part, weight)
                if weight is not None:
                    loss = weighted(loss, weight)
                with contextlib.nullcontext() if self._backward is None else self._backward():
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        assert total is not None, "a batch has at least one micro-batch"
        return total

    def _micro_batches(
        self, batch: Any
    ) -> Iterator[tuple[Any, torch.Tensor | float | None, contextlib.AbstractContextManager]]:
        """Yields each micro-batch, its weight, and the context of its forward and backward.

        The context is `_no_sync` for all micro-batches but the last, so that gradients are reduced once per step.
        """
        parts = iter(((batch, None),)) if self._split is None else self._split(batch)
        if self._no_sync is None:
            for part, weight in parts:
                yield part, weight, contextlib.nullcontext()
            return
        for part, weight, is_last in marking_last(parts):
            yield part, weight, contextlib.nullcontext() if is_last else self._no_sync()

    def _loss(self, part: Any, weight: torch.Tensor | float | None) -> torch.Tensor:
        """Run the forward of one micro-batch under autocast, and return its loss."""
        with self.autocast():
            for observer in self.observers:
                observer.before_forward(weight)
            output = self.calling.call(self._called, part)
            for observer in self.observers:
                observer.after_forward()
            loss = loss_of(output, part, self.loss_fn)
            del output  # frees what the loss does not need for backward
            loss = loss.reshape(()) if loss.dim() else loss
            for observer in self.observers:
                observer.after_loss(loss)
        return loss

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context in which forwards run: autocast, or one without effect if the step has full precision."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        device_type = self._device_type or next(self.module.parameters()).device.type
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def update(self) -> None:
        """Update the parameters from their gradients, then set the gradients to None. Each call of the step ends with
        this.

        Raises:
            WorkloadError: if a gradient is sparse or dense and the optimizer does not support that. No parameter is
                updated then.
        """
        refuse_layouts(self.module, self.optimizer)
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            (clip_divided_gradients if self._is_divided else clip_gradients)(self.module, self.max_grad_norm)
        has_stepped = True
        if self.scaler is not None:
            scale = None if self.scheduler is None else self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # A lower scale means that a gradient was not finite and the step was skipped.
            has_stepped = scale is not None and self.scaler.get_scale() >= scale
        elif self._backward is None:
            self.optimizer.step()
        if self.scheduler is not None and has_stepped:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wrap_with(self, wrapper: torch.nn.Module) -> None:
        """Call the model through a wrapper from now on, such as `DistributedDataParallel(rewritten.module)`.

        If the wrapper has `no_sync`, the gradients of all processes are reduced once per step, in the backward of the
        last micro-batch. Pass `rewritten.module` itself to let each process train by its own gradients.

        Raises:
            DecisionError: if the wrapper does not wrap this model, or the plan has step-in-backward, which uses each
                gradient before those of other processes are added to it.
        """
        if wrapper is not self.module and getattr(wrapper, "module", None) is not self.module:
            raise DecisionError(
                f"this {type(wrapper).__name__} does not wrap the rewritten {type(self.module).__name__}: wrap "
                "rewritten.module, and pass that wrapper"
            )
        if wrapper is not self.module and self._backward is not None:
            raise DecisionError(
                f"step-in-backward uses each gradient before {type(wrapper).__name__} has added up those of all "
                "processes: plan with step-in-backward forbidden"
            )
        self._called, self._requires_wrapper = wrapper, False
        self._no_sync = None if wrapper is self.module else getattr(wrapper, "no_sync", None)

    through = wrap_with
    """Former name of `wrap_with`."""

    def train_as_rank(self, wrapper: torch.nn.Module | None, no_sync: NoSync | None) -> None:
        """Train one of several ranks from now on, as a plan for several cards says.

        Args:
            wrapper: the module that reduces gradients over the ranks; None if the model does so itself (FSDP2).
            no_sync: returns a context in which a backward reduces no gradients. It is used for all micro-batches but
                the last. None to reduce the gradients of each micro-batch.
        """
        self.wrap_with(wrapper or self.module)
        self._no_sync = no_sync

    def require_wrapper(self) -> None:
        """From now on, raise an error in each step if several processes train and `wrap_with` was not called."""
        self._requires_wrapper = True

    def _refuse_separate_processes(self) -> None:
        if self._backward is not None and several_processes():
            raise DecisionError(
                "step-in-backward would update parameters before their gradients are summed over the processes: train "
                "in one process, or plan with step-in-backward forbidden"
            )
        if self._requires_wrapper and several_processes():
            raise DecisionError(
                "several processes train here, and this step would train the model of each by its own gradients: "
                "step.wrap_with(torch.nn.parallel.DistributedDataParallel(rewritten.module)) averages them; "
                "step.wrap_with(rewritten.module) trains each process separately, or synchronized by your own code"
            )

    def _refuse_replaced_parameters(self) -> None:
        """Refuse to train if the model no longer has a parameter that the optimizer updates."""
        if all(owner._parameters.get(name) is parameter for owner, name, parameter in self._trained.values()):
            return
        present = {id(parameter) for parameter in self.module.parameters()}
        missing = [path for path, (_, _, parameter) in self._trained.items() if id(parameter) not in present]
        if missing:
            raise DecisionError(
                f"{len(missing)} parameters of {type(self.module).__name__} were replaced after the plan was applied, "
                f"'{missing[0]}' first, so that the optimizer would update tensors that the model does not use: wrap, "
                "shard or convert the model (fully_shard, for example) before you apply the plan"
            )
        self._trained = _places(self.module, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer, gradient scaler and scheduler, and the plan's fingerprint.

        Save it with `torch.save`. Also save the model's weights (`model.state_dict()`), schedulers that were not given
        to `apply`, and the random state that dropout draws from (`torch.get_rng_state()`,
        `torch.cuda.get_rng_state()`): with all of them, training continues to the same bits. The tensors are not
        copied, like those of a torch optimizer's `state_dict`, and change with the next step.

        Raises:
            DecisionError: after `undo`.
        """
        self._refuse_if_closed()
        return step_state.saved(self.module, self.optimizer, self.scaler, self.scheduler, self._decisions)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, under the same plan and for the same model.

        Load it with `torch.load(path, map_location="cpu")`. Each tensor is then copied to the device of its parameter,
        and the card holds the optimizer state once, as the plan promises; the present state is freed first. Tensors of
        `state` that are already on the card stay there as long as `state` exists.

        Raises:
            PlanFileError: if the state belongs to another plan, model or optimizer, or is damaged (an entry is missing,
                unknown, of another shape or dtype, or contains NaN). Nothing is changed then.
            DecisionError: after `undo`.
        """
        self._refuse_if_closed()
        step_state.load(state, self.module, self.optimizer, self.scaler, self.scheduler, self._decisions)

    def close(self) -> None:
        """Raise an error in all further calls, because the module is no longer rewritten."""
        self._closed = True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise DecisionError("this training step was undone: apply the plan again to get a new one")


def _places(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Returns the parameters of the model that the optimizer updates, as in `TrainingStep._trained`."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        f"{path}.{name}".lstrip("."): (owner, name, parameter)
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and id(parameter) in updated
    }


def refuse_layouts(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `WorkloadError` if the optimizer does not support the layout (such as sparse) of a gradient.

    Before it raises, it sets all gradients to None.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            sparse = parameter.grad.is_sparse
            reason = why_not_sparse(optimizer, group) if sparse else why_not_dense(optimizer)
            if reason is None:
                continue
            name = next((name for name, known in module.named_parameters() if known is parameter), "a parameter")
            optimizer.zero_grad(set_to_none=True)
            raise WorkloadError(
                f"{reason}, and '{name}' has a {'sparse' if sparse else 'dense'} gradient: use SGD or Adagrad "
                "without weight_decay, which support both, or embeddings with sparse=False"
            )
