"""Why a request did not fit, and how the run differs from its plan, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from planner.allocator.options import settings_of
from planner.allocator.settings import LARGEST_SMALL_BYTES, AllocatorSettings
from planner.plan_types.categories import Category
from planner.plan_types.decision_base import ALLOCATOR_VARIABLE, allocator_conf
from planner.plan_types.decisions import Precision
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import MIB, format_size
from planner.plan_types.words import counted
from planner.snapshot.explain.contents import Contents
from planner.snapshot.explain.explanation import describe_group
from planner.snapshot.explain.moment import Moment, new_memory_bytes
from planner.snapshot.history import History

_LOOP_BYTES = 2**16
"""Bytes that scalars and other small tensors of a training loop may take in addition to the plan."""
_SEGMENT_BYTES = 2 * MIB
"""Reserved memory that these may take in addition to the plan."""
_MORE = 1.02
"""A part that is this many times as large as planned is named."""
_MOST_NAMED = 3


def causes(moment: Moment, history: History, plan: Plan | None) -> Iterator[str]:
    """Yields sentences that say why the request did not fit, and why free memory could not be used."""
    unused = moment.reserved_bytes - moment.allocated_bytes
    if moment.failed:
        yield from _why_no_segment(moment, new_memory_bytes(moment.asked_bytes, history.settings))
    elif moment.retries:
        number = counted(moment.retries, "request")
        yield f"{number} found the card full, and got memory after all unused segments were released, which takes time"
    for free in moment.free:
        if free.total_bytes >= LARGEST_SMALL_BYTES:
            pieces = (
                "one block" if free.blocks == 1 else f"{free.blocks} blocks, at most {format_size(free.largest_bytes)}"
            )
            yield f"{format_size(free.total_bytes)} of reserved memory are free {free.reason} ({pieces})"
    if not moment.free and unused >= LARGEST_SMALL_BYTES:
        yield f"{format_size(unused)} of reserved memory are free, in pieces that the record does not show"
    if moment.waiting_bytes >= LARGEST_SMALL_BYTES:
        yield f"{format_size(moment.waiting_bytes)} were freed by the program, but another stream still uses them"
    if moment.private_bytes:
        yield f"{format_size(moment.private_bytes)} are in private pools, which serve only their CUDA graph or MemPool"
    rounding = moment.allocated_bytes - moment.requested_bytes
    if rounding > moment.allocated_bytes // 50:
        yield f"{format_size(rounding)} of allocated memory are rounding and ends of blocks that were not split off"
    yield from _verdict(moment)
    if plan is not None and plan.card_bytes and moment.device_free_bytes is not None:
        own = moment.reserved_bytes + moment.private_bytes + moment.device_free_bytes + _outside_bytes(plan)
        if plan.card_bytes - own > 64 * MIB:
            yield (
                f"{format_size(plan.card_bytes - own)} of the card belong to other processes and libraries: end other "
                "processes, or plan with a smaller --vram"
            )


def _why_no_segment(moment: Moment, segment_bytes: int) -> Iterator[str]:
    """Yields the sentence that says why no memory could be taken from the driver."""
    free = moment.device_free_bytes
    needed = f"the request needs new memory of {format_size(segment_bytes)}"
    if free is None:
        yield f"no free block was long enough, and {needed}, which the card or the limit of the process refused"
    elif free < segment_bytes:
        yield f"no free block was long enough, and {needed}, but the card had only {format_size(free)} free"
    else:
        yield (
            f"no free block was long enough, and {needed}; the card had {format_size(free)} free, so a limit of the "
            "process refused it (set_per_process_memory_fraction)"
        )


def _verdict(moment: Moment) -> Iterator[str]:
    """Yields the sentence that says whether tensors or unused memory fill the limit."""
    if not moment.failed or moment.limit_bytes is None:
        return
    room = moment.limit_bytes - moment.requested_bytes - moment.waiting_bytes - moment.asked_bytes
    if room >= 0:
        yield (
            "tensors and request together are smaller than the limit by "
            f"{format_size(room)}: memory is lost in pieces, not missing"
        )
    else:
        yield (
            f"tensors and request together exceed the limit by {format_size(-room)}, so no setting of the allocator is "
            "enough: less has to be allocated"
        )


class Comparison:
    """A moment compared with the plan.

    Args:
        plan: The plan; None to compare with nothing.
        moment: The state of the allocator.
        contents: What was alive.
        settings: The settings with which the run was recorded.
    """

    def __init__(self, plan: Plan | None, moment: Moment, contents: Contents, settings: AllocatorSettings) -> None:
        self._plan, self._moment, self._contents, self._settings = plan, moment, contents, settings
        self._needed_bytes = moment.allocated_bytes + moment.asked_bytes
        self._allocated_bytes = self._reserved_bytes = 0
        """The most that the plan has, in the step and, if it was planned, in the whole run."""
        if plan is not None:
            self._allocated_bytes, self._reserved_bytes = plan.peak.allocated_bytes, plan.peak.reserved_bytes
            if plan.run is not None:
                self._allocated_bytes = max([self._allocated_bytes, *(part.tensor_bytes for part in plan.run.moments)])
                self._reserved_bytes = max(self._reserved_bytes, plan.run.total_bytes - _outside_bytes(plan))

    @property
    def exceeds(self) -> bool | None:
        """True if tensors or reserved memory exceed the plan; None without a plan."""
        if self._plan is None:
            return None
        return (
            self._needed_bytes > self._allocated_bytes + _LOOP_BYTES
            or self._moment.peak_reserved_bytes > self._reserved_bytes + _SEGMENT_BYTES
        )

    def findings(self) -> Iterator[str]:
        """Yields sentences that say in what the run differs from the plan; none without a plan."""
        plan, moment = self._plan, self._moment
        if plan is None:
            return
        yield (
            f"tensors{' and the request' if moment.failed else ''} take {format_size(self._needed_bytes)}, and the "
            f"plan has at most {format_size(self._allocated_bytes)}; the run reserved "
            f"{format_size(moment.peak_reserved_bytes)}, and the plan {format_size(self._reserved_bytes)}"
        )
        yield from self._options()
        if self._needed_bytes <= self._allocated_bytes + _LOOP_BYTES:
            yield from self._within_plan()
            return
        for part in self._contents.parts:
            taken, planned_bytes = part.total_bytes + part.asked_bytes, part.planned_bytes
            if planned_bytes is not None and taken > planned_bytes * _MORE + _LOOP_BYTES:
                asked = " with the request" if part.asked_bytes else ""
                of_plan = (
                    f"{taken / planned_bytes:.2f} times the {format_size(planned_bytes)} of the plan"
                    if planned_bytes
                    else "none in the plan"
                )
                yield f"{part.purpose}{asked}: {format_size(taken)} in the run, {of_plan}"
        yield from self._batch()
        extra = [group for group in self._contents.groups if group.unplanned_bytes and group.place]
        for group in sorted(extra, key=lambda group: -group.unplanned_bytes)[:_MOST_NAMED]:
            yield f"the plan has no such tensors at its peak: {describe_group(group)}"
        if plan.decisions and self._contents.scale is None and self._needed_bytes <= plan.baseline.allocated_bytes:
            yield (
                f"the step without the plan takes {format_size(plan.baseline.allocated_bytes)}: check that the plan "
                "was applied"
            )

    def _options(self) -> Iterator[str]:
        """Yields a sentence if the run did not have the plan's options of the allocator."""
        assert self._plan is not None
        options = allocator_conf(self._plan.decisions, self._plan.alloc_conf)
        wanted = settings_of(options)
        if options and (wanted.expandable_segments, wanted.max_split_size_bytes) != (
            self._settings.expandable_segments,
            self._settings.max_split_size_bytes,
        ):
            yield (
                f"the plan sets {ALLOCATOR_VARIABLE}={options}, but the run was recorded "
                "without it: set it before CUDA starts"
            )

    def _within_plan(self) -> Iterator[str]:
        """Yields a sentence on a run whose tensors are within the plan."""
        assert self._plan is not None
        moment = self._moment
        if moment.failed and moment.limit_bytes is not None and moment.limit_bytes < self._reserved_bytes:
            yield (
                f"no more is allocated than planned: the process could reserve only {format_size(moment.limit_bytes)}, "
                f"and the plan needs {format_size(self._reserved_bytes)}"
            )
        elif moment.peak_reserved_bytes > self._reserved_bytes + _SEGMENT_BYTES:
            excess = moment.peak_reserved_bytes - self._reserved_bytes
            yield f"no more is allocated than planned: the allocator holds {format_size(excess)} more in unused pieces"
        else:
            yield "no more is allocated than planned"

    def _batch(self) -> Iterator[str]:
        """Yields a sentence on the size of the batch, if the tensors of the step show it."""
        assert self._plan is not None
        scale, workload = self._contents.scale, self._plan.workload
        if scale is None or abs(scale - 1) < 0.005:
            return
        ways = []
        if workload.seq_len and abs(tokens := scale * workload.seq_len) and abs(tokens - round(tokens)) < 0.2:
            ways.append(f"samples of {counted(round(tokens), 'token')} instead of the {workload.seq_len} of the plan")
        samples = scale * workload.batch_size
        if abs(samples - round(samples)) < 0.05:
            ways.append(f"{counted(round(samples), 'sample')} instead of the {workload.batch_size} of the plan")
        precision = self._plan.decision(Precision)
        if precision is not None and abs(scale - 2) < 0.01:
            ways.append(f"float32 instead of the {precision.dtype} of the plan")
        longer = "longer" if workload.seq_len else "larger"
        cause = " or ".join(ways) if ways else f"a {longer} batch than planned"
        yield f"tensors of the step are {scale:.2f} times as large as those of the plan, as for {cause}"


def _outside_bytes(plan: Plan) -> int:
    """Returns the memory of the planned process outside of the caching allocator."""
    return sum(plan.peak.breakdown.get(category, 0) for category in (Category.CONTEXT, Category.NCCL))
