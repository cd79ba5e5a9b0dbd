"""How a model is called with a batch, and how the loss is read from its output.

The rehearsal, the training step and the emitted files all follow this convention.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.errors import WorkloadError

LossFn = Callable[[Any, Any], torch.Tensor]
"""The user's loss function: `loss_fn(output, batch)` returns the loss as a scalar tensor."""


Parallelize = Callable[[Any, Any], Any]
"""The user's own function that divides a model among cards: `parallelize(model, mesh)`.

`mesh` is a `torch.distributed.device_mesh.DeviceMesh` with named dimensions. The function changes the model in place,
by `parallelize_module` or `fully_shard` for example, and may return it, or DistributedDataParallel that wraps it.
"""

StepFn = Callable[[Any, Any, Any], Any]
"""The user's own training step: `step(model, optimizer, batch)` runs forwards, backwards and updates itself.

It may return anything. `model` is the module (a `torch.nn.ModuleDict` if a dict of modules was given), `optimizer` has
the form in which the optimizers were given: one optimizer, a dict or a tuple.
"""


class Calling(enum.Enum):
    """The ways to call a model with a batch. The value of each member is the call as a Python expression."""

    KEYWORDS = "model(**batch)"
    """The batch is a mapping of keyword arguments, as transformers models take it."""
    POSITIONAL = "model(*batch)"
    """The batch is a tuple, and the model returns the loss."""
    ALL_BUT_LAST = "model(*batch[:-1])"
    """The batch is a tuple whose last item is the targets, and a loss function is given."""
    SINGLE = "model(batch)"
    """The batch is one tensor, or a dataclass or graph that the model takes as its only argument."""
    STEP = "step(model, optimizer, batch)"
    """The user's own training step calls the model."""

    @classmethod
    def of(cls, batch: Any, loss_fn: LossFn | None) -> Calling:
        """Returns the way to call a model with `batch`. It depends on the type of the batch and on `loss_fn`.

        Raises:
            WorkloadError: the batch is of a type that is not supported.
        """
        if isinstance(batch, Mapping):
            return cls.KEYWORDS
        is_dataclass = dataclasses.is_dataclass(batch) and not isinstance(batch, type)
        if isinstance(batch, torch.Tensor) or is_dataclass or is_graph(batch):
            return cls.SINGLE
        if isinstance(batch, (tuple, list)):
            return cls.POSITIONAL if loss_fn is None or len(batch) < 2 else cls.ALL_BUT_LAST
        raise WorkloadError(
            f"a batch of type {type(batch).__name__} is not supported: give a dict of keyword arguments, a dataclass, "
            "a tuple or a tensor, or several batches as a DataLoader, an iterator or a list"
        )

    def call(self, model: torch.nn.Module, batch: Any) -> Any:
        """Runs the model's forward on `batch` and returns its output."""
        match self:
            case Calling.KEYWORDS:
                if not isinstance(batch, Mapping):
                    raise WorkloadError(
                        f"the batch is a {type(batch).__name__}, but the plan was made for a dict of keyword "
                        "arguments: give a dict, or make the plan again for this kind of batch"
                    )
                return model(**batch)
            case Calling.POSITIONAL:
                return model(*batch)
            case Calling.ALL_BUT_LAST:
                return model(*batch[:-1])
            case Calling.SINGLE:
                return model(batch)
            case Calling.STEP:
                raise WorkloadError("only the step function of the user says how the model is called")


def is_graph(value: Any) -> bool:
    """True for an object with `to_dict` and `apply`, as the graphs of torch_geometric (`Data`, `HeteroData`, `Batch`).

    `value.apply(function)` replaces each tensor of the object by the result of the function, and returns the object.
    """
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("to_dict", "apply"))


def loss_of(output: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Returns the scalar loss, given the output of a forward.

    With a loss function, the loss is `loss_fn(output, batch)`. Without a loss function, it is `output.loss`,
    `output["loss"]`, the first item of a tuple or list, or the output itself.

    Raises:
        WorkloadError: there is no loss, or it has more than one element.
    """
    loss: Any
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
        if inspect.iscoroutine(loss):
            loss.close()  # else Python warns that nobody has awaited it
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if loss_fn is not None:
            raise WorkloadError(
                f"the loss function returned {found}, not a scalar tensor: return the mean over the samples"
            )
        raise WorkloadError(
            f"the model's loss is {found}, not a scalar tensor: return a scalar loss from the model, "
            "or give loss_fn(output, batch)"
        )
    return loss
