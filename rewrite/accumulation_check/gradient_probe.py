"""Compare the gradient of some samples with the weighted sum of the gradients of two halves of them.

What it checks: let a loss be a mean over `n` terms, of which the halves have `n1` and `n2`. Training by micro-batches
is right if `grad(both) = n1 / n * grad(first half) + n2 / n * grad(second half)`. The relative error of this equation
is compared with a bound that depends on the precision of the computation.

How: all other causes of a difference between the two sides are removed. The model runs in full precision (no autocast),
with random numbers that do not depend on the split (`batch_independent_random`), and with normalization layers that use
their running statistics. About 2**18 elements of the gradients are compared, spread over all parameters. If gradients
do not fit in memory, or are zero, values of the loss are compared instead, with the model's parameters and with
perturbed ones. The model's state is restored after each evaluation (`side_effects`).

What it cannot see: differences below the bound, differences in gradient elements that are not sampled, and differences
that only batch normalization, dropout or lower precision cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planner.plan_types.words import counted
from planner.rewrite.accumulation_check.batch_independent_random import BatchIndependentRandom
from planner.rewrite.accumulation_check.sample_choice import tensors_of
from planner.rewrite.accumulation_check.sampled_gradient import sampled_gradient
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.batch_slicing import map_tensors

logger = logging.getLogger(__name__)

_BOUNDS = {"full": (1e-3, 3e-5), "tf32": (1e-2, 3e-3), "lower": (5e-2, 5e-2)}
"""Precision of the matmuls -> maximum relative errors that count as rounding, of gradients and of the loss.

Batches of different sizes use different kernels, so that the results for a sample differ in their last bits.
"""

SLIGHT = 1e-2
"""Relative error of a gradient below which a difference is logged instead of refused.

A small additional loss over the batch, such as one that balances experts, makes such a difference.
"""

_ROUNDING = 1e-5
"""Fraction of the loss (or of 1, if 1 is larger) below which the norm of a gradient counts as a rounding error."""

_SMALL = 1e-3
"""Norm of a result below which a difference counts as rounding if reordering the samples changes the result too."""

_NOISE = 1 << 18
"""Number of elements of the pattern that is added to parameters to perturb them. It is repeated over each parameter."""

_PERTURBATION = 0.5
"""Size of the perturbation of a parameter, as a fraction of its root mean square."""

Halves = tuple[torch.Tensor, torch.Tensor]
"""Indices of the samples in the first and in the second half."""


class NotReproducibleError(Exception):
    """Raised if a difference may have another cause than the split: results do not repeat, or are rounding errors."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """The difference between the gradient (or loss) of some samples and the weighted sum of those of two halves."""

    quantity: Literal["gradient", "loss"]
    samples: int
    """Number of samples in both halves together."""
    error: float
    """Norm of the difference, divided by `size`."""
    size: float
    """Norm of the result for all samples, or the sum of the norms of the weighted halves if that is larger."""
    precision: str
    """Precision of the matmuls: 'full', 'tf32' or 'lower' (`_BOUNDS`)."""

    @property
    def bound(self) -> float:
        """Maximum relative error that counts as rounding."""
        return _BOUNDS[self.precision][self.quantity == "loss"]

    @property
    def is_off(self) -> bool:
        """True if the error exceeds `bound`: the weighted halves do not add up to the result for all samples."""
        return self.error > self.bound

    @property
    def is_slight(self) -> bool:
        """True if the difference is so small that it is only logged. A larger one aborts the step."""
        return self.quantity == "gradient" and self.error < SLIGHT

    def __str__(self) -> str:
        error = f"{self.error:.2%}" if self.error > 1e-3 else f"{self.error:.1e} of itself"
        samples = counted(self.samples, "sample")
        return (
            f"computed in two parts like micro-batches, the {self.quantity} of {samples} comes out "
            f"{error if math.isfinite(self.error) else 'not finite, or far'} off: the loss compares samples, or is a "
            "sum, or a mean over something other than samples or labels (or the model normalizes over the batch)"
        )


class GradientProbe:
    """Compares the gradient or loss of some samples with the weighted sum of those of two halves of the samples.

    Args:
        batch: the batch from which samples are taken.
        samples: number of samples in `batch`.
        loss_of: computes the loss of a batch with the model.
        terms_of: `terms_of(batch, samples)` returns the number of terms over which the loss is assumed to be a mean.
        guard: restores the model and its loss function after each evaluation.
        in_training_mode: leave modules in the mode that they are in, except that normalization layers with running
            statistics are put in evaluation mode; False puts all modules in evaluation mode.
        not_by_sample: paths of the tensors of the batch that are the same for all samples.
        chunked_head: the module that computes its logits in chunks, which it does only in training mode and with
            gradients enabled; None if there is none. It always runs in this way, because all logits at once may not fit
            into memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        samples: int,
        loss_of: Callable[[Any], torch.Tensor],
        terms_of: Callable[[Any, int], torch.Tensor | float],
        guard: SideEffectGuard,
        *,
        in_training_mode: bool = True,
        not_by_sample: tuple[str, ...] = (),
        chunked_head: torch.nn.Module | None = None,
    ) -> None:
        self.model, self.batch, self.samples, self.loss_of, self.terms_of = model, batch, samples, loss_of, terms_of
        self.guard, self.in_training_mode, self.chunked_head = guard, in_training_mode, chunked_head
        self.not_by_sample = not_by_sample
        self.drew = False
        """True if an op drew random numbers in one of the comparisons."""
        self.precision = _precision_of(model, batch)
        self._drew_on_host = False
        """True if numpy or Python drew random numbers: these cannot be made independent of the split."""
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def compare_gradients(self, halves: Halves, *, own_draws: bool = False) -> ProbeResult | None:
        """Compare gradients. Returns None if they cannot be computed, or are no larger than rounding errors.

        Args:
            own_draws: True to give each sample its own random numbers, False to give all samples the same.
        """
        losses: list[float] = []

        def gradient_of(part: Any, share: float) -> torch.Tensor:
            loss = self.loss_of(part).reshape(())
            losses.append(abs(float(loss.detach())))
            # The loss is weighted as in training, because a backward may depend on the size of its gradient.
            return sampled_gradient(loss * share, self._trained)

        try:
            with torch.enable_grad():
                result = self._compare("gradient", gradient_of, halves, own_draws)
        except RuntimeError as error:  # reentrant checkpoints, out of memory, or nothing trainable in the loss
            logger.info("gradients of parts of a batch could not be compared (%s)", error)
            return None
        return None if result is None or result.size <= _ROUNDING * max(1.0, *losses) else result

    def compare_losses(self, halves: Halves, *, perturbed: bool = False) -> ProbeResult | None:
        """Compare values of the loss. Returns None if they are zero or not finite.

        Args:
            perturbed: change the parameters first. Near its initialization a model may have the same loss for all
                samples, so that wrong weights would not show.
        """

        def value_of(part: Any, share: float) -> torch.Tensor:
            if perturbed:
                self._perturb()
            return self.loss_of(part).detach().reshape(1).cpu().double() * share

        with self._values_only():
            return self._compare("loss", value_of, halves, False)

    def compare_with(
        self, original: Callable[[], contextlib.AbstractContextManager], samples: torch.Tensor
    ) -> ProbeResult | None:
        """Compare the gradient of some samples with the gradient that the model gives inside the context `original()`.

        Returns None if the gradient is no larger than rounding errors, or not finite.

        Args:
            samples: indices of the samples.

        Raises:
            NotReproducibleError: if there is a difference, but the gradient differs between two equal computations too.
        """

        def evaluate(context: Callable[[], contextlib.AbstractContextManager]) -> torch.Tensor:
            with torch.enable_grad(), self._controlled(None), context():
                return sampled_gradient(self.loss_of(self._select(samples)).reshape(()), self._trained)

        expected, actual = evaluate(original), evaluate(contextlib.nullcontext)
        size = max(float(expected.norm()), float(actual.norm()))
        if size <= _ROUNDING or not expected.isfinite().all():
            return None
        result = ProbeResult("gradient", len(samples), _distance(expected, actual) / size, size, self.precision)
        if result.is_off and _distance(expected, evaluate(original)) > result.bound * size:
            raise NotReproducibleError("the gradient of the same samples differs when it is computed a second time")
        return result

    def change_by_calls(self, samples: torch.Tensor, *, with_gradients: bool) -> float | None:
        """Compute a gradient or loss of the same samples twice, without restoring what the first call changed.

        Returns the relative difference if it is more than rounding, else None. A result that changes depends on a state
        that forward or loss function write, such as a counter of calls or a queue. None also if the result is not
        finite, or if random numbers of numpy or Python may explain the difference.

        Args:
            samples: indices of the samples.
            with_gradients: compare gradients; False to compare values of the loss, with perturbed parameters.
        """

        def result() -> torch.Tensor:
            loss = self.loss_of(self._select(samples)).reshape(())
            return sampled_gradient(loss, self._trained) if with_gradients else loss.detach().cpu().double()

        with torch.enable_grad() if with_gradients else self._values_only(), self._controlled(None):
            if not with_gradients:
                self._perturb()
            first, second = result(), result()
        size = max(float(first.norm()), float(second.norm()))
        if self._drew_on_host or size <= _ROUNDING or not math.isfinite(size):
            return None
        change = _distance(first, second) / size
        return change if change > _BOUNDS[self.precision][not with_gradients] else None

    def _compare(
        self,
        quantity: Literal["gradient", "loss"],
        compute: Callable[[Any, float], torch.Tensor],
        halves: Halves,
        own_draws: bool,
    ) -> ProbeResult | None:
        """Compare `compute(samples, 1)` for all samples with the sum of `compute(half, weight)` over the two halves.

        Returns None if there are no loss terms, all results are zero, or the result for all samples is not finite.

        Raises:
            NotReproducibleError: if there is a difference, but something other than the split can explain it, such as
            random numbers.
        """
        indices = torch.cat(halves)
        all_terms = float(self.terms_of(self._select(indices), len(indices)))
        if not all_terms:
            return None
        shares = [float(self.terms_of(self._select(half), len(half))) / all_terms for half in halves]

        def evaluate(some: torch.Tensor, share: float = 1.0) -> torch.Tensor:
            with self._controlled(some if own_draws else None):
                return compute(self._select(some), share)

        # The result for all samples, and those of the halves, weighted by their shares of the terms.
        together = evaluate(indices)
        weighted = [evaluate(half, share) for half, share in zip(halves, shares, strict=True) if share]
        size = max(float(together.norm()), sum(float(part.norm()) for part in weighted))
        if not size or not together.isfinite().all():
            return None
        error = _distance(together, sum(weighted, torch.zeros(()))) / size
        result = ProbeResult(quantity, len(indices), error, size, self.precision)
        if not result.is_off:
            return result
        # A difference is due to the split only if the same samples give the same result again ...
        if _distance(together, evaluate(indices)) > result.bound * size:
            raise NotReproducibleError(f"the {quantity} of the same samples differs when it is computed a second time")
        if self._drew_on_host:
            raise NotReproducibleError(
                "the model or the loss draws random numbers with numpy or Python, which depend on the split"
            )
        # ... and, if the result is small, gives the same in another order, in which rounding errors differ.
        if size < _SMALL and _distance(together, evaluate(indices.flip(0))) > result.bound * size:
            raise NotReproducibleError(f"the {quantity} is not larger than its rounding error, and cannot be compared")
        return result

    def _values_only(self) -> contextlib.AbstractContextManager:
        """Context for values of the loss, in which nothing is saved for backward."""
        return torch.no_grad() if self.chunked_head is None else _graph_without_saved_tensors()

    @contextlib.contextmanager
    def _controlled(self, samples: torch.Tensor | None) -> Iterator[None]:
        """Context in which only the loss itself makes results depend on the split. Everything is restored at its end.

        Args:
            samples: indices of the samples, to give each its own random numbers; None to give all samples the same.
        """
        devices = {parameter.device for parameter in self.model.parameters()}
        uses_fast_path = torch.backends.mha.get_fastpath_enabled()
        with contextlib.ExitStack() as stack:
            # Another batch size would make torch.compile recompile, and give up the graphs of the training step.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # The fast path of nn.MultiheadAttention writes zeros at padding, which the ordinary path does not.
            stack.callback(torch.backends.mha.set_fastpath_enabled, uses_fast_path)
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(self.guard.restoring())
            for device_type in {device.type for device in devices}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            # Set the flag itself: the model may override `train`, for example to merge adapter weights.
            for module in self.model.modules():
                if _has_running_statistics(module) or not (self.in_training_mode or module is self.chunked_head):
                    module.training = False
            indices = None if samples is None else samples.tolist()
            cards = [device for device in devices if device.type == "cuda"]
            random = stack.enter_context(BatchIndependentRandom(cards, indices))
            yield
            self.drew |= bool(random.draws)
        self._drew_on_host |= self.guard.drew_on_host

    def _perturb(self) -> None:
        """Change the trainable parameters in place, in the same way at each call. The guard restores them."""
        noise = torch.arange(_NOISE, dtype=torch.float64).mul_(2.4).sin_().float()
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_contiguous() and parameter.is_floating_point():
                wide = torch.promote_types(parameter.dtype, torch.float32)
                norm = torch.linalg.vector_norm(parameter.detach(), dtype=wide)
                root_mean_square = float(norm) / max(1, parameter.numel()) ** 0.5 or 0.05
                pattern = noise.to(parameter.device, parameter.dtype)
                for chunk in parameter.detach().view(-1).split(len(noise)):
                    chunk.add_(pattern[: len(chunk)], alpha=_PERTURBATION * root_mean_square)

    def _select(self, indices: torch.Tensor) -> Any:
        """Return the part of the batch that has these samples. They need not be adjacent."""

        def select(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or len(tensor) != self.samples:
                return tensor
            return tensor.detach()[indices.to(tensor.device)].requires_grad_(tensor.requires_grad)

        def select_list(mappings: list[Any]) -> list[Any] | None:
            return [mappings[index] for index in indices.tolist()] if len(mappings) == self.samples else None

        return map_tensors(select, self.batch, select_list, self.not_by_sample)


@contextlib.contextmanager
def _graph_without_saved_tensors() -> Iterator[None]:
    """Context in which gradients are enabled, but nothing is saved for backward, which must not run."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        yield


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference; infinity if the norm is NaN."""
    distance = float((a - b).norm())
    return math.inf if math.isnan(distance) else distance


def why_not_probed(model: torch.nn.Module, batch: Any) -> str | None:
    """The reason why the model cannot be run on samples of the batch and restored afterwards; None if it can.

    Tensors have no values in a rehearsal. If a tensor wraps others (DTensor, for example), writes to the inner tensors
    would not be noticed.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return "the model or the batch has no values"
    wrappers = {type(tensor).__name__ for tensor in tensors if is_traceable_wrapper_subclass(tensor)}
    return f"{min(wrappers)} is a tensor that wraps others" if wrappers else None


def _has_running_statistics(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats


def _precision_of(model: torch.nn.Module, batch: Any) -> str:
    """Return the lowest precision of the matmuls without autocast: "full" (fp32 or double), "tf32" or "lower"."""
    tensors = [*model.parameters(), *tensors_of(batch)]
    if any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in tensors):
        return "lower"
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    rounds = torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
    return "tf32" if rounds and any(tensor.is_cuda for tensor in tensors) else "full"
