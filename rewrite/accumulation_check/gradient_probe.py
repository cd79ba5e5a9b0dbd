"""Some samples of a batch taken together, and in two parts: their gradients, or the values of their loss.

In full precision, with random numbers that do not depend on the parts, and with running statistics as in evaluation:
nothing but the weights of the parts, or that samples depend on each other, makes them differ. No trace is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from planner.rewrite.accumulation_check.batch_independent_random import SteadyRandom
from planner.rewrite.accumulation_check.side_effects import SideEffectGuard
from planner.rewrite.portable.batch_slicing import map_tensors

logger = logging.getLogger(__name__)

_ELEMENTS = 1 << 18
"""About how many elements of gradients are compared, spread over all parameters."""

_LEAST_ELEMENTS = 256
"""Of each parameter that has as many."""

_BOUNDS = {"full": (1e-3, 3e-5), "tf32": (1e-2, 3e-3), "lower": (5e-2, 5e-2)}
"""Of the norm of gradients, and of the loss, by precision: a sample is not computed as it is beside others."""

_SLIGHT = 1e-2
"""A gradient that is off by less is told in the log: small terms of balance over a batch, for instance."""

_ROUNDING = 1e-5
"""Of the loss, or of 1 if that is more: a gradient below this is nothing but rounding."""

_SMALL = 1e-3
"""A gradient or loss below this may be; then it is another one where samples change places."""

_NOISE = 1 << 18
"""Numbers by which parameters are changed, again and again."""

_SHAKEN = 0.5
"""By how much of their root mean square parameters are changed where values are compared."""

Halves = tuple[torch.Tensor, torch.Tensor]
"""Numbers of the samples of two parts."""


class UnsteadyError(Exception):
    """Of a loss that depends on more than the model and the samples, or is nothing but rounding."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """How far the parts are off the whole."""

    what: Literal["gradient", "loss"]
    few: int
    error: float
    """Of the size."""
    size: float
    """The norm of the whole, or the sum of those of its parts if that is more."""
    precision: str

    @property
    def bound(self) -> float:
        return _BOUNDS[self.precision][self.what == "loss"]

    @property
    def is_off(self) -> bool:
        return self.error > self.bound

    @property
    def is_slight(self) -> bool:
        """Off by less than what is worth a refusal."""
        return self.what == "gradient" and self.error < _SLIGHT

    def __str__(self) -> str:
        off = f"{self.error:.2%}" if self.error > 1e-3 else f"{self.error:.1e} of itself"
        return (
            f"taken in two parts, as micro-batches are, the {self.what} of {self.few} samples comes out "
            f"{off if math.isfinite(self.error) else 'as no number, or far'} off: the loss compares samples, or is a "
            "sum, or a mean over something else than samples or labels (or the model normalises over a batch)"
        )


class GradientProbe:
    """Of one batch. The gradient or loss of two parts, each with its weight, against that of both together.

    Args:
        loss_of: the loss of a batch, from the model.
        terms_of: from a batch and its samples: over how many terms its loss is taken to be a mean.
        untouched: of the model and what takes its loss.
        trains: whether modules are as they are in training, except for running statistics.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        samples: int,
        loss_of: Callable[[Any], torch.Tensor],
        terms_of: Callable[[Any, int], torch.Tensor | float],
        untouched: SideEffectGuard,
        *,
        trains: bool = True,
    ) -> None:
        self.model, self.batch, self.samples, self.loss_of, self.terms_of = model, batch, samples, loss_of, terms_of
        self.untouched, self.trains = untouched, trains
        self.drew = False
        """Whether random numbers were drawn."""
        self._drew_on_host = False
        self.precision = _precision_of(model, batch)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def of_gradient(self, halves: Halves, *, own_numbers: bool = False) -> ProbeResult | None:
        """None where no gradients can be taken, or they are nothing.

        Args:
            own_numbers: random numbers belong to samples.
        """
        losses = []

        def taken(part: Any) -> torch.Tensor:
            loss = self.loss_of(part).reshape(())
            losses.append(abs(float(loss.detach())))
            return sampled_gradient(loss, self._trained)

        try:
            with torch.enable_grad():
                tried = self._compared("gradient", taken, halves, own_numbers)
        except RuntimeError as why:  # reentrant checkpoints, no memory, a loss that nothing trained leads to
            logger.info("gradients of parts of a batch could not be compared (%s)", why)
            return None
        return None if tried is None or tried.size <= _ROUNDING * max(1.0, *losses) else tried

    def of_loss(self, halves: Halves, *, shaken: bool = False) -> ProbeResult | None:
        """`shaken`: of other parameters. Near its initialisation a model's loss may be the same for all samples."""

        def taken(part: Any) -> torch.Tensor:
            if shaken:
                self._shake()
            return self.loss_of(part).reshape(1).cpu().double()

        with torch.no_grad():
            return self._compared("loss", taken, halves, False)

    def _compared(
        self, what: Literal["gradient", "loss"], taken: Callable[[Any], torch.Tensor], halves: Halves, own_numbers: bool
    ) -> ProbeResult | None:
        """None where all is zero, or the whole is no number.

        Raises:
            UnsteadyError: where the same samples are too far off when they are taken again.
        """
        rows = torch.cat(halves)
        all_terms = float(self.terms_of(self._picked(rows), len(rows)))
        if not all_terms:
            return None
        shares = [float(self.terms_of(self._picked(half), len(half))) / all_terms for half in halves]

        def looked(some: torch.Tensor) -> torch.Tensor:
            with self._as_tried(some if own_numbers else None):
                return taken(self._picked(some))

        together = looked(rows)
        weighted = [looked(half) * share for half, share in zip(halves, shares, strict=True) if share]
        size = max(float(together.norm()), sum(float(one.norm()) for one in weighted))
        if not size or not together.isfinite().all():
            return None
        error = float((together - sum(weighted)).norm()) / size
        tried = ProbeResult(what, len(rows), math.inf if math.isnan(error) else error, size, self.precision)
        if tried.is_off and not float((together - looked(rows)).norm()) <= tried.bound * size:
            raise UnsteadyError(f"the same samples have another {what} when they are taken again")
        if tried.is_off and self._drew_on_host:
            raise UnsteadyError("it draws random numbers from numpy or Python, which are those of other samples")
        may_be_rounding = tried.is_off and size < _SMALL
        if may_be_rounding and not float((together - looked(rows.flip(0))).norm()) <= tried.bound * size:
            raise UnsteadyError(f"the {what} is nothing but rounding")
        return tried

    @contextlib.contextmanager
    def _as_tried(self, samples: torch.Tensor | None) -> Iterator[None]:
        devices = {parameter.device for parameter in self.model.parameters()}
        fast = torch.backends.mha.get_fastpath_enabled()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # or it would give up its graphs for good
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            torch.backends.mha.set_fastpath_enabled(False)  # which leaves zeros at padding
            stack.enter_context(self.untouched.restoring())
            for kind in {device.type for device in devices}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            for module in self.model.modules():  # past a `train` of its own, which may merge weights
                if not self.trains or _has_running_statistics(module):
                    module.training = False
            numbers = None if samples is None else samples.tolist()
            random = stack.enter_context(SteadyRandom([d for d in devices if d.type == "cuda"], numbers))
            yield
            self.drew |= bool(random.draws)
        self._drew_on_host |= self.untouched.drew_on_host

    def _shake(self) -> None:
        """Change parameters, in place: it is undone as what forwards write is."""
        noise = torch.arange(_NOISE, dtype=torch.float64).mul_(2.4).sin_().float()
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_contiguous() and parameter.is_floating_point():
                norm = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32)
                size = float(norm) / max(1, parameter.numel()) ** 0.5 or 0.05
                of_its_kind = noise.to(parameter.device, parameter.dtype)
                for part in parameter.detach().view(-1).split(len(noise)):
                    part.add_(of_its_kind[: len(part)], alpha=_SHAKEN * size)

    def _picked(self, rows: torch.Tensor) -> Any:
        """The part of the batch with these samples, as `samples_between` cuts it."""

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or len(tensor) != self.samples:
                return tensor
            return tensor.detach()[rows.to(tensor.device)].requires_grad_(tensor.requires_grad)

        def pick_list(mappings: list[Any]) -> list[Any] | None:
            return [mappings[row] for row in rows.tolist()] if len(mappings) == self.samples else None

        return map_tensors(pick, self.batch, pick_list)


def sampled_gradient(loss: torch.Tensor, trained: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Elements of the gradient of each parameter, so scaled that their norm is about that of all of it; on the host.

    Of the gradients themselves there is no more than one at a time. None is added to `.grad`, and no hook that waits
    for that is called.
    """
    elements = sum(parameter.numel() for parameter in trained)
    stride = -(-elements // _ELEMENTS) | 1  # odd: not the same columns of all rows
    strides = [max(1, min(stride, parameter.numel() // _LEAST_ELEMENTS)) | 1 for parameter in trained]
    found: dict[int, torch.Tensor] = {}

    def note(number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # of a function that says so
            return None
        found[number] = _spread(gradient, strides[number]).cpu().double() * strides[number] ** 0.5
        return gradient.new_zeros(()).expand_as(gradient) if gradient.layout is torch.strided else None

    with contextlib.ExitStack() as stack:
        for number, parameter in enumerate(trained):
            if parameter._backward_hooks is None:
                stack.callback(setattr, parameter, "_backward_hooks", None)
            stack.callback(parameter.register_hook(functools.partial(note, number)).remove)
        torch.autograd.grad(loss, trained, allow_unused=True)
    for number, (parameter, stride) in enumerate(zip(trained, strides, strict=True)):
        found.setdefault(number, torch.zeros(-(-parameter.numel() // stride), dtype=torch.float64))
    return torch.cat([found[number] for number in range(len(trained))])


def _spread(gradient: torch.Tensor, stride: int) -> torch.Tensor:
    """Each so manyth element; of complex numbers real parts and imaginary ones, in turn."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, elements = gradient.indices(), gradient.values()
        if len(rows) > 1:
            return _spread(gradient.cpu().to_dense(), stride)
        width = gradient[0].numel()
        places = (rows[0][:, None] * width + torch.arange(width, device=rows.device)).reshape(-1)
        chosen = places % stride == 0
        spread = elements.new_zeros(-(-gradient.numel() // stride))
        spread[places[chosen] // stride] = elements.reshape(-1)[chosen]
        return spread
    if gradient.layout is not torch.strided:
        gradient = gradient.cpu().to_dense()
    if gradient.is_contiguous():
        every = gradient.view(-1)[::stride]
    else:  # without a copy of it
        places = torch.arange(0, gradient.numel(), stride, device=gradient.device)
        every = gradient[torch.unravel_index(places, gradient.shape)]
    if not every.is_complex():
        return every
    every = every.resolve_conj()
    return torch.where(torch.arange(len(every), device=every.device) % 2 == 0, every.real, every.imag)


def _has_running_statistics(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats


def _precision_of(model: torch.nn.Module, batch: Any) -> str:
    """Of a model without autocast."""
    tensors: list[torch.Tensor] = list(model.parameters())

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, batch)
    if any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in tensors):
        return "lower"
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    rounds = torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
    return "tf32" if rounds and any(tensor.is_cuda for tensor in tensors) else "full"
