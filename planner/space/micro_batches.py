"""Micro-batches: the ways to split a batch, and the reasons why a batch cannot be split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision
from planner.plan_types.decisions import Accumulation
from planner.workload.model_loss import balances_experts
from planner.workload.workload import Workload, batch_size_of, map_batch

_MICRO_BATCH_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
"""Numbers of micro-batches up to 14 that are tried. Above 14, four are tried for each doubling: 16, 20, 24, 28 ..."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatching:
    """A split of the batch into `micro_batches` micro-batches of at most `size` samples."""

    micro_batches: int
    size: int
    last: int | None = None
    """Number of samples in the second of two micro-batches, if it is smaller than the first; otherwise None. With more
    micro-batches, the peak is in one of the larger ones, so the size of the last one does not matter."""

    def decisions(self) -> tuple[Decision, ...]:
        """Returns the decision to accumulate gradients; an empty tuple if the batch is not split."""
        if self.micro_batches == 1:
            return ()
        return (Accumulation(micro_batch_size=self.size, micro_batches=self.micro_batches),)


def batch_splits(
    workload: Workload,
    constraints: Constraints,
    batch_statistics: tuple[str, ...],
    carried: str | None,
    why_no_samples: str | None,
    values_needed: str | None,
    notes: list[str],
) -> tuple[MicroBatching, ...]:
    """Returns the whole batch, and its splits if they are allowed and give the same gradients as the whole batch.

    If accumulation is forced, only the splits are returned, even if their gradients differ.

    Args:
        batch_statistics: names of modules that normalize over the samples of a batch.
        carried: what a forward changes and the next one uses; None if nothing was found.
        why_no_samples: the reason why it is not known which tensors of the batch have a row for each sample; None if it
            is known.
        values_needed: says where the step needs values of the batch, as an assumption of the recording; None if it does
            not.
        notes: a note is added if the batch cannot be split, or if the gradients of its splits differ.

    Raises:
        DecisionError: accumulation is forced, and the batch is a single sample, or it is not known how to split it.
    """
    why_not, way_out, changed = None, "", _changed_gradient(workload.model)
    of_values = f"the memory of a micro-batch may depend on the values of its samples ({values_needed})"
    if batch_statistics:
        why_not = f"'{batch_statistics[0]}' normalizes over the micro-batch, so that results differ from the full batch"
    elif workload.batch_size < 2:
        why_not = "the batch is a single sample"
    elif why_no_samples:
        why_not = why_no_samples
    elif carried:
        why_not = f"the forward changes {carried}, which the next forward uses, so every micro-batch would change it"
        way_out = "; if your results do not depend on this state, force accumulation"
    elif values_needed:
        why_not = of_values
    elif changed:
        why_not = f"{changed}, so the gradients of micro-batches may not add up to that of the full batch"
    elif _balances_experts(workload):
        why_not = (
            "the model balances its experts over all tokens of a batch (output_router_logits), and would do so for "
            "each micro-batch separately"
        )
    elif workload.loss_fn is None and _has_mapping_for_each_sample(workload.batch):
        why_not = (
            "the batch holds one dict for each sample, and the model computes its own loss from these dicts, which may "
            "not be a mean over samples"
        )
    single, several = MicroBatching(micro_batches=1, size=workload.batch_size), tuple(splits_of(workload.batch_size))
    if constraints.force(Accumulation):
        if why_no_samples:
            raise DecisionError(f"accumulation is forced, but {why_no_samples}")
        if why_not and workload.batch_size < 2:
            raise DecisionError(f"accumulation is forced, but {why_not}: do not force accumulation")
        if why_not:
            result = ": it may take more memory" if why_not == of_values else ": results may differ from the full batch"
            is_said = batch_statistics or changed
            notes.append(f"accumulation is forced although {why_not}{'' if is_said else result}")
        return several
    if why_not:
        if constraints.allow(Accumulation):
            notes.append(f"no accumulation: {why_not}{way_out}")
        return (single,)
    return (single, *several) if constraints.allow(Accumulation) else (single,)


def _changed_gradient(model: torch.nn.Module) -> str | None:
    """Returns words on a gradient that the model changes before it is added up; None if there is none."""
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            return f"'{name}' scales its gradient by how often an index comes in the batch (scale_grad_by_freq)"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"a hook changes or reads the gradient of '{name}'"
    return None


def _balances_experts(workload: Workload) -> bool:
    """True if the model's own loss balances its experts, by its config or because the batch asks for it."""
    in_batch = workload.batch.get("output_router_logits") if isinstance(workload.batch, Mapping) else None
    return balances_experts(workload.model) if in_batch is None else bool(in_batch)


def splits_of(batch_size: int) -> Iterator[MicroBatching]:
    """Yields the ways to split a batch, from few micro-batches to many; each micro-batch size once, down to 1."""
    counts = [count for count in _MICRO_BATCH_COUNTS if 1 < count <= batch_size]
    doubling = 16
    while doubling < 2 * batch_size:
        counts += [min(doubling * quarter // 4, batch_size) for quarter in (4, 5, 6, 7)]
        doubling *= 2
    # Different counts may round up to the same size: the first of them is enough.
    sizes_seen = {batch_size}
    for count in counts:
        size = -(-batch_size // count)
        if size not in sizes_seen:
            sizes_seen.add(size)
            parts, last = -(-batch_size // size), batch_size - size
            yield MicroBatching(micro_batches=parts, size=size, last=last if parts == 2 and last < size else None)


def _has_mapping_for_each_sample(batch: Any) -> bool:
    """True if the batch contains a list with one mapping for each sample, as detection targets often are."""
    samples, lengths = batch_size_of(batch), []

    def note(mappings: list[Any]) -> list[Any]:
        lengths.append(len(mappings))
        return mappings

    map_batch(lambda tensor: tensor, batch, of_mappings=note)
    return samples in lengths
