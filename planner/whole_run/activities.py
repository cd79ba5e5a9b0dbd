"""Activities between the steps of a training run: evaluation, an average of the weights, saving, resuming.

Each activity is a function that runs on the virtual GPU with the rewritten model and its optimizers, so that its memory
is that of the real code, not a formula.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from planner.errors import WorkloadError
from planner.recording.rehearsal import MakeBatch
from planner.workload.workload import Workload

EVALUATION, AVERAGING, SAVING, RESUMING = (
    "evaluation",
    "average of the weights",
    "saving a checkpoint",
    "resuming from a checkpoint",
)


Run = Callable[[torch.nn.Module, Any, Callable[[], contextlib.AbstractContextManager], MakeBatch], object]
"""Runs an activity.

Arguments: the rewritten model, its optimizers, a function that returns the context of its forwards, and one that makes
a batch of a number of samples.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activity:
    """Something that happens between steps."""

    name: str
    run: Run


def evaluation(workload: Workload, batch_size: int, *, kept_samples: int = 0) -> Activity:
    """Returns the evaluation of a model on batches with the shape of the training batch, without gradients.

    A training step of the user's own does not say how the model is called, so that it has no such evaluation.

    Args:
        batch_size: number of samples in a batch of the evaluation.
        kept_samples: number of samples whose logits stay on the card until the evaluation ends, as in transformers'
            Trainer with `compute_metrics` and without `eval_accumulation_steps`; 0 if each batch's are dropped.

    Raises:
        WorkloadError: the training step is the user's own.
    """
    if workload.step is not None:
        raise WorkloadError(
            "an evaluation of a step of your own cannot be planned from a batch size, because only your code says how "
            "the model is called: give the evaluation as a function, with between=[evaluate]"
        )

    def run(
        module: torch.nn.Module,
        _: object,
        autocast: Callable[[], contextlib.AbstractContextManager],
        make_batch: MakeBatch,
    ) -> None:
        was_training = module.training
        module.eval()
        kept = None
        with torch.no_grad(), autocast():
            for number in range(2):
                batch = make_batch(batch_size)
                output = workload.calling.call(module, batch)
                if workload.loss_fn is not None:
                    _ = workload.loss_fn(output, batch)
                if not kept_samples:
                    continue
                logits = _logits(output)
                # The Trainer concatenates what it has kept with the logits of each batch. The last time is the largest.
                others = max(kept_samples - batch_size, 0)
                kept = logits if number == 0 else torch.cat([logits.new_empty((others, *logits.shape[1:])), logits])
        del kept
        module.train(was_training)

    return Activity(name=EVALUATION, run=run)


def averaging() -> Activity:
    """Returns the update of an exponential moving average of the weights, whose copy is on the card (EMA)."""
    averages: list[torch.optim.swa_utils.AveragedModel] = []

    def run(module: torch.nn.Module, optimizer: Any, *_: object) -> None:
        if not averages:
            average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
            averages.append(torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=average))
        averages[0].update_parameters(module)

    return Activity(name=AVERAGING, run=run)


def saving() -> Activity:
    """Returns the saving of a checkpoint: `torch.save` copies one tensor after the other to the host."""

    def run(module: torch.nn.Module, optimizer: Any, *_: object) -> None:
        for tensor in _state(module, optimizer):
            tensor.cpu()

    return Activity(name=SAVING, run=run)


def resuming() -> Activity:
    """Returns the loading of a checkpoint onto the card, with `torch.load(..., map_location="cuda")`.

    Until the load ends, weights and optimizer state are on the card twice.
    """

    def run(module: torch.nn.Module, optimizer: Any, *_: object) -> None:
        loaded = [torch.empty_like(tensor) for tensor in _state(module, optimizer)]
        with torch.no_grad():
            for tensor, new in zip(_state(module, optimizer), loaded, strict=True):
                tensor.copy_(new)

    return Activity(name=RESUMING, run=run)


def own(function: Callable[..., object], name: str | None = None) -> Activity:
    """Returns an activity of the user's own, called as `function(model, optimizer)` or `function(model)`.

    Raises:
        WorkloadError: it is not a function of one or two arguments, or a call of it runs nothing.
    """
    label = name or str(getattr(function, "__name__", type(function).__name__))
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise WorkloadError(
            f"between has '{label}', which is a coroutine or a generator, so that a call of it runs nothing: give a "
            "function that runs to its end"
        )
    try:
        inspect.signature(function).bind(None, None)
        takes = 2
    except (TypeError, ValueError):
        try:
            inspect.signature(function).bind(None)
            takes = 1
        except (TypeError, ValueError) as error:
            raise WorkloadError(
                f"between has '{label}', which cannot be called as function(model, optimizer): give functions of the "
                "model, or of the model and the optimizer"
            ) from error
    return Activity(name=label, run=lambda module, optimizer, *_: function(*(module, optimizer)[:takes]))


KNOWN: dict[str, Callable[[], Activity]] = {"average": averaging, "save": saving, "resume": resuming}
"""Activities by the names that users give."""


def activity(given: str | Callable[..., object], name: str | None = None) -> Activity:
    """Returns the activity of a known name, or one of the user's own.

    Raises:
        WorkloadError: the name is not known, or the function does not have one or two arguments.
    """
    if callable(given):
        return own(given, name)
    if given not in KNOWN:
        raise WorkloadError(
            f"between has '{given}', which is not known: choose from {', '.join(KNOWN)}; planner.plan in Python also "
            "takes functions"
        )
    return KNOWN[given]()


def _state(module: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Returns the tensors on the card of which a checkpoint consists: weights, buffers, and optimizer state."""
    states = (module.state_dict(), *(each.state_dict() for each in tree_leaves(optimizer)))
    device = next(module.parameters()).device
    leaves = (leaf for state in states for leaf in tree_leaves(state))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device == device]


def _logits(output: Any) -> torch.Tensor:
    """Returns the logits of a model's output: what the Trainer keeps, apart from the loss."""
    if isinstance(output, Mapping):
        tensors = [value for name, value in output.items() if name != "loss" and isinstance(value, torch.Tensor)]
    else:
        tensors = (
            [value for value in output if isinstance(value, torch.Tensor)] if isinstance(output, tuple) else [output]
        )
    return tensors[0]
