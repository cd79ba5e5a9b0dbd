"""The user's description of the run, and the `Run` that follows from it and from the batches."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from planner.adapted import plan_or_adapt
from planner.errors import WorkloadError
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan, RunSource
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.run_memory.batches import BatchShape, padded
from planner.whole_run.activities import Activity, activity, evaluation
from planner.whole_run.orders import constant, given_order, random_orders
from planner.whole_run.planning import plan_run, verify_run
from planner.whole_run.simulated_run import MOST_REHEARSED, Run
from planner.workload.batch_source import BatchStream, elements
from planner.workload.synthetic_batch import Masking, masking_of
from planner.workload.workload import Workload, batch_size_of, described

Between = Sequence[str | Callable[..., object]] | Mapping[str, Callable[..., object]] | Callable[..., object]
"""Names of known activities between steps, or functions of the user's own, with or without names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The user's description of the run."""

    samples: tuple[int, ...] = ()
    """Lengths of the samples; empty if they are not stated. Their order does not count."""
    multiple: int = 1
    """Batches are padded to a multiple of this length."""
    eval_batch_size: int | None = None
    eval_samples: int = 0
    """Number of samples whose logits an evaluation keeps on the card."""
    between: Between = ()

    @property
    def source(self) -> RunSource | None:
        """The description that a plan file holds; None if functions of the user's own are part of the run."""
        given = (self.between,) if isinstance(self.between, str) else self.between
        if callable(given) or isinstance(given, Mapping) or any(callable(each) for each in given):
            return None
        return RunSource(
            lengths=tuple(sorted(Counter(self.samples).items())),
            multiple=self.multiple,
            eval_batch_size=self.eval_batch_size,
            eval_samples=self.eval_samples,
            between=tuple(str(name) for name in given),
        )

    @classmethod
    def of(cls, source: RunSource) -> RunRequest:
        """Returns the request from the description that a saved plan holds."""
        return cls(
            samples=tuple(length for length, count in source.lengths for _ in range(count)),
            multiple=source.multiple,
            eval_batch_size=source.eval_batch_size,
            eval_samples=source.eval_samples,
            between=source.between,
        )

    def longest(self, seq_len: int | None) -> int | None:
        """Returns the length of the longest batch; None if no lengths were stated.

        Args:
            seq_len: the length to which longer samples are cut; None for no limit.
        """
        return padded(max(self.samples), self.multiple, seq_len) if self.samples else None

    def masking(self, samples: int | None, seq_len: int | None) -> Masking:
        """Returns the attention mask of the batches; NONE if no lengths were stated.

        Args:
            samples: number of samples in a batch; None for one.
            seq_len: the length to which longer samples are cut; None for no limit.
        """
        longest = self.longest(seq_len)
        return (
            Masking.NONE
            if longest is None
            else masking_of(set(self.samples), samples=samples or 1, multiple=self.multiple, longest=longest)
        )

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


def verify_planned_run(
    plan: Plan,
    workload: Workload,
    card: DeviceProfile,
    *,
    constraints: Constraints,
    source: RunSource | None,
    at: Callable[[BatchShape], Workload],
    watch: Watch | None = None,
) -> Plan:
    """Return a plan of one step, which was rehearsed again, with the verdict for its run.

    Args:
        workload: the training step of the longest batch.
        source: the description that the saved plan holds; None if the run cannot be simulated again.
        at: returns the workload of the step for a batch of another shape.
    """
    if source is None:
        note = (
            "the run was not simulated again, because its batches or what happens between its steps are your own, and "
            "a plan file does not hold them: this is the verdict for the longest step"
        )
        return dataclasses.replace(plan, notes=(note, *plan.notes))
    run, notes = _run_of(workload, RunRequest.of(source), at)
    assert run is not None, "a saved run has several lengths, or something between its steps"
    plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
    return verify_run(run, plan, card, constraints=constraints, watch=watch)


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
            sorted(request.samples), batch_size=workload.batch_size, multiple=request.multiple, longest=workload.seq_len
        )
        largest = BatchShape(workload.batch_size, workload.seq_len)
        by_shape = functools.cache(lambda shape: workload if shape == largest else at(shape))
        return Run(at=by_shape, batches=batches, activities=activities, source=request.source), ()
    if workload.stream is not None and len(workload.stream.different) > 1:
        return _of_stream(workload, workload.stream, activities)
    if activities:
        only = BatchShape(workload.batch_size, workload.seq_len or 1)
        run = Run(at=lambda _: workload, batches=constant(only), activities=activities, source=request.source)
        return run, ()
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
