"""How a batch meets a model, and how a loss comes out: one convention for rehearsal, training and emitted code."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.errors import WorkloadError

LossFn = Callable[[Any, Any], torch.Tensor]
"""`loss_fn(output, batch)` -> a scalar tensor."""


class Calling(enum.Enum):
    """The four ways. The value is the Python expression that calls the model."""

    KEYWORDS = "model(**batch)"
    """The batch is a mapping (transformers)."""
    POSITIONAL = "model(*batch)"
    """The batch is a tuple and the model returns the loss."""
    ALL_BUT_LAST = "model(*batch[:-1])"
    """The batch is a tuple ending in the targets, and a loss function is given."""
    SINGLE = "model(batch)"
    """The batch is one tensor, or a dataclass that the model takes as it is."""

    @classmethod
    def of(cls, batch: Any, loss_fn: LossFn | None) -> Calling:
        if isinstance(batch, Mapping):
            return cls.KEYWORDS
        if isinstance(batch, torch.Tensor) or (dataclasses.is_dataclass(batch) and not isinstance(batch, type)):
            return cls.SINGLE
        if isinstance(batch, (tuple, list)):
            return cls.POSITIONAL if loss_fn is None or len(batch) < 2 else cls.ALL_BUT_LAST
        raise WorkloadError(
            f"batch of type {type(batch).__name__} cannot be used: give a dict of keyword arguments, a dataclass, a "
            "tuple, or a tensor"
        )

    def call(self, model: torch.nn.Module, batch: Any) -> Any:
        match self:
            case Calling.KEYWORDS:
                return model(**batch)
            case Calling.POSITIONAL:
                return model(*batch)
            case Calling.ALL_BUT_LAST:
                return model(*batch[:-1])
            case Calling.SINGLE:
                return model(batch)


def loss_of(output: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """The scalar loss of a forward: from `loss_fn`, or `.loss`, `["loss"]`, the first of a tuple, the output itself."""
    if loss_fn is not None:
        loss = loss_fn(output, batch)
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        loss = output.loss
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    else:
        loss = output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise WorkloadError(
            f"the model's loss is {shape}, not one number: return a scalar loss from the model, "
            "or give loss_fn(output, batch)"
        )
    return loss
