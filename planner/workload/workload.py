"""The thing to train: a model, a batch, a loss function, an optimizer. What follows is the same for all of them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from planner.errors import WorkloadError
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import ModelFacts, WorkloadFacts
from planner.workload.call_convention import Calling, LossFn
from planner.workload.model_loss import own_loss
from planner.workload.torch_optimizers import sparse_lookups

OptimizerSpec = str | torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""A name such as 'adamw', a torch optimizer over the model's parameters, or a function from parameters to one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step's worth of work."""

    model: torch.nn.Module
    batch: Any
    """Tensors of it may be on any device, meta included: only shapes and dtypes are used."""
    loss_fn: LossFn | None
    optimizer: OptimizerSpec
    batch_size: int
    seq_len: int | None
    calling: Calling
    reference: str | None
    """How the model was named on the command line; None for a live object."""
    gradients_alive: bool = False
    """Whether gradients of earlier batches are there before the step, which adds to them: the user accumulates."""
    gradient_names: tuple[str, ...] | None = None
    """Parameters whose gradients are there then: those that a backward reaches. None: not rehearsed yet."""

    @property
    def batch_bytes(self) -> int:
        """Of all tensors of the batch, each storage of its own."""
        return sum(tensor.numel() * tensor.itemsize for _, tensor in tensors_of(self.batch))

    def model_facts(self) -> ModelFacts:
        return ModelFacts(
            reference=self.reference,
            name=type(self.model).__name__,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            fingerprint=fingerprint(self.model),
        )

    def facts(self) -> WorkloadFacts:
        return WorkloadFacts(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            batch=tuple(described(self.batch)),
            calling=self.calling.name,
            has_loss_fn=self.loss_fn is not None,
            optimizer=optimizer_name(self.optimizer),
            gradients_alive=self.gradients_alive,
            own_loss=own_loss(self.model, self.calling, self.loss_fn),
        )


def workload(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerSpec = "adamw",
    seq_len: int | None = None,
    reference: str | None = None,
    gradients_alive: bool = False,
) -> Workload:
    """Check and complete what a user gave.

    Raises:
        WorkloadError: no module, a batch without tensors, a model without parameters to train, or sparse gradients
            that would be alive before the step.
    """
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            f"model of type {type(model).__name__} is no torch.nn.Module: give a module, or a function that returns one"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to train"
        )
    if gradients_alive and sparse_lookups(model):
        raise WorkloadError(
            "gradients cannot be alive before the step where an embedding makes sparse ones: each batch adds rows, so "
            "that their size is not known; use sparse=False"
        )
    return Workload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=batch_size_of(batch),
        seq_len=seq_len,
        calling=Calling.of(batch, loss_fn),
        reference=reference,
        gradients_alive=gradients_alive,
    )


def batch_size_of(batch: Any) -> int:
    """Number of samples: the most frequent first dimension of the batch's tensors, ties to the first seen.

    Tensors in lists of mappings, such as those that have targets of detection for each sample, count only where there
    are no others.
    """
    sizes: Counter[int] = Counter()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    map_tensors(count, batch, of_mappings=lambda mappings: mappings)
    if not sizes:
        map_tensors(count, batch)
    if not sizes:
        raise WorkloadError(
            "the batch holds no tensor with a first dimension: give tensors whose dimension 0 is the sample"
        )
    return sizes.most_common(1)[0][0]


def has_mapping_for_each_sample(batch: Any) -> bool:
    samples, lengths = batch_size_of(batch), []

    def note(mappings: list[Any]) -> list[Any]:
        lengths.append(len(mappings))
        return mappings

    map_tensors(lambda tensor: tensor, batch, of_mappings=note)
    return samples in lengths


def resized(batch: Any, batch_size: int, *, device: str = "meta") -> Any:
    """The same structure on another device, with `batch_size` samples: the first ones, again and again if need be."""
    present = batch_size_of(batch)
    times = -(-batch_size // present)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(device)
        split = tensor.dim() and tensor.shape[0] == present
        return torch.cat([moved] * times)[:batch_size].clone() if split else moved

    def resize_list(mappings: list[Any]) -> list[Any] | None:
        if len(mappings) != present:
            return None
        again = (mappings * times)[:batch_size]
        return [map_tensors(lambda tensor: tensor.to(device, copy=True), mapping) for mapping in again]

    return map_tensors(resize, batch, of_mappings=resize_list)


def map_tensors(
    function: Callable[[torch.Tensor], Any],
    value: Any,
    *,
    of_mappings: Callable[[list[Any]], list[Any] | None] | None = None,
) -> Any:
    """A nested batch with a function applied to its tensors. Mappings become plain dicts.

    Args:
        of_mappings: what a list of mappings inside of the batch becomes; None: its tensors are taken as others.
    """

    def inside(item: Any) -> Any:
        is_list = isinstance(item, list) and item and all(isinstance(each, Mapping) for each in item)
        made = of_mappings(item) if is_list and of_mappings is not None else None
        return map_tensors(function, item, of_mappings=of_mappings) if made is None else made

    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)  # past its __init__
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(mapped, field.name, inside(getattr(value, field.name)))
        return mapped
    if isinstance(value, Mapping):
        return {key: inside(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [inside(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested batch with its path, such as 'input_ids' or '0.mask'."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{position}".lstrip("."))


def described(batch: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for path, tensor in tensors_of(batch):
        yield path, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def optimizer_name(optimizer: OptimizerSpec) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return getattr(optimizer, "__qualname__", type(optimizer).__qualname__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerBlueprint:
    """What a live optimizer is, without its parameters: it can be made again over the same model's virtual twin."""

    kind: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    """Parameter groups; 'params' holds positions in `model.parameters()`."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerBlueprint:
        position = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        groups = []
        for group in optimizer.param_groups:
            if any(id(parameter) not in position for parameter in group["params"]):
                raise WorkloadError(
                    "the optimizer holds a parameter that is not the model's: make it from model.parameters()"
                )
            groups.append({**group, "params": [position[id(parameter)] for parameter in group["params"]]})
        return cls(kind=type(optimizer), defaults=dict(optimizer.defaults), groups=tuple(groups))

    def over(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [{**group, "params": [parameters[number] for number in group["params"]]} for group in self.groups]
        accepted = inspect.signature(self.kind).parameters
        return self.kind(groups, **{name: value for name, value in self.defaults.items() if name in accepted})


def several_processes() -> bool:
    """Whether this is one of several processes of a group (`torch.distributed`)."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
