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
from planner.run_memory.batches import BatchShape, padded
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
    at: Callable[[BatchShape], Workload] | None = None,
    watch: Watch | None = None,
) -> Plan:
    """Return the plan of the run; the plan of one step if its batches are alike and nothing happens between the steps.

    Args:
        workload: the training step of the longest batch.
        at: returns the workload of the step for a batch of another shape; needed if `request` states lengths.
        watch: limits the time of planning, and receives its progress; None for no limit.
    """
    run, notes = _run_of(workload, request, at)
    workload = dataclasses.replace(workload, notes=(*workload.notes, *notes))
    if run is None:
        return plan_or_adapt(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    return plan_run(run, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)


def _run_of(
    workload: Workload, request: RunRequest, at: Callable[[BatchShape], Workload] | None
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
        largest = BatchShape(workload.batch_size, workload.seq_len)
        by_shape = functools.cache(lambda shape: workload if shape == largest else at(shape))
        return Run(at=by_shape, batches=batches, activities=activities), ()
    if workload.stream is not None and len(workload.stream.different) > 1:
        return _of_stream(workload, workload.stream, activities)
    if activities:
        only = BatchShape(workload.batch_size, workload.seq_len or 1)
        return Run(at=lambda _: workload, batches=constant(only), activities=activities), ()
    return None, ()


def _of_stream(
    workload: Workload, stream: BatchStream, activities: tuple[Activity, ...]
) -> tuple[Run | None, tuple[str, ...]]:
    """Returns the run over the batches of a source, and notes."""
    stream = _without_rest(stream)
    if len(stream.different) == 1 and not activities:
        return None, ()
    shapes = _shapes(stream.different)
    if shapes is None:
        if len(stream.different) > MOST_REHEARSED:
            note = (
                f"the run was not simulated, because its batches have {len(stream.different)} different shapes that "
                "differ in more sizes than the number of samples and one length: the plan is for single steps"
            )
            return None, (note,)
        # All of them are rehearsed, so that any order by size will do.
        ranks = sorted(range(len(stream.different)), key=lambda number: elements(stream.different[number]))
        shapes = [BatchShape(workload.batch_size, ranks.index(number) + 1) for number in range(len(ranks))]
    number_of = {shape: number for number, shape in enumerate(shapes)}

    def at(shape: BatchShape) -> Workload:
        return dataclasses.replace(workload, batch=stream.different[number_of[shape]])

    batches = given_order([shapes[number] for number in stream.order])
    return Run(at=at, batches=batches, activities=activities), ()


def _without_rest(stream: BatchStream) -> BatchStream:
    """Returns the stream without its last batch if this is the only one of its shape and has the fewest samples."""
    *others, last = stream.order
    samples = [batch_size_of(batch) for batch in stream.different]
    if last in others or samples[last] >= min(samples[other] for other in others):
        return stream
    kept = sorted(set(others))
    return BatchStream(
        order=tuple(kept.index(number) for number in others), different=tuple(stream.different[n] for n in kept)
    )


def _shapes(batches: Sequence[object]) -> list[BatchShape] | None:
    """Returns the shape of each batch; None if they differ in other sizes than the number of samples and one length."""
    samples = [batch_size_of(batch) for batch in batches]
    sizes = [[size for _, shape, _ in described(batch) for size in shape] for batch in batches]
    if len(set(map(len, sizes))) > 1:
        return None
    columns = {column for column in zip(*sizes, strict=True) if len(set(column)) > 1 and column != tuple(samples)}
    if len(columns) > 1:
        return None
    lengths = columns.pop() if columns else (1,) * len(batches)
    return [BatchShape(*shape) for shape in zip(samples, lengths, strict=True)]
