"""A case of the judge: a model, its batches, its loss and the way it is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

SAMPLES = 7
"""Number of samples of a batch. It is odd, so that each split but one has a smaller last micro-batch."""

Loss = Callable[[Any, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained. Each training builds it anew, so that it may keep state anywhere."""

    name: str
    build: Callable[[], Any]
    """Returns the model, or (model, loss function). Called under a fixed seed."""
    batch: Callable[[int], Any]
    """Returns the batch of a step, which is counted from 0. Called under a seed of the step."""
    loss: Loss | None = None
    """`loss(output, batch)`; None if `build` returns it or the model returns its loss."""
    optimizer: Callable[..., torch.optim.Optimizer]
    """`optimizer(model, **options)`, where the options choose a kernel."""
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    """Maximum norm of all gradients; None to clip nothing."""
    terms: Callable[[Any], float] | None = None
    """Number of terms that the loss of a batch is a mean over, which the judge passes as `loss_weight` in a training of
    its own. None if samples or labels are what the product assumes, or if the loss is no such mean."""
    draws: bool = False
    """True if the forward or the loss draws random numbers, so that splitting the batch changes the training."""
    splits: bool = True
    """True if the mean of the micro-batches' losses, weighted by `terms`, is the loss of the batch. If it is false,
    splitting has to be refused, and is judged against the whole batch."""
    rounding: float = 1e-9
    """Maximum relative difference that reordered sums may cause in double precision. Larger for models that compute in
    fp32 whatever their dtype is."""
    steps: int = 5
    single: bool = True
    """False for models that do not train in single precision under autocast."""
    dtype: torch.dtype = torch.float64
    """Dtype in which all techniques but autocast are judged. fp32 needs a larger `rounding`."""
    known: tuple[tuple[str, str], ...] = ()
    """(prefix of a technique, limit in the documentation) for differences that the documentation states."""

    def built(self, dtype: torch.dtype) -> tuple[torch.nn.Module, Loss | None]:
        """Returns a new model in training mode and its loss function. `dtype` must be torch's default dtype."""
        seed(0)
        made = self.build()
        model, loss = made if isinstance(made, tuple) else (made, self.loss)
        return (model.double() if dtype is torch.float64 else model).train(), loss

    def batches(self) -> list[Any]:
        """Returns the batches of all steps, in torch's default dtype."""
        made = []
        for step in range(self.steps):
            seed(100 + step)
            made.append(self.batch(step))
        return made


def seed(number: int) -> None:
    """Seed all global random generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype inside the context, so that tensors that a forward creates have it too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, **options)


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


class Registry:
    """Collects the cases of one file."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def add(self, name: str, build: Callable[[], Any], batch: Callable[[int], Any], **fields: Any) -> None:
        """Adds a case. The optimizer is SGD with momentum unless another one is given."""
        self.cases.append(Case(name=name, build=build, batch=batch, **{"optimizer": sgd, **fields}))
