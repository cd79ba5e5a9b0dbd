"""The reference: a training loop written by hand, and the state that a training leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.parity.case import SAMPLES, Case, Loss, default_dtype, seed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Trained:
    """Losses of each step, and the state of the model and its optimizer at the end."""

    losses: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]
    """Buffers, optimizer state, and numbers and arrays among the attributes of modules."""
    start: dict[str, torch.Tensor]
    """The parameters before the first step."""


class Training:
    """A model that is being trained: by the plain loop, or by a step that is passed to `run`."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.model, self.loss_fn = case.built(dtype)
        self.batches = case.batches()
        self.start = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.losses: list[torch.Tensor] = []
        seed(1000)

    def run(self, step: Callable[[Any], torch.Tensor], batches: list[Any]) -> None:
        """Take one step with each batch. Random generators are seeded once, before the first step."""
        for batch in batches:
            self.losses.append(step(batch).detach().clone().reshape(()))

    def trained(self, optimizer: torch.optim.Optimizer) -> Trained:
        """Returns copies of the losses and of all state."""
        others = {f"buffer {name}": buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                for key, value in state.items():
                    others[f"optimizer {key} {names[id(parameter)]}"] = as_tensor(value)
        for path, module in self.model.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key not in ("training", "forward"):
                    others.update(
                        (f"attribute {path}.{name}", as_tensor(leaf)) for name, leaf in numbers_in(value, key)
                    )
        parameters = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        return Trained(list(self.losses), parameters, others, self.start)


def as_tensor(value: Any) -> torch.Tensor:
    """Returns a copy of a number, array or tensor as a tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return torch.as_tensor(np.asarray(0.0 if value is None else value))


def numbers_in(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields numbers, arrays and tensors in an attribute and in containers and plain objects inside of it."""
    is_own = type(value).__module__.startswith("benchmarks.parity") and not isinstance(value, torch.nn.Module)
    if isinstance(value, (bool, int, float, complex, np.ndarray, np.number, torch.Tensor)):
        if not isinstance(value, torch.nn.Parameter):
            yield name, value
    elif depth == 3:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers_in(item, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from numbers_in(item, f"{name}[{position}]", depth + 1)
    elif is_own and hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            yield from numbers_in(item, f"{name}.{key}", depth + 1)


def forward(model: torch.nn.Module, batch: Any, loss_fn: Loss | None) -> torch.Tensor:
    """Returns the loss of a batch."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch) if loss_fn is None or len(batch) == 1 else model(*batch[:-1])
    else:
        output = model(batch)
    if loss_fn is not None:
        return loss_fn(output, batch)
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["loss"] if isinstance(output, Mapping) else output.loss


def parts_of(batch: Any, size: int) -> list[Any]:
    """Returns the micro-batches of a batch of tensors whose first dimension counts the samples."""
    return [_slice(batch, start, start + size) for start in range(0, _samples(batch), size)]


def _samples(batch: Any) -> int:
    tensors = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else [batch]
    return next(len(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim())


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _slice(item, start, stop) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_slice(item, start, stop) for item in value)
    return value[start:stop] if isinstance(value, torch.Tensor) and value.dim() else value


class PlainLoop:
    """Trains with zero_grad, forward, loss, backward, clipping, optimizer step and scheduler step.

    Args:
        size: samples of a micro-batch; None to train on the whole batch at once.
        clips: False to leave out the clipping of gradients.
        wrap: returns what is called instead of the model, such as `DistributedDataParallel`, or shards the model in
            place. It is called before the optimizer is created.
    """

    def __init__(
        self, case: Case, dtype: torch.dtype, *, autocast: str | None, size: int | None, clips: bool,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    ) -> None:  # fmt: skip
        self.training = Training(case, dtype)
        self._called = wrap(self.training.model)
        self.optimizer = case.optimizer(self.training.model)
        self._scheduler = None if case.scheduler is None else case.scheduler(self.optimizer)
        self._autocast, self._size = autocast, size
        self._clip = case.clip if clips else None
        self._scaler = torch.amp.GradScaler("cpu") if autocast == "fp16" else None
        self._terms = case.terms or (lambda batch: _samples(batch))

    def step(self, batch: Any) -> torch.Tensor:
        """Take one optimizer step and return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._size is None or _samples(batch) <= self._size:
            loss = self._backward(batch, 1.0)
        else:
            parts = parts_of(batch, self._size)
            terms = [float(self._terms(part)) for part in parts]
            whole = float(self._terms(batch))
            shares = [(part, count / whole) for part, count in zip(parts, terms, strict=True) if count]
            loss = sum((self._backward(part, share) for part, share in shares[1:]), self._backward(*shares[0]))
        self._update()
        return loss

    def _backward(self, batch: Any, weight: float) -> torch.Tensor:
        dtype = DTYPES.get(self._autocast or "")
        with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            loss = forward(self._called, batch, self.training.loss_fn).reshape(())
        if weight != 1.0:
            loss = loss * weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()

    def _update(self) -> None:
        scale = None if self._scaler is None else self._scaler.get_scale()
        if self._clip is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.training.model.parameters(), self._clip)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        skipped = scale is not None and self._scaler is not None and self._scaler.get_scale() < scale
        if self._scheduler is not None and not skipped:
            self._scheduler.step()


@functools.lru_cache(maxsize=64)
def trained_plainly(
    case: Case, dtype: torch.dtype, *, autocast: str | None = None, size: int | None = None, clips: bool = True,
    steps: int | None = None, last_plain: bool = False,
) -> Trained:  # fmt: skip
    """Train a case by the plain loop.

    Args:
        steps: number of steps; None for all of the case.
        last_plain: train the last batch as a whole and without autocast, as after `undo`.
    """
    with default_dtype(dtype):
        loop = PlainLoop(case, dtype, autocast=autocast, size=size, clips=clips)
        batches = loop.training.batches[: case.steps if steps is None else steps]
        if last_plain:
            loop.training.run(loop.step, batches[:-1])
            loop._autocast = loop._size = loop._scaler = loop._clip = loop._scheduler = None
            loop.training.run(loop.step, batches[-1:])
        else:
            loop.training.run(loop.step, batches)
        return loop.training.trained(loop.optimizer)


__all__ = ["SAMPLES", "PlainLoop", "Trained", "Training", "forward", "parts_of", "trained_plainly"]
