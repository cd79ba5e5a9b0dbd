"""A few samples of a batch taken together, and in two parts: their gradients, or the values of their loss.

In evaluation, in full precision, and with random numbers that are all alike: nothing but the weights of the parts, or
that samples depend on each other, makes them differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from rewrite.samples import map_tensors
from rewrite.steady_random import SteadyRandom

logger = logging.getLogger(__name__)

_ELEMENTS = 1 << 20
"""About how many elements of the gradient are compared: of the smallest parameters, which are of all layers."""

_BOUNDS = {"full": (1e-3, 3e-5), "tf32": (1e-2, 3e-3), "lower": (5e-2, 5e-2)}
"""Of the norm of gradients, and of the loss, by precision: a sample is not computed as it is beside others."""

_ROUNDING = 1e-5
"""Of the loss, or of 1 if that is more: a gradient below this is nothing but rounding."""

_SMALL = 1e-3
"""A gradient or loss below this may be; then it is another one where samples change places."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Some samples taken together, and apart."""

    model: torch.nn.Module
    batch: Any
    samples: int
    loss_of: Callable[[Any], torch.Tensor]
    terms_of: Callable[[Any, int], torch.Tensor | float]
    precision: str

    def rows_that_differ(self, few: int) -> torch.Tensor:
        """Numbers of samples, with the least padding first and the most last, and others evenly between."""
        order = amounts_of_padding(self.batch, self.samples).argsort(stable=True)
        return order[torch.linspace(0, self.samples - 1, few).round().long()]

    def blocks_that_differ(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of the samples of two micro-batches: that with the least padding, and that with the most."""
        blocks = torch.arange(self.samples).split(size)
        amounts = amounts_of_padding(self.batch, self.samples).split(size)
        order = torch.stack([each.mean() for each in amounts]).argsort(stable=True)
        return blocks[order[0]], blocks[order[-1]]

    def of_gradient(self, *halves: torch.Tensor) -> Tried | None:
        """None where no gradients can be taken, or they are nothing. `halves`: numbers of samples."""
        trained = sorted((p for p in self.model.parameters() if p.requires_grad), key=torch.Tensor.numel)
        ends = itertools.accumulate(parameter.numel() for parameter in trained)
        compared = [parameter for parameter, end in zip(trained, ends, strict=True) if end <= _ELEMENTS] or trained[:1]

        losses = []

        def taken(part: Any) -> torch.Tensor:
            loss = self.loss_of(part).reshape(())
            losses.append(abs(float(loss.detach())))
            gradients = torch.autograd.grad(loss, compared, allow_unused=True, materialize_grads=True)
            return torch.cat([(g.to_dense() if g.is_sparse else g).flatten().cpu().double() for g in gradients])

        try:
            with torch.enable_grad():
                tried = self._compared("gradient", taken, halves)
        except RuntimeError as why:  # reentrant checkpoints, no memory, a loss that nothing trained leads to
            logger.info("gradients of parts of a batch could not be compared (%s)", why)
            return None
        return None if tried is None or tried.size <= _ROUNDING * max(1.0, *losses) else tried

    def of_loss(self, *halves: torch.Tensor) -> Tried | None:
        with torch.no_grad():
            return self._compared("loss", lambda part: self.loss_of(part).reshape(1).cpu().double(), halves)

    def _compared(
        self, what: str, taken: Callable[[Any], torch.Tensor], halves: Sequence[torch.Tensor]
    ) -> Tried | None:
        """None where all is zero, or the whole is no number.

        Raises:
            _UnsteadyError: where the same samples in another order are too far off to tell anything.
        """
        rows = torch.cat(list(halves))
        whole, *parts = (picked(self.batch, self.samples, some) for some in (rows, *halves))
        all_terms = float(self.terms_of(whole, len(rows)))
        if not all_terms:
            return None
        shares = [float(self.terms_of(*half)) / all_terms for half in zip(parts, map(len, halves), strict=True)]
        with _looked_at(self.model):
            together, again = taken(whole), taken(whole)
            weighted = [taken(part) * share for part, share in zip(parts, shares, strict=True) if share]
            size = max(float(together.norm()), sum(float(one.norm()) for one in weighted))
            if not size or not together.isfinite().all():
                return None
            error = float((together - sum(weighted)).norm()) / size
            tried = Tried(what, len(rows), math.inf if math.isnan(error) else error, size, self.precision)
            if tried.is_off and not float((together - again).norm()) <= tried.bound * size:
                raise _UnsteadyError(f"the same samples have another {what} when they are taken again")
            if tried.is_off and size < _SMALL:
                turned = taken(picked(self.batch, self.samples, rows.flip(0)))
                if not float((together - turned).norm()) <= tried.bound * size:
                    raise _UnsteadyError(f"the {what} is nothing but rounding")
        return tried


@dataclasses.dataclass(frozen=True)
class Tried:
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

    def __str__(self) -> str:
        return (
            f"taken in two parts, as micro-batches are, the {self.what} of {self.few} samples comes out "
            f"{self.error:.2%} off: the loss compares samples, or is a sum, or a mean over something else than samples "
            "or labels"
        )


def precision_of(model: torch.nn.Module, tensors: list[torch.Tensor]) -> str:
    """Of a model without autocast."""
    if any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in tensors):
        return "lower"
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    rounds = torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
    return "tf32" if rounds and any(tensor.is_cuda for tensor in tensors) else "full"


def amounts_of_padding(batch: Any, samples: int) -> torch.Tensor:
    """For each sample.

    Padding is what is commonest in a tensor, or zero among numbers that are not whole; samples without a second
    dimension differ by their value.
    """
    amounts = torch.zeros(samples, dtype=torch.float64)

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and len(tensor) == samples and not tensor.is_complex():
            flat = tensor.detach().reshape(samples, -1)
            if flat.shape[1] > 1:
                values = flat.int() if flat.dtype == torch.bool else flat
                commonest = 0 if flat.is_floating_point() else values.flatten().mode().values
                flat = values == commonest
            found = flat.double().mean(1).cpu()
            most = found.abs().max()
            if math.isfinite(most) and most:
                amounts.add_(found / most)
        return tensor

    map_tensors(count, batch, lambda mappings: mappings if len(mappings) == samples else None)
    return amounts


def picked(batch: Any, samples: int, rows: torch.Tensor) -> Any:
    """The part of a batch with these samples, as `samples_between` cuts it."""
    return map_tensors(
        lambda t: t.detach()[rows.to(t.device)] if t.dim() and len(t) == samples else t,
        batch,
        lambda mappings: [mappings[row] for row in rows.tolist()] if len(mappings) == samples else None,
    )


class _UnsteadyError(Exception):
    """Of a loss that depends on more than the model and the samples."""


@contextlib.contextmanager
def _looked_at(model: torch.nn.Module) -> Iterator[None]:
    """In evaluation, with steady random numbers; modes, buffers and random numbers are afterwards as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    numpy, numbers = sys.modules.get("numpy"), random.getstate()
    arrays = None if numpy is None else numpy.random.get_state()
    devices = {parameter.device for parameter in model.parameters()}
    cards = [device for device in devices if device.type == "cuda"]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # which leaves zeros at padding
        with contextlib.ExitStack() as stack:
            for kind in {device.type for device in devices}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.random.fork_rng(cards))
            stack.enter_context(SteadyRandom(cards))
            for module, _ in modes:
                module.training = False  # past a `train` of its own, which may merge weights
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.clear_autocast_cache()  # of weights without gradients
        random.setstate(numbers)
        if numpy is not None:
            numpy.random.set_state(arrays)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
