"""The user's description of the run, and the `Run` that follows from it and from the batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from planner.adapted import plan_or_adapt
from planner.errors import WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.run_memory.lengths import padded
from planner.whole_run.activities import Activity, activity, evaluation
from planner.whole_run.orders import constant, given_order, random_orders
from planner.whole_run.planning import MOST_REHEARSED, Run, plan_run
from planner.workload.batch_source import BatchStream, elements
from planner.workload.workload import Workload, batch_size_of, described

Between = Sequence[str | Callable[..., object]] | Mapping[str, Callable[..., object]] | Callable[..., object]
"""Names of known activities between steps, or functions of the user's own, with or without names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The user's description of the run."""

    samples: tuple[int, ...] = ()
    """Lengths of the samples; empty if they are not stated."""
    multiple: int = 1
    """Batches are padded to a multiple of this length."""
    eval_batch_size: int | None = None
    eval_samples: int = 0
    """Number of samples whose logits an evaluation keeps on the card."""
    between: Between = ()

    def longest(self, seq_len: int | None) -> int | None:
        """Returns the length of the longest batch; None if no lengths were stated.

        Args:
            seq_len: the length to which longer samples are cut; None for no limit.
        """
        return padded(max(self.samples), self.multiple, seq_len) if self.samples else None

    def activities(self, workload: Workload) -> tuple[Activity, ...]:
        """Returns what happens between steps. Raises `WorkloadError` if it cannot be rehearsed."""
        if self.eval_samples and self.eval_batch_size is None:
            raise WorkloadError(
                "the number of samples whose logits the evaluation keeps (--eval-samples) was given without the size "
                "of its batches: add --eval-batch-size"
            )
        evaluations = []
        if self.eval_batch_size is not None:
            evaluations.append(evaluation(workload, self.eval_batch_size, kept_samples=self.eval_samples))
        if isinstance(self.between, Mapping):
            return (*evaluations, *(activity(function, name) for name, function in self.between.items()))
        given = (self.between,) if callable(self.between) or isinstance(self.between, str) else self.between
        return (*evaluations, *map(activity, given))


def plan_step_or_run(
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    request: RunRequest,
    at: Callable[[int], Workload] | None = None,
    watch: Watch | None = None,
) -> Plan:
    """Return the plan of the run; the plan of one step if its batches are alike and nothing happens between the steps.

    Args:
        workload: the training step of the longest batch.
        at: returns the workload of a step of another length; needed if `request` states lengths.
        watch: limits the time of planning, and receives its progress; None for no limit.
    """
    run, notes = _run_of(workload, request, at)
    workload = dataclasses.replace(workload, notes=(*workload.notes, *notes))
    if run is None:
        return plan_or_adapt(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    return plan_run(run, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


def _run_of(
    workload: Workload, request: RunRequest, at: Callable[[int], Workload] | None
) -> tuple[Run | None, tuple[str, ...]]:
    """Returns the run, None if one step stands for all of it, and notes."""
    activities = request.activities(workload)
    if request.samples:
        if at is None or workload.seq_len is None:
            raise WorkloadError(
                "the lengths of the samples are of no use here, because the length of the batch cannot be changed: "
                "give a transformers model, a function with an argument seq_len, or a data loader"
            )
        batches = random_orders(
            request.samples, batch_size=workload.batch_size, multiple=request.multiple, longest=workload.seq_len
        )
        longest = workload.seq_len
        by_length = functools.cache(lambda length: workload if length == longest else at(length))
        return Run(at=by_length, batches=batches, activities=activities), ()
    if workload.stream is not None and len(workload.stream.different) > 1:
        return _of_stream(workload, workload.stream, activities)
    if activities:
        return Run(at=lambda _: workload, batches=constant(workload.seq_len or 1), activities=activities), ()
    return None, ()


def _of_stream(
    workload: Workload, stream: BatchStream, activities: tuple[Activity, ...]
) -> tuple[Run | None, tuple[str, ...]]:
    """Returns the run over the batches of a source, and notes. Batches with fewer samples are left out."""
    whole = [number for number in stream.order if _size(stream, number) == workload.batch_size]
    numbers = sorted(set(whole), key=lambda number: elements(stream.different[number]))
    lengths = _lengths([stream.different[number] for number in numbers])
    if lengths is None:
        lengths = list(range(1, len(numbers) + 1))
        if len(numbers) > MOST_REHEARSED:
            note = (
                f"the run was not simulated, because its batches have {len(numbers)} different shapes that differ in "
                "more than one size: the plan is for single steps"
            )
            return None, (note,)
    number_at = dict(zip(lengths, numbers, strict=True))
    length_of = {number: length for length, number in number_at.items()}

    def at(length: int) -> Workload:
        batch = stream.different[number_at[length]]
        return dataclasses.replace(workload, batch=batch)

    batches = given_order([length_of[number] for number in whole])
    if len(numbers) == 1 and not activities:
        return None, ()
    return Run(at=at, batches=batches, activities=activities), ()


def _size(stream: BatchStream, number: int) -> int:
    return batch_size_of(stream.different[number])


def _lengths(batches: Sequence[object]) -> list[int] | None:
    """Returns the length of each batch: the one size in which they differ; None if they differ in several sizes."""
    shapes = [[size for _, shape, _ in described(batch) for size in shape] for batch in batches]
    columns = [column for column in zip(*shapes, strict=False) if len(set(column)) > 1]
    if not columns or len(set(map(len, shapes))) > 1 or any(column != columns[0] for column in columns):
        return None
    lengths = list(columns[0])
    return lengths if len(set(lengths)) == len(lengths) else None
