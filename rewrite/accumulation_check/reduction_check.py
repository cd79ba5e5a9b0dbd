"""What a loss is a mean over, seen where it is taken: the weights of micro-batches are held against it.

A loss of somebody's own does not say what it averages. Most end in a function of `torch.nn.functional`, which does: by
its target, the label that it ignores, its class weights. In the first step these are watched, and weights that make
another mean of the batch are refused before anything is trained by them. A mean over what labels say may be another one
in any later batch: where one is taken, all steps are watched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from planner.errors import DecisionError

_BY_LABEL = (F.cross_entropy, F.nll_loss)
_BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip

_TOLERANCE = 1e-6
"""Of a share of the batch. Shares are quotients of whole numbers, or of sums of class weights in fp32."""

_FORBID = "plan with accumulation forbidden"
_STATE = "give apply loss_weight=..., a function from a batch to"
_STATE_SUM = f"{_STATE} 1"
_STATE_TERMS = f"{_STATE} the number of terms, or forbid accumulation where a loss is made of several means"


class ReductionWatcher(TorchFunctionMode):
    """Around the forward and loss of each part of a batch: `part` for each, then `refuse_other_weights`.

    Args:
        may_be_stated: whether another weight than the usual one could have been given.
        first: whether nothing is known of the loss yet.
        forward_too: whether a forward may take the mean, and not only what is called with its output.
    """

    def __init__(self, *, may_be_stated: bool = True, first: bool = True, forward_too: bool = True) -> None:
        super().__init__()
        self._may_be_stated, self.first, self.forward_too = may_be_stated, first, forward_too
        self._in_forward = True
        self._by_label: set[bool] = set()
        """Of means over what labels say: whether they were taken in the forward."""
        self._weights: list[torch.Tensor | float] = []
        self._means: list[list[tuple[Callable, torch.Tensor]]] = []
        """By part: functions, and over how many terms they took a mean."""
        self._sums: list[list[torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []
        self.farthest_off = (0, 1)
        """Numbers of two parts: what was refused weighs the one too much and the other too little."""

    @property
    def parts(self) -> int:
        """How many are watched."""
        return len(self._weights)

    def forward_is_over(self) -> None:
        """Of the part that is watched."""
        self._in_forward = False

    def later(self) -> Callable[[], ReductionWatcher] | None:
        """What makes the watch of later steps; None where no mean is over what labels say, or the weights are too."""
        if not self._by_label or any(isinstance(weight, torch.Tensor) for weight in self._weights):
            return None  # to watch a whole forward takes the host some time, so that is left out where it can be
        return functools.partial(ReductionWatcher, first=False, forward_too=True in self._by_label)

    @contextlib.contextmanager
    def part(self, weight: torch.Tensor | float | None) -> Iterator[Callable[[torch.Tensor], None]]:
        """Watch what computes the loss of a part with this weight; give the loss to what is yielded.

        The weight is None where it is known only when all parts have been seen.
        """
        self._weights.append(weight)
        self._means.append([])
        self._sums.append([])
        self._in_forward = self.forward_too
        with self:
            yield lambda loss: self._losses.append(loss.detach())

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in (*_BY_LABEL, *_BY_ELEMENT) and _is_trained_by(result):
            given = _signature(function).bind(*args, **kwargs)
            given.apply_defaults()
            self._note(function, given.arguments, result)
        return result

    def _note(self, function: Callable, given: dict, result: torch.Tensor) -> None:
        reduction = given["reduction"]
        if any(given.get(old) is not None for old in ("size_average", "reduce")):
            reduction = F._Reduction.legacy_get_string(given["size_average"], given["reduce"])
        if reduction == "sum":
            self._sums[-1].append(result.detach())
        elif reduction == "mean":
            if function in _BY_LABEL and not given["target"].is_floating_point():
                self._by_label.add(self._in_forward)
            terms = _labels(given) if function in _BY_LABEL else given["input"].numel()
            terms = torch.as_tensor(terms, dtype=torch.float64, device=result.device)
            self._means[-1].append((function, terms))

    def refuse_other_weights(self, weights: Sequence[float] | None = None) -> None:
        """Raise `DecisionError` if the weights make another loss of the parts than the whole batch has.

        Args:
            weights: instead of those that came with the parts.

        Nothing is said of a loss that takes no mean that is seen, nor of one that takes it in some parts only.
        """
        tensors = [terms for means in self._means for _, terms in means] + self._losses
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return
        weights = [float(weight) for weight in (self._weights if weights is None else weights)]
        are_comparable = len(set(map(len, self._sums))) == 1 and len(self._losses) == len(weights)
        for sums in map(list, zip(*self._sums, strict=True) if are_comparable else ()):
            is_sum = all(torch.equal(one, loss) for one, loss in zip(sums, self._losses, strict=True))
            if is_sum and any(abs(weight - 1.0) > _TOLERANCE for weight in weights):
                raise DecisionError(
                    f"accumulation weighs the losses of the micro-batches by {_told(weights)}, but the loss is a sum: "
                    f"{_STATE_SUM if self._may_be_stated else _FORBID}"
                )
        if len(set(map(len, self._means))) != 1:
            return
        for calls in zip(*self._means, strict=True):
            function, terms = calls[0][0], [float(number) for _, number in calls]
            if function in _BY_ELEMENT and len(set(terms)) == 1 and abs(sum(weights) - 1.0) < _TOLERANCE:
                continue  # over what is no part of the batch, such as a weight's decay: shares of it add up to it
            shares = [number / sum(terms) for number in terms] if sum(terms) else weights
            off = [share - weight for share, weight in zip(shares, weights, strict=True)]
            if any(abs(each) > _TOLERANCE for each in off):
                self.farthest_off = (off.index(min(off)), off.index(max(off)))
                raise DecisionError(
                    f"accumulation weighs the losses of the micro-batches by {_told(weights)}, but "
                    f"{function.__name__} is a mean over {_told(terms)} terms: "
                    f"{_STATE_TERMS if self._may_be_stated else _FORBID}"
                )


def _is_trained_by(result: object) -> bool:
    """Whether a loss can be part of what is trained by; inside of `torch.func.vmap` it has no number to ask for."""
    is_plain = isinstance(result, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(result)
    return is_plain and result.requires_grad


@functools.cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def _labels(given: dict) -> torch.Tensor | float:
    """Number of rows whose label counts, or the sum of their class weights."""
    target, weight = given["target"], given["weight"]
    if target.is_floating_point():  # a distribution for each row
        return target.numel() / target.shape[1 if target.dim() > 1 else 0]
    counted = target != given["ignore_index"]
    return counted.sum() if weight is None else weight[target.where(counted, 0)].double().mul(counted).sum()


def _told(numbers: list[float]) -> str:
    shown = ", ".join(f"{number:.4g}" for number in numbers[:4])
    return shown if len(numbers) <= 4 else f"{shown}, ..."
