"""`Workload`: the model, batch, loss function and optimizer of a training step; and functions for nested batches."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from planner.errors import WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.answers import NOTHING_STATED, Answers
from planner.plan_types.decision_base import Decision
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import ModelFacts, TrainingProgram, WorkloadFacts
from planner.plan_types.quantized import element_count
from planner.workload.call_convention import Calling, LossFn, Parallelize, StepFn, is_graph
from planner.workload.model_loss import own_loss
from planner.workload.optimizer_choice import OPTIMIZERS, Optimizers, by_name, optimizer_name
from planner.workload.own_step import WITHOUT_TENSORS, as_module, refuse_with_step
from planner.workload.torch_optimizers import half_precision_notes, sparse_lookups
from planner.workload.unsupported import refuse_unsupported

if TYPE_CHECKING:
    from planner.workload.batch_source import BatchStream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The training step to plan: everything that one step of the optimizer needs."""

    model: torch.nn.Module
    batch: Any
    """The full batch of one optimizer step, on any device: shapes and dtypes are used, and the values of integer and
    boolean tensors on the CPU where the step depends on them."""
    loss_fn: LossFn | None
    optimizer: Optimizers
    """One optimizer. With `step`, also a dict or tuple of optimizers."""
    batch_size: int
    seq_len: int | None
    calling: Calling
    reference: str | None
    """MODEL as given on the command line; None for a model object."""
    arguments: tuple[str, ...] = ()
    """Arguments for the Python file or module that `reference` names, as in `sys.argv`."""
    gradients_alive: bool = False
    """True if the user's loop accumulates gradients over several batches, so that gradients exist before the step."""
    gradient_names: tuple[str, ...] | None = None
    """With `gradients_alive`: names of the parameters with such gradients; None until a rehearsal has found them."""
    not_by_sample: tuple[str, ...] = ()
    """Paths of the tensors of the batch that are the same for all samples."""
    dtype: str | None = None
    """Name of the dtype in which a transformers model is loaded, such as 'bfloat16'; None for other models."""
    adapter: Adapter | None = None
    """Adapters that the planner added to the model."""
    program: TrainingProgram | None = None
    """The program that trains the model, which the planner prepared as the program does; None for other loops."""
    answers: Answers = NOTHING_STATED
    """The values of tensors that the user states."""
    notes: tuple[str, ...] = ()
    """Notes that the plan shows to the user, such as which batch of a data loader was chosen."""
    input_shapes: Any = None
    """JSON data from which the batch was made (`batch_of_shapes`); None if there is none."""
    step: StepFn | None = None
    """The user's own training step; None for the planner's step of forward, loss, backward and update."""
    parallelize: Parallelize | None = None
    """The user's own function that divides the model among cards; None if there is none."""
    sharding: tuple[Decision, ...] = ()
    """The decision by which several cards train together; empty for one card. `batch` is the part of one card."""
    stream: BatchStream | None = None
    """The batches of the run, if they came from a source of batches."""
    made_from: str | None = None
    """All data from which the planner made model and batch, as text; None if the user's code took part in it."""
    is_by_sample_stated: bool = True
    """False if `not_by_sample` was only guessed from the shapes of the tensors."""

    @property
    def batch_bytes(self) -> int:
        """Sum of the bytes of all tensors of the batch. A storage that two tensors share counts twice."""
        return sum(
            part.numel() * part.itemsize for _, tensor in tensors_of(self.batch) for part in stored_parts(tensor)
        )

    @property
    def given_optimizer(self) -> Optimizers | None:
        """The optimizers that came with a step of the user's own; None if the plan names the optimizer."""
        return None if self.step is None else self.optimizer

    @functools.cached_property
    def with_other_rows(self) -> str | None:
        """Says which tensor may belong to the samples in a way that nobody stated, and why; None if there is none.

        Such a tensor has a dimension 0 that is neither the batch size nor 1, like the edges [2, E] of a graph, or it is
        sparse, so that its rows cannot be sliced. Tensors in a list with one mapping for each sample belong to samples.
        """
        for path, tensor in tensors_of(self.batch):
            if tensor.is_sparse and not (self.is_by_sample_stated and path in self.not_by_sample):
                return f"'{path}' {list(tensor.shape)} is sparse"
        if self.is_by_sample_stated:
            return None
        in_mappings: set[int] = set()

        def note(mappings: list[Any]) -> list[Any]:
            if len(mappings) == self.batch_size:
                in_mappings.update(id(tensor) for _, tensor in tensors_of(mappings))
            return mappings

        map_batch(lambda tensor: tensor, self.batch, of_mappings=note)
        for path, tensor in tensors_of(self.batch):
            if tensor.dim() and tensor.shape[0] not in (1, self.batch_size) and id(tensor) not in in_mappings:
                return f"'{path}' {list(tensor.shape)} has {tensor.shape[0]} rows"
        return None

    def model_facts(self) -> ModelFacts:
        """Returns the facts of the model that a plan stores."""
        return ModelFacts(
            reference=self.reference,
            name=type(self.model).__name__,
            parameters=sum(map(element_count, self.model.parameters())),
            fingerprint=fingerprint(self.model),
            arguments=self.arguments,
            dtype=self.dtype or main_dtype(self.model),
            adapter=self.adapter,
            program=self.program,
            architecture=None if self.adapter is None else type(cast(Any, self.model).get_base_model()).__name__,
            trained_parameters=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )

    def facts(self) -> WorkloadFacts:
        """Returns the facts of batch, loss function and optimizer that a plan stores."""
        return WorkloadFacts(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            batch=tuple(described(self.batch)),
            calling=cast(Any, self.calling.name),
            has_loss_fn=self.loss_fn is not None,
            optimizer=optimizer_name(self.optimizer),
            gradients_alive=self.gradients_alive,
            own_loss=own_loss(self.model, self.calling, self.loss_fn),
            not_by_sample=self.not_by_sample,
            input_shapes=self.input_shapes,
            values=dict(self.answers.values),
            worst_case=self.answers.worst_case,
        )


def main_dtype(model: torch.nn.Module) -> str:
    """Returns the name of the dtype of most floating-point weights."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    return str(max(counts, key=counts.__getitem__, default=torch.float32)).removeprefix("torch.")


def workload(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Optimizers = "adamw",
    step: StepFn | None = None,
    seq_len: int | None = None,
    reference: str | None = None,
    gradients_alive: bool = False,
    by_sample: Sequence[str] | None = None,
    is_synthetic: bool = False,
    dtype: str | None = None,
    adapter: Adapter | None = None,
    program: TrainingProgram | None = None,
    input_shapes: Any = None,
    answers: Answers = NOTHING_STATED,
    notes: tuple[str, ...] = (),
) -> Workload:
    """Returns a `Workload`, after checking that the model can be trained on the batch.

    Args:
        step: the user's own training step. `model` may then be a dict of modules, and `optimizer` a dict or tuple.
        by_sample: paths of the tensors whose dimension 0 is the batch dimension; a path such as 'targets' stands for
            all tensors below it. If it is None, they are guessed from the shapes of all tensors.
        program, input_shapes, answers, notes: see `Workload`.
        is_synthetic: True if the planner made the batch, so that the guess is right.
        dtype, adapter: dtype and adapters with which the planner built a transformers model; a plan stores them.

    Raises:
        WorkloadError: the model is not a module, is TorchScript or trains nothing, the batch has an unsupported type or
            layout or no tensors, `by_sample` does not match it, or `gradients_alive` is set with sparse gradients.
    """
    if step is not None:
        model = as_module(model)
        refuse_with_step(step, loss_fn, gradients_alive=gradients_alive)
    elif len(by_name(optimizer)) > 1:
        why = "several optimizers were given, and only a step of your own says when each of them steps"
        raise WorkloadError(f"{why}: give step=..., a function that takes (model, optimizer, batch) and runs one step")
    for spec in by_name(optimizer).values():
        if isinstance(spec, str) and spec in OPTIMIZERS:
            _ = OPTIMIZERS[spec].kind  # a rehearsal patches only libraries that are imported before
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            f"the model is of type {type(model).__name__}, not torch.nn.Module: give a module, or a function that "
            "returns one"
        )
    calling = Calling.of(batch, loss_fn) if step is None else Calling.STEP
    refuse_unsupported(model, batch, tensors_of(batch), loss_fn, step)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train: set "
            "requires_grad=True on the parameters to train"
        )
    if gradients_alive and sparse_lookups(model):
        raise WorkloadError(
            "gradients_alive (--accumulating-loop) cannot be used with an embedding that has sparse=True: each batch "
            "adds rows to its gradient, whose size is therefore unknown; create the embedding with sparse=False"
        )
    if step is not None and isinstance(batch, WITHOUT_TENSORS) and not any(tensors_of(batch)):
        batch_size = 1  # the step makes its own samples
    else:
        batch_size = batch_size_of(batch) if by_sample is None else _stated_batch_size(batch, by_sample)
    return Workload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        optimizer=optimizer,
        step=step,
        batch_size=batch_size,
        seq_len=seq_len,
        calling=calling,
        reference=reference,
        gradients_alive=gradients_alive,
        not_by_sample=tuple(
            path
            for path, tensor in tensors_of(batch)
            if (tensor.shape[:1] != (batch_size,) if by_sample is None else not _is_below(path, by_sample))
        ),
        is_by_sample_stated=is_synthetic or by_sample is not None,
        dtype=dtype,
        adapter=adapter,
        program=program,
        input_shapes=input_shapes,
        answers=answers,
        notes=(*notes, *half_precision_notes(model)),
    )


def _is_below(path: str, prefixes: Iterable[str]) -> bool:
    """True if a path of a batch is one of the prefixes, or lies below one of them."""
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _stated_batch_size(batch: Any, by_sample: Sequence[str]) -> int:
    """Returns the number of samples: the size of dimension 0, which must be equal in all tensors that are named."""
    tensors = dict(tensors_of(batch))
    if unknown := [name for name in by_sample if not any(_is_below(path, (name,)) for path in tensors)]:
        raise WorkloadError(
            f"by_sample names '{unknown[0]}', which the batch does not have: it has "
            f"{', '.join(tensors)[:200] or 'no tensors'}; name only tensors of the batch"
        )
    sizes = {path: tuple(tensor.shape[:1]) for path, tensor in tensors.items() if path in by_sample}
    if not sizes:  # all of them are in lists with one mapping for each sample
        return batch_size_of(batch)
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise WorkloadError(
            "the tensors that by_sample names differ in dimension 0: "
            + ", ".join(f"'{path}' has {size[0] if size else 'none'}" for path, size in sizes.items())
            + "; name only tensors that have a row for each sample"
        )
    return next(iter(sizes.values()))[0]


def batch_size_of(batch: Any) -> int:
    """Returns the number of samples: the most frequent size of dimension 0 among the tensors of the batch.

    If several sizes are equally frequent, it is the size that comes first in the batch. Tensors in lists of mappings,
    such as detection targets with one mapping for each sample, count only if the batch has no other tensors.

    Raises:
        WorkloadError: no tensor of the batch has a dimension.
    """
    sizes: Counter[int] = Counter()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    map_batch(count, batch, of_mappings=lambda mappings: mappings)
    if not sizes:
        map_batch(count, batch)
    if not sizes:
        raise WorkloadError(
            "the batch has no tensor with at least one dimension: give tensors whose dimension 0 counts the samples"
        )
    return sizes.most_common(1)[0][0]


def resized(
    batch: Any,
    batch_size: int,
    *,
    device: str | None = "meta",
    present: int | None = None,
    not_by_sample: Iterable[str] = (),
) -> Any:
    """Returns a copy of the batch that has its first `batch_size` samples, repeated if there are fewer.

    Args:
        device: device of the copy; None to leave each tensor on its own.
        present: number of samples that the batch has; None to find it out (`batch_size_of`).
        not_by_sample: paths of the tensors that are the same for all samples, and stay the same.
    """
    present = batch_size_of(batch) if present is None else present
    unchanged = {id(tensor) for path, tensor in tensors_of(batch) if path in not_by_sample}
    times = -(-batch_size // present)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor if device is None else tensor.to(device)
        has_samples = tensor.dim() and tensor.shape[0] == present and id(tensor) not in unchanged
        return torch.cat([moved] * times)[:batch_size].clone() if has_samples else moved

    def resize_list(mappings: list[Any]) -> list[Any] | None:
        if len(mappings) != present:
            return None
        repeated = (mappings * times)[:batch_size]
        return [
            map_batch(lambda tensor: tensor.to(device or tensor.device, copy=True), mapping) for mapping in repeated
        ]

    return map_batch(resize, batch, of_mappings=resize_list)


def map_batch(
    function: Callable[[torch.Tensor], Any],
    value: Any,
    *,
    of_mappings: Callable[[list[Any]], list[Any] | None] | None = None,
) -> Any:
    """Returns a nested batch with each tensor replaced by `function(tensor)`. Mappings become plain dicts.

    Emitted files cannot import this module. They contain a variant of this function,
    `planner.rewrite.portable.batch_slicing.map_tensors`.

    Args:
        function: function that is applied to each tensor.
        value: the nested batch: tensors in dataclasses, mappings, lists, tuples and graphs (`is_graph`).
        of_mappings: function that is called with each list of mappings, and returns the list that replaces it. If it
            returns None, or if `of_mappings` is None, `function` is applied to the tensors in the list.
    """

    def map_item(item: Any) -> Any:
        is_list = isinstance(item, list) and item and all(isinstance(mapping, Mapping) for mapping in item)
        replacement = of_mappings(item) if is_list and of_mappings is not None else None
        return map_batch(function, item, of_mappings=of_mappings) if replacement is None else replacement

    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)  # A copy does not run `__init__`, which may have side effects or other arguments.
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(mapped, field.name, map_item(getattr(value, field.name)))
        return mapped
    if isinstance(value, Mapping):
        return {key: map_item(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_item(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_graph(value):
        return copy.copy(value).apply(lambda item: function(item) if isinstance(item, torch.Tensor) else item)
    return value


def stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that hold the elements of a tensor: itself, or the indices and values of a sparse one."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (path, tensor) for every tensor of a nested batch. Examples of paths are 'input_ids' and '0.mask'."""
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
    elif is_graph(value):
        yield from tensors_of(value.to_dict(), path)


def described(batch: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields (path, shape, dtype) for every tensor of a nested batch, as a plan stores them."""
    for path, tensor in tensors_of(batch):
        yield path, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
