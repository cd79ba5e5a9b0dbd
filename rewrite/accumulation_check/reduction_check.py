"""Check the weights of micro-batches against the reductions (means and sums over loss terms) that the loss takes.

What it checks: the user's loss function does not state which terms it averages over. Most loss functions end in a call
of a loss function of `torch.nn.functional`, and the arguments of that call (target, `ignore_index`, class weights,
`reduction`) determine the terms. The weight of a micro-batch is right if it is the share of the batch's terms that are
in the micro-batch, or 1 if the loss is a sum.

How: a `TorchFunctionMode` around forward and loss of each micro-batch notes these calls. Nothing is computed twice. The
first step is always watched. Later steps are watched only if the loss is a mean over labels and the weights do not
count labels, because the number of labels may change from batch to batch.

What it cannot see: reductions that are written out (`cost.sum() / mask.sum()`), reductions in functions that are not
listed below, and whether a reduction is part of the loss at all. In these cases `coupling_check` compares gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from planner.errors import DecisionError

_BY_LABEL = (F.cross_entropy, F.nll_loss)
"""Loss functions that take the mean over the labels that are not ignored."""

_BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip
"""Loss functions that take the mean over all elements of the input."""

_TOLERANCE = 1e-6
"""Maximum error of a weight that counts as rounding."""

_FORBID = "plan with accumulation forbidden"
_STATE = "pass loss_weight=... to apply, a function that takes a batch and returns"
_STATE_SUM = f"{_STATE} 1"
_STATE_TERMS = f"{_STATE} the number of terms, or forbid accumulation if the loss is made of several means"


class ReductionWatcher(TorchFunctionMode):
    """Notes the reductions that the loss takes in the micro-batches of one step, and compares them with the weights.

    For each micro-batch call `start_part`, optionally `end_forward`, and `end_part`; then `refuse_other_weights`.

    Args:
        has_loss_weight_option: True if the user could have stated other weights. Error messages then say how.
        is_first: True if no earlier step was watched.
        watches_forward: True to watch the forward too, since it may compute the loss; False to watch only what runs
            after `end_forward`.
    """

    def __init__(
        self, *, has_loss_weight_option: bool = True, is_first: bool = True, watches_forward: bool = True
    ) -> None:
        super().__init__()
        self.is_first = is_first
        self.farthest_off = (0, 1)
        """Indices of the micro-batches whose weights are too high and too low by the most; set before an error."""
        self.error = 0.0
        """Error of the weight of the first of these two, as a fraction of the weights of both; set before an error."""
        self._has_loss_weight_option = has_loss_weight_option
        self._watches_forward = watches_forward
        self._is_active = False
        """True while this mode is on torch's stack of modes."""
        self._in_forward = True
        self._label_means_in_forward: set[bool] = set()
        """Contains True if the loss took a mean over labels inside of a forward, and False if it did so after one."""
        self._weights: list[torch.Tensor | float | None] = []
        self._means: list[list[tuple[Callable, torch.Tensor]]] = []
        """For each micro-batch: the loss functions that took a mean, each with its number of terms."""
        self._sums: list[list[torch.Tensor]] = []
        """For each micro-batch: the results of the loss functions that took a sum."""
        self._losses: list[torch.Tensor] = []

    @property
    def parts(self) -> int:
        """Number of micro-batches that were watched."""
        return len(self._weights)

    def start_part(self, weight: torch.Tensor | float | None) -> None:
        """Begin with the next micro-batch. The weight is None if it is known only after all micro-batches."""
        self._weights.append(weight)
        self._means.append([])
        self._sums.append([])
        self._in_forward = True
        if self._watches_forward:
            self._activate()

    def end_forward(self) -> None:
        """Note that the model's forward has ended: later reductions belong to the loss function."""
        self._in_forward = False
        self._activate()

    def end_part(self, loss: torch.Tensor | None) -> None:
        """Stop watching, and note the loss of this micro-batch.

        Does nothing if no micro-batch is being watched, for example after a forward for evaluation.

        Args:
            loss: the loss of the micro-batch; None if there is none, for example after an error.
        """
        if not self._is_active:
            return
        self._is_active = False
        self.__exit__(None, None, None)
        if loss is not None:
            self._losses.append(loss.detach())

    def later(self) -> Callable[[], ReductionWatcher] | None:
        """Returns a function that creates the watcher of a later step; None if later steps need no check.

        Weights that are right in this step stay right if the loss takes no mean over labels, or if the weights count
        labels too. Watching a forward costs time on the host, so it is not watched if all means over labels were taken
        after the forward.
        """
        if not self._label_means_in_forward or any(isinstance(weight, torch.Tensor) for weight in self._weights):
            return None
        return functools.partial(
            ReductionWatcher, has_loss_weight_option=self._has_loss_weight_option, is_first=False,
            watches_forward=True in self._label_means_in_forward,
        )  # fmt: skip

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in (*_BY_LABEL, *_BY_ELEMENT) and _may_be_trained_by(result):
            bound = _signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            self._note(function, bound.arguments, result)
        return result

    def refuse_other_weights(self, weights: Sequence[float] | None = None) -> None:
        """Raise `DecisionError` if the weighted losses of the micro-batches do not add up to the loss of the batch.

        Nothing is refused if no mean or sum was seen in the loss, or if their number differs between micro-batches:
        the right weights are then unknown.

        Args:
            weights: the weight of each micro-batch; None for the weights that were passed to `start_part`.
        """
        # A rehearsal has no values to compare.
        tensors = [terms for means in self._means for _, terms in means] + self._losses
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return
        if weights is None:
            weights = [float(weight) for weight in self._weights if weight is not None]
        self._refuse_weights_of_sums(weights)
        # The n-th reduction of each micro-batch is taken to be the n-th one of the batch.
        if len(set(map(len, self._means))) != 1:
            return
        for calls in zip(*self._means, strict=True):
            function, terms = calls[0][0], [float(number) for _, number in calls]
            if function in _BY_ELEMENT and len(set(terms)) == 1 and abs(sum(weights) - 1.0) < _TOLERANCE:
                continue  # a term that does not depend on the batch, such as weight decay: it is the same in each part
            shares = [number / sum(terms) for number in terms] if sum(terms) else weights
            errors = [share - weight for share, weight in zip(shares, weights, strict=True)]
            if any(abs(error) > _TOLERANCE for error in errors):
                a, b = self.farthest_off = (errors.index(min(errors)), errors.index(max(errors)))
                self.error = abs(shares[a] / (shares[a] + shares[b]) - weights[a] / (weights[a] + weights[b]))
                raise DecisionError(
                    f"accumulation weights the losses of the micro-batches by {_listed(weights)}, but "
                    f"{function.__name__} is a mean over {_listed(terms)} terms: "
                    f"{_STATE_TERMS if self._has_loss_weight_option else _FORBID}"
                )

    def _refuse_weights_of_sums(self, weights: Sequence[float]) -> None:
        """Raise `DecisionError` if the loss is a sum and a weight is not 1.

        The loss is a sum if, in every micro-batch, it equals the result of a loss function that took a sum.
        """
        are_comparable = len(set(map(len, self._sums))) == 1 and len(self._losses) == len(weights)
        for sums in zip(*self._sums, strict=True) if are_comparable else ():
            is_loss = all(torch.equal(result, loss) for result, loss in zip(sums, self._losses, strict=True))
            if is_loss and any(abs(weight - 1.0) > _TOLERANCE for weight in weights):
                raise DecisionError(
                    f"accumulation weights the losses of the micro-batches by {_listed(weights)}, but the loss is a "
                    f"sum: {_STATE_SUM if self._has_loss_weight_option else _FORBID}"
                )

    def _activate(self) -> None:
        if not self._is_active:
            self.__enter__()
            self._is_active = True

    def _note(self, function: Callable, arguments: dict[str, Any], result: torch.Tensor) -> None:
        """Note the call of a loss function: for a sum its result, for a mean the number of its terms."""
        reduction = arguments["reduction"]
        if any(arguments.get(deprecated) is not None for deprecated in ("size_average", "reduce")):
            reduction = torch.nn._reduction.legacy_get_string(arguments["size_average"], arguments["reduce"])
        if reduction == "sum":
            self._sums[-1].append(result.detach())
        elif reduction == "mean":
            if function in _BY_LABEL and not arguments["target"].is_floating_point():
                self._label_means_in_forward.add(self._in_forward)
            terms = _label_count(arguments) if function in _BY_LABEL else arguments["input"].numel()
            terms = torch.as_tensor(terms, dtype=torch.float64, device=result.device)
            self._means[-1].append((function, terms))


def _may_be_trained_by(result: object) -> TypeGuard[torch.Tensor]:
    """True if a result requires a gradient, so that it may be part of the loss.

    False for results inside of `vmap`, whose values cannot be read.
    """
    return (
        isinstance(result, torch.Tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(result)
        and result.requires_grad
    )


@functools.cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def _label_count(arguments: dict[str, Any]) -> torch.Tensor | float:
    """Return the number of labels that are not ignored, or the sum of their class weights."""
    target, weight = arguments["target"], arguments["weight"]
    if target.is_floating_point():  # a distribution over classes for each row
        return target.numel() / target.shape[1 if target.dim() > 1 else 0]
    counted = target != arguments["ignore_index"]
    return counted.sum() if weight is None else weight[target.where(counted, 0)].double().mul(counted).sum()


def _listed(numbers: Sequence[float]) -> str:
    """Return the first four numbers as text, for an error message."""
    shown = ", ".join(f"{number:.4g}" for number in numbers[:4])
    return shown if len(numbers) <= 4 else f"{shown}, ..."
