"""Micro-batches: the ways to cut a batch, and what keeps a batch from being cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from planner.errors import DecisionError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Accumulation, Decision
from planner.workload.workload import Workload, has_mapping_for_each_sample

_MICRO_BATCH_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
"""Numbers of micro-batches that are tried: these, and from 16 on four for each doubling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatching:
    """The batch in `micro_batches` parts of at most `size` samples."""

    micro_batches: int
    size: int
    last: int | None = None
    """Samples of the second of two parts, where it is smaller; of many parts the peak is in one of the larger ones."""

    def decisions(self) -> tuple[Decision, ...]:
        if self.micro_batches == 1:
            return ()
        return (Accumulation(micro_batch_size=self.size, micro_batches=self.micro_batches),)


def offered_splits(
    work: Workload, constraints: Constraints, batch_statistics: tuple[str, ...], notes: list[str]
) -> tuple[MicroBatching, ...]:
    """The batch as it is, and in parts where the rules allow it and parts give what the batch gives.

    Args:
        notes: what keeps the batch from being cut is added to it.

    Raises:
        DecisionError: accumulation is forced, and the batch is a single sample.
    """
    why_not = None
    if batch_statistics:
        why_not = f"'{batch_statistics[0]}' normalises over the micro-batch, so that parts of a batch are not the batch"
    elif work.batch_size < 2:
        why_not = "the batch is a single sample"
    elif _balances_experts(work):
        why_not = (
            "the model balances its experts over all tokens of a batch (output_router_logits), which parts of it would "
            "each do by themselves"
        )
    elif work.loss_fn is None and has_mapping_for_each_sample(work.batch):
        why_not = "the model's own loss is no mean over samples, of which each has a mapping of its own in the batch"
    single, several = MicroBatching(micro_batches=1, size=work.batch_size), tuple(splits_of(work.batch_size))
    if constraints.force(Accumulation):
        if why_not and work.batch_size < 2:
            raise DecisionError(f"accumulation is forced, but {why_not}")
        if why_not:
            notes.append(f"accumulation is forced although {why_not}: results differ from the full batch")
        return several
    if why_not:
        if constraints.allow(Accumulation):
            notes.append(f"no accumulation: {why_not}")
        return (single,)
    return (single, *several) if constraints.allow(Accumulation) else (single,)


def _balances_experts(work: Workload) -> bool:
    """Whether a model of transformers adds a term to its loss that is no mean over tokens."""
    stated = work.batch.get("output_router_logits") if isinstance(work.batch, Mapping) else None
    config = getattr(work.model, "config", None)
    return bool(getattr(config, "output_router_logits", False) if stated is None else stated)


def splits_of(batch_size: int) -> Iterator[MicroBatching]:
    """Ways to cut a batch, in rising number of micro-batches; each size once, down to single samples."""
    counts = [count for count in _MICRO_BATCH_STEPS if 1 < count <= batch_size]
    step = 16
    while step < 2 * batch_size:
        counts += [min(step * quarter // 4, batch_size) for quarter in (4, 5, 6, 7)]
        step *= 2
    sizes_seen = {batch_size}
    for count in counts:
        size = -(-batch_size // count)
        if size not in sizes_seen:
            sizes_seen.add(size)
            parts, last = -(-batch_size // size), batch_size - size
            yield MicroBatching(micro_batches=parts, size=size, last=last if parts == 2 and last < size else None)
